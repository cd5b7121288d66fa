"""Half an hour of the default job under random faults: whether it lives through them, and whether anything grows.

Generators, rollout workers, scorers and the trainer are killed or stopped for good, at times drawn from a seed; of the kinds that
have two members the oldest is spared, so that one can be watched for the whole time. Every few seconds each process tells its
resident memory without that of files (which is shared, and the kernel's to take back), descriptors and threads. Ends with 1 when
something grows beyond noise, or when the run does not end as an interrupted one should.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

import psutil

from benchmarks.common import JOB, Row, arguments, report, table
from benchmarks.growth import LEAST_COUNT, LEAST_MIB, Life, Trend, trend
from monarch_rl.cluster.local import ROLE
from tests.e2e.jobs import Job, lives, within

SETTINGS = (
    *("steps=1000000", "trainer.lr=1e-6", "checkpoint.every=20", "console.rollouts_every=0", "eval.prompts=64", "close_deadline_s=200"),
    *(f"{key}=2" for key in ("generator.replicas", "rollout.workers", "scorer.workers")),
    *(f"{kind}.{key}" for kind in ("generator", "rollout", "scorer", "trainer") for key in ("max_restarts=1000", "hang_s=20")),
)
"""A policy that learns would soon leave nothing to train on."""
KINDS = {"generator": 3, "rollout": 3, "scorer": 3, "trainer": 1}
"""What may be lost, and how often in ten: the trainer's own life must be long enough to be watched."""
SPARED = {"generator", "rollout", "scorer"}
START_S = 300.0
STALL_S = 240.0
"""Without an optimizer step, after which the run counts as stuck."""
END_S = 240.0
GONE_S = 10.0
MEASURES = {"memory": LEAST_MIB, "descriptors": LEAST_COUNT, "threads": LEAST_COUNT}
"""And the growth below which nothing is said."""
HOST = {"processes": LEAST_COUNT, "/dev/shm": LEAST_COUNT, "temporary files": LEAST_COUNT}


class Failed(Exception):
    """The run did not go on, or did not end, as it should."""


class Soak(Job):
    """A run as a user starts it, and samples of all processes that were ever seen of it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        super().__init__(folder, *JOB, *SETTINGS, *overrides, name="run", more={"TMPDIR": str(self._temporary)})
        self.began = time.monotonic()
        self.lives: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
        """Samples by kind and process."""
        self.host: list[Row] = []
        self._kinds: dict[int, str] = {}

    @property
    def steps(self) -> int:
        """That are done; -1 before row 0."""
        file = self.output_dir / "metrics.jsonl"
        return int(rows[-1]["step"]) if file.exists() and (rows := self.rows) else -1

    def living(self) -> dict[str, list[psutil.Process]]:
        """By kind, the oldest first."""
        self._look()
        found = defaultdict(list)
        for process in filter(lives, self._seen.values()):
            if kind := self._kinds.get(process.pid) or _kind(process):
                self._kinds[process.pid] = kind
                found[kind].append(process)
        return found

    def sample(self) -> None:
        """What each process takes now."""
        at, living = time.monotonic() - self.began, self.living()
        for kind, processes in {"controller": [self.process], **living}.items():
            for process in processes:
                with suppress(OSError):
                    self.lives[kind, process.pid].append({"at": at, **taken(process.pid)})
        counts = {"processes": sum(map(len, living.values())), "/dev/shm": entries(Path("/dev/shm"))}
        self.host.append({"at": at, **counts, "temporary files": entries(self._temporary)})

    def end(self) -> None:
        """As Ctrl-C does. Raises Failed."""
        self.signal(signal.SIGINT)
        if not within(END_S, lambda: self.process.poll() is not None):
            raise Failed("it did not end when it was interrupted")
        if (code := self.process.returncode) != 130 or "error: interrupted after step" not in self.err:
            raise Failed(f"it ended with {code}: {self.err[-2000:]}")
        if not Path(saved := self.err.rpartition(" goes on from ")[2].strip()).is_dir():
            raise Failed(f"the checkpoint that it names is not there: {saved}")
        if left := self.gone_within(GONE_S):
            raise Failed(f"{GONE_S:g} s later there are still {left}")

    def kill(self) -> None:
        """Whatever is left."""
        self._look()
        for process in self._seen.values():
            with suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()


def _kind(process: psutil.Process) -> str:
    """`generator`, `replay buffer`, …; empty for one that is only just becoming something."""
    with suppress(psutil.Error):
        command, role = process.cmdline(), process.environ().get(ROLE, "")
        if any("reward_process" in word for word in command):
            return "reward"
        if "monarch_rl.cluster.child" in command and role:
            return role.rpartition(" ")[0].rstrip("_0123456789").replace("_", " ")
    return ""


def taken(pid: int) -> Row:
    """Raises OSError: it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    if "RssAnon" not in status:  # it is ending
        raise ProcessLookupError(pid)
    memory = sum(int(status[key][0]) for key in ("RssAnon", "RssShmem")) / 1024
    return {"memory": memory, "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"][0])}


