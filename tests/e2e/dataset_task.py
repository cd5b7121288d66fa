"""A small data set with an end, one prompt of which is slow; rewards look like chance, so that no group is dead."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split


class Few(Task):
    name = "few"

    def __init__(self, size: int = 7, pause_s: float = 0.0, slow: int = -1, dead: bool = False, gate: str = "") -> None:
        """Rewards take `pause_s`, and those of prompt `slow` ten times as long. `gate` is a file, see `hold`."""
        self.size, self.pause_s, self.slow, self.dead, self.gate = size, pause_s, slow, dead, gate

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{ordinal % self.size}+1=")

    def reward(self, prompt: Prompt, completion: str) -> float:
        while self.gate and prompt.ordinal >= int(Path(self.gate).read_text()):
            time.sleep(0.02)
        time.sleep(self.pause_s * (10 if prompt.ordinal == self.slow else 1))
        return 0.0 if self.dead else hashlib.blake2b(f"{prompt.ordinal}/{completion}".encode()).digest()[0] / 256


def hold(gate: Path, from_ordinal: int) -> None:
    """Rewards of prompts from there on wait until this is called anew: a run comes so far and no further, however long a test takes."""
    draft = gate.with_suffix(".draft")
    draft.write_text(str(from_ordinal))
    draft.rename(gate)
