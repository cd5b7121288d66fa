"""`ledger.jsonl`: every change in the life of every prompt, one a line; the last line of an ordinal is how it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_rl.disk import appended, on_disk
from monarch_rl.lives import STATES, Life
from monarch_rl.types import NOT_SAMPLED, Version


class LedgerFile:
    """Appends; of an earlier run the lines up to the checkpoint of step `after` are kept, if there are any."""

    def __init__(self, path: Path, after: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, appended(path, _end_of(path, after) if after and path.exists() else 0)

    def write(self, life: Life) -> None:
        row: dict[str, Any] = {"ordinal": life.ordinal, "state": life.state, "since": round(life.since, 3), "attempt": life.attempt}
        row |= {name: value for name in ("owner", "reason", "step", "min_step") if (value := getattr(life, name))}
        if life.oldest != NOT_SAMPLED:
            row["versions"] = [str(Version.unpack(packed)) for packed in (life.oldest, life.newest)]
        with on_disk(self._path):
            self._file.write(json.dumps(row) + "\n")

    def mark(self, step: int) -> None:
        """A checkpoint of step `step` holds what stands above."""
        with on_disk(self._path):
            self._file.write(json.dumps({"checkpoint": step}) + "\n")
            self._file.flush()

    def back(self, step: int) -> None:
        """The trainers go on from step `step`: later ones are undone, and checkpoints of them were never completed."""
        with on_disk(self._path):
            self._file.write(json.dumps({"back": step}) + "\n")
            self._file.flush()

    def flush(self) -> None:
        with on_disk(self._path):
            self._file.flush()


def changes(path: Path) -> Iterator[Life]:
    """What was written, in order. A last line that is not whole, of a run that was killed, is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and "ordinal" in (row := json.loads(line)):
                versions = [_packed(text) for text in row.pop("versions", [])] or [NOT_SAMPLED, NOT_SAMPLED]
                yield Life(**row, oldest=versions[0], newest=versions[1])


def lives(path: Path) -> dict[int, Life]:
    """How each prompt stands, by ordinal."""
    found = {life.ordinal: life for life in changes(path)}
    return dict(sorted(found.items()))


def counted(found: dict[int, Life]) -> dict[str, int]:
    """Prompts in each state."""
    return {state: sum(life.state == state for life in found.values()) for state in STATES}


def _packed(text: str) -> int:
    lineage, step = text.split(".")
    return Version(int(lineage), int(step)).pack()


def _end_of(path: Path, step: int) -> int:
    """Bytes up to the end of the mark of step `step`; 0 where there is none."""
    marks: dict[int, int] = {}
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if line.startswith(b'{"checkpoint"'):
                # A later one of the same step is of a checkpoint that was there already.
                marks.setdefault(json.loads(line)["checkpoint"], end)
            elif line.startswith(b'{"back"'):
                marks = {done: mark for done, mark in marks.items() if done <= json.loads(line)["back"]}
    return marks.get(step, 0)
