"""What is trained on: a Task turns an ordinal into a prompt (a pure function) and judges completions.

`load_task` finds a built-in task by name, or a user's own as `path/to/file.py:name`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from monarch_rl.config import UserError
from monarch_rl.types import Prompt, Split

BUILT_IN = {"arithmetic": "Arithmetic", "gsm8k": "GSM8K"}
"""Class of each task of this package, by the name of its module."""
HELD_OUT = 8
"""One key in this many is held out by `held_out`."""


class Task(Protocol):
    """Subclass it to get the defaults. `task_args` and, where it is asked for, `seed` become arguments of the constructor."""

    name: str
    size: int | None = None
    """Training prompts in one epoch; None: endless."""
    eval_size: int | None = None
    """Held-out prompts; None: endless."""
    truncated_reward: float | None = None
    """Reward of an episode that its token budget ended; None: the text is scored as it is."""

    def __init__(self) -> None: ...  # a signature to check task_args against, where a subclass has none

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        """Prompt number `ordinal` of a split, counted from 0 through all epochs.

        Pure: the same arguments give the same prompt, in whatever order they are asked for.
        """
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Judges one completion (text without special tokens). Runs in a process of its own; raising makes the episode unscorable."""
        ...


class Score(NamedTuple):
    """What became of one completion: a finite reward, or the reason why there is none (one line)."""

    reward: float | None
    error: str | None = None


def held_out(key: str) -> bool:
    """Whether `key` belongs to the held-out split: a stable hash, so that no key is ever in both splits, whatever the seed."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % HELD_OUT == 0


def row_of(ordinal: int, size: int, seed: int | str, split: Split) -> int:
    """Index into a dataset of `size` rows: a new permutation for every epoch of training, the rows in order for evaluation.

    Raises UserError if there are no rows.
    """
    if size == 0:
        raise UserError(f"task_args: the dataset has no rows for the {split} split")
    epoch, place = divmod(ordinal, size)
    return place if split == "eval" else _permutation(size, seed, epoch)[place]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int | str, epoch: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(size), size)


def load_task(spec: str, args: dict[str, Any], seed: int) -> Task:
    """The task named by `spec` (`arithmetic`, or `path/to/file.py:name` of a class, a function that returns a Task, or a Task).

    Raises UserError that names the file and the attribute, or the argument in `task_args` that is missing or unknown.
    """
    found = _built_in(spec) if spec in BUILT_IN else _user_attribute(spec)
    if callable(found):
        found = found(**_arguments(spec, found, args, seed))
    elif args:
        raise UserError(f"task_args: {spec} is a finished task and takes no arguments, got {', '.join(args)}")
    return _checked(spec, found)


def _built_in(spec: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{spec}"), BUILT_IN[spec])


def _user_attribute(spec: str) -> Any:
    file, colon, attribute = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"task={spec}: neither a built-in task ({', '.join(BUILT_IN)}) nor path/to/file.py:name{_nearest(spec, BUILT_IN)}")
    module = _import_file(Path(file), spec)
    if not hasattr(module, attribute):
        raise UserError(f"task={spec}: {file} has no attribute {attribute!r}{_nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def _import_file(file: Path, spec: str) -> ModuleType:
    """Registers the module under a name made from the path, so that its classes can be pickled between processes."""
    if not file.is_file():
        raise UserError(f"task={spec}: there is no file {file}")
    file = file.resolve()
    name = f"task_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    origin = importlib.util.spec_from_file_location(name, file)
    assert origin is not None  # for a .py file there always is one
    assert origin.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(origin)
    try:
        origin.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"task={spec}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _arguments(spec: str, factory: Callable[..., Any], args: dict[str, Any], seed: int) -> dict[str, Any]:
    signature = inspect.signature(factory)
    given = {"seed": seed, **args} if "seed" in signature.parameters else args
    try:
        signature.bind(**given)
    except TypeError as error:
        unknown = [_nearest(name, signature.parameters) for name in args if name not in signature.parameters]
        raise UserError(f"task_args: {spec}: {error}{''.join(unknown[:1])}") from error
    return given


def _checked(spec: str, task: Any) -> Task:
    missing = [name for name in Task.__annotations__ if not hasattr(task, name)]
    missing += [name for name in ("prompt", "reward") if getattr(type(task), name, None) in (None, getattr(Task, name))]
    if missing:
        raise UserError(f"task={spec}: {type(task).__name__} has no {', '.join(missing)} (monarch_rl.tasks.Task has defaults to inherit)")
    return task  # type: ignore[no-any-return]


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
