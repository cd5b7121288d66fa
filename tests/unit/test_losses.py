"""Losses, corrections and old policies against loops over tokens written from the formulas, and against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from monarch_rl.algorithms.corrections import CORRECTIONS, PROXIMALS
from monarch_rl.algorithms.losses import AGGREGATIONS, LOSSES
from monarch_rl.algorithms.objective import Objective
from monarch_rl.trainer_config import Aggregation, CorrectionName, LossName, TrainerConfig, hyperparameters


@dataclass
class Token:
    logprob: Tensor
    """a scalar with gradient"""
    old: float
    behaviour: float
    advantage: float
    age: int

    @property
    def now(self) -> float:
        return float(self.logprob.detach())


Row = list[Token]


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """1 to 4 sequences of 1 to 5 tokens; signs of the advantages differ from row to row. Ratios from 1/9 to 9."""
    number = st.floats(-1.125, 1.125, width=32)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        advantage = draw(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.5]))
        row = []
        for _ in range(draw(st.integers(1, 5))):
            logprob = draw(st.floats(-4, -0.015625, width=32))
            old, behaviour = logprob - draw(number), logprob - 2 * draw(number)
            row.append(
                Token(torch.tensor(logprob, dtype=torch.float64, requires_grad=True), old, behaviour, advantage, draw(st.integers(0, 3)))
            )
        rows.append(row)
    return rows


def tensors(rows: list[Row]) -> dict[str, Tensor]:
    """As a loss gets them, in float64."""
    tokens = [t for row in rows for t in row]
    made = {
        "logprobs_N": [t.now for t in tokens],
        "old_N": [t.old for t in tokens],
        "behaviour_N": [t.behaviour for t in tokens],
        "advantages_N": [t.advantage for t in tokens],
    }
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in made.items()}
    given["logprobs_N"].requires_grad_()
    rows_N = torch.tensor([at for at, row in enumerate(rows) for _ in row])
    return given | {"rows_N": rows_N, "ages_N": torch.tensor([t.age for t in tokens])}


def call(function: Callable[..., Any], given: dict[str, Tensor], **more: Any) -> Any:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return function(**{name: given[name] for name in names}, **more)


# The losses, token by token


def constant(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def clipped(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    bounded = constant(1 - low) if ratio < 1 - low else constant(1 + high) if ratio > 1 + high else ratio
    return -ratio * a if float(ratio.detach()) * a <= float(bounded.detach()) * a else -bounded * a


def per_token(loss: Callable[[Token], Tensor]) -> Callable[[Row], list[Tensor]]:
    return lambda row: [loss(t) for t in row]


def ratio(t: Token) -> Tensor:
    return torch.exp(t.logprob - t.old)


def gspo(row: Row) -> list[Tensor]:
    total = sum(t.logprob - t.old for t in row)
    return [clipped(torch.exp(total / len(row)), t.advantage, 3e-4, 4e-4) for t in row]


def gspo_token(row: Row) -> list[Tensor]:
    sequence = math.exp(sum(t.now - t.old for t in row) / len(row))
    return [clipped(sequence * torch.exp(t.logprob) / math.exp(t.now), t.advantage, 3e-4, 4e-4) for t in row]


def dual_clip(t: Token) -> Tensor:
    loss = clipped(ratio(t), t.advantage, 0.2, 0.2)
    return constant(-3 * t.advantage) if t.advantage < 0 and loss > -3 * t.advantage else loss


def sapo(t: Token) -> Tensor:
    tau = 1.0 if t.advantage > 0 else 1.05
    return -t.advantage * (4 / tau) / (1 + torch.exp(-tau * (ratio(t) - 1)))


def gmpo(row: Row) -> list[Tensor]:
    total = constant(0.0)
    for t in row:
        log_ratio = t.logprob - t.old
        if t.advantage > 0 and log_ratio > 0.4:
            log_ratio = constant(0.4)
        if t.advantage <= 0 and log_ratio < -0.4:
            log_ratio = constant(-0.4)
        total = total + log_ratio
    return [-t.advantage * torch.exp(total / len(row)) for t in row]


def topr(row: Row) -> list[Tensor]:
    product = math.prod(math.exp(t.now - t.behaviour) for t in row)
    return [-t.advantage * t.logprob * (min(product, 1.0) if t.advantage < 0 else 1.0) for t in row]


def dppo_tv(t: Token) -> Tensor:
    moved = math.exp(t.now) - math.exp(t.behaviour)
    gone = moved > 0.2 if t.advantage > 0 else moved < -0.2 if t.advantage < 0 else False
    return 0 * t.logprob if gone else -t.advantage * torch.exp(t.logprob - t.behaviour)


GRPO = per_token(lambda t: clipped(ratio(t), t.advantage, 0.2, 0.2))
REFERENCE: dict[LossName, Callable[[Row], list[Tensor]]] = {
    "reinforce": per_token(lambda t: -t.advantage * t.logprob),
    "grpo": GRPO,
    "dapo": per_token(lambda t: clipped(ratio(t), t.advantage, 0.2, 0.28)),
    "bnpo": GRPO,
    "dr_grpo": GRPO,
    "dual_clip": per_token(dual_clip),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": per_token(lambda t: -min(math.exp(t.now - t.old), 5.0) * t.advantage * t.logprob),
    "sapo": per_token(sapo),
    "gmpo": gmpo,
    "topr": topr,
    "dppo_tv": per_token(dppo_tv),
}
BUDGET = 7


def weight(aggregation: Aggregation, rows: list[Row], row: Row) -> float:
    if aggregation == "token_mean":
        return 1 / sum(len(row) for row in rows)
    return 1 / len(rows) / (len(row) if aggregation == "sequence_mean" else BUDGET)


@pytest.mark.parametrize("name", get_args(LossName))
@settings(max_examples=15, deadline=None)
@given(rows=batches(), aggregation=st.sampled_from(get_args(Aggregation)))
def test_losses_are_those_of_the_formulas(name: LossName, rows: list[Row], aggregation: Aggregation) -> None:
    """Value and gradient of the batch loss, each loss with each aggregation."""
    given = tensors(rows)
    made = call(LOSSES[name], given)
    loss_N = made[0] if isinstance(made, tuple) else made
    loss = (loss_N * AGGREGATIONS[aggregation](given["rows_N"], len(loss_N), len(rows), BUDGET)).sum()
    (gradient_N,) = torch.autograd.grad(loss, given["logprobs_N"])
    expected = sum((weight(aggregation, rows, row) * one for row in rows for one in REFERENCE[name](row)), 0 * rows[0][0].logprob)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-9)
    gradient = [0.0 if t.logprob.grad is None else float(t.logprob.grad) for row in rows for t in row]
    assert gradient_N.tolist() == pytest.approx(gradient, abs=1e-6, rel=1e-9)


def example() -> dict[str, Tensor]:
    """2 × 3 tokens: π_old = μ = 1/5, r = 1, 4, 1/2 in both rows, A = 1 in the first and −1 in the second."""
    one = [0.2, 0.8, 0.1]
    given = {
        "logprobs_N": torch.tensor([math.log(p) for p in one * 2], dtype=torch.float64).requires_grad_(),
        "old_N": torch.full((6,), math.log(0.2), dtype=torch.float64),
        "advantages_N": torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64),
        "rows_N": torch.tensor([0, 0, 0, 1, 1, 1]),
    }
    return given | {"behaviour_N": given["old_N"]}


ROOT = 2 ** (1 / 3)  # of 1 · 4 · 1/2
LOGS = [math.log(0.2), math.log(0.8), math.log(0.1)]
LOW, HIGH = math.exp((0.4 - math.log(2)) / 3), math.exp((math.log(4) - 0.4) / 3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


BY_HAND: dict[LossName, tuple[list[float], list[float], list[int]]] = {
    # loss, its derivative by log π, what is cut
    "reinforce": ([-x for x in LOGS] + LOGS, [-1, -1, -1, 1, 1, 1], [0] * 6),
    "grpo": ([-1, -1.2, -0.5, 1, 4, 0.8], [-1, 0, -0.5, 1, 4, 0], [0, 1, 0, 0, 0, -1]),
    "dapo": ([-1, -1.28, -0.5, 1, 4, 0.8], [-1, 0, -0.5, 1, 4, 0], [0, 1, 0, 0, 0, -1]),
    "bnpo": ([-1, -1.2, -0.5, 1, 4, 0.8], [-1, 0, -0.5, 1, 4, 0], [0, 1, 0, 0, 0, -1]),
    "dr_grpo": ([-1, -1.2, -0.5, 1, 4, 0.8], [-1, 0, -0.5, 1, 4, 0], [0, 1, 0, 0, 0, -1]),
    "dual_clip": ([-1, -1.2, -0.5, 1, 3, 0.8], [-1, 0, -0.5, 1, 0, 0], [0, 1, 0, 0, 1, -1]),
    "gspo": ([-1.0004] * 3 + [ROOT] * 3, [0] * 3 + [ROOT] * 3, [1, 1, 1, 0, 0, 0]),
    "gspo_token": ([-1.0004] * 3 + [ROOT] * 3, [0] * 3 + [ROOT] * 3, [1, 1, 1, 0, 0, 0]),
    "cispo": ([-LOGS[0], -4 * LOGS[1], -LOGS[2] / 2, LOGS[0], 4 * LOGS[1], LOGS[2] / 2], [-1, -4, -0.5, 1, 4, 0.5], [0] * 6),
    "sapo": (
        [-2, -4 * sigmoid(3), -4 * sigmoid(-1 / 2), 4 / 1.05 * 0.5, 4 / 1.05 * sigmoid(3.15), 4 / 1.05 * sigmoid(-0.525)],
        [-1, -0.7228266, -0.4700074, 1, 0.6304446, 0.4670699],  # 4 · r · σ(x) · (1 − σ(x)), x = τ(r − 1)
        [0] * 6,
    ),
    # rows: exp((0 + 0.4 − ln 2) / 3), exp((0 + ln 4 − 0.4) / 3); a third of it from each of three tokens, none for one that is clipped
    "gmpo": ([-LOW] * 3 + [HIGH] * 3, [-LOW, 0, -LOW, HIGH, HIGH, 0], [0, 1, 0, 0, 0, -1]),
    "topr": ([-x for x in LOGS] + LOGS, [-1, -1, -1, 1, 1, 1], [0, 0, 0, 1, 1, 1]),
    "dppo_tv": ([-1, 0, -0.5, 1, 4, 0.5], [-1, 0, -0.5, 1, 4, 0.5], [0, 1, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", get_args(LossName))
def test_losses_by_hand(name: LossName) -> None:
    given = example()
    made = call(LOSSES[name], given)
    loss_N, cut_N = made if isinstance(made, tuple) else (made, torch.zeros(6))
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), given["logprobs_N"])
    loss, gradient, cut = BY_HAND[name]
    assert loss_N.tolist() == pytest.approx(loss, abs=1e-6)
    assert gradient_N.tolist() == pytest.approx(gradient, abs=1e-6)
    assert cut_N.tolist() == cut


def test_hyperparameters_reach_the_formula() -> None:
    given = example()
    assert call(LOSSES["cispo"], given, cap=3.0)[0][1].item() == pytest.approx(-3 * LOGS[1])
    assert call(LOSSES["cispo"], given, cap=3.0)[1].tolist() == [0, 1, 0, 0, 1, 0]
    assert call(LOSSES["dapo"], given, clip_high=1.0)[0][1].item() == -2
    assert call(LOSSES["dppo_tv"], given, mask_low=0.05, kl_tau=0.1)[0][5].item() == pytest.approx(0.1 * math.log(2) ** 2)


# Corrections


def sequence_log(row: Row) -> float:
    return sum(t.old - t.behaviour for t in row)


def rho(t: Token) -> float:
    return math.exp(t.old - t.behaviour)


WEIGHTS: dict[CorrectionName, Callable[[Token, Row], float]] = {
    "none": lambda t, row: 1.0,
    "tis": lambda t, row: min(rho(t), 2.0),
    "tis_sequence": lambda t, row: min(math.exp(sequence_log(row)), 2.0),
    "icepop": lambda t, row: rho(t) if 0.5 <= rho(t) <= 5 else 0.0,
    "mask_sequence": lambda t, row: math.exp(sequence_log(row)) if math.exp(sequence_log(row)) <= 3 else 0.0,
    "mask_geometric": lambda t, row: math.exp(sequence_log(row) / len(row)) if abs(sequence_log(row)) <= 0.1 * len(row) else 0.0,
    "opsm": lambda t, row: 0.0 if t.advantage < 0 and sum(x.behaviour - x.now for x in row) > 0.5 * len(row) else 1.0,
    "mask_age": lambda t, row: float(t.age <= 1),
}


@pytest.mark.parametrize("name", get_args(CorrectionName))
@settings(max_examples=20, deadline=None)
@given(rows=batches())
def test_corrections_are_those_of_the_formulas(name: CorrectionName, rows: list[Row]) -> None:
    made = call(CORRECTIONS[name], tensors(rows)).tolist()
    assert made == pytest.approx([WEIGHTS[name](t, row) for row in rows for t in row], abs=1e-6, rel=1e-9)


def test_corrections_by_hand() -> None:
    """2 × 3 tokens: ρ = 1, 3/4, 16/3 in the first row, 1, 1/5, 1 in the second; A = −1; log μ − log π = 0.9 and 0.3 on average."""
    rho_N = torch.tensor([1, 3 / 4, 16 / 3, 1, 1 / 5, 1], dtype=torch.float64)
    given = {
        "behaviour_N": torch.full((6,), -2.0, dtype=torch.float64),
        "logprobs_N": torch.tensor([-2.9, -2.9, -2.9, -2.9, -2, -2], dtype=torch.float64),
        "old_N": rho_N.log() - 2,
        "advantages_N": torch.full((6,), -1.0, dtype=torch.float64),
        "rows_N": torch.tensor([0, 0, 0, 1, 1, 1]),
        "ages_N": torch.tensor([0, 1, 2, 1, 1, 3]),
    }
    expected: dict[CorrectionName, list[float]] = {
        "none": [1] * 6,
        "tis": [1, 0.75, 2, 1, 0.2, 1],
        "tis_sequence": [2, 2, 2, 0.2, 0.2, 0.2],
        "icepop": [1, 0.75, 0, 1, 0, 1],
        "mask_sequence": [0, 0, 0, 0.2, 0.2, 0.2],
        "mask_geometric": [0] * 6,
        "opsm": [0, 0, 0, 1, 1, 1],
        "mask_age": [1, 1, 0, 1, 1, 0],
    }
    for name, weights in expected.items():
        assert call(CORRECTIONS[name], given).tolist() == pytest.approx(weights), name
    third = 4 ** (1 / 3)
    wide = call(CORRECTIONS["mask_geometric"], given, drift=0.5)
    assert wide.tolist() == pytest.approx([third] * 3 + [0] * 3)  # |log| is ln(4) / 3 = 0.46 and ln(5) / 3 = 0.54


def test_a_product_that_overflows_masks_and_is_no_nan() -> None:
    given = {"old_N": torch.zeros(3), "behaviour_N": torch.full((3,), -60.0), "rows_N": torch.zeros(3, dtype=torch.long)}
    assert call(CORRECTIONS["mask_sequence"], given).tolist() == [0, 0, 0]
    assert call(CORRECTIONS["tis_sequence"], given).tolist() == [2, 2, 2]
    topr_given = {
        "logprobs_N": given["old_N"],
        "behaviour_N": given["behaviour_N"],
        "advantages_N": -torch.ones(3),
        "rows_N": given["rows_N"],
    }
    assert call(LOSSES["topr"], topr_given)[0].tolist() == [0, 0, 0]


# The old policy


@settings(max_examples=20, deadline=None)
@given(rows=batches())
def test_old_policies_are_those_of_the_formulas(rows: list[Row]) -> None:
    given = tensors(rows)
    tokens = [t for row in rows for t in row]
    made = {n: old(given["logprobs_N"].detach(), given["behaviour_N"], given["ages_N"]).tolist() for n, old in PROXIMALS.items()}
    assert made["auto"] == [t.now if t.age == 0 else t.behaviour for t in tokens]
    assert made["sampler"] == [t.behaviour for t in tokens]
    assert made["recomputed"] == [t.now for t in tokens]
    between = [t.now if t.age == 0 else t.behaviour + (t.age - 1) / t.age * (t.now - t.behaviour) for t in tokens]
    assert made["interpolated"] == pytest.approx(between)


@pytest.mark.parametrize(
    ("settings_", "gradients"),
    [
        # w = π / μ = 4 at A = 1 and A = −1, both of age 2; the derivative of the loss by log π, times N = 2
        ({"loss": "dapo"}, [0, 4]),
        ({"loss": "dapo", "correction": "tis"}, [0, 4]),
        ({"loss": "dapo", "proximal": "recomputed"}, [-1, 1]),
        ({"loss": "dapo", "proximal": "recomputed", "correction": "tis"}, [-2, 2]),
        ({"loss": "dapo", "proximal": "recomputed", "correction": "icepop"}, [-4, 4]),
        # one step's worth is √4 = 2, and so is what is left to the correction
        ({"loss": "dapo", "proximal": "interpolated", "correction": "icepop"}, [0, 4]),
        ({"loss": "dapo", "proximal": "interpolated", "correction": ["icepop", "mask_age"]}, [0, 0]),
        ({"loss": "reinforce"}, [-1, 1]),
        ({"loss": "reinforce", "correction": "tis"}, [-2, 2]),
        ({"loss": "cispo", "correction": "tis"}, [-4, 4]),
        # a loss that is defined by π / μ leaves nothing to correct
        ({"loss": "topr", "proximal": "recomputed", "correction": "tis"}, [-1, 1]),
        ({"loss": "dppo_tv", "loss_args": {"mask_high": 1.0}, "correction": "tis"}, [-4, 4]),
        ({"loss": "dual_clip", "aggregation": "token_mean"}, [0, 0]),
    ],
)
def test_ratio_and_corrections_cover_the_whole_gap_once(settings_: dict[str, Any], gradients: list[float]) -> None:
    """π / μ = (π / π_old) · (π_old / μ): what the loss's ratio does not cover is left to the corrections, and nothing is covered twice."""
    logprobs_N = torch.log(torch.tensor([0.8, 0.8], dtype=torch.float64)).requires_grad_()
    behaviour_N, ages_N = torch.log(torch.tensor([0.2, 0.2], dtype=torch.float64)), torch.tensor([2, 2])
    advantages_N, rows_N = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([0, 1])
    objective = Objective.of(TrainerConfig(**settings_))
    terms = objective.terms(logprobs_N, behaviour_N, advantages_N, rows_N, ages_N, total_tokens=2, total_episodes=2)
    (gradient_N,) = torch.autograd.grad(2 * terms.loss_N.sum(), logprobs_N)
    assert gradient_N.tolist() == pytest.approx(gradients)


