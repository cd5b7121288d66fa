"""The asynchronous loop, over a small protocol that `Session` satisfies.

The controller only says what is to happen; tokens and weights go between the actors without it:
rollout workers lease prompts and put groups, trainer ranks take batches and stage weights, generators pull them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from monarch_rl.config import Config
from monarch_rl.types import Version


class System(Protocol):
    """What the loop needs of a running system."""

    config: Config

    async def restore(self) -> Version:
        """The version to start from."""
        ...

    async def publish(self, version: Version) -> None:
        """Stage the trainer's weights as they are; waits until the first generator has said how it cuts them."""
        ...

    def background(self) -> AbstractAsyncContextManager[None]:
        """Rollouts, pulls and records, for as long as the body runs; their failure ends the body."""
        ...

    async def train_step(self, step: int) -> Mapping[str, float]:
        """One optimizer step on the batch of `step`; stages the new weights."""
        ...

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        """Write the row of a step, without keeping the trainer waiting."""
        ...

    def due(self, what: Literal["eval"], step: int) -> bool: ...

    def start_evaluation(self, step: int) -> None:
        """Score held-out prompts beside the training."""
        ...

    async def evaluations(self) -> None:
        """Wait for the evaluations that were started."""
        ...


async def train(system: System) -> None:
    """Train until `config.steps` optimizer steps are done."""
    start = await system.restore()
    await system.publish(start)
    async with system.background():
        system.start_evaluation(start.step)
        await system.evaluations()  # of the untrained model: the generators go on with the first batches meanwhile
        system.record(start.step, {})
        for step in range(start.step + 1, system.config.steps + 1):
            stats = await system.train_step(step)
            if system.due("eval", step):
                system.start_evaluation(step)
            if step == system.config.steps:
                await system.evaluations()
            system.record(step, stats)
