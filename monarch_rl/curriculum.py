"""Which prompts a task leaves out (`Task.skip`), given what came of them before. Saved with the ledger. No asyncio, no Monarch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from monarch_rl.supervise import cause
from monarch_rl.tasks import Task, skips
from monarch_rl.types import Group, Outcome, Prompt

REMEMBERED = 16
"""The last outcomes of a prompt that are kept."""
MOST_SKIPPED = 10_000
"""In a row; or three epochs, if they are more."""


class Curriculum:
    """Mean rewards by prompt: what is asked and answered is its name, since its ordinal is another one in every epoch."""

    def __init__(self, task: Task, state: Mapping[str, Any] | None = None) -> None:
        self._task, self._used = task, skips(task)
        self._past = {name: [Outcome(*one) for one in past] for name, past in (state or {}).items()}
        self._run = 0  # prompts that were skipped since the last one that was not

    def note(self, group: Group, step: int) -> None:
        """A group that was finished when `step` optimizer steps were done. One without a reward tells nothing."""
        rewards_G = group.rewards_G[np.isfinite(group.rewards_G)]
        if self._used and rewards_G.size:
            name = name_of(group.prompt)
            others = [one for one in self._past.get(name, []) if one.ordinal != group.ordinal]  # it may have been sampled again
            self._past[name] = [*others, Outcome(group.ordinal, float(rewards_G.mean()), step)][-REMEMBERED:]

    def skips(self, prompt: Prompt, step: int) -> bool:
        """Whether to leave out a prompt that would be started after `step` optimizer steps. Blocks as long as the task takes.

        The task is told of what was finished before that step was done; what is finished since may depend on who is faster.

        Raises:
            RuntimeError: the task's `skip` fails, or leaves out whatever there is.
        """
        if not self._used:
            return False
        past = sorted(one for one in self._past.get(name_of(prompt), []) if one.step < step)
        try:
            skipped = bool(self._task.skip(prompt, past))
        except Exception as error:
            raise RuntimeError(
                f"task {self._task.name}: skip of prompt {prompt.ordinal}: {type(error).__name__}: {cause(error)}"
            ) from error
        self._run = self._run + 1 if skipped else 0
        if self._run > max(MOST_SKIPPED, 3 * (self._task.size or 0)):
            raise RuntimeError(f"task {self._task.name}: skip has left out {self._run} prompts in a row; nothing is left to train on")
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """For JSON, and for a new one."""
        return {name: list(past) for name, past in self._past.items()}


def name_of(prompt: Prompt) -> str:
    """The same for the same question, in whatever epoch and process."""
    text = json.dumps([prompt.task, prompt.content, prompt.answer], default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
