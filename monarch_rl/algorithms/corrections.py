"""Weights [N], without gradient, for the part of π / μ (trainer over sampler) that the loss's own ratio π / π_old leaves out.

That part is ρ = π_old / μ: different kernels on the two sides, and, where the old policy is not the sampler, its age. A correction
asks for what it needs by the names of its parameters, as a loss does; parameters after `*` are hyperparameters (`trainer.correction_args`).
Several multiply. A token of weight 0 is masked; it stays in the denominators, which count what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.algorithms.losses import row_mean, row_sum
from monarch_rl.trainer_config import CorrectionName


def none(behaviour_N: Tensor) -> Tensor:
    """1 for every token."""
    return torch.ones_like(behaviour_N)


def tis(old_N: Tensor, behaviour_N: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(ρ, C). Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"."""
    return (old_N - behaviour_N).exp().clamp(max=cap)


def tis_sequence(old_N: Tensor, behaviour_N: Tensor, rows_N: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(Π_t ρ_t, C) for all tokens of a sequence. Liu et al. 2025, "When Speed Kills Stability"; unbiased but for C."""
    return row_sum(old_N - behaviour_N, rows_N).exp().clamp(max=cap)


def icepop(old_N: Tensor, behaviour_N: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """ρ where low ≤ ρ ≤ high, else 0. Ling Team 2025, "Every Step Evolves" (2510.18855), IcePop."""
    rho_N = (old_N - behaviour_N).exp()
    return torch.where((low <= rho_N) & (rho_N <= high), rho_N, 0.0)


def mask_sequence(old_N: Tensor, behaviour_N: Tensor, rows_N: Tensor, *, limit: float = 3.0) -> Tensor:
    """Π_t ρ_t where that is ≤ limit, else 0, for all tokens of a sequence. "When Speed Kills Stability", MIS. Long ones go first."""
    product_N = row_sum(old_N - behaviour_N, rows_N).exp()
    return torch.where(product_N <= limit, product_N, 0.0)


def mask_geometric(old_N: Tensor, behaviour_N: Tensor, rows_N: Tensor, *, drift: float = 0.1) -> Tensor:
    """g = exp(mean_t log ρ_t) where |log g| ≤ drift, else 0, for all tokens of a sequence: as `mask_sequence`, whatever the length."""
    mean_N = row_mean(old_N - behaviour_N, rows_N)
    return torch.where(mean_N.abs() <= drift, mean_N.exp(), 0.0)


def opsm(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, rows_N: Tensor, *, delta: float = 0.5) -> Tensor:
    """0 for a sequence with A < 0 and mean_t(log μ − log π) > δ, else 1. DeepSeek-AI 2025, "DeepSeek-V3.2" (2512.02556), eq. 9."""
    gone_N = row_mean(behaviour_N - logprobs_N, rows_N) > delta
    return 1.0 - (gone_N & (advantages_N < 0)).to(behaviour_N.dtype)


def mask_age(behaviour_N: Tensor, ages_N: Tensor, *, most: float = 1.0) -> Tensor:
    """1 where the token is at most so many optimizer steps old, else 0. The old tokens of a mixed sequence go, the new ones stay."""
    return (ages_N <= most).to(behaviour_N.dtype)


CORRECTIONS: dict[CorrectionName, Callable[..., Tensor]] = {
    "none": none,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "mask_sequence": mask_sequence,
    "mask_geometric": mask_geometric,
    "opsm": opsm,
    "mask_age": mask_age,
}


# The old policy: (own_N, behaviour_N, ages_N) → old_N, without gradient. One optimizer step is done per batch, so the trainer's own
# logprobs of the forward pass are those of the policy before the step: to have it recomputed costs nothing.


def auto(own_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """The trainer itself at age 0, so that the ratio is exactly 1; the sampler for older tokens, so that the clip bounds how far
    the policy has gone since (as PipelineRL, 2509.19128)."""
    return torch.where(ages_N == 0, own_N, behaviour_N)


def sampler(own_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """μ throughout: the ratio is all of π / μ."""
    return behaviour_N


def recomputed(own_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """The trainer before the step: the ratio is 1, a correction has all of π / μ. Hilton et al. 2021 (2110.00641), decoupled PPO."""
    return own_N


def interpolated(own_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """log μ + α (log π − log μ), α = (a − 1) / a at age a: the policy of one step ago, by versions. AReaL (2505.24298), its
    approximation of the proximal policy. At age 0 it is the trainer itself."""
    alpha_N = 1 - 1 / ages_N.clamp(min=1).to(own_N.dtype)
    return torch.where(ages_N == 0, own_N, behaviour_N + alpha_N * (own_N - behaviour_N))


PROXIMALS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "auto": auto,
    "sampler": sampler,
    "recomputed": recomputed,
    "interpolated": interpolated,
}
