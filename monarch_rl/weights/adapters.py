"""LoRA adapters as they travel: which tensors there are, and what they are called on the way.

An adapter of a linear layer W [out, in] is the pair A [rank, in], B [out, rank]; with it the layer is W + alpha / rank · B · A.
Names are those of peft's files. B travels with alpha / rank multiplied in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from monarch_rl.config import UserError
from monarch_rl.model_config import LoraConfig

if TYPE_CHECKING:
    from monarch_rl.weights.plan import Shape

NAME = "default"
"""Of the one adapter, in peft's modules."""
ALL = "all"
"""The target that stands for all."""


def target_names(causal_lm: nn.Module, lora: LoraConfig) -> list[str]:
    """Last names of the linear layers of a model without adapters that are to get one.

    Raises:
        UserError: a target names no linear layer, or the output layer.
    """
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    linear = [(name.rpartition(".")[2], module) for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    there = sorted({name for name, module in linear if module is not head})
    if lora.targets == [ALL]:
        return there
    if strange := [target for target in lora.targets if target not in there]:
        is_head = strange[0] in dict(linear)
        what = "is the output layer, which gets no adapter, in" if is_head else "names no linear layer of"
        raise UserError(f"model.lora.targets: {strange[0]} {what} {type(causal_lm).__name__}; there are {', '.join(there)}")
    return list(lora.targets)


def shapes(causal_lm: nn.Module, lora: LoraConfig) -> dict[str, Shape]:
    """Name → shape of every tensor that travels, for a model without adapters (on any device, meta included)."""
    targets = target_names(causal_lm, lora)
    found: dict[str, Shape] = {}
    for layer, module in causal_lm.named_modules():
        if isinstance(module, nn.Linear) and layer.rpartition(".")[2] in targets:
            found[file_name(layer, "A")] = (lora.rank, module.in_features)
            found[file_name(layer, "B")] = (module.out_features, lora.rank)
    return found


def file_name(layer: str, part: Literal["A", "B"]) -> str:
    """What peft's files call a part of a layer's adapter."""
    return f"base_model.model.{layer}.lora_{part}.weight"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[out, in] the weight of a layer with its adapter; `scale` is alpha / rank."""
    return weight + scale * (b @ a)
