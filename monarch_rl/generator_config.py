"""The keys of `generator.*`; a part of `config.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

COLDEST = 0.01
"""vLLM raises lower temperatures to this one without saying so."""

OWN_ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "generator.tensor_parallel",
    "enable_lora": "model.lora.rank",
}
"""Arguments of vLLM that follow from another key."""

SAMPLED_BY = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
"""Fields that are the same in `Sampling`."""


@dataclass
class GeneratorConfig:
    replicas: int = 1
    """vLLM engines, one process mesh each"""
    tensor_parallel: int = 1
    """ranks that share the weights of a replica, one process and on CUDA one GPU each"""
    max_restarts: int = 8
    """replicas that may be lost and replaced in a run; the next one that is lost ends it"""
    spares: int = 0
    """processes that have imported vLLM and wait for the place of a lost replica; each takes the room of one, on GPUs the emptiest GPU"""
    hang_s: float = 120.0
    """a replica that has something to decode and takes no step for so long is lost"""
    burst_tokens: int = 64
    """episodes that are longer are told to their rollout worker so many tokens at a time; when a replica is lost, they go on from there
    on another. 0 means never: they begin anew"""
    group_size: int = 8
    """episodes per prompt"""
    temperature: float = 1.0
    """sampling temperature, at least 0.01"""
    top_k: int = 0
    """draw from the so many most likely ids; 0 means off"""
    top_p: float = 1.0
    """draw from the fewest ids that are together so likely; 1 means off"""
    min_p: float = 0.0
    """draw from the ids that are at least so likely compared with the most likely one; 0 means off"""
    keep_mask: bool = True
    """where top_k, top_p or min_p leave ids out, the others travel with each token and the trainer normalises over them;
    false: over all ids, so that at zero lag the ratio is not 1 but the probability of those that were not left out"""
    keep_routing: bool = True
    """of a mixture of experts (Qwen3-MoE), the experts of each token travel with it and are the trainer's too;
    false: the trainer chooses anew, which rounding can turn; refused for other mixtures unless false"""
    max_new_tokens: int = 96
    """token budget of one episode"""
    kv: Literal["keep", "recompute"] = "keep"
    """keys and values of unfinished episodes when new weights arrive: kept as the old weights made them, or computed anew"""
    stop: list[str] = field(default_factory=list)
    """texts that end a turn, beside the model's end tokens; the ids up to the one that completes such a text are the turn, all trained"""
    stop_ids: list[int] = field(default_factory=list)
    """ids that end a turn, beside the model's end tokens"""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """episodes that their budget ended: trained like others; kept out of the loss; or out of loss and baseline, like unscorable ones"""
    engine: dict[str, Any] = field(default_factory=dict)
    """passed on to vLLM's EngineArgs, e.g. generator.engine.max_num_seqs=64"""


def mistake(generator: GeneratorConfig) -> str:
    """What is wrong with its values, in a line that begins with the key; empty when nothing is."""
    if own := sorted(OWN_ENGINE_ARGUMENTS.keys() & generator.engine.keys()):
        return f"generator.engine.{own[0]}: not passed on to vLLM; set {OWN_ENGINE_ARGUMENTS[own[0]]}"
    if generator.temperature < COLDEST:
        return f"generator.temperature: must be at least {COLDEST:g}, the lowest that vLLM samples at"
    if "" in generator.stop:
        return "generator.stop: must hold texts of at least one character each"
    for name in ("top_p", "min_p"):
        if (value := getattr(generator, name)) > 1:
            return f"generator.{name}: must be at most 1, got {value:g}"
    return ""
