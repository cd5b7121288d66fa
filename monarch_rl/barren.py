"""Prompts that gave nothing to train on: told of now and then, and reason to end a run that would go on with them forever."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from monarch_rl.config import Config
from monarch_rl.groups import by_reason, describe
from monarch_rl.lives import Lost
from monarch_rl.observe.seldom import Seldom
from monarch_rl.types import Group

log = logging.getLogger(__name__)


class Barren:
    """Those that were dropped, and those that were lost and are tried again."""

    def __init__(self, config: Config, task: str) -> None:
        self._config, self._task = config, task
        self.groups: list[Group] = []
        """Dead or unscorable, since the last batch."""
        self._run = 0  # prompts dropped since the last trainable group ...
        self._notes: deque[str] = deque(maxlen=3)  # ... and what the last of them looked like
        self._refused, self._failures = Seldom(), Seldom()

    @property
    def notes(self) -> str:
        """The last ones."""
        return " | ".join(self._notes)

    def interrupted(self) -> None:
        """There is something to train on."""
        self._run = 0
        self._notes.clear()

    def group(self, group: Group) -> None:
        self.groups.append(group)
        self._dropped(describe(group))

    def refused(self, ordinal: int, reason: str) -> None:
        """No attempt at it can succeed."""
        if self._refused.due():
            log.warning("task %s: prompt %d is dropped: %s (%d so far)", self._task, ordinal, reason, self._refused.count)
        self._dropped(f"prompt {ordinal}: {reason}")

    def lost(self, lost: Lost, why: str, told: bool = False) -> None:
        """A claim on it ended without a group. `told`: whoever reads the log knows already, and hears only of prompts that are dropped."""
        attempt = f"attempt {lost.attempt} of {self._config.rollout.max_attempts} by {lost.owner}"
        then = "it is dropped" if lost.dropped else "it is tried again"
        if (lost.dropped or not told) and self._failures.due():
            log.warning("prompt %d: %s gave no group (%s); %s (%d so far)", lost.ordinal, attempt, why, then, self._failures.count)
        if lost.dropped:
            self._dropped(f"prompt {lost.ordinal}: {why}")

    def verdict(self, dropped: Mapping[str, int]) -> str | None:
        """Why the run has to end: too many in a row. `dropped`: all so far, by reason."""
        buffer = self._config.buffer
        if self._run < max(1, buffer.max_dead_steps * buffer.prompts_per_step):
            return None
        return (
            f"{self._run} prompts in a row gave nothing to train on (buffer.max_dead_steps={buffer.max_dead_steps}; "
            f"dropped so far: {by_reason(dropped)}). The last ones: {self.notes}"
        )

    def _dropped(self, note: str) -> None:
        self._run += 1
        self._notes.append(note)
