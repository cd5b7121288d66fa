"""A task whose prompts all begin with the same text, longer than a block of the engine's prefix cache."""

from __future__ import annotations

import hashlib

from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split

BEGUN = "9+8+7+6+5+4+3+2=9+8=17;17+7=24;24+6=30;"
"""A sum half worked out, which the tiny model goes on with for some dozens of tokens."""


class SharedPrefix(Task):
    """Rewards are what looks like chance, so that no group is without a gradient and lengths stay what they are."""

    name = "shared_prefix"

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, BEGUN + "30+5=35;" * (ordinal % 2), task=self.name)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return hashlib.blake2b(f"{prompt.ordinal}/{completion}".encode()).digest()[0] / 256
