"""Sums with an optional scratchpad: `4+7+2=` is answered by `#13`, or worked out as `4+7=11;11+2=13;#13`.

A policy that guesses is short and mostly wrong; one that works it out is long and right. So training shows a rising
reward together with growing, uneven lengths, on a model of half a million parameters.
"""

from __future__ import annotations

import random

from monarch_rl.config import UserError
from monarch_rl.tasks import Task, held_out
from monarch_rl.types import Prompt, Split


class Arithmetic(Task):
    """Endless sums of single digits. Every sum, as written, is either a training or a held-out prompt, for all seeds alike.

    Evaluation prompts do not depend on `seed`, so that runs can be compared.
    """

    name = "arithmetic"
    truncated_reward = 0.0

    def __init__(self, seed: int = 0, max_operands: int = 8, stop_probability: float = 0.25) -> None:
        """From 2 operands on, another one is added with probability 1 - `stop_probability`, up to `max_operands`."""
        if max_operands < 2:
            raise UserError(f"task_args.max_operands={max_operands}: must be 2 or more")
        if not 0 <= stop_probability <= 1:
            raise UserError(f"task_args.stop_probability={stop_probability}: must be between 0 and 1")
        self.seed = seed
        self.max_operands = max_operands
        self.stop_probability = stop_probability

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        rng = random.Random(f"train/{self.seed}/{ordinal}" if split == "train" else f"eval/{ordinal}")
        count = self._operand_count(rng)
        while held_out(text := "+".join(rng.choices("0123456789", k=count)) + "=") != (split == "eval"):
            pass
        return Prompt(ordinal, text, answer=sum(operands(text)), task=self.name)

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 if the text ends in `#` and the sum, else 0; what stands before is the model's own affair."""
        return float(completion.endswith(f"#{prompt.answer}"))

    def _operand_count(self, rng: random.Random) -> int:
        count = 2
        while count < self.max_operands and rng.random() >= self.stop_probability:
            count += 1
        return count


def operands(text: str) -> list[int]:
    """The digits of `4+7+2=`."""
    return [int(digit) for digit in text.rstrip("=").split("+")]
