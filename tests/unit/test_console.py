"""What is shown of a run: plain lines, charts made of characters, the panels of the live display, and the display on a terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.color import Color
from rich.color_triplet import ColorTriplet

from monarch_rl.config import Config
from monarch_rl.observe import charts, panels
from monarch_rl.observe.charts import SILENT_S, Lanes, bar, cell_seconds, count, duration, seconds_left, sparkline
from monarch_rl.observe.console import PlainConsole, is_live, rollout_lines, step_line, visible
from monarch_rl.observe.live import LiveConsole, Meter, make_console
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.panels import Replica, View, render, squeeze
from monarch_rl.observe.timeline import Span
from monarch_rl.types import Episode, Group, Prompt, Version

ROW: dict[str, Any] = {
    "step": 23,
    "wall_s": 60.0,
    "reward/mean": 0.612,
    "loss/policy": -0.1066,
    "grad_norm": 0.14,
    "lr": 3e-4,
    "age/mean": 1.44,
    "age/max": 2.0,
    "episode/tokens_mean": 20.3,
    "time/step_s": 0.59,
    "time/wait_batch_s": 0.03,
    "idle/trainer": 0.05,
    "throughput/generated_tok_s": 1254.0,
    "buffer/fill": 1.5,
    "buffer/leased": 9.0,
    "buffer/dropped": 56.0,
    "buffer/dropped_dead": 54.0,
    "buffer/dropped_unscorable": 2.0,
}
HUGE = ROW | {
    "step": 123456,
    "reward/mean": -123456.789,
    "loss/policy": -98765.4321,
    "grad_norm": 1e9,
    "time/step_s": 98765.4,
    "buffer/dropped": 1e7,
    "buffer/dropped_dead": 9e6,
    "buffer/dropped_deadline": 1e6,
    "eval/accuracy": 0.5,
    "eval/version": "12.123450-12.123456",
}


def group(text: str, *rewards: float | None, prompt: Any = "1+2=", first: int = 12, last: int = 14) -> Group:
    def episode(reward: float | None) -> Episode:
        versions = np.array([Version(0, first).pack(), Version(0, last).pack()], dtype=np.int64)
        ids, logprobs = np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32)
        return Episode(ids, np.ones(2, dtype=np.bool_), logprobs, versions, text=text, reward=reward)

    return Group(Prompt(0, prompt), [episode(reward) for reward in rewards])


def spans(*kinds: tuple[str, float, float]) -> list[Span]:
    return [Span(kind, int(start * 1e9), int(end * 1e9)) for kind, start, end in kinds]


def view(replicas: int = 1, row: dict[str, Any] = ROW) -> View:
    shown = View("grpo_qwen  tiny · arithmetic · runs/grpo_qwen", steps=50, max_age=2, ahead=3.0, elapsed_s=60.0, row=row)
    shown.steps = max(50, row["step"])
    shown.rewards, shown.walls_s = [0.1, 0.4, row["reward/mean"]], [58.0, 59.0, 60.0]
    shown.evaluations = [(0.156, "0.0"), (0.703, "0.20")]
    shown.replicas = {i: Replica(step=22, lag=1, tok_s=1254.0 + i, idle=0.25) for i in range(replicas)}
    shown.lanes.add("trainer 0", spans(("wait", 9.0, 9.2), ("train", 9.2, 9.8), ("stage", 9.8, 9.9)))
    for i in range(replicas):
        shown.lanes.add(f"generator {i}", spans(("generate", 5.0, 10.0), ("pull", 9.6, 9.8), ("swap", 9.8, 9.81)))
    shown.samples = [group("1+2=3;#3", 1.0, 0.0)]
    shown.samples_step = 20
    return shown


def text(shown: View, width: int, height: int = 24) -> str:
    return "\n".join(line.plain for line in render(shown, width, height))


# --- plain lines -----------------------------------------------------------------------------------------------------


def test_step_line() -> None:
    assert step_line({"step": 0, "eval/accuracy": 0.156, "eval/version": "0.0"}, 50) == "step  0/50  eval 0.156 @0.0"
    line = "step 23/50  reward 0.612  loss -0.1066  grad 0.14  age 1.4≤2  len 20  0.59 s (wait 0.03)  1.3k tok/s"
    assert step_line(ROW, 50) == line


@pytest.mark.parametrize("row", [ROW, ROW | {"eval/accuracy": 0.5, "eval/version": "0.48-0.50"}, HUGE])
def test_step_line_keeps_the_evaluation_within_120_columns(row: dict[str, Any]) -> None:
    line = step_line(row, 123456)
    assert len(line) <= 120
    assert ("eval 0.500 @" in line) == ("eval/accuracy" in row)


def test_rollout_lines_are_one_line_each_and_harmless() -> None:
    """A sampled escape sequence must not reach the terminal."""
    lines = rollout_lines([group("a\nb\x1b[2Jc", 1.0, None), group("x" * 300, 0.25, prompt=[{"role": "user", "content": "Why?"}])])
    assert lines[0] == "    [1] ⟨1+2=⟩a⏎b·[2Jc"
    assert lines[1].startswith("    [unscorable] ")
    assert lines[2].startswith("    [0.25] ⟨Why?⟩xxx")
    assert max(map(len, lines)) == 120


def test_what_an_environment_said_is_told_apart() -> None:
    talk = group("[12*7]84#84", 1.0)
    talk.episodes[0].transcript = "[12*7]⟨84⟩#84"
    assert rollout_lines([talk]) == ["    [1] ⟨1+2=⟩[12*7]⟨84⟩#84"]


def test_plain_console_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainConsole(50)
    plain.start()
    plain.row(ROW)
    plain.set_steps(23)
    plain.row_again(ROW)
    plain.reports(23, [GeneratorReport(0)])
    plain.spans("trainer 0", spans(("train", 0.0, 1.0)))
    plain.rollouts([group("old", 1.0), group("new", 1.0), group("newest", 0.0)])
    plain.say("done: model")
    plain.close()
    assert capsys.readouterr().out.splitlines() == [
        step_line(ROW, 50),
        step_line(ROW, 23),
        "    [1] ⟨1+2=⟩new",
        "    [0] ⟨1+2=⟩newest",
        "done: model",
    ]


class Terminal(io.TextIOWrapper):
    """The far end of a pseudo-terminal of some size, as stdout."""

    def __init__(self, columns: int, rows: int, encoding: str = "utf-8") -> None:
        self.near, far = pty.openpty()
        ioctl(self.near, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        super().__init__(io.FileIO(far, "w"), encoding=encoding)

    def close(self) -> None:
        super().close()
        os.close(self.near)


@pytest.mark.parametrize(
    ("columns", "rows", "environ", "live"),
    [
        (80, 24, {"TERM": "xterm-256color"}, True),
        (80, 24, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (80, 24, {"TERM": "xterm", "CI": "false"}, True),
        (80, 24, {"TERM": "xterm", "CI": "true"}, False),
        (80, 24, {"TERM": "dumb"}, False),
        (80, 24, {}, False),
        (59, 24, {"TERM": "xterm"}, False),
        (80, 15, {"TERM": "xterm"}, False),
        (0, 0, {"TERM": "xterm"}, False),
    ],
)
def test_live_only_where_it_can_be_seen(columns: int, rows: int, environ: dict[str, str], live: bool) -> None:
    with Terminal(columns, rows) as terminal:
        assert is_live(terminal, environ) == live


def test_plain_where_stdout_is_no_terminal_or_cannot_show_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(make_console(Config()), PlainConsole)
    with Terminal(80, 24, encoding="latin-1") as terminal:
        assert not is_live(terminal, os.environ)


# --- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([0, 1, 2, 3, 4, 5, 6, 7], 20, "▁▂▃▄▅▆▇█"),
        ([0, 0, 1, 1], 2, "▁█"),
        ([1, 1, 1], 5, "▄▄▄"),
        ([0, math.nan, 1], 5, "▁ █"),
        ([math.nan], 5, " "),
        ([0, 1], 0, ""),
        (list(range(1000)), 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


@pytest.mark.parametrize(("share", "filled"), [(0.0, 0), (0.5, 5), (0.99, 9), (1.0, 10), (7.0, 10), (-1.0, 0)])
def test_bar_is_full_only_at_the_end(share: float, filled: int) -> None:
    assert bar(share, 10) == ("━" * filled, "─" * (10 - filled))


def test_seconds_left_goes_by_the_recent_pace() -> None:
    assert seconds_left([], 10) is None
    assert seconds_left([30.0], 10) is None
    assert seconds_left([30.0, 32.0], 10) == 20.0
    assert seconds_left([0.0, 100.0, 101.0, 102.0], 10, recent=2) == 10.0
    assert seconds_left([30.0, 32.0], 0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3599.7, "1 h 00 min"), (90061, "25 h 01 min")],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "short"),
    [(0, "0"), (950, "950"), (999.9, "1.0k"), (1254, "1.3k"), (9960, "10k"), (123456, "123k"), (999999, "1.0M"), (3.4e6, "3.4M")],
)
def test_count(number: float, short: str) -> None:
    assert count(number) == short


def test_lanes_give_the_longest_work_and_the_longest_transfer_of_each_cell() -> None:
    lanes = Lanes()
    lanes.add("g", spans(("generate", 10.0, 10.95), ("generate", 10.5, 11.3), ("pull", 11.1, 11.15), ("swap", 11.15, 11.17)))
    lanes.add("g", spans(("generate", 11.3, 11.4), ("train", 11.4, 12.1), ("wait", 12.1, 13.0)))
    works, shares, weights = zip(*lanes.cells("g", 1.0, 4), strict=True)
    assert works == (None, "generate", "train", "wait")
    assert shares == pytest.approx((0.0, 1.0, 0.6, 0.9))
    assert weights == (None, None, "pull", None)


def test_lanes_remember_what_they_show_and_no_more() -> None:
    lanes = Lanes()
    for i in range(3 * charts.KEPT):
        lanes.add("g", spans(("swap", float(i), i + 0.5)))
    assert [cell[2] for cell in lanes.cells("g", 1.0, charts.KEPT + 1)] == [None, *["swap"] * charts.KEPT]


def test_lanes_are_in_order() -> None:
    lanes = Lanes()
    for name in ("generator 10", "generator 9", "trainer 1", "trainer 0"):
        lanes.add(name, [])
    assert lanes.names == ["trainer 0", "trainer 1", "generator 9", "generator 10"]


def test_the_lane_of_an_actor_that_is_gone_makes_room_for_others() -> None:
    lanes = Lanes()
    lanes.add("generator 0", spans(("generate", 0.0, 10.0)))
    lanes.add("generator 1", spans(("generate", 0.0, 12.0 + SILENT_S)))
    assert lanes.names == ["generator 0", "generator 1"]
    lanes.add("generator 2", spans(("generate", 11.0, 13.0 + SILENT_S)))
    assert lanes.names == ["generator 1", "generator 2"]


@pytest.mark.parametrize(("step_s", "cell_s"), [(0.1, 0.1), (1.5, 0.1), (3.0, 0.2), (30.0, 2.0), (1e6, 300.0)])
def test_cell_seconds_show_four_steps(step_s: float, cell_s: float) -> None:
    assert cell_seconds(step_s, 60) == cell_s


# --- panels ----------------------------------------------------------------------------------------------------------


def test_panels_say_what_is_known() -> None:
    for width in (80, 160):
        shown = text(view(), width)
        for words in (
            "grpo_qwen  tiny · arithmetic · runs/grpo_qwen",
            "training  1 min 00 s",
            "step   23/50",
            "46 %, 27 s left",
            "reward 0.612 ▁▅█ 0.10…0.61",
            "eval   0.703 @0.20  was 0.156 @0.0",
            "loss   -0.1066  grad 0.14  lr 3.0e-04  step 0.59 s (5 % wait)",
            "replica  holds  lag  tok/s   idle",
            "      0     22    1   1.3k   25 %",
            "1.5 of 3 steps",
            "mean 1.4, max 2 (limit 2)",
            "leased  9",
            "dropped 56 (54 dead, 2 unscorable)",
            "lanes, the last",
            "rollouts at step 20",
            "     1  0.12-0.14  1+2=    1+2=3;#3",
            "     0  0.12-0.14  1+2=    1+2=3;#3",
        ):
            assert words in shown, (width, words, shown)


def test_panels_before_anything_is_known() -> None:
    shown = text(View("title", steps=50, max_age=2, ahead=3.0), 80)
    for words in ("starting  0 s", "step   0/50", "no batch yet", "reward –", "eval   –"):
        assert words in shown


@pytest.mark.parametrize("width", [60, 80, 119, 120, 160, 300])
@pytest.mark.parametrize("height", [15, 24, 60])
@pytest.mark.parametrize("replicas", [0, 3, 4, 100])
@pytest.mark.parametrize("row", [ROW, HUGE], ids=["usual", "huge"])
def test_panels_fill_the_width_and_keep_the_height(width: int, height: int, replicas: int, row: dict[str, Any]) -> None:
    shown = view(replicas, row)
    chat = [{"role": "user", "content": "四月,她卖了48个发夹。" * 20}]
    long = group("在四月,\n她卖了48个发夹 \x1b[31m" * 20, 1.0, None, prompt=chat)
    shown.samples = [long, group("", -1234567.0, first=12345, last=123456)]
    lines = render(shown, width, height)
    assert len(lines) <= height
    assert {cell_len(line.plain) for line in lines} == {width}
    assert all(line.plain.isprintable() for line in lines)


def test_the_last_picture_says_how_it_ended() -> None:
    shown = view()
    shown.over = True
    assert "stopped  1 min 00 s" in text(shown, 80)
    assert "left" not in text(shown, 80)
    shown.row = ROW | {"step": 50}
    assert "done  1 min 00 s" in text(shown, 80)


def test_many_replicas_are_summed_up() -> None:
    shown = view(16)
    shown.replicas[3] = Replica(step=20, lag=3, tok_s=500.0, idle=None)
    for width in (80, 160):
        lines = text(shown, width).splitlines()
        assert any("generators ×16, 19k tok/s" in line for line in lines)
        assert any("least     20    1    500   25 %" in line for line in lines)
        assert any("most     22    3   1.3k   25 %" in line for line in lines)
        assert any("13 more not shown" in line for line in lines)
    assert "      7     22    1" in text(view(8), 80, height=50)


def test_a_few_lanes_show_both_sides() -> None:
    shown = view(2)
    for rank in range(1, 8):
        shown.lanes.add(f"trainer {rank}", spans(("train", 9.0, 9.9)))
    lanes = re.findall(r"│ ((?:trainer|generator) \d)", text(shown, 80))
    assert lanes == ["trainer 0", "trainer 1", "generator 0", "generator 1"]


def test_lane_marks() -> None:
    """Work below, weights above, both at once in two colours; without colours both fill the cell."""
    shown = view()
    trainer, generator = (next(line for line in render(shown, 80, 24) if name in line.plain) for name in ("trainer 0", "generator 0"))
    assert trainer.plain.split("trainer 0")[1].endswith("▁▁▄▄▄▄▄▄▀  │")
    assert generator.plain.endswith("▄▄▄▄▄▄▀▀▀▄ │")
    plain = next(line for line in render(shown, 80, 24, colour=False) if "generator 0" in line.plain)
    assert plain.plain.endswith("▄▄▄▄▄▄███▄ │")


@pytest.mark.parametrize("colour", [panels.GREY, *panels.KINDS.values(), panels.RED])
def test_colours_stand_out_from_white_and_from_black(colour: str) -> None:
    def luminance(triplet: ColorTriplet) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in triplet.normalized]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    level = luminance(Color.parse(colour).get_truecolor())
    assert min(1.05 / (level + 0.05), (level + 0.05) / 0.05) >= 3.5


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("abc", "abc"),
        ("0123456789abcdef", "0123456…def"),
        ("四月四月四月四月", "四月四…月"),
        ("a\tb\nc\x07", "a b⏎c·"),
    ],
)
def test_squeeze_keeps_beginning_and_end(long: str, short: str) -> None:
    assert squeeze(long, 11) == short


def test_visible_leaves_nothing_to_obey() -> None:
    assert visible("\x1b[2J\r\x00\u202eé四\n") == "·[2J ··é四⏎"


def test_meter_takes_the_last_seconds() -> None:
    meter = Meter()

    def read(now: float, tokens: int, idle_s: float) -> Replica:
        return meter.read(now, 7, GeneratorReport(0, step=5, tokens=tokens, idle_s=idle_s))

    assert read(100.0, 0, 0.0) == Replica(5, 2, None, None)
    assert read(102.0, 200, 1.0) == Replica(5, 2, 100.0, 0.5)
    assert read(107.0, 1200, 1.0) == Replica(5, 2, 200.0, 0.0), "the first two seconds are forgotten"
    assert read(113.0, 1200, 1.0) == Replica(5, 2, 0.0, None), "nothing was heard: nothing is said about its idling"
    assert meter.read(114.0, 7, GeneratorReport(0)).lag is None


def test_a_generator_that_has_ended_is_shown_no_more() -> None:
    console = LiveConsole(Config())
    console.reports(5, [GeneratorReport(0, step=4), GeneratorReport(1, step=4)])
    assert list(console._view.replicas) == [0, 1]
    console.reports(9, [GeneratorReport(0, step=4, ended=True), GeneratorReport(1, step=8)])
    assert list(console._view.replicas) == [1]


# --- on a terminal ---------------------------------------------------------------------------------------------------

SHOW = """
import asyncio, os, subprocess, sys
from monarch_rl.config import Config
from monarch_rl.observe.console import say
from monarch_rl.observe.live import make_console
from tests.unit.test_console import ROW, group, spans