def test_at_age_zero_nothing_of_the_sampler_is_in_the_loss() -> None:
    """Whatever the engine's kernels say, the ratio is 1 and no default correction weighs it."""
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    objective = Objective.of(TrainerConfig())
    for behaviour in ([-1.5, -0.1], [-9.0, -9.0]):
        terms = objective.terms(
            logprobs_N,
            torch.tensor(behaviour),
            torch.tensor([1.0, -1.0]),
            torch.tensor([0, 1]),
            torch.tensor([0, 0]),
            total_tokens=2,
            total_episodes=2,
        )
        assert terms.loss_N.tolist() == [-0.5, 0.5]


# Aggregation


def test_aggregations_by_hand() -> None:
    """Case 49: 25 of 30 tokens are trained, so /25; case 52: the totals are those of the global batch."""
    rows_N = torch.tensor([0, 0, 0, 2])
    assert AGGREGATIONS["token_mean"](rows_N, 25, 9, 0).tolist() == pytest.approx([1 / 25] * 4)
    assert AGGREGATIONS["sequence_mean"](rows_N, 25, 9, 0).tolist() == pytest.approx([1 / 27] * 3 + [1 / 9])
    assert AGGREGATIONS["constant"](rows_N, 25, 9, 50).tolist() == pytest.approx([1 / 450] * 4)


