"""What a process did when: spans and levels, kept in the process until somebody drains them. Written to a file by `trace.py`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 100_000
"""Records of a process that nobody drains."""
TOGETHER_NS = 2_000_000
"""Spans of one kind with less than this between them can be told as one."""
COUNT_EVERY_NS = 50_000_000
"""Between two records of one level."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time, in nanoseconds of wall-clock time (the same clock in every process of a host)."""

    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Some levels at one moment."""

    name: str
    at_ns: int
    values: Mapping[str, float]


Record = Span | Count

_RECORDS: deque[Record] = deque(maxlen=KEPT)
_COUNTS: dict[str, Count] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """Record the time that the body takes, in this process."""
    start_ns = time.time_ns()
    try:
        yield
    finally:
        add(Span(name, start_ns, time.time_ns(), args or None))


def add(recorded: Record) -> None:
    with _LOCK:
        _RECORDS.append(recorded)


def add_one_of_many(name: str, start_ns: int, end_ns: int) -> None:
    """Record a span that may be short and frequent: it lengthens the one just before it, whose `times` counts them."""
    with _LOCK:
        last = _RECORDS[-1] if _RECORDS else None
        times = 1
        if isinstance(last, Span) and last.name == name and start_ns - last.end_ns < TOGETHER_NS:
            _RECORDS.pop()
            start_ns, times = last.start_ns, 1 + (last.args or {"times": 1})["times"]
        _RECORDS.append(Span(name, start_ns, end_ns, {"times": times}))


def count(name: str, **values: float) -> None:
    """Record levels where they have changed; those that change often are recorded now and then."""
    now_ns, last = time.time_ns(), _COUNTS.get(name)
    if last is None or (now_ns - last.at_ns >= COUNT_EVERY_NS and values != last.values):
        _COUNTS[name] = Count(name, now_ns, values)
        add(_COUNTS[name])


def kernel() -> str:
    """Names the running kernel, whose processes share one clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ahead_ns(asked: Sequence[tuple[int, int, int]]) -> int:
    """How far another clock is ahead of ours, from (ours when asked, its answer, ours when it came): the quickest answer knows best."""
    sent, answer, came = min(asked, key=lambda each: each[2] - each[0])
    return answer - (sent + came) // 2


def drain() -> list[Record]:
    """What this process recorded since the last call."""
    with _LOCK:
        records = list(_RECORDS)
        _RECORDS.clear()
    return records
