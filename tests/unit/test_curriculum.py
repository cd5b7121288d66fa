"""Which prompts a task leaves out, and what it is told for that."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from monarch_rl import curriculum
from monarch_rl.curriculum import Curriculum
from monarch_rl.tasks import Task, skips
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.types import Group, Outcome, Prompt, Split
from tests.batches import episode


class Rows(Task):
    """Four rows in order; a solved one is left out in the next two epochs."""

    name = "rows"
    size = 4

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[Outcome]]] = []

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"row {ordinal % 4}")

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 0.0

    def skip(self, prompt: Prompt, past: Sequence[Outcome]) -> bool:
        self.asked.append((prompt.ordinal, list(past)))
        return bool(past) and past[-1].reward == 1 and prompt.ordinal - past[-1].ordinal <= 2 * self.size


class Plain(Rows):
    skip = Task.skip


def group(prompt: Prompt, *rewards: float | None) -> Group:
    return Group(prompt, [episode(1, 1, random.Random(0), reward) for reward in rewards])


def test_a_solved_prompt_is_left_out_for_two_epochs() -> None:
    task = Rows()
    course = Curriculum(task)
    for ordinal, reward in ((0, 1.0), (1, 0.5), (2, None)):
        course.note(group(task.prompt(ordinal, "train"), reward, reward), step=0)
    assert [ordinal for ordinal in range(4, 20) if course.skips(task.prompt(ordinal, "train"), step=1)] == [4, 8]
    told = dict(task.asked)
    assert told[4] == [Outcome(0, 1.0, 0)]
    assert told[5] == [Outcome(1, 0.5, 0)]
    assert told[6] == told[7] == []


def test_what_is_not_a_step_old_is_not_told() -> None:
    """A synchronous step may not depend on which of its prompts is finished first."""
    task = Rows()
    course = Curriculum(task)
    course.note(group(task.prompt(0, "train"), 1.0), step=3)
    assert not course.skips(task.prompt(4, "train"), step=3)
    assert course.skips(task.prompt(4, "train"), step=4)


def test_it_goes_on_from_a_checkpoint() -> None:
    """Also where a group that was finished is sampled again."""
    task = Rows()
    first = Curriculum(task)
    for ordinal in (8, 0, 4):
        first.note(group(task.prompt(ordinal, "train"), 0.0, 1.0), step=ordinal)
    second = Curriculum(task, json.loads(json.dumps(first.state_dict())))
    second.note(group(task.prompt(8, "train"), 1.0, 1.0), step=9)
    second.skips(task.prompt(12, "train"), step=99)
    assert task.asked[-1] == (12, [Outcome(0, 0.5, 0), Outcome(4, 0.5, 4), Outcome(8, 1.0, 9)])
    for ordinal in range(16, 16 + 4 * 99, 4):
        second.note(group(task.prompt(ordinal, "train"), 0.0), step=9)
    assert [len(past) for past in second.state_dict().values()] == [curriculum.REMEMBERED]


def test_nothing_is_remembered_for_a_task_that_leaves_nothing_out() -> None:
    course = Curriculum(Plain())
    course.note(group(Plain().prompt(0, "train"), 1.0), step=0)
    assert course.state_dict() == {}
    assert not course.skips(Plain().prompt(4, "train"), step=1)
    assert not skips(Plain())


def test_parts_of_a_mixture_are_asked_in_their_own_numbers() -> None:
    mixture = Mixture([{"name": Plain, "weight": 1}, {"name": Rows, "weight": 1}])
    assert skips(mixture)
    course = Curriculum(mixture)
    ordinal = next(o for o in range(2) if mixture.place(o)[0] == 1)
    course.note(group(mixture.prompt(ordinal, "train"), 1.0), step=0)
    later = mixture.prompt(ordinal + 8, "train")
    assert course.skips(later, step=1)
    assert isinstance(part := mixture.parts[1], Rows)
    assert part.asked == [(4, [Outcome(0, 1.0, 0)])]
    assert not course.skips(replace(later, content="another question"), step=1)


def test_a_task_that_fails_or_leaves_out_everything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Rows):
        def skip(self, prompt: Prompt, past: Sequence[Outcome]) -> bool:
            raise KeyError("row")

    with pytest.raises(RuntimeError, match="task rows: skip of prompt 5: KeyError: 'row'"):
        Curriculum(Broken()).skips(Prompt(5, "x"), 0)

    class All(Rows):
        def skip(self, prompt: Prompt, past: Sequence[Outcome]) -> bool:
            return True

    monkeypatch.setattr(curriculum, "MOST_SKIPPED", 5)
    course = Curriculum(All())
    assert all(course.skips(Prompt(ordinal, "x"), 0) for ordinal in range(12))
    with pytest.raises(RuntimeError, match="task rows: skip has left out 13 prompts in a row; nothing is left to train on"):
        course.skips(Prompt(12, "x"), 0)
