"""What is said of generators beside their figures, and what is kept of a run that goes on for long."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.config import Config
from monarch_rl.observe.charts import SILENT_S
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.report import read_rows
from monarch_rl.observe.timeline import Span
from monarch_rl.observe.trace import Trace
from monarch_rl.records import ROWS, Records, too_slow
from monarch_rl.types import Version
from tests.replies import Called


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Of a run whose actors have nothing to tell."""
    config = Config(output_dir=str(tmp_path))
    config.console.rollouts_every = 0
    made = Records(config)
    made._calls = Called()  # type: ignore[assignment]
    made.trace = Trace(tmp_path / "timeline.json")
    made._trackers = SimpleNamespace(row=lambda row: None)  # type: ignore[assignment]

    def asked(found: Any) -> Any:
        async def told(*_: Any) -> Any:
            return found

        return told

    made.begin(Version(0, 0), SimpleNamespace(collect=asked(([], {}))), SimpleNamespace(stats=asked({})))  # type: ignore[arg-type]
    return made


async def test_a_long_run_keeps_its_last_rows_and_its_last_evaluation_and_the_file_has_all(records: Records, tmp_path: Path) -> None:
    steps = 2 * ROWS
    for step in range(steps + 1):
        if step in (1, 5):
            records.put_evaluation({"eval/accuracy": step / 10, "eval/version": f"0.{step}"})
        await records._write(step, {"loss/policy": float(step)})
    assert [row["step"] for row in records.rows] == list(range(steps + 1 - ROWS, steps + 1))
    assert (records.evaluated["step"], records.evaluated["eval/accuracy"]) == (5, 0.5)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [1, 5]
    records.go_back(Version(1, steps - 3))
    assert records.rows[-1]["step"] == steps - 3
    await records._write(steps - 2, {"loss/policy": 0.0})
    assert len(records.rows) == ROWS - 2


def test_the_spans_of_an_actor_that_is_gone_are_not_kept_for_ever(records: Records) -> None:
    now_ns, long_ns = time.time_ns(), int(2 * SILENT_S * 1e9)
    records.spans("generator 0", [Span("generate", now_ns - long_ns - 10, now_ns - long_ns)])
    records.spans("generator 1", [Span("generate", now_ns - 20, now_ns - 10)])
    assert list(records.recent) == ["generator 1"], "the first had been silent when the second came"
    records.spans("generator 2", [Span("generate", now_ns - 9, now_ns)])
    assert list(records.recent) == ["generator 1", "generator 2"]


def test_a_generator_that_is_too_slow_is_named_each_time_that_a_version_is_kept_for_it() -> None:
    def reports(**times: int) -> list[GeneratorReport]:
        return [GeneratorReport(int(name[1:]), rejected=3 * n, too_slow=n) for name, n in times.items()]

    assert too_slow([], reports(g0=0)) == []
    (said,) = too_slow(reports(g0=0), reports(g0=0, g1=1))
    assert said.startswith("generator 1 is too slow for the weights: its pulls are written over while it reads (3 so far)")
    assert too_slow(reports(g0=0, g1=1), reports(g0=0, g1=1)) == []
    assert len(too_slow(reports(g0=0, g1=1), reports(g0=1, g1=2))) == 2
