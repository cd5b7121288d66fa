"""One trainer rank: a sharded model, AdamW, and one optimizer step per batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from monarch_rl.algorithms.logprobs import mismatch_kl
from monarch_rl.algorithms.losses import row_mean
from monarch_rl.algorithms.objective import Objective
from monarch_rl.models import PolicyModel, shard
from monarch_rl.packing import Batch, collate, token_ages
from monarch_rl.trainer_config import TrainerConfig
from monarch_rl.types import Shard

LARGEST = 40.0
"""Nats: what metrics take a log-ratio to be at most, so that the square of its exponential can be summed."""


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Of optimizer step `step`, 1-based: a linear rise to `lr` at step `warmup_steps`, then the schedule, 0 at `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr


class Trained(NamedTuple):
    """What the metrics need of the N trained tokens of a micro-batch, without gradient."""

    loss_N: Tensor
    """Weighted: the sum over the global batch is the loss."""
    logprobs_N: Tensor
    old_N: Tensor
    behaviour_N: Tensor
    entropy_N: Tensor
    cut_N: Tensor
    correction_N: Tensor
    ages_N: Tensor
    fresh_N: Tensor
    """1 where every token of the episode has age 0."""
    share_N: Tensor
    """1 / tokens of the row: adds up to the number of rows."""
    masked_rows_N: Tensor
    """1 where the corrections mask every token of the row."""


class Learner:
    """The model of one rank and what changes it. All ranks call `step` together, with shards of the same batch."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        config: TrainerConfig,
        *,
        total_steps: int,
        device_mesh: DeviceMesh,
        bf16: bool = False,
        lineage: int = 0,
        length_budget: int = 0,
    ) -> None:
        """Shards `causal_lm`, float32, in place.

        Args:
            device_mesh: one-dimensional; its process group is up (gloo on CPU, nccl on CUDA), and on CUDA the process has
                chosen its device.
            total_steps: where the learning rate schedule ends.
            bf16: forward and backward in bfloat16.
            lineage: trainer restarts so far, see `Version`.
            length_budget: most sampled tokens of an episode; only `trainer.aggregation=constant` needs it.
        """
        self.config, self.total_steps, self.device_mesh, self.lineage = config, total_steps, device_mesh, lineage
        self.objective = Objective.of(config, length_budget)
        model = PolicyModel(causal_lm, config.logprob_chunk)
        self.model = shard(model, device_mesh, bf16=bf16, activation_checkpointing=config.activation_checkpointing)
        self.parameters = list(self.model.parameters())
        self.device = self.parameters[0].device
        betas = (config.betas[0], config.betas[1])
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)

    def step(self, batch: Shard, *, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Optimizer step `batch.step`.

        Args:
            before_update: called when the gradient is ready and the weights are about to change.

        Returns:
            Metrics of the whole batch, the same on every rank. `ratio/*` is trainer over sampler, π / μ, for all trained tokens;
            `ratio/policy_*` and `ratio/old_*` are its two factors, π / π_old and π_old / μ.
            `mismatch/*` compares the two on episodes whose every token has age 0, where both hold the same weights and no keys
            and values of older ones are left (k3 and nats); these keys are absent when there are no such episodes.

        Raises:
            RuntimeError: the gradient norm is not finite.
            ValueError: the batch contradicts itself: a token newer than the trainer, or another number of tokens than announced.
            On every rank alike, save for the token that is too new; weights and optimizer are left as they were.
        """
        self.optimizer.zero_grad(set_to_none=True)
        advantages_PGK = self.objective.advantages(torch.from_numpy(batch.rewards_PG), torch.from_numpy(batch.turn_rewards_PGK))
        packed = [collate([batch.episodes[i] for i in indices]) for indices in batch.microbatches]
        trained = []
        for arrays, indices in zip(packed, batch.microbatches, strict=True):
            advantages_N = _of_tokens(advantages_PGK, arrays, [batch.places[i] for i in indices])
            trained.append(self._backward(arrays, advantages_N, batch))
        metrics = _metrics(trained, packed, self.device_mesh)
        announced = batch.total_tokens - batch.left_out_tokens
        if metrics["tokens/trained"] != announced:
            found = f"{metrics['tokens/trained']:.0f}"
            raise ValueError(f"step {batch.step}: the batch announces {announced} trained tokens, its shards hold {found}")
        grad_norm = self._clip_gradients(batch.step)
        return metrics | {"grad_norm": grad_norm, "lr": self._update(batch.step)}

    def _backward(self, arrays: Batch, advantages_N: Tensor, batch: Shard) -> Trained:
        """Adds the gradient of one micro-batch. An empty one is run too: other ranks wait for its collectives."""
        ages = token_ages(arrays.versions_N, batch.step, self.lineage)
        fresh = _of_fresh_rows(arrays.rows_N, ages)
        read = (arrays.inputs_BT, arrays.positions_N, arrays.targets_N, arrays.temperatures_N)
        known = (arrays.rows_N, arrays.logprobs_N, ages, fresh)
        rows_N, behaviour_N, ages_N, fresh_N = (torch.from_numpy(x).to(self.device) for x in known)
        logprobs_N, entropy_N = self.model(*(torch.from_numpy(x).to(self.device) for x in read))
        terms = self.objective.terms(
            logprobs_N,
            behaviour_N,
            advantages_N.to(logprobs_N),
            rows_N,
            ages_N,
            total_tokens=batch.total_tokens,
            total_episodes=batch.total_episodes,
        )
        # FSDP2 averages gradients over the ranks, while the weights make the loss a sum over them.
        (terms.loss_N.sum() * self.device_mesh.size()).backward()
        kept_N = row_mean((terms.correction_N != 0).float(), rows_N)
        return Trained(
            terms.loss_N.detach(),
            logprobs_N.detach(),
            terms.old_N,
            behaviour_N,
            entropy_N,
            terms.cut_N,
            terms.correction_N,
            ages_N,
            fresh_N,
            1 / rows_N.bincount()[rows_N],
            kept_N == 0,
        )

    def _clip_gradients(self, step: int) -> float:
        """Norm of the gradient over all ranks, before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm or math.inf)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(value):
            raise RuntimeError(f"step {step}: the gradient norm is {value}; the weights stay as they were after step {step - 1}")
        return value

    def _update(self, step: int) -> float:
        """One AdamW step at the scheduled learning rate, which is returned."""
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return lr


