"""Spans of all processes on one clock, written as a Chrome trace (opens in Perfetto)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time, in nanoseconds of wall-clock time (the same clock in every process of a host)."""

    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] | None = None


_SPANS: list[Span] = []
_LOCK = threading.Lock()


@contextlib.contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """Record the time that the body takes, in this process."""
    start_ns = time.time_ns()
    try:
        yield
    finally:
        add(Span(name, start_ns, time.time_ns(), args or None))


def add(recorded: Span) -> None:
    with _LOCK:
        _SPANS.append(recorded)


def drain() -> list[Span]:
    """The spans that this process recorded since the last call."""
    with _LOCK:
        spans = _SPANS[:]
        _SPANS.clear()
    return spans


class Trace:
    """Collects spans by lane (one per actor process) and writes them as one file."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}

    def add(self, lane: str, spans: Iterable[Span]) -> None:
        pid = self._lane(lane)
        for s in spans:
            event = {"ph": "X", "pid": pid, "tid": 0, "name": s.name, "ts": s.start_ns / 1e3, "dur": (s.end_ns - s.start_ns) / 1e3}
            self._events.append(event | ({"args": dict(s.args)} if s.args else {}))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    def _lane(self, lane: str) -> int:
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes)
            self._events.append({"ph": "M", "pid": self._lanes[lane], "name": "process_name", "args": {"name": lane}})
        return self._lanes[lane]
