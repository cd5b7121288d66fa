"""Tasks: purity, disjoint splits, rewards, loading by name and from a user's file; and the tiny model's parts."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, load_task, row_of
from monarch_rl.tasks.arithmetic import Arithmetic
from monarch_rl.tasks.gsm8k import GSM8K, final_number
from monarch_rl.tasks.tiny import CHARACTERS, SPECIAL, TINY_MODELS, tiny_path
from monarch_rl.types import Prompt

SEEDS = (0, 1, 2)

USER_FILE = """
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt

class Echo(Task):
    name = "echo"
    size = 3
    def __init__(self, seed, word, times=1):
        self.seed, self.word, self.times = seed, word, times
    def prompt(self, ordinal, split):
        return Prompt(ordinal, self.word * self.times)
    def reward(self, prompt, completion):
        return float(completion == prompt.content)

class Plain(Echo):
    def __init__(self):
        self.word, self.times = "plain", 1

def make(word):
    return Echo(None, word)

ready = Echo(7, "ready")

class Half(Task):
    def prompt(self, ordinal, split):
        return Prompt(ordinal, "")
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    return file


def refusal(spec: str, args: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_task(spec, args or {}, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- datasets


def test_each_epoch_visits_every_row_once_in_another_order() -> None:
    epochs = [[row_of(epoch * 50 + place, 50, 0, "train") for place in range(50)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_rows_depend_on_the_seed_and_on_nothing_else() -> None:
    forward = [row_of(ordinal, 7, 3, "train") for ordinal in range(30)]
    backward = [row_of(ordinal, 7, 3, "train") for ordinal in reversed(range(30))]
    assert forward == backward[::-1]
    assert forward != [row_of(ordinal, 7, 4, "train") for ordinal in range(30)]
    assert [row_of(ordinal, 7, 3, "eval") for ordinal in range(8)] == [0, 1, 2, 3, 4, 5, 6, 0]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="no rows for the train split"):
        row_of(0, 0, 0, "train")


# ---------------------------------------------------------------- arithmetic


def test_arithmetic_prompts_are_pure_and_right() -> None:
    task = Arithmetic(seed=1)
    prompts = [task.prompt(ordinal, "train") for ordinal in range(200)]
    assert prompts == [Arithmetic(seed=1).prompt(ordinal, "train") for ordinal in reversed(range(200))][::-1]
    for prompt in prompts:
        assert isinstance(prompt.content, str)
        assert prompt.answer == eval(prompt.content.rstrip("="))
        assert 2 <= len(prompt.content) // 2 <= 8


def test_training_and_held_out_prompts_are_disjoint_for_every_seed() -> None:
    held_out = {Arithmetic().prompt(ordinal, "eval").content for ordinal in range(2048)}
    trained = {Arithmetic(seed=seed).prompt(ordinal, "train").content for seed in SEEDS for ordinal in range(4096)}
    assert len(held_out) > 1024
    assert {len(str(content)) for content in held_out} == {len(str(content)) for content in trained}  # short sums in both
    assert not held_out & trained


def test_evaluation_prompts_are_the_same_for_every_seed_and_training_prompts_are_not() -> None:
    """Case 63: the run seed must reach the prompts."""
    assert len({tuple(str(Arithmetic(seed=s).prompt(o, "eval").content) for o in range(50)) for s in SEEDS}) == 1
    assert len({tuple(str(Arithmetic(seed=s).prompt(o, "train").content) for o in range(50)) for s in SEEDS}) == 3


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("#13", 1.0), ("4+7=11;11+2=13;#13", 1.0), ("#1", 0.0), ("#113", 0.0), ("#13;", 0.0), ("13", 0.0), ("#13#14", 0.0), ("", 0.0)],
)
def test_arithmetic_reward(completion: str, reward: float) -> None:
    assert Arithmetic().reward(Prompt(0, "4+7+2=", answer=13), completion) == reward


def test_truncated_sums_earn_nothing() -> None:
    """Case 61: ended by length is not the same as answered; a cut that happens to end in the sum must not count."""
    assert Arithmetic().truncated_reward == 0.0


@pytest.mark.parametrize(("args", "key"), [({"max_operands": 1}, "max_operands"), ({"stop_probability": 2}, "stop_probability")])
def test_arithmetic_refuses_impossible_arguments(args: dict[str, Any], key: str) -> None:
    assert f"task_args.{key}" in refusal("arithmetic", args)


# ---------------------------------------------------------------- gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 and 4.\n#### 7", 7),
        ("#### 1,234.50", Decimal("1234.5")),
        ("so 5 - 9 is -4", -4),
        ("10-3", 3),
        ("first #### 3 then #### $12, I think", 12),
        ("about .5 cups", Decimal("0.5")),
        ("no number", None),
        ("7 ####", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: int | Decimal | None) -> None:
    assert final_number(text) == number


def write_rows(file: Path, count: int) -> Path:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(count)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_gsm8k_of_a_local_file(tmp_path: Path) -> None:
    task = load_task("gsm8k", {"path": str(write_rows(tmp_path / "rows.jsonl", 40))}, seed=5)
    assert task.size is not None
    assert task.eval_size is not None
    assert task.size + task.eval_size == 40
    train = {str(task.prompt(ordinal, "train").content) for ordinal in range(task.size)}
    held_out = {str(task.prompt(ordinal, "eval").content) for ordinal in range(task.eval_size)}
    assert (len(train), len(held_out)) == (task.size, task.eval_size)
    assert not train & held_out


def test_gsm8k_of_a_local_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 5)
    write_rows(tmp_path / "test.jsonl", 3)
    task = load_task("gsm8k", {"path": str(tmp_path)}, seed=5)
    assert (task.size, task.eval_size) == (5, 3)
    assert str(task.prompt(2, "eval").content).count("2 + 2")


