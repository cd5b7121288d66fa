"""What a person sees while a run goes on. Here: one plain line per step, and a few rollouts now and then; on a terminal see `live.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TextIO

from monarch_rl.config import UserError
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.timeline import Span
from monarch_rl.types import Group

LINE = 120
"""Columns of a plain line, at most."""
SAMPLES = 4
"""Groups that `Console.rollouts` is given at a time."""
LEAST_COLUMNS, LEAST_ROWS = 60, 16
"""Of a terminal that has room for the live display."""


class Console(Protocol):
    """What `Session` tells about a run. Every call returns at once."""

    def start(self) -> None:
        """The run begins; called in its event loop, before any process is started."""
        ...

    def row(self, row: Mapping[str, Any]) -> None:
        """The figures of a step, as they go into `metrics.jsonl`."""
        ...

    def row_again(self, row: Mapping[str, Any]) -> None:
        """The last row, with an evaluation that came after it."""
        ...

    def set_steps(self, steps: int) -> None:
        """The length of the run, where it is not that of the configuration."""
        ...

    def reports(self, step: int, reports: Iterable[GeneratorReport]) -> None:
        """How the generators are; `step` is the trainer's."""
        ...

    def spans(self, lane: str, spans: Iterable[Span]) -> None:
        """What an actor has done lately."""
        ...

    def rollouts(self, groups: Iterable[Group]) -> None:
        """Some finished groups, the newest last."""
        ...

    def say(self, line: str) -> None:
        """One line for the reader."""
        ...

    def close(self) -> None:
        """The run is over; what was shown last stays. A second call does nothing."""
        ...


def is_live(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal of some size that can move its cursor and show bars, and no CI. NO_COLOR takes the colours, not the display."""
    if not stream.isatty() or environ.get("CI", "") not in ("", "0", "false") or environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    if stream.encoding.lower().replace("-", "") != "utf8":
        return False
    columns, rows = os.get_terminal_size(stream.fileno())
    return columns >= LEAST_COLUMNS and rows >= LEAST_ROWS


class PlainConsole:
    """Lines on stdout."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def start(self) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None:
        say(step_line(row, self._steps))

    def row_again(self, row: Mapping[str, Any]) -> None:
        self.row(row)

    def set_steps(self, steps: int) -> None:
        self._steps = steps

    def reports(self, step: int, reports: Iterable[GeneratorReport]) -> None: ...

    def spans(self, lane: str, spans: Iterable[Span]) -> None: ...

    def rollouts(self, groups: Iterable[Group]) -> None:
        for line in rollout_lines(list(groups)[-2:]):
            say(line)

    def say(self, line: str) -> None:
        say(line)

    def close(self) -> None: ...


def say(line: str) -> None:
    """Raises UserError: stdout takes no more, e.g. a full disk."""
    try:
        print(line, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at exit must go somewhere
        raise UserError(f"cannot write to stdout: {error.strerror}") from error


def complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """One step in one line of at most 120 columns; what matters least is left out where there is no room."""
    parts = {"step": f"step {row['step']:>{len(str(steps))}}/{steps}"}
    if "reward/mean" in row:
        parts |= {
            "reward": f"reward {row['reward/mean']:.3f}",
            "loss": f"loss {row['loss/policy']:+.4f}",
            "grad": f"grad {row['grad_norm']:.2f}",
            "age": f"age {row['age/mean']:.1f}≤{row['age/max']:.0f}",
            "len": f"len {row['episode/tokens_mean']:.0f}",
            "time": f"{row['time/step_s']:.2f} s (wait {row['time/wait_batch_s']:.2f})",
        }
        if "throughput/generated_tok_s" in row:
            parts["speed"] = f"{row['throughput/generated_tok_s'] / 1e3:.1f}k tok/s"
    if "eval/accuracy" in row:
        parts["eval"] = f"eval {row['eval/accuracy']:.3f} @{row['eval/version']}"
    for least in ("len", "grad", "speed", "time", "age"):
        if len("  ".join(parts.values())) <= LINE:
            break
        parts.pop(least, None)
    return "  ".join(parts.values())[:LINE]


def rollout_lines(groups: Iterable[Group]) -> list[str]:
    """Reward, prompt and completion of the first episodes of some groups, one line of at most 120 columns each.

    What the model was told stands in ⟨ ⟩.
    """
    lines = []
    for group in groups:
        for episode in group.episodes[:2]:
            reward = "unscorable" if episode.reward is None else f"{episode.reward:g}"
            line = visible(f"    [{reward}] ⟨{question(group)}⟩{episode.transcript or episode.text}")
            lines.append(line if len(line) <= LINE else line[: LINE - 1] + "…")
    return lines


def question(group: Group) -> str:
    """What the model was asked: the prompt, or the last message of a chat."""
    content = group.prompt.content
    return content if isinstance(content, str) else content[-1]["content"]


def visible(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey: a model may sample any character."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else " " if c.isspace() else "·" for c in text)
