"""`token_logprobs` against plain log_softmax and autograd: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.algorithms.logprobs import token_logprobs

VOCABULARY = 60


def inputs(tokens: int, dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, Tensor, torch.nn.Linear, Tensor]:
    torch.manual_seed(0)
    hidden_ND = torch.randn(tokens, 5, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(5, VOCABULARY, bias=bias, dtype=dtype)
    return hidden_ND, torch.randint(VOCABULARY, (tokens,)), head, torch.linspace(0.5, 1.7, tokens)


def plain(hidden_ND: Tensor, targets_N: Tensor, head: torch.nn.Linear, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = (head(hidden_ND) / temperatures_N[:, None]).log_softmax(-1)
    return logprobs_NV[torch.arange(len(targets_N)), targets_N], -(logprobs_NV.exp() * logprobs_NV).sum(-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("use", ["logprobs", "entropy", "both"])
def test_values_and_gradients_are_those_of_log_softmax(chunk: int, bias: bool, use: str) -> None:
    def loss(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        terms = {"logprobs": logprobs_N.square(), "entropy": entropy_N.cos()}
        return (sum(terms.values()) if use == "both" else terms[use]).sum()  # type: ignore[union-attr]

    hidden_ND, targets_N, head, temperatures_N = inputs(7, bias=bias)
    actual, expected = token_logprobs(hidden_ND, targets_N, head, temperatures_N, chunk), plain(hidden_ND, targets_N, head, temperatures_N)
    torch.testing.assert_close(actual, expected, atol=1e-13, rtol=1e-13)
    parameters = [hidden_ND, *head.parameters()]
    gradients, others = (torch.autograd.grad(loss(*values), parameters) for values in (actual, expected))
    torch.testing.assert_close(gradients, others, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "result"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_results_are_float32_at_least(dtype: torch.dtype, result: torch.dtype) -> None:
    hidden_ND, targets_N, head, temperatures_N = inputs(9, dtype)
    for chunk in (4, 9):
        values = token_logprobs(hidden_ND, targets_N, head, temperatures_N, chunk)
        assert {value.dtype for value in values} == {result}
        gradient = torch.autograd.grad(values[0].sum(), head.weight)[0]
        expected = torch.autograd.grad(plain(hidden_ND, targets_N, head, temperatures_N)[0].sum(), head.weight)[0]
        assert gradient.dtype == dtype
        assert torch.cosine_similarity(gradient.flatten().float(), expected.flatten().float(), dim=0) > 0.9999


def test_large_logits_do_not_overflow() -> None:
    hidden_ND, targets_N, head, temperatures_N = inputs(64)
    with torch.no_grad():
        head.bias += 300
        exact = plain(hidden_ND, targets_N, head, temperatures_N)[0]
        close = token_logprobs(hidden_ND.float(), targets_N, head.float(), temperatures_N, 16)[0]
    assert (close - exact).abs().max() < 4 * 600 * torch.finfo(torch.float32).eps  # what the logits themselves are off


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_logits_of_a_long_row_never_exist_at_once() -> None:
    hidden_ND, targets_N, head, temperatures_N = inputs(50)
    with Largest() as seen:
        logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, head, temperatures_N, 8)
        (logprobs_N + entropy_N).sum().backward()
    assert seen.elements == 8 * VOCABULARY


def test_no_tokens_stay_connected_to_the_graph() -> None:
    hidden_ND, targets_N, head, temperatures_N = inputs(0)
    token_logprobs(hidden_ND, targets_N, head, temperatures_N, 8)[0].sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.abs().max() == 0
