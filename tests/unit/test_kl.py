"""KL to a reference and entropy bonus: values and gradients by hand, in the loss and in the reward, and the reference's life."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from monarch_rl.algorithms.kl import KL
from monarch_rl.checkpoint import load
from monarch_rl.config import Config, ConfigError, validate
from monarch_rl.groups import make_shards
from monarch_rl.learner import Learner
from monarch_rl.models import load_causal_lm
from monarch_rl.trainer_config import KLName, TrainerConfig
from monarch_rl.types import Episode, Group, Prompt, Version
from tests.batches import episode, plain_logprobs, sampled_by, save, shards, small_model

STEP = 2
TEMPERATURE = 0.7
BETA = 0.4


@pytest.fixture
def groups() -> list[list[Episode]]:
    """Tokens of ages 0 and 1, an unscorable episode."""
    draw = random.Random(3)
    groups = [[episode(draw.randint(1, 9), draw.randint(1, 9), draw, reward=draw.random()) for _ in range(3)] for _ in range(2)]
    groups[0][1].reward = None
    sampled_by(small_model(), [e for group in groups for e in group], TEMPERATURE, lambda: draw.gauss(0, 0.3))
    for e in groups[1]:
        e.versions_T[-1] = Version(0, 1).pack()
    return groups


def learner(mesh: DeviceMesh, reference_seed: int = 1, **config: Any) -> Learner:
    settings = TrainerConfig(**{"max_grad_norm": 0.0, "warmup_steps": 0, "lr": 0.0, **config})
    reference = small_model(reference_seed) if settings.kl else None
    return Learner(small_model(), settings, total_steps=10, device_mesh=mesh, reference=reference)


def gradients(rank: Learner) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in rank.model.causal_lm.named_parameters()}


def test_the_table_holds_the_names_of_the_configuration() -> None:
    assert set(KL) == set(get_args(KLName))


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),
        ("unbiased", 1.5 * (0.5 - 1 + math.log(2)), 1.5 * math.log(2)),
    ],
)
def test_estimators_by_hand(name: KLName, value: float, gradient: float) -> None:
    """A token with π = 0.6, π_ref = 0.3 and π_old = 0.4; the gradient is by log π."""
    logprobs_N = torch.tensor([math.log(0.6)], dtype=torch.float64, requires_grad=True)
    kl_N = KL[name](logprobs_N, torch.tensor([math.log(0.3)]).double(), torch.tensor([math.log(0.4)]).double())
    kl_N.sum().backward()
    assert (float(kl_N.detach()), float(logprobs_N.grad)) == (pytest.approx(value, abs=1e-6), pytest.approx(gradient, abs=1e-6))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["k3", "unbiased"])
def test_k3_is_accurate_and_never_negative_near_zero(name: KLName) -> None:
    logprobs_N = torch.tensor([-2e-6, 0.0, 2e-6])
    kl_N = KL[name](logprobs_N, torch.zeros(3), logprobs_N)
    assert kl_N.tolist() == pytest.approx([2e-12, 0, 2e-12], rel=0.06, abs=0)


def test_unbiased_is_unbiased() -> None:
    """Summed over all outcomes of a stale sampler, it has the value and the gradient of KL(π ‖ ref), which the plain k3 has not."""
    logits_V, other_V, old_V = (torch.randn(7, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
    logits_V.requires_grad_()
    logprobs_V, reference_V, sampler_V = logits_V.log_softmax(-1), other_V.log_softmax(-1), old_V.log_softmax(-1)
    exact = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()

    def estimate(name: KLName) -> Tensor:
        return (sampler_V.exp() * KL[name](logprobs_V, reference_V, sampler_V)).sum()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits_V, retain_graph=True)[0]

    torch.testing.assert_close(estimate("unbiased"), exact)
    torch.testing.assert_close(gradient(estimate("unbiased")), gradient(exact))
    assert (gradient(estimate("k3")) - gradient(exact)).norm() > 0.1 * gradient(exact).norm()


def terms_by_hand(groups: list[list[Episode]], config: TrainerConfig) -> tuple[float, float, dict[str, Tensor]]:
    """KL term, mean k3 and the gradient of KL term less entropy bonus, one plain forward per episode."""
    model, reference = small_model(), small_model(1)
    scorable = [e for group in groups for e in group if e.reward is not None]
    tokens = sum(int(e.loss_mask_T.sum()) for e in scorable)
    term, bonus, drift = torch.zeros(()), torch.zeros(()), 0.0
    for e in scorable:
        logprobs_T = plain_logprobs(model, e, TEMPERATURE)
        logits_TV = model(input_ids=torch.from_numpy(e.ids_T.astype(np.int64))[None]).logits[0] / TEMPERATURE
        with torch.no_grad():
            reference_T = plain_logprobs(reference, e, TEMPERATURE)
        for t in np.flatnonzero(e.loss_mask_T):
            gap = logprobs_T[t] - reference_T[t]
            fresh = Version.unpack(int(e.versions_T[t])).step == STEP - 1
            ratio = (logprobs_T[t] - (logprobs_T[t].detach() if fresh else float(e.logprobs_T[t]))).exp()
            k3 = (-gap).exp() - 1 + gap
            weight = 1 / tokens if config.aggregation == "token_mean" else 1 / (len(scorable) * int(e.loss_mask_T.sum()))
            term = term + config.kl * weight * {"k1": gap, "k2": gap**2 / 2, "k3": k3, "unbiased": ratio * k3}[config.kl_estimator]
            bonus = bonus + config.entropy * weight * torch.distributions.Categorical(logits=logits_TV[t - 1]).entropy()
            drift += float(k3.detach()) / tokens
    (term - bonus).backward()
    return float(term.detach()), drift, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("estimator", get_args(KLName))
@pytest.mark.parametrize(("aggregation", "entropy", "budget"), [("token_mean", 0.0, 4096), ("sequence_mean", 0.2, 30)])
def test_terms_of_the_loss_by_hand(mesh: DeviceMesh, groups: Any, estimator: KLName, aggregation: Any, entropy: float, budget: int) -> None:
    """What KL and entropy add to the gradient, and nothing to `loss/policy`."""
    config: dict[str, Any] = {"aggregation": aggregation, "logprob_chunk": 5}
    plain, rank = learner(mesh, **config), learner(mesh, **config, kl=BETA, kl_estimator=estimator, entropy=entropy)
    (shard,) = shards(groups, budget=budget, step=STEP)
    without, metrics = plain.step(shard), rank.step(shard)
    term, drift, expected = terms_by_hand(groups, rank.config)
    assert metrics["loss/policy"] == without["loss/policy"]
    assert metrics["loss/kl"] == pytest.approx(term, abs=1e-6)
    assert metrics["kl/ref"] == pytest.approx(drift, abs=1e-6)
    added = {name: gradient - gradients(plain)[name] for name, gradient in gradients(rank).items()}
    torch.testing.assert_close(added, expected, atol=2e-6, rtol=1e-4)
    assert "kl/ref" not in without
    assert without["loss/kl"] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_reward_by_hand(mesh: DeviceMesh, groups: Any, estimator: KLName) -> None:
    """Its sum over the sampler's tokens comes off each reward before the advantage; the loss has no KL term."""
    rank = learner(mesh, kl=BETA, kl_in="reward", kl_estimator=estimator)
    metrics = rank.step(shards(groups, budget=30, step=STEP)[0])
    for e in (e for group in groups for e in group if e.reward is not None):
        with torch.no_grad():
            gap_T = e.logprobs_T - plain_logprobs(small_model(1), e, TEMPERATURE).numpy()
        kl_T = {"k1": gap_T, "k2": gap_T**2 / 2, "k3": np.exp(-gap_T) - 1 + gap_T}[estimator]
        e.reward -= BETA * float(kl_T[e.loss_mask_T].sum())
    plain = learner(mesh)
    plain.step(shards(groups, budget=30, step=STEP)[0])
    torch.testing.assert_close(gradients(rank), gradients(plain), atol=1e-5, rtol=1e-4)
    assert metrics["loss/kl"] == 0
    assert metrics["kl/ref"] > 0


