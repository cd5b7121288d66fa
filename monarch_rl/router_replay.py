"""Routers of a mixture of experts that choose the experts which they are told, as the sampler did."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter


class Replay:
    """The routers of one model. Told nothing, they choose by themselves."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self._chosen_LNK: Tensor | None = None
        self._name = type(causal_lm).__name__
        self._routers = 0
        for layer, module in self._layers(causal_lm):
            module.forward = partial(self._route, layer, module)
            self._routers += 1

    def use(self, routing_BTLK: Tensor | None) -> None:
        """Experts of each token of the next forward pass, and of its recomputation in the backward pass.

        Raises:
            ValueError: the model has no routers that can be told.
        """
        if routing_BTLK is not None and not self._routers:
            raise ValueError(f"episodes come with the routing of their tokens, which {self._name} cannot repeat")
        self._chosen_LNK = None if routing_BTLK is None else routing_BTLK.flatten(0, 1).transpose(0, 1)

    @staticmethod
    def _layers(causal_lm: nn.Module) -> list[tuple[int, nn.Module]]:
        """(index of its decoder layer, router)."""
        found: list[tuple[int, nn.Module]] = []
        for name, module in causal_lm.named_modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                found.append((next(int(part) for part in name.split(".") if part.isdigit()), module))
        return found

    def _route(self, layer: int, router: Any, hidden: Tensor) -> tuple[Tensor, ...]:
        """The router's logits as they are; gate weights are the softmax at the experts of the sampler instead of at the largest."""
        if self._chosen_LNK is None:
            own: tuple[Tensor, ...] = type(router).forward(router, hidden)
            return own
        logits_NE = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        chosen_NK = self._chosen_LNK[layer]
        scores_NK = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, chosen_NK)
        if router.norm_topk_prob:
            scores_NK = scores_NK / scores_NK.sum(-1, keepdim=True)
        return logits_NE, scores_NK.to(logits_NE.dtype), chosen_NK
