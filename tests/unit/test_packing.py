"""Micro-batches and their arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from monarch_rl.packing import collate, pack, token_ages, trained_mask
from monarch_rl.types import NOT_SAMPLED, Episode, Version


def padded(lengths: list[int], microbatch: list[int]) -> int:
    return len(microbatch) * max((lengths[i] for i in microbatch), default=0)


def default_job_lengths(seed: int) -> list[int]:
    """256 episodes of the default task: direct answers and scratchpads."""
    draw = random.Random(seed)
    return [draw.randint(4, 30) + (draw.randint(3, 10) if draw.random() < 0.5 else draw.randint(10, 60)) for _ in range(256)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_pack_places_each_row_once_under_the_budget(ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 7, 30, 200, 900]) for _ in range(draw.randint(0, 60))]
    packed = pack(lengths, ranks, budget=500)
    assert sorted(i for rank in packed for microbatch in rank for i in microbatch) == list(range(len(lengths)))
    assert len({len(rank) for rank in packed}) == 1
    assert len(packed) == ranks
    assert len(packed[0]) >= 1
    assert all(padded(lengths, m) <= 500 or len(m) == 1 for rank in packed for m in rank)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_pack_pads_little_and_loads_ranks_alike_on_the_default_job(ranks: int, seed: int) -> None:
    lengths = default_job_lengths(seed)
    packed = pack(lengths, ranks, budget=4096)
    loads = [sum(padded(lengths, m) for m in rank) for rank in packed]
    assert 1 - sum(lengths) / sum(loads) < 0.10
    assert max(loads) <= 1.1 * min(loads)
    assert packed == pack(list(lengths), ranks, budget=4096)


def test_pack_gives_a_row_beyond_the_budget_its_own_microbatch() -> None:
    assert [600] in [[(5, 5, 600, 5)[i] for i in m] for m in pack([5, 5, 600, 5], 1, budget=100)[0]]


def test_pack_without_rows_gives_each_rank_one_empty_microbatch() -> None:
    assert pack([], 2, budget=10) == [[[]], [[]]]


def test_pack_spreads_few_rows_over_all_ranks() -> None:
    assert all(any(rank) for rank in pack([10] * 4, 4, budget=4096))


def make(ids: list[int], sampled: list[bool], logprobs: list[float] | None = None, reward: float | None = 1.0) -> Episode:
    mask_T = np.array(sampled)
    return Episode(
        ids_T=np.array(ids, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.array(logprobs or [-1.0] * len(ids), np.float32),
        versions_T=np.where(mask_T, Version(0, 3).pack(), NOT_SAMPLED),
        reward=reward,
    )


def test_collate_lines_targets_up_with_the_positions_that_predict_them() -> None:
    batch = collate([make([5, 6, 7, 8], [False, False, True, True], [0, 0, -0.5, -0.25]), make([3, 9], [False, True], [0, -2])])
    np.testing.assert_array_equal(batch.inputs_BT, [[5, 6, 7], [3, 9, 0]])
    assert batch.inputs_BT.flatten()[batch.positions_N].tolist() == [6, 7, 3]
    assert batch.targets_N.tolist() == [7, 8, 9]
    assert batch.rows_N.tolist() == [0, 0, 1]
    assert batch.logprobs_N.tolist() == [-0.5, -0.25, -2]
    assert batch.versions_N.tolist() == [3, 3, 3]
    assert batch.tokens == 4


def test_end_token_is_trained_though_it_equals_the_padding() -> None:
    """Case 59: pad = end = 0; the sampled end token is trained, padding is not."""
    batch = collate([make([4, 7, 0], [False, True, True]), make([4, 4, 4, 4, 0], [False, False, False, True, True])])
    assert batch.targets_N.tolist() == [7, 0, 4, 0]


def test_every_turn_of_a_trajectory_is_trained() -> None:
    """Case 54: sampled tokens of all turns, not only the last, carry the episode's row."""
    batch = collate([make([1, 2, 3, 4, 5, 6], [False, True, False, True, False, True])])
    assert batch.targets_N.tolist() == [2, 4, 6]


def test_tokens_know_their_turns() -> None:
    """A turn that is empty counts, and so does one that follows at once on the one before."""
    talk = make([1, 2, 3, 4, 5, 6, 7], [False, True, True, False, True, True, True])
    talk.turn_tokens = [2, 0, 1, 2]
    assert collate([make([1, 2], [False, True]), talk]).turns_N.tolist() == [0, 0, 0, 2, 3, 3]


def test_unusable_tokens_leave_the_batch() -> None:
    """Cases 46, 51: not sampled, without a finite logprob, or of an unscorable episode."""
    odd = make([1, 2, 3, 4], [False, True, True, True], [0, np.nan, -1, -np.inf])
    assert trained_mask(odd).tolist() == [False, False, True, False]
    assert collate([odd]).targets_N.tolist() == [3]
    for reward in (None, float("nan"), float("inf")):
        assert not trained_mask(make([1, 2], [False, True], reward=reward)).any()


def test_collate_of_nothing_is_one_row_of_padding() -> None:
    batch = collate([])
    assert batch.inputs_BT.shape == (1, 1)
    assert (batch.tokens, batch.targets_N.size) == (0, 0)


def test_an_episode_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        collate([make([1, 2], [True, True])])


def test_ages() -> None:
    packed = np.array([v.pack() for v in (Version(1, 9), Version(1, 7), Version(0, 9), Version(0, 30), Version(0, 2))])
    assert token_ages(packed, step=10, lineage=1).tolist() == [0, 2, 1, 1, 7]


@pytest.mark.parametrize("version", [Version(1, 10), Version(2, 0)])
def test_a_token_from_the_future_is_refused(version: Version) -> None:
    with pytest.raises(ValueError, match=f"version {version}"):
        token_ages(np.array([Version(1, 0).pack(), version.pack()]), step=10, lineage=1)
