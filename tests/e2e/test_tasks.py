"""Tasks in the whole system: the calculator with its answers masked, mixed with a task from docs/tasks.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Job, finished, started

TURN = r"\[(-?\d+[-+*]\d+)\](-?\d+)"
"""A question to the calculator and its answer."""
DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


def groups_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_a_mixture_keeps_its_weights_and_no_answer_of_the_calculator_is_trained(tmp_path: Path) -> None:
    """Three prompts in four are the calculator's, the others those of the page's own task, from a file."""
    body = next(body for body in re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S) if body.startswith("# brief.py"))
    (tmp_path / "brief.py").write_text(body)
    parts = "task=[{name: calculator, weight: 3}, {name: brief.py:Brief, args: {price: 0.02}}]"
    short = ["steps=3", "buffer.prompts_per_step=16", "buffer.dead_groups=keep", "eval.prompts=64", "eval.every=0"]
    job = finished(tmp_path, "recipe=calculator", parts, *short, "trainer.warmup_steps=1")
    assert job.process.returncode == 0
    asking = [group for group in groups_of(job) if "*" in group["prompt"]]
    brief = [group for group in groups_of(job) if "*" not in group["prompt"]]
    for step in (1, 2, 3):
        assert (sum(group["step"] == step for group in asking), sum(group["step"] == step for group in brief)) == (12, 4)
    assert {group["prompt"].count("+") for group in brief} == {2}
    assert any(e["reward"] not in (0.0, 1.0, None) for group in brief for e in group["episodes"])
    check_turns([episode for group in asking for episode in group["episodes"]])
    assert job.rows[1]["age/max"] == 0
    assert job.rows[1]["mismatch/max_abs"] < 1e-3, "logprobs do not belong to their tokens"
    assert all(row["episode/tokens_max"] <= 64 for row in job.rows[1:])


def check_turns(episodes: list[dict[str, Any]]) -> None:
    asked = [e for e in episodes if re.fullmatch(f"(?:{TURN})+#-?\\d+", e["completion"])]
    assert asked, "nobody asked"
    for episode in asked:
        assert episode["reward"] in (0.0, 1.0)
        turns = re.findall(TURN, episode["completion"])
        assert all(eval(question) == int(said) for question, said in turns), episode
        # Sampled: all that the model wrote and, beyond the text, the end token of each turn.
        assert episode["tokens"] == len(episode["completion"]) - sum(len(said) for _, said in turns) + len(turns) + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_calculator_learns(tmp_path: Path) -> None:
    with started(tmp_path, "recipe=calculator") as job:
        assert job.wait(840) == 0
    assert job.rows[-1]["eval/accuracy"] - job.rows[0]["eval/accuracy"] >= 0.4
