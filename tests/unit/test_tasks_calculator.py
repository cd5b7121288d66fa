"""The calculator: what it answers, what is rewarded, and the completion that a reward is given."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, has_environment, load_task
from monarch_rl.tasks.arithmetic import Arithmetic
from monarch_rl.tasks.calculator import Calculator, answer, steps
from monarch_rl.types import Prompt

SEEDS = (0, 1, 2)
ASK = Prompt(0, "12*7+5=", answer=89)


def test_prompts_are_pure_and_right() -> None:
    task = Calculator(seed=1)
    prompts = [task.prompt(ordinal, "train") for ordinal in range(300)]
    assert prompts == [Calculator(seed=1).prompt(ordinal, "train") for ordinal in reversed(range(300))][::-1]
    for prompt in prompts:
        assert isinstance(prompt.content, str)
        assert prompt.answer == eval(prompt.content.rstrip("="))
    assert {len(steps(str(prompt.content))) for prompt in prompts} == {1, 2, 3, 4}
    assert any(prompt.answer < 0 for prompt in prompts)


def test_training_and_held_out_prompts_are_disjoint_for_every_seed() -> None:
    held_out = {Calculator().prompt(ordinal, "eval").content for ordinal in range(1024)}
    trained = {Calculator(seed=seed).prompt(ordinal, "train").content for seed in SEEDS for ordinal in range(2048)}
    assert not held_out & trained
    assert len({tuple(str(Calculator(seed=s).prompt(o, "train").content) for o in range(50)) for s in SEEDS}) == 3


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("[12*7]", "84"),
        ("so: [84+5]", "89"),
        ("[-3-5]", "-8"),
        ("[3--5]", "8"),
        ("[0*9]", "0"),
        ("[1][2+2]", "4"),
        ("[12*7+5]", "?"),
        ("[12*]", "?"),
        ("12*7]", "?"),
        ("[9**9]", "?"),
        ("[1234567890+1]", "?"),
        ("[__import__]", "?"),
    ],
)
def test_the_calculator_does_one_operation(turn: str, said: str) -> None:
    assert answer(turn) == said


def test_a_turn_without_a_question_ends_the_episode() -> None:
    task = Calculator()
    assert has_environment(task)
    assert not has_environment(Arithmetic())
    assert task.observe(ASK, ["[12*7]"]) == "84"
    assert task.observe(ASK, ["[12*7]", "[84+5]"]) == "89"
    assert task.observe(ASK, ["[12*7]", "#84"]) is None
    assert task.observe(ASK, [""]) is None


@pytest.mark.parametrize(
    ("turns", "reward"),
    [(["#89"], 1.0), (["[12*7]", "[84+5]", "#89"], 1.0), (["#8"], 0.0), (["#89", "#8"], 0.0), (["[12*7]", "89"], 0.0), ([""], 0.0)],
)
def test_the_last_turn_is_judged(turns: list[str], reward: float) -> None:
    """What the calculator says earns nothing: `#` and the value must be the model's."""
    assert Calculator().reward(ASK, Completion("#89", turns)) == reward


@pytest.mark.parametrize(("args", "key"), [({"max_operations": 0}, "max_operations"), ({"stop_probability": -1}, "stop_probability")])
def test_impossible_arguments_are_refused(args: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"task_args.{key}"):
        load_task("calculator", args, seed=0)


def test_a_completion_is_its_text_and_keeps_its_turns_between_processes() -> None:
    assert Completion("#89").turns == ("#89",)
    sent = pickle.loads(pickle.dumps(Completion("[12*7]84#89", ["[12*7]", "#89"])))
    assert sent == "[12*7]84#89"
    assert sent.turns == ("[12*7]", "#89")
