"""Both sides of a generator with several ranks, in processes of their own, for `test_tensor_parallel.py`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank, current_size, endpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.generator import Generator
from monarch_rl.model_config import LoraConfig
from monarch_rl.types import Generation, Sampling, Version
from monarch_rl.weights.adapters import file_name, merged, shapes
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.plan import LoadPlan, shard_rows
from monarch_rl.weights.slots import Ring, SlotBuffers


def model_of(path: Path, step: int, lora: LoraConfig) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """What the trainers publish as version `step`, the same in every process: the model, and what travels of it. Two in three differ
    little from the one before."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    made = {name: torch.zeros(shape) for name, shape in shapes(model, lora).items()} if lora.rank else weights
    generator = torch.Generator().manual_seed(step // 3)
    for weight in made.values():
        weight.add_(torch.randn(weight.shape, generator=generator) * (0.15 if lora.rank else 0.05))
        weight.view(-1)[: 2 * (step % 3)].add_(0.3)
    for name, weight in weights.items():
        a, b = (file_name(name.removesuffix(".weight"), part) for part in ("A", "B"))
        if a in made:
            weight.copy_(merged(weight, made[a], made[b], 1.0))  # alpha / rank is in B
    return model, made


class Shards(Actor):
    """One trainer rank that does not train."""

    def __init__(self, path: Path, lora: LoraConfig, lineage: int) -> None:
        self._path, self._lora, self._lineage = path, lora, lineage
        self._rank, self._world = current_rank().rank, sum(current_size().values())

    @endpoint
    def open(self, plans: list[LoadPlan]) -> list[list[SlotBuffers]]:
        self._ring = Ring(plans, rank=self._rank, world=self._world, slots=3, board=BOARD, deltas=True)
        return self._ring.register()

    @endpoint
    def publish(self, step: int) -> None:
        _, made = model_of(self._path, step, self._lora)
        shards = {name: whole[slice(*shard_rows(len(whole), self._rank, self._world))] for name, whole in made.items()}
        self._ring.publish(shards, Version(self._lineage, step))


class State(NamedTuple):
    """Of one rank's engine; all are the same on all ranks."""

    tokens: int
    sampled: int
    """Checksum of all tokens."""
    steps: int
    swaps: int
    deltas: int
    version: Version | None


class OpenGenerator(Generator):
    """Can be asked for single requests, for their end, and for what its ranks have in common."""

    @concurrent_endpoint
    async def one(self, name: str, ids: list[int], sampling: Sampling, seed: int) -> Generation:
        return await self._engine.generate(ids, sampling, seed, request_id=name)

    @concurrent_endpoint
    async def abort(self, name: str) -> None:
        await self._engine.abort(name)

    @concurrent_endpoint
    async def state(self) -> State:
        stats, lockstep = self._engine.stats(), self._engine._jobs.lockstep
        assert lockstep is not None
        return State(stats.tokens, lockstep._sampled, stats.steps, stats.swaps, self._puller.deltas, self._engine.version)

    @concurrent_endpoint
    async def reported_deltas(self) -> int:
        return self._pulls.deltas

    @concurrent_endpoint
    async def derail(self) -> None:
        """As if another token had been sampled here."""
        lockstep = self._engine._jobs.lockstep
        assert lockstep is not None
        lockstep._sampled += 1
