"""Tasks that stand on other packages: reasoning-gym and math-verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, load_task
from monarch_rl.tasks.gsm8k import GSM8K
from monarch_rl.tasks.reward_process import RewardProcess
from monarch_rl.types import Prompt

ROWS = '{"question": "What is a half?", "answer": "#### 0.5"}'


@pytest.mark.parametrize(("spec", "package"), [("reasoning_gym:chain_sum", "reasoning_gym"), ("gsm8k", "math_verify")])
def test_a_missing_package_is_named_with_what_to_install(spec: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.factory", None)
    monkeypatch.setattr("monarch_rl.tasks.gsm8k.find_spec", lambda name: None)
    (rows := tmp_path / "rows.jsonl").write_text(ROWS)
    args = {"path": str(rows), "eval_path": str(rows), "reward": "math_verify"} if spec == "gsm8k" else {}
    with pytest.raises(UserError, match=r"pip install --no-deps -r requirements/envs\.txt"):
        load_task(spec, args, seed=0)


def test_an_unknown_way_to_judge_is_refused(tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").write_text(ROWS)
    with pytest.raises(UserError, match=r"task_args.reward=exact: must be one of number, math_verify"):
        GSM8K(path=str(rows), reward="exact")  # type: ignore[arg-type]


def test_reasoning_gym_prompts_are_pure_and_its_splits_are_disjoint() -> None:
    task = load_task("reasoning_gym:chain_sum", {"chat": False, "max_terms": 3}, seed=1)
    train = [task.prompt(ordinal, "train") for ordinal in range(150)]
    assert train == [load_task("reasoning_gym:chain_sum", {"chat": False, "max_terms": 3}, seed=1).prompt(o, "train") for o in range(150)]
    held_out = {str(task.prompt(ordinal, "eval").content) for ordinal in range(100)}
    assert held_out.isdisjoint(str(prompt.content) for prompt in train)
    assert len({str(prompt.content) for prompt in train}) > 140
    other = load_task("reasoning_gym:chain_sum", {"chat": False, "max_terms": 3}, seed=2)
    assert train != [other.prompt(ordinal, "train") for ordinal in range(150)]
    assert {str(other.prompt(ordinal, "eval").content) for ordinal in range(100)} == held_out


def test_reasoning_gym_rewards() -> None:
    task = load_task("reasoning_gym:chain_sum", {}, seed=0)
    prompt = task.prompt(0, "train")
    assert isinstance(prompt.content, list)
    gold = prompt.answer["answer"]
    for said in (f"so <answer>{gold}</answer>", f"<answer>x</answer><answer> {gold}\n</answer>"):
        assert task.reward(prompt, Completion(said)) == 1.0
    for said in (gold, ""):
        assert task.reward(prompt, Completion(said)) == 0.0
    raw = load_task("reasoning_gym:chain_sum", {"chat": False}, seed=0)
    assert raw.reward(prompt, Completion(f"4+7=11;#{gold}")) == 1.0


def test_a_scorer_that_fails_on_an_answer_takes_it_for_wrong() -> None:
    task = load_task("reasoning_gym:prime_factorization", {}, seed=0)
    assert task.reward(task.prompt(0, "train"), Completion("<answer>junk</answer>")) == 0.0


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "max_term"),
        ("chain_sum", {"min_terms": 0}, "task_args: reasoning_gym:chain_sum"),
        ("graph_color", {}, "its scorer gives its own answer 0, so it cannot be trained on"),
        ("game_of_life_halting", {}, "its scorer gives the answer 'zzz' 1, so it cannot be trained on"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(spec: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_task(f"reasoning_gym:{spec}", args, seed=0)
    assert message in str(caught.value)


async def test_math_verify_judges_in_the_reward_process(tmp_path: Path) -> None:
    """It refuses every thread but a main one, and an endless expression is ended by it or by the deadline."""
    (rows := tmp_path / "rows.jsonl").write_text(ROWS)
    process = RewardProcess("gsm8k", {"path": str(rows), "eval_path": str(rows), "reward": "math_verify"}, seed=0)
    prompt = GSM8K(path=str(rows), eval_path=str(rows)).prompt(0, "train")
    assert isinstance(prompt, Prompt)
    for said, reward in [("\\boxed{\\frac{1}{2}}", 1.0), ("#### 0.50", 1.0), ("$\\frac{2}{3}$", 0.0), ("no idea", 0.0)]:
        score = await process.score(prompt, said, 60)
        assert (score.reward, score.error) == (reward, None)
    assert (await process.score(prompt, "$" + "9**" * 9 + "9$", 20)).reward != 1.0
    await process.close()


def test_neither_package_is_imported_for_other_tasks() -> None:
    program = "import sys; from monarch_rl.tasks import load_task; load_task('arithmetic', {}, 0)"
    check = f"{program}; print({{'reasoning_gym', 'math_verify', 'sympy', 'datasets', 'torch'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "set()\n"
