"""A real vLLM engine and the trainer's side of it, in the process of the test."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from monarch_rl.engine import Engine
from monarch_rl.models import PolicyModel, on_device
from monarch_rl.packing import collate
from monarch_rl.trajectory import Trajectory
from monarch_rl.types import Episode, Generation, Sampling, Version
from monarch_rl.weights.plan import LoadPlan, apply, layout, region_bytes, shard_rows, stage

RANKS = 3


@dataclass
class System:
    """An engine, and the trainer's side of it: one model whose shards are staged as `RANKS` ranks would."""

    engine: Engine
    plan: LoadPlan
    model: PreTrainedModel
    path: Path
    step: int = 0

    def write(self, views: list[Tensor]) -> None:
        layouts = [layout(self.plan, rank, RANKS) for rank in range(RANKS)]
        regions = [torch.zeros(region_bytes(blocks), dtype=torch.uint8) for blocks in layouts]
        for rank, (blocks, region) in enumerate(zip(layouts, regions, strict=True)):
            local = {name: p[slice(*shard_rows(p.shape[0], rank, RANKS))] for name, p in self.model.named_parameters()}
            stage(blocks, self.plan, local, region, rank, RANKS)
        apply(self.plan, layouts, regions, views)

    async def publish(self) -> Version:
        self.step += 1
        version = Version(0, self.step)
        await self.engine.swap(self.write, version)
        return version

    def train(self) -> PreTrainedModel:
        """Change every parameter; returns the model as it was."""
        before = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return before

    def prompts(self, count: int, longest: int = 60) -> list[list[int]]:
        generator = torch.Generator().manual_seed(count)
        lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
        return [torch.randint(0, self.model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    async def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int = 0) -> list[Generation]:
        requests = [self.engine.generate(prompt, sampling, seed + index) for index, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*requests))


async def started(path: Path, kv_bytes: int = 64 << 20, dtype: str = "float32", **settings: Any) -> System:
    """`settings` are the engine's."""
    engine = Engine(str(path), dtype, seed=0, overrides={"kv_cache_memory_bytes": kv_bytes}, **settings)
    plan = await engine.start()
    return System(engine, plan, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), path)


async def tokens(engine: Engine, more: int) -> None:
    """Return once `more` tokens were sampled. Polls, because the engine says nothing before a request ends."""
    target = engine.stats().tokens + more
    async with asyncio.timeout(60):
        while engine.stats().tokens < target:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def held_after(engine: Engine, more: int) -> AsyncIterator[None]:
    """The block runs when `more` tokens were sampled, and no further one is before it has ended, however slow the machine is."""
    target, go_on, step = engine.stats().tokens + more, threading.Event(), engine._llm.step

    def hold() -> object:
        if engine.stats().tokens >= target:
            assert go_on.wait(60)
        return step()

    engine._llm.step = hold
    try:
        await tokens(engine, more)
        yield
        await asyncio.sleep(0)  # what the block has asked for is in the engine's queue
    finally:
        engine._llm.step = step
        go_on.set()


def episodes_of(prompts: Sequence[list[int]], generations: Sequence[Generation], temperature: float) -> list[Episode]:
    made = []
    for prompt, generation in zip(prompts, generations, strict=True):
        trajectory = Trajectory(prompt)
        trajectory.append_sampled(generation, "")
        made.append(trajectory.episode("", temperature))
        made[-1].reward = 1.0
    return made


@torch.no_grad()
def gaps(system: System, episodes: Sequence[Episode], but: Sequence[str] = ()) -> Tensor:
    """[tokens] |Δ log-probability|, engine against the trainer's forward pass without some of the channels."""
    batch = collate(episodes)
    channels = {name: channel for name, channel in batch.channels.items() if name not in but}
    model = PolicyModel(system.model, logprob_chunk=64)
    arrays = (batch.inputs_BT, batch.positions_N, batch.targets_N, batch.temperatures_N)
    logprobs_N, _ = model(*map(torch.from_numpy, arrays), on_device(channels, torch.device("cpu")))
    model.replay.use(None)  # other tests ask the model what it would choose
    return (logprobs_N - torch.from_numpy(batch.logprobs_N)).abs()
