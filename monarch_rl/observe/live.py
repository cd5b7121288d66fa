"""The live display: panels at the foot of the terminal, and above them every line that any process of the run prints.

No threads: it paints from the event loop, at most twice a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from monarch_rl.config import Config, label
from monarch_rl.observe import console
from monarch_rl.observe.charts import WEIGHTS, WORK
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.panels import Picture, Replica, View, render
from monarch_rl.observe.timeline import Span
from monarch_rl.types import Group

PAINT_S = 0.5
"""Between two paintings."""
SHOWN = {*WORK, *WEIGHTS}
"""Spans that have a place in a lane; the timeline has more."""
LATELY_S = 5.0
"""Over which a generator's speed and idle share are taken."""
PIPE_BYTES = 1 << 20


def make_console(config: Config, started: float | None = None) -> console.Console:
    """The live display where there is a terminal for it, else plain lines. `started`: Unix time of a run that began before."""
    return LiveConsole(config, started) if console.is_live(sys.stdout, os.environ) else console.PlainConsole(config.steps)


class LiveConsole:
    """The live display on this process's stdout, which must be a terminal."""

    def __init__(self, config: Config, started: float | None = None) -> None:
        buffer = config.buffer
        ahead = buffer.max_age + 1 - (buffer.window - 1) / buffer.prompts_per_step
        title = f"{config.recipe or 'monarch_rl'}  {config.model.path} · {label(config.task)} · {config.output_dir}"
        self._view = View(title, config.steps, buffer.max_age, ahead, evaluates=config.eval.prompts > 0)
        self._meters: dict[int, Meter] = {}
        self._ago_s = time.time() - started if started else 0.0
        self._painting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._started = time.monotonic() - self._ago_s
        self._printed = Printed(self.say)
        self._terminal = Console(file=self._printed.terminal, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        self._painting = asyncio.get_running_loop().create_task(self._paint_on(), name="live display")

    def row(self, row: Mapping[str, Any]) -> None:
        view = self._view
        if (undone := view.step - row["step"] + 1) > 0:  # the trainers have restarted from a checkpoint
            del view.walls_s[-undone:], view.rewards[-undone:]
        view.walls_s.append(row["wall_s"])
        if "reward/mean" in row:
            view.rewards.append(row["reward/mean"])
        self.row_again(row)

    def row_again(self, row: Mapping[str, Any]) -> None:
        self._view.row = row
        if "eval/accuracy" in row:
            self._view.evaluations.append((row["eval/accuracy"], row["eval/version"]))

    def set_steps(self, steps: int) -> None:
        self._view.steps = steps

    def reports(self, step: int, reports: Iterable[GeneratorReport]) -> None:
        now = time.monotonic()
        for report in reports:
            if report.ended:
                self._meters.pop(report.replica, None)
                self._view.replicas.pop(report.replica, None)
                continue
            meter = self._meters.setdefault(report.replica, Meter())
            self._view.replicas[report.replica] = meter.read(now, step, report)

    def spans(self, lane: str, spans: Iterable[Span]) -> None:
        if shown := [span for span in spans if span.name in SHOWN]:
            self._view.lanes.add(lane, shown)

    def rollouts(self, groups: Iterable[Group]) -> None:
        self._view.samples, self._view.samples_step = list(groups), self._view.step

    def say(self, line: str) -> None:
        self._terminal.print(Text.from_ansi(line))

    def close(self) -> None:
        painting, self._painting = self._painting, None
        if painting is None:
            return
        failure = painting.exception() if painting.done() and not painting.cancelled() else None
        painting.cancel()
        self._view.over = True
        try:
            if failure is None:
                self._paint()
        finally:
            self._live.stop()
            self._printed.end()
        if failure is not None:
            console.complain(f"the live display had stopped: {failure!r}")

    async def _paint_on(self) -> None:
        while True:
            self._paint()
            await asyncio.sleep(PAINT_S)

    def _paint(self) -> None:
        columns, rows = os.get_terminal_size(self._printed.terminal.fileno())
        self._terminal.size = (columns, rows)
        self._view.elapsed_s = time.monotonic() - self._started
        lines = render(self._view, columns, rows - 1, colour=not self._terminal.no_color)
        if not self._view.over:
            lines.append(Text())  # where the cursor stands: what is typed, like ^C, must not run over the edge and move the picture
        self._live.update(Picture(lines), refresh=True)


class Meter:
    """Turns the growing counters of one generator into its figures of the last seconds."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int, float]] = deque()

    def read(self, now: float, step: int, report: GeneratorReport) -> Replica:
        """`now` in seconds, `step` of the trainer."""
        self._past.append((now, report.tokens, report.idle_s))
        while len(self._past) > 2 and now - self._past[1][0] >= LATELY_S:
            self._past.popleft()
        then, tokens, idle_s = self._past[0]
        lag = max(0, step - report.step) if report.step >= 0 else None
        if now == then:
            return Replica(report.step, lag, None, None)
        # A generator reports when it has finished something: without any change there is nothing to say about its idling.
        silent = (tokens, idle_s) == (report.tokens, report.idle_s)
        idle = None if silent else min(1.0, max(0.0, (report.idle_s - idle_s) / (now - then)))
        return Replica(report.step, lag, (report.tokens - tokens) / (now - then), idle)


class Printed:
    """Catches what this process and its children print, line by line, so that it does not run into the live display.

    Stdout goes through a pipe from now on, stderr too where it is a terminal; children inherit that. `terminal` is the way around it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._say: Callable[[str], None] = say
        self._saved = {number: os.dup(number) for number in (1, 2) if number == 1 or os.isatty(number)}
        self.terminal = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._read, write = os.pipe()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a user's limit: then a burst of more than 64 kB makes its writer wait for the loop
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for number in self._saved:
            os.dup2(write, number)
        os.close(write)
        os.set_blocking(self._read, False)
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read, self._arrived)

    def end(self) -> None:
        """Give this process its stdout and stderr back. What children still print is passed on as long as the loop runs."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._arrived()
        self._say = _write
        for number, saved in self._saved.items():
            os.dup2(saved, number)
            os.close(saved)

    def _arrived(self) -> None:
        try:
            data = os.read(self._read, PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:  # every writer is gone
            self._loop.remove_reader(self._read)
            os.close(self._read)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and not data:
            lines.append(self._rest)
        for line in lines:
            self._say(line.decode(errors="replace").rstrip("\r"))


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
