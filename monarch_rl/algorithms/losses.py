"""Per-token policy losses, and the weights that turn them into one number.

A loss maps tensors of the N trained tokens to N numbers, to be minimised. It asks for what it needs by the names of its parameters
(`objective.TOKENS` lists them): `logprobs_N` of the trainer, which carry the gradient; `old_N`, the policy that the ratio is taken to;
`behaviour_N`, the sampler's; `advantages_N`; `rows_N`, the row of each token, for what belongs to a whole sequence. Parameters after
`*` are hyperparameters, set by name with `trainer.loss_args`. It returns loss_N, or loss_N with cut_N: 1 where an upper bound cuts the
token's ratio or gradient off, −1 where a lower one does, else 0 (True counts as 1).

The batch loss is Σ_N weight · loss over the whole global batch, so that it cannot depend on how tokens are spread over
micro-batches and ranks. All tokens of a row are in one call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.trainer_config import LossName

Cut = tuple[Tensor, Tensor]
"""loss_N and cut_N."""


def reinforce(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """−A · log π. Williams 1992, "Simple statistical gradient-following algorithms"."""
    return -advantages_N * logprobs_N


def grpo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Cut:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A), r = π / π_old. Shao et al. 2024, "DeepSeekMath" (2402.03300), eq. 3: sequence mean."""
    return _surrogate((logprobs_N - old_N).exp(), advantages_N, clip_low, clip_high)


def dapo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Cut:
    """As `grpo`, with a higher upper clip. Yu et al. 2025, "DAPO" (2503.14476), eq. 8: mean over all tokens of the batch."""
    return _surrogate((logprobs_N - old_N).exp(), advantages_N, clip_low, clip_high)


def bnpo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Cut:
    """As `grpo`, with a mean over tokens. What TRL calls bnpo, less its fault: there the mean is over the tokens of a micro-batch."""
    return _surrogate((logprobs_N - old_N).exp(), advantages_N, clip_low, clip_high)


def dr_grpo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Cut:
    """As `grpo`, summed and divided by a constant. Liu et al. 2025, "Understanding R1-Zero-Like Training" (2503.20783), section 3.2."""
    return _surrogate((logprobs_N - old_N).exp(), advantages_N, clip_low, clip_high)


def dual_clip(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, delta: float = 3.0
) -> Cut:
    """−max(min(r·A, clip(r)·A), δ·A) where A < 0, else as `grpo`. Ye et al. 2020 (1912.09729), eq. 5; INTELLECT-2 (2505.07291).

    Bounds what the others do not: the loss of an unwanted token that has become likely.
    """
    ratio_N = (logprobs_N - old_N).exp()
    loss_N, cut_N = _surrogate(ratio_N, advantages_N, clip_low, clip_high)
    loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -delta * advantages_N), loss_N)
    return loss_N, cut_N + ((ratio_N > delta) & (advantages_N < 0)).int()


