"""`record/`: the groups of each optimizer step as they were trained, one file a step, for a replay without engines.

Which rank trains which episode in which micro-batch is a pure function of these groups, of `trainer.ranks` and of
`trainer.tokens_per_microbatch`; `settings.json` beside them says what these were, `weights.jsonl` what weights each step led to.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from monarch_rl import arrays
from monarch_rl.config import Config, UserError
from monarch_rl.disk import dropped, on_disk
from monarch_rl.observe.rollouts import RolloutsFile, reopen
from monarch_rl.types import Group

RECORD = "record"
WEIGHTS = "weights.jsonl"
"""In `record/`: the fingerprint of each rank's weights after each step."""


class Trained(NamedTuple):
    """What one optimizer step trained."""

    groups: list[Group]
    lineage: int
    """Of the trainer, which ages depend on."""


def write(output_dir: Path, step: int, groups: Sequence[Group], lineage: int = 0) -> None:
    """Complete or absent."""
    folder = output_dir / RECORD
    folder.mkdir(parents=True, exist_ok=True)
    about, columns = arrays.pack(groups)
    draft = folder / f".step_{step}.npz"
    with dropped(draft):
        arrays.write(draft, about, {**columns, "lineage": np.array(lineage)})
        os.replace(draft, folder / f"step_{step}.npz")


def read(output_dir: Path, step: int) -> Trained | None:
    """None: there is no such step. Raises UserError: its file is damaged."""
    path = output_dir / RECORD / f"step_{step}.npz"
    if not path.exists():
        return None
    about, columns = arrays.read(path)
    return Trained(arrays.unpack(about, columns), int(columns["lineage"]))


def cut(output_dir: Path, after: int) -> None:
    """A run that goes on from step `after` does the later ones again."""
    for path in (output_dir / RECORD).glob("step_*.npz"):
        if int(path.stem.removeprefix("step_")) > after:
            path.unlink()
    if (output_dir / RECORD / WEIGHTS).exists():
        reopen(output_dir / RECORD / WEIGHTS, after).close()


def check(output_dir: Path) -> int:
    """How many steps there are to replay.

    Raises:
        UserError: none, or one is missing.
    """
    steps = sorted(int(found[1]) for path in (output_dir / RECORD).glob("step_*.npz") if (found := re.fullmatch(r"step_(\d+)", path.stem)))
    if not steps:
        raise UserError(f"replay={output_dir}: there is no {RECORD}/step_1.npz; a run records its groups with record=true")
    if steps != list(range(1, len(steps) + 1)):
        missing = next(step for step in range(1, steps[-1]) if step not in steps)
        raise UserError(f"replay={output_dir}: {RECORD}/step_{missing}.npz is missing")
    return len(steps)


class Written:
    """What was trained, in files: `rollouts.jsonl`, and with `record=true` the groups as they were, beside everything else."""

    def __init__(self, config: Config, after: int, failed: Callable[[str], None]) -> None:
        """`after`: steps that an earlier run in the same folder has done. `failed` is told why something cannot be written."""
        self._folder, self._record, self._failed = Path(config.output_dir), config.record, failed
        self._rollouts = RolloutsFile(self._folder / "rollouts.jsonl", after)
        self._writing: set[asyncio.Task[None]] = set()
        cut(self._folder, after)

    def write(self, step: int, groups: Sequence[Group], lineage: int) -> None:
        self._rollouts.write(step, groups)
        if self._record:
            writing = asyncio.get_running_loop().create_task(asyncio.to_thread(write, self._folder, step, groups, lineage))
            self._writing.add(writing)
            writing.add_done_callback(self._done)

    async def go_back(self, step: int) -> None:
        """Later steps are undone."""
        await self.complete()
        self._rollouts.cut(step)
        cut(self._folder, step)

    async def complete(self) -> None:
        """All that was to be recorded is."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def close(self) -> None:
        self._rollouts.close()
        await self.complete()

    def _done(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if (error := writing.exception()) is not None:
            self._failed(f"record: {error}")


def fingerprints(output_dir: Path) -> dict[int, list[str]]:
    """By step, what the weights of each trainer rank were after it. Raises UserError: the file is damaged."""
    path = output_dir / RECORD / WEIGHTS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]  # a run that was killed may have left a part of one
        return {line["step"]: line["ranks"] for line in lines}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


class Witness:
    """Writes down the weights after each step of a run that is recorded; holds those of a replay against what was written down."""

    def __init__(self, config: Config, exact: bool) -> None:
        """`exact`: the replay is the same training, and so has to reach the same weights."""
        self._file = Path(config.output_dir) / RECORD / WEIGHTS if config.record else None
        self._expected = fingerprints(Path(config.replay)) if config.replay and exact else {}
        self._replay = config.replay

    def see(self, step: int, ranks: Sequence[str]) -> None:
        """The fingerprints of all trainer ranks after `step`.

        Raises:
            UserError: they are not those that were recorded.
        """
        if self._file is not None:
            with on_disk(self._file), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "ranks": list(ranks)}) + "\n")
        expected = self._expected.get(step, list(ranks))
        if differ := [rank for rank, (was, now) in enumerate(zip(expected, ranks, strict=True)) if was != now]:
            raise UserError(
                f"replay={self._replay}: step {step} is the first after which the weights are not those of the recorded run (trainer rank "
                f"{', '.join(map(str, differ))}); without its {RECORD}/{WEIGHTS} a replay does not compare"
            )
