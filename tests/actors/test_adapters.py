"""LoRA: trained on one and on three FSDP2 ranks, staged, written in place into a real vLLM engine, in flight too, sampled from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from actors.generator import Generator
from monarch_rl.config import TrainerConfig
from monarch_rl.configure import load
from monarch_rl.engine import Engine, EngineError
from monarch_rl.engine_adapter import ID, live_adapters
from monarch_rl.groups import make_shards
from monarch_rl.learner import Learner
from monarch_rl.model_config import LoraConfig
from monarch_rl.models import add_adapters, base_weights, full_tensors, load_causal_lm, local_shards, save_adapters, save_pretrained
from monarch_rl.types import Generation, Sampling, Version
from monarch_rl.weights.adapters import merged
from monarch_rl.weights.plan import LoadPlan
from monarch_rl.weights.pull import WeightsDiffer
from monarch_rl.weights.slots import fingerprints
from tests.actors.test_models import recorded_groups, write
from tests.engines import held_after
from tests.random_models import VOCABULARY, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WORLDS = (1, 3)
STEP, STEPS = 2, 3
MODELS = {"qwen2": ("float32", 1), "qwen3_tied": ("float32", 4), "llama": ("bfloat16", 12)}
"""Shape → dtype and rank of its adapters: with 1 and with 4, some of three trainer ranks hold no row of them."""
PAIR = "model.layers.0.self_attn.q_proj"


def lora(shape: str) -> LoraConfig:
    return LoraConfig(rank=MODELS[shape][1], alpha=24)


def train(path: Path, shape: str, rank: int, world: int) -> dict[str, Any]:
    """Two optimizer steps on the same groups, held to the base model: the second has adapters that do something."""
    learner = Learner(
        add_adapters(load_causal_lm(str(path)), lora(shape), seed=5),
        TrainerConfig(warmup_steps=0, lr=1e-2, kl=0.1),
        total_steps=STEPS,
        device_mesh=init_device_mesh("cpu", (world,)),
        bf16=MODELS[shape][0] == "bfloat16",
    )
    groups = torch.load(path / "groups.pt", weights_only=False)
    metrics = [learner.step(make_shards(groups, STEP, world, budget=80)[rank]) for _ in range(2)]
    gradients = {name: p.grad for name, p in learner.model.causal_lm.named_parameters()}
    if world == max(WORLDS):
        save_pretrained(learner.model, path / "merged", str(path), getattr(torch, MODELS[shape][0]))
        save_adapters(learner.model, path / "adapter")
    base = {name: p.full_tensor() for name, p in base_weights(learner.model.causal_lm).items()}
    return {
        "metrics": metrics,
        "optimized": [len(group["params"]) for group in learner.optimizer.param_groups],
        "gradients": {name: g.full_tensor() for name, g in gradients.items() if g is not None},
        "shards": local_shards(learner.model),
        "full": full_tensors(learner.model),
        "base": base,
    }


def work(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    for shape in MODELS:
        torch.save(train(folder / shape, shape, rank, world), folder / shape / f"{world}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each model: as it was, and as ranks of each world trained adapters on it in processes of their own."""
    folder = tmp_path_factory.mktemp("adapters")
    os.environ["OMP_NUM_THREADS"] = "1"
    for shape in MODELS:
        path = write_model(folder / shape, shape)
        torch.save(recorded_groups(AutoModelForCausalLM.from_pretrained(path).eval()), path / "groups.pt")
    for world in WORLDS:
        torch.multiprocessing.spawn(work, args=(world, folder), nprocs=world)
    return folder


