"""Rewards → advantages. Each function maps rewards [P, G] to advantages [P, G], both float64.

NaN (any value that is not finite) marks an unscorable episode: it is left out of the baseline and gets advantage 0. Groups
with nothing to compare (all rewards equal, one scorable episode, none) get exactly 0 throughout; no result is NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.config import AdvantageName

STD_EPSILON = 1e-4
"""Added to a group's standard deviation (the value of TRL's trainer)."""


def mean(rewards_PG: Tensor) -> Tensor:
    """A = R − mean(R). Liu et al. 2025, "Understanding R1-Zero-Like Training" (2503.20783), Dr. GRPO."""
    return _centred(rewards_PG)


def grpo(rewards_PG: Tensor) -> Tensor:
    """A = (R − mean(R)) / (std(R) + ε), std unbiased. Shao et al. 2024, "DeepSeekMath" (2402.03300), section 4.1.2.

    For g scorable episodes |A| ≤ (g − 1) / √g, whatever the rewards.
    """
    centred_PG = _centred(rewards_PG)
    variance_P1 = centred_PG.square().sum(-1, keepdim=True) / (_count(rewards_PG) - 1).clamp(min=1)
    return centred_PG / (variance_P1.sqrt() + STD_EPSILON)


def rloo(rewards_PG: Tensor) -> Tensor:
    """A_i = R_i − mean_{j≠i}(R_j) = g / (g − 1) · (R_i − mean(R)). Ahmadian et al. 2024, "Back to Basics" (2402.14740), RLOO.

    For g scorable episodes |A| ≤ max(R) − min(R).
    """
    count_P1 = _count(rewards_PG)
    return _centred(rewards_PG) * count_P1 / (count_P1 - 1).clamp(min=1)


def _count(rewards_PG: Tensor) -> Tensor:
    return rewards_PG.isfinite().sum(-1, keepdim=True)


def _centred(rewards_PG: Tensor) -> Tensor:
    """Rewards less the mean of the scorable ones; 0 where unscorable, and exactly 0 where all of a group are equal."""
    known_PG = rewards_PG.isfinite()
    rewards_PG = rewards_PG.double().where(known_PG, torch.nan)
    highest_P1 = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
    lowest_P1 = rewards_PG.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
    return torch.where(known_PG & (highest_P1 > lowest_P1), rewards_PG - rewards_PG.nanmean(-1, keepdim=True), 0.0)


ADVANTAGES: dict[AdvantageName, Callable[[Tensor], Tensor]] = {"mean": mean, "grpo": grpo, "rloo": rloo}
