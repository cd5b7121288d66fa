"""Case 52 over ranks: two and three FSDP2 ranks (processes, gloo), one of them without work, give the gradient of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from monarch_rl.learner import Learner
from monarch_rl.types import Shard
from tests.batches import shards
from tests.cuts import LIMITS, QUICK, STEP, Case, cases, gradient, learner

pytestmark = pytest.mark.timeout(400)  # a busy machine starts the processes slowly

WORLD = 3
PATIENCE_S = 300


def work(place: int, folder: str, pipe: Connection) -> None:
    """One rank: answers (ranks, dtype, shards, config) with the gradient; None ends it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=place, world_size=WORLD)
    meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in (2, 3)}
    learners = {(n, dtype): learner(mesh, dtype) for n, mesh in meshes.items() if place < n for dtype in LIMITS}
    while (asked := pipe.recv()) is not None:
        ranks, dtype, dealt, config = asked
        if place < ranks:
            pipe.send(gradient(learners[ranks, dtype], dealt[place], config))
    dist.destroy_process_group()


class Ranks:
    """The processes, as seen by the test."""

    def __init__(self, folder: Path) -> None:
        spawn = get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(WORLD)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [spawn.Process(target=work, args=(n, str(folder), theirs), daemon=True) for n, (_, theirs) in enumerate(pairs)]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # or the end of a process would not be noticed

    def gradient(self, dtype: torch.dtype, dealt: list[Shard], config: dict[str, Any]) -> Tensor:
        for pipe in self._pipes:
            pipe.send((len(dealt), dtype, dealt, config))
        results = []
        for place in range(len(dealt)):
            assert self._pipes[place].poll(PATIENCE_S), f"rank {place} of {len(dealt)} gives no answer"
            results.append(self._pipes[place].recv())
        assert all(torch.equal(result, results[0]) for result in results)
        return results[0]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Iterator[dict[torch.dtype, Learner]]:
    """A single rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield {dtype: learner(mesh, dtype) for dtype in LIMITS}
    dist.destroy_process_group()


def with_an_idle_rank(dealt: list[Shard]) -> list[Shard]:
    return [*dealt, replace(dealt[0], episodes=[], places=[], microbatches=[[] for _ in dealt[0].microbatches])]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_gradient_does_not_depend_on_the_ranks(ranks: Ranks, alone: dict[torch.dtype, Learner], dtype: torch.dtype) -> None:
    @settings(QUICK, max_examples=4)
    @given(case=cases())
    def holds(case: Case) -> None:
        (whole,) = shards(case.groups, budget=40, step=STEP)
        expected = gradient(alone[dtype], whole, case.config)
        limit = LIMITS[expected.dtype] * expected.norm()
        two, three = (shards(case.groups, n, budget=40, step=STEP) for n in (2, 3))
        for dealt in (two, three, with_an_idle_rank([whole]), with_an_idle_rank(two)):
            assert (ranks.gradient(dtype, dealt, case.config) - expected).norm() <= limit

    holds()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_ranks_with_nothing_to_train_give_exactly_zero(ranks: Ranks, dtype: torch.dtype) -> None:
    @settings(QUICK, max_examples=2)
    @given(case=cases())
    def holds(case: Case) -> None:
        for episode in (episode for group in case.groups for episode in group):
            episode.reward = None
        for n in (2, 3):
            assert not ranks.gradient(dtype, shards(case.groups, n, budget=40, step=STEP), case.config).any()

    holds()
