"""`cluster.kind=slurm` outside an allocation: a job that runs the same command, its console streamed, its exit code ours."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from monarch_rl.cluster.hosts import expected_nodes
from monarch_rl.cluster.placement import place
from monarch_rl.config import Config, UserError
from monarch_rl.observe.console import complain, say
from monarch_rl.output import make_output_dir

POLL_S = 1.0
"""Between two looks at the console's file."""
ASK_EVERY = 3
"""Slurm is asked after the job once in so many looks."""
GOES_ON = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "RESIZING", "SIGNALING", "STAGE_OUT"}
SAID = {
    "TIMEOUT": "ran into its time limit",
    "CANCELLED": "was cancelled",
    "PREEMPTED": "was preempted",
    "OUT_OF_MEMORY": "ran out of memory",
    "NODE_FAIL": "lost a node",
}
"""States that say more than an exit code."""
WAITS = {
    "Resources": " (they are in use)",
    "Priority": " (other jobs come first)",
    "BeginTime": " (it was queued again)",
    "PartitionNodeLimit": " (the partition does not have, or does not allow, so many nodes)",
    "PartitionTimeLimit": " (the partition does not allow cluster.time_limit)",
}
"""Reasons of Slurm that a newcomer cannot be expected to know; `squeue --start` and the manual of squeue say more."""


def submit(config: Config, arguments: Sequence[str]) -> int:
    """Submit, wait, and return the exit code of the run.

    Raises:
        UserError: Slurm is not here, or refuses the job.
    """
    if not shutil.which("sbatch"):
        raise UserError("cluster.kind=slurm: there is no Slurm here (sbatch not found); start it on a login node, or without this key")
    place(config, expected_nodes(config))  # a mistake in it is better heard now than when the job begins
    folder = make_output_dir(config).absolute()
    script, console = folder / "job.sbatch", folder / "console.log"
    script.write_text(batch_script(config, console, arguments), encoding="utf-8")
    job = Job(_sbatch(script), console)
    say(f"submitted Slurm job {job.id}; its console is {console}")
    return job.follow()


def batch_script(config: Config, console: Path, arguments: Sequence[str]) -> str:
    """As docs/slurm.md has it. `exec`: Slurm's warning signal must reach Python."""
    cluster = config.cluster
    wanted = {
        "job-name": config.recipe or "monarch_rl",
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cores(config),
        "gpus-per-node": cluster.gpus_per_node,
        "partition": cluster.partition,
        "time": cluster.time_limit,
        "account": cluster.account,
        "qos": cluster.qos,
        "output": console,
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.warning_s}",
    }
    options = [*[f"--{name}={value}" for name, value in wanted.items() if value], "--requeue", *cluster.sbatch_args]
    command = shlex.join([sys.executable, "-m", "monarch_rl.run", *arguments])
    lines = ["#!/bin/bash", *[f"#SBATCH {shlex.quote(option)}" for option in options], f"cd {shlex.quote(os.getcwd())} || exit 2"]
    return "\n".join([*lines, f"exec {command} ${{SLURM_RESTART_COUNT:+resume=latest}}", ""])


def cores(config: Config) -> int:
    """Of each node: enough for the trainer ranks and generators of the fullest."""
    placed = place(config, expected_nodes(config))
    threads: Counter[int] = Counter()
    for processes in placed[: 1 + config.generator.replicas]:
        for host in processes.hosts:
            threads[host] += processes.threads * processes.count // len(processes.hosts)
    return max(threads.values())


def _sbatch(script: Path) -> str:
    """The job's id."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        words = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()]
        raise UserError(f"cluster.kind=slurm: sbatch refused the job: {'; '.join(words)}")
    return done.stdout.strip().partition(";")[0]


class Job:
    """One that was submitted."""

    def __init__(self, id: str, console: Path) -> None:
        self.id, self._console = id, console
        self._shown = 0
        """bytes of the console that were printed"""
        self._waits_for = ""
        """Slurm's reason why it has not begun, as it was last said"""
        self._exit_code = 0
        """why we were asked to stop: 130 or 143"""
        self._began = self._cancelled = False

    def follow(self) -> int:
        """Until it is gone. SIGINT and SIGTERM have it save and close where it has begun; the next cancels it, the next leaves at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._cancel)
        while True:
            state, code = self._state()
            for _ in range(ASK_EVERY if state in GOES_ON else 1):
                self._stream()
                if state in GOES_ON:
                    time.sleep(POLL_S)
            if state not in GOES_ON:
                return self._verdict(state, code)

    def _cancel(self, number: int, _: FrameType | None) -> None:
        if self._cancelled:
            os._exit(128 + number)
        again, self._exit_code = bool(self._exit_code), 128 + number
        self._cancelled = again or not self._began
        if self._cancelled:
            say(f"cancelling Slurm job {self.id}, waiting until it is gone (once more to leave at once)")
            subprocess.run(["scancel", self.id], capture_output=True)
        else:  # to the controller alone: its workers are needed for what it writes
            say(f"Slurm job {self.id} saves what it has done; waiting until it is gone (once more to cancel it)")
            subprocess.run(["scancel", "--batch", "--signal=TERM", self.id], capture_output=True)

    def _state(self) -> tuple[str, int]:
        """In Slurm's words, and the exit code; `RUNNING` where Slurm does not answer, empty when it has forgotten the job."""
        done = subprocess.run(["scontrol", "show", "job", "--oneliner", self.id], capture_output=True, text=True)
        found = re.search(r"JobState=(\w+) Reason=(\S+).*?\bExitCode=(\d+):(\d+)", done.stdout)
        if found:
            self._say_why(found[1], found[2])
            self._began = found[1] == "RUNNING"
            return found[1], int(found[3]) or (128 + int(found[4]) if int(found[4]) else 0)
        return ("" if "Invalid job id" in done.stderr else "RUNNING"), 0

    def _say_why(self, state: str, reason: str) -> None:
        """What a job waits for may never come, as when a partition has fewer nodes."""
        waits_for = reason if state == "PENDING" and reason != "None" else ""
        if waits_for and waits_for != self._waits_for:
            say(f"Slurm job {self.id} waits: {waits_for}{WAITS.get(waits_for, '')}")
        self._waits_for = waits_for

    def _stream(self) -> None:
        """What is new on the job's console. The file is opened anew each time: shared file systems show news at an opening."""
        if not self._console.exists():
            return
        with self._console.open("rb") as file:
            file.seek(self._shown)
            news = file.read()
        self._shown += len(news)
        sys.stdout.buffer.write(news)
        sys.stdout.flush()

    def _verdict(self, state: str, code: int) -> int:
        if self._exit_code:
            complain(f"interrupted; Slurm job {self.id} is gone")
            return self._exit_code
        if state == "COMPLETED":
            return 0
        if state == "FAILED" and code:
            return code
        complain(f"Slurm job {self.id} {SAID.get(state, f'ended as {state}' if state else 'is not known to Slurm any more')}")
        return 1
