"""What travels with tokens, from a real vLLM engine to the trainer's forward pass: sampling masks, and the experts of a mixture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from monarch_rl.engine import Engine, EngineError
from monarch_rl.models import PolicyModel, on_device
from monarch_rl.packing import collate
from monarch_rl.trajectory import Trajectory
from monarch_rl.types import MASK, ROUTING, Episode, Generation, Rows, Sampling
from tests.engines import System, started, tokens
from tests.random_models import VOCABULARY, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOKENS = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen3_untied", "qwen3_moe"])
async def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    path = write_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    system = await started(path, keep_masks=True, keep_routing=True)
    await system.publish()
    yield system
    await system.engine.close()


def episodes_of(prompts: Sequence[list[int]], generations: Sequence[Generation], temperature: float) -> list[Episode]:
    made = []
    for prompt, generation in zip(prompts, generations, strict=True):
        trajectory = Trajectory(prompt)
        trajectory.append_sampled(generation, "")
        made.append(trajectory.episode("", temperature))
        made[-1].reward = 1.0
    return made


@torch.no_grad()
def gaps(system: System, episodes: Sequence[Episode], but: Sequence[str] = ()) -> Tensor:
    """[tokens] |Δ log-probability|, engine against the trainer's forward pass without some of the channels."""
    batch = collate(episodes)
    channels = {name: channel for name, channel in batch.channels.items() if name not in but}
    model = PolicyModel(system.model, logprob_chunk=64)
    arrays = (batch.inputs_BT, batch.positions_N, batch.targets_N, batch.temperatures_N)
    logprobs_N, _ = model(*map(torch.from_numpy, arrays), on_device(channels, torch.device("cpu")))
    return (logprobs_N - torch.from_numpy(batch.logprobs_N)).abs()


CASES = [
    Sampling(TOKENS),
    Sampling(TOKENS, 0.7),
    Sampling(TOKENS, top_p=0.8),
    Sampling(TOKENS, 0.7, top_p=0.9, top_k=12),
    Sampling(TOKENS, min_p=0.1),
    Sampling(TOKENS, 1.3, top_k=5, min_p=0.05),
]


@pytest.mark.parametrize("sampling", CASES, ids=str)
async def test_at_zero_lag_the_ratio_is_1(system: System, sampling: Sampling) -> None:
    prompts = system.prompts(16)
    episodes = episodes_of(prompts, await system.generate(prompts, sampling), sampling.temperature)
    found = gaps(system, episodes)
    assert len(found) == 16 * TOKENS
    assert found.max() <= 1e-4
    assert found.mean() <= 2e-6
    lengths = np.concatenate([np.diff(e.channels[MASK].offsets)[e.loss_mask_T] for e in episodes])
    if sampling.truncates:
        assert 1 <= lengths.mean() < 0.8 * VOCABULARY
        assert gaps(system, episodes, but=[MASK]).max() > 0.1
    else:
        assert not lengths.any()


async def test_requests_of_one_batch_are_masked_each_in_its_way(system: System) -> None:
    prompts = system.prompts(18)
    samplings = [*CASES, Sampling(TOKENS, temperature=0.0)] * 2
    sent = zip(prompts, samplings, strict=False)
    generations = await asyncio.gather(*[system.engine.generate(ids, sampling, seed) for seed, (ids, sampling) in enumerate(sent)])
    for prompt, sampling, generation in zip(prompts, samplings, generations, strict=False):
        mask = generation.channels[MASK]
        assert (len(mask), mask.start) == (TOKENS, len(prompt))
        assert bool(np.diff(mask.offsets).all()) == sampling.truncates
        if sampling.top_k:
            assert np.diff(mask.offsets).max() <= sampling.top_k
        if sampling.temperature:
            assert gaps(system, episodes_of([prompt], [generation], sampling.temperature)).max() <= 1e-4