@pytest.mark.parametrize("estimator", get_args(KLName))
def test_a_policy_that_is_the_reference_has_exactly_no_divergence(mesh: DeviceMesh, groups: Any, estimator: KLName) -> None:
    metrics = learner(mesh, reference_seed=0, kl=BETA, kl_estimator=estimator).step(shards(groups, step=STEP)[0])
    assert (metrics["loss/kl"], metrics["kl/ref"]) == (0, 0)


def test_in_bfloat16_too_the_reference_begins_as_the_policy(mesh: DeviceMesh, groups: Any, tmp_path: Path) -> None:
    """The reference is kept in bfloat16, of the policy float32 weights are rounded at each step: the same numbers."""
    small_model().save_pretrained(tmp_path)
    config = TrainerConfig(kl=BETA, warmup_steps=0, lr=0.01)
    policy, reference = load_causal_lm(str(tmp_path)), load_causal_lm(str(tmp_path), torch.bfloat16)
    rank = Learner(policy, config, total_steps=10, device_mesh=mesh, bf16=True, reference=reference)
    assert rank.reference is not None
    assert {p.dtype for p in rank.reference.parameters()} == {torch.bfloat16}
    drifts = [rank.step(shards(groups, step=STEP)[0])["kl/ref"] for _ in range(2)]
    assert drifts[0] == 0 < drifts[1]


