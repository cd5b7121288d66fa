"""The schema of the configuration: every key with its type, default and line of help, and the rules that values obey.

Where values come from (recipe, profile, command line) is `configure.py`. Imports neither torch nor vllm.
"""

from __future__ import annotations

import ast
import math
import traceback
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from monarch_rl import cluster_config, generator_config, model_config, trainer_config
from monarch_rl.cluster_config import ClusterConfig
from monarch_rl.generator_config import GeneratorConfig
from monarch_rl.model_config import ModelConfig
from monarch_rl.trainer_config import TrainerConfig

TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass
class ScorerConfig:
    workers: int = 1
    """processes that run rewards"""
    deadline_s: float = 10.0
    """a reward that takes longer is ended and its episode is unscorable"""
    memory_mb: int = 8192
    """memory of the process that a scorer runs rewards in; a reward that asks for more gets a MemoryError, and its episode is unscorable"""
    max_restarts: int = 8
    """scorers that may be lost and replaced in a run; the next one that is lost ends it"""
    hang_s: float = 60.0
    """a scorer that gives no sign of life for so long is lost"""


@dataclass
class RolloutConfig:
    workers: int = 1
    """processes that turn prompts into groups"""
    deadline_s: float = 600.0
    """a group that takes longer returns its prompt for another attempt"""
    max_attempts: int = 3
    """attempts at one prompt before it is dropped"""
    max_restarts: int = 8
    """workers that may be lost and replaced in a run; the next one that is lost ends it"""
    hang_s: float = 120.0
    """a worker that gives no sign of life for so long is lost"""


@dataclass
class BufferConfig:
    prompts_per_step: int = 32
    """groups trained in one optimizer step"""
    max_age: int = 2
    """most optimizer steps between the weights that sampled a token and the step that trains it; 0 is synchronous"""
    window: int = 1
    """ordinals from the unfinished head that may be taken out of order; 1 is strictly in order"""
    dead_groups: Literal["replace", "keep"] = "replace"
    """groups whose rewards are all equal: replaced by others, or kept as part of the batch"""
    tail: Literal["train", "drop", "error"] = "train"
    """what becomes of the last groups of the last epoch where they are fewer than a step takes: a smaller step, dropped, or an error"""
    max_dead_steps: int = 4
    """the run ends with an error after this many steps' worth of groups in a row without a trainable one"""
    hang_s: float = 120.0
    """the run ends with an error when the replay buffer's process gives no sign of life for so long"""


@dataclass
class WeightsConfig:
    every: int = 1
    """steps between publishes"""
    slots: int = 3
    """staging copies in a trainer rank's ring"""
    transport: Literal["auto", "ibverbs", "tcp"] = "auto"
    """what pulls go over; auto: ibverbs where there is RDMA hardware, else TCP"""
    encoding: Literal["full", "delta", "auto"] = "full"
    """what a pull moves: all weights; what has changed since the version that is held; or whichever of the two has been faster"""
    verify: Literal["every", "first", "off"] = "first"
    """after which swaps a replica holds its live parameters against the trainer's checksums"""


@dataclass
class CheckpointConfig:
    every: int = 0
    """steps between checkpoints of model, optimizer and progress; 0 means none but those that a signal or the user asks for"""
    keep: int = 2
    """the newest checkpoints that are kept"""
    uncovered_mb: float = 4096.0
    """memory for groups that were trained since the newest one, which trainers that restart from it train again; those beyond it are
    sampled again; 0: all are"""


@dataclass
class EvalConfig:
    every: int = 10
    """steps between evaluations; 0 means none between the first and the last"""
    prompts: int = 1024
    """held-out prompts, one episode each at the training temperature; 0 means no evaluation"""
    pin: bool = False
    """an evaluation samples on one replica, which keeps its weights until it is over: all its tokens are of one version"""


@dataclass
class ConsoleConfig:
    rollouts_every: int = 10
    """steps between printed sample rollouts; 0 means none"""


@dataclass
class Config:
    recipe: str = ""
    """name of a recipe, or path of a YAML file"""
    profile: str = "auto"
    """section of the recipe's `profiles` to apply; auto: cuda where there is a GPU, else cpu"""
    seed: int = 0
    """of prompts and sampling"""
    steps: int = 50
    """optimizer steps, at most"""
    epochs: int = 0
    """the run ends when each prompt of the task was trained or dropped so many times; 0: prompts go on as long as the steps do"""
    output_dir: str = "runs/${recipe}"
    """where everything of this run goes"""
    resume: str = "none"
    """go on from a checkpoint: latest (of output_dir; a new run where there is none), or the path of one; none: a new run"""
    record: bool = False
    """keep the groups of each step as they were trained, so that replay can train them again"""
    replay: str = ""
    """output_dir of a run with record=true, whose groups are trained again without engines and rollouts"""
    close_deadline_s: float = 60.0
    """seconds from SIGINT, SIGTERM or SIGHUP to the end, for the step in progress, a checkpoint and the close, which has the last 10 of
    them (or half, of fewer than 20)"""
    trackers: list[TrackerName] = field(default_factory=list)
    """places beside metrics.jsonl that get every row: trackers=[tensorboard, wandb, trackio]"""
    task: Any = "arithmetic"
    """a built-in task, reasoning_gym:NAME, path/to/file.py:NAME, or a mixture: [{name: arithmetic, weight: 3, args: {}}, ...]"""
    task_args: dict[str, Any] = field(default_factory=dict)
    """arguments of the task"""
    model: ModelConfig = field(default_factory=ModelConfig)
    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


