"""Experiment trackers: each row of `metrics.jsonl` goes to them too. Only the controller talks to them, from a thread of its own.

A tracker that fails is told of in one line and given up; the run goes on without it.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from monarch_rl.config import Config, TrackerName, UserError
from monarch_rl.observe import console

PROJECT = "monarch_rl"
CLOSE_S = 20.0
"""For what has not been sent yet."""


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run."""

    id: str
    """the same when the run is resumed"""
    name: str
    folder: Path
    config: dict[str, Any]


class Tracker(Protocol):
    """A place that shows figures over steps. Called from one thread."""

    def start(self, run: Run) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Everything has been logged; returns when it is safe."""
        ...


class Tensorboard:
    """Event files in OUTPUT_DIR/tensorboard; what an earlier attempt logged from the first step on is hidden."""

    def start(self, run: Run) -> None:
        self._folder = run.folder / "tensorboard"
        self._writer: Any = None
        self._last = -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._last:  # the trainers have restarted from a checkpoint
            self._writer.close()
            self._writer = None
        self._last = step
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of the project `monarch_rl`, or WANDB_PROJECT; with WANDB_MODE=offline without a network, in OUTPUT_DIR/wandb."""

    def start(self, run: Run) -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
            raise UserError("wandb has no API key: `wandb login`, or WANDB_MODE=offline")
        settings = wandb.Settings(console="off", silent=True)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project, id=run.id, name=run.name, dir=str(run.folder), config=run.config, resume="allow", settings=settings
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project `monarch_rl` in trackio's own folder (TRACKIO_DIR); `trackio show` opens it."""

    def start(self, run: Run) -> None:
        import trackio

        self._trackio: Any = trackio
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        trackio.init(project=PROJECT, name=f"{run.name}-{run.id}", config=run.config, resume="allow", **quiet)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


KINDS: dict[TrackerName, Callable[[], Tracker]] = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio}


def check(names: Sequence[str]) -> None:
    """Raises UserError: the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"trackers: the package {name} is not installed: pip install 'monarch-rl[track]', or leave {name} out")


class Trackers:
    """Hands rows on to all trackers of a run. No call waits for them, but `close`."""

    def __init__(self, config: Config, trackers: Mapping[str, Tracker] | None = None) -> None:
        """`trackers`: others than those of the configuration, by name."""
        if trackers is None:
            check(config.trackers)
            trackers = {name: KINDS[name]() for name in config.trackers}
        self._live = dict(trackers)
        self._config = config
        self._rows: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def row(self, row: Mapping[str, Any]) -> None:
        """A row as it goes into `metrics.jsonl`."""
        if not self._live:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
            self._thread.start()
        self._rows.put(dict(row))

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Wait until the trackers have everything, at most `deadline_s`. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._rows.put(None)
        thread.join(deadline_s)
        if thread.is_alive():
            console.complain(f"trackers: {', '.join(self._live)} did not finish within {deadline_s:g} s; metrics.jsonl has every row")

    def _run(self) -> None:
        folder = Path(self._config.output_dir)
        run = Run(run_id(folder), folder.resolve().name, folder, asdict(self._config))
        self._each(lambda tracker: tracker.start(run))
        while (row := self._rows.get()) is not None:
            values = {key: float(value) for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
            self._log(row["step"], values)
        self._each(lambda tracker: tracker.close())

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker is somebody else's program, and the training is not to end with it
                del self._live[name]
                said = str(error).strip().partition("\n")[0] or type(error).__name__
                console.complain(f"tracker {name} is given up: {said}")


def run_id(folder: Path) -> str:
    """Of the run in an output folder; made once, so that a resumed run is the same one to its trackers."""
    file = folder / "trackers.json"
    if not file.is_file():
        file.write_text(json.dumps({"id": uuid.uuid4().hex[:8]}) + "\n", encoding="utf-8")
    return str(json.loads(file.read_text(encoding="utf-8"))["id"])
