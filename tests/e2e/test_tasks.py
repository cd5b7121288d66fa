"""Tasks in the whole system: the calculator with its answers masked, and a mixture with a task from docs/tasks.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TURN = r"\[(-?\d+[-+*]\d+)\](-?\d+)"
"""A question to the calculator and its answer."""
DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"


def monarch_rl(*arguments: str, cwd: Path, deadline_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_rl.run", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_the_calculator_is_asked_and_its_answers_are_not_trained(tmp_path: Path) -> None:
    short = ["steps=6", "buffer.prompts_per_step=16", "eval.prompts=64", "eval.every=0", "trainer.warmup_steps=1"]
    done = monarch_rl("recipe=calculator", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "calculator"
    rows, groups = lines(run / "metrics.jsonl"), lines(run / "rollouts.jsonl")
    episodes = [episode for group in groups for episode in group["episodes"]]
    asked = [e for e in episodes if re.fullmatch(f"(?:{TURN})+#-?\\d+", e["completion"])]
    assert asked, "nobody asked"
    for episode in asked:
        turns = re.findall(TURN, episode["completion"])
        assert all(eval(question) == int(said) for question, said in turns), episode
        # Sampled: all that the model wrote and, beyond the text, the end token of each turn.
        assert episode["tokens"] == len(episode["completion"]) - sum(len(said) for _, said in turns) + len(turns) + 1
    assert rows[1]["age/max"] == 0
    assert rows[1]["mismatch/max_abs"] < 1e-3, "logprobs do not belong to their tokens"
    assert all(row["episode/tokens_max"] <= 64 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_calculator_learns(tmp_path: Path) -> None:
    done = monarch_rl("recipe=calculator", cwd=tmp_path, deadline_s=840)
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "runs" / "calculator" / "metrics.jsonl")
    assert rows[-1]["eval/accuracy"] - rows[0]["eval/accuracy"] >= 0.4


@pytest.mark.timeout(300)
def test_a_mixture_keeps_its_weights(tmp_path: Path) -> None:
    """The second part is the page's own task, from a file."""
    body = next(body for body in re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S) if body.startswith("# brief.py"))
    (tmp_path / "brief.py").write_text(body)
    parts = "task=[{name: arithmetic, weight: 3}, {name: brief.py:Brief, args: {price: 0.02}}]"
    short = ["steps=3", "buffer.prompts_per_step=16", "buffer.dead_groups=keep", "eval.prompts=0", "trainer.warmup_steps=1"]
    done = monarch_rl("recipe=grpo_qwen", "profile=cpu", parts, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    groups = lines(tmp_path / "runs" / "grpo_qwen" / "rollouts.jsonl")
    brief = [group for group in groups if any(e["reward"] not in (0.0, 1.0, None) for e in group["episodes"])]
    for step in (1, 2, 3):
        assert sum(group["step"] == step for group in brief) == 4
    assert {group["prompt"].count("+") for group in brief} == {2}
