"""Estimates [N] of KL(π ‖ reference) from sampled tokens: Schulman 2020, "Approximating KL Divergence"; Δ = log π − log π_ref.

Each maps log π, log π_ref and the old log π (denominator of the loss's ratio) of N tokens to N estimates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.trainer_config import KLName


def k1(logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """Δ. Unbiased as a value, so right as a reward; as a loss its gradient is 0 on average."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """Δ² / 2. Biased as a value; its gradient Δ · ∇log π is the unbiased one where samples come from π itself."""
    return (logprobs_N - reference_N).square() / 2


def k3(logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """e^d − 1 − d with d = −Δ, never negative. Shao et al. 2024, "DeepSeekMath" (2402.03300), eq. 4.

    Its gradient is that of the forward KL(reference ‖ π). `expm1`, since e^d − 1 loses all digits near 0.
    """
    gap_N = reference_N - logprobs_N
    return torch.expm1(gap_N) - gap_N


def unbiased(logprobs_N: Tensor, reference_N: Tensor, old_N: Tensor) -> Tensor:
    """r · k3, r = π / π_old with its gradient. "DeepSeek-V3.2" (2512.02556), "Unbiased KL Estimate".

    Its gradient r · Δ · ∇log π is unbiased for stale tokens too.
    """
    return (logprobs_N - old_N).exp() * k3(logprobs_N, reference_N, old_N)


KL: dict[KLName, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "unbiased": unbiased}
