"""Which processes wait for the place of a lost generator, and which of them take it; they are no processes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from monarch_rl import replicas
from monarch_rl.config import Config
from monarch_rl.replicas import Replicas
from tests.replies import Reply, replied


class Mesh:
    """Of one generator; remembers what it was asked."""

    def __init__(self, asked: list[str], number: int) -> None:
        self._asked, self._number = asked, number

    def spawn(self, name: str, *_: Any) -> Any:
        return SimpleNamespace(start=self._endpoint("start"), warm_up=self._endpoint("warm up"), slice=lambda tp: SimpleNamespace())

    def _endpoint(self, what: str) -> Any:
        def call() -> Reply:
            self._asked.append(f"{what} {self._number}")
            return replied()

        return SimpleNamespace(call=call, call_one=call)


class Meshes:
    """Of generators."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked
        self._made: dict[str, Mesh] = {}
        self.deaths: dict[str, asyncio.Future[str]] = {}

    def __getitem__(self, name: str) -> Mesh:
        return self._made[name]

    def spawn_generator(self, number: int) -> Mesh:
        self._made[f"generator_{number}"] = Mesh(self._asked, number)
        return self._made[f"generator_{number}"]

    def leave(self, name: str) -> asyncio.Future[str]:
        return self.deaths.setdefault(name, asyncio.get_running_loop().create_future())

    async def renew(self, name: str) -> None:
        self._asked.append(f"renew {name}")

    def heed(self, name: str) -> asyncio.Future[str]:
        del self.deaths[name]
        return self.leave(name)


class Rig:
    """One generator that works, and a spare."""

    def __init__(self) -> None:
        self.asked, self.said = list[str](), list[str]()
        self.meshes: Any = Meshes(self.asked)
        config = Config()
        config.generator.spares, config.generator.max_restarts = 1, 2
        self.replicas = Replicas(config, self.meshes, SimpleNamespace(), self.said.append)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[Any]] = []
        self.replicas._tasks = SimpleNamespace(create_task=self._task)  # type: ignore[assignment]
        self.replicas._rollouts = SimpleNamespace(tell=lambda ask: None)  # type: ignore[assignment]
        self.join()

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))

    def join(self) -> int:
        (number,) = self.replicas.pool.spawn(1)
        self.replicas.joins(number, self.replicas.live[number])
        self.replicas.joins(number, self.replicas.live[number])
        return number

    async def until(self, asked: list[str]) -> None:
        async with asyncio.timeout(60):
            while self.asked != asked:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(replicas, "BACK_OFF_S", 0.01)
    made = Rig()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_a_spare_takes_the_next_place_and_another_waits(rig: Rig) -> None:
    await rig.until(["start 0", "warm up 1"])
    assert list(rig.meshes.deaths) == ["generator_1"], "the death of a spare ends nothing"
    assert rig.join() == 1
    await rig.until(["start 0", "warm up 1", "start 1", "warm up 2"])


async def test_a_spare_that_dies_is_started_again_as_often_as_a_generator_may_be(rig: Rig) -> None:
    heard = ["start 0", "warm up 1"]
    for _ in range(2):
        await rig.until(heard)
        rig.meshes.deaths["generator_1"].set_result("generator 1 was killed")
        heard += ["renew generator_1", "warm up 1"]
    await rig.until(heard)
    assert rig.said == ["generator 1 was killed; another spare takes its place"] * 2
    rig.meshes.deaths["generator_1"].set_result("generator 1 was killed")
    await asyncio.sleep(0.1)
    assert rig.asked == heard
    assert rig.join() == 1, "which the pool finds dead, and replaces"


async def test_a_spare_that_was_taken_is_the_pools(rig: Rig) -> None:
    await rig.until(["start 0", "warm up 1"])
    rig.join()
    heard = ["start 0", "warm up 1", "start 1", "warm up 2"]
    await rig.until(heard)
    rig.meshes.deaths["generator_1"].set_result("generator 1 was killed")
    await asyncio.sleep(0.1)
    assert rig.asked == heard