async def show():
    console = make_console(Config(recipe="my_recipe", steps=50))
    console.start()
    console.row(ROW)
    console.spans("trainer 0", spans(("train", 9.0, 9.9)))
    console.rollouts([group("#3", 1.0)])
    say("printed by this process")
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'printed by a child\\\\n')"], check=True)
    await asyncio.sleep(0.2)
    console.say("said to the console")
    await asyncio.sleep(0.2)
    console.close()
    console.close()

asyncio.run(show())
say("done: model")
"""


def on_terminal(code: str, columns: int, rows: int, **environ: str) -> str:
    """What a program writes to its terminal."""
    near, far = pty.openpty()
    ioctl(near, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    environ = kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environ
    child = subprocess.Popen([sys.executable, "-c", code], stdin=far, stdout=far, stderr=far, env=environ)
    os.close(far)
    written = b""
    try:
        while data := os.read(near, 1 << 16):
            written += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(near)
    assert child.wait(timeout=60) == 0, written.decode()
    return written.decode()


def test_live_display_on_a_terminal() -> None:
    """Every printed line stands above the panels, whoever printed it; the last panels stay, then comes the next line."""
    written = on_terminal(SHOW, 80, 24)
    moved = re.sub(r"(\r|\x1b\[(2K|1A))+", "\n", written.replace("\r\n", "\n"))  # back up, over what stood there
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", moved)
    lines = plain.split("\n")
    assert "step   23/50" in plain
    last_frame = max(i for i, line in enumerate(lines) if "my_recipe" in line)
    for words in ("printed by this process", "printed by a child", "said to the console"):
        assert [i for i, line in enumerate(lines[:last_frame]) if line.strip() == words], (words, plain)
    assert "stopped" in lines[last_frame]
    assert lines[-2] == "done: model"
    assert lines[-3].startswith("╰")
    assert max(map(cell_len, lines)) <= 80
    assert re.search(r"╯(\x1b\[0m)?\r\n\r\x1b\[2K", written), "while it lives, the cursor stands on a line of its own"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"


def test_live_display_without_colours() -> None:
    written = on_terminal(SHOW, 80, 24, NO_COLOR="1")
    assert "step   23/50" in written.replace("\x1b[0m", "")
    assert re.findall(r"\x1b\[[0-9;]*(?:38|48);", written) == []


def test_plain_lines_on_a_terminal_in_ci() -> None:
    written = on_terminal(SHOW, 80, 24, CI="true")
    assert "\x1b" not in written
    assert step_line(ROW, 50) in written
