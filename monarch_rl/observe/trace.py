"""`timeline.json`: the records of all processes on one clock, as a Chrome trace (opens in Perfetto).

One event a line, written as they come: the file of a run that goes on or was killed can be read too, by `read` and by Perfetto.
A process of the trace is an actor process, its threads are tracks whose spans do not overlap:

- trainer: wait, train, stage;
- generator: what the engine does (decode, idle), weights (pull, swap), and a row for each request at a time;
- rollout worker: evaluations, and a row for each group at a time; scorer: the tasks' rewards and environments, short ones told as one;
- replay buffer and generators: levels.

An arrow goes from the staging of a version at trainer 0 to each pull of it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from monarch_rl.disk import on_disk
from monarch_rl.observe.timeline import Count, Record, Span

MOST_EVENTS = 100_000
"""About 12 MB. Details are left out from half of it on; what is left out is counted in `metadata`."""
MOST_ROWS = 32
"""Requests of one generator, or groups of one worker, at a time; how many there are is a level of the generator."""
ROWS = {"generate", "rollout"}
"""Spans that overlap each other; each gets a row that is free."""
DETAILS = ROWS | {"score", "observe"}
TRACKS = {"pull": (1, "weights"), "swap": (1, "weights")}
STAGED = 64
"""Versions whose staging is remembered for the arrows to their pulls, and pulls that wait for that of theirs."""
FIRST_ROW = 2
FIRST_LANE = "trainer 0"

Event = dict[str, Any]


class Trace:
    """Writes `timeline.json`, from the first record on. An earlier file of that name is kept beside it: a resumed run begins a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offsets_ns: dict[str, int] = {}
        """By lane: how far its host's clock is ahead of ours."""
        self._start_ns = time.time_ns()
        self._file: TextIO | None = None
        self._lanes: dict[str, int] = {}
        self._tracks: set[tuple[int, int]] = set()
        self._row_ends: dict[int, list[int]] = {}
        self._decoding_ns: dict[str, int] = {}
        self._ends_ns: Counter[str] = Counter()
        self._staged: dict[str, Span] = {}
        self._pulled: list[tuple[str, Span]] = []
        self._events = self._arrows = 0
        self._left_out: Counter[str] = Counter()

    def add(self, lane: str, records: Iterable[Record]) -> None:
        with on_disk(self._path):
            if self._file is None:
                self._file = self._open()
            offset_ns = self.offsets_ns.get(lane, 0)
            for record in records:
                if isinstance(record, Count):
                    self._count(lane, record, record.at_ns - offset_ns)
                else:
                    self._span(lane, Span(record.name, record.start_ns - offset_ns, record.end_ns - offset_ns, record.args))
            self._file.flush()

    def close(self) -> None:
        """Complete the file. A second call does nothing."""
        if self._file is None or self._file.closed:
            return
        for lane, since_ns in self._decoding_ns.items():
            self._put(lane, "decode", since_ns, max(since_ns, self._ends_ns[lane]))
        left_out = {"events": self._events, "most_events": MOST_EVENTS, "left_out": dict(self._left_out)}
        metadata = left_out | {"clock_offsets_ns": self.offsets_ns}
        with on_disk(self._path), self._file:
            self._file.write(f'{{"ph":"M","pid":0,"name":"end","args":{{}}}}\n],"metadata":{json.dumps(metadata)}}}\n')

    def _open(self) -> TextIO:
        path = self._path
        if path.exists():
            path.rename(next(p for n in range(1, 10_000) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists()))
        file = path.open("w", encoding="utf-8")
        file.write(f'{{"displayTimeUnit":"ms","otherData":{{"start_unix_ns":{self._start_ns}}},"traceEvents":[\n')
        return file

    def _span(self, lane: str, span: Span) -> None:
        self._ends_ns[lane] = max(self._ends_ns[lane], span.end_ns)
        if span.name in ROWS:
            self._in_a_row(lane, span)
            return
        if span.name == "idle":
            since_ns = self._decoding_ns.get(lane, span.start_ns)
            if span.start_ns > since_ns:
                self._put(lane, "decode", since_ns, span.start_ns)
            self._decoding_ns[lane] = span.end_ns
        track, name = TRACKS.get(span.name, (0, ""))
        self._put(lane, span.name, span.start_ns, span.end_ns, track, name, span.args)
        if span.name == "stage" and lane == FIRST_LANE and span.args:
            self._staged[span.args["version"]] = span
            if len(self._staged) > STAGED:
                del self._staged[next(iter(self._staged))]
        if span.name == "pull":
            self._pulled = [*self._pulled[1 - STAGED :], (lane, span)]
        self._draw_arrows()

    def _in_a_row(self, lane: str, span: Span) -> None:
        ends = self._row_ends.setdefault(self._pid(lane), [])
        row = next((row for row, end_ns in enumerate(ends) if end_ns <= span.start_ns), len(ends))
        if row == MOST_ROWS:
            self._left_out[span.name] += 1
            return
        ends[row : row + 1] = [span.end_ns]
        self._put(lane, span.name, span.start_ns, span.end_ns, FIRST_ROW + row, f"{span.name} {row + 1}", span.args)

    def _draw_arrows(self) -> None:
        """For each pull whose version is known to have been staged; the two are reported in any order."""
        waiting, self._pulled = self._pulled, []
        for lane, pull in waiting:
            stage = self._staged.get((pull.args or {})["version"])
            if stage is None:
                self._pulled.append((lane, pull))
                continue
            if self._events + 2 > MOST_EVENTS:
                self._left_out["arrows"] += 1
                continue
            self._arrows += 1
            arrow = {"cat": "weights", "name": "publish to pull", "id": self._arrows}
            self._write({"ph": "s", "pid": self._pid(FIRST_LANE), "tid": 0, "ts": self._us(min(stage.start_ns, pull.start_ns))} | arrow)
            self._write({"ph": "f", "bp": "e", "pid": self._pid(lane), "tid": 1, "ts": self._us(pull.start_ns)} | arrow)

    def _put(self, lane: str, name: str, start_ns: int, end_ns: int, track: int = 0, track_name: str = "", args: Any = None) -> None:
        pid = self._pid(lane)
        if track and (pid, track) not in self._tracks:
            self._tracks.add((pid, track))
            self._write({"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": track_name}})
        took_us = max(0.0, round((end_ns - start_ns) / 1e3, 1))  # whatever was done to the clock meanwhile
        event = {"ph": "X", "pid": pid, "tid": track, "name": name, "ts": self._us(start_ns), "dur": took_us}
        self._write(event | ({"args": dict(args)} if args else {}), detail=name in DETAILS)

    def _count(self, lane: str, count: Count, at_ns: int) -> None:
        event = {"ph": "C", "pid": self._pid(lane), "tid": 0, "name": count.name, "ts": self._us(at_ns), "args": dict(count.values)}
        self._write(event, detail=True)

    def _write(self, event: Event, detail: bool = False) -> None:
        if self._events >= (MOST_EVENTS // 2 if detail else MOST_EVENTS):
            self._left_out[event["name"]] += 1
            return
        self._events += 1
        assert self._file is not None
        self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")

    def _us(self, at_ns: int) -> float:
        return round((at_ns - self._start_ns) / 1e3, 1)

    def _pid(self, lane: str) -> int:
        if lane not in self._lanes:
            pid = self._lanes[lane] = len(self._lanes) + 1
            order = next((at for at, kind in enumerate(("trainer", "generator", "replay")) if lane.startswith(kind)), 9)
            self._write({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": lane}})
            self._write({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": 1000 * order + pid}})
        return self._lanes[lane]


def events(lines: Iterable[str]) -> Iterator[Event]:
    """The events of some lines of the file; a line that is not whole is left out."""
    for line in lines:
        if line.startswith('{"ph"') and line.rstrip().endswith(("}", "},")):
            yield json.loads(line.rstrip().removesuffix(","))


def read(path: Path) -> list[Event]:
    """All events, also of a file that is still being written; none when there is no file."""
    if not path.is_file():
        return []
    return list(events(path.read_text(encoding="utf-8").splitlines()))


class Lanes:
    """Turns events back into records by lane, as they come."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def read(self, found: Iterable[Event]) -> Iterator[tuple[str, Record]]:
        """(lane, record), with times in nanoseconds since the start of the trace."""
        for event in found:
            match event["ph"], event["name"]:
                case "M", "process_name":
                    self._names[event["pid"]] = event["args"]["name"]
                case "X", name:
                    start_ns = int(event["ts"] * 1e3)
                    yield self._names[event["pid"]], Span(name, start_ns, start_ns + int(event["dur"] * 1e3), event.get("args"))
                case "C", name:
                    yield self._names[event["pid"]], Count(name, int(event["ts"] * 1e3), event["args"])
