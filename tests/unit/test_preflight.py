"""What is found before anything is started: one line that names the task and the prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, OlmoeConfig

from monarch_rl.config import Config, UserError
from monarch_rl.preflight import check, look_closely, steps_of_data
from monarch_rl.tasks import Task
from monarch_rl.tasks.tiny import tiny_path
from monarch_rl.types import Prompt, Split


def test_a_mixture_whose_routing_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    OlmoeConfig(num_experts=4).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path()).save_pretrained(tmp_path)
    config = Config(task=Sums)
    config.model.path = str(tmp_path)
    with pytest.raises(UserError, match=r"^generator\.keep_routing: the trainer cannot repeat the routing of olmoe models"):
        check(config)
    config.generator.keep_routing = False
    check(config)


class Sums(Task):
    name = "sums"

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, self.text(ordinal, split), answer=self.answer(ordinal))

    def text(self, ordinal: int, split: Split) -> str:
        return f"{ordinal}+{'1' if split == 'train' else '2'}="

    def answer(self, ordinal: int) -> object:
        return ordinal

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 0.5


class Nothing(Sums):
    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return None  # type: ignore[return-value]


class Text(Sums):
    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return "1+1=" if ordinal else super().prompt(0, split)  # type: ignore[return-value]


class Number(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return 7 if split == "eval" else "1="  # type: ignore[return-value]


class Lambda(Sums):
    def answer(self, ordinal: int) -> object:
        return lambda: ordinal


class Miscounted(Sums):
    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return super().prompt(0, split)


class Moody(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return f"{random.random()}="


class Long(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return "1+" * 256


class OftenLong(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return "1+" * 256 if ordinal % 4 < 2 else super().text(ordinal, split)


class Empty(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return "" if ordinal == 1 else "1="


class Overlapping(Sums):
    def text(self, ordinal: int, split: Split) -> str:
        return f"{ordinal if split == 'train' else ordinal + 60}="


class NoNumber(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:
        return None  # type: ignore[return-value]


class Word(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:
        return "0.5"  # type: ignore[return-value]


class NotANumber(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:
        return float("nan")


class Picky(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(completion[-1] == "1")


class Unseen(Sums):
    """Has prompts that need not be held out, and cannot be."""

    def text(self, ordinal: int, split: Split) -> str:
        assert split == "train"
        return f"{ordinal}="


def config(name: str, **values: int) -> Config:
    made = Config(task=f"{Path(__file__)}:{name}", profile="cpu")
    made.generator.max_new_tokens = values.get("max_new_tokens", 32)
    made.eval.prompts = values.get("eval_prompts", 8)
    return made


def refused(made: Config) -> str:
    with pytest.raises(UserError) as error:
        look_closely(made, *check(made))
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(Path(__file__)), "sums.py")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "task=sums.py:Nothing: train prompt 0 is None, not a Prompt"),
        ("Text", "task=sums.py:Text: train prompt 1 is '1+1=', not a Prompt"),
        ("Number", "task=sums.py:Number: eval prompt 0 asks 7, which is neither text nor a list of messages with role and content"),
        ("Miscounted", "task=sums.py:Miscounted: train prompt 1 says that it is prompt 0"),
        ("Empty", "task=sums.py:Empty: train prompt 1 is empty (no tokens)"),
        ("NoNumber", "task=sums.py:NoNumber: the reward of an empty completion of train prompt 0 is None, not a number"),
        ("Word", "task=sums.py:Word: the reward of an empty completion of train prompt 0 is '0.5', not a number"),
        ("NotANumber", "task=sums.py:NotANumber: the reward of an empty completion of train prompt 0 is nan"),
    ],
)
def test_a_mistake_in_a_task_is_named(name: str, said: str) -> None:
    assert refused(config(name)) == said


def test_answers_must_survive_the_way_to_another_process() -> None:
    assert refused(config("Lambda")).startswith("task=sums.py:Lambda: train prompt 0 has an answer that cannot be pickled: Can't ")


def test_a_prompt_that_changes_from_call_to_call_is_shown() -> None:
    said = refused(config("Moody"))
    assert said.startswith("task=sums.py:Moody: train prompt 0 is '0.")
    assert said.endswith("it must depend on its ordinal alone")


def test_prompts_that_are_all_too_long_are_refused_and_some_are_counted() -> None:
    """The tiny model has one token per character and a context of 512."""
    assert "train prompt 0 has 512 tokens, which leave no room in a context of 512 tokens" in refused(config("Long"))
    (made := config("Sums")).generator.engine["max_model_len"] = 4
    made.generator.max_new_tokens = 2
    assert "eval" not in refused(made)
    made = config("OftenLong")
    assert "have 4 to 512 tokens, 32 of them too many for a context of 512: they will be dropped" in look_closely(made, *check(made))[1]


def test_more_new_tokens_than_the_context_holds_are_refused() -> None:
    check(config("Sums", max_new_tokens=511))
    assert refused(config("Sums", max_new_tokens=512)).startswith("generator.max_new_tokens=512: ")


def test_prompts_of_both_splits_are_pointed_out() -> None:
    made = config("Overlapping")
    assert any(
        "WARNING: 4 of the first 64 eval prompts are training prompts too, e.g. '60='" in line for line in look_closely(made, *check(made))
    )


def test_a_reward_may_refuse_an_empty_completion() -> None:
    made = config("Picky")
    assert look_closely(made, *check(made))[-1] == "reward of an empty completion: RewardError: IndexError: string index out of range"


def test_held_out_prompts_are_let_be_where_none_are_asked_for() -> None:
    made = config("Unseen", eval_prompts=0)
    found = look_closely(made, *check(made))
    assert [line.split(":")[0] for line in found] == ["task", "train prompts", "reward of an empty completion"]
    assert "eval prompt 0 cannot be made: AssertionError" in refused(config("Unseen"))


@pytest.mark.parametrize(
    ("size", "epochs", "tail", "steps"),
    [(7, 1, "train", 2), (7, 1, "drop", 1), (8, 1, "error", 2), (7, 4, "error", 7), (3, 1, "train", 1), (None, 0, "train", None)],
)
def test_the_steps_in_the_data_are_known(size: int | None, epochs: int, tail: str, steps: int | None) -> None:
    assert steps_of_data(of_data(epochs, tail), Sized(size)) == steps


THAT_IS = "with epochs=1 that is"


@pytest.mark.parametrize(
    ("size", "tail", "said"),
    [
        (None, "train", "epochs=1: task sized has no end; set steps alone, and epochs=0"),
        (
            7,
            "error",
            "buffer.tail=error: task sized has 7 prompts, with epochs=1 that is 1 steps of buffer.prompts_per_step=4 and 3 prompts more",
        ),
        (
            3,
            "drop",
            "buffer.tail=drop: task sized has 3 prompts, with epochs=1 that is 0 steps of buffer.prompts_per_step=4 and 3 prompts more",
        ),
    ],
)
def test_data_without_a_step_are_refused(size: int | None, tail: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        steps_of_data(of_data(1, tail), Sized(size))
    assert str(raised.value) == said


def of_data(epochs: int, tail: Any) -> Config:
    made = Config(epochs=epochs)
    made.buffer.prompts_per_step, made.buffer.tail = 4, tail
    return made


class Sized(Task):
    name = "sized"

    def __init__(self, size: int | None) -> None:
        self.size = size
