"""Advantages, losses, corrections, log-probabilities: hand-computed values and gradients."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from monarch_rl.algorithms.advantages import ADVANTAGES, grpo, mean, rloo
from monarch_rl.algorithms.corrections import CORRECTIONS, tis
from monarch_rl.algorithms.logprobs import mismatch_kl
from monarch_rl.algorithms.losses import AGGREGATIONS, LOSSES, dapo, old_logprobs, reinforce
from monarch_rl.algorithms.losses import grpo as grpo_loss
from monarch_rl.config import AdvantageName, CorrectionName, LossName, schema

NAN = math.nan


def rewards(*groups: list[float]) -> Tensor:
    return torch.tensor(groups, dtype=torch.float64)


def test_tables_hold_exactly_the_names_of_the_configuration() -> None:
    assert set(ADVANTAGES) == set(get_args(AdvantageName))
    assert set(LOSSES) == set(get_args(LossName))
    assert set(CORRECTIONS) == set(get_args(CorrectionName))
    assert set(AGGREGATIONS) == set(schema()["trainer.aggregation"].choices)


def test_advantages_by_hand() -> None:
    """Case 55: the whole group makes the baseline."""
    group = rewards([1, 0, 0, 3])  # mean 1, unbiased variance (0 + 1 + 1 + 4) / 3 = 2
    assert mean(group).tolist() == [[0, -1, -1, 2]]
    torch.testing.assert_close(grpo(group), rewards([0, -1, -1, 2]) / (math.sqrt(2) + 1e-4))
    torch.testing.assert_close(rloo(group), rewards([0, -4 / 3, -4 / 3, 8 / 3]))


def test_rloo_is_reward_less_the_mean_of_the_others() -> None:
    assert rloo(rewards([1, 0, 5])).tolist()[0] == pytest.approx([1 - 2.5, 0 - 3, 5 - 0.5])


@pytest.mark.parametrize("name", get_args(AdvantageName))
def test_unscorable_episodes_leave_the_baseline(name: AdvantageName) -> None:
    """Cases 44, 46: [1, 0, None] → baseline over two, the third gets 0, its peers do not notice it."""
    advantages_PG = ADVANTAGES[name](rewards([1, 0, NAN]))
    assert advantages_PG[0, 2] == 0
    torch.testing.assert_close(advantages_PG[:, :2], ADVANTAGES[name](rewards([1, 0])))


@pytest.mark.parametrize("name", get_args(AdvantageName))
@pytest.mark.parametrize("group", [[0.1] * 8, [0.1] * 7 + [NAN], [5.0], [NAN], [NAN, NAN], [2.0, NAN], [1e300, 1e300], [math.inf, 1.0]])
def test_groups_with_nothing_to_compare_get_exactly_zero(name: AdvantageName, group: list[float]) -> None:
    assert ADVANTAGES[name](rewards(group)).tolist() == [[0] * len(group)]


@pytest.mark.parametrize("others", [0.95, 0.95 + 1e-12, 1e8])
def test_advantages_stay_under_their_documented_bounds(others: float) -> None:
    """Case 47: [0, .95 × 7] gave −2075 by E[x²] − E[x]²."""
    group = rewards([0] + [others] * 7)
    assert grpo(group).abs().max() <= 7 / math.sqrt(8)
    assert rloo(group).abs().max() <= others * (1 + 1e-12)


def test_old_logprobs_are_the_trainers_own_at_age_zero_only() -> None:
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    old_N = old_logprobs(logprobs_N, torch.tensor([-5.0, -6.0]), torch.tensor([0, 1]))
    assert old_N.tolist() == [-1, -6]
    assert not old_N.requires_grad


def loss_and_gradient(name: LossName, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, d loss / d log π and whether clipped, for one token with π_old = 1/2."""
    old_N = torch.tensor([math.log(0.5)])
    logprobs_N = (old_N + math.log(ratio)).requires_grad_()
    loss_N, clipped_N = LOSSES[name](logprobs_N, old_N, torch.tensor([advantage]), 0.2, 0.28)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return loss_N.item(), gradient_N.item(), bool(clipped_N.item())


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "gradient", "clips"),
    [
        ("dapo", 1.0, 2.0, -2.0, -2.0, False),
        ("dapo", 1.25, 2.0, -2.5, -2.5, False),
        ("dapo", 1.5, 2.0, -2.56, 0.0, True),
        ("dapo", 0.5, 2.0, -1.0, -1.0, False),
        ("dapo", 0.5, -2.0, 1.6, 0.0, True),
        ("dapo", 1.5, -2.0, 3.0, 3.0, False),
        ("grpo", 1.25, 2.0, -2.4, 0.0, True),
        ("grpo", 0.5, -2.0, 1.6, 0.0, True),
        ("grpo", 1.1, 2.0, -2.2, -2.2, False),
        ("reinforce", 1.5, 2.0, -2 * math.log(0.75), -2.0, False),
    ],
)
def test_losses_by_hand(name: LossName, ratio: float, advantage: float, loss: float, gradient: float, clips: bool) -> None:
    assert loss_and_gradient(name, ratio, advantage) == (pytest.approx(loss, rel=1e-5), pytest.approx(gradient, rel=1e-5), clips)


def test_losses_differ() -> None:
    tokens = (torch.tensor([-0.4, -1.5]), torch.tensor([-0.7, -0.7]), torch.tensor([1.0, -1.0]), 0.2, 0.28)
    assert len({tuple(loss(*tokens)[0].tolist()) for loss in (reinforce, dapo, grpo_loss)}) == 3


def test_aggregations_by_hand() -> None:
    """Case 49: 25 of 30 tokens are trained, so /25; case 52: the totals are those of the global batch."""
    rows_N = torch.tensor([0, 0, 0, 2])
    assert AGGREGATIONS["token_mean"](rows_N, 25, 9).tolist() == pytest.approx([1 / 25] * 4)
    assert AGGREGATIONS["sequence_mean"](rows_N, 25, 9).tolist() == pytest.approx([1 / 27] * 3 + [1 / 9])


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_aggregations_of_nothing_are_empty_and_finite(name: str) -> None:
    assert AGGREGATIONS[name](torch.zeros(0, dtype=torch.long), 0, 0).tolist() == []


def test_truncated_importance_sampling_by_hand() -> None:
    old_N, behaviour_N = torch.log(torch.tensor([0.2, 0.9, 0.5])).requires_grad_(), torch.log(torch.tensor([0.4, 0.1, 0.5]))
    assert tis(old_N, behaviour_N).tolist() == pytest.approx([0.5, 2.0, 1.0])
    assert not tis(old_N, behaviour_N).requires_grad
    assert CORRECTIONS["none"](old_N, behaviour_N).tolist() == [1, 1, 1]


def test_mismatch_kl_is_accurate_for_tiny_differences() -> None:
    delta = torch.tensor([0.0, 2e-6, -2e-6, 0.5, -0.5])
    expected = [0.0, 2e-12, 2e-12, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5]
    assert mismatch_kl(delta, torch.zeros(5)).tolist() == pytest.approx(expected, rel=0.06, abs=0)
    assert (mismatch_kl(delta, torch.zeros(5)) >= 0).all()
