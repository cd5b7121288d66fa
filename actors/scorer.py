"""Scorer: judges episodes, and speaks for their environments, in a child process.

Owns: one reward process, which it replaces when a task ends it or has to be ended.
Promises: an answer for every episode, within a deadline each: a finite reward (an observation), or none and the reason.
Called by: RolloutWorker, any number at once; they take turns group by group.
May be blocked by: the task's `reward` and `observe`, until their deadline.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, endpoint

from actors.metrics import Metrics, Records
from monarch_rl.observe.seldom import Seldom
from monarch_rl.tasks import Observation, Score, TaskSpec
from monarch_rl.tasks.reward_process import RewardProcess
from monarch_rl.types import Prompt

log = logging.getLogger(__name__)
T = TypeVar("T", Score, Observation)


class Scorer(Actor):
    def __init__(
        self,
        task_spec: TaskSpec,
        task_args: dict[str, Any],
        seed: int,
        deadline_s: float,
        memory_mb: int | None = None,
        number: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self.name = f"scorer {number}"
        self._records = Records(metrics, self.name)
        self._seed, self._deadline_s, self._memory_mb = seed, deadline_s, memory_mb
        self._process = RewardProcess(task_spec, task_args, seed, memory_mb)
        self._others: dict[str, RewardProcess] = {}  # of tasks that are only evaluated
        self._unscorable = Seldom()
        self._closing = False

    @endpoint
    async def load(self) -> None:
        """Starts the process ahead of the first score; raises UserError when the task cannot be loaded."""
        await self._process.start()

    @concurrent_endpoint
    async def score(self, prompt: Prompt, completions: list[str], task: TaskSpec | None = None) -> list[Score]:
        """One score per completion, in order, by the task that is trained or by another."""
        self._records.soon()
        return [self._noted(prompt, score) for score in await self._of(task).scores(prompt, completions, self._deadline_s)]

    @concurrent_endpoint
    async def observe(self, prompt: Prompt, turns: list[str], task: TaskSpec | None = None) -> Observation:
        """What the environment answers to the last of an episode's turns."""
        self._records.soon()
        return self._noted(prompt, await self._of(task).observe(prompt, turns, self._deadline_s))

    @concurrent_endpoint
    async def alive(self) -> None:
        """Answers while this scorer gets on with anything at all."""

    @concurrent_endpoint
    async def until_lost(self) -> None:
        """Never answers; the call fails with this process."""
        await asyncio.Event().wait()

    @endpoint
    async def shut(self) -> None:
        """Ends the reward process; scores in progress get an error, which is nobody's fault."""
        self._closing = True
        self._records.send()
        for process in (self._process, *self._others.values()):
            await process.close()

    def _noted(self, prompt: Prompt, result: T) -> T:
        """A run with slow or failing rewards may show nothing else for minutes."""
        if result.error is not None and not self._closing and self._unscorable.due():
            count = self._unscorable.count
            log.warning("%s: %d unscorable so far, the last of prompt %d: %s", self.name, count, prompt.ordinal, result.error)
        return result

    def _of(self, task: TaskSpec | None) -> RewardProcess:
        if task is None:
            return self._process
        return self._others.setdefault(repr(task), RewardProcess(task, {}, self._seed, self._memory_mb))
