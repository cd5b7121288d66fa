"""One trainer rank: a sharded model, AdamW, and one optimizer step per batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.corrections import CORRECTIONS
from monarch_rl.algorithms.logprobs import mismatch_kl
from monarch_rl.algorithms.losses import AGGREGATIONS, LOSSES, old_logprobs
from monarch_rl.config import TrainerConfig
from monarch_rl.models import PolicyModel, on_device, shard
from monarch_rl.packing import Batch, collate, token_ages
from monarch_rl.types import Shard

F = TypeVar("F", bound=Callable[..., Any])


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


def chosen(value: str | F, known: Mapping[Any, F]) -> F:
    """A function of the configuration: by its name, or given as itself."""
    return known[value] if isinstance(value, str) else value


class Trained(NamedTuple):
    """What the metrics need of the N trained tokens of a micro-batch, without gradient."""

    loss_N: Tensor
    """Weighted: the sum over the global batch is the loss."""
    logprobs_N: Tensor
    behaviour_N: Tensor
    entropy_N: Tensor
    clipped_N: Tensor
    ages_N: Tensor
    fresh_N: Tensor
    """1 where every token of the episode has age 0."""


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
    ) -> None:
        """Shards `causal_lm`, float32, in place.

        Args:
            device_mesh: one-dimensional; its process group is up (gloo on CPU, nccl on CUDA), and on CUDA the process has
                chosen its device.
            total_steps: where the learning rate schedule ends.
            bf16: forward and backward in bfloat16.
            lineage: trainer restarts so far, see `Version`.
        """
        self.config, self.total_steps, self.device_mesh, self.lineage = config, total_steps, device_mesh, lineage
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
            Metrics of the whole batch, the same on every rank. `ratio/*` is trainer over sampler, π / μ, for all trained tokens.
            `mismatch/*` compares the two on episodes whose every token has age 0, where both hold the same weights and no keys
            and values of older ones are left (k3 and nats); these keys are absent when there are no such episodes.

        Raises:
            RuntimeError: the gradient norm is not finite.
            ValueError: the batch contradicts itself: a token newer than the trainer, or another number of tokens than announced.
            On every rank alike, save for the token that is too new; weights and optimizer are left as they were.
        """
        self.optimizer.zero_grad(set_to_none=True)
        advantages_PG = chosen(self.config.advantage, ADVANTAGES)(torch.from_numpy(batch.rewards_PG))
        packed = [collate([batch.episodes[i] for i in indices]) for indices in batch.microbatches]
        trained = []
        for arrays, indices in zip(packed, batch.microbatches, strict=True):
            advantages_B = torch.tensor([float(advantages_PG[batch.places[i]]) for i in indices])
            trained.append(self._backward(arrays, advantages_B, batch))
        metrics = _metrics(trained, packed, self.device_mesh)
        announced = batch.total_tokens - batch.left_out_tokens
        if metrics["tokens/trained"] != announced:
            found = f"{metrics['tokens/trained']:.0f}"
            raise ValueError(f"step {batch.step}: the batch announces {announced} trained tokens, its shards hold {found}")
        grad_norm = self._clip_gradients(batch.step)
        return metrics | {"grad_norm": grad_norm, "lr": self._update(batch.step)}

    def _backward(self, arrays: Batch, advantages_B: Tensor, batch: Shard) -> Trained:
        """Adds the gradient of one micro-batch. An empty one is run too: other ranks wait for its collectives."""
        ages = token_ages(arrays.versions_N, batch.step, self.lineage)
        fresh = _of_fresh_rows(arrays.rows_N, ages)
        read = (arrays.inputs_BT, arrays.positions_N, arrays.targets_N, arrays.temperatures_N)
        known = (arrays.rows_N, arrays.logprobs_N, ages, fresh)
        rows_N, behaviour_N, ages_N, fresh_N = (torch.from_numpy(x).to(self.device) for x in known)
        channels = on_device(arrays.channels, self.device)
        logprobs_N, entropy_N = self.model(*(torch.from_numpy(x).to(self.device) for x in read), channels)
        own_N = logprobs_N.detach()
        # REINFORCE has no ratio of its own, so that the correction has to cover all of π / μ: "old" is the trainer itself.
        old_N = own_N if self.config.loss == "reinforce" else old_logprobs(own_N, behaviour_N, ages_N)
        advantages_N = advantages_B.to(self.device)[rows_N]
        loss_N, clipped_N = chosen(self.config.loss, LOSSES)(logprobs_N, old_N, advantages_N, self.config.clip_low, self.config.clip_high)
        weights_N = AGGREGATIONS[self.config.aggregation](rows_N, batch.total_tokens, batch.total_episodes)
        loss_N = loss_N * weights_N * CORRECTIONS[self.config.correction](old_N, behaviour_N)
        # FSDP2 averages gradients over the ranks, while the weights make the loss a sum over them.
        (loss_N.sum() * self.device_mesh.size()).backward()
        return Trained(loss_N.detach(), own_N, behaviour_N, entropy_N, clipped_N, ages_N, fresh_N)

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


