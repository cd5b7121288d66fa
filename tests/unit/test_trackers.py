"""Trackers get every row, from the real packages; the run goes on whatever they do."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config, UserError
from monarch_rl.observe import trackers
from monarch_rl.observe.trackers import Run, Trackers, run_id

ROOT = Path(__file__).parents[2]
ROWS = [{"step": step, "version": f"0.{step}", "reward/mean": step / 4, "eval/version": "0.0"} for step in range(4)]


def config(folder: Path, *names: Any) -> Config:
    return Config(output_dir=str(folder), trackers=list(names), steps=3)


def log(made: Trackers, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        made.row(row)
    made.close()


def test_tensorboard_has_every_number_and_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(Trackers(config(tmp_path, "tensorboard")), ROWS)
    log(Trackers(config(tmp_path, "tensorboard")), [{"step": 2, "reward/mean": 9.0}])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.25), (2, 9.0)]


def child(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """wandb and trackio keep state in a process: each attempt of a run gets one of its own."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environment}
    variables = {name: value for name, value in variables.items() if value}
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=100, env=variables, cwd=folder)


CHILD = """
import sys
from tests.unit.test_trackers import ROWS, Path, Trackers, config, log
if __name__ == "__main__":
    log(Trackers(config(Path(sys.argv[1]), "{name}")), ROWS)
"""


def test_wandb_works_without_a_network_and_a_resumed_run_is_the_same_one(tmp_path: Path) -> None:
    for _ in range(2):
        done = child(CHILD.format(name="wandb"), tmp_path, WANDB_MODE="offline")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (found,) = {path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert found == run_id(tmp_path)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert stored.count(b"reward/mean") >= 2 * len(ROWS)


def test_wandb_without_a_key_is_one_line_and_asks_nothing(tmp_path: Path) -> None:
    done = child(CHILD.format(name="wandb"), tmp_path, WANDB_MODE="", WANDB_API_KEY="", HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == "error: tracker wandb is given up: wandb has no API key: `wandb login`, or WANDB_MODE=offline\n"


def test_trackio_has_every_number_of_both_attempts_in_one_run(tmp_path: Path) -> None:
    for _ in range(2):
        done = child(CHILD.format(name="trackio"), tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
        assert (done.returncode, done.stderr) == (0, "")
    with sqlite3.connect(tmp_path / "trackio" / "monarch_rl.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in found} == {f"{tmp_path.name}-{run_id(tmp_path)}"}
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in found] == [(n, n / 4) for n in range(4)] * 2


class Deaf:
    """A tracker that fails where it is told to."""

    def __init__(self, fails_at: str = "", waits: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self._fails_at, self._waits = fails_at, waits

    def start(self, run: Run) -> None:
        if self._fails_at == "start":
            raise OSError("no space left\nmore words")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._waits is not None:
            self._waits.wait()
        if self._fails_at == f"step {step}":
            raise ValueError
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_that_fails_is_given_up_in_one_line_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, late = Deaf(), Deaf("step 2")
    log(Trackers(config(tmp_path), {"full": Deaf("start"), "late": late, "good": good}), ROWS)
    assert capsys.readouterr().err.splitlines() == [
        "error: tracker full is given up: no space left",
        "error: tracker late is given up: ValueError",
    ]
    assert (late.steps, late.closed) == ([0, 1], False)
    assert (good.steps, good.closed) == ([0, 1, 2, 3], True)


def test_nobody_waits_for_a_tracker_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    let_go = threading.Event()
    stuck = Deaf(waits=let_go)
    made = Trackers(config(tmp_path), {"stuck": stuck})
    for row in ROWS:
        made.row(row)
    made.close(0.01)
    assert capsys.readouterr().err == "error: trackers: stuck did not finish within 0.01 s; metrics.jsonl has every row\n"
    let_go.set()
    while not stuck.closed:
        time.sleep(0.01)
    assert stuck.steps == [0, 1, 2, 3]


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "trackio" else find_spec(name))
    with pytest.raises(UserError, match=r"trackers: the package trackio is not installed: pip install 'monarch-rl\[track\]'"):
        Trackers(config(tmp_path, "tensorboard", "trackio"))


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    log(Trackers(config(tmp_path)), ROWS)
    assert os.listdir(tmp_path) == []