def gspo(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, rows_N: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Cut:
    """−min(s·A, clip(s)·A), s = exp(mean_t log r_t) of the sequence. Zheng et al. 2025, "GSPO" (2507.18071), eq. 5 to 7."""
    return _surrogate(row_mean(logprobs_N - old_N, rows_N).exp(), advantages_N, clip_low, clip_high)


def gspo_token(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, rows_N: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Cut:
    """As `gspo` with s_t = sg[s] · π / sg[π], so that tokens may differ in A. GSPO (2507.18071), eq. 13 and 14."""
    sequence_N = row_mean(logprobs_N.detach() - old_N, rows_N).exp()
    return _surrogate(sequence_N * (logprobs_N - logprobs_N.detach()).exp(), advantages_N, clip_low, clip_high)


def cispo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, cap: float = 5.0) -> Cut:
    """−sg[min(r, cap)] · A · log π. MiniMax 2025, "MiniMax-M1" (2506.13585), eq. 4 and 5; cap as in ScaleRL (2510.13786).

    No token loses its gradient; the weight of one is bounded.
    """
    ratio_N = (logprobs_N.detach() - old_N).exp()
    return -ratio_N.clamp(max=cap) * advantages_N * logprobs_N, (ratio_N > cap).int()


def sapo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """−(4/τ) · σ(τ(r − 1)) · A, τ by the sign of A: a soft gate for the clip. Gao et al. 2025, "SAPO" (2511.20347), eq. 5 and 6."""
    tau_N = torch.where(advantages_N > 0, tau_positive, tau_negative)
    ratio_N = (logprobs_N - old_N).exp()
    return -4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N


def gmpo(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, rows_N: Tensor, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Cut:
    """−A · exp(mean_t log r_t), log r_t ≤ ε_high where A > 0 and ≥ −ε_low elsewhere. Zhao et al. 2025, "GMPO" (2507.20673), algorithm 1."""
    log_ratio_N = logprobs_N - old_N
    wanted_N = advantages_N > 0
    clipped_N = torch.where(wanted_N, log_ratio_N.clamp(max=clip_high), log_ratio_N.clamp(min=-clip_low))
    cut_N = (wanted_N & (log_ratio_N > clip_high)).int() - (~wanted_N & (log_ratio_N < -clip_low)).int()
    return -advantages_N * row_mean(clipped_N, rows_N).exp(), cut_N


def topr(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, rows_N: Tensor) -> Cut:
    """−A·log π where A > 0; −sg[min(Π_t π/μ, 1)]·A·log π where A < 0. Le Roux et al. 2025, "TOPR" (2503.14286), eq. 8.

    The product is of the whole sequence. What was good is learned however old it is; what was bad only while it is still likely.
    """
    log_ratio_N = row_sum(logprobs_N.detach() - behaviour_N, rows_N)
    weights_N = torch.where(advantages_N < 0, log_ratio_N.clamp(max=0).exp(), 1.0)
    return -weights_N * advantages_N * logprobs_N, ((log_ratio_N > 0) & (advantages_N < 0)).int()


def dppo_tv(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    kl_tau: float = 0.0,
) -> Cut:
    """−keep · w · A + τ · (log w)², w = π / μ; not kept: A > 0 and π − μ > δ_high, A < 0 and π − μ < −δ_low. "DPPO" (2602.04879).

    The trust region is in probability and not in the ratio, so that rare tokens are free to move. The squared term is of
    "Kimi K2.5" (2602.02276); prime-rl takes τ = 0.001.
    """
    log_ratio_N = logprobs_N - behaviour_N
    moved_N = logprobs_N.detach().exp() - behaviour_N.exp()
    cut_N = ((advantages_N > 0) & (moved_N > mask_high)).int() - ((advantages_N < 0) & (moved_N < -mask_low)).int()
    return torch.where(cut_N == 0, -log_ratio_N.exp() * advantages_N, 0.0) + kl_tau * log_ratio_N.square(), cut_N


def _surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Cut:
    """−min(r·A, clip(r)·A). Schulman et al. 2017, "PPO" (1707.06347), eq. 7."""
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N)
    high_N = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    low_N = (ratio_N < 1 - clip_low) & (advantages_N < 0)
    return loss_N, high_N.int() - low_N.int()


def row_sum(x_N: Tensor, rows_N: Tensor) -> Tensor:
    """[N] for each token the sum over its row."""
    counts_B = rows_N.bincount()
    return x_N.new_zeros(len(counts_B)).index_add(0, rows_N, x_N)[rows_N]


def row_mean(x_N: Tensor, rows_N: Tensor) -> Tensor:
    """[N] for each token the mean over its row."""
    return row_sum(x_N, rows_N) / rows_N.bincount()[rows_N]


LOSSES: dict[LossName, Callable[..., Tensor | Cut]] = {
    "reinforce": reinforce,
    "grpo": grpo,
    "dapo": dapo,
    "bnpo": bnpo,
    "dr_grpo": dr_grpo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "topr": topr,
    "dppo_tv": dppo_tv,
}


# Aggregation: (rows_N, trained tokens, episodes of the global batch, token budget of an episode) → weights_N, float64.


def token_mean(rows_N: Tensor, total_tokens: int, total_episodes: int, length_budget: int) -> Tensor:
    """1 / (trained tokens of the global batch). DAPO (2503.14476), eq. 8."""
    return torch.full_like(rows_N, 1 / max(1, total_tokens), dtype=torch.float64)


def sequence_mean(rows_N: Tensor, total_tokens: int, total_episodes: int, length_budget: int) -> Tensor:
    """1 / (episodes of the global batch · trained tokens of the token's own episode). DeepSeekMath (2402.03300), eq. 3."""
    return 1 / (max(1, total_episodes) * rows_N.bincount()[rows_N].double())


def constant(rows_N: Tensor, total_tokens: int, total_episodes: int, length_budget: int) -> Tensor:
    """1 / (episodes of the global batch · most tokens of an episode). Dr. GRPO (2503.20783), section 3.2: no length is favoured.

    Raises:
        ValueError: the budget is not known.
    """
    if length_budget < 1:
        raise ValueError("trainer.aggregation=constant needs the token budget of an episode")
    return torch.full_like(rows_N, 1 / (max(1, total_episodes) * length_budget), dtype=torch.float64)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}
