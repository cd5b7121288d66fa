"""Batches that hypothesis makes, and the gradient of one of them, for tests that cut it in different ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, GPT2LMHeadModel

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.corrections import CORRECTIONS
from monarch_rl.algorithms.losses import AGGREGATIONS, LOSSES
from monarch_rl.algorithms.objective import Objective
from monarch_rl.learner import Learner
from monarch_rl.trainer_config import TrainerConfig
from monarch_rl.types import NOT_SAMPLED, Episode, Shard, Version
from tests.batches import VOCABULARY

STEP = 2
LENGTH_BUDGET = 12
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Of a difference between two gradients that ought to be equal, relative to their norm."""
QUICK = settings(derandomize=True, database=None, deadline=None, phases=[Phase.generate])
"""The same examples every time; a failing one is shown as it is, since looking for a smaller one takes minutes."""
KL = [
    {"kl": 0.0, "kl_in": "loss"},
    {"kl": 0.3, "kl_in": "loss", "kl_estimator": "unbiased"},
    {"kl": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
]


@dataclass(frozen=True)
class Case:
    groups: list[list[Episode]]
    config: dict[str, Any]
    """Of TrainerConfig."""
    seed: int
    """For whoever shuffles."""


def model(dtype: torch.dtype, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2, since the norms of newer models compute in float32 whatever they are given."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 2, "eos_token_id": 1}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2, initializer_range=0.2, **ids)
    return GPT2LMHeadModel(config).to(dtype).eval()


def learner(mesh: DeviceMesh, dtype: torch.dtype, chunk: int = 1024) -> Learner:
    """One whose weights stay as they are (its learning rate is 0), so that it can be asked for many gradients."""
    trainer = TrainerConfig(lr=0.0, warmup_steps=0, max_grad_norm=0.0, logprob_chunk=chunk)
    return Learner(model(dtype), trainer, total_steps=10, device_mesh=mesh, reference=model(dtype, seed=1))


def gradient(rank: Learner, shard: Shard, config: dict[str, Any]) -> Tensor:
    """All of it in one row, after the losses. In float32 without KL and entropy, which are small differences of large numbers."""
    dtype = rank.parameters[0].dtype
    rank.config = replace(rank.config, **config | ({"kl": 0.0, "entropy": 0.0} if dtype == torch.float32 else {}))
    rank.objective = Objective.of(rank.config, LENGTH_BUDGET)
    metrics = rank.step(shard)
    losses = torch.tensor([metrics["loss/policy"], metrics["loss/kl"]], dtype=dtype)
    gradients = [p.grad.full_tensor().flatten() for p in rank.parameters if p.grad is not None]
    return torch.cat([losses, *gradients])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Episodes of 0 to 12 sampled tokens in up to three groups, some unscorable, with tokens of two ages and observations among them."""
    numbers = np.random.default_rng(seed := draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(2, 4))
    groups = [[draw(_episodes(numbers)) for _ in range(size)] for _ in range(draw(st.integers(1, 3)))]
    names = {"loss": LOSSES, "aggregation": AGGREGATIONS, "correction": CORRECTIONS, "advantage": ADVANTAGES}
    config = {key: draw(st.sampled_from(sorted(values))) for key, values in names.items()}
    return Case(groups, config | draw(st.sampled_from(KL)) | {"entropy": draw(st.sampled_from([0.0, 0.1]))}, seed)


@st.composite
def _episodes(draw: st.DrawFn, numbers: np.random.Generator) -> Episode:
    prompt, completion = draw(st.integers(1, 6)), draw(st.integers(0, 12))
    length = prompt + completion
    sampled_T = np.arange(length) >= prompt
    if completion > 2 and draw(st.booleans()):
        sampled_T[prompt + 1] = False  # an observation
    steps_T = numbers.integers(0, STEP, length)
    return Episode(
        ids_T=numbers.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask_T=sampled_T,
        logprobs_T=np.where(sampled_T, numbers.uniform(-6, -2, length), 0).astype(np.float32),
        versions_T=np.where(sampled_T, [Version(0, int(step)).pack() for step in steps_T], NOT_SAMPLED).astype(np.int64),
        reward=draw(st.sampled_from([None, 0.0, 0.5, 1.0, 2.0])),
        temperature=draw(st.sampled_from([0.7, 1.0])),
    )