class UserError(Exception):
    """Something only the user can put right. The command line prints it as one line and exits with 2; so does a notebook's cell,
    unless an error of other code is behind it."""

    def _render_traceback_(self) -> list[str]:
        """Asked for by IPython."""
        behind = traceback.format_exception(self.__cause__) if self.__cause__ else []
        return [*behind, f"{type(self).__name__}: {self}"]


class ConfigError(UserError):
    """A key or a value of the configuration is wrong; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str
    """dotted, e.g. `trainer.lr`"""
    hint: Any
    """its type"""
    default: Any
    help: str
    """the docstring under the field, on one line"""

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a Literal, or the names that are built in; empty for other keys."""
        return get_args(self.hint) if get_origin(self.hint) is Literal else trainer_config.ALGORITHMS.get(self.name, ())

    @property
    def free(self) -> bool:
        """A mapping whose keys are not ours to check."""
        return get_origin(self.hint) is dict

    @property
    def kind(self) -> str:
        """The type in a word or two, for the help table."""
        if self.choices:
            return "choice"
        if self.free:
            return "mapping"
        if get_origin(self.hint) is tuple:
            return f"{len(get_args(self.hint))} numbers"
        if get_origin(self.hint) is list:
            return "list"
        if self.hint is Any:
            return "str, list"
        return str(self.hint.__name__)

    @property
    def allowed(self) -> str:
        """What a value must be, as the end of an error message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.free:
            return f"a mapping, e.g. {self.name}.name=value"
        if get_origin(self.hint) is list:
            (item,) = get_args(self.hint)
            return f"a list of {', '.join(get_args(item)) or {int: 'whole numbers', str: 'texts'}[item]}"
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return words.get(self.hint, f"a list of {self.kind}")


@cache
def schema() -> dict[str, Key]:
    """All keys by dotted name, in the order of `Config`."""
    return {key.name: key for key in _keys(Config, "", _field_help())}


def _keys(cls: Any, prefix: str, texts: dict[tuple[str, str], str]) -> Iterator[Key]:
    hints = get_type_hints(cls)
    for part in fields(cls):
        hint = hints[part.name]
        if is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{part.name}.", texts)
            continue
        default = part.default if part.default_factory is MISSING else part.default_factory()
        yield Key(prefix + part.name, hint, default, texts[cls.__name__, part.name])


def _field_help() -> dict[tuple[str, str], str]:
    """(class, field) → the string under the field; Python keeps none of these, so they are read from the source."""
    files = (__file__, model_config.__file__, generator_config.__file__, trainer_config.__file__, cluster_config.__file__)
    nodes = [node for file in files for node in ast.parse(Path(file).read_text(encoding="utf-8")).body]
    texts = {}
    for cls in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for statement, below in pairwise(cls.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[cls.name, name] = " ".join(text.split())
    return texts


LEAST = {
    "seed": 0,
    "epochs": 0,
    "model.lora.rank": 0,
    "generator.max_restarts": 0,
    "trainer.max_restarts": 0,
    "generator.burst_tokens": 0,
    "generator.spares": 0,
    "rollout.max_restarts": 0,
    "scorer.max_restarts": 0,
    "generator.top_k": 0,
    "buffer.max_age": 0,
    "trainer.warmup_steps": 0,
    "weights.slots": 2,
    "checkpoint.every": 0,
    "eval.every": 0,
    "eval.prompts": 0,
    "console.rollouts_every": 0,
    "cluster.gpus_per_node": 0,
}
"""Smallest allowed value of the whole numbers that are not simply at least 1."""

MAY_BE_ZERO = {
    *("generator.min_p", "trainer.weight_decay", "trainer.max_grad_norm", "trainer.kl", "trainer.entropy"),
    "checkpoint.uncovered_mb",
}
"""Numbers that are not simply above 0."""

TASK_PART_KEYS = ("name", "weight", "args")
"""Of one part of a mixture in `task`."""


def validate(config: Config) -> None:
    """Check every value and every rule between keys.

    Raises:
        ConfigError: naming the key or keys at fault.
    """
    for key in schema().values():
        _check_value(key, attrgetter(key.name)(config))
    _check_ages(config)
    _check_task(config)
    mistakes = (
        model_config.mistake(config.model),
        generator_config.mistake(config.generator),
        trainer_config.mistake(config.trainer),
        cluster_config.mistake(config.cluster),
    )
    if wrong := next(filter(None, mistakes), ""):
        raise ConfigError(wrong)
    if config.replay and (config.record or config.resume != "none" or config.checkpoint.every):
        raise ConfigError("replay: trains from the first step to the last; leave out record, resume and checkpoint.every")
    if not str(config.output_dir).strip():
        raise ConfigError("output_dir: must name a folder, e.g. runs/NAME")
    trainer = config.trainer
    if config.generator.group_size < 2 and trainer_config.is_centred(trainer.advantage):
        raise ConfigError(f"generator.group_size: must be at least 2, for trainer.advantage={trainer.advantage} compares within a group")
    if trainer.advantage == "reinforce_pp" and config.buffer.dead_groups == "replace":
        raise ConfigError(
            "buffer.dead_groups=replace throws away what trainer.advantage=reinforce_pp learns from: groups whose rewards are all equal; "
            "set it to keep"
        )
    if trainer.kl_in == "reward" and trainer.kl_estimator == "unbiased":
        raise ConfigError("trainer.kl_estimator=unbiased is for trainer.kl_in=loss: a reward has no policy ratio; take k1")
    if trainer.schedule != "constant" and trainer.warmup_steps >= config.steps:
        raise ConfigError(
            f"trainer.warmup_steps={trainer.warmup_steps} leaves no step of steps={config.steps} for trainer.schedule={trainer.schedule}"
        )


def can_restart(config: Config) -> bool:
    """Whether trainers that are lost are started again: there must be something to start from, and to train again."""
    return config.checkpoint.every > 0 and config.trainer.max_restarts > 0 and not config.replay


def is_object(value: Any) -> bool:
    """Whether a task, loss or the like is given as itself, as a notebook can, and not by name."""
    return not isinstance(value, (str, int, float, bool, list, tuple, dict, type(None)))


def label(value: Any) -> str:
    """How a value is written down; an object by its name, which does not bring it back."""
    return f"notebook:{getattr(value, '__name__', type(value).__name__)}" if is_object(value) else str(value)


def _check_value(key: Key, value: Any) -> None:
    if key.hint is Any:
        return  # looked at by itself
    if (key.choices and value not in key.choices) or (key.hint in (int, float) and not _is_number(value, key.hint)):
        raise ConfigError(f"{key.name}: must be {key.allowed}, got {value!r}")
    if key.hint is int and value < (least := LEAST.get(key.name, 1)):
        raise ConfigError(f"{key.name}: must be at least {least}, got {value}")
    if key.hint is float:
        zero_too = key.name in MAY_BE_ZERO
        if not (math.isfinite(value) and (value > 0 or (zero_too and value == 0))):
            raise ConfigError(f"{key.name}: must be a finite number {'of at least' if zero_too else 'above'} 0, got {value}")
    if key.name == "trainer.betas" and not all(0 <= beta < 1 for beta in value):
        raise ConfigError(f"{key.name}: must each be at least 0 and below 1, got {list(value)}")


def _is_number(value: Any, hint: type) -> bool:
    return isinstance(value, (int, hint)) and not isinstance(value, bool)


def _check_task(config: Config) -> None:
    """A name, or a list of parts whose keys and values are right. Which names there are is known to `tasks` alone."""
    if is_object(config.task) or (isinstance(config.task, str) and config.task):
        return
    if not isinstance(config.task, list) or not config.task:
        raise ConfigError(f"task: must be a name, or a list of {{name: ..., weight: ..., args: ...}}, got {config.task!r}")
    if config.task_args:
        raise ConfigError("task_args: a mixture takes none; give each part of task its own args")
    for at, part in enumerate(config.task):
        if not isinstance(part, dict) or not isinstance(part.get("name"), str):
            raise ConfigError(f"task[{at}]: must be a mapping with a name, got {part!r}")
        if unknown := part.keys() - TASK_PART_KEYS:
            raise ConfigError(f"task[{at}]: unknown key {sorted(unknown)[0]!r}; a part has {', '.join(TASK_PART_KEYS)}")
        weight = part.get("weight", 1)
        if not _is_number(weight, float) or not math.isfinite(weight) or weight <= 0:
            raise ConfigError(f"task[{at}].weight: must be a finite number above 0, got {weight!r}")
        if not isinstance(part.get("args", {}), dict):
            raise ConfigError(f"task[{at}].args: must be a mapping, got {part['args']!r}")


def _check_ages(config: Config) -> None:
    """The admission budget B = (max_age + 1)·P - (window - 1) must hold a step's prompts, and the steps between publishes."""
    buffer, every = config.buffer, config.weights.every
    per_step = buffer.prompts_per_step
    budget = (buffer.max_age + 1) * per_step - (buffer.window - 1)
    if budget < per_step:
        largest = buffer.max_age * per_step + 1
        raise ConfigError(
            f"buffer.window={buffer.window} is too wide for buffer.max_age={buffer.max_age}: "
            f"with {per_step} prompts per step it can be at most {largest}"
        )
    if every > budget // per_step:
        raise ConfigError(
            f"weights.every={every} would stall generation at buffer.max_age={buffer.max_age}: "
            f"with buffer.window={buffer.window} it can be at most {budget // per_step}"
        )
