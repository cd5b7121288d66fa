"""Per-token policy losses, and the weights that turn them into one number.

Each loss maps logprobs, old logprobs and advantages of N tokens to N losses, to be minimised, and tells which tokens it clips.
The batch loss is Σ_N weight · loss over the whole global batch, so that it cannot depend on how tokens are spread over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.config import LossName

Loss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(logprobs_N, old_N, advantages_N, clip_low, clip_high) → loss_N, and True where the clip cuts the gradient off."""


def old_logprobs(logprobs_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """The denominator of the ratio: at age 0 the trainer's own logprobs, detached, so that the ratio is exactly 1; else the sampler's.

    Taking the sampler for "old" corrects for staleness without a second forward pass (as PipelineRL, 2509.19128).
    """
    return torch.where(ages_N == 0, logprobs_N.detach(), behaviour_N)


def reinforce(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """−A · log π. Williams 1992. Uses neither old logprobs nor clips."""
    return -advantages_N * logprobs_N, torch.zeros_like(advantages_N, dtype=torch.bool)


def dapo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A), r = π / π_old. Yu et al. 2025, "DAPO" (2503.14476), eq. 8."""
    ratio_N = (logprobs_N - old_N).exp()
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N)
    return loss_N, ((ratio_N > 1 + clip_high) & (advantages_N > 0)) | ((ratio_N < 1 - clip_low) & (advantages_N < 0))


def grpo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r, 1 − ε, 1 + ε)·A) with ε = ε_low on both sides. Shao et al. 2024, "DeepSeekMath" (2402.03300), eq. 3."""
    return dapo(logprobs_N, old_N, advantages_N, clip_low, clip_low)


LOSSES: dict[LossName, Loss] = {"reinforce": reinforce, "grpo": grpo, "dapo": dapo}


def token_mean(rows_N: Tensor, total_tokens: int, total_episodes: int) -> Tensor:
    """Weight 1 / (trained tokens of the global batch) for every token. DAPO (2503.14476), eq. 8."""
    return torch.full_like(rows_N, 1 / max(1, total_tokens), dtype=torch.float32)


def sequence_mean(rows_N: Tensor, total_tokens: int, total_episodes: int) -> Tensor:
    """Weight 1 / (episodes of the global batch · trained tokens of the token's own episode). DeepSeekMath (2402.03300), eq. 3.

    `rows_N` tells which episode each token belongs to; all tokens of an episode must be present.
    """
    return 1 / (max(1, total_episodes) * rows_N.bincount()[rows_N]).float()


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean}