def _of_tokens(advantages_PGK: Tensor, arrays: Batch, places: list[tuple[int, int]]) -> Tensor:
    """[N] advantage of each trained token: of its episode, or of its turn."""
    if not places:
        return advantages_PGK.new_zeros(0)
    turns_N = torch.from_numpy(arrays.turns_N).clamp(max=advantages_PGK.shape[-1] - 1)
    return torch.stack([advantages_PGK[place] for place in places])[torch.from_numpy(arrays.rows_N), turns_N]


def _of_fresh_rows(rows_N: NDArray[np.int64], ages_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] whether no token of the row is older than the trainer's weights."""
    oldest_B = np.zeros(rows_N.max(initial=-1) + 1, np.int64)
    np.maximum.at(oldest_B, rows_N, ages_N)
    fresh_N: NDArray[np.bool_] = oldest_B[rows_N] == 0
    return fresh_N


def _metrics(trained: list[Trained], packed: list[Batch], device_mesh: DeviceMesh) -> dict[str, float]:
    """Of all ranks' tokens, the same on every rank; one collective."""
    t = Trained(*(torch.cat(parts).double() for parts in zip(*trained, strict=True)))
    log_ratio_N = (t.logprobs_N - t.behaviour_N).clamp(max=LARGEST)
    ratio_N, gap_N = log_ratio_N.exp(), log_ratio_N.abs() * t.fresh_N
    per_token = {
        "loss": t.loss_N,
        "entropy": t.entropy_N,
        "low": t.cut_N < 0,
        "high": t.cut_N > 0,
        "fresh": t.fresh_N,
        "k1": -log_ratio_N * t.fresh_N,
        "k3": mismatch_kl(t.logprobs_N, t.behaviour_N) * t.fresh_N,
        "square": ratio_N.square(),
        "correction": t.correction_N,
        "masked": t.correction_N == 0,
        "rows": t.share_N,
        "masked_rows": t.share_N * t.masked_rows_N,
    }
    peaks = {
        "ratio": ratio_N,
        "policy": (t.logprobs_N - t.old_N).clamp(max=LARGEST).exp(),
        "old": (t.old_N - t.behaviour_N).clamp(max=LARGEST).exp(),
        "age": t.ages_N,
        "gap": gap_N,
    }
    counts = {"tokens": len(ratio_N), "read": sum(b.tokens for b in packed), "padded": sum(b.inputs_BT.size for b in packed)}
    sums = {name: x_N.double().sum() for name, x_N in (per_token | peaks).items()}
    sums |= {name: ratio_N.new_tensor(n) for name, n in counts.items()}
    maxima = {name: x_N.amax() if len(x_N) else x_N.new_zeros(()) for name, x_N in peaks.items()}
    return _figures(*_over_ranks(sums, maxima, device_mesh))


