"""The keys of `trainer.*`; a part of `config.py`. Losses, advantages and corrections are checked here without importing torch."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

LossName = Literal[
    "reinforce", "grpo", "dapo", "bnpo", "dr_grpo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "topr", "dppo_tv"
]
AdvantageName = Literal["mean", "dr_grpo", "grpo", "rloo", "batch_norm", "reinforce_pp", "reinforce_pp_baseline", "reward_to_go"]
CorrectionName = Literal["none", "tis", "tis_sequence", "icepop", "mask_sequence", "mask_geometric", "opsm", "mask_age"]
KLName = Literal["k1", "k2", "k3", "unbiased"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]

OWN_AGGREGATION: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "gspo": "sequence_mean",
    "gspo_token": "sequence_mean",
    "sapo": "sequence_mean",
    "gmpo": "sequence_mean",
}
"""Of losses whose paper does not average over all tokens."""

CENTRED = set(get_args(AdvantageName)) - {"reinforce_pp"}
"""Advantages that are differences within a group, so that a group with equal rewards has nothing to learn."""


@dataclass
class TrainerConfig:
    ranks: int = 1
    """FSDP2 processes"""
    max_restarts: int = 3
    """where a rank is lost, all start again from the last checkpoint, so many times in a run; needs checkpoint.every; 0: the run ends"""
    hang_s: float = 120.0
    """a rank whose process answers nothing for so long is lost"""
    lr: float = 3e-4
    """peak learning rate of AdamW"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """of the learning rate after warm-up; linear and cosine reach 0 at the last step"""
    warmup_steps: int = 5
    """steps of linear warm-up"""
    betas: tuple[float, float] = (0.9, 0.95)
    """of AdamW"""
    weight_decay: float = 0.0
    """of AdamW"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this global norm; 0 means no clipping"""
    tokens_per_microbatch: int = 4096
    """padded tokens of one forward pass"""
    activation_checkpointing: bool = False
    """recompute activations of each layer in the backward pass"""
    loss: Any = "dapo"
    """policy term; or path/to/file.py:NAME of a function of yours (docs/losses.md)"""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """its hyperparameters, e.g. trainer.loss_args.clip_high=0.3; the defaults are those of the paper"""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = "auto"
    """how per-token losses of the global batch become one number; auto: as in the paper of the loss"""
    advantage: Any = "mean"
    """what an episode's reward is compared with; or path/to/file.py:NAME"""
    advantage_args: dict[str, Any] = field(default_factory=dict)
    """its hyperparameters"""
    proximal: Literal["auto", "sampler", "recomputed", "interpolated"] = "auto"
    """the old policy of the loss's ratio; auto: the trainer itself for tokens of age 0, else the sampler"""
    correction: Any = "none"
    """weights for the gap between sampler and old policy, one or several, e.g. [tis, mask_age]; or path/to/file.py:NAME"""
    correction_args: dict[str, Any] = field(default_factory=dict)
    """hyperparameters, each for all corrections that have it, e.g. trainer.correction_args.cap=3"""
    kl: float = 0.0
    """weight of the KL divergence to the model at model.path, kept frozen in the trainer (with adapters it is the policy without them);
    0 means no such copy"""
    kl_estimator: KLName = "k3"
    """of KL(policy, reference) per token; unbiased: k3 times the policy ratio, right for stale tokens too"""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: added per token; reward: its sum over an episode is taken off the reward before the advantage (then k1 is the right one)"""
    entropy: float = 0.0
    """weight of an entropy bonus in the loss"""
    logprob_chunk: int = 1024
    """tokens whose [tokens, vocabulary] logits exist at a time"""


ALGORITHMS: dict[str, tuple[str, ...]] = {
    "trainer.loss": get_args(LossName),
    "trainer.advantage": get_args(AdvantageName),
    "trainer.correction": get_args(CorrectionName),
}
"""Keys that hold one of these names, a function as `path/to/file.py:NAME`, or in Python the function itself."""


def aggregation_of(trainer: TrainerConfig) -> Aggregation:
    """The one that is meant by `auto`."""
    if trainer.aggregation != "auto":
        return trainer.aggregation
    return OWN_AGGREGATION.get(trainer.loss, "token_mean") if isinstance(trainer.loss, str) else "token_mean"


def is_centred(advantage: Any) -> bool:
    """Whether it is known to be a difference within a group; of a function of the user's that is not known."""
    return isinstance(advantage, str) and advantage in CENTRED


