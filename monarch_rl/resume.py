"""What has changed since a checkpoint was written, and what of its finished work still counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from monarch_rl import checkpoint, recorded
from monarch_rl.config import Config, UserError, is_object, label, schema
from monarch_rl.disk import on_disk
from monarch_rl.recorded import RECORD
from monarch_rl.tasks import Task, make_prompt

SETTINGS = "settings.json"
LOOKED_AT = 16
"""Prompts whose text tells whether the data are the same."""

UNTOLD = (
    *("recipe", "profile", "output_dir", "resume", "record", "replay", "close_deadline_s", "trackers", "console.", "cluster."),
    *("checkpoint.uncovered_mb", "trainer.max_restarts", "trainer.hang_s"),
)
"""Keys that change nothing in what is trained."""
MADE_BY = ("seed", "task", "task_args", "model.", "generator.group_size")
"""Keys that finished groups depend on: with another value they would not have been made."""
RULED_BY = ("buffer.prompts_per_step", "buffer.window", "buffer.dead_groups")
"""Keys by which finished groups were admitted. `buffer.max_age` is none of them: each prompt keeps the bound it was started with."""


TRAINED_BY = ("steps", "trainer.", "model.")
"""Keys that a replay depends on: with the same ones it reaches the same weights."""


class Resumed(NamedTuple):
    """How a run goes on from a checkpoint."""

    told: list[str]
    """What is different, a line each."""
    keep_groups: bool
    """Whether groups that were finished and not trained are trained as they are."""
    exact: bool = False
    """Whether a replay is the same training as the run that was recorded."""


def settings(config: Config, task: Task) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it: every key, and a digest of some prompts."""
    values = {name: attrgetter(name)(config) for name in schema()}
    plain = {name: label(value) if is_object(value) else value for name, value in values.items()}
    return {"config": json.loads(json.dumps(plain, default=str)), "prompts": digest(task)}


def write(folder: Path, config: Config, task: Task) -> None:
    with on_disk(folder / SETTINGS):
        (folder / SETTINGS).write_text(json.dumps(settings(config, task), indent=1) + "\n", encoding="utf-8")


def compare(folder: Path, config: Config, task: Task) -> Resumed:
    """Hold the settings of a run against those of the checkpoint in `folder`.

    Raises:
        UserError: the checkpoint does not say what it was made with.
    """
    try:
        then: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"resume={folder}: its {SETTINGS} cannot be read: {error}") from None
    now = settings(config, task)
    changed = _changed(now, then)
    told = [f"resume: {name}={_short(now['config'][name])}, was {_short(then['config'].get(name))} in the checkpoint" for name in changed]
    same_prompts = now["prompts"] == then["prompts"]
    if not same_prompts:
        told.append(f"resume: task {task.name} makes other prompts than it did for the checkpoint; their ordinals go on")
    synchronous = [_max_age(which) == 0 for which in (now, then)]
    keep = same_prompts and synchronous[0] == synchronous[1] and not any(_named(name, MADE_BY + RULED_BY) for name in changed)
    if not keep:
        told.append("resume: groups that were finished and not trained do not fit this any more; their prompts are sampled again")
    return Resumed(told, keep)


def start(config: Config, task: Task) -> tuple[Path | None, Resumed]:
    """The checkpoint to go on from, if there is one. Checkpoints of later steps in the same folder are of a run that this one takes another
    way from, and are set aside."""
    output_dir = Path(config.output_dir)
    if config.replay:
        return None, _of_replay(config, task)
    if config.record:
        (output_dir / RECORD).mkdir(exist_ok=True)
        write(output_dir / RECORD, config, task)
    checkpoint.sweep(output_dir)
    folder = checkpoint.to_resume(config.resume, output_dir)
    if folder is None:
        return None, Resumed([], True)
    checkpoint.set_aside(output_dir, checkpoint.read_progress(folder).step)
    return folder, compare(folder, config, task)


def _of_replay(config: Config, task: Task) -> Resumed:
    """Says what makes a replay another training than the one that was recorded."""
    steps, path = recorded.check(Path(config.replay)), Path(config.replay) / RECORD / SETTINGS
    try:
        then: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"replay={config.replay}: {path} cannot be read: {error}") from None
    now = settings(config, task)
    changed = [name for name in _changed(now, then) if _named(name, TRAINED_BY)]
    known = len(recorded.fingerprints(Path(config.replay)))
    compared = f"; on CPUs the weights are compared after {known} of them" if known and not changed else ""
    return Resumed(
        [f"replay: {steps} recorded steps{compared}"]
        + [
            f"replay: {name}={_short(now['config'][name])}, was {_short(then['config'].get(name))}: weights will differ" for name in changed
        ],
        keep_groups=True,
        exact=not changed,
    )


def _changed(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    return [name for name in now["config"] if now["config"][name] != then["config"].get(name) and not _named(name, UNTOLD)]


def digest(task: Task) -> str:
    """Of prompts all over the data; of an endless task the first."""
    ordinals = range(LOOKED_AT) if task.size is None else sorted({at * task.size // LOOKED_AT for at in range(LOOKED_AT)})
    prompts = [make_prompt(task, ordinal, "train") for ordinal in ordinals if task.size is None or ordinal < task.size]
    text = json.dumps([task.size, [[p.ordinal, p.content, p.answer] for p in prompts]], default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _max_age(settings: Mapping[str, Any]) -> int:
    return int(settings["config"]["buffer.max_age"])


def _named(name: str, keys: tuple[str, ...]) -> bool:
    return any(name.startswith(key) if key.endswith(".") else name == key for key in keys)


def _short(value: Any, width: int = 60) -> str:
    text = str(value)
    return text if len(text) <= width else f"{text[:width]}…"
