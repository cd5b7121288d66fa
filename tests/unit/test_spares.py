"""Which processes wait for the place of a lost generator, and which of them take it; they are no processes here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from monarch_rl.config import Config
from monarch_rl.replicas import Replicas


class Reply:
    def as_asyncio(self) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Mesh:
    """Of one generator; remembers what it was asked."""

    def __init__(self, asked: list[str], number: int) -> None:
        self._asked, self._number = asked, number

    def spawn(self, name: str, *_: Any) -> Any:
        return SimpleNamespace(start=self._endpoint("start"), warm_up=self._endpoint("warm up"), slice=lambda tp: SimpleNamespace())

    def _endpoint(self, what: str) -> Any:
        def call() -> Reply:
            self._asked.append(f"{what} {self._number}")
            return Reply()

        return SimpleNamespace(call=call, call_one=call)


async def test_a_spare_takes_the_next_place_and_another_waits() -> None:
    asked: list[str] = []
    left: list[str] = []
    config = Config()
    config.generator.spares = 1
    meshes: Any = SimpleNamespace(spawn_generator=lambda number: Mesh(asked, number), leave=left.append)
    replicas = Replicas(config, meshes, SimpleNamespace(), print)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        replicas._tasks, replicas._rollouts = tasks, SimpleNamespace(tell=lambda ask: None)  # type: ignore[assignment]
        (first,) = replicas.pool.spawn(1)
        replicas.joins(first, replicas.live[first])
        await asyncio.sleep(0)
        assert asked == ["start 0", "warm up 1"]
        assert left == ["generator_1"], "the death of a spare ends nothing"
        replicas.joins(first, replicas.live[first])
        (second,) = replicas.pool.spawn(1)
        replicas.joins(second, replicas.live[second])
        await asyncio.sleep(0)
    assert asked == ["start 0", "warm up 1", "start 1", "warm up 2"]
