"""What travels with tokens, from a real vLLM engine to the trainer's forward pass: sampling masks, and the experts of a mixture."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import OlmoeConfig

from monarch_rl.engine import Engine, EngineError
from monarch_rl.engine_bursts import Burst
from monarch_rl.packing import collate
from monarch_rl.tasks.tiny import tiny_path
from monarch_rl.trajectory import Trajectory, spliced
from monarch_rl.types import MASK, ROUTING, Sampling
from tests.engines import System, episodes_of, gaps, held_after, started
from tests.random_models import VOCABULARY, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOKENS = 40
BURST = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tiny", "qwen3_moe"])
async def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    path = tiny_path() if request.param == "tiny" else write_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    system = await started(path, keep_masks=True, keep_routing=True, burst_tokens=BURST)
    await system.publish()
    yield system
    await system.engine.close()


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
    samplings = [*CASES, Sampling(2 * TOKENS, temperature=0.0)] * 2  # which is alone in the end
    sent = zip(prompts, samplings, strict=False)
    generations = await asyncio.gather(*[system.engine.generate(ids, sampling, seed) for seed, (ids, sampling) in enumerate(sent)])
    for prompt, sampling, generation in zip(prompts, samplings, generations, strict=False):
        mask = generation.channels[MASK]
        assert (len(mask), mask.start) == (sampling.max_new_tokens, len(prompt))
        assert bool(np.diff(mask.offsets).all()) == sampling.truncates
        if sampling.top_k:
            assert np.diff(mask.offsets).max() <= sampling.top_k
        if sampling.temperature:
            assert gaps(system, episodes_of([prompt], [generation], sampling.temperature)).max() <= 1e-4


async def test_the_experts_are_those_of_transformers_and_make_a_difference(system: System) -> None:
    """Prompts of one long prefix: nothing is read from the prefix cache, so that each position has its experts."""
    shared = system.prompts(1)[0][:1] * 70
    prompts = [shared + prompt for prompt in system.prompts(6, 20)]
    for _ in range(2):
        episodes = episodes_of(prompts, await system.generate(prompts, Sampling(TOKENS)), 1.0)
    if system.model.config.model_type != "qwen3_moe":
        assert not any(ROUTING in e.channels for e in episodes)
        return
    for episode in episodes:
        rows = episode.channels[ROUTING].values
        assert rows.shape == (len(episode.ids_T), 2, 2)
        assert rows.dtype == np.uint8
        ids = torch.from_numpy(episode.ids_T[None].astype(np.int64))
        with torch.no_grad():
            logits = system.model(ids, output_router_logits=True).router_logits
        own = torch.stack([layer.topk(2, -1).indices for layer in logits], 1).numpy()
        assert (np.sort(rows, -1)[:-1] == np.sort(own, -1)[:-1]).mean() >= 0.999  # two experts may tie up to rounding
    assert gaps(system, episodes).max() <= 1e-4
    for episode in episodes:
        episode.channels[ROUTING].values[:] = (episode.channels[ROUTING].values + 1) % 5
    assert gaps(system, episodes).max() > 0.1


async def test_turns_and_what_is_continued_after_an_abort(system: System) -> None:
    """Lengths stay equal, the ratio stays 1."""
    sampling = Sampling(TOKENS, 0.7, top_p=0.9, top_k=12)
    trajectory = Trajectory([5, 6, 7])
    request = asyncio.ensure_future(system.engine.generate(trajectory.ids, sampling, 1, request_id="first"))
    async with held_after(system.engine, 3):
        abort = asyncio.ensure_future(system.engine.abort("first"))
    await abort
    trajectory.append_sampled(await request, "")
    trajectory.append_sampled(await system.engine.generate(trajectory.ids, sampling, 2), "")
    told = [8] * 40
    trajectory.append_sampled(await system.engine.generate(trajectory.ids + told, sampling, 3), "")
    with pytest.raises(ValueError, match="rows for"):
        trajectory.episode("", 0.7)  # what was told is missing, so that rows are of other tokens
    trajectory = told_between(trajectory, told)
    episode = trajectory.episode("", 0.7)
    episode.reward = 1.0
    assert {len(channel) for channel in episode.channels.values()} == {len(episode.ids_T)}
    assert 2 * TOKENS < episode.sampled_tokens < 3 * TOKENS
    assert gaps(system, [episode]).max() <= 1e-4


async def test_bursts_are_the_beginning_of_what_is_answered(system: System) -> None:
    """Everything that travels with tokens does so in bursts too, over a swap; requests that end before the first have none."""
    sampling = Sampling(2 * TOKENS, 0.7, top_p=0.9, top_k=12)
    prompt, bursts = [5, 6, 7], list[Burst]()
    old_version = system.engine.version
    asked = asyncio.ensure_future(system.engine.generate_group(prompt, sampling, [1, 2], bursts.append))
    async with held_after(system.engine, 2 * 20):
        swap = asyncio.ensure_future(system.publish())
    await swap
    generations = await asked
    assert [[(index, len(piece.ids_T)) for index, piece in burst] for burst in bursts] == [[(0, BURST), (1, BURST)]] * 4
    for index, generation in enumerate(generations):
        pieces = [burst[index][1] for burst in bursts]
        begun = spliced(pieces)
        assert begun.finish_reason == "abort"
        assert old_version is not None
        assert {old_version.pack(), system.engine.version.pack()} == set(begun.versions_T.tolist())
        for name in ("ids_T", "logprobs_T", "versions_T"):
            assert getattr(begun, name).tolist() == getattr(generation, name)[: 4 * BURST].tolist()
        assert begun.channels.keys() == generation.channels.keys()
        for name, rows in begun.channels.items():
            whole = generation.channels[name]
            assert (rows.start, rows.end) == (whole.start, len(prompt) + 4 * BURST - (name == ROUTING))
            assert rows.values.tolist() == whole.values[: len(rows.values)].tolist()
            assert rows.offsets is None or rows.offsets.tolist() == whole.offsets[: len(rows.offsets)].tolist()
    bursts.clear()
    await system.engine.generate_group(prompt, Sampling(BURST), [1, 2], bursts.append)
    await system.engine.abort("nothing: only returns when the engine has passed this point")
    assert not bursts


def told_between(trajectory: Trajectory, told: list[int]) -> Trajectory:
    """The same with what was told before the last turn."""
    parts = trajectory._parts
    made = Trajectory(parts[0].ids_T.tolist())
    for part in parts[1:-1]:
        made.append_sampled(part, "")
    made.append_told(told)
    made.append_sampled(parts[-1], "")
    return made


async def test_a_swap_in_flight_leaves_channels_with_their_tokens(system: System) -> None:
    """Tokens before it are those of the old weights, with their masks and experts; after it each has one row as well."""
    prompts = system.prompts(8)
    sampling = Sampling(80, 0.7, top_p=0.9, top_k=12)
    assert system.engine.version is not None
    old_version = system.engine.version.pack()
    running = asyncio.ensure_future(system.generate(prompts, sampling))
    async with held_after(system.engine, 8 * 20):
        old = system.train()
        swap = asyncio.ensure_future(system.publish())
    await swap
    episodes = episodes_of(prompts, await running, 0.7)
    assert all(0 < (e.versions_T == old_version).sum() < 80 for e in episodes)
    for episode in episodes:
        assert {len(channel) for channel in episode.channels.values()} == {len(episode.ids_T)}
        assert np.diff(episode.channels[MASK].offsets)[episode.loss_mask_T].all()
    collate(episodes)  # each token is among those that could be drawn
    before = copy.deepcopy(episodes)
    for episode in before:
        episode.loss_mask_T &= episode.versions_T == old_version
        episode.turn_tokens = []
    new, system.model = system.model, old
    found = gaps(system, before)
    system.model = new
    assert found.max() <= 1e-4


async def test_requests_that_are_put_back_keep_their_channels(tmp_path: Path) -> None:
    """Too little memory for keys and values: prompts and tokens are read again."""
    tight = await started(write_model(tmp_path / "moe", "qwen3_moe"), kv_bytes=512 << 10, keep_masks=True, keep_routing=True)
    await tight.publish()
    sampling = Sampling(120, top_k=12)
    prompts = tight.prompts(48)
    episodes = episodes_of(prompts, await tight.generate(prompts, sampling), 1.0)
    steps = tight.engine.stats().steps
    await tight.engine.close()
    assert steps > 1.5 * 120
    assert gaps(tight, episodes).max() <= 1e-4


async def test_in_bfloat16_the_experts_would_else_be_others(tmp_path: Path) -> None:
    """What routing is kept for: rounding turns the choice of experts, and a token's log-probability with it."""
    system = await started(write_model(tmp_path / "moe", "qwen3_moe"), dtype="bfloat16", keep_routing=True)
    await system.publish()
    prompts = system.prompts(32)
    episodes = episodes_of(prompts, await system.generate(prompts, Sampling(64)), 1.0)
    await system.engine.close()
    system.model.to(torch.bfloat16)
    assert gaps(system, episodes).mean() <= 0.05
    assert gaps(system, episodes, but=[ROUTING]).max() > 2 * gaps(system, episodes).max()


async def test_the_routing_of_another_mixture_is_refused(tmp_path: Path) -> None:
    OlmoeConfig(num_experts=4).save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), "float32", seed=0, overrides={}, keep_routing=True)
    with pytest.raises(EngineError, match=r"^generator\.keep_routing: .* olmoe models, only of qwen3_moe; generator\.keep_routing=false"):
        await engine.start()
