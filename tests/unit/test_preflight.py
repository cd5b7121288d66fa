"""What is found before anything is started: one line that names the task and the prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, OlmoeConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from monarch_rl.config import Config, UserError, validate
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


@pytest.mark.parametrize(
    ("model", "ranks", "said"),
    [
        (Qwen2Config(num_attention_heads=6, num_key_value_heads=3, intermediate_size=64), 4, "cannot share the 6 attention heads"),
        (
            Qwen2Config(num_attention_heads=4, num_key_value_heads=4, intermediate_size=66),
            4,
            "cannot share the 66 rows of its feed-forward layers",
        ),
        (Qwen2Config(num_attention_heads=12, num_key_value_heads=3, intermediate_size=64), 2, "share nor repeat the 3 key-value heads"),
        (Qwen3MoeConfig(num_experts=4), 2, r"a mixture of experts \(qwen3_moe\) cannot be shared by ranks yet; set it to 1$"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(model: PretrainedConfig, ranks: int, said: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path()).save_pretrained(tmp_path)
    config = Config(task=Sums)
    config.model.path = str(tmp_path)
    config.generator.tensor_parallel = ranks
    with pytest.raises(UserError, match=rf"^generator\.tensor_parallel={ranks}: .*{said}"):
        check(config)


@pytest.mark.parametrize("id", [-1, 10**6])
def test_a_stop_id_that_the_tokenizer_does_not_know_is_refused(id: int) -> None:
    """Case 68: it would never be sampled, and nothing would say so."""
    config = Config(task=Sums)
    config.generator.stop_ids = [5, id]
    with pytest.raises(UserError, match=rf"^generator\.stop_ids: {id} is no id of the tokenizer in .*tiny_qwen3$"):
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


def test_a_function_of_the_users_is_tried_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    for key, name, args, said in MISTAKES:
        made = config("Sums")
        setattr(made.trainer, key, f"{tmp_path}/own.py:{name}")
        setattr(made.trainer, f"{key}_args", args)
        validate(made)
        assert refused(made).replace(str(tmp_path), "") == said
    made = config("Sums")
    made.trainer.loss, made.trainer.loss_args = f"{tmp_path}/own.py:right", {"power": 2}
    check(made)


FUNCTIONS = """
import torch

def right(logprobs_N, advantages_N, *, power): return -advantages_N ** power * logprobs_N
def mean(logprobs_N, advantages_N): return -(advantages_N * logprobs_N).mean()
def wrong_name(logprobs_N, advantage_N): return -advantage_N * logprobs_N
def constant(advantages_N): return -advantages_N
def broken(logprobs_N): return logprobs_N[100]
def flat(rewards_PG): return rewards_PG.flatten()
def infinite(rewards_PG): return rewards_PG / 0
number = 3
"""
MISTAKES: list[tuple[str, str, dict[str, object], str]] = [
    ("loss", "rigth", {}, "trainer.loss=/own.py:rigth: /own.py has no attribute 'rigth'; did you mean 'right'?"),
    ("loss", "number", {}, "trainer.loss=/own.py:number: is 3, not a function"),
    (
        "loss",
        "right",
        {},
        "trainer.loss=/own.py:right: parameter 'power' is neither one of logprobs_N, old_N, behaviour_N, advantages_N, rows_N, ages_N "
        "nor has it a value in trainer.loss_args",
    ),
    ("loss", "right", {"power": 2, "powr": 1}, "trainer.loss_args.powr: /own.py:right takes power; did you mean 'power'?"),
    ("loss", "mean", {}, "trainer.loss=/own.py:mean: must return one number per token, a tensor of [12], got a tensor of []"),
    (
        "loss",
        "wrong_name",
        {},
        "trainer.loss=/own.py:wrong_name: parameter 'advantage_N' is neither one of logprobs_N, old_N, behaviour_N, advantages_N, rows_N, "
        "ages_N nor has it a value in trainer.loss_args; did you mean 'advantages_N'?",
    ),
    ("loss", "constant", {}, "trainer.loss=/own.py:constant: its loss does not depend on logprobs_N"),
    ("loss", "broken", {}, "trainer.loss=/own.py:broken: IndexError: index 100 is out of bounds for dimension 0 with size 12"),
    ("advantage", "flat", {}, "trainer.advantage=/own.py:flat: must return a tensor of [2, 2] or [2, 2, 1], got a tensor of [4]"),
    ("advantage", "infinite", {}, "trainer.advantage=/own.py:infinite: an advantage of a scorable episode is inf"),
    ("correction", "constant", {"cap": 2}, "trainer.correction_args.cap: /own.py:constant takes no arguments"),
]


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
