"""What a session writes and shows while it runs: metrics, timeline, console, report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl.calls import Calls
from monarch_rl.config import Config, UserError
from monarch_rl.lives import Holdings
from monarch_rl.observe import console
from monarch_rl.observe.charts import SILENT_S
from monarch_rl.observe.live import make_console
from monarch_rl.observe.metrics import GeneratorFigures, GeneratorReport, MetricsFile
from monarch_rl.observe.report import write_report
from monarch_rl.observe.status import State, StatusFile
from monarch_rl.observe.timeline import Record, Span
from monarch_rl.observe.trace import Trace
from monarch_rl.observe.trackers import Trackers
from monarch_rl.supervise import answer
from monarch_rl.types import Version

if TYPE_CHECKING:
    from actors.metrics import Metrics
    from actors.replay_buffer import ReplayBuffer

DEADLINE_S = 60.0
RECENT = 2000
"""Spans of an actor that are kept for figures."""
COLLECT_S = 0.5
"""Between two collections of what there is news of."""
LOOK_S = 1.0
"""Between two looks into the replay buffer, for display."""
ROWS = 256
"""Rows that are kept; `metrics.jsonl` has all."""


def too_slow(before: Iterable[GeneratorReport], after: Iterable[GeneratorReport]) -> list[str]:
    """A line for each generator whose pulls have been rejected too often since."""
    known = {report.replica: report.too_slow for report in before}
    return [
        f"generator {report.replica} is too slow for the weights: its pulls are written over while it reads ({report.rejected} so far), "
        "a version is kept for it; more weights.slots or a larger weights.every give it time"
        for report in after
        if report.too_slow > known.get(report.replica, 0)
    ]


class Records:
    """Rows are put in a queue and written beside the training, which waits for none of it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._output_dir = Path(config.output_dir)
        self._started = time.monotonic()
        self._queue: asyncio.Queue[tuple[int, Mapping[str, float]]] = asyncio.Queue()
        self._figures = GeneratorFigures()
        self._evaluation: dict[str, Any] = {}
        self._file: MetricsFile | None = None
        self._calls = Calls()
        self._looked = 0.0
        self.console = make_console(config)
        self.version = Version(0, 0)
        """Of the trainer's weights."""
        self.rows: deque[dict[str, Any]] = deque(maxlen=ROWS)
        """The last that this session has written."""
        self.evaluated: dict[str, Any] = {}
        """The last of them with an evaluation."""
        self.reports: list[GeneratorReport] = []
        """The latest of each generator."""
        self.recent: dict[str, deque[Span]] = {}
        """The last spans by actor."""
        self.holdings: Holdings | None = None
        """What the replay buffer held at the last look."""

    def begin(self, version: Version, metrics: Metrics, buffer: ReplayBuffer) -> None:
        """Go on from there; of an earlier run in the same folder the rows up to there are kept."""
        self._file = MetricsFile(self._output_dir / "metrics.jsonl", version.step)
        self._metrics, self._buffer, self.version = metrics, buffer, version

    def go_back(self, version: Version) -> None:
        """The trainers have restarted from a checkpoint: rows of later steps are undone. All that were put must be `written`."""
        assert self._file is not None
        self._file.cut(version.step)
        self.rows = deque((row for row in self.rows if row["step"] <= version.step), ROWS)
        self.version = version

    def put(self, step: int, stats: Mapping[str, float]) -> None:
        self._queue.put_nowait((step, stats))

    def put_evaluation(self, figures: Mapping[str, Any]) -> None:
        """Goes into the next row."""
        self._evaluation = dict(figures)

    async def written(self) -> None:
        """Every row that was put is in the file."""
        await self._queue.join()

    async def write(self) -> None:
        """Write rows as they come, for ever."""
        while True:
            step, stats = await self._queue.get()
            await self._write(step, stats)
            self._queue.task_done()

    async def listen(self) -> None:
        """Hand on what the generators report as it comes, also within a long step; for ever."""
        while True:
            await self._calls.one(self._metrics.news)
            await self.collect()
            if time.monotonic() - self._looked > LOOK_S:
                await self.look()
            await asyncio.sleep(COLLECT_S)

    async def look(self) -> None:
        """See what the replay buffer holds."""
        self._looked = time.monotonic()
        self.holdings = await answer(self._calls.one(self._buffer.holdings), "replay buffer (holdings)", DEADLINE_S)

    async def collect(self) -> None:
        """The latest report of each generator; their spans go where spans go."""
        before = self.reports
        self.reports, spans = await answer(self._calls.one(self._metrics.collect), "metrics", DEADLINE_S)
        for line in too_slow(before, self.reports):
            self.console.say(line)
        for lane, recorded in spans.items():
            self.spans(lane, recorded)
        self.console.reports(self.version.step, self.reports)

    def spans(self, lane: str, records: list[Record]) -> None:
        spans = [record for record in records if isinstance(record, Span)]
        if spans and lane not in self.recent:
            self._forget_silent(spans[-1].end_ns)
        self.recent.setdefault(lane, deque(maxlen=RECENT)).extend(spans)
        self.trace.add(lane, records)
        self.console.spans(lane, spans)

    def _forget_silent(self, now_ns: int) -> None:
        since_ns = now_ns - int(SILENT_S * 1e9)
        self.recent = {lane: spans for lane, spans in self.recent.items() if spans and spans[-1].end_ns > since_ns}

    def start(self) -> None:
        """Show something, and say in the output folder, which is there by now, that the run goes on."""
        self.trace = Trace(self._output_dir / "timeline.json")
        self._trackers = Trackers(self._config)
        self._status = StatusFile(self._output_dir)
        self.console.start()
        self._status.start()

    def ends(self, state: State, reason: str = "") -> None:
        """How the run is going to be called when it is closed."""
        self._status.ends(state, reason)

    async def close(self) -> None:
        self.console.close()
        await asyncio.to_thread(self._trackers.close)
        ends: list[Callable[[], object]] = [self.trace.close, self._status.close, lambda: write_report(self._output_dir)]
        for end in [self._file.close, *ends] if self._file is not None else ends:
            try:
                end()
            except OSError as error:  # of a full disk, which may have room for the others
                with contextlib.suppress(UserError):
                    console.say(str(error))

    async def _write(self, step: int, stats: Mapping[str, float]) -> None:
        assert self._file is not None
        await self.collect()
        if self.rows and self.rows[-1]["step"] == step:
            return self._add(self.rows[-1])
        version = self.version._replace(step=step)
        row: dict[str, Any] = {"step": step, "version": str(version), "wall_s": round(time.monotonic() - self._started, 3)}
        row |= {**stats, **self._figures.row(version, self.reports)}
        if step:
            figures: dict[str, float] = await answer(self._calls.one(self._buffer.stats, step), "replay buffer (stats)", DEADLINE_S)
            row |= figures
        self.rows.append(row | self._taken_evaluation(row))
        self._file.write(self.rows[-1])
        self._trackers.row(self.rows[-1])
        self.console.row(self.rows[-1])
        every = self._config.console.rollouts_every
        if every and step and step % every == 0:
            groups = await answer(self._calls.one(self._buffer.samples, console.SAMPLES), "replay buffer (samples)", DEADLINE_S)
            self.console.rollouts(groups)

    def _add(self, row: dict[str, Any]) -> None:
        """An evaluation that no further row will hold."""
        assert self._file is not None
        if evaluated := self._taken_evaluation(row):
            row |= evaluated
            self._file.rewrite(row)
            self._trackers.row(row)
            self.console.row_again(row)

    def _taken_evaluation(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What came of one since the row before; nothing in most."""
        taken, self._evaluation = self._evaluation, {}
        if taken:
            self.evaluated = {**row, **taken}
        return taken
