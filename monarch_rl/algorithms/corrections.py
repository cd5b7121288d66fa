"""Weights [N], without gradient, for the part of π / μ (trainer over sampler) that the loss's own ratio π / π_old leaves out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.config import CorrectionName

TIS_CAP = 2.0
"""Most that one token is weighed up."""


def none(old_logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """1 for every token."""
    return torch.ones_like(behaviour_N)


def tis(old_logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """min(ρ, 2), ρ = π_old / μ. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    Where the sampler stands in for "old" (age ≥ 1), ρ is 1: there the loss's ratio already is π / μ.
    """
    return (old_logprobs_N - behaviour_N).detach().exp().clamp(max=TIS_CAP)


CORRECTIONS: dict[CorrectionName, Callable[[Tensor, Tensor], Tensor]] = {"none": none, "tis": tis}
