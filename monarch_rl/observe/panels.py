"""The live display as a picture: what is known of a run (`View`) → lines of a given width. No terminal needed.

Panels are lists of lines of one exact width; this is several times as fast as rich's own Panel and Table, and it paints in the
controller's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from monarch_rl.observe.charts import QUARTERS, WEIGHTS, WORK, Cell, Lanes, bar, cell_seconds, count, duration, seconds_left, sparkline
from monarch_rl.observe.console import question, visible
from monarch_rl.types import Episode, Group

# Of the 256 colours, those that stand out about equally well from white and from black (contrast at least 3.5 on both).
GREY, BLUE, GREEN, ORANGE = "color(243)", "color(32)", "color(29)", "color(130)"
MAGENTA, TEAL, RED = "color(133)", "color(30)", "color(160)"
KINDS = {"generate": BLUE, "train": GREEN, "wait": GREY, "stage": TEAL, "pull": ORANGE, "swap": MAGENTA}
WIDE = 120
"""Columns from which the three panels stand side by side."""
TALL = 40
"""Rows of a terminal that has room for many replicas and lanes."""
PANEL_ROWS = 4
"""Lines inside each of the three panels, at least."""

Lines = list[Text]


@dataclass(slots=True)
class Replica:
    """One generator, as it was last heard of."""

    step: int
    """of the weights it holds; -1: none yet"""
    lag: int | None
    """optimizer steps behind the trainer"""
    tok_s: float | None
    """sampled tokens per second, lately"""
    idle: float | None
    """share of the time without a request, lately"""


@dataclass(slots=True)
class View:
    """What is known of a run."""

    title: str
    steps: int
    max_age: int
    ahead: float
    """admission budget in steps: the buffer is full when it holds this many"""
    evaluates: bool = True
    elapsed_s: float = 0.0
    over: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)
    """the last one"""
    rewards: list[float] = field(default_factory=list)
    walls_s: list[float] = field(default_factory=list)
    """when each step ended"""
    evaluations: list[tuple[float, str]] = field(default_factory=list)
    """(accuracy, version)"""
    replicas: dict[int, Replica] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    samples: list[Group] = field(default_factory=list)
    samples_step: int = 0

    @property
    def step(self) -> int:
        return int(self.row.get("step", 0))

    @property
    def step_s(self) -> float:
        """Wall time of a step, lately; 1 before that is known."""
        return seconds_left(self.walls_s, 1) or 1.0


class Picture:
    """Lines as something that rich can print, without the search for places to wrap them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line.render(console, end="\n")


def render(view: View, width: int, height: int, colour: bool = True) -> Lines:
    """At most `height` lines of exactly `width` columns; lanes and rollouts get what the panels leave."""
    tall = height >= TALL
    rows = max(PANEL_ROWS, _replica_rows(view, tall))
    lines = [_headline(view, width)]
    if width >= WIDE:
        side = width * 28 // 100
        main = width - 2 * side
        lines += beside(_trainer(view, main, rows), _generators(view, side, rows, tall), _buffer(view, side, rows))
    else:
        left = width // 2
        lines += _trainer(view, width, PANEL_ROWS)
        lines += beside(_generators(view, left, rows, tall), _buffer(view, width - left, rows))
    if view.lanes.names and (left := height - len(lines) - 2) > 0:
        lines += _strip(view, width, min(left, 8 if tall else 4), colour)
    if view.samples and (left := height - len(lines) - 3) > 0:
        lines += _rollouts(view, width, left)
    return lines[:height]


def _headline(view: View, width: int) -> Text:
    state = "training" if view.row else "starting"
    if view.over:
        state = "done" if view.step == view.steps else "stopped"
    right = f"  {state}  {duration(view.elapsed_s)} "
    left = Text.assemble((f" {squeeze(view.title, width - len(right) - 1)}", "bold"))
    return fit(left, width - len(right)).append(right, GREY)


# --- layout ----------------------------------------------------------------------------------------------------------


def fit(line: Text, width: int, right: bool = False) -> Text:
    """The line cut or filled up to exactly `width` columns; `right`: filled on its left."""
    line.truncate(width, overflow="ellipsis")
    missing = width - cell_len(line.plain)
    return Text(" " * missing).append_text(line) if right else line.append(" " * missing)


def boxed(title: Text, content: Sequence[Text], width: int, rows: int, foot: Text | None = None) -> Lines:
    """`rows` lines in a frame, so `rows` + 2 lines of `width` columns."""
    title.truncate(width - 6, overflow="ellipsis")
    top = grey("╭─ ").append_text(title).append(f" {'─' * (width - 5 - cell_len(title.plain))}╮", GREY)
    foot = foot if foot and cell_len(foot.plain) <= width - 4 else Text()
    bottom = grey(f"╰{'─' * (width - 3 - cell_len(foot.plain))}").append_text(foot).append("─╯", GREY)
    inside = [*content[:rows], *[Text() for _ in range(rows - len(content))]]
    return [top, *[grey("│ ").append_text(fit(line, width - 4)).append(" │", GREY) for line in inside], bottom]