def entries(folder: Path) -> int:
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def soak(run: Soak, options: Namespace) -> list[Row]:
    """Sample and hurt it until the time is up; the faults. Raises Failed."""
    drawn = Random(options.seed)
    kinds = kinds_in_turn(drawn)
    wait_for_step(run)
    faults: list[Row] = []
    ends = time.monotonic() + options.minutes * 60
    due = time.monotonic() + drawn.expovariate(1 / options.every)
    step, moved = -1, time.monotonic()
    while (now := time.monotonic()) < ends:
        run.sample()
        check_alive(run)
        if (last := run.steps) != step:
            step, moved = last, now
        elif now - moved > STALL_S:
            run.signal(signal.SIGQUIT)
            time.sleep(15)
            raise Failed(f"no step after {step} for {STALL_S:g} s\n{run.out[-4000:]}")
        if now >= due:
            faults += hurt(run, next(kinds), drawn)
            due = now + drawn.expovariate(1 / options.every)
        time.sleep(options.sample)
    return faults


def kinds_in_turn(drawn: Random) -> Iterator[str]:
    """Ten after ten, each in an order of its own."""
    while True:
        yield from drawn.sample(list(KINDS), sum(KINDS.values()), counts=KINDS.values())


def wait_for_step(run: Soak) -> None:
    deadline = time.monotonic() + START_S
    while run.steps < 1:
        check_alive(run)
        if time.monotonic() > deadline:
            raise Failed(f"no step within {START_S:g} s\n{run.out}{run.err}")
        time.sleep(1)


def check_alive(run: Soak) -> None:
    if (code := run.process.poll()) is not None:
        raise Failed(f"it ended by itself with {code}: {run.err[-2000:]}\n{run.out[-2000:]}")


def hurt(run: Soak, kind: str, drawn: Random) -> list[Row]:
    """Kill or stop one process of this kind, where there is one that may be."""
    how, living = drawn.choice([signal.SIGKILL, signal.SIGSTOP]), run.living()[kind]
    candidates = living[1:] if kind in SPARED else living
    if not candidates:
        return []
    victim = drawn.choice(candidates)
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(how)
    fault = {"at": time.monotonic() - run.began, "kind": kind, "how": how.name, "pid": victim.pid}
    print(f"{fault['at']:7.1f} s  {how.name} to {kind} ({victim.pid})", flush=True)
    return [fault]


def trends(run: Soak, settle_s: float) -> dict[str, dict[str, Trend | None]]:
    """By kind of process, and what was measured of it."""
    found: dict[str, dict[str, Trend | None]] = {}
    for kind in sorted({kind for kind, _ in run.lives if kind}):
        samples = [life for (name, _), life in run.lives.items() if name == kind]
        found[kind] = {measure: trend([series(life, measure) for life in samples], settle_s) for measure in MEASURES}
    found["host"] = {measure: trend([series(run.host, measure)], settle_s) for measure in HOST}
    return found