def test_gsm8k_of_what_only_datasets_can_read(tmp_path: Path) -> None:
    import datasets

    rows = str(write_rows(tmp_path / "rows.jsonl", 6))
    datasets.load_dataset("json", data_files=rows, split="train").to_parquet(tmp_path / "rows.parquet")
    assert load_task("gsm8k", {"path": f"{tmp_path}/rows.parquet", "eval_path": rows}, seed=0).size == 6
    for path in (f"{tmp_path}/none", "nobody/nothing"):
        assert f"task_args.path={path}: " in refusal("gsm8k", {"path": path})


def test_gsm8k_asks_in_chat_and_judges_the_number(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", 9))
    prompt = (task := GSM8K(path=rows, eval_path=rows)).prompt(3, "eval")
    assert isinstance(prompt.content, list)
    assert [message["role"] for message in prompt.content] == ["user"]
    assert prompt.content[0]["content"].startswith("What is 3 + 3?\n")
    assert task.reward(prompt, "3 and 3 make #### 6.0") == 1.0
    assert task.reward(prompt, "#### 7") == 0.0
    assert task.reward(prompt, "no idea") == 0.0
    assert task.reward(Prompt(0, "", answer=None), "no idea") == 0.0


@pytest.mark.parametrize(
    ("rows", "message"), [("", "no training rows"), ('{"text": "x"}', "no column answer and no column question")], ids=["empty", "columns"]
)
def test_gsm8k_refuses_a_file_without_what_it_needs(tmp_path: Path, rows: str, message: str) -> None:
    (file := tmp_path / "rows.jsonl").write_text(rows)
    said = refusal("gsm8k", {"path": str(file), "eval_path": str(file)})
    assert message in said
    assert str(file) in said


def test_gsm8k_names_a_missing_file_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refusal("gsm8k", {"path": str(tmp_path / "none.jsonl")})
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install --no-deps -r requirements/envs.txt" in refusal("gsm8k")


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "args", "content"),
    [
        ("Echo", {"word": "a", "times": 3}, "aaa"),
        ("make", {"word": "b"}, "b"),
        ("ready", {}, "ready"),
        ("Plain", {}, "plain"),
    ],
)
def test_a_user_task_is_a_class_a_function_or_an_object(user_file: Path, name: str, args: dict[str, Any], content: str) -> None:
    task = load_task(f"{user_file}:{name}", args, seed=11)
    assert task.prompt(0, "train").content == content
    assert (task.size, task.eval_size, task.truncated_reward) == (3, None, None)


