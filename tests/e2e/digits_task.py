"""A task that any model can be trained on, also one whose weights are random."""

from __future__ import annotations

from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split


class Digits(Task):
    """The reward is the share of digits in what was written: groups are hardly ever dead."""

    name = "digits"

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{split} {ordinal}: ")

    def reward(self, prompt: Prompt, completion: str) -> float:
        return sum(character.isdigit() for character in completion) / max(1, len(completion))