def beside(*panels: Lines) -> Lines:
    return [Text().join(parts) for parts in zip(*panels, strict=True)]


def grey(text: str) -> Text:
    """Grey as a part, so that what is appended is not grey too."""
    return Text.assemble((text, GREY))


def titled(title: str, more: str = "") -> Text:
    return Text.assemble((title, "bold"), (more, GREY))


def pairs(*labelled: tuple[str, str]) -> Text:
    """`label value  label value`: labels grey, values plain."""
    return Text("  ").join([grey(label).append(f" {value}") for label, value in labelled])


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def squeeze(text: str, width: int) -> str:
    """The text on one line of at most `width` columns: where it is longer, its beginning and its end (answers stand at the end)."""
    text = visible(text)
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{set_cell_size(text, width - 1 - tail).rstrip()}…{set_cell_size(text[::-1], tail)[::-1].lstrip()}"


# --- trainer ---------------------------------------------------------------------------------------------------------


def _trainer(view: View, width: int, rows: int) -> Lines:
    row, lines = view.row, [_progress(view, width - 4), _reward(view, width - 4), _evaluations(view)]
    if "loss/policy" in row:
        loss, grad, rate = f"{row['loss/policy']:+.4f}", f"{row['grad_norm']:.2f}", f"{row['lr']:.1e}"
        pace = f"{row['time/step_s']:.2f} s ({percent(row['idle/trainer'])} wait)"
        lines.append(pairs(("loss  ", loss), ("grad", grad), ("lr", rate), ("step", pace)))
    return boxed(titled("trainer"), lines, width, rows)


def _progress(view: View, width: int) -> Text:
    left_s = None if view.over else seconds_left(view.walls_s, view.steps - view.step)
    after = f" {percent(view.step / view.steps)}" + (f", {duration(left_s)} left" if left_s else "")
    line = pairs(("step  ", f"{view.step}/{view.steps} "))
    filled, empty = bar(view.step / view.steps, width - len(line) - len(after))
    return line.append(filled, GREEN).append(empty, GREY).append(after)


def _reward(view: View, width: int) -> Text:
    if not view.rewards:
        return pairs(("reward", "–"))
    line = pairs(("reward", f"{view.rewards[-1]:.3f} "))
    known = [reward for reward in view.rewards if not math.isnan(reward)]
    ends = f" {min(known):.2f}…{max(known):.2f}" if known else ""
    return line.append(sparkline(view.rewards, width - len(line) - len(ends)), GREEN).append(ends, GREY)


def _evaluations(view: View) -> Text:
    if not view.evaluations:
        return pairs(("eval  ", "–" if view.evaluates else "off"))
    (first, first_version), (last, version) = view.evaluations[0], view.evaluations[-1]
    line = pairs(("eval  ", f"{last:.3f} @{version}"))
    return line.append(f"  was {first:.3f} @{first_version}", GREY) if len(view.evaluations) > 1 else line


# --- generators ------------------------------------------------------------------------------------------------------


def _many(view: View, tall: bool) -> bool:
    """Too many replicas for a row each."""
    return len(view.replicas) > (8 if tall else PANEL_ROWS - 1)


def _replica_rows(view: View, tall: bool) -> int:
    return 1 + (3 if _many(view, tall) else len(view.replicas))


def _generators(view: View, width: int, rows: int, tall: bool) -> Lines:
    replicas = [replica for _, replica in sorted(view.replicas.items())]
    if not replicas:
        return boxed(titled("generators"), [grey("starting")], width, rows)
    if many := _many(view, tall):
        cells = _summary(replicas)
    else:
        cells = [(str(i), *_replica(replica)) for i, replica in sorted(view.replicas.items())]
    heading = _columns([grey(name) for name in ("" if many else "replica", "holds", "lag", "tok/s", "idle")])
    lines = [_columns([grey(row[0]), *map(Text, row[1:])]) for row in cells]
    speed = sum(replica.tok_s or 0.0 for replica in replicas)
    title = titled("generators", f" ×{len(replicas)}, {count(speed)} tok/s" if len(replicas) > 1 else "")
    return boxed(title, [heading, *lines], width, rows)


def _columns(cells: Sequence[Text]) -> Text:
    return Text(" ").join([fit(cell, width, right=True) for cell, width in zip(cells, (7, 6, 4, 6, 6), strict=True)])


def _replica(replica: Replica) -> tuple[str, ...]:
    return (
        str(replica.step) if replica.step >= 0 else "–",
        "–" if replica.lag is None else str(replica.lag),
        "–" if replica.tok_s is None else count(replica.tok_s),
        "–" if replica.idle is None else percent(replica.idle),
    )


def _summary(replicas: Sequence[Replica]) -> list[tuple[str, ...]]:
    """Least, mean and most of each column."""

    def three(values: Iterable[float | None], show: Callable[[float], str]) -> tuple[str, str, str]:
        known = [v for v in values if v is not None]
        return (show(min(known)), show(sum(known) / len(known)), show(max(known))) if known else ("–", "–", "–")

    columns = [
        three([r.step if r.step >= 0 else None for r in replicas], "{:.0f}".format),
        three([r.lag for r in replicas], "{:.3g}".format),
        three([r.tok_s for r in replicas], count),
        three([r.idle for r in replicas], percent),
    ]
    return [(name, *(column[i] for column in columns)) for i, name in enumerate(("least", "mean", "most"))]


