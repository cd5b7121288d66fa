"""The console of a run elsewhere is given what the run's files say, as they grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config
from monarch_rl.observe import watch
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.status import StatusFile
from monarch_rl.observe.timeline import Count, Span
from monarch_rl.observe.trace import Trace
from monarch_rl.observe.watch import Follower
from monarch_rl.types import Group, Version

MS = 1_000_000


class Heard:
    """A console that remembers."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lanes: dict[str, list[str]] = {}
        self.held: list[tuple[int, int, int]] = []
        self.samples: list[Group] = []
        self.closed = False
        self.everything = asyncio.Event()

    def start(self) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row["step"])

    def reports(self, step: int, reports: Iterable[GeneratorReport]) -> None:
        self.held = [(step, report.replica, report.tokens) for report in reports]
        if self.rows:
            self.everything.set()

    def spans(self, lane: str, spans: Iterable[Span]) -> None:
        self.lanes.setdefault(lane, []).extend(span.name for span in spans)

    def rollouts(self, groups: Iterable[Group]) -> None:
        self.samples = list(groups)

    def say(self, line: str) -> None: ...

    def close(self) -> None:
        self.closed = True


def append(path: Path, **row: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


async def test_rows_lanes_generators_and_samples_come_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, status = Heard(), StatusFile(tmp_path)
    monkeypatch.setattr(watch, "make_console", lambda config, started: heard)
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    status.start()
    trace = Trace(tmp_path / "timeline.json")
    config = Config(output_dir=str(tmp_path), steps=2)
    config.console.rollouts_every = 2
    watching = asyncio.create_task(watch.watch(tmp_path, config))
    append(tmp_path / "metrics.jsonl", step=0)
    trace.add("generator 1", [Span("pull", 0, MS, {"version": "0.1"}), Count("generator", 2 * MS, {"step": 0, "tokens": 5, "idle_s": 0.1})])
    await asyncio.wait_for(heard.everything.wait(), 10)
    assert (heard.rows, heard.lanes, heard.held) == ([0], {"generator 1": ["pull"]}, [(0, 1, 5)])
    episode = {"completion": "#2", "reward": 1.0, "error": None, "tokens": 2, "truncated": False, "versions": ["0.1", "1.2"]}
    append(tmp_path / "rollouts.jsonl", step=2, ordinal=4, prompt="1+1=", answer=2, episodes=[episode])
    append(tmp_path / "metrics.jsonl", step=1)
    append(tmp_path / "metrics.jsonl", step=2)
    trace.close()
    status.ends("done")
    status.close()
    ended = await asyncio.wait_for(watching, 10)
    assert ended.state == "done"
    assert heard.closed
    assert heard.rows == [0, 1, 2]
    (group,) = heard.samples
    assert (group.prompt.content, group.episodes[0].text, group.episodes[0].reward) == ("1+1=", "#2", 1.0)
    assert group.episodes[0].versions() == (Version(0, 1), Version(1, 2))


def test_a_file_is_followed_by_whole_lines_and_again_from_its_beginning_when_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    follower = Follower(path)
    assert list(follower.lines()) == []
    path.write_text("one\ntw")
    assert list(follower.lines()) == ["one\n"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert list(follower.lines()) == ["two\n", "three\n"]
    path.write_text("two\n")
    assert list(follower.lines()) == ["two\n"], "a resumed run cuts off what came after its checkpoint"
    path.write_text("three\nfour\n")
    assert list(follower.lines()) == ["three\n", "four\n"], "and may have written more than that by now"
    (tmp_path / "other").write_text("anew\nfive\n")
    (tmp_path / "other").replace(path)
    assert list(follower.lines()) == ["anew\n", "five\n"]
