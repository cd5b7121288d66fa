"""A small data set with an end, one prompt of which is slow; rewards look like chance, so that no group is dead."""

from __future__ import annotations

import hashlib
import time

from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split


class Few(Task):
    name = "few"

    def __init__(self, size: int = 7, slow: int = -1, slow_s: float = 0.0, dead: bool = False) -> None:
        self.size, self.slow, self.slow_s, self.dead = size, slow, slow_s, dead

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{ordinal % self.size}+1=")

    def reward(self, prompt: Prompt, completion: str) -> float:
        if prompt.ordinal == self.slow:
            time.sleep(self.slow_s)
        return 0.0 if self.dead else hashlib.blake2b(f"{prompt.ordinal}/{completion}".encode()).digest()[0] / 256
