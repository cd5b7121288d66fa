"""Expressions and a calculator to ask: `12*7+5=`, `[12*7]` → `84`, `[84+5]` → `89`, `#89`.

A turn that ends in a bracket asks; the calculator does one operation and answers. A policy that answers at once is mostly
wrong, for it cannot multiply; one that asks is right. The calculator's tokens are not trained.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence

from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, Task, held_out
from monarch_rl.types import Prompt, Split

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
QUESTION = re.compile(r"\[(-?\d{1,9})([-+*])(-?\d{1,9})\]")
UNCLEAR = "?"
"""The calculator's answer to what it does not understand."""


class Calculator(Task):
    """Endless products with terms added and taken away. Each is, as written, a training or a held-out prompt, for all seeds alike."""

    name = "calculator"
    truncated_reward = 0.0

    def __init__(self, seed: int = 0, max_operations: int = 4, stop_probability: float = 0.4) -> None:
        """After the product, another operation is added with probability 1 - `stop_probability`, up to `max_operations`."""
        if max_operations < 1:
            raise UserError(f"task_args.max_operations={max_operations}: must be 1 or more")
        if not 0 <= stop_probability <= 1:
            raise UserError(f"task_args.stop_probability={stop_probability}: must be between 0 and 1")
        self.seed = seed
        self.max_operations = max_operations
        self.stop_probability = stop_probability

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        rng = random.Random(f"train/{self.seed}/{ordinal}" if split == "train" else f"eval/{ordinal}")
        while held_out(text := self._expression(rng) + "=") != (split == "eval"):
            pass
        return Prompt(ordinal, text, answer=steps(text)[-1][1], task=self.name)

    def observe(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        return answer(turns[-1]) if turns[-1].endswith("]") else None

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """1 if the last turn ends in `#` and the value, else 0."""
        return float(completion.turns[-1].endswith(f"#{prompt.answer}"))

    def _expression(self, rng: random.Random) -> str:
        text = f"{rng.randint(2, 99)}*{rng.randint(2, 9)}"
        count = 1
        while count < self.max_operations and rng.random() >= self.stop_probability:
            text += f"{rng.choice('+-')}{rng.randint(1, 99)}"
            count += 1
        return text


def answer(turn: str) -> str:
    """What the calculator says to a turn; the bracket that ends it counts."""
    asked = QUESTION.fullmatch(turn[turn.rfind("[") :])
    return str(_apply(*asked.groups())) if asked else UNCLEAR


def steps(text: str) -> list[tuple[str, int]]:
    """Operation and result, one by one from the left: `12*7+5=` → ("12*7", 84), ("84+5", 89)."""
    total, *rest = re.findall(r"(?:^|[-+*])\d+", text)
    done = []
    for part in rest:
        result = _apply(total, part[0], part[1:])
        done.append((f"{total}{part}", result))
        total = str(result)
    return done


def _apply(left: str, sign: str, right: str) -> int:
    return int(OPERATIONS[sign](int(left), int(right)))
