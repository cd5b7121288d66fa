"""Scorer: judges completions in a child process.

Owns: one reward process, which it replaces when a reward ends it or has to be ended.
Promises: an answer for every completion, within a deadline each: a finite reward, or none and the reason.
Called by: RolloutWorker, any number at once; they take turns completion by completion.
May be blocked by: the reward, until its deadline.
"""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, concurrent_endpoint, endpoint

from monarch_rl.tasks import Score
from monarch_rl.tasks.reward_process import RewardProcess
from monarch_rl.types import Prompt


class Scorer(Actor):
    def __init__(self, task_spec: str, task_args: dict[str, Any], seed: int, deadline_s: float) -> None:
        self._process = RewardProcess(task_spec, task_args, seed)
        self._deadline_s = deadline_s

    @endpoint
    async def load(self) -> None:
        """Starts the process ahead of the first score; raises UserError when the task cannot be loaded."""
        await self._process.start()

    @concurrent_endpoint
    async def score(self, prompt: Prompt, completions: list[str]) -> list[Score]:
        """One score per completion, in order."""
        return [await self._process.score(prompt, completion, self._deadline_s) for completion in completions]

    @endpoint
    async def shut(self) -> None:
        """Ends the reward process; scores in progress get an error."""
        await self._process.close()
