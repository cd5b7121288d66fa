"""Several tasks as one: `task=[{name: arithmetic, weight: 3}, {name: calculator, weight: 1, args: {max_operations: 2}}]`.

Which part makes prompt number `ordinal` is a pure function of the ordinal. A schedule of one period holds every part exactly in
proportion to its weight and as evenly spread as it can be, so over any stretch of prompts each part's share is right to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, Task, load_task, make_prompt
from monarch_rl.types import Message, Outcome, Prompt, Split

LONGEST_PERIOD = 100_000


class Mixture(Task):
    """Each part counts its own prompts from 0, through its own epochs. `Prompt.task` names the part."""

    name = "mixture"

    def __init__(self, parts: Sequence[dict[str, Any]], seed: int = 0) -> None:
        """`parts`: `name` as in `task`, `weight` above 0 (default 1), `args` as in `task_args`."""
        self.parts = [load_task(part["name"], part.get("args", {}), seed) for part in parts]
        self.counts = proportions([part.get("weight", 1) for part in parts])
        self.schedule = spread(self.counts)
        self._before = _counted(self.schedule)
        self._names = _distinct([part.name for part in self.parts])

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        part, own = self.place(ordinal)
        return replace(make_prompt(self.parts[part], own, split), ordinal=ordinal, task=self._names[part])

    def reward(self, prompt: Prompt, completion: Completion) -> float | Sequence[float]:
        return self.part_of(prompt).reward(self._own(prompt), completion)

    def observe(self, prompt: Prompt, turns: Sequence[str]) -> str | list[Message] | None:
        return self.part_of(prompt).observe(self._own(prompt), turns)

    def skip(self, prompt: Prompt, past: Sequence[Outcome]) -> bool:
        return self.part_of(prompt).skip(self._own(prompt), [one._replace(ordinal=self.place(one.ordinal)[1]) for one in past])

    def part_of(self, prompt: Prompt) -> Task:
        """The task that made the prompt."""
        return self.parts[self.place(prompt.ordinal)[0]]

    def place(self, ordinal: int) -> tuple[int, int]:
        """Index of the part that makes prompt `ordinal`, and the number that this prompt has there."""
        period, at = divmod(ordinal, len(self.schedule))
        part = self.schedule[at]
        return part, period * self.counts[part] + self._before[at]

    def _own(self, prompt: Prompt) -> Prompt:
        """The prompt as its part made it."""
        part, own = self.place(prompt.ordinal)
        return replace(prompt, ordinal=own, task=self.parts[part].name)


def proportions(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in proportion to `weights`, taken as they are written (0.1 is a tenth).

    Raises UserError when they add up to more than LONGEST_PERIOD.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    whole = [int(share * math.lcm(*(s.denominator for s in shares))) for share in shares]
    counts = [number // math.gcd(*whole) for number in whole]
    if sum(counts) > LONGEST_PERIOD:
        raise UserError(f"task: the weights {', '.join(map(str, weights))} are too fine; use fewer digits")
    return counts


def spread(counts: Sequence[int]) -> list[int]:
    """`sum(counts)` indices, index i `counts[i]` times, such that any stretch holds each in proportion (smooth weighted round robin)."""
    total, credit, schedule = sum(counts), [0] * len(counts), []
    for _ in range(total):
        credit = [have + count for have, count in zip(credit, counts, strict=True)]
        chosen = max(range(len(counts)), key=credit.__getitem__)
        credit[chosen] -= total
        schedule.append(chosen)
    return schedule


def _counted(schedule: Sequence[int]) -> list[int]:
    """At each place, how often its index came before."""
    seen = dict.fromkeys(schedule, -1)
    counted = []
    for index in schedule:
        seen[index] += 1
        counted.append(seen[index])
    return counted


def _distinct(names: Sequence[str]) -> list[str]:
    """Names that occur more than once get a number: sums, sums 2."""
    return [name if name not in names[:at] else f"{name} {names[:at].count(name) + 1}" for at, name in enumerate(names)]
