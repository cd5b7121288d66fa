"""Log-probabilities: values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from monarch_rl.algorithms.logprobs import mismatch_kl, token_logprobs


def test_mismatch_kl_is_accurate_for_tiny_differences() -> None:
    delta = torch.tensor([0.0, 2e-6, -2e-6, 0.5, -0.5])
    expected = [0.0, 2e-12, 2e-12, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5]
    assert mismatch_kl(delta, torch.zeros(5)).tolist() == pytest.approx(expected, rel=0.06, abs=0)
    assert (mismatch_kl(delta, torch.zeros(5)) >= 0).all()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_logprobs_and_gradients_do_not_depend_on_the_chunk(chunk: int) -> None:
    torch.manual_seed(0)
    hidden_ND, targets_N = torch.randn(7, 5, requires_grad=True), torch.randint(11, (7,))
    head, temperatures_N = torch.nn.Linear(5, 11), torch.linspace(0.5, 1.7, 7)
    logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, head, temperatures_N, chunk)
    expected_NV = torch.log_softmax(head(hidden_ND) / temperatures_N[:, None], -1)
    torch.testing.assert_close(logprobs_N, expected_NV[torch.arange(7), targets_N])
    torch.testing.assert_close(entropy_N, -(expected_NV.exp() * expected_NV).sum(-1))
    inputs = [hidden_ND, head.weight, head.bias]
    actual = torch.autograd.grad(logprobs_N.square().sum(), inputs)
    expected = torch.autograd.grad(expected_NV[torch.arange(7), targets_N].square().sum(), inputs)
    torch.testing.assert_close(actual, expected)


def test_logits_of_a_long_row_never_exist_at_once() -> None:
    seen: list[int] = []
    head = torch.nn.Linear(4, 6)
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(len(output)))
    hidden_ND = torch.randn(50, 4, requires_grad=True)
    token_logprobs(hidden_ND, torch.zeros(50, dtype=torch.long), head, torch.ones(len(hidden_ND)), 8)[0].sum().backward()
    assert max(seen) == 8


def test_no_tokens_stay_connected_to_the_graph() -> None:
    hidden_ND = torch.randn(0, 4, requires_grad=True)
    head = torch.nn.Linear(4, 6)
    token_logprobs(hidden_ND, torch.zeros(0, dtype=torch.long), head, torch.ones(len(hidden_ND)), 8)[0].sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.abs().max() == 0
