"""`timeline.json`: what a trace viewer asks for, made of records as the actors report them; and that it stays small."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.observe import timeline, trace
from monarch_rl.observe.timeline import Count, Span
from monarch_rl.observe.trace import Lanes, Trace, read

MS = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.json"


def at(start_ns: int, name: str, start_ms: float, end_ms: float, **args: Any) -> Span:
    return Span(name, start_ns + int(start_ms * MS), start_ns + int(end_ms * MS), args or None)


def written(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_text())
    return whole


def check(events: list[dict[str, Any]]) -> None:
    """What a viewer needs: named processes, spans of a track that do not overlap, arrows in pairs that point forward onto spans."""
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {event["pid"] for event in events} - {0} <= named
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert all(one[1] <= other[0] + 0.11 for one, other in pairwise(sorted(spans))), "spans of a track overlap"
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(event["ph"] in "sf" for event in events) / 2, "an id is used twice"
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        for end in (start, ends[number]):
            assert any(a <= end["ts"] <= b for a, b in tracks[end["pid"], end["tid"]]), "an arrow hangs in the air"


def test_arrows_go_from_the_staging_of_a_version_to_each_pull_of_it_whichever_is_reported_first(path: Path) -> None:
    made = Trace(path)
    now = made._start_ns
    made.add("generator 1", [at(now, "pull", 12, 13, version="0.1"), at(now, "swap", 13, 14, version="0.1")])
    made.add("trainer 0", [at(now, "wait", 0, 2), at(now, "train", 2, 9), at(now, "stage", 9, 11, version="0.1")])
    made.add("trainer 1", [at(now, "stage", 9, 11, version="0.1")])
    made.add("generator 0", [at(now, "pull", 11, 15, version="0.1"), at(now, "pull", 20, 21, version="0.2")])
    made.close()
    events = written(path)["traceEvents"]
    check(events)
    arrows = [(event["ph"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 9000.0), ("f", 12000.0), ("s", 9000.0), ("f", 11000.0)], "the pull of 0.2 has none"


def test_what_the_arrows_take_does_not_grow_with_the_run(path: Path) -> None:
    """Versions that nobody pulls, and pulls of versions whose staging nobody told of: the trainer died first."""
    made = Trace(path)
    now = made._start_ns
    for step in range(3 * trace.STAGED):
        made.add("trainer 0", [at(now, "stage", step, step + 0.5, version=f"0.{step}")])
        made.add("generator 0", [at(now, "pull", step, step + 0.5, version=f"1.{step}")])
    assert len(made._staged) == len(made._pulled) == trace.STAGED
    made.add("generator 1", [at(now, "pull", 2000, 2001, version=f"0.{3 * trace.STAGED - 1}")])
    made.close()
    assert sum(event["ph"] == "s" for event in read(path)) == 1


def test_an_engine_decodes_while_it_is_not_idle_and_requests_have_rows(path: Path) -> None:
    made = Trace(path)
    now = made._start_ns
    made.add("generator 0", [at(now, "generate", 2, 5, episodes=8), at(now, "generate", 1, 9, episodes=8)])
    made.add("generator 0", [at(now, "idle", 0, 1), at(now, "idle", 9, 12), at(now, "generate", 12, 20, episodes=8)])
    made.close()
    events = written(path)["traceEvents"]
    check(events)
    spans = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert [span for span in spans if span[1] == 0] == [
        ("idle", 0, 0.0, 1000.0),
        ("decode", 0, 1000.0, 8000.0),
        ("idle", 0, 9000.0, 3000.0),
        ("decode", 0, 12000.0, 8000.0),
    ]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"generate 1", "generate 2"}


def test_other_hosts_are_shown_on_our_clock(path: Path) -> None:
    made = Trace(path)
    made.offsets_ns["generator 0"] = 5 * MS
    made.add("generator 0", [at(made._start_ns, "swap", 7, 8, version="0.1"), Count("generator", made._start_ns + 9 * MS, {"step": 1})])
    made.close()
    times = [event["ts"] for event in written(path)["traceEvents"] if event["ph"] in "XC"]
    assert times == [2000.0, 4000.0]
    assert written(path)["metadata"]["clock_offsets_ns"] == {"generator 0": 5 * MS}


def test_it_stays_small_and_says_what_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 40)
    made = Trace(path)
    now = made._start_ns
    for step in range(100):
        made.add("scorer 0", [at(now, "score", 10 * step, 10 * step + 5)])
        made.add("trainer 0", [at(now, "stage", 10 * step, 10 * step + 4, version=f"0.{step}")])
        made.add("generator 0", [at(now, "pull", 10 * step + 5, 10 * step + 6, version=f"0.{step}")])
    made.close()
    whole = written(path)
    check(whole["traceEvents"])
    assert len(whole["traceEvents"]) <= 41
    left_out, spans = whole["metadata"]["left_out"], [event["name"] for event in whole["traceEvents"]]
    assert left_out["score"] + spans.count("score") == 100
    assert left_out["pull"] + spans.count("pull") == 100


def test_a_run_that_was_killed_leaves_a_file_that_can_be_read_and_is_kept(path: Path) -> None:
    made = Trace(path)
    made.add("trainer 0", [at(made._start_ns, "train", 0, 2)])
    with path.open("a") as file:
        file.write('{"ph":"X","pid":1,"na')
    lanes = Lanes()
    assert list(lanes.read(read(path))) == [("trainer 0", Span("train", 0, 2 * MS))]
    again = Trace(path)
    again.close()
    assert not path.with_name("timeline.1.json").exists(), "there was nothing to write"
    again = Trace(path)
    again.add("trainer 1", [])
    again.close()
    assert read(path.with_name("timeline.1.json"))
    assert [event["name"] for event in read(path)] == ["end"]


def test_short_spans_one_after_another_are_told_as_one() -> None:
    timeline.drain()
    for start_ms in (0, 1, 2, 10):
        timeline.add_one_of_many("score", start_ms * MS, start_ms * MS + MS // 2)
    timeline.add_one_of_many("observe", 11 * MS, 12 * MS)
    assert timeline.drain() == [
        Span("score", 0, 2 * MS + MS // 2, {"times": 3}),
        Span("score", 10 * MS, 10 * MS + MS // 2, {"times": 1}),
        Span("observe", 11 * MS, 12 * MS, {"times": 1}),
    ]


def test_the_quickest_answer_says_how_far_a_clock_is_ahead() -> None:
    assert timeline.ahead_ns([(0, 1_000_900, 1_000), (5_000, 1_005_050, 5_100), (9_000, 1_009_300, 9_400)]) == 1_000_000


def test_a_clock_that_was_set_back_makes_no_span_of_less_than_nothing(path: Path) -> None:
    trace = Trace(path)
    trace.add("trainer 0", [at(trace._start_ns, "train", 5, 2), at(trace._start_ns, "wait", 6, 7)])
    trace.close()
    check(written(path)["traceEvents"])