def _figures(total: dict[str, float], most: dict[str, float]) -> dict[str, float]:
    """Metrics from what was summed and what was compared over all tokens."""
    tokens, fresh = max(1, total["tokens"]), max(1, total["fresh"])
    metrics = {
        "loss/policy": total["loss"],
        "loss/kl": 0.0,  # there is no reference policy yet
        "entropy": total["entropy"] / tokens,
        "ratio/mean": total["ratio"] / tokens,
        "ratio/max": most["ratio"],
        "ratio/policy_mean": total["policy"] / tokens,
        "ratio/policy_max": most["policy"],
        "ratio/old_mean": total["old"] / tokens,
        "ratio/old_max": most["old"],
        "ratio/ess": total["ratio"] ** 2 / (tokens * total["square"]) if total["square"] else 0.0,
        "clip/frac": (total["low"] + total["high"]) / tokens,
        "clip/frac_low": total["low"] / tokens,
        "clip/frac_high": total["high"] / tokens,
        "correction/mean": total["correction"] / tokens,
        "correction/frac_masked": total["masked"] / tokens,
        "correction/frac_masked_episodes": total["masked_rows"] / max(1, total["rows"]),
        "age/mean": total["age"] / tokens,
        "age/max": most["age"],
        "tokens/trained": total["tokens"],
        "padding/frac": 1 - total["read"] / total["padded"],
    }
    mismatch = {
        "mismatch/kl": total["k3"] / fresh,
        "mismatch/k1": total["k1"] / fresh,
        "mismatch/mean_abs": total["gap"] / fresh,
        "mismatch/max_abs": most["gap"],
    }
    return metrics | (mismatch if total["fresh"] else {})


def _over_ranks(sums: dict[str, Tensor], maxima: dict[str, Tensor], device_mesh: DeviceMesh) -> tuple[dict[str, float], dict[str, float]]:
    """Scalars added up and scalars compared over the ranks."""
    mine = torch.stack([*sums.values(), *maxima.values()])
    ranks = [torch.empty_like(mine) for _ in range(device_mesh.size())]
    dist.all_gather(ranks, mine, group=device_mesh.get_group())
    table = torch.stack(ranks)
    added, compared = table[:, : len(sums)].sum(0).tolist(), table[:, len(sums) :].amax(0).tolist()
    return dict(zip(sums, added, strict=True)), dict(zip(maxima, compared, strict=True))
