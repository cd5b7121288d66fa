"""Looks for mistakes in model and task before anything is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from monarch_rl import recorded
from monarch_rl.cluster.placement import host_count, hosts_by_role
from monarch_rl.config import Config, UserError, label
from monarch_rl.engine_errors import EngineError
from monarch_rl.engine_experts import experts_to_keep, speaks_of_experts
from monarch_rl.engine_setup import check_split, context_length, tensor_shapes
from monarch_rl.observe import trackers
from monarch_rl.rendering import Renderer
from monarch_rl.supervise import cause
from monarch_rl.tasks import PromptError, Score, Task, load_task, make_prompt
from monarch_rl.tasks.reward_process import FAULT, NO_REWARD, RewardProcess
from monarch_rl.trainer_config import own_functions
from monarch_rl.types import Message, Prompt, Split

FIRST = 64
"""Prompts of a split that are looked at, at most."""


def check(config: Config) -> tuple[Renderer, Task]:
    """What every run does first, in little time.

    Raises:
        UserError: names the key and what is wrong with it.
    """
    trackers.check(config.trackers)
    hosts_by_role(config, host_count(config))
    if own_functions(config.trainer):  # what is built in was checked with the configuration, without importing torch
        _try_objective(config)
    renderer = Renderer.of(config.model)
    _check_model(config, renderer)
    _check_adapters(config, renderer)
    for id in config.generator.stop_ids:
        if not renderer.knows(id):
            raise UserError(f"generator.stop_ids: {id} is no id of the tokenizer in {renderer.directory}")
    task = _load(config)
    steps_of_data(config, task)
    if config.replay:
        recorded.check(Path(config.replay))
    context = context_length(renderer.directory, config.generator.engine, cpu=config.profile != "cuda")
    if context is not None and config.generator.max_new_tokens >= context:
        raise UserError(
            f"generator.max_new_tokens={config.generator.max_new_tokens}: with a prompt before them there is no room for so many "
            f"in a context of {context} tokens"
        )
    for split in _splits(config, task):
        for ordinal in islice(_ordinals(task, split), 2):
            _check_pure(config, task, ordinal, split)
            _length(config, renderer, task, ordinal, split)
        lengths = [_length(config, renderer, task, n, split) for n in _ordinals(task, split)]
        if context is not None and lengths and min(lengths) >= context:
            raise UserError(
                f"task={label(config.task)}: {split} prompt 0 has {lengths[0]} tokens, which leave no room in a "
                f"context of {context} tokens; nor does any other of the first {len(lengths)} fit"
            )
    return renderer, task


def steps_of_data(config: Config, task: Task) -> int | None:
    """Optimizer steps in all epochs if no prompt is dropped; None: without an end.

    Raises:
        UserError: the task has no end, or there would be no step or, with `buffer.tail=error`, groups left over.
    """
    if not config.epochs:
        return None
    if task.size is None:
        raise UserError(f"epochs={config.epochs}: task {task.name} has no end; set steps alone, and epochs=0")
    per_step, tail = config.buffer.prompts_per_step, config.buffer.tail
    whole, left = divmod(config.epochs * task.size, per_step)
    if left and (tail == "error" or (tail == "drop" and not whole)):
        raise UserError(
            f"buffer.tail={tail}: task {task.name} has {task.size} prompts, with epochs={config.epochs} that is {whole} steps of "
            f"buffer.prompts_per_step={per_step} and {left} prompts more"
        )
    return whole + (tail == "train" and left > 0)


def look_closely(config: Config, renderer: Renderer, task: Task) -> list[str]:
    """What takes longer: more prompts, and a reward in the process where rewards will run. One line per finding.

    Raises:
        UserError: the reward of an empty completion is no number.
    """
    context = context_length(renderer.directory, config.generator.engine, cpu=config.profile != "cuda")
    found = []
    for split in _splits(config, task):
        lengths = [_length(config, renderer, task, n, split) for n in _ordinals(task, split)]
        size = {"train": task.size, "eval": task.eval_size}[split]
        found.append(f"{split} prompts: {size or 'endless'}; the first {len(lengths)} have {min(lengths)} to {max(lengths)} tokens")
        if context is not None and (long := sum(length >= context for length in lengths)):
            found[-1] += f", {long} of them too many for a context of {context}: they will be dropped"
    found += _overlap(config, task)
    score = asyncio.run(_score_once(config, _make(config, task, 0, "train")))
    error = score.error or ""
    if error.startswith(no_number := f"{FAULT['reward']}: {NO_REWARD} "):
        said = error.removeprefix(no_number)
        raise UserError(f"task={label(config.task)}: the reward of an empty completion of train prompt 0 is {said}")
    return [f"task: {label(config.task)}", *found, f"reward of an empty completion: {score.reward if score.error is None else score.error}"]


def _try_objective(config: Config) -> None:
    from monarch_rl.algorithms.objective import Objective

    try:
        Objective.of(config.trainer, config.generator.max_new_tokens)
    except UserError:
        raise
    except Exception as error:  # the functions are the user's own
        said = " ".join(getattr(error, "__notes__", [])) or "trainer"
        raise UserError(f"{said}: {type(error).__name__}: {cause(error)}") from error


def _check_model(config: Config, renderer: Renderer) -> None:
    generator = config.generator
    if not (renderer.directory / "config.json").is_file():
        return
    try:
        if generator.keep_routing and speaks_of_experts(renderer.directory):
            experts_to_keep(str(renderer.directory))
        if generator.tensor_parallel > 1:
            check_split(str(renderer.directory), generator.tensor_parallel)
    except EngineError as error:
        raise UserError(str(error)) from error


def _check_adapters(config: Config, renderer: Renderer) -> None:
    """Raises UserError: they do not fit the model."""
    if config.model.lora.rank and (renderer.directory / "config.json").is_file():
        tensor_shapes(str(renderer.directory), config.model.lora)


def _load(config: Config) -> Task:
    try:
        task = load_task(config.task, config.task_args, config.seed)
    except UserError:
        raise
    except Exception as error:  # the task may be the user's own
        raise UserError(f"task={label(config.task)}: {type(error).__name__}: {cause(error)}") from error
    if config.eval.prompts and task.eval_size == 0:
        raise UserError(f"eval.prompts={config.eval.prompts}: task {task.name} has no held-out prompts; set it to 0")
    return task


def _splits(config: Config, task: Task) -> Sequence[Split]:
    return ("train", "eval") if config.eval.prompts and task.eval_size != 0 else ("train",)


def _ordinals(task: Task, split: Split) -> range:
    """The first of a split. Training goes on through all epochs, but one epoch is enough to look at."""
    size = task.size if split == "train" else task.eval_size
    return range(FIRST if size is None else min(size, FIRST))


def _make(config: Config, task: Task, ordinal: int, split: Split) -> Prompt:
    try:
        return make_prompt(task, ordinal, split)
    except PromptError as error:
        said = str(error).removeprefix(f"task {task.name}: ").replace("prompt", f"{split} prompt", 1)
        # A traceback into the task's own code is worth a log; a prompt of the wrong kind is said in one line.
        raise UserError(f"task={label(config.task)}: {said}") from error.__cause__


def _check_pure(config: Config, task: Task, ordinal: int, split: Split) -> None:
    first, second = (_make(config, task, ordinal, split).content for _ in range(2))
    if first != second:
        raise UserError(
            f"task={label(config.task)}: {split} prompt {ordinal} is {_clip(first)} and, asked for again, {_clip(second)}; "
            "it must depend on its ordinal alone"
        )


def _length(config: Config, renderer: Renderer, task: Task, ordinal: int, split: Split) -> int:
    """Tokens of a prompt."""
    content = _make(config, task, ordinal, split).content
    try:
        length = len(renderer.render(content))
    except UserError:
        raise
    except Exception as error:  # a chat template may ask for anything
        raise UserError(
            f"task={label(config.task)}: {split} prompt {ordinal} cannot be rendered: {type(error).__name__}: {cause(error)}"
        ) from error
    if length == 0:
        raise UserError(f"task={label(config.task)}: {split} prompt {ordinal} is empty (no tokens)")
    return length


def _overlap(config: Config, task: Task) -> list[str]:
    """The same prompt in both splits is no held-out one; a user may want that, but should know it."""
    if "eval" not in _splits(config, task):
        return []
    train, held_out = (
        [json.dumps(_make(config, task, n, split).content) for n in _ordinals(task, split)] for split in _splits(config, task)
    )
    if not (both := [text for text in held_out if text in train]):
        return []
    return [f"WARNING: {len(both)} of the first {len(held_out)} eval prompts are training prompts too, e.g. {_clip(json.loads(both[0]))}"]


async def _score_once(config: Config, prompt: Prompt) -> Score:
    process = RewardProcess(config.task, config.task_args, config.seed, config.scorer.memory_mb)
    try:
        return await process.score(prompt, "", config.scorer.deadline_s)
    except RuntimeError as error:  # its process could not be started
        raise UserError(f"task={label(config.task)}: {error}") from error
    finally:
        await process.close()


def _clip(content: str | list[Message], width: int = 60) -> str:
    text = repr(content if isinstance(content, str) else content[-1]["content"])
    return text if len(text) <= width else f"{text[:width]}…"
