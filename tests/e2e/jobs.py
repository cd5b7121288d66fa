"""Runs as a user starts them, in a session of their own, and what becomes of their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from monarch_rl.cluster.local import ROLE
from monarch_rl.cluster.machine import POLL

ROOT = Path(__file__).parents[2]
SMALL = ["recipe=grpo_qwen", "buffer.prompts_per_step=8", "eval.prompts=8", "console.rollouts_every=0", "trainer.warmup_steps=1"]
MAIN_STEPS = 8
MAIN = f"""recipe=grpo_qwen steps={MAIN_STEPS} buffer.prompts_per_step=16 eval.prompts=64 eval.every=4 trainer.warmup_steps=2
console.rollouts_every=4""".split()
START_S = 240.0
"""Until a run takes steps, on a machine that does other things too."""
LOOK_S = 0.1
KILLED = r"(was killed by signal 9 \(SIGKILL\)|is gone: its process does not answer any more)"
"""How a run may tell of a process that was killed: on a busy host Monarch may find the second before the first."""
LOGS: deque[Path] = deque(maxlen=12)
"""What the latest runs have written; `conftest.py` shows how these files end when a test fails."""


def environment() -> dict[str, str]:
    """As a user's: a run sets Monarch up itself."""
    return {key: value for key, value in os.environ.items() if key != POLL} | {"PYTHONPATH": str(ROOT)}


def within(seconds: float, reached: Callable[[], bool]) -> bool:
    """Whether it comes to that in so many seconds. Looks are counted: those in which the whole machine stood still are one."""
    for _ in range(round(seconds / LOOK_S)):
        if reached():
            return True
        time.sleep(LOOK_S)
    return reached()


class Job:
    """`python -m monarch_rl.run ARGUMENTS`, started; its output goes to files, so that nothing waits for a reader."""

    def __init__(self, folder: Path, *arguments: str, name: str = "job", more: Mapping[str, str] | None = None) -> None:
        self.output_dir = folder / name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        LOGS.extend((self._out, self._err, self.output_dir / "error.log"))
        command = [sys.executable, "-m", "monarch_rl.run", *arguments, f"output_dir={self.output_dir}"]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment() | dict(more or {}),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, which must be JSON proper: without NaN."""
        lines = (self.output_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line, parse_constant=_refuse) for line in lines if line.endswith("\n")]

    def until_steps(self, steps: int) -> None:
        self._until(lambda: sum(line.startswith("step ") for line in self.out.splitlines()) > steps, f"step {steps}")

    def until_row(self, step: int) -> None:
        def written() -> bool:
            file = self.output_dir / "metrics.jsonl"
            return file.exists() and any(f'"step": {step},' in line for line in file.read_text().splitlines())

        self._until(written, f"row {step}")

    def until_process(self, role: str) -> None:
        self._until(lambda: role in self.roles(), f"process {role}")

    def until_said(self, text: str, times: int = 1) -> None:
        self._until(lambda: self.out.count(text) >= times, repr(text))

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        def over() -> bool:
            return reached() or self.process.poll() is not None

        assert within(START_S, over), f"no {what} within {START_S:g} s"
        assert reached(), f"ended with {self.process.returncode} before {what}"

    def roles(self) -> dict[str, psutil.Process]:
        """The actor processes by name, e.g. `trainer 0`."""
        self._look()
        roles = {}
        for process in self._seen.values():
            with suppress(psutil.Error):
                if role := process.environ().get(ROLE):
                    roles.setdefault(role, process)
        return roles

    def listens(self) -> dict[str, set[str]]:
        """The addresses on which the run's processes listen, by process."""
        found = {}
        for role, process in {"controller": psutil.Process(self.process.pid), **self.roles()}.items():
            found[role] = {at.laddr.ip for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN}
        return found

    def signal(self, number: signal.Signals) -> None:
        self._look()
        self.process.send_signal(number)

    def kill(self, role: str) -> None:
        self.roles()[role].kill()

    def wait(self, deadline_s: float = START_S) -> int:
        """For its end; the exit code."""
        assert within(deadline_s, lambda: self.process.poll() is not None), f"not over within {deadline_s:g} s"
        return int(self.process.returncode)

    def gone_within(self, seconds: float) -> list[str]:
        """Processes that ever were seen of this run and still live after `seconds`."""
        within(seconds, lambda: not self._living())
        return self._living()

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)

    def _living(self) -> list[str]:
        self.process.poll()
        return [command for process in self._seen.values() if (command := _living_command(process))]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _living_command(process: psutil.Process) -> str:
    """Empty: it does not live."""
    try:
        return " ".join(process.cmdline()) if lives(process) else ""
    except psutil.NoSuchProcess:
        return ""


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@contextmanager
def started(folder: Path, *arguments: str, name: str = "job") -> Iterator[Job]:
    """A run that is over when the test is, whatever happens."""
    job = Job(folder, *arguments, name=name)
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def finished(folder: Path, *arguments: str, name: str = "job") -> Job:
    with started(folder, *arguments, name=name) as job:
        job.wait()
    return job


def command(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """`python -m monarch_rl.run ARGUMENTS`, started, for `said`."""
    return subprocess.Popen(
        [sys.executable, "-m", "monarch_rl.run", *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, when it has ended."""
    out, err = process.communicate(timeout=START_S)
    return process.returncode, out, err