def test_the_constant_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"trainer\.aggregation=constant needs the token budget"):
        AGGREGATIONS["constant"](torch.tensor([0]), 1, 1, 0)


@pytest.mark.parametrize("name", get_args(LossName))
def test_no_tokens_are_no_loss_and_stay_connected(name: LossName) -> None:
    """Case 49: an empty micro-batch has loss 0 and takes part in the backward pass."""
    logprobs_N = torch.zeros(0, requires_grad=True)
    objective = Objective.of(TrainerConfig(loss=name, correction=list(get_args(CorrectionName))), length_budget=5)
    none = torch.zeros(0, dtype=torch.long)
    terms = objective.terms(logprobs_N, torch.zeros(0), torch.zeros(0), none, none, total_tokens=0, total_episodes=0)
    terms.loss_N.sum().backward()
    assert terms.loss_N.sum().item() == 0
    assert logprobs_N.grad is not None


def test_tables_hold_exactly_the_names_of_the_configuration() -> None:
    assert list(LOSSES) == list(get_args(LossName)) == list(REFERENCE) == list(BY_HAND)
    assert list(CORRECTIONS) == list(get_args(CorrectionName)) == list(WEIGHTS)
    assert list(AGGREGATIONS) == list(get_args(Aggregation))
    assert hyperparameters("loss", "dapo") == ("clip_low", "clip_high")
