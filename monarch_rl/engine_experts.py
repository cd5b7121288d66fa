"""Mixtures of experts: which routing a trainer can repeat, and how vLLM lays experts out on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl.engine_channels import Experts
from monarch_rl.engine_errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

REPLAYED = ("qwen3_moe",)
"""Kinds of models, as `config.json` names them, whose routing the trainer can repeat (see `router_replay`)."""
EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
"""What `config.json` may call the number of experts."""


def experts_to_keep(model_path: str) -> Experts | None:
    """None where the model is no mixture of experts.

    Raises:
        EngineError: it is one whose routing the trainer cannot repeat.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    count = count_experts(config)
    if count <= 1:
        return None
    if config.model_type not in REPLAYED:
        raise EngineError(
            f"generator.keep_routing: the trainer cannot repeat the routing of {config.model_type} models, only of "
            f"{', '.join(REPLAYED)}; generator.keep_routing=false lets it choose experts anew"
        )
    return Experts(count, config.num_hidden_layers, config.num_experts_per_tok)


def speaks_of_experts(directory: Path) -> bool:
    """Whether `experts_to_keep` could find any: told without transformers' classes, which bring torch and take seconds to import."""
    return "expert" in (directory / "config.json").read_text(encoding="utf-8").lower()


def count_experts(config: Any) -> int:
    """Of a model's configuration; 0 or 1 where it is no mixture of experts."""
    text = config.get_text_config()
    return max([0, *(found for name in EXPERTS if isinstance(found := getattr(text, name, None), int))])


def experts_to_pack(model: Any) -> list[tuple[Tensor, str]]:
    """(weights, instruction set) of the experts that vLLM packs in place on CPU; plain copies undo that, see `pack`.

    Raises:
        EngineError: experts laid out in any other way, which a swap could not repeat.
    """
    layers = [module for module in model.modules() if hasattr(module, "w13_weight")]
    if not layers:
        return []
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernels = [getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None) for layer in layers]
    if not all(isinstance(kernel, CPUUnquantizedExperts) for kernel in kernels):
        raise EngineError("a mixture-of-experts model whose experts vLLM lays out for another kernel than its CPU one: not supported yet")
    packed = [(layer, kernel.isa) for layer, kernel in zip(layers, kernels, strict=True) if kernel and not kernel._use_zentorch]
    return [(weight.data, isa) for layer, isa in packed for weight in (layer.w13_weight, layer.w2_weight)]


def pack(experts: list[tuple[Tensor, str]]) -> None:
    """Turn freshly written experts into what vLLM's CPU kernel reads."""
    for weights, isa in experts:
        from vllm._custom_ops import cpu_prepack_moe_weight

        weights.copy_(cpu_prepack_moe_weight(weights.clone(), isa))


def unpack(experts: list[tuple[Tensor, str]]) -> None:
    """Undo `pack`, so that the weights can be compared with a trainer's."""
    for weights, isa in experts:
        flat = weights.flatten(1)
        flat[:, _packed_order(weights, isa)] = flat.clone()


def _packed_order(weights: Tensor, isa: str) -> Tensor:
    """For each place of an expert's packed weights, the place that its element had before: packing the numbers of the places tells."""
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight

    one_expert = weights[:1]
    bits = 8 * weights.itemsize
    integer = {16: torch.int16, 32: torch.int32}[bits]
    numbers = torch.arange(one_expert.numel()).view(one_expert.shape)
    order = torch.zeros(one_expert.numel(), dtype=torch.int64)
    for shift in range(0, 32, bits):  # bits of a number are carried as if they were a weight
        carried = cpu_prepack_moe_weight((numbers >> shift).to(integer).view(weights.dtype), isa)
        order |= (carried.reshape(-1).view(integer).long() & ((1 << bits) - 1)) << shift
    return order
