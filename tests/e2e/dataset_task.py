"""A small data set with an end, one prompt of which is slow; rewards look like chance, so that no group is dead."""

from __future__ import annotations

import hashlib
import time

from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split


class Few(Task):
    name = "few"

    def __init__(self, size: int = 7, pause_s: float = 0.0, slow: int = -1, dead: bool = False) -> None:
        """Rewards take `pause_s`, and those of prompt `slow` ten times as long."""
        self.size, self.pause_s, self.slow, self.dead = size, pause_s, slow, dead

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{ordinal % self.size}+1=")

    def reward(self, prompt: Prompt, completion: str) -> float:
        time.sleep(self.pause_s * (10 if prompt.ordinal == self.slow else 1))
        return 0.0 if self.dead else hashlib.blake2b(f"{prompt.ordinal}/{completion}".encode()).digest()[0] / 256