def _of_fresh_rows(rows_N: NDArray[np.int64], ages_N: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] whether no token of the row is older than the trainer's weights."""
    oldest_B = np.zeros(rows_N.max(initial=-1) + 1, np.int64)
    np.maximum.at(oldest_B, rows_N, ages_N)
    fresh_N: NDArray[np.bool_] = oldest_B[rows_N] == 0
    return fresh_N


def _metrics(trained: list[Trained], packed: list[Batch], device_mesh: DeviceMesh) -> dict[str, float]:
    """Of all ranks' tokens, the same on every rank; one collective."""
    columns = (torch.cat(parts).double() for parts in zip(*trained, strict=True))
    loss_N, logprobs_N, behaviour_N, entropy_N, clipped_N, ages_N, fresh_N = columns
    ratio_N = (logprobs_N - behaviour_N).exp()
    gap_N = (logprobs_N - behaviour_N).abs() * fresh_N
    kl_N = mismatch_kl(logprobs_N, behaviour_N) * fresh_N
    per_token = {"loss": loss_N, "entropy": entropy_N, "clipped": clipped_N, "fresh": fresh_N, "kl": kl_N}
    peaks = {"ratio": ratio_N, "age": ages_N, "gap": gap_N}
    counts = {"tokens": len(loss_N), "read": sum(b.tokens for b in packed), "padded": sum(b.inputs_BT.size for b in packed)}
    sums = {name: x_N.sum() for name, x_N in (per_token | peaks).items()} | {name: loss_N.new_tensor(n) for name, n in counts.items()}
    maxima = {name: x_N.amax() if len(x_N) else x_N.new_zeros(()) for name, x_N in peaks.items()}
    total, most = _over_ranks(sums, maxima, device_mesh)
    tokens, fresh = max(1, total["tokens"]), max(1, total["fresh"])
    metrics = {
        "loss/policy": total["loss"],
        "loss/kl": 0.0,  # there is no reference policy yet
        "entropy": total["entropy"] / tokens,
        "ratio/mean": total["ratio"] / tokens,
        "ratio/max": most["ratio"],
        "clip/frac": total["clipped"] / tokens,
        "age/mean": total["age"] / tokens,
        "age/max": most["age"],
        "tokens/trained": total["tokens"],
        "padding/frac": 1 - total["read"] / total["padded"],
    }
    mismatch = {"mismatch/kl": total["kl"] / fresh, "mismatch/mean_abs": total["gap"] / fresh, "mismatch/max_abs": most["gap"]}
    return metrics | (mismatch if total["fresh"] else {})


def _over_ranks(sums: dict[str, Tensor], maxima: dict[str, Tensor], device_mesh: DeviceMesh) -> tuple[dict[str, float], dict[str, float]]:
    """Scalars added up and scalars compared over the ranks."""
    mine = torch.stack([*sums.values(), *maxima.values()])
    ranks = [torch.empty_like(mine) for _ in range(device_mesh.size())]
    dist.all_gather(ranks, mine, group=device_mesh.get_group())
    table = torch.stack(ranks)
    added, compared = table[:, : len(sums)].sum(0).tolist(), table[:, len(sums) :].amax(0).tolist()
    return dict(zip(sums, added, strict=True)), dict(zip(maxima, compared, strict=True))
