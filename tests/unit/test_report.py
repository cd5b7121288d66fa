"""`report.html` says what the files of a run say, and lets nothing of a completion through as markup."""

from __future__ import annotations

import json
from pathlib import Path

from monarch_rl.observe.report import write_report


def lines(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_report_shows_figures_curves_and_rollouts(tmp_path: Path) -> None:
    zero = {"step": 0, "wall_s": 3.0, "eval/accuracy": 0.25, "eval/version": "0.0"}
    one = {"step": 1, "wall_s": 5.0, "reward/mean": 0.5, "grad_norm": 0.1}
    two = {"step": 2, "wall_s": 7.4, "reward/mean": 1.0, "grad_norm": 0.2, "eval/accuracy": 0.75, "eval/version": "0.2"}
    lines(tmp_path / "metrics.jsonl", zero, one, two)
    episode = {"completion": "<script>alert(1)</script>", "reward": None, "versions": ["0.0", "0.1"]}
    lines(tmp_path / "rollouts.jsonl", {"step": 2, "prompt": "1+1=", "episodes": [episode]})
    page = write_report(tmp_path).read_text()
    assert "0.250 → 0.750 (version 0.2)" in page
    assert "<td>7 s</td>" in page
    assert page.count("<polyline") == 3  # reward, accuracy, gradient norm: the rest has no values
    assert 'points="210.0,84.0 420.0,18.0"' in page  # reward 0.5 and 1 at steps 1 and 2 of 2
    assert "<td>unscorable</td><td>0.0–0.1</td>" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_what_an_environment_said_is_told_apart(tmp_path: Path) -> None:
    episode = {"completion": "[12*7]84#84", "transcript": "[12*7]⟨84⟩#84", "reward": 1.0, "versions": ["0.0"]}
    lines(tmp_path / "rollouts.jsonl", {"step": 1, "prompt": "12*7=", "episodes": [episode]})
    assert "12*7= <b>[12*7]⟨84⟩#84</b>" in write_report(tmp_path).read_text()


def test_a_run_that_ended_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl")
    assert "<svg" not in write_report(tmp_path).read_text()
