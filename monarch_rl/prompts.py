"""The stream of training prompts: torchdata nodes over a sampler of ordinals. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from torch.utils.data import Sampler
from torchdata import nodes

from monarch_rl.config import UserError
from monarch_rl.tasks import PromptError, Task, make_prompt
from monarch_rl.types import Prompt


class Ordinals(Sampler[int]):
    """start, start + 1, …: prompts are pure functions of their ordinal, so a stream resumes anywhere, without a state of its own."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return count(self.start)


class PromptStream:
    """Prompts in ordinal order, made ahead by a thread of their own; `next` blocks while the task is slower than its readers.

    Args:
        task: makes the prompts.
        ahead: prompts kept ready.
        start: the first ordinal.
    """

    def __init__(self, task: Task, ahead: int, start: int = 0) -> None:
        self._task = task
        made = nodes.Mapper(nodes.SamplerWrapper(Ordinals(start)), self._make)
        self._made: Iterator[Prompt | PromptError] = nodes.Prefetcher(made, prefetch_factor=ahead, snapshot_frequency=0)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompt:
        """Raises PromptError."""
        made = next(self._made)
        if isinstance(made, PromptError):
            raise made
        return made

    def _make(self, ordinal: int) -> Prompt | PromptError:
        """An error is handed on as a value: torchdata would wrap a raised one in a page of traceback."""
        try:
            return make_prompt(self._task, ordinal, "train")
        except PromptError as error:
            return error
        except UserError as error:
            return PromptError(f"task {self._task.name}: prompt {ordinal} cannot be made: {error}")
