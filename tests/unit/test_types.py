"""The nouns as they pass between processes."""

from __future__ import annotations

import copy
import pickle

import numpy as np

from monarch_rl.configure import load
from monarch_rl.types import Episode, Generation, Sampling


def test_generations_and_episodes_survive_pickling() -> None:
    ids_T, logprobs_T, versions_T = np.array([3, 1], np.int32), np.array([-0.5, -1.0], np.float32), np.array([1 << 32, 5], np.int64)
    generation = Generation(ids_T, logprobs_T, versions_T, "length", replica=1)
    episode = Episode(
        ids_T, np.array([False, True]), logprobs_T, versions_T, "text", None, "late", True, turn_tokens=[1, 0], turn_rewards=[0.5, 0.0]
    )
    for original in (generation, episode):
        for made in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
            assert type(made) is type(original)
            for name in type(original).__slots__:
                ours, theirs = getattr(original, name), getattr(made, name)
                np.testing.assert_array_equal(ours, theirs)
                assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
            made.ids_T[0] = 7
    assert ids_T[0] == 3


def test_what_ends_a_turn_is_the_models_own_and_what_the_configuration_adds() -> None:
    generator = load(
        ["recipe=grpo_qwen", "profile=cpu", "generator.stop=['\\n\\n', </answer>]", "generator.stop_ids=[7, 8]"]
    ).config.generator
    sampling = Sampling.of(generator, stop_ids=(1,))
    assert (sampling.stop_ids, sampling.stop) == ((1, 7, 8), ("\\n\\n", "</answer>"))


def test_an_empty_generation_survives_pickling() -> None:
    empty = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64), "abort")
    made = pickle.loads(pickle.dumps(empty))
    assert (made.ids_T.dtype, made.ids_T.shape, made.finish_reason) == (np.int32, (0,), "abort")
