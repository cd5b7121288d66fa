"""Mixtures: a pure function of the ordinal that keeps its weights, and the keys that describe one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config, ConfigError, UserError, validate
from monarch_rl.configure import load, provenance_table, write
from monarch_rl.tasks import Completion, component, has_environment, load_task
from monarch_rl.tasks.mixture import Mixture, proportions, spread
from monarch_rl.types import Prompt

TWO = [{"name": "arithmetic", "weight": 3}, {"name": "calculator", "weight": 1, "args": {"max_operations": 2}}]


@pytest.fixture
def mixture() -> Mixture:
    task = load_task(TWO, {}, seed=4)
    assert isinstance(task, Mixture)
    return task


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([3, 1], [3, 1]), ([0.1, 0.2, 0.7], [1, 2, 7]), ([50, 50], [1, 1]), ([1e-3, 1], [1, 1000]), ([2.5], [1]), ([1, 1.5, 6], [2, 3, 12])],
)
def test_weights_become_the_smallest_whole_proportions(weights: list[float], counts: list[int]) -> None:
    assert proportions(weights) == counts


def test_weights_too_fine_to_keep_are_refused() -> None:
    with pytest.raises(UserError, match=r"task: the weights 0.333333, 0.666666\d+ are too fine"):
        proportions([0.333333, 0.66666678])


@pytest.mark.parametrize("seed", range(20))
def test_every_stretch_of_the_schedule_keeps_the_weights_to_rounding(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.randint(1, 30) for _ in range(draw.randint(2, 5))]
    schedule, total = spread(counts) * 3, sum(counts)
    assert [schedule[:total].count(part) for part in range(len(counts))] == counts
    for part, count in enumerate(counts):
        off, seen = [0.0], 0
        for at, chosen in enumerate(schedule, 1):
            seen += chosen == part
            off.append(seen - at * count / total)
        assert max(off) - min(off) < 2, "some stretch is off by more than rounding at both its ends"


def test_each_part_gives_its_own_prompts_in_order(mixture: Mixture) -> None:
    prompts = [mixture.prompt(ordinal, "train") for ordinal in range(40)]
    assert [p.ordinal for p in prompts] == list(range(40))
    for part, (spec, count) in enumerate(zip(TWO, (30, 10), strict=True)):
        name: Any = spec["name"]
        alone = load_task(name, dict(spec.get("args", {})), seed=4)  # type: ignore[call-overload]
        assert [p.content for p in prompts if p.task == name] == [alone.prompt(own, "train").content for own in range(count)], part
    assert prompts == [load_task(TWO, {}, seed=4).prompt(ordinal, "train") for ordinal in reversed(range(40))][::-1]


def test_what_belongs_to_a_task_is_that_of_the_part(mixture: Mixture) -> None:
    prompts = [mixture.prompt(ordinal, "train") for ordinal in range(8)]
    for prompt in prompts:
        right = Completion(f"#{prompt.answer}")
        assert mixture.reward(prompt, right) == 1.0
        assert mixture.reward(prompt, Completion("#x")) == 0.0
        assert has_environment(component(mixture, prompt)) == (prompt.task == "calculator")
        assert mixture.observe(prompt, ["[2*3]"]) == ("6" if prompt.task == "calculator" else None)
    assert component(task := load_task("arithmetic", {}, 0), prompts[0]) is task


def test_a_part_sees_the_prompt_that_it_made(tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(
        "from monarch_rl.tasks import Task\nfrom monarch_rl.types import Prompt\n"
        "class Own(Task):\n"
        "    name = 'own'\n"
        "    def prompt(self, ordinal, split): return Prompt(ordinal, split, answer=ordinal, task=self.name)\n"
        "    def reward(self, prompt, completion): return float((prompt.ordinal, prompt.task) == (prompt.answer, 'own'))\n"
    )
    task = load_task([{"name": f"{file}:Own"}, {"name": f"{file}:Own", "weight": 0.5}], {}, seed=0)
    prompts = [task.prompt(ordinal, "eval") for ordinal in range(9)]
    assert {p.task for p in prompts} == {"own", "own 2"}
    assert [p.answer for p in prompts if p.task == "own 2"] == [0, 1, 2]
    assert all(task.reward(p, Completion("")) == 1.0 for p in prompts)


def test_a_mistake_in_a_part_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'max_operations'"):
        load_task([{"name": "calculator", "args": {"max_operation": 2}}], {}, seed=0)
    with pytest.raises(UserError, match="did you mean 'arithmetic'"):
        load_task([{"name": "aritmetic"}], {}, seed=0)


def test_a_mixture_is_configured_on_the_command_line_and_written_back(tmp_path: Path) -> None:
    typed = "task=[{name: arithmetic, weight: 3}, {name: calculator, args: {max_operations: 2}}]"
    resolved = load([typed, f"output_dir={tmp_path}"])
    assert resolved.config.task == [{"name": "arithmetic", "weight": 3}, {"name": "calculator", "args": {"max_operations": 2}}]
    assert f"  {typed.replace('=', ' ', 1)}"[6:] in provenance_table(resolved)
    write(resolved.config, tmp_path / "again.yaml")
    assert load([f"recipe={tmp_path / 'again.yaml'}"]).config.task == resolved.config.task


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ([], "task: must be a name, or a list"),
        (3, "task: must be a name, or a list"),
        (["arithmetic"], "task[0]: must be a mapping with a name, got 'arithmetic'"),
        ([{"weight": 1}], "task[0]: must be a mapping with a name"),
        ([{"name": "a"}, {"name": "b", "wieght": 1}], "task[1]: unknown key 'wieght'; a part has name, weight, args"),
        ([{"name": "a", "weight": 0}], "task[0].weight: must be a finite number above 0, got 0"),
        ([{"name": "a", "weight": True}], "task[0].weight: must be a finite number above 0, got True"),
        ([{"name": "a", "weight": float("inf")}], "task[0].weight: must be a finite number above 0, got inf"),
        ([{"name": "a", "args": 3}], "task[0].args: must be a mapping, got 3"),
    ],
)
def test_wrong_mixtures_are_refused(task: Any, message: str) -> None:
    """Case 68."""
    with pytest.raises(ConfigError) as caught:
        validate(Config(task=task))
    assert message in str(caught.value)


def test_a_mixture_takes_no_task_args() -> None:
    """Case 69: what cannot go together is refused."""
    with pytest.raises(ConfigError, match="task_args: a mixture takes none"):
        validate(Config(task=[{"name": "arithmetic"}], task_args={"max_operands": 3}))


def test_prompt_names_are_those_of_the_parts() -> None:
    prompt = Mixture([{"name": "arithmetic"}, {"name": "arithmetic", "args": {"max_operands": 2}}]).prompt(1, "train")
    assert isinstance(prompt, Prompt)
    assert prompt.task == "arithmetic 2"