def test_the_seed_reaches_a_task_that_asks_for_it(user_file: Path) -> None:
    echo: Any = load_task(f"{user_file}:Echo", {"word": "a"}, seed=11)
    other: Any = load_task(f"{user_file}:Echo", {"word": "a", "seed": 3}, seed=11)
    assert (echo.seed, other.seed) == (11, 3)


@pytest.mark.parametrize(
    ("name", "args", "parts"),
    [
        ("Ecko", {}, ["Ecko", "did you mean 'Echo'"]),
        ("Echo", {}, ["task_args", "'word'"]),
        ("Echo", {"word": "a", "tmies": 2}, ["task_args", "'tmies'", "did you mean 'times'"]),
        ("make", {"word": "a", "times": 2}, ["task_args", "'times'"]),
        ("ready", {"word": "a"}, ["task_args", "word"]),
        ("Half", {}, ["Half", "name", "reward"]),
        ("Half", {"word": 1}, ["task_args", "'word'"]),
        ("USER", {}, ["USER"]),
    ],
)
def test_errors_name_the_file_and_the_attribute(user_file: Path, name: str, args: dict[str, Any], parts: list[str]) -> None:
    """Case 68: a mistyped key is an error that names the nearest one."""
    said = refusal(f"{user_file}:{name}", args)
    assert all(part in said for part in [str(user_file), *parts]), said


def test_a_wrong_spec_or_file_is_named(tmp_path: Path) -> None:
    assert "did you mean 'arithmetic'" in refusal("aritmetic")
    assert "there is no file" in refusal(f"{tmp_path}/none.py:Task")
    (broken := tmp_path / "broken.py").write_text("import nothing_of_this_name")
    assert "nothing_of_this_name" in refusal(f"{broken}:Task")
    assert "broken.py cannot be imported" in refusal(f"{broken}:Task")


def test_arguments_of_a_built_in_task_are_checked() -> None:
    assert "did you mean 'max_operands'" in refusal("arithmetic", {"max_operand": 3})
    task = load_task("arithmetic", {"max_operands": 2}, seed=0)
    assert all(len(str(task.prompt(ordinal, "train").content)) == 4 for ordinal in range(20))


# ---------------------------------------------------------------- the tiny model


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_shipped_checkpoints_are_small_and_complete(name: str) -> None:
    files = {file.name: file.stat().st_size for file in tiny_path(name).iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert sum(files.values()) <= 1_500_000


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_shipped_checkpoints_have_the_shape_of_the_builder(name: str) -> None:
    from safetensors import safe_open

    from monarch_rl.tasks.tiny import build_model

    with safe_open(tiny_path(name) / "model.safetensors", "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 (not a dict)
        assert {weights.get_slice(name).get_dtype() for name in shapes} == {"BF16"}
    model = build_model(seed=0)
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == 603_456
    assert len(SPECIAL) + len(CHARACTERS) == 98


def test_demonstrations_of_the_warm_start_earn_the_reward() -> None:
    from monarch_rl.tasks.warm_start import COURSES, questions, scratchpad

    assert scratchpad(Prompt(0, "4+7+2=", answer=13)) == ["4+7=11;11+2=13;#13"]
    assert questions(Prompt(0, "12*7+5=", answer=89)) == ["[12*7]", "[84+5]", "#89"]
    for course in COURSES.values():
        task = course.task(0)
        for prompt in (task.prompt(ordinal, "train") for ordinal in range(50)):
            turns = course.worked(prompt)
            assert task.reward(prompt, Completion("".join(turns), turns)) == 1.0


def test_a_task_that_is_half_named_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rev.py").write_text("raise SystemExit('run')\nclass Reverse: ...\nclass Other: ...\n")
    (tmp_path / "torn.py").write_text("class Reverse(")
    assert refusal("rev.py") == "task=rev.py: say which class of it: rev.py:Reverse or rev.py:Other"
    assert refusal("revv").endswith("did you mean 'rev.py:NAME'?")
    assert refusal("arithmetics").endswith("did you mean 'arithmetic'?")
    assert "torn.py:NAME (torn.py cannot be read: " in refusal("torn.py")
    assert "nowhere.py cannot be read: " in refusal("nowhere.py")
