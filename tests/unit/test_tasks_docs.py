"""docs/tasks.md: its files, its Python and its commands do what the page says."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.configure import load
from monarch_rl.tasks import BUILT_IN, Completion, has_environment, load_task
from monarch_rl.types import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PYTHON = [body for kind, body in BLOCKS if kind == "python"]
FILES = {body.splitlines()[0].removeprefix("# "): body for body in PYTHON if body.startswith("# ")}
PIECES = [body for body in PYTHON if not body.startswith("# ")]
COMMANDS = [line for kind, body in BLOCKS if kind == "bash" for line in body.splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, to work in."""
    for name, body in FILES.items():
        (tmp_path / name).write_text(body)
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_the_pieces_that_are_looked_for() -> None:
    assert set(FILES) == {"brief.py", "rows.py", "guess.py", "course.py"}
    assert len(PIECES) == 2
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    assert len(FILES["brief.py"].splitlines()) <= 30


def test_the_pieces_run_one_after_the_other(here: Path) -> None:
    namespace: dict[str, Any] = {}
    for piece in PIECES:
        exec(compile(piece, str(PAGE), "exec"), namespace)
    assert len(namespace["turns"]) > 1


@pytest.mark.parametrize(
    ("spec", "args"), [("brief.py:Brief", {}), ("rows.py:Rows", {"path": "rows.jsonl"}), ("guess.py:Guess", {}), ("course.py:Course", {})]
)
def test_the_tasks_of_the_page_keep_its_rules(here: Path, spec: str, args: dict[str, Any]) -> None:
    task = load_task(spec, args, seed=3)
    train = [task.prompt(ordinal, "train") for ordinal in range(100)]
    assert train == [task.prompt(ordinal, "train") for ordinal in reversed(range(100))][::-1]
    held_out = {str((p.content, p.answer)) for p in (task.prompt(ordinal, "eval") for ordinal in range(40))}
    assert held_out.isdisjoint(str((p.content, p.answer)) for p in train)
    assert [p.ordinal for p in train] == list(range(100))
    assert has_environment(task) == (spec == "guess.py:Guess")


def test_the_rewards_of_the_page(here: Path) -> None:
    rows = load_task("rows.py:Rows", {"path": "rows.jsonl"}, seed=0)
    prompt = rows.prompt(0, "train")
    assert rows.reward(prompt, Completion(f" {prompt.answer}\n")) == 1.0
    guess = load_task("guess.py:Guess", {}, seed=0)
    prompt = guess.prompt(0, "train")
    assert guess.observe(prompt, [str(prompt.answer)]) is None
    assert guess.observe(prompt, ["-1"]) is None
    assert guess.observe(prompt, ["1000"] * 6) == "<"
    assert guess.observe(prompt, ["1000"] * 7) is None
    assert guess.reward(prompt, Completion("", ["1000", str(prompt.answer)])) == 0.5


def test_the_course_of_the_page(here: Path) -> None:
    course = load_task("course.py:Course", {}, seed=0)
    assert course.size is not None
    ordinal = 5
    solved, half = [[Outcome(ordinal, reward, 1)] for reward in (1.0, 0.5)]
    later = [course.prompt(ordinal + epoch * course.size, "train") for epoch in (1, 2, 3)]
    assert [course.skip(prompt, solved) for prompt in later] == [True, True, False]
    assert not any(course.skip(prompt, half) or course.skip(prompt, []) for prompt in later)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_are_understood(here: Path, command: str) -> None:
    python, module, name, *arguments = shlex.split(command)
    assert (python, module, name) == ("python", "-m", "monarch_rl.run")
    config = load([argument for argument in arguments if argument != "--dry-run"]).config
    assert load_task(config.task, config.task_args, config.seed).prompt(0, "train")


def test_the_table_names_every_built_in_task() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in BUILT_IN)


def teardown_module() -> None:
    for name in [name for name in sys.modules if name.startswith(("user_brief_", "user_rows_", "user_guess_", "user_course_"))]:
        del sys.modules[name]
