"""The stream of prompts."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from monarch_rl.prompts import PromptError, PromptStream
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split


class Squares(Task):
    name = "squares"

    def __init__(self) -> None:
        self.made: list[int] = []

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        if ordinal == 7:
            raise KeyError("row 7")
        self.made.append(ordinal)
        return Prompt(ordinal if ordinal != 5 else 55, f"{ordinal}^2=", task=threading.current_thread().name)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 0.0


def test_prompts_come_in_order_and_are_made_ahead_by_a_thread() -> None:
    task = Squares()
    stream = PromptStream(task, ahead=2, ordinals=count())
    first = [next(stream) for _ in range(3)]
    assert [prompt.ordinal for prompt in first] == [0, 1, 2]
    assert first[0].task != threading.current_thread().name
    until = time.monotonic() + 10
    while len(task.made) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert task.made == [0, 1, 2, 3, 4]


def test_errors_name_task_and_ordinal() -> None:
    with pytest.raises(PromptError, match="task squares: prompt 5 says that it is prompt 55"):
        next(PromptStream(Squares(), ahead=1, ordinals=count(5)))
    with pytest.raises(PromptError, match="task squares: prompt 7 cannot be made: KeyError: 'row 7'"):
        next(PromptStream(Squares(), ahead=1, ordinals=count(7)))