def series(life: list[Row], measure: str) -> Life:
    return [(sample["at"], float(sample[measure])) for sample in life]


def growing(found: dict[str, dict[str, Trend | None]]) -> list[str]:
    """A line for each that does."""
    least = {**MEASURES, **HOST}
    return [
        f"{kind}: {measure} grows by {one.per_hour:.1f} (± {one.error:.1f}) an hour"
        for kind, measures in found.items()
        for measure, one in measures.items()
        if one is not None and one.grows(least[measure])
    ]


def broken_promises(run: Soak) -> list[str]:
    """What the files of the run say that it should not have done."""
    rows, wrong = run.rows, ["it printed a traceback"] if "Traceback" in run.err else []
    if [row["step"] for row in rows] != list(range(len(rows))):
        wrong.append("metrics.jsonl does not hold every step once")
    if (oldest := max(row.get("age/max", 0) for row in rows)) > 2:
        wrong.append(f"tokens of age {oldest:g} were trained")
    lines = (run.output_dir / "rollouts.jsonl").read_text().splitlines()
    trained = Counter(json.loads(line)["ordinal"] for line in lines)
    if twice := [ordinal for ordinal, times in trained.items() if times > 1]:
        wrong.append(f"prompts were trained twice: {twice[:8]}")
    return wrong


def show(found: dict[str, dict[str, Trend | None]]) -> str:
    processes = [(kind, *_cells(found[kind], list(MEASURES))) for kind in found if kind != "host"]
    first = table(("process", "lives", "hours", "memory, MiB", "MiB/h", "descriptors/h", "threads/h"), processes)
    counts = [(name, _per_hour(one), "-" if one is None else f"{one.level:.0f}") for name, one in found["host"].items()]
    return first + "\n\n" + table(("of the host", "per hour", "at last"), counts)


def _cells(measures: dict[str, Trend | None], names: list[str]) -> tuple[str, ...]:
    one = measures["memory"]
    head = ("0", "-", "-") if one is None else (str(one.lives), f"{one.hours:.2f}", f"{one.level:.0f}")
    return (*head, *[_per_hour(measures[name]) for name in names])


def _per_hour(one: Trend | None) -> str:
    return "-" if one is None else f"{one.per_hour:+.1f} ± {one.error:.1f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="from the first step on (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_argument("--every", type=float, default=40, help="seconds between two faults, in the mean (40)")
    parser.add_argument("--sample", type=float, default=5, help="seconds between two samples (5)")
    parser.add_argument("--settle", type=float, default=300, help="first seconds of a process that are left out (300)")
    parser.add_argument("--folder", type=Path, help="keep the run in this new folder")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(measure(options, options.folder or Path(temporary)))


def measure(options: Namespace, folder: Path) -> int:
    run, faults, wrong = Soak(folder, *options.overrides), list[Row](), list[str]()
    try:
        faults = soak(run, options)
        run.end()
        wrong = broken_promises(run)
    except Failed as failed:
        wrong = [str(failed)]
    finally:
        run.kill()
    found = trends(run, options.settle)
    wrong += growing(found)
    done, counts = run.steps, Counter(f"{fault['kind']} {fault['how']}" for fault in faults)
    said = [f"{done} steps, {len(faults)} faults: {', '.join(f'{n} × {what}' for what, n in sorted(counts.items()))}", *wrong]
    of = {kind: {name: one and asdict(one) for name, one in measures.items()} for kind, measures in found.items()}
    samples = {f"{kind} {pid}": life for (kind, pid), life in run.lives.items()} | {"host": run.host}
    result = {"steps": done, "seed": options.seed, "faults": faults, "trends": of, "wrong": wrong, "samples": samples}
    report(options.out, "\n".join([show(found), "", *said, "nothing grows beyond noise" if not wrong else ""]), result)
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
