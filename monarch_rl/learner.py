"""One trainer rank: a sharded model, AdamW, and one optimizer step per batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from monarch_rl.algorithms.corrections import PROXIMALS
from monarch_rl.algorithms.kl import KL, k3
from monarch_rl.algorithms.logprobs import mismatch_kl
from monarch_rl.algorithms.losses import row_mean
from monarch_rl.algorithms.objective import Objective
from monarch_rl.models import PolicyModel, base_weights, digest, has_adapters, on_device, shard, shard_reference, without_adapters
from monarch_rl.packing import Batch, collate, token_ages
from monarch_rl.trainer_config import TrainerConfig
from monarch_rl.types import MASK, ROUTING, Shard

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
    kl_loss_N: Tensor
    """The KL term of the loss, weighted likewise."""
    reference_kl_N: Tensor
    """k3 estimate of the KL divergence to the reference."""


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
        length_budget: int = 0,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """Shards `causal_lm`, float32, in place.

        Args:
            device_mesh: one-dimensional; its process group is up (gloo on CPU, nccl on CUDA), and on CUDA the process has
                chosen its device.
            total_steps: where the learning rate schedule ends.
            bf16: forward and backward in bfloat16.
            length_budget: most sampled tokens of an episode; only `trainer.aggregation=constant` needs it.
            reference: where `config.kl` is above 0, the model that the policy is held to; it is sharded and never changes. A policy
                with adapters needs none: it is held to its base model.
        """
        self.config, self.total_steps, self.device_mesh = config, total_steps, device_mesh
        self.objective = Objective.of(config, length_budget)
        self.adapted = has_adapters(causal_lm)
        self.base = digest(base_weights(causal_lm)) if self.adapted else 0
        """Of the weights that adapters are trained on; what a checkpoint holds depends on them."""
        model = PolicyModel(causal_lm, config.logprob_chunk)
        self.model = shard(model, device_mesh, bf16=bf16, activation_checkpointing=config.activation_checkpointing)
        self.reference: Any = None
        if config.kl and self.adapted:
            self.reference = partial(_of_base, self.model)
        elif config.kl:
            if reference is None:
                raise ValueError("trainer.kl is above 0, but there is no reference to hold the policy to")
            self.reference = shard_reference(reference, device_mesh, bf16=bf16, logprob_chunk=config.logprob_chunk)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
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
        packed = [collate([batch.episodes[i] for i in indices]) for indices in batch.microbatches]
        references = [self._reference_logprobs(arrays) for arrays in packed]
        rewards = torch.from_numpy(batch.rewards_PG), torch.from_numpy(batch.turn_rewards_PGK)
        advantages_PGK = self.objective.advantages(*_less(*rewards, self._penalty(packed, references, batch)))
        trained = []
        for arrays, indices, reference_N in zip(packed, batch.microbatches, references, strict=True):
            advantages_N = _of_tokens(advantages_PGK, arrays, [batch.places[i] for i in indices])
            trained.append(self._backward(arrays, advantages_N, batch, reference_N))
        metrics = _metrics(trained, packed, self.device_mesh)
        if self.reference is None:
            del metrics["kl/ref"]
        announced = batch.total_tokens - batch.left_out_tokens
        if metrics["tokens/trained"] != announced:
            found = f"{metrics['tokens/trained']:.0f}"
            raise ValueError(f"step {batch.step}: the batch announces {announced} trained tokens, its shards hold {found}")
        grad_norm = self._clip_gradients(batch.step)
        return metrics | {"grad_norm": grad_norm, "lr": self._update(batch.step)}

    def _read(self, arrays: Batch, *channels: str) -> list[Any]:
        """What a forward pass takes, with these of the channels."""
        read = (arrays.inputs_BT, arrays.positions_N, arrays.targets_N, arrays.temperatures_N)
        chosen = {name: channel for name, channel in arrays.channels.items() if name in channels}
        return [*(torch.from_numpy(x).to(self.device) for x in read), on_device(chosen, self.device)]

    @torch.no_grad()
    def _reference_logprobs(self, arrays: Batch) -> Tensor | None:
        """[N] of the distributions that were sampled from, but with experts of its own choice. An empty micro-batch is run too."""
        if self.reference is None:
            return None
        logprobs_N: Tensor = self.reference(*self._read(arrays, MASK))[0]
        return logprobs_N

    def _penalty(self, packed: list[Batch], references: list[Tensor | None], batch: Shard) -> Tensor:
        """[P, G] float64: `config.kl` times the sum of the KL estimates over an episode's trained tokens, as its sampler saw them.

        The sampler's logprobs stand for the policy's: a reward is of what was done. Each rank knows of its own episodes.
        """
        penalty_PG = torch.zeros(batch.rewards_PG.shape, dtype=torch.float64, device=self.device)
        if self.reference is None or self.config.kl_in == "loss":
            return penalty_PG.cpu()
        for arrays, indices, reference_N in zip(packed, batch.microbatches, references, strict=True):
            assert reference_N is not None
            behaviour_N = torch.from_numpy(arrays.logprobs_N).to(self.device)
            kl_N = KL[self.config.kl_estimator](behaviour_N, reference_N, behaviour_N).double()
            places_N2 = np.array(batch.places, np.int64).reshape(-1, 2)[np.array(indices, np.int64)[arrays.rows_N]]
            penalty_PG.index_put_(torch.from_numpy(places_N2).to(self.device).unbind(-1), kl_N, accumulate=True)
        dist.all_reduce(penalty_PG, group=self.device_mesh.get_group())
        return self.config.kl * penalty_PG.cpu()

    def _regulariser(self, logprobs_N: Tensor, entropy_N: Tensor, old_N: Tensor, reference_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N] what is added to the policy loss, before weights: the KL term, and less the entropy bonus."""
        kl_N, bonus_N = torch.zeros_like(logprobs_N), torch.zeros_like(logprobs_N)
        if reference_N is not None and self.config.kl_in == "loss":
            kl_N = self.config.kl * KL[self.config.kl_estimator](logprobs_N, reference_N, old_N)
        if self.config.entropy:
            bonus_N = self.config.entropy * entropy_N
        return kl_N, -bonus_N

    def _backward(self, arrays: Batch, advantages_N: Tensor, batch: Shard, reference_N: Tensor | None) -> Trained:
        """Adds the gradient of one micro-batch. An empty one is run too: other ranks wait for its collectives."""
        ages = token_ages(arrays.versions_N, batch.step, batch.lineage)
        fresh = _of_fresh_rows(arrays.rows_N, ages)
        known = (arrays.rows_N, arrays.logprobs_N, ages, fresh)
        rows_N, behaviour_N, ages_N, fresh_N = (torch.from_numpy(x).to(self.device) for x in known)
        logprobs_N, entropy_N = self.model(*self._read(arrays, MASK, ROUTING))
        own_N = logprobs_N.detach()
        terms = self.objective.terms(
            logprobs_N,
            behaviour_N,
            advantages_N.to(logprobs_N),
            rows_N,
            ages_N,
            total_tokens=batch.total_tokens,
            total_episodes=batch.total_episodes,
        )
        # Whatever the loss's ratio is taken to: an estimate from stale tokens is of the sampler's.
        sampled_N = PROXIMALS["auto"](own_N, behaviour_N, ages_N)
        kl_N, bonus_N = self._regulariser(logprobs_N, entropy_N, sampled_N, reference_N)
        total_N = terms.loss_N + terms.weights_N * (kl_N + bonus_N)
        # FSDP2 averages gradients over the ranks, while the weights make the loss a sum over them.
        (total_N.sum() * self.device_mesh.size()).backward()
        kept_N = row_mean((terms.correction_N != 0).float(), rows_N)
        return Trained(
            terms.loss_N.detach(),
            own_N,
            terms.old_N,
            behaviour_N,
            entropy_N.detach(),
            terms.cut_N,
            terms.correction_N,
            ages_N,
            fresh_N,
            1 / rows_N.bincount()[rows_N],
            kept_N == 0,
            kl_loss_N=(terms.weights_N * kl_N).detach(),
            reference_kl_N=torch.zeros_like(own_N) if reference_N is None else k3(own_N, reference_N, own_N),
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


def _of_base(model: PolicyModel, *read: Any) -> tuple[Tensor, Tensor]:
    """What the model would say without its adapters."""
    with without_adapters(model.causal_lm):
        answer: tuple[Tensor, Tensor] = model(*read)
    return answer


def _less(rewards_PG: Tensor, turn_rewards_PGK: Tensor, penalty_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards with a penalty taken off; of those of turns, off the last."""
    last_PG1 = (turn_rewards_PGK.isfinite().sum(-1, keepdim=True) - 1).clamp(min=0)
    return rewards_PG - penalty_PG, turn_rewards_PGK.scatter_add(-1, last_PG1, -penalty_PG[..., None])


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
        "kl_loss": t.kl_loss_N,
        "reference_kl": t.reference_kl_N,
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
        "loss/kl": total["kl_loss"],
        "kl/ref": total["reference_kl"] / tokens,
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
