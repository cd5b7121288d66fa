"""Log-probabilities of given tokens from hidden states, without logits of a whole long row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEFT_OUT = -1e30
"""Logit of what could not be drawn: exp gives exactly 0, and unlike infinity it does no harm to products with 0."""


class Kept(NamedTuple):
    """Which ids could be drawn for each token: `ids_M[offsets_N1[n]:offsets_N1[n + 1]]`, or all where that is empty."""

    ids_M: Tensor
    offsets_N1: Tensor

    def of(self, rows: slice) -> Kept:
        """Of some tokens."""
        offsets_N1 = self.offsets_N1[rows.start : rows.stop + 1]
        return Kept(self.ids_M[int(offsets_N1[0]) : int(offsets_N1[-1])], offsets_N1 - offsets_N1[0])


def token_logprobs(
    hidden_ND: Tensor, targets_N: Tensor, head: nn.Linear, temperatures_N: Tensor, chunk: int, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy, both [N], of softmax(head(hidden) / temperature), the temperature of each token.

    With `kept` both are of the distribution over the ids that could be drawn.

    Logits exist for `chunk` tokens at a time; all chunks but the last are computed again in the backward pass, one product with
    the head more. Both results carry a gradient, are float32 (float64 where the logits are) and, for N = 0, stay
    connected to the graph.
    """
    apply: Any = _TokenLogprobs.apply  # torch gives it no type
    logprobs_N, entropy_N = apply(hidden_ND, head.weight, head.bias, targets_N, temperatures_N, chunk, kept)
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    """One chunk of logits at a time, written in place, and one gradient of the head: autograd would hold several of each."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        targets_N, temperatures_N, chunk, kept = rest
        none_N = hidden_ND.new_empty(0, dtype=_at_least_float32(hidden_ND))
        parts, ctx.logits_NV = [(none_N, none_N, none_N)], None
        for rows in _chunks(len(targets_N), chunk):
            ctx.logits_NV = None  # before the next are made; the last ones stay
            ctx.logits_NV = _logits(hidden_ND[rows], weight_VD, bias_V, temperatures_N[rows], kept and kept.of(rows))
            parts.append(_of_chunk(ctx.logits_NV, targets_N[rows]))
        logprobs_N, entropy_N, normaliser_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, entropy_N, normaliser_N)
        ctx.chunk, ctx.kept = chunk, kept
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, entropy_N, normaliser_N = ctx.saved_tensors
        grad_N = torch.zeros_like(normaliser_N) if grad_N is None else grad_N
        hidden_grad_ND = torch.zeros_like(hidden_ND)
        # A head is frozen where adapters are trained.
        weight_grad_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        bias_grad_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] and bias_V is not None else None
        for rows in reversed(_chunks(len(targets_N), ctx.chunk)):
            logits_NV, ctx.logits_NV = ctx.logits_NV, None
            if logits_NV is None:
                logits_NV = _logits(hidden_ND[rows], weight_VD, bias_V, temperatures_N[rows], ctx.kept and ctx.kept.of(rows))
            entropy = None if grad_entropy_N is None else (entropy_N[rows], grad_entropy_N[rows])
            grad_NV = _logits_gradient(logits_NV.sub_(normaliser_N[rows, None]), targets_N[rows], grad_N[rows], entropy)
            grad_NV = grad_NV.div_(temperatures_N[rows, None]).to(weight_VD.dtype)
            torch.mm(grad_NV, weight_VD, out=hidden_grad_ND[rows])
            if weight_grad_VD is not None:
                weight_grad_VD.addmm_(grad_NV.T, hidden_ND[rows])
            if bias_grad_V is not None:
                bias_grad_V += grad_NV.sum(0)
            del logits_NV, grad_NV
        return hidden_grad_ND, weight_grad_VD, bias_grad_V, None, None, None, None


def _of_chunk(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, entropy, and what turns a logit into a log-probability."""
    weights_NV = logits_NV.exp()
    total_N = weights_NV.sum(-1)
    normaliser_N = total_N.log()
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - normaliser_N
    mean_N = torch.einsum("nv,nv->n", weights_NV, logits_NV) / total_N  # without the products in memory, which vecdot would hold
    return logprobs_N, normaliser_N - mean_N, normaliser_N


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(tokens, start + chunk)) for start in range(0, tokens, chunk)]


def leave_out_(logits_NV: Tensor, kept: Kept) -> None:
    """Set the logits of ids that could not be drawn to `LEFT_OUT`."""
    lengths_N = kept.offsets_N1.diff()
    left_out_NV = (lengths_N > 0)[:, None].repeat(1, logits_NV.shape[1])
    left_out_NV[torch.repeat_interleave(lengths_N), kept.ids_M] = False
    logits_NV.masked_fill_(left_out_NV, LEFT_OUT)


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperatures_N: Tensor, kept: Kept | None) -> Tensor:
    """Less the largest of each token, so that no digits are lost where all are large."""
    logits_NV = nn.functional.linear(hidden_ND, weight_VD, bias_V)
    logits_NV = logits_NV.to(_at_least_float32(logits_NV)).div_(temperatures_N[:, None])
    if kept is not None:
        leave_out_(logits_NV, kept)
    return logits_NV.sub_(logits_NV.amax(-1, keepdim=True))


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits_gradient(logprobs_NV: Tensor, targets_N: Tensor, grad_N: Tensor, entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """g · (1[v = target] − p_v) of g · log p_target, and −g · p_v · (log p_v + H) of g · H, in place of log p.

    `entropy`: H and its g.
    """
    if entropy is None:
        scaled_NV = logprobs_NV.exp_().mul_(-grad_N[:, None])
    else:
        entropy_N, grad_entropy_N = entropy
        factor_NV = (logprobs_NV + entropy_N[:, None]).mul_(-grad_entropy_N[:, None]).sub_(grad_N[:, None])
        scaled_NV = logprobs_NV.exp_().mul_(factor_NV)
    return scaled_NV.scatter_add_(-1, targets_N[:, None], grad_N[:, None])


def mismatch_kl(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """[N] k3 estimate of KL(μ ‖ π) from tokens of the sampler μ: e^Δ − 1 − Δ ≥ 0, Δ = log π − log μ.

    Schulman 2020, "Approximating KL Divergence". `expm1` keeps it exact for tiny Δ, where e^Δ − 1 cancels.
    """
    delta_N = logprobs_N - behaviour_N
    return torch.expm1(delta_N) - delta_N
