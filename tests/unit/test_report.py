"""`report.html` says what the files of a run say, whatever became of it, and lets nothing of a completion through as markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config
from monarch_rl.configure import write
from monarch_rl.observe import gantt
from monarch_rl.observe.gantt import read_lanes, typical, whole
from monarch_rl.observe.report import write_report
from monarch_rl.observe.status import StatusFile
from monarch_rl.observe.timeline import Count, Span
from monarch_rl.observe.trace import Trace

MS = 1_000_000


def lines(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def episode(completion: str, reward: float | None, *versions: str, error: str | None = None) -> dict[str, Any]:
    return {"completion": completion, "reward": reward, "error": error, "versions": list(versions)}


def test_a_report_shows_figures_curves_and_rollouts(tmp_path: Path) -> None:
    zero = {"step": 0, "wall_s": 3.0, "eval/accuracy": 0.25, "eval/version": "0.0"}
    one = {"step": 1, "wall_s": 5.0, "reward/mean": 0.5, "grad_norm": 0.1}
    two = {"step": 2, "wall_s": 7.4, "reward/mean": 1.0, "grad_norm": 0.2, "eval/accuracy": 0.75, "eval/version": "0.2"}
    lines(tmp_path / "metrics.jsonl", zero, one, two)
    failed = episode("<script>alert(1)</script>", None, "0.0", "0.1", error="RewardError: <b>")
    lines(tmp_path / "rollouts.jsonl", {"step": 2, "prompt": "1+1=", "episodes": [failed]})
    page = write_report(tmp_path).read_text()
    assert "0.250 → 0.750 (version 0.2)" in page
    assert "<td>7 s</td>" in page
    assert page.count("<polyline") == 3  # reward, accuracy, gradient norm: the rest has no values
    assert 'points="210.0,84.0 420.0,18.0"' in page  # reward 0.5 and 1 at steps 1 and 2 of 2
    assert "<td>unscorable</td><td>0.0–0.1</td>" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "1 × <code>RewardError: &lt;b&gt;</code>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "it needs no network"


def test_very_long_texts_are_shown_by_their_ends(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", {"step": 1, "wall_s": 5.0})
    said = "<begin>" + 900_000 * "x" + "<end>"
    lines(tmp_path / "rollouts.jsonl", {"step": 1, "prompt": said, "episodes": [episode(said, 1.0, "0.0")]})
    page = write_report(tmp_path).read_text()
    assert page.count("&lt;begin&gt;") == page.count("&lt;end&gt;") == 4
    assert len(page) < 200_000


def test_best_and_worst_are_of_different_prompts_and_from_the_end_of_the_run(tmp_path: Path) -> None:
    early = [{"step": 1, "prompt": "early", "episodes": [episode("x", 5.0, "0.0")]}] * 100
    late = [
        {"step": 9, "prompt": f"{n}?", "episodes": [episode(f"good {n}", float(n), "0.6", "0.8"), episode(f"bad {n}", -float(n), "0.8")]}
        for n in range(30)
    ]
    lines(tmp_path / "metrics.jsonl", {"step": 9, "wall_s": 1.0, "buffer/dropped_dead": 7.0, "buffer/dropped_failed": 1.0})
    lines(tmp_path / "rollouts.jsonl", *early, *late)
    page = write_report(tmp_path).read_text()
    best, worst = page.split("<h2>Best of the last rollouts</h2>")[1].split("<h2>Worst</h2>")
    assert re.findall(r"<b>(.+?)</b>", best) == [f"good {n}" for n in (29, 28, 27, 26, 25, 24)]
    assert re.findall(r"<b>(.+?)</b>", worst) == [f"bad {n}" for n in (29, 28, 27, 26, 25, 24)]
    assert "<th>prompts dropped: dead</th><td>7</td>" in page
    assert "<th>0 steps</th>" in page  # ages: 30 + 100 of 160 episodes at 0, 30 at 2
    assert '<th>2 steps</th><td><meter value="0.188"></meter></td><td>19%</td>' in page


def test_what_an_environment_said_is_told_apart(tmp_path: Path) -> None:
    episode = {"completion": "[12*7]84#84", "transcript": "[12*7]⟨84⟩#84", "reward": 1.0, "versions": ["0.0"]}
    lines(tmp_path / "rollouts.jsonl", {"step": 1, "prompt": "12*7=", "episodes": [episode]})
    assert "12*7= <b>[12*7]⟨84⟩#84</b>" in write_report(tmp_path).read_text()


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl")
    page = write_report(tmp_path).read_text()
    assert "<svg" not in page
    assert "no rows yet" in page


async def test_a_failed_run_says_why_and_what_was_not_the_default(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", {"step": 1, "wall_s": 5.0})
    write(Config(output_dir=str(tmp_path), steps=7), tmp_path / "config.yaml")
    (tmp_path / "error.log").write_text("Traceback: <here>")
    status = StatusFile(tmp_path)
    status.start()
    status.ends("failed", "trainer 0 was killed by signal 9 (SIGKILL)")
    status.close()
    page = write_report(tmp_path).read_text()
    assert "failed: trainer 0 was killed by signal 9 (SIGKILL)" in page
    assert "Traceback: &lt;here&gt;" in page
    changed = page.split("<h2>Settings that are not the default</h2>")[1].split("<details>")[0]
    assert re.findall(r"<th><code>(.+?)</code></th>", changed) == ["steps", "output_dir"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", {"step": 1, "wall_s": 5.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "wa')
    assert "<th>steps</th><td>1</td>" in write_report(tmp_path).read_text()


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    """Nine steps of trainer and generator, 100 ms each; the fifth takes a second, which is not typical."""
    made = Trace(tmp_path / "timeline.json")
    now = made._start_ns
    for step in range(9):
        start = now + (100 * step + (900 if step > 4 else 0)) * MS
        waited = start + (925 if step == 4 else 25) * MS
        version = {"version": f"0.{step + 1}"}
        spans = [
            Span("wait", start, waited),
            Span("train", waited, waited + 70 * MS),
            Span("stage", waited + 70 * MS, waited + 75 * MS, version),
        ]
        made.add("trainer 0", spans)
        made.add(
            "generator 0",
            [
                Span("idle", start, start + 10 * MS),
                Span("pull", waited + 73 * MS, waited + 74 * MS, version),
                Span("idle", waited + 65 * MS, waited + 75 * MS),
            ],
        )
        made.add("replay buffer", [Count("prompts", start, {"ready": step, "leased": 1})])
    made.close()
    return tmp_path / "timeline.json"


def test_the_lane_chart_shows_typical_steps_with_arrows_and_idle_shares(timeline: Path) -> None:
    lines(timeline.with_name("metrics.jsonl"), {"step": 9, "wall_s": 2.0})
    page = write_report(timeline.parent).read_text()
    found = page.split("<h2>Who did what, steps ")[1].split("</svg>")[0]
    assert found.count('<path class="arrow"') == 1 + 6  # in the legend, and of the pulls in the window
    assert "70% idle" in found


def test_a_window_of_typical_steps_leaves_out_the_long_one(timeline: Path) -> None:
    lanes = read_lanes(timeline)
    window = typical(lanes, steps=2)
    assert (window.first, window.last) in {(3, 4), (6, 7)}, "those nearest the middle without step 5"
    assert window.end_ns - window.start_ns == pytest.approx(200 * MS, rel=0.01)
    assert (whole(lanes).first, whole(lanes).last) == (1, 9)


def test_idle_is_what_is_no_work(timeline: Path) -> None:
    trainer, generator, buffer = read_lanes(timeline)
    assert [lane.name for lane in (trainer, generator, buffer)] == ["trainer 0", "generator 0", "replay buffer"]
    assert trainer.idle(0, 400 * MS) == pytest.approx(0.25, abs=0.001)
    assert generator.idle(0, 400 * MS) == pytest.approx(0.2, abs=0.001)


def test_a_picture_stands_alone(timeline: Path) -> None:
    import xml.etree.ElementTree as ElementTree

    lanes = read_lanes(timeline)
    drawn, height = gantt.picture(lanes, whole(lanes), 900)
    root = ElementTree.fromstring(gantt.svg(drawn, 900, height))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
