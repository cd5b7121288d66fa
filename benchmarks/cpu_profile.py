"""CPU time of the default job by process, from the first row of its metrics to the last: what is spent on what.

Of each process the busiest thread is shown beside the others: the engine's thread in a generator, the one that computes in a
trainer. `py-spy record --pid` shows what is inside; `ps e` tells which process is which.

A second table holds what the run says of its idle time against what the kernel says: a process that is not idle computes, or waits for
a core. The kernel knows both of a thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import JOB, Job, JobFailed, Row, arguments, report, table
from monarch_rl.cluster.local import ROLE
from monarch_rl.observe.gantt import read_lanes


class Ran(NamedTuple):
    """By one thread, since its start."""

    cpu_s: float
    queued_s: float
    """ready to run, while every core was taken"""


Threads = dict[int, Ran]


@dataclass(frozen=True)
class Look:
    """At all threads of a run."""

    at_ns: int
    """Unix time"""
    processes: dict[str, Threads]


@dataclass(frozen=True)
class Spent:
    """By one process, between two looks."""

    role: str
    busiest_s: float
    others_s: float
    queued_s: float
    """of the busiest thread"""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/cpu_profile"), help="folder for the run (runs/cpu_profile)")
    parser.add_argument("overrides", nargs="*", help="key=value of the default job, e.g. train.steps=12")
    options = parser.parse_args()
    command = [sys.executable, "-m", "monarch_rl.run", *JOB, "eval.every=0", *options.overrides, f"output_dir={options.runs}"]
    metrics = options.runs / "metrics.jsonl"
    earlier = metrics.stat().st_ino if metrics.exists() else 0
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        first, last = watch(process, metrics, earlier)
    if process.returncode:
        raise JobFailed(f"{' '.join(command)} ended with {process.returncode}")
    job = Job(options.runs)
    processes = spent(first, last)
    show(processes, job, idle(processes, job, first.at_ns, last.at_ns), options.out)


def watch(process: subprocess.Popen[bytes], metrics: Path, earlier: int) -> tuple[Look, Look]:
    """When row 0 was there, and when the latest row was. `earlier`: the file of a run that was in the folder, which is moved away."""
    first = last = Look(0, {})
    rows = 0
    while process.poll() is None:
        time.sleep(0.05)
        found = metrics.read_bytes().count(b"\n") if metrics.exists() and metrics.stat().st_ino != earlier else 0
        if found > rows:
            rows, last = found, snapshot(process.pid)
            first = first if first.processes else last
    return first, last


def snapshot(controller: int) -> Look:
    roles = {pid: role for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (role := _role(pid, controller))}
    return Look(time.time_ns(), {role: _threads(pid) for pid, role in roles.items()})


def spent(first: Look, last: Look) -> list[Spent]:
    def of(role: str) -> Spent:
        before, none = first.processes.get(role, {}), Ran(0.0, 0.0)
        threads = [
            (ran.cpu_s - before.get(at, none).cpu_s, ran.queued_s - before.get(at, none).queued_s)
            for at, ran in last.processes[role].items()
        ]
        busiest, *others = sorted(threads, reverse=True)
        return Spent(role, busiest[0], sum(cpu_s for cpu_s, _ in others), busiest[1])

    return sorted(
        [of(role) for role, threads in last.processes.items() if threads], key=lambda each: each.busiest_s + each.others_s, reverse=True
    )


def idle(processes: list[Spent], job: Job, start_ns: int, end_ns: int) -> list[tuple[str, float, float, float]]:
    """Of trainers and generators, as shares of the time between the looks: (process, by metrics.jsonl, timeline.json, the kernel)."""
    begun_ns = json.loads((job.folder / "timeline.json").read_text())["otherData"]["start_unix_ns"]
    lanes = {lane.name: lane for lane in read_lanes(job.folder / "timeline.json")}
    found = []
    for process in processes:
        name = process.role.removesuffix(" 0").replace("_", " ") if process.role.startswith("generator_") else process.role
        kind = name.partition(" ")[0]
        if kind in ("trainer", "generator"):
            drawn = lanes[name].idle(start_ns - begun_ns, end_ns - begun_ns)
            ran = (process.busiest_s + process.queued_s) / ((end_ns - start_ns) / 1e9)
            found.append((name, _said(job, f"idle/{kind}"), drawn, 1 - ran))
    return found


def _said(job: Job, key: str) -> float:
    """Mean over the time of a figure of metrics.jsonl, which is about the time since the row before."""
    return sum(row[key] * (row["wall_s"] - before["wall_s"]) for before, row in pairwise(job.rows)) / job.wall_s


def show(processes: list[Spent], job: Job, idle: list[tuple[str, float, float, float]], out: Path | None) -> None:
    steps, total = len(job.rows) - 1, sum(p.busiest_s + p.others_s for p in processes)

    def share(seconds: float) -> str:
        return f"{seconds:.1f} s, {seconds / total:.1%}"

    rows = [(p.role, share(p.busiest_s), share(p.others_s)) for p in processes]
    text = f"{total:.1f} CPU-seconds in {steps} steps and {job.wall_s:.1f} s: {total / steps:.2f} for a step"
    by_process = {p.role: [p.busiest_s, p.others_s] for p in processes}
    result: Row = {"cpu_s": total, "steps": steps, "wall_s": job.wall_s, "processes": by_process, "idle": idle}
    shares = [(name, f"{said:.1%}", f"{drawn:.1%}", f"{ran:.1%}") for name, said, drawn, ran in idle]
    text += "\n\n" + table(("idle", "metrics.jsonl", "timeline.json", "neither running nor waiting for a core"), shares)
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
            ran_ns, queued_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            found[int(thread)] = Ran(int(ran_ns) / 1e9, int(queued_ns) / 1e9)
    except OSError:  # it ends
        pass
    return found


if __name__ == "__main__":
    main()
