"""Inside a Slurm allocation: one worker on each of its nodes, for as long as a run needs them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from monarch_rl.cluster_config import duration_s
from monarch_rl.config import Config, UserError
from monarch_rl.observe.console import complain

LOOK_S = 0.1
"""Between two looks at the folder where workers publish their addresses."""
END_S = 15.0
"""For srun to notice that its tasks have ended."""
WARNS_EARLY_S = 60
"""Slurm may send its warning so much earlier than asked for."""
REQUEUE = 85
"""Exit code of a run that has saved itself before its time was up, and wants to go on later."""


def inside_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def requeue() -> None:
    """Have Slurm end this job and queue it again. What a job's script adds on the next start is for the script to say."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])


def warned_early(warning_s: int) -> None:
    """Slurm's warning, before the run can save anything. A job that is pre-empted queues again; one whose time limit leaves no time
    to train would come to this point for ever, so it ends."""
    job = os.environ["SLURM_JOB_ID"]
    shown = subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True).stdout
    if not limit_is_near(shown, warning_s):
        return requeue()
    complain(
        f"cluster.time_limit: Slurm warns job {job} of its time limit before the run can take a step "
        f"(cluster.warning_s={warning_s} seconds before the end); give it more time"
    )
    os.kill(os.getpid(), signal.SIGTERM)


def limit_is_near(shown: str, warning_s: int) -> bool:
    """Whether a warning is due by a job's time limit, after what scontrol shows of the job."""
    found = re.search(r"\bRunTime=(\S+) TimeLimit=(\S+)", shown)
    ran_s, limit_s = (duration_s(text) for text in found.groups()) if found else (None, None)
    return ran_s is not None and limit_s is not None and limit_s - ran_s <= warning_s + WARNS_EARLY_S


class Allocation:
    """Workers on the first `cluster.nodes` nodes of the allocation that this process runs in.

    Ports are whatever is free on a node, so jobs that share a node do not meet.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._logs = Path(config.output_dir).absolute() / "workers"
        self._meeting = self._logs / f"job-{os.environ.get('SLURM_JOB_ID')}-{os.urandom(4).hex()}"
        """folder where the workers publish their addresses"""
        self._srun: subprocess.Popen[bytes] | None = None
        self._attached = False

    async def start(self) -> list[str]:
        """Addresses of the workers, in the order of nodes.

        Raises:
            UserError: this is no allocation, it is too small, or workers did not come up.
        """
        nodes = self._config.cluster.nodes
        if not inside_allocation():
            raise UserError("cluster.kind=slurm: not inside a Slurm allocation; salloc gives one, and the command line submits a job")
        if nodes > (have := int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))):
            raise UserError(f"cluster.nodes={nodes}: this allocation has {have}")
        self._srun = srun = self._launch(nodes)
        deadline = time.monotonic() + self._config.cluster.attach_deadline_s
        while len(found := list(self._meeting.glob("*.address"))) < nodes:
            if srun.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"cluster.kind=slurm: {len(found)} of {nodes} workers came up: {self._last_words()}")
            await asyncio.sleep(LOOK_S)
        return [(self._meeting / f"{rank}.address").read_text(encoding="utf-8") for rank in range(nodes)]

    def _launch(self, nodes: int) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C is for this process to handle."""
        self._meeting.mkdir(parents=True)
        with (self._logs / "srun.log").open("ab") as log:
            return subprocess.Popen(self._command(nodes), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def all_attached(self) -> None:
        """From now on the workers end when their controller lets them go."""
        self._attached = True
        shutil.rmtree(self._meeting)

    async def end(self) -> None:
        """Wait for the workers to end, and end those that do not."""
        if self._srun is None:
            return
        if not self._attached:
            self._srun.terminate()
        for stop in (self._srun.terminate, self._srun.kill):
            try:
                await asyncio.to_thread(self._srun.wait, END_S)
                break
            except subprocess.TimeoutExpired:
                stop()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _command(self, nodes: int) -> list[str]:
        """With all of a node's cores for its worker, whatever Slurm would give to a single task."""
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"]
        output = ["--kill-on-bad-exit=0", f"--output={self._logs}/%N-%t.log", "--job-name=workers"]
        return [*srun, *output, sys.executable, "-m", "monarch_rl.run", "worker", "--publish", str(self._meeting)]

    def _last_words(self) -> str:
        text = (self._logs / "srun.log").read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else f"nothing was heard within {self._config.cluster.attach_deadline_s:g} s"
