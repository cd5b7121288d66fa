"""Any Hugging Face causal LM: trained on one and on two FSDP2 ranks, staged, written into a real vLLM engine, sampled from."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from monarch_rl.config import TrainerConfig
from monarch_rl.engine import Engine
from monarch_rl.groups import judge, make_shards
from monarch_rl.learner import Learner
from monarch_rl.models import full_tensors, load_causal_lm, local_shards, save_pretrained
from monarch_rl.types import Generation, Group, Prompt, Sampling, Version
from monarch_rl.weights.plan import LoadPlan, apply, layout, region_bytes, shard_rows, stage
from monarch_rl.weights.slots import fingerprints
from tests.batches import episode, sampled_by
from tests.random_models import OWN_LOADER, SHAPES, VOCABULARY, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WORLDS = (1, 2)
DTYPES = ("float32", "bfloat16")
STEP = 2
TEMPERATURE = 0.7


def recorded_groups(model: PreTrainedModel, seed: int = 0) -> list[Group]:
    """Three trainable groups of uneven rows and one dead one; with an unscorable episode, and one of older weights."""
    draw = random.Random(seed)
    groups = []
    for ordinal in range(4):
        episodes = [episode(draw.randint(1, 9), draw.randint(4, 31), draw, draw.random(), Version(0, STEP - 1)) for _ in range(4)]
        groups.append(Group(Prompt(ordinal, ""), episodes))
    groups[1].episodes[2].reward = None
    stale = groups[2].episodes[0]
    stale.versions_T[stale.loss_mask_T] = Version(0, STEP - 2).pack()
    for e in groups[3].episodes:
        e.reward = 1.0
    sampled_by(model, [e for group in groups for e in group.episodes], TEMPERATURE, lambda: draw.gauss(0, 0.1))
    assert [judge(group) for group in groups] == ["trainable"] * 3 + ["dead"]
    return groups


def train(path: Path, dtype: str, rank: int, world: int) -> dict[str, Any]:
    """One optimizer step on the recorded groups of the model, cut for this many ranks."""
    learner = Learner(
        load_causal_lm(str(path)),
        TrainerConfig(warmup_steps=0, lr=1e-3),
        total_steps=STEP,
        device_mesh=init_device_mesh("cpu", (world,)),
        bf16=dtype == "bfloat16",
    )
    groups = torch.load(path / "groups.pt", weights_only=False)
    metrics = learner.step(make_shards(groups, STEP, world, budget=80)[rank])
    gradients = {name: p.grad.full_tensor() for name, p in learner.model.causal_lm.named_parameters()}
    if world == max(WORLDS):
        save_pretrained(learner.model, saved(path, dtype), str(path), getattr(torch, dtype))
    return {"metrics": metrics, "gradients": gradients, "shards": local_shards(learner.model), "full": full_tensors(learner.model)}


def saved(path: Path, dtype: str) -> Path:
    return path / f"saved-{dtype}"


def result(path: Path, dtype: str, world: int, rank: int) -> Path:
    return path / f"{dtype}-{world}-{rank}.pt"


def work(rank: int, world: int, folder: Path) -> None:
    """What one rank of a world does with every model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    for shape in SHAPES:
        for dtype in DTYPES:
            torch.save(train(folder / shape, dtype, rank, world), result(folder / shape, dtype, world, rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each model: as it was, and as ranks of each world trained it in processes of their own."""
    folder = tmp_path_factory.mktemp("models")
    os.environ["OMP_NUM_THREADS"] = "1"
    for shape in SHAPES:
        path = write_model(folder / shape, shape)
        torch.save(recorded_groups(AutoModelForCausalLM.from_pretrained(path).eval()), path / "groups.pt")
    for world in WORLDS:
        torch.multiprocessing.spawn(work, args=(world, folder), nprocs=world)
    return folder


def trained(path: Path, dtype: str, world: int) -> list[dict[str, Any]]:
    """Results of each rank."""
    return [torch.load(result(path, dtype, world, rank), weights_only=False) for rank in range(world)]


@pytest.mark.parametrize("shape", SHAPES)
async def test_two_ranks_train_as_one(folder: Path, shape: str) -> None:
    """Case 52: the same groups cut for one and for two ranks give equal losses, gradients and weights, to rounding."""
    (one,) = trained(folder / shape, "float32", 1)
    two = trained(folder / shape, "float32", 2)
    assert one["metrics"]["tokens/trained"] > 100
    assert one["metrics"]["grad_norm"] > 1e-2
    for rank in two:
        assert {**rank["metrics"], "padding/frac": 0} == pytest.approx({**one["metrics"], "padding/frac": 0}, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(rank["gradients"], one["gradients"], atol=1e-6, rtol=1e-4)
        for name, gradient in one["gradients"].items():
            clear = gradient.abs() > 1e-6  # AdamW's first step is lr · g/|g|: where g is rounding alone, so is the step
            torch.testing.assert_close(rank["full"][name][clear], one["full"][name][clear], atol=1e-5, rtol=1e-5)
    before = dict(load_causal_lm(str(folder / shape)).named_parameters())
    assert [name for name, weight in one["full"].items() if torch.equal(weight, before[name])] == []


def write(plan: LoadPlan, ranks: list[dict[str, Any]], views: list[Tensor]) -> None:
    """What the ranks stage from their shards, and the engine's side of it."""
    world = len(ranks)
    layouts = [layout(plan, rank, world) for rank in range(world)]
    regions = [torch.zeros(region_bytes(blocks), dtype=torch.uint8) for blocks in layouts]
    for rank, (blocks, region) in enumerate(zip(layouts, regions, strict=True)):
        stage(blocks, plan, ranks[rank]["shards"], region, rank, world)
    apply(plan, layouts, regions, views)


async def sample(engine: Engine, prompts: list[list[int]]) -> list[Generation]:
    return list(await asyncio.gather(*[engine.generate(ids, Sampling(48, TEMPERATURE), seed) for seed, ids in enumerate(prompts)]))


@torch.no_grad()
def gaps(model: PreTrainedModel, prompts: list[list[int]], generations: list[Generation]) -> Tensor:
    """[tokens] |Δ log-probability| of what was sampled, engine against a plain forward pass."""
    found = []
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = torch.tensor([prompt + generation.ids_T.tolist()])
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE, -1)
        own = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append((own - torch.from_numpy(generation.logprobs_T)).abs())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_engine_holds_and_samples_what_was_trained(folder: Path, shape: str, dtype: str) -> None:
    """Case 35: whatever the ranks, its weights are the trainer's, and its logprobs those of the directory that the trainer saves."""
    path = folder / shape
    engine = Engine(str(path), dtype, seed=0, overrides={"kv_cache_memory_bytes": 64 << 20})
    plan = await engine.start()
    for world in WORLDS:
        ranks = trained(path, dtype, world)
        engine.stage(lambda views, ranks=ranks: write(plan, ranks, views), version := Version(0, world))
        await engine.swap(version)
        expected = fingerprints(plan, [piece.cut(ranks[0]["full"][piece.name]) for piece in plan.pieces])
        assert await engine.fingerprints() == [expected]
    prompts = [np.random.default_rng(n).integers(0, VOCABULARY, 3 + 2 * n).tolist() for n in range(12)]
    generations = await sample(engine, prompts)
    await engine.close()
    reference = AutoModelForCausalLM.from_pretrained(saved(path, dtype), dtype=getattr(torch, dtype)).eval()
    found = gaps(reference, prompts, generations)
    if dtype == "float32":
        assert found.max() <= 1e-4
    assert found.mean() <= (2e-6 if dtype == "float32" else 0.05)  # bfloat16: kernels round differently, and experts change hands


@pytest.mark.parametrize("shape", OWN_LOADER)
async def test_where_copies_are_not_enough_the_engine_loads_whole_tensors_at_each_swap(tmp_path: Path, shape: str) -> None:
    """Case 35: it samples what the trainer's model computes, after every swap."""
    model = load_causal_lm(str(write_model(tmp_path / shape, shape)))
    engine = Engine(str(tmp_path / shape), "float32", seed=0, overrides={"kv_cache_memory_bytes": 64 << 20})
    plan = await engine.start()
    assert plan.loader
    prompts = [np.random.default_rng(n).integers(0, VOCABULARY, 3 + 2 * n).tolist() for n in range(6)]
    for world in WORLDS:
        full = {name: p.detach() for name, p in model.named_parameters()}
        for weight in full.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(world)))
        ranks = [{"shards": {n: w[slice(*shard_rows(len(w), rank, world))] for n, w in full.items()}} for rank in range(world)]
        engine.stage(lambda views, ranks=ranks: write(plan, ranks, views), Version(0, world))
        await engine.swap(Version(0, world))
        assert await engine.fingerprints() == [fingerprints(plan, [piece.cut(full[piece.name]) for piece in plan.pieces])]
        found = gaps(model, prompts, await sample(engine, prompts))
        assert found.max() <= 1e-4
        assert found.mean() <= 2e-6
    await engine.close()
