"""The loop over a system that loses its trainer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Literal

from monarch_rl import loop
from monarch_rl.config import Config
from monarch_rl.types import Version


class Losing:
    """Goes back to step 2 when it is asked for one of `losses`, once each; its data end after `data` steps."""

    def __init__(self, steps: int, losses: set[int], data: int = 99) -> None:
        self.config = Config(steps=steps)
        self.version = Version(0, 0)
        self.done: list[str] = []
        self._losses, self._data = losses, data

    async def restore(self) -> Version:
        return self.version

    async def publish(self, version: Version) -> None: ...

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        yield

    async def train_step(self, step: int) -> Mapping[str, float] | None:
        assert step == self.version.step + 1
        if step in self._losses:
            self._losses.remove(step)
            self.version = Version(self.version.lineage + 1, 2)
            raise loop.TrainerRestarted
        if step > self._data:
            self.config.steps = self._data
            return None
        self.version = self.version._replace(step=step)
        self.done.append(str(self.version))
        return {}

    def record(self, step: int, stats: Mapping[str, float]) -> None: ...

    def due(self, what: Literal["eval", "checkpoint"], step: int) -> bool:
        return what == "checkpoint" and step % 2 == 0

    async def start_checkpoint(self) -> None: ...

    async def checkpoints(self) -> None:
        self.done.append("checkpoints")

    def start_evaluation(self, step: int) -> None: ...

    async def evaluations(self) -> None: ...


async def test_steps_since_the_checkpoint_are_done_again() -> None:
    system = Losing(6, {5, 6})
    await loop.train(system)
    assert system.done == ["0.1", "0.2", "0.3", "0.4", "1.3", "1.4", "1.5", "2.3", "2.4", "2.5", "2.6", "checkpoints"]


async def test_a_part_of_the_steps_ends_where_it_was_asked_to() -> None:
    system = Losing(9, {4})
    await loop.train(system, until=4)
    assert system.done == ["0.1", "0.2", "0.3", "1.3", "1.4", "checkpoints"]


async def test_the_data_end_where_they_ended_before() -> None:
    system = Losing(9, {4}, data=4)
    await loop.train(system)
    assert system.done[-3:] == ["1.3", "1.4", "checkpoints"]
