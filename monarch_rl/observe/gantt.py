"""A window of a timeline as an SVG picture: a lane for each process, idle time in grey, arrows from publish to pull."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from monarch_rl.observe.timeline import Count, Span
from monarch_rl.observe.trace import Lanes, read

WORK = {"train": "train", "stage": "stage", "decode": "decode", "score": "score", "observe": "score"}
"""Kind of span → class of its bar. What is no work is idle time."""
WEIGHTS = ("pull", "swap")
KINDS = ("decode", "train", "score", "stage", "pull", "swap", "idle")
"""In the legend."""
STYLE = """
.gantt { --ink: #1f2328; --faint: #d5dae0; --decode: #2f7fc1; --train: #2a9d5c; --score: #8a63c9; --stage: #0e7c86; --pull: #d9730d;
  --swap: #b5387f; font: 12px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { .gantt { --ink: #e6edf3; --faint: #39414b } }
.gantt text { fill: var(--ink) }
.gantt .small { font-size: 11px; opacity: .75 }
.gantt .idle { fill: var(--faint) }
.gantt .level { fill: none; stroke: var(--decode); stroke-width: 1.3 }
.gantt .axis { stroke: var(--ink); opacity: .5 }
.gantt .arrow { stroke: var(--pull); stroke-width: 1.1; fill: none }
""" + "".join(f".gantt .{kind} {{ fill: var(--{kind}) }}\n" for kind in KINDS if kind != "idle")
LABEL, SHARE = 96, 66
"""Pixels on the left, for names, and on the right, for idle shares."""
BAR, THIN, GAP = 16, 6, 10
CHART = 34


@dataclass
class Lane:
    """What one process did."""

    name: str
    spans: list[Span] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)

    def idle(self, start_ns: int, end_ns: int) -> float:
        """Share of a window in which it did no work."""
        busy = sum(max(0, min(s.end_ns, end_ns) - max(s.start_ns, start_ns)) for s in self.spans if s.name in WORK)
        return max(0.0, 1 - busy / max(1, end_ns - start_ns))

    @property
    def order(self) -> tuple[int, str, int]:
        kind, _, number = self.name.rpartition(" ")
        kinds = ("trainer", "generator", "scorer", "replay")
        return kinds.index(kind), kind, int(number) if number.isdigit() else 0


@dataclass(frozen=True)
class Window:
    """A part of a timeline, in nanoseconds since its start, and the steps in it."""

    start_ns: int
    end_ns: int
    first: int = 0
    last: int = 0


def read_lanes(timeline: Path) -> list[Lane]:
    """The processes of a run in the order in which they are shown; also of a run that goes on."""
    lanes: dict[str, Lane] = {}
    for name, record in Lanes().read(read(timeline)):
        lane = lanes.setdefault(name, Lane(name))
        if isinstance(record, Count):
            lane.counts.append(record)
        else:
            lane.spans.append(record)
    return sorted((lane for lane in lanes.values() if not lane.name.startswith("rollout")), key=lambda lane: lane.order)


def whole(lanes: Iterable[Lane]) -> Window:
    """From the first optimizer step to the last."""
    steps = _steps(lanes)
    return Window(steps[0][0], steps[-1][1], 1, len(steps)) if steps else Window(0, 0)


def typical(lanes: Iterable[Lane], steps: int = 6) -> Window:
    """Of all windows of so many steps in a row one that takes as long as most do, near the middle of the run."""
    found = _steps(lanes)
    if len(found) <= steps:
        return whole(lanes)
    ways = [Window(found[i][0], found[i + steps - 1][1], i + 1, i + steps) for i in range(len(found) - steps + 1)]
    usual = statistics.median(way.end_ns - way.start_ns for way in ways)
    middle = (len(found) + 1) / 2

    def strangeness(way: Window) -> float:
        return abs((way.end_ns - way.start_ns) / usual - 1) + 0.3 * abs((way.first + way.last) / 2 - middle) / len(found)

    return min(ways, key=strangeness)


def stretch(lanes: Iterable[Lane], first: int, length_ns: int) -> Window:
    """From the beginning of step `first`, for so long. The last step in it may not be complete."""
    found = _steps(lanes)
    start_ns = found[first - 1][0]
    return Window(start_ns, start_ns + length_ns, first, sum(begun < start_ns + length_ns for begun, _ in found))


def _steps(lanes: Iterable[Lane]) -> list[tuple[int, int]]:
    """Start (of the wait for its batch) and end (of the staging, or of the training) of each step of trainer 0."""
    spans = next((lane.spans for lane in lanes if lane.name == "trainer 0"), [])
    found: list[tuple[int, int]] = []
    waited: int | None = None
    for span in spans:
        if span.name == "wait":
            waited = span.start_ns
        elif span.name == "train" and waited is not None:
            found.append((waited, span.end_ns))
        elif span.name == "stage" and found:
            found[-1] = found[-1][0], span.end_ns
    return found


def picture(lanes: Sequence[Lane], window: Window, width: int, top: int = 0) -> tuple[str, int]:
    """The lanes as SVG elements from `top` down, and where they end."""
    parts, y = [], top
    places: dict[str, int] = {}
    scale = Scale(window, width)
    for lane in lanes:
        places[lane.name] = y
        drawn, height = _lane(lane, scale, y)
        parts.append(drawn)
        y += height + GAP
    parts.append(_arrows(lanes, scale, places))
    parts.append(_axis(scale, y))
    return "".join(parts), y + 20


def svg(content: str, width: int, height: int) -> str:
    """A picture that stands alone."""
    return (
        f'<svg class="gantt" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{STYLE}</style>{content}</svg>"
    )


def legend(y: int) -> str:
    """One line that says what the colours mean."""
    parts, x = [], LABEL
    for kind in KINDS:
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="11" height="11"/><text x="{x + 16}" y="{y + 10}">{kind}</text>')
        x += 30 + 7 * len(kind)
    parts.append(f'<path class="arrow" d="M{x} {y + 6}h18"/><text x="{x + 24}" y="{y + 10}">publish → pull</text>')
    return "".join(parts)


@dataclass(frozen=True)
class Scale:
    """Time → pixels."""

    window: Window
    width: int

    def x(self, at_ns: int) -> float:
        window = self.window
        inside = min(max(at_ns, window.start_ns), window.end_ns) - window.start_ns
        return LABEL + inside / max(1, window.end_ns - window.start_ns) * (self.width - LABEL - SHARE)

    def shows(self, span: Span) -> bool:
        return span.end_ns > self.window.start_ns and span.start_ns < self.window.end_ns

    def bar(self, kind: str, span: Span, y: int, height: int) -> str:
        x = self.x(span.start_ns)
        said = f"{span.name} {(span.end_ns - span.start_ns) / 1e6:.0f} ms"
        width = max(1.0, self.x(span.end_ns) - x)
        return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"><title>{said}</title></rect>'


def _lane(lane: Lane, scale: Scale, y: int) -> tuple[str, int]:
    name = f'<text x="0" y="{y + 13}">{escape(lane.name)}</text>'
    window = scale.window
    if not any(span.name in WORK for span in lane.spans):
        return name + _levels(lane, scale, y), CHART
    all_of_it = Span("idle", window.start_ns, window.end_ns)
    work = [scale.bar(WORK[s.name], s, y, BAR) for s in lane.spans if s.name in WORK and scale.shows(s)]
    weights = [scale.bar(s.name, s, y + BAR + 1, THIN) for s in lane.spans if s.name in WEIGHTS and scale.shows(s)]
    share = f'<text x="{scale.width}" y="{y + 13}" text-anchor="end">{lane.idle(window.start_ns, window.end_ns):.0%} idle</text>'
    return name + scale.bar("idle", all_of_it, y, BAR) + "".join(work + weights) + share, BAR + 1 + THIN


def _levels(lane: Lane, scale: Scale, y: int) -> str:
    """How many finished groups wait in the buffer."""
    levels = [(count.at_ns, count.values.get("ready", 0.0)) for count in lane.counts]
    top = max((level for at, level in levels if scale.window.start_ns <= at <= scale.window.end_ns), default=0.0) or 1.0
    path, before = "", 0.0
    for at_ns, level in levels:
        if at_ns >= scale.window.end_ns:
            break
        if at_ns >= scale.window.start_ns:
            path = path or f"M{scale.x(scale.window.start_ns):.1f} {_height(before, top, y)}"
            path += f"H{scale.x(at_ns):.1f}V{_height(level, top, y)}"
        before = level
    path += f"H{scale.x(scale.window.end_ns):.1f}" if path else ""
    said = f'<text class="small" x="0" y="{y + 27}">groups ready</text>'
    return f'{said}<path class="level" d="{path}"/><text class="small" x="{scale.width}" y="{y + 10}" text-anchor="end">{top:.0f}</text>'


def _height(level: float, top: float, y: int) -> str:
    return f"{y + CHART - CHART * level / top:.1f}"


def _arrows(lanes: Sequence[Lane], scale: Scale, places: dict[str, int]) -> str:
    staged = {s.args["version"]: s for lane in lanes if lane.name == "trainer 0" for s in lane.spans if s.name == "stage" and s.args}
    parts = []
    for lane in lanes:
        for pull in (s for s in lane.spans if s.name == "pull" and s.args and scale.shows(s)):
            stage = staged.get(pull.args["version"]) if pull.args else None
            if stage is not None and scale.shows(stage):
                x0, y0 = scale.x(stage.end_ns), places["trainer 0"] + BAR
                x1, y1 = scale.x(pull.start_ns), places[lane.name] + BAR + 1
                parts.append(f'<path class="arrow" d="M{x0:.1f} {y0}L{x1:.1f} {y1}"/>')
    return "".join(parts)


def _axis(scale: Scale, y: int) -> str:
    """Seconds since the window began."""
    seconds = (scale.window.end_ns - scale.window.start_ns) / 1e9
    every = next((e for e in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 3600) if seconds / e <= 10), 3600 * 10)
    ticks = [i * every for i in range(int(seconds / every) + 1)]
    end = scale.width - SHARE
    line = f'<path class="axis" d="M{LABEL} {y}H{end}"/>'
    xs = [(tick, LABEL + tick / max(seconds, 1e-9) * (end - LABEL)) for tick in ticks]
    return line + "".join(f'<text class="small" x="{x:.1f}" y="{y + 14}" text-anchor="middle">{tick:g} s</text>' for tick, x in xs)
