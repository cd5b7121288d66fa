"""Generators that take part while others are lost; they are no processes here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl import replicas as module
from monarch_rl.config import Config
from monarch_rl.replicas import Replicas
from tests.replies import Reply


class Generator:
    """What it was asked, and what it answers."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[Any]] = {}
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        for name in ("start", "follow", "ready", "pin", "unpin"):
            self.answers[name] = asyncio.get_running_loop().create_future()
            setattr(self, name, SimpleNamespace(call_one=self._endpoint(name)))

    def slice(self, tp: int) -> Generator:
        return self

    def spawn(self, *_: Any) -> Generator:
        return self

    def _endpoint(self, name: str) -> Any:
        def call_one(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return Reply(self.answers[name])

        return call_one

    def told(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for asked, arguments in self.asked if asked == name]


class Meshes:
    def __init__(self) -> None:
        self.generators: dict[int, Generator] = {}

    def spawn_generator(self, number: int) -> Generator:
        self.generators[number] = Generator()
        return self.generators[number]

    async def alive(self, who: str, waited: Any) -> Any:
        return await waited


async def _each(ask: Any, who: str) -> None:
    pass


def make(tasks: asyncio.TaskGroup) -> tuple[Replicas, Meshes]:
    meshes: Any = Meshes()
    replicas = Replicas(Config(), meshes, SimpleNamespace(), print)  # type: ignore[arg-type]
    replicas._tasks, replicas._source = tasks, ("old",)  # type: ignore[assignment]
    replicas._rollouts = SimpleNamespace(each=_each)  # type: ignore[assignment]
    return replicas, meshes


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("holding", [False, True])
async def test_a_replacement_waits_for_trainers_that_start_again_before_it_is_used(holding: bool) -> None:
    """Requests that were sent to it meanwhile would wait there, where others could serve them."""
    async with asyncio.TaskGroup() as tasks:
        replicas, meshes = make(tasks)
        replicas._holding = holding
        replicas.pool.spawn(1)
        one = meshes.generators[0]
        adding = asyncio.create_task(replicas.ready(0, replicas.live[0]))
        one.answers["start"].set_result(SimpleNamespace(digest="plan"))
        one.answers["follow"].set_result(None)  # there is nobody to pull from
        await settled()
        assert one.told("follow") == [("old",)]
        assert not adding.done()
        replicas.renew(("new",))  # type: ignore[arg-type]
        await settled()
        assert one.told("follow") == [("old",), ("new",)]
        one.answers["ready"].set_result(None)
        await asyncio.wait_for(adding, 10)


async def test_a_pinned_evaluation_waits_for_a_generator_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is lost, and what was to take its place could not be started."""
    monkeypatch.setattr(module, "BACK_OFF_S", 0.01)
    async with asyncio.TaskGroup() as tasks:
        replicas, meshes = make(tasks)

        async def pinned() -> int:
            async with replicas.pinned(3) as number:
                return number

        evaluating = tasks.create_task(pinned())
        await asyncio.sleep(0.05)
        replicas.pool.spawn(1)
        meshes.generators[0].answers["pin"].set_result(3)
        meshes.generators[0].answers["unpin"].set_result(None)
        assert await asyncio.wait_for(evaluating, 10) == 0
        meshes.generators[0].answers["start"].set_result(None)
