"""`monarch-rl inspect`: the life of the prompts of a run, from its `ledger.jsonl`."""

from __future__ import annotations

import time
from collections import Counter
from itertools import groupby
from pathlib import Path

from monarch_rl.config import UserError
from monarch_rl.lives import Life
from monarch_rl.observe import ledger_file
from monarch_rl.tables import Table, of_lives

SHOWN = 20
"""Prompts of a kind that are listed."""


def inspect(output_dir: Path, ordinal: int | None = None) -> str:
    """All prompts in a few tables, or the life of one.

    Raises:
        UserError: the run has written no ledger, or there is no such prompt in it.
    """
    path = output_dir / "ledger.jsonl"
    if not path.is_file():
        raise UserError(f"{output_dir}: there is no ledger.jsonl; the run has not started any prompt")
    if ordinal is not None:
        return repr(_one(path, ordinal))
    lives = list(ledger_file.lives(path).values())
    in_flight = [life for life in lives if life.state not in ("trained", "dropped")]
    dropped = [life for life in lives if life.state == "dropped"]
    tables = [_counts(lives), _latest("In flight", in_flight), _latest("Dropped", dropped)]
    return "\n\n".join(repr(table) for table in tables if table.rows)


def _one(path: Path, ordinal: int) -> Table:
    story = [life for life in ledger_file.changes(path) if life.ordinal == ordinal]
    if not story:
        raise UserError(f"--prompt {ordinal}: was not started")
    return of_lives(story, time.time(), f"Prompt {ordinal}")


def _counts(lives: list[Life]) -> Table:
    ordered = sorted(lives, key=lambda life: life.state)
    rows = [(state, *_row(list(group))) for state, group in groupby(ordered, key=lambda life: life.state)]
    return Table("Prompts", ("state", "prompts", "ordinals", "why"), rows)


def _row(lives: list[Life]) -> tuple[object, ...]:
    reasons = Counter(life.reason for life in lives if life.reason)
    return len(lives), f"{lives[0].ordinal} to {lives[-1].ordinal}", ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())


def _latest(title: str, lives: list[Life]) -> Table:
    more = f" (the last {SHOWN} of {len(lives)})" if len(lives) > SHOWN else ""
    return of_lives(lives[-SHOWN:], time.time(), title + more)
