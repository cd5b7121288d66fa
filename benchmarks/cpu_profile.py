"""CPU time of the default job by process, from the first row of its metrics to the last: what is spent on what.

Of each process the busiest thread is shown beside the others: the engine's thread in a generator, the one that computes in a
trainer. `py-spy record --pid` shows what is inside; `ps e` tells which process is which.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import JOB, Job, JobFailed, Row, arguments, report, table
from monarch_rl.cluster.local import ROLE

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Threads = dict[int, float]
"""Thread → CPU seconds since its start."""


@dataclass(frozen=True)
class Spent:
    """By one process, between two moments."""

    role: str
    busiest_s: float
    others_s: float


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/cpu_profile"), help="folder for the run (runs/cpu_profile)")
    parser.add_argument("overrides", nargs="*", help="key=value of the default job, e.g. train.steps=12")
    options = parser.parse_args()
    command = [sys.executable, "-m", "monarch_rl.run", *JOB, "eval.every=0", *options.overrides, f"output_dir={options.runs}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        first, last = watch(process, options.runs / "metrics.jsonl")
    if process.returncode:
        raise JobFailed(f"{' '.join(command)} ended with {process.returncode}")
    show(spent(first, last), Job(options.runs), options.out)


def watch(process: subprocess.Popen[bytes], metrics: Path) -> tuple[dict[str, Threads], dict[str, Threads]]:
    """CPU time of every process when row 0 was there, and when the latest row was."""
    first: dict[str, Threads] = {}
    last: dict[str, Threads] = {}
    rows = 0
    while process.poll() is None:
        time.sleep(0.05)
        found = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if found > rows:
            rows, last = found, snapshot(process.pid)
            first = first or last
    return first, last


def snapshot(controller: int) -> dict[str, Threads]:
    roles = {pid: role for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (role := _role(pid, controller))}
    return {role: _threads(pid) for pid, role in roles.items()}


def spent(first: dict[str, Threads], last: dict[str, Threads]) -> list[Spent]:
    def of(role: str) -> Spent:
        threads = sorted(cpu - first.get(role, {}).get(thread, 0.0) for thread, cpu in last[role].items())
        return Spent(role, threads[-1], sum(threads[:-1]))

    return sorted([of(role) for role in last if last[role]], key=lambda each: each.busiest_s + each.others_s, reverse=True)


def show(processes: list[Spent], job: Job, out: Path | None) -> None:
    steps, total = len(job.rows) - 1, sum(p.busiest_s + p.others_s for p in processes)

    def share(seconds: float) -> str:
        return f"{seconds:.1f} s, {seconds / total:.1%}"

    rows = [(p.role, share(p.busiest_s), share(p.others_s)) for p in processes]
    text = f"{total:.1f} CPU-seconds in {steps} steps and {job.wall_s:.1f} s: {total / steps:.2f} for a step"
    by_process = {p.role: [p.busiest_s, p.others_s] for p in processes}
    result: Row = {"cpu_s": total, "steps": steps, "wall_s": job.wall_s, "processes": by_process}
    report(out, table(("process", "busiest thread", "its other threads"), rows) + "\n\n" + text, result)


def _role(pid: int, controller: int) -> str | None:
    """Of a process of the run, `controller` for itself; None for all others."""
    if pid == controller:
        return "controller"
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None
    named = next((v.partition(b"=")[2].decode() for v in variables if v.startswith(ROLE.encode() + b"=")), None)
    return named if parent == controller else None


def _threads(pid: int) -> Threads:
    found = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
            found[int(thread)] = (int(fields[11]) + int(fields[12])) * TICK_S
    except OSError:  # it ends
        pass
    return found


if __name__ == "__main__":
    main()
