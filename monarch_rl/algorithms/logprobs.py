"""Log-probabilities of given tokens from hidden states, without logits of a whole long row in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [N, D] → logits [N, V]."""

LEFT_OUT = -1e30
"""Logit of what could not be drawn: exp gives exactly 0, and unlike infinity it does no harm to products with 0."""


class Kept(NamedTuple):
    """Which ids could be drawn for each token: `ids_M[offsets_N1[n]:offsets_N1[n + 1]]`, or all where that is empty."""

    ids_M: Tensor
    offsets_N1: Tensor


def token_logprobs(
    hidden_ND: Tensor, targets_N: Tensor, head: Head, temperatures_N: Tensor, chunk: int, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, both [N] float32, of softmax(logits / temperature), the temperature of each token.

    With `kept` both are of the distribution over the ids that could be drawn.

    Logits exist for `chunk` tokens at a time; where there are more, each chunk is computed again in the backward pass.
    The entropy carries no gradient. N = 0 is allowed and stays connected to the graph.
    """
    if len(targets_N) <= chunk:
        return _of_chunk(hidden_ND, targets_N, head, temperatures_N, kept)
    tokens = zip(hidden_ND.split(chunk), targets_N.split(chunk), temperatures_N.split(chunk), strict=True)
    parts = [
        checkpoint(
            _of_chunk, hidden, targets, head, temperatures, _cut(kept, at * chunk, chunk), use_reentrant=False, preserve_rng_state=False
        )
        for at, (hidden, targets, temperatures) in enumerate(tokens)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _cut(kept: Kept | None, start: int, tokens: int) -> Kept | None:
    if kept is None:
        return None
    offsets = kept.offsets_N1[start : start + tokens + 1]
    return Kept(kept.ids_M[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def leave_out_(logits_NV: Tensor, kept: Kept) -> None:
    """Set the logits of ids that could not be drawn to `LEFT_OUT`."""
    lengths_N = kept.offsets_N1.diff()
    left_out_NV = (lengths_N > 0)[:, None].repeat(1, logits_NV.shape[1])
    left_out_NV[torch.repeat_interleave(lengths_N), kept.ids_M] = False
    logits_NV.masked_fill_(left_out_NV, LEFT_OUT)


def _of_chunk(hidden_ND: Tensor, targets_N: Tensor, head: Head, temperatures_N: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_ND).float() / temperatures_N[:, None]
    if kept is not None:
        leave_out_(logits_NV, kept)
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
