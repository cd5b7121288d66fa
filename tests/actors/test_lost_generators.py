"""A replica is killed in the middle of long episodes, and another goes on with them: real engines, and transformers as the judge."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monarch.actor
import numpy as np
import pytest
import pytest_asyncio
from monarch.actor import this_host
from transformers import AutoModelForCausalLM

from actors.metrics import Metrics
from actors.streams import Streams
from monarch_rl.calls import Calls
from monarch_rl.configure import load
from monarch_rl.routes import Routes
from monarch_rl.types import MASK, ROUTING, Generation, Sampling, Version
from tests.actors.lost_generators import HeldGenerator
from tests.engines import episodes_of, gaps
from tests.random_models import VOCABULARY, write_model

pytestmark = pytest.mark.timeout(300)

BURST, BUDGET, DIES_AFTER = 16, 90, 40
PROMPT = [5, 6, 7]
SEEDS = [1, 2, 3, 4]
DOOMED, HEIR = Version(0, 3), Version(0, 4)


@pytest_asyncio.fixture
async def generators(tmp_path: Path) -> AsyncIterator[list[Any]]:
    """Two of a mixture of experts, with the same weights under two versions; each with its process id."""
    monarch.actor.unhandled_fault_hook = lambda failure: None  # for good: Monarch may tell of a death when the test is over
    model = write_model(tmp_path / "qwen3_moe", "qwen3_moe")
    keys = [f"model.path={model}", "generator.top_p=0.9", "generator.temperature=0.7", f"generator.burst_tokens={BURST}"]
    config = load(["recipe=grpo_qwen", "profile=cpu", *keys]).config
    meshes = [this_host().spawn_procs({"proc": 1}) for _ in range(3)]
    metrics = meshes[2].spawn("metrics", Metrics)
    spawned = [meshes[number].spawn(f"generator_{number}", HeldGenerator, config, number, metrics) for number in (0, 1)]
    await asyncio.gather(*[generator.start.call_one().as_asyncio() for generator in spawned])
    pids = [await generator.load.call_one(model, version.step) for generator, version in zip(spawned, (DOOMED, HEIR), strict=True)]
    yield [SimpleNamespace(actor=generator, pid=pid) for generator, pid in zip(spawned, pids, strict=True)]
    for mesh in meshes:
        await mesh.stop()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def sampled(pieces: list[Generation]) -> list[int]:
    return [int(id) for piece in pieces for id in piece.ids_T]


def ends_one(generations: list[Generation]) -> tuple[int, int]:
    """(episode, an id that comes within its first burst), and in none of the others before the replica dies."""
    for index, generation in enumerate(generations):
        others = {int(id) for other in generations if other is not generation for id in other.ids_T[:DIES_AFTER]}
        for id in generation.ids_T[1:BURST].tolist():
            if id not in others:
                return index, id
    raise AssertionError("no such id")


async def test_episodes_go_on_from_what_a_killed_replica_has_streamed(generators: list[Any], tmp_path: Path) -> None:
    """Less than a burst of each running episode is lost; one that had ended is kept; ratio 1 across the joint, masks and experts too."""
    doomed, heir = generators
    sampling = Sampling(BUDGET, 0.7, top_p=0.9)
    undisturbed = await heir.actor.generate.call_one(PROMPT, sampling, SEEDS, 0)
    ended, stop_id = ends_one(undisturbed)
    sampling = Sampling(BUDGET, 0.7, top_p=0.9, stop_ids=(stop_id,))
    routes = Routes({0: doomed.actor})
    streams = Streams(routes, Calls(), "rollout 0", BURST)
    await doomed.actor.hold_after.call_one(DIES_AFTER)
    asked = asyncio.create_task(streams.generate(PROMPT, sampling, SEEDS, DOOMED.step))
    await until(lambda: bool(streams._begun))
    (streamed,) = streams._begun.values()
    await asyncio.wait_for(doomed.actor.held.call_one().as_asyncio(), 60)
    running = [index for index in range(len(SEEDS)) if index != ended]
    kept = DIES_AFTER // BURST * BURST
    await until(lambda: all(len(sampled(streamed[index])) >= kept for index in running))
    os.kill(doomed.pid, signal.SIGKILL)
    routes.add(1, heir.actor)
    routes.lose(0)  # as the controller tells
    generations = await asyncio.wait_for(asked, 60)

    assert 0 < DIES_AFTER - kept < BURST, "so many tokens of each running episode are lost"
    assert generations[ended].finish_reason == "stop"
    assert generations[ended].replica == 0
    assert generations[ended].ids_T.tolist() == undisturbed[ended].ids_T.tolist()[: len(generations[ended].ids_T)]
    assert generations[ended].ids_T[-1] == stop_id
    for index in running:
        one, told = generations[index], streamed[index]
        assert [len(piece.ids_T) for piece in told] == [BURST] * (DIES_AFTER // BURST)
        assert one.ids_T[:kept].tolist() == sampled(told) == undisturbed[index].ids_T[:kept].tolist()
        assert one.replica == 1
        assert (one.finish_reason == "length") == (len(one.ids_T) == BUDGET)
        assert one.versions_T.tolist() == [DOOMED.pack()] * kept + [HEIR.pack()] * (len(one.ids_T) - kept)
        assert len(one.ids_T) > kept
    episodes = episodes_of([PROMPT] * len(SEEDS), generations, 0.7)
    assert all({len(channel) for channel in e.channels.values()} == {len(e.ids_T)} and len(e.channels) == 2 for e in episodes)
    assert all(np.diff(e.channels[MASK].offsets)[e.loss_mask_T].max() < VOCABULARY for e in episodes)
    assert all(e.channels[ROUTING].values[:-1].any((1, 2)).all() for e in episodes)
    system = SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3_moe").eval())
    assert gaps(system, episodes).max() <= 1e-4