def test_the_reference_stays_what_it_was(mesh: DeviceMesh, groups: Any) -> None:
    """No gradient, no optimizer, and nothing of it among the policy's weights."""
    rank = learner(mesh, reference_seed=0, kl=BETA, lr=0.01)
    assert rank.reference is not None
    drifts = [rank.step(shards(groups, step=STEP)[0])["kl/ref"] for _ in range(3)]
    assert drifts[0] == 0 < min(drifts[1:])
    expected = dict(small_model().named_parameters())
    frozen = {name: p.full_tensor() for name, p in rank.reference.causal_lm.named_parameters()}
    torch.testing.assert_close(frozen, {name: p.detach() for name, p in expected.items()}, atol=0, rtol=0)
    assert all(p.grad is None and not p.requires_grad for p in rank.reference.parameters())
    optimized = {id(p) for group in rank.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in rank.parameters}
    assert optimized.isdisjoint(id(p) for p in rank.reference.parameters())


def test_the_reference_survives_a_resume_as_the_original(mesh: DeviceMesh, groups: Any, tmp_path: Path) -> None:
    """Case 10: taken after the load, the reference would be the policy, and the divergence 0."""
    first = learner(mesh, reference_seed=0, kl=BETA, lr=0.01)
    for _ in range(2):
        first.step(shards(groups, step=STEP)[0])
    save(first, tmp_path / "checkpoint")
    resumed = learner(mesh, reference_seed=0, kl=BETA, lr=0.01)
    load(resumed, tmp_path / "checkpoint")
    before, after = (rank.step(shards(groups, step=STEP)[0]) for rank in (first, resumed))
    assert after["kl/ref"] == before["kl/ref"] > 0.001
    torch.testing.assert_close(gradients(resumed), gradients(first), atol=0, rtol=0)


@pytest.mark.parametrize("terms", [{}, {"kl": BETA}, {"entropy": BETA}], ids=["policy", "kl", "entropy"])
def test_a_dead_group_in_the_batch_learns_from_kl_and_entropy_alone(mesh: DeviceMesh, groups: Any, terms: dict[str, float]) -> None:
    """Case 43, `buffer.dead_groups=keep`: advantages are 0, the other terms are not. With `replace` the group is not in the batch."""
    for e in groups[1]:
        e.reward = 0.5
    batch = [Group(Prompt(n, ""), group) for n, group in enumerate(groups)]
    rank = learner(mesh, **terms)
    (shard,) = make_shards(batch, STEP, 1, 4096, dead_too=bool(terms))
    metrics = rank.step(shard)
    assert {place[0] for place in shard.places} == ({0, 1} if terms else {0})
    assert (metrics["tokens/trained"], shard.left_out_tokens > 0) == (shard.total_tokens - shard.left_out_tokens, not terms)
    (alone,) = make_shards(batch[1:], STEP, 1, 4096, dead_too=True)
    rank.step(alone)
    assert (sum(float(g.abs().sum()) for g in gradients(rank).values()) > 0) == bool(terms)


def test_nothing_to_train_is_exactly_nothing(mesh: DeviceMesh, groups: Any) -> None:
    """Case 49."""
    for e in (e for group in groups for e in group):
        e.reward = None
    for kl_in in ("loss", "reward"):
        metrics = learner(mesh, kl=BETA, kl_in=kl_in, kl_estimator="k1", entropy=1.0).step(shards(groups, step=STEP)[0])
        assert (metrics["loss/kl"], metrics["kl/ref"], metrics["grad_norm"]) == (0, 0, 0)


def test_what_does_not_fit_together_is_refused(mesh: DeviceMesh) -> None:
    config = Config()
    config.trainer.kl_in, config.trainer.kl_estimator = "reward", "unbiased"
    with pytest.raises(ConfigError, match=r"trainer\.kl_estimator=unbiased is for trainer\.kl_in=loss"):
        validate(config)
    with pytest.raises(ValueError, match="no reference"):
        Learner(small_model(), TrainerConfig(kl=BETA), total_steps=1, device_mesh=mesh)
