"""`status.json`: whether a run goes on and how it ended, for readers that know its output folder only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from monarch_rl.disk import write_whole

State = Literal["running", "done", "stopped", "failed", "died"]
BEAT_S = 10.0
"""Between two signs of life."""
SILENT_S = 60.0
"""A run on another host that has given none for so long is taken for dead."""


@dataclass(frozen=True)
class Status:
    """How a run is."""

    state: State
    """done: all steps; stopped: ended before, without an error; died: it could not say how it ended"""
    reason: str = ""
    """of a failure, in one line"""
    started: float = 0.0
    """Unix time"""
    updated: float = 0.0
    """Unix time of the last sign of life"""
    host: str = ""
    pid: int = 0
    """of the controller"""
    process_started: int = 0
    """when the controller's process began, in clock ticks since its host booted: tells it from a later one of that number"""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class StatusFile:
    """Written by the controller: at the start, every `BEAT_S` seconds, and at the end."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / "status.json"
        self._own = {"host": socket.gethostname(), "pid": os.getpid(), "process_started": process_started(os.getpid())}
        self._started = time.time()
        self._beating: asyncio.Task[None] | None = None
        self._ending: tuple[State, str] = ("stopped", "")

    def start(self) -> None:
        """The run begins; called in its event loop."""
        self._write("running")
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="signs of life")

    def ends(self, state: State, reason: str = "") -> None:
        """How the run is going to be called when it is closed."""
        self._ending = state, reason

    def close(self) -> None:
        """The run is over. A second call does nothing."""
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
            self._write(*self._ending)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(OSError):  # what the run itself cannot write ends it; this is tried again
                self._write("running")

    def _write(self, state: State, reason: str = "") -> None:
        status = {"state": state, "reason": reason, "started": self._started, "updated": time.time(), **self._own}
        write_whole(self._path, json.dumps(status) + "\n")


def read_status(output_dir: Path) -> Status | None:
    """What is known of the run; None when it never began. Sees that a controller is gone: by its process on this host, by silence else."""
    path = output_dir / "status.json"
    if not path.is_file():
        return None
    status = Status(**json.loads(path.read_text(encoding="utf-8")))
    if status.state != "running" or _lives(status):
        return status
    return Status(**asdict(status) | {"state": "died", "reason": f"its controller, process {status.pid} on {status.host}, is gone"})


def _lives(status: Status) -> bool:
    if status.host == socket.gethostname():
        return process_started(status.pid) == status.process_started
    return time.time() - status.updated < SILENT_S


def process_started(pid: int) -> int:
    """In clock ticks since the host booted; 0 when there is no such process, or it has ended and its parent does not mind."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
