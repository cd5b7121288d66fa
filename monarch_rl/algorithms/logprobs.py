"""Log-probabilities of given tokens from hidden states, without logits of a whole long row in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [N, D] → logits [N, V]."""


def token_logprobs(hidden_ND: Tensor, targets_N: Tensor, head: Head, temperatures_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, both [N] float32, of softmax(logits / temperature), the temperature of each token.

    Logits exist for `chunk` tokens at a time; where there are more, each chunk is computed again in the backward pass.
    The entropy carries no gradient. N = 0 is allowed and stays connected to the graph.
    """
    if len(targets_N) <= chunk:
        return _of_chunk(hidden_ND, targets_N, head, temperatures_N)
    parts = [
        checkpoint(_of_chunk, hidden, targets, head, temperatures, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets, temperatures in zip(hidden_ND.split(chunk), targets_N.split(chunk), temperatures_N.split(chunk), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _of_chunk(hidden_ND: Tensor, targets_N: Tensor, head: Head, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_ND).float() / temperatures_N[:, None]
    logprobs_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).sum(-1), entropy_N  # sum, not squeeze: FSDP2's hooks want no view


def mismatch_kl(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """[N] k3 estimate of KL(μ ‖ π) from tokens of the sampler μ: e^Δ − 1 − Δ ≥ 0, Δ = log π − log μ.

    Schulman 2020, "Approximating KL Divergence". `expm1` keeps it exact for tiny Δ, where e^Δ − 1 cancels.
    """
    delta_N = logprobs_N - behaviour_N
    return torch.expm1(delta_N) - delta_N