def trained(path: Path, world: int) -> list[dict[str, Any]]:
    """Results of each rank."""
    return [torch.load(path / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize("shape", [shape for shape, (dtype, _) in MODELS.items() if dtype == "float32"])
async def test_three_ranks_train_as_one(folder: Path, shape: str) -> None:
    """Case 52: equal losses and gradients, to rounding; of the reference, which is the base model, too."""
    (one,) = trained(folder / shape, 1)
    assert [m["kl/ref"] > 0 for m in one["metrics"]] == [False, True]
    for rank in trained(folder / shape, 3):
        for own, expected in zip(rank["metrics"], one["metrics"], strict=True):
            assert {**own, "padding/frac": 0} == pytest.approx({**expected, "padding/frac": 0}, rel=1e-3, abs=1e-5)
        torch.testing.assert_close(rank["gradients"], one["gradients"], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", MODELS)
async def test_adapters_alone_are_trained(folder: Path, shape: str) -> None:
    """All that has a gradient is in the optimizer and travels; the base model is what it was, bit for bit."""
    before = dict(load_causal_lm(str(folder / shape)).named_parameters())
    for world in WORLDS:
        for rank in trained(folder / shape, world):
            assert rank["optimized"] == [len(rank["gradients"])] == [len(rank["full"])] == [2 * 7 * 2]
            assert all("lora_" in name for name in [*rank["gradients"], *rank["full"]])
            torch.testing.assert_close(rank["base"], {name: p.detach() for name, p in before.items()}, atol=0, rtol=0)
            assert min(float(weight.abs().max()) for weight in rank["full"].values()) > 0


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], generation: Generation) -> Tensor:
    ids = torch.tensor([prompt + generation.ids_T.tolist()])
    of_all = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return of_all.gather(-1, ids[0, len(prompt) :, None])[:, 0]


async def sample(engine: Engine, prompts: list[list[int]], tokens: int = 48) -> list[Generation]:
    return list(await asyncio.gather(*[engine.generate(ids, Sampling(tokens, 1.0), seed) for seed, ids in enumerate(prompts)]))


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, VOCABULARY, 3 + 2 * n).tolist() for n in range(count)]


async def started(path: Path, dtype: str, adapters: LoraConfig, **settings: Any) -> tuple[Engine, LoadPlan]:
    engine = Engine(str(path), dtype, seed=0, overrides={"kv_cache_memory_bytes": 64 << 20}, lora=adapters, **settings)
    return engine, await engine.start()


@pytest.mark.parametrize("shape", MODELS)
async def test_the_engine_holds_and_samples_what_was_trained(folder: Path, shape: str) -> None:
    """Case 35: whatever the ranks, its adapters and its base model are the trainer's; its logprobs are those of the merged model that the
    trainer saves, and of its adapters in peft."""
    path, dtype = folder / shape, MODELS[shape][0]
    engine, plan = await started(path, dtype, lora(shape))
    assert plan.base is not None
    (nothing,) = await engine.fingerprints()
    for world in WORLDS:
        ranks = trained(path, world)
        engine.stage(lambda views, ranks=ranks: write(plan, ranks, views), Version(0, world))
        await engine.swap(Version(0, world))
        expected = fingerprints(plan, [piece.cut(ranks[0]["full"][piece.name]) for piece in plan.pieces])
        assert await engine.fingerprints() == [expected]
        assert not expected.items() & nothing.items()
        base = fingerprints(plan.base, [piece.cut(ranks[0]["base"][piece.name]) for piece in plan.base.pieces])
        assert await engine.fingerprints(base=True) == [base]
    generations = await sample(engine, prompts(12))
    assert live_adapters(engine._llm) == [ID]
    await engine.close()
    base_model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    as_merged = AutoModelForCausalLM.from_pretrained(path / "merged", dtype=getattr(torch, dtype)).eval()
    for policy in (as_merged, PeftModel.from_pretrained(base_model, str(path / "adapter")).eval()):
        gaps = torch.cat(
            [
                (logprobs(policy, ids, generation) - torch.from_numpy(generation.logprobs_T)).abs()
                for ids, generation in zip(prompts(12), generations, strict=True)
            ]
        )
        if dtype == "float32":
            assert gaps.max() <= 1e-4
        assert gaps.mean() <= (2e-6 if dtype == "float32" else 0.05)


class Live:
    """An engine, and adapters of versions that are known."""

    def __init__(self, engine: Engine, plan: LoadPlan, path: Path) -> None:
        self.engine, self.plan, self.step, self._path = engine, plan, 0, path
        self.policies: dict[int, PreTrainedModel] = {}

    async def publish(self) -> int:
        """Another random adapter, so large that each version has its own opinion."""
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        made = {p.name: 0.15 * torch.randn(p.shape, generator=generator) for p in self.plan.pieces}
        policy = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
        for name, parameter in policy.named_parameters():
            a = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            if a in made:
                parameter.data = merged(parameter.data, made[a], made[a.replace("lora_A", "lora_B")], 1.0)
        self.policies[self.step] = policy

        def fill(views: list[Tensor]) -> None:
            for piece, view in zip(self.plan.pieces, views, strict=True):
                view.copy_(piece.cut(made[piece.name]))

        self.engine.stage(fill, Version(0, self.step))
        await self.engine.swap(Version(0, self.step))
        return self.step


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["keep", "recompute"])
async def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    path = write_model(tmp_path_factory.mktemp("live") / "model", "qwen3_untied")
    engine, plan = await started(
        path, "float32", LoraConfig(rank=3, targets=["q_proj", "o_proj", "up_proj", "down_proj"]), kv=request.param
    )
    with pytest.raises(EngineError, match="before the first swap"):
        await engine.generate([1], Sampling(1), 0)
    yield Live(engine, plan, path)
    await engine.close()


