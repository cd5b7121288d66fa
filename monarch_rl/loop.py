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


class TrainerRestarted(Exception):
    """The trainer was lost and has begun again from its last checkpoint: `System.version` has gone back there."""


class System(Protocol):
    """What the loop needs of a running system."""

    config: Config

    @property
    def version(self) -> Version:
        """Of the trainer's weights."""
        ...

    async def restore(self) -> Version:
        """The version to go on from: the first, that of a checkpoint, or where an earlier call of `train` stopped."""
        ...

    async def publish(self, version: Version) -> None:
        """Stage the trainer's weights as they are; waits until the first generator has said how it cuts them."""
        ...

    def background(self) -> AbstractAsyncContextManager[None]:
        """Rollouts, pulls and records, for as long as the body runs; their failure ends the body."""
        ...

    async def train_step(self, step: int) -> Mapping[str, float] | None:
        """One optimizer step on the batch of `step`, when the system is not paused; stages the new weights. None: the data have ended.

        Raises:
            TrainerRestarted: another step is the next.
        """
        ...

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        """Write the row of a step, without keeping the trainer waiting. Of a step that has one: add to it."""
        ...

    def due(self, what: Literal["eval", "checkpoint"], step: int) -> bool: ...

    async def start_checkpoint(self) -> None:
        """Begin to write what the run needs to go on from here, beside the training."""
        ...

    async def checkpoints(self) -> None:
        """Wait for the checkpoints that were started."""
        ...

    def start_evaluation(self, step: int) -> None:
        """Score held-out prompts beside the training."""
        ...

    async def evaluations(self) -> None:
        """Wait for the evaluations that were started."""
        ...


async def train(system: System, until: int | None = None) -> None:
    """Train until `until` optimizer steps are done (None: `config.steps`), from wherever the system is."""
    last = system.config.steps if until is None else min(until, system.config.steps)
    start = await system.restore()
    await system.publish(start)
    async with system.background():
        if start.step == 0:
            system.start_evaluation(0)
            await system.evaluations()  # of the untrained model: the generators go on with the first batches meanwhile
            system.record(0, {})
        while (step := system.version.step + 1) <= last:
            try:
                stats = await system.train_step(step)
            except TrainerRestarted:
                continue  # the steps since the checkpoint are done again
            if stats is None:  # each prompt was trained or dropped, as many times as was asked for
                last = step - 1
                await _end(system, start)
                continue
            if system.due("eval", step):
                system.start_evaluation(step)
            if step == system.config.steps:
                await system.evaluations()
            system.record(step, stats)
            if system.due("checkpoint", step):
                await system.start_checkpoint()
            if step == last:
                await system.checkpoints()


async def _end(system: System, start: Version) -> None:
    """The step that is done turns out to have been the last."""
    version = system.version
    await system.publish(version)
    if version.step > start.step:
        system.start_evaluation(version.step)
        await system.evaluations()
        system.record(version.step, {})
    await system.checkpoints()
