"""Charts made of characters, and the figures behind them. Pure functions, without colours and without a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from monarch_rl.observe.timeline import Span

BARS = "▁▂▃▄▅▆▇█"
QUARTERS = " ▁▂▃▄"
CELLS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
"""What one character of the lane strip may stand for."""

WORK = ("generate", "train", "wait")
"""Spans on the lower half of a lane: what the actor does."""
WEIGHTS = ("stage", "pull", "swap")
"""Spans on the upper half: weights under way, usually at the same time."""
KEPT = 1000
"""Intervals of one kind that a lane remembers."""
SILENT_S = 120.0
"""An actor that has told of nothing for so long may be gone for good: its spans are kept no longer than until another one comes."""

Cell = tuple[str | None, float, str | None]
"""What one character of a lane shows: the kind of work that fills most of it, the share (0…1) of it that this kind fills, and the
kind of weight transfer that touches it longest."""


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars between their smallest and their largest; more than `width` of them are averaged, evenly. NaN is a gap."""
    points = [_mean(chunk) for chunk in _chunks(values, width)]
    known = [p for p in points if not math.isnan(p)]
    if not known:
        return " " * len(points)
    low, span = min(known), max(known) - min(known)
    return "".join(" " if math.isnan(p) else BARS[min(7, int(8 * (p - low) / span)) if span else 3] for p in points)


def _chunks(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(len(values), max(width, 0))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    return [values[a:b] for a, b in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def bar(share: float, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar, full only at a share of 1; a share outside 0…1 is an empty or a full bar."""
    filled = int(min(1.0, max(0.0, share)) * width)
    return "━" * filled, "─" * (width - filled)


def seconds_left(walls_s: Sequence[float], left: int, recent: int = 20) -> float | None:
    """Time for `left` more steps at the pace of the `recent` last ones; None before two steps ended at `walls_s`."""
    walls = walls_s[-recent - 1 :]
    return (walls[-1] - walls[0]) / (len(walls) - 1) * left if len(walls) > 1 else None


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def count(number: float) -> str:
    """`950`, `1.2k`, `12k` or `3.4M`: at most four characters below a thousand million."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


class Lanes:
    """The recent spans of every actor, by kind, as intervals that do not overlap."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[str, list[tuple[int, int]]]] = {}
        self.end_ns = 0
        """Where the newest span ends."""

    @property
    def names(self) -> list[str]:
        """Trainers first; `generator 10` after `generator 9`."""
        return sorted(self._lanes, key=_lane_order)

    def add(self, lane: str, spans: Iterable[Span]) -> None:
        if lane not in self._lanes:
            self._forget_silent()
        kinds = self._lanes.setdefault(lane, {})
        for span in spans:
            kinds.setdefault(span.name, []).append((span.start_ns, span.end_ns))
            self.end_ns = max(self.end_ns, span.end_ns)
        for kind, intervals in kinds.items():
            kinds[kind] = _union(intervals)[-KEPT:]

    def _forget_silent(self) -> None:
        since_ns = self.end_ns - int(SILENT_S * 1e9)
        self._lanes = {
            lane: kinds
            for lane, kinds in self._lanes.items()
            if max((intervals[-1][1] for intervals in kinds.values()), default=self.end_ns) >= since_ns
        }

    def cells(self, lane: str, cell_s: float, width: int) -> list[Cell]:
        """The last `width` cells, the newest last; cells begin at multiples of `cell_s`, so that a strip moves by whole characters."""
        cell_ns = int(cell_s * 1e9)
        first = -(-self.end_ns // cell_ns) - width
        kinds = self._lanes[lane]
        work, weights = [
            [(kind, _shares(kinds[kind], first, cell_ns, width)) for kind in half if kind in kinds] for half in (WORK, WEIGHTS)
        ]
        return [(*_longest(work, i), _longest(weights, i)[0]) for i in range(width)]


def _lane_order(lane: str) -> tuple[bool, str, int]:
    name, _, number = lane.partition(" ")
    return not name.startswith("trainer"), name, int(number) if number.isdigit() else 0


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _shares(intervals: Iterable[tuple[int, int]], first: int, cell_ns: int, width: int) -> list[float]:
    """How much of each cell the intervals fill. A moment of no length still leaves a trace."""
    filled = [0.0] * width
    for start, end in intervals:
        for cell in range(max(start // cell_ns, first), min(max(end - 1, start) // cell_ns + 1, first + width)):
            overlap = min(end, (cell + 1) * cell_ns) - max(start, cell * cell_ns)
            filled[cell - first] += max(overlap / cell_ns, 1e-6)
    return filled


def _longest(shares: Iterable[tuple[str, list[float]]], i: int) -> tuple[str | None, float]:
    """The kind that fills most of cell `i`, and its share."""
    best: tuple[str | None, float] = (None, 0.0)
    for kind, share in shares:
        if share[i] > best[1]:
            best = kind, min(1.0, share[i])
    return best


def cell_seconds(step_s: float, width: int, steps: int = 4) -> float:
    """The finest scale at which `width` characters show at least `steps` steps of `step_s`."""
    return next((cell for cell in CELLS_S if cell * width >= steps * step_s), CELLS_S[-1])
