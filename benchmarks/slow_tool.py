"""A task whose reward waits for a tool: sums as in `arithmetic`, judged after a heavy-tailed sleep."""

from __future__ import annotations

import time

from benchmarks.schedules import heavy_tailed
from monarch_rl.tasks.arithmetic import Arithmetic
from monarch_rl.types import Prompt


def latency_s(ordinal: int, completion: str, median_s: float) -> float:
    """A pure function of prompt and completion, so that it can be told afterwards from what a run recorded."""
    return heavy_tailed(f"{ordinal}/{completion}", median_s)


class SlowTool(Arithmetic):
    """Every episode is judged, those that their token budget ended too."""

    truncated_reward = None  # type: ignore[assignment]

    def __init__(self, seed: int = 0, median_s: float = 0.05) -> None:
        super().__init__(seed)
        self._median_s = median_s

    def reward(self, prompt: Prompt, completion: str) -> float:
        time.sleep(latency_s(prompt.ordinal, completion, self._median_s))
        return super().reward(prompt, completion)