@torch.no_grad()
def by_version(live: Live, prompt: list[int], generation: Generation) -> Tensor:
    """[T] logprobs of the tokens, each by the version that it names; with `kv=keep` over the keys and values of those before it."""
    steps = [Version.unpack(int(packed)).step for packed in generation.versions_T]
    ids = torch.tensor([prompt + generation.ids_T.tolist()])
    parts, cache, read = [], DynamicCache(), 0
    for step in sorted(set(steps)):
        past = len(prompt) + steps.index(step) + steps.count(step) - 1
        if live.engine._kv == "recompute":
            cache, read = DynamicCache(), 0
        logits = live.policies[step](ids[:, read:past], past_key_values=cache, use_cache=True).logits[0, -steps.count(step) :]
        parts.append(logits.log_softmax(-1).gather(-1, ids[0, past + 1 - steps.count(step) : past + 1, None])[:, 0])
        read = past
    return torch.cat(parts)


async def test_adapters_are_replaced_in_place_and_in_flight(live: Live) -> None:
    """Case 33: every token is of the one adapter that it names, before, between and after swaps, and vLLM holds one adapter all along."""
    await live.publish()
    asked = asyncio.ensure_future(sample(live.engine, prompts(6), tokens=60))
    for _ in range(5):
        async with held_after(live.engine, 48):
            published = asyncio.ensure_future(live.publish())
        await published
        assert live_adapters(live.engine._llm) == [ID]
    generations = await asked
    gaps = []
    for prompt, generation in zip(prompts(6), generations, strict=True):
        assert len(set(generation.versions_T.tolist())) >= 4
        gaps.append((by_version(live, prompt, generation) - torch.from_numpy(generation.logprobs_T)).abs())
    assert torch.cat(gaps).max() <= 1e-4
    assert torch.cat(gaps).mean() <= 2e-6


async def test_a_prefix_that_an_older_adapter_has_computed_is_not_found(live: Live) -> None:
    """Case 42, with a prompt of several blocks."""
    prompt = np.random.default_rng(9).integers(0, VOCABULARY, 100).tolist()
    for _ in range(3):
        step = await live.publish()
        (generation,) = await sample(live.engine, [prompt], tokens=8)
        gaps = (logprobs(live.policies[step], prompt, generation) - torch.from_numpy(generation.logprobs_T)).abs()
        assert gaps.max() <= 1e-4


async def test_many_swaps_leave_one_adapter_and_no_memory(live: Live) -> None:
    """Case 33: nothing leaks. The places that are written are the same ones for good."""
    places = [view.data_ptr() for view in live.engine._views]
    for _ in range(100):
        live.engine.stage(lambda views: [view.fill_(0.01) for view in views], Version(0, live.step))  # type: ignore[func-returns-value]
        await live.engine.swap(Version(0, live.step))
        await sample(live.engine, prompts(1), tokens=1)
    assert live_adapters(live.engine._llm) == [ID]
    assert [view.data_ptr() for view in live.engine._views] == places
    manager = live.engine._llm.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    held = [tensor for layer in manager._registered_adapters[ID].loras.values() for tensor in (*layer.lora_a, *layer.lora_b)]
    assert all(tensor is None or tensor.is_meta for tensor in held), "vLLM keeps a copy of its own"


async def test_a_generator_with_another_base_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """Case 35, of the base: its directory is not what the trainer has read."""
    other = write_model(tmp_path / "other", "qwen2", seed=1)
    engine, plan = await started(other, "float32", lora("qwen2"))
    assert plan.base is not None
    ranks = trained(folder / "qwen2", 1)
    expected = fingerprints(plan.base, [piece.cut(ranks[0]["base"][piece.name]) for piece in plan.base.pieces])
    generator = Generator(load(["recipe=grpo_qwen", "profile=cpu"]).config, 1, metrics=None)  # type: ignore[arg-type]
    generator._engine, generator._directory = engine, str(other)
    with pytest.raises(
        WeightsDiffer, match=r"^generator 1: the base model that it has read from .*/other is not the trainer's: model\.\S+ differs$"
    ):
        await generator._check_base([expected])
    await generator._check_base(await engine.fingerprints(base=True))
    await engine.close()
