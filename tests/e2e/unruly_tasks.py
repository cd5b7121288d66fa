"""Tasks that go wrong, for `task=unruly_tasks.py:Name`."""

from __future__ import annotations

import asyncio
import os
import random
import time

from monarch_rl.tasks import Task, row_of
from monarch_rl.types import Prompt, Split

ROWS = ("nothing", "nan", "raises", "cancelled", "hangs", "dies", "empty", "long")


class Unruly(Task):
    """Fewer rows that can be trained than a batch has prompts. Rewards are drawn, and each row spoils so many in a way of its own that
    among three groups some surely are."""

    name = "unruly"
    size: int | None = len(ROWS)
    eval_size: int | None = len(ROWS)

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        row = ROWS[row_of(ordinal, len(ROWS), 0, split)]
        text = {"long": "1+" * 300 + "1=", "empty": "1+2=#3"}.get(row, "1+2=")
        return Prompt(ordinal, text, answer=row)

    def reward(self, prompt: Prompt, completion: str) -> float:
        drawn = random.random()
        return misbehave(prompt.answer) if drawn < 0.4 else float(drawn < 0.7)


def misbehave(how: str) -> float:
    match how:
        case "nothing":
            return None  # type: ignore[return-value]
        case "nan":
            return float("nan")
        case "text":
            return "right"  # type: ignore[return-value]
        case "raises":
            raise ValueError("no\nidea")
        case "cancelled":
            raise asyncio.CancelledError
        case "hangs":
            time.sleep(3600)
        case "dies":
            os._exit(3)
    return 0.0


class Seldom(Unruly):
    """7 % of the episodes go wrong. Which, and how, can be told from prompt and completion."""

    size = None

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{ordinal % 9}+{ordinal % 7}=")

    def reward(self, prompt: Prompt, completion: str) -> float:
        how = fate(prompt.ordinal, completion)
        return misbehave(how) if how else float(len(completion) % 2)


def fate(ordinal: int, completion: str) -> str:
    """How the reward of an episode misbehaves; empty: it does not."""
    drawn = random.Random(f"{ordinal} {completion}").random()
    bounds = ((0.05, "raises"), (0.06, "hangs"), (0.0633, "nothing"), (0.0666, "nan"), (0.07, "text"))
    return next((how for bound, how in bounds if drawn < bound), "")


class Broken(Unruly):
    """No episode can be scored."""

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"{ordinal % 9}+1=")

    def reward(self, prompt: Prompt, completion: str) -> float:
        raise LookupError("the key of the answers is lost")


class Empty(Unruly):
    """A dataset without rows."""

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(row_of(ordinal, 0, 0, split), "")


class Chatty(Unruly):
    """Asks in messages."""

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, [{"role": "user", "content": "1+2="}])


class NothingHeldOut(Unruly):
    eval_size = 0


class Faulty(Unruly):
    """Its own code fails."""

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        raise KeyError("question")
