"""What is trained on: a Task turns an ordinal into a prompt (a pure function) and judges completions.

`load_task` finds a built-in task by name, or a user's own as `path/to/file.py:name`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import pickle
import random
import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from monarch_rl.config import UserError, is_object, label
from monarch_rl.supervise import cause
from monarch_rl.trainer_config import nearest
from monarch_rl.types import Message, Outcome, Prompt, Split
from monarch_rl.user_files import load_attribute

BUILT_IN = {"arithmetic": "Arithmetic", "calculator": "Calculator", "gsm8k": "GSM8K"}
"""Class of each task of this package, by the name of its module."""
HELD_OUT = 8
"""One key in this many is held out by `held_out`."""
TaskSpec = Any
"""As `task` in the configuration: a name, or of a mixture `name`, `weight` and `args` of each part; in Python also a class, a function
that returns a Task, or a Task."""


class Completion(str):
    """The text of an episode after its prompt: what the model wrote and, between its turns, what it was told. No special tokens."""

    turns: tuple[str, ...]
    """What the model wrote, turn by turn; one turn where there is no environment."""

    def __new__(cls, text: str, turns: Sequence[str] | None = None) -> Self:
        made = super().__new__(cls, text)
        made.turns = (text,) if turns is None else tuple(turns)
        return made


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

    def reward(self, prompt: Prompt, completion: Completion) -> float | Sequence[float]:
        """Judges one episode. Runs in a process of its own; raising makes the episode unscorable.

        A list has one number for each of `completion.turns`; their sum is the episode's reward.
        """
        ...

    def observe(self, prompt: Prompt, turns: Sequence[str]) -> str | list[Message] | None:
        """What the environment answers to the model's last turn: text or messages, as `Prompt.content` is; None ends the episode.

        Optional: without it an episode has one turn. Pure, given what the model wrote turn by turn, so that an episode can be
        continued anywhere; runs where the reward does and fails as it does.
        """
        return None

    def skip(self, prompt: Prompt, past: Sequence[Outcome]) -> bool:
        """Whether to leave out a prompt whose turn it is, given what came of the same prompt in earlier epochs, the oldest first.

        Optional. A skipped prompt is dropped with the reason `skipped`, and the next one takes its place. Pure and quick: it runs
        between two leases.
        """
        return False


class Score(NamedTuple):
    """What became of one completion: a finite reward, or the reason why there is none (one line)."""

    reward: float | None
    error: str | None = None
    turn_rewards: tuple[float, ...] = ()
    """One for each turn, where the task says so; `reward` is their sum."""


class Observation(NamedTuple):
    """What became of one turn: what the environment answers (None: the episode is over), or why there is no answer (one line)."""

    content: str | list[Message] | None
    error: str | None = None


class PromptError(Exception):
    """The task could not make a prompt; the message names task, ordinal and cause."""


def make_prompt(task: Task, ordinal: int, split: Split) -> Prompt:
    """`task.prompt`, whose result is looked at before it goes on its way.

    Raises:
        UserError: the task's own. PromptError: anything else that it raises, or what cannot be a prompt.
    """
    try:
        prompt = task.prompt(ordinal, split)
    except (UserError, PromptError):
        raise
    except Exception as error:
        raise PromptError(f"task {task.name}: prompt {ordinal} cannot be made: {type(error).__name__}: {cause(error)}") from error
    if fault := _fault(prompt, ordinal):
        raise PromptError(f"task {task.name}: prompt {ordinal} {fault}")
    return prompt


def _fault(prompt: Any, ordinal: int) -> str:
    """What is wrong with what a task calls a prompt, as the end of a sentence; empty: nothing."""
    if not isinstance(prompt, Prompt):
        return f"is {reprlib.repr(prompt)}, not a Prompt"
    if prompt.ordinal != ordinal:
        return f"says that it is prompt {prompt.ordinal}"
    if not isinstance(prompt.content, str) and not is_conversation(prompt.content):
        return f"asks {reprlib.repr(prompt.content)}, which is neither text nor a list of messages with role and content"
    try:
        pickle.dumps(prompt)  # it goes from process to process
    except Exception as error:
        return f"has an answer that cannot be pickled: {cause(error)}"
    return ""


def is_conversation(content: Any) -> bool:
    """Whether it is a list of messages."""
    return isinstance(content, list) and bool(content) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in content)


def has_environment(task: Task) -> bool:
    """Whether the task has an `observe` of its own."""
    return type(task).observe is not Task.observe


def skips(task: Task) -> bool:
    """Whether the task, or a part of the mixture, has a `skip` of its own."""
    from monarch_rl.tasks.mixture import Mixture

    return any(getattr(type(part), "skip", Task.skip) is not Task.skip for part in (task.parts if isinstance(task, Mixture) else [task]))


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


def component(task: Task, prompt: Prompt) -> Task:
    """The task that made the prompt: of a mixture, the part."""
    from monarch_rl.tasks.mixture import Mixture

    return task.part_of(prompt) if isinstance(task, Mixture) else task


def load_task(spec: TaskSpec, args: dict[str, Any], seed: int) -> Task:
    """The task named by `spec`: `arithmetic`, `reasoning_gym:chain_sum`, or `path/to/file.py:name` of a class, a function that returns
    a Task, or a Task. A list of tasks is a mixture, see `mixture`.

    Raises UserError that names the file and the attribute, or the argument in `task_args` that is missing or unknown.
    """
    if isinstance(spec, list):
        from monarch_rl.tasks.mixture import Mixture

        return Mixture(spec, seed)
    found = spec if is_object(spec) else _built_in(spec) or _user_attribute(spec)
    spec = label(spec)
    if callable(found):
        found = found(**_arguments(spec, found, args, seed))
    elif args:
        raise UserError(f"task_args: {spec} is a finished task and takes no arguments, got {', '.join(args)}")
    return _checked(spec, found)


def _built_in(spec: str) -> Any:
    """None for a name that is not built in."""
    if spec in BUILT_IN:
        return getattr(importlib.import_module(f"{__name__}.{spec}"), BUILT_IN[spec])
    family, colon, dataset = spec.partition(":")
    if colon and family == "reasoning_gym":
        from monarch_rl.tasks.reasoning import ReasoningGym

        return partial(ReasoningGym, dataset)
    return None


def _user_attribute(spec: str) -> Any:
    file, colon, attribute = spec.rpartition(":")
    if file == "notebook":
        raise UserError(f"task={spec} was defined in a notebook: put it into a file, and use task=path/to/file.py:{attribute}")
    if not colon and spec.endswith(".py"):
        raise UserError(f"task={spec}: say which class of it: {_classes(spec)}")
    if not colon or not file.endswith(".py"):
        known = f"{', '.join(BUILT_IN)}, reasoning_gym:NAME"
        files = {path.stem: f"{path}:NAME" for path in Path().glob("*.py")}
        near = next((files.get(name, name) for name in difflib.get_close_matches(spec, [*BUILT_IN, *files], n=1)), None)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"task={spec}: neither a built-in task ({known}) nor path/to/file.py:name{hint}")
    return load_attribute("task", spec)


def _classes(file: str) -> str:
    """The classes of a file, as `task` would name them; the file is read and not run."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file}:NAME ({file} cannot be read: {cause(error)})"
    return " or ".join(f"{file}:{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)) or f"{file}:NAME"


def _arguments(spec: str, factory: Callable[..., Any], args: dict[str, Any], seed: int) -> dict[str, Any]:
    signature = inspect.signature(factory)
    given = {"seed": seed, **args} if "seed" in signature.parameters else args
    try:
        signature.bind(**given)
    except TypeError as error:
        unknown = [nearest(name, signature.parameters) for name in args if name not in signature.parameters]
        raise UserError(f"task_args: {spec}: {error}{''.join(unknown[:1])}") from error
    return given


def _checked(spec: str, task: Any) -> Task:
    missing = [name for name in Task.__annotations__ if not hasattr(task, name)]
    missing += [name for name in ("prompt", "reward") if getattr(type(task), name, None) in (None, getattr(Task, name))]
    if missing:
        raise UserError(f"task={spec}: {type(task).__name__} has no {', '.join(missing)} (monarch_rl.tasks.Task has defaults to inherit)")
    return task  # type: ignore[no-any-return]
