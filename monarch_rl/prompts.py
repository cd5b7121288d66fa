"""The stream of training prompts: torchdata nodes over a sampler of ordinals. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.utils.data import Sampler
from torchdata import nodes

from monarch_rl.config import UserError
from monarch_rl.tasks import PromptError, Task, make_prompt
from monarch_rl.types import Prompt


class Ordinals(Sampler[int]):
    """Prompts are pure functions of their ordinal, so a stream resumes anywhere, without a state of its own."""

    def __init__(self, ordinals: Iterable[int]) -> None:
        self.ordinals = ordinals

    def __iter__(self) -> Iterator[int]:
        return iter(self.ordinals)


class PromptStream:
    """Prompts in order, made ahead by a thread of their own; `next` blocks while the task is slower than its readers.

    Args:
        task: makes the prompts.
        ahead: prompts kept ready.
        ordinals: which ones.
    """

    def __init__(self, task: Task, ahead: int, ordinals: Iterable[int]) -> None:
        self._task = task
        made = nodes.Mapper(nodes.SamplerWrapper(Ordinals(ordinals)), self._make)
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