# --- buffer ----------------------------------------------------------------------------------------------------------


def _buffer(view: View, width: int, rows: int) -> Lines:
    row = view.row
    if "buffer/fill" not in row:
        return boxed(titled("buffer"), [grey("no batch yet")], width, rows)
    after = f" {row['buffer/fill']:.1f} of {view.ahead:.3g} steps"
    filled, empty = bar(row["buffer/fill"] / view.ahead, width - 4 - 8 - len(after))
    ready = pairs(("ready  ", "")).append(filled, BLUE).append(empty, GREY).append(after)
    reasons = {key.removeprefix("buffer/dropped_"): n for key, n in row.items() if key.startswith("buffer/dropped_") and n}
    most_first = sorted(reasons.items(), key=lambda reason: -reason[1])
    why = f" ({', '.join(f'{count(n)} {reason}' for reason, n in most_first)})" if reasons else ""
    age = f"mean {row['age/mean']:.1f}, max {row['age/max']:.0f} (limit {view.max_age})"
    others = [("age    ", age), ("leased ", f"{row['buffer/leased']:.0f}"), ("dropped", f"{count(row['buffer/dropped'])}{why}")]
    return boxed(titled("buffer"), [ready, *map(pairs, others)], width, rows)


# --- lanes -----------------------------------------------------------------------------------------------------------


def _strip(view: View, width: int, most: int, colour: bool) -> Lines:
    names = view.lanes.names
    trainers = [name for name in names if name.startswith("trainer")]
    others = names[len(trainers) :]
    shown = trainers[: max(most - len(others), most // 2)]
    shown += others[: most - len(shown)]
    label = max(map(len, shown))
    room = width - 4 - label - 1
    cell_s = cell_seconds(view.step_s, room)
    lines = [_lane(f"{name:<{label}} ", view.lanes.cells(name, cell_s, room), colour) for name in shown]
    more = f", the last {duration(cell_s * room)}" + (f", {len(names) - most} more not shown" if len(names) > most else "")
    return boxed(titled("lanes", more), lines, width, len(lines), _legend())


def _lane(label: str, cells: Iterable[Cell], colour: bool) -> Text:
    line = grey(label)
    for (mark, style), run in groupby(_mark(cell, colour) for cell in cells):
        line.append(mark * len(list(run)), style)
    return line


def _mark(cell: Cell, colour: bool) -> tuple[str, str]:
    """Work on the lower half of the character, as high as its share; weights on the upper half."""
    work, share, weights = cell
    if weights is None:
        return ("▁" if work == "wait" else QUARTERS[math.ceil(4 * share)], KINDS[work]) if work else (" ", "")
    if work in (None, "wait"):
        return "▀", KINDS[weights]
    return ("▀", f"{KINDS[weights]} on {KINDS[work]}") if colour else ("█", KINDS[work])


def _legend() -> Text:
    marks = [("▁" if kind == "wait" else "▄", kind) for kind in WORK] + [("▀", kind) for kind in WEIGHTS]
    return Text(" ").join([Text.assemble((f" {mark}", KINDS[kind]), (f" {kind}", GREY)) for mark, kind in marks]).append(" ")


# --- rollouts --------------------------------------------------------------------------------------------------------


def _rollouts(view: View, width: int, most: int) -> Lines:
    episodes = [(group, episode) for group in view.samples for episode in group.episodes[:2]][-most:]
    rows = [(_score(e), grey(_versions(e)), visible(question(group)), e.transcript or e.text) for group, e in episodes]
    scores, spans = max(6, *[len(row[0]) for row in rows]), max(8, *[len(row[1]) for row in rows])
    room = width - 4 - scores - spans - 6
    asked = min(room * 2 // 5, max(6, *[cell_len(row[2]) for row in rows]))

    def line(score: Text, span: Text, prompt: Text, completion: Text) -> Text:
        return Text("  ").join([fit(score, scores, right=True), fit(span, spans), fit(prompt, asked), completion])

    heading = line(*[grey(name) for name in ("reward", "versions", "prompt", "completion")])
    lines = [line(row[0], row[1], Text(squeeze(row[2], asked)), Text(squeeze(row[3], room - asked))) for row in rows]
    return boxed(titled("rollouts", f" at step {view.samples_step}"), [heading, *lines], width, len(lines) + 1)


def _score(episode: Episode) -> Text:
    if episode.reward is None:
        return Text.assemble(("unscorable", RED))
    return Text.assemble((f"{episode.reward:.4g}", GREEN if episode.reward > 0 else ORANGE))


def _versions(episode: Episode) -> str:
    """Of the weights that sampled the tokens: `0.12` or `0.12-0.14`."""
    span = episode.versions()
    return "–" if span is None else str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"