def trains_dead_groups(trainer: TrainerConfig) -> bool:
    """Whether groups of equal rewards have a gradient: where advantages are no differences within a group, and by KL and entropy."""
    return bool(trainer.kl or trainer.entropy) or not is_centred(trainer.advantage)


def listed(correction: Any) -> list[Any]:
    """`trainer.correction` as a list."""
    return list(correction) if isinstance(correction, (list, tuple)) else [correction]


def own_functions(trainer: TrainerConfig) -> bool:
    """Whether any of its functions is the user's own."""
    return any(one not in ALGORITHMS[key] for key in ALGORITHMS for one in listed(getattr(trainer, key.split(".")[1])))


DIVISORS = ("epsilon", "tau_positive", "tau_negative")
"""Hyperparameters that keep a division from failing, or are divided by."""


def mistake(trainer: TrainerConfig) -> str:
    """What is wrong with its functions and their arguments, in a line that begins with the key; empty when nothing is."""
    for kind in ("loss", "advantage", "correction"):
        chosen, args = listed(getattr(trainer, kind)), getattr(trainer, f"{kind}_args")
        if kind == "correction" and not chosen:
            return "trainer.correction: must name at least one; none is a name too"
        for one in chosen:
            if wrong := _wrong_choice(f"trainer.{kind}", one):
                return wrong
        if all(isinstance(one, str) and one in ALGORITHMS[f"trainer.{kind}"] for one in chosen):
            known = {name for one in chosen for name in hyperparameters(kind, one)}
            if wrong := _wrong_arguments(f"trainer.{kind}_args", ", ".join(chosen), args, known):
                return wrong
    low = trainer.loss_args.get("clip_low", 0)
    if trainer.loss in ALGORITHMS["trainer.loss"] and trainer.loss != "gmpo" and low > 1:  # gmpo clips the logarithm
        return f"trainer.loss_args.clip_low: must be at most 1, got {low}"
    return ""


def _wrong_choice(key: str, chosen: Any) -> str:
    if callable(chosen) or (isinstance(chosen, str) and chosen in ALGORITHMS[key]):
        return ""
    file, colon, attribute = chosen.rpartition(":") if isinstance(chosen, str) else ("", "", "")
    if file == "notebook":
        return f"{key}={chosen} was defined in a notebook: put it into a file, and use {key}=path/to/file.py:{attribute}"
    if colon and file.endswith(".py"):
        return "" if Path(file).is_file() else f"{key}={chosen}: there is no file {file}"
    names = ALGORITHMS[key]
    return f"{key}: must be one of {', '.join(names)}, or path/to/file.py:NAME, got {chosen!r}{nearest(chosen, names)}"


def _wrong_arguments(key: str, of: str, args: Mapping[str, Any], known: Iterable[str]) -> str:
    """Hyperparameters of what is built in are numbers of at least 0."""
    for name, value in args.items():
        if wrong := unknown_argument(key, of, name, known):
            return wrong
        above = name in DIVISORS
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not right or value < 0 or (above and value == 0):
            return f"{key}.{name}: must be a finite number {'above' if above else 'of at least'} 0, got {value!r}"
    return ""


def unknown_argument(key: str, of: str, name: str, known: Iterable[str]) -> str:
    """Empty where `name` is among those that `of` takes."""
    known = sorted(known)
    if name in known:
        return ""
    return f"{key}.{name}: {of} takes {', '.join(known) or 'no arguments'}{nearest(name, known)}"


def nearest(name: Any, known: Iterable[str]) -> str:
    """The end of a message: what may have been meant."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def section_of(argument: str) -> str:
    """Where a hyperparameter of this name is set, e.g. `trainer.loss_args`; empty where none has it."""
    kinds = (key for key, names in ALGORITHMS.items() for name in names if argument in hyperparameters(key.split(".")[1], name))
    return next((f"{key}_args" for key in kinds), "")


@cache
def hyperparameters(kind: str, name: str) -> tuple[str, ...]:
    """Of a built-in loss, advantage or correction: the parameters after `*`, read from the source, for importing it imports torch."""
    functions, names = _source(kind)
    return tuple(arg.arg for arg in functions[names[name]].args.kwonlyargs)


@cache
def _source(kind: str) -> tuple[dict[str, ast.FunctionDef], dict[str, str]]:
    """The functions of a file by name, and the function of each name in the table at its end."""
    file = {"loss": "losses.py", "advantage": "advantages.py", "correction": "corrections.py"}[kind]
    tree = ast.parse((Path(__file__).parent / "algorithms" / file).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    pairs = [pair for node in ast.walk(tree) if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)]
    return functions, {str(k.value): v.id for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Name)}
