"""The console of a run that was started elsewhere, made of the files that the run writes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.config import Config, UserError
from monarch_rl.observe import console
from monarch_rl.observe.live import make_console
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.status import Status, read_status
from monarch_rl.observe.timeline import Span
from monarch_rl.observe.trace import Lanes, events
from monarch_rl.types import Episode, Group, Prompt, Version

LOOK_S = 0.5
"""Between two looks at the files."""


async def watch(output_dir: Path, config: Config) -> Status:
    """Show the run until it has ended; how it ended. The run itself is not touched.

    Raises:
        UserError: nothing says how the run is.
    """
    status = _status(output_dir)
    ran_s = (time.time() if status.state == "running" else status.updated) - status.started
    shown = make_console(config, started=time.time() - ran_s)
    view = _View(output_dir, config, shown)
    shown.start()
    try:
        while True:
            status = _status(output_dir)
            view.look()  # after the status: what an ended run has written is complete by then
            if status.state != "running":
                return status
            await asyncio.sleep(LOOK_S)
    finally:
        shown.close()


def _status(output_dir: Path) -> Status:
    status = read_status(output_dir)
    if status is None:
        raise UserError(f"{output_dir} has no status.json: the run has not started yet, or was moved")
    return status


class Follower:
    """Whole lines of a growing file, as they come. Begins again when it is another file, or what was read last is not there any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id = self._at = 0
        self._last = b""

    def lines(self) -> Iterator[str]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file_id = os.fstat(file.fileno()).st_ino
            file.seek(self._at - len(self._last))
            if file_id != self._file_id or file.read(len(self._last)) != self._last:
                self._file_id, self._at, self._last = file_id, 0, b""
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at, self._last = self._at + len(line), line
                yield line.decode("utf-8")


class _View:
    """Hands on what is new in the files."""

    def __init__(self, output_dir: Path, config: Config, shown: console.Console) -> None:
        self._shown, self._every = shown, config.console.rollouts_every
        self._rows, self._groups = Follower(output_dir / "metrics.jsonl"), Follower(output_dir / "rollouts.jsonl")
        self._events, self._lanes = Follower(output_dir / "timeline.json"), Lanes()
        self._reports: dict[int, GeneratorReport] = {}
        self._samples: list[dict[str, Any]] = []
        self._step = 0

    def look(self) -> None:
        for line in self._groups.lines():
            self._samples = [*self._samples[1 - console.SAMPLES :], json.loads(line)]
        for line in self._rows.lines():  # before the reports of generators, which are compared with the trainer's step
            self._row(json.loads(line))
        spans: dict[str, list[Span]] = {}
        for lane, record in self._lanes.read(events(self._events.lines())):
            if isinstance(record, Span):
                spans.setdefault(lane, []).append(record)
            elif record.name == "generator":
                self._report(int(lane.rpartition(" ")[2]), record.values)
        for lane, recorded in spans.items():
            self._shown.spans(lane, recorded)
        if self._reports:
            self._shown.reports(self._step, self._reports.values())

    def _row(self, row: dict[str, Any]) -> None:
        self._step = row["step"]
        self._shown.row(row)
        if self._every and self._step and self._step % self._every == 0:
            self._shown.rollouts([group(sample) for sample in self._samples])

    def _report(self, replica: int, said: Mapping[str, float]) -> None:
        self._reports[replica] = GeneratorReport(replica, int(said["step"]), int(said["tokens"]), said["idle_s"])


def group(row: dict[str, Any]) -> Group:
    """What a console shows of a group, from its line in `rollouts.jsonl`: text and rewards, and of its tokens the versions only."""
    return Group(Prompt(row["ordinal"], row["prompt"], row["answer"]), [_episode(episode) for episode in row["episodes"]])


def _episode(row: dict[str, Any]) -> Episode:
    versions = [Version(*map(int, text.split("."))).pack() for text in row["versions"]]
    none_T, versions_T = np.zeros(len(versions)), np.array(versions, np.int64)
    mask_T = np.ones(len(versions), np.bool_)
    tokens = (none_T.astype(np.int32), mask_T, none_T.astype(np.float32), versions_T)
    return Episode(*tokens, row["completion"], row["reward"], row["error"], row["truncated"])
