"""A real vLLM engine against transformers: logprobs, versions, swaps in flight, seeds, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, distributed_c10d
from transformers import (
    AutoConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from actors.generator import Generator
from monarch_rl import engine as engine_module
from monarch_rl.configure import load
from monarch_rl.engine import Engine, EngineError
from monarch_rl.engine_requests import PromptTooLong, UnusablePrompt
from monarch_rl.types import Generation, Sampling, Version
from monarch_rl.weights.pull import WeightsDiffer
from monarch_rl.weights.slots import checksum
from tests.engines import System, held_after, started

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SHIPPED = Path(engine_module.__file__).parent / "assets" / "tiny_qwen3"
CONTEXT = 256


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, with a padded vocabulary (81 → 128) and weights large enough for a peaked distribution."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=81,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["random", "shipped"])
async def system(request: pytest.FixtureRequest, random_model: Path) -> AsyncIterator[System]:
    system = await started(random_model if request.param == "random" else SHIPPED)
    with pytest.raises(EngineError, match="before the first swap"):
        await system.engine.generate([1], Sampling(1), 0)
    await system.publish()
    yield system
    await system.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def doomed(random_model: Path) -> AsyncIterator[System]:
    """An engine of one's own, to break."""
    system = await started(random_model)
    await system.publish()
    yield system
    await system.engine.close()


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: list[int], generation: Generation, temperature: float = 1.0) -> Tensor:
    """Logprobs [T] of the sampled tokens by a plain forward pass."""
    ids = torch.tensor([prompt + generation.ids_T.tolist()])
    logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def reference_after(old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], generation: Generation, switch: int) -> Tensor:
    """Logprobs [T - switch] of the tokens from `switch` on, by new weights over the keys and values of the old."""
    ids = torch.tensor([prompt + generation.ids_T.tolist()])
    first = len(prompt) + switch - 1
    past = old(ids[:, :first], use_cache=True).past_key_values
    logprobs = torch.log_softmax(new(ids[:, first:-1], past_key_values=past).logits[0], -1)
    return logprobs.gather(-1, ids[0, first + 1 :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_transformers(system: System, temperature: float) -> None:
    prompts = system.prompts(64)
    generations = await system.generate(prompts, Sampling(64, temperature))
    errors = torch.cat(
        [
            (torch.from_numpy(generation.logprobs_T) - reference(system.model, prompt, generation, temperature)).abs()
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
    )
    assert len(errors) == 64 * 64
    assert errors.max() <= 1e-4
    assert errors.mean() <= 2e-6


async def test_a_swap_in_flight_splits_versions_exactly(system: System) -> None:
    """Cases 28, 37: each token names the weights that sampled it, and no forward pass saw two."""
    prompts = system.prompts(24)
    old_version = system.engine.version
    running = asyncio.ensure_future(system.generate(prompts, Sampling(80)))
    async with held_after(system.engine, 24 * 20):
        old = system.train()
        swap = asyncio.ensure_future(system.publish())
    new_version = await swap
    worst_old = worst_new = 0.0
    assert old_version is not None
    for prompt, generation in zip(prompts, await running, strict=True):
        switch = int((generation.versions_T == old_version.pack()).sum())
        assert 0 < switch < 80
        assert generation.versions_T.tolist() == [old_version.pack()] * switch + [new_version.pack()] * (80 - switch)
        logprobs = torch.from_numpy(generation.logprobs_T)
        worst_old = max(worst_old, float((logprobs - reference(old, prompt, generation))[:switch].abs().max()))
        stale = reference_after(old, system.model, prompt, generation, switch)
        worst_new = max(worst_new, float((logprobs[switch:] - stale).abs().max()))
    assert worst_old <= 1e-4
    assert worst_new <= 1e-4


async def test_with_recompute_tokens_after_a_swap_are_those_of_the_new_weights_alone(random_model: Path) -> None:
    """Case 42: nothing that the old weights computed is left, and requests go on where they were."""
    system = await started(random_model, kv="recompute")
    old_version = await system.publish()
    prompts = system.prompts(24)
    running = asyncio.ensure_future(system.generate(prompts, Sampling(80)))
    async with held_after(system.engine, 24 * 20):
        old = system.train()
        swap = asyncio.ensure_future(system.publish())
    new_version = await swap
    for prompt, generation in zip(prompts, await running, strict=True):
        switch = int((generation.versions_T == old_version.pack()).sum())
        assert 0 < switch < 80
        assert generation.versions_T.tolist() == [old_version.pack()] * switch + [new_version.pack()] * (80 - switch)
        logprobs = torch.from_numpy(generation.logprobs_T)
        assert (logprobs - reference(old, prompt, generation))[:switch].abs().max() <= 1e-4
        assert (logprobs - reference(system.model, prompt, generation))[switch:].abs().max() <= 1e-4
    await system.engine.close()


async def test_after_a_swap_the_engine_holds_the_trainers_weights(system: System) -> None:
    system.train()
    await system.publish()
    trainer = dict(system.model.named_parameters())
    (model,) = system.engine._llm.apply_model(lambda model: model)
    live = dict(model.named_parameters())
    layer = "model.layers.1"
    qkv = torch.cat([trainer[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(live[f"{layer}.self_attn.qkv_proj.weight"], qkv)
    assert torch.equal(live[f"{layer}.mlp.down_proj.weight"], trainer[f"{layer}.mlp.down_proj.weight"])
    vocabulary = system.model.config.vocab_size
    assert torch.equal(live["model.embed_tokens.weight"][:vocabulary], trainer["model.embed_tokens.weight"])
    expected = {name: checksum(p.detach().view(torch.uint8).view(-1)) for name, p in trainer.items()}
    assert await system.engine.fingerprints() == [expected]


async def test_a_swap_does_not_leave_old_prefixes_in_the_cache(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 42: shared prefix, swap, ask again → as a fresh prefill; and without a swap the prefix is shared."""
    cached: list[int] = []

    def spy(output: Any, *rest: Any) -> Generation:
        cached.append(output.num_cached_tokens)
        return plain(output, *rest)

    plain = engine_module.generation_of
    monkeypatch.setattr(engine_module, "generation_of", spy)
    prompt = system.prompts(1, 2)[0] * 100
    for _ in range(2):
        await system.generate([prompt], Sampling(8))
    system.train()
    await system.publish()
    (generation,) = await system.generate([prompt], Sampling(8))
    assert cached == [0, 96, 0]
    assert (torch.from_numpy(generation.logprobs_T) - reference(system.model, prompt, generation)).abs().max() <= 1e-4


async def test_seeds_make_episodes_distinct_and_repeatable(system: System) -> None:
    """Case 63: a group of 4 with seeds of its own; the same again in other company; another seed differs."""
    prompt = system.prompts(3)[2]
    sampling = Sampling(32)
    first = await system.generate([prompt] * 4, sampling, seed=100)
    crowd = await system.generate([prompt] * 4 + system.prompts(12), sampling, seed=100)
    other = await system.generate([prompt] * 4, sampling, seed=200)
    ids = [tuple(generation.ids_T.tolist()) for generation in first]
    assert len(set(ids)) == 4
    assert [tuple(generation.ids_T.tolist()) for generation in crowd[:4]] == ids
    assert not set(ids) & {tuple(generation.ids_T.tolist()) for generation in other}


async def test_a_stop_id_ends_the_completion_and_is_part_of_it(system: System) -> None:
    every = tuple(range(system.model.config.vocab_size))
    (empty,) = await system.generate([[1, 2]], Sampling(16, stop_ids=every))
    assert (len(empty.ids_T), len(empty.logprobs_T), len(empty.versions_T), empty.finish_reason) == (1, 1, 1, "stop")
    (free,) = await system.generate([[1, 2]], Sampling(16))
    assert (len(free.ids_T), free.finish_reason) == (16, "length")
    last = int(free.ids_T[5])
    (stopped,) = await system.generate([[1, 2]], Sampling(16, stop_ids=(last,)))
    assert stopped.finish_reason == "stop"
    assert stopped.ids_T.tolist() == free.ids_T.tolist()[: free.ids_T.tolist().index(last) + 1]
    assert (stopped.ids_T.dtype, stopped.logprobs_T.dtype, stopped.versions_T.dtype) == (np.int32, np.float32, np.int64)


def meeting_file() -> Path:
    store = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, FileStore)
    return Path(store.path)


async def test_no_temporary_file_is_left_of_its_start(system: System) -> None:
    assert not meeting_file().exists()


async def test_bad_prompts_leave_the_engine_unharmed(system: System) -> None:
    context, vocabulary = system.engine._context, system.model.config.vocab_size
    with pytest.raises(PromptTooLong, match=f"a prompt of {context} tokens leaves no room in a context of {context} tokens"):
        await system.engine.generate([1] * context, Sampling(8), 0)
    for ids, said in (
        ([], "without a token"),
        ([1, vocabulary], f"token {vocabulary} is unknown.*from 0 to {vocabulary - 1}"),
        ([-1], "-1"),
    ):
        with pytest.raises(UnusablePrompt, match=said):
            await system.engine.generate(ids, Sampling(8), 0)
    with pytest.raises(ValueError, match=r"temperature 0\.001"):
        await system.engine.generate([1], Sampling(8, temperature=0.001), 0)
    assert not system.engine._waiting, "nobody waits for what was refused, and nothing would be heard of it when the engine closes"
    (clipped,) = await system.generate([[1] * (context - 3)], Sampling(8))
    assert (len(clipped.ids_T), clipped.finish_reason) == (3, "length")


async def test_abort_returns_what_was_sampled(system: System) -> None:
    request = asyncio.ensure_future(system.engine.generate([1, 2, 3], Sampling(200), 5, request_id="mine"))
    async with held_after(system.engine, 3):
        again = asyncio.ensure_future(system.engine.generate([1], Sampling(1), 0, request_id="mine"))
        abort = asyncio.ensure_future(system.engine.abort("mine"))
    with pytest.raises(EngineError, match="mine is already running"):
        await again
    await abort
    partial = await request
    whole = await system.engine.generate([1, 2, 3], Sampling(200), 5)
    length = len(partial.ids_T)
    assert partial.finish_reason == "abort"
    assert 0 < length < 200
    assert len(partial.logprobs_T) == len(partial.versions_T) == length
    assert partial.ids_T.tolist() == whole.ids_T.tolist()[:length]
    await system.engine.abort("mine")


async def test_a_cancelled_generation_leaves_the_engine(system: System) -> None:
    request = asyncio.ensure_future(system.engine.generate([1, 2, 3], Sampling(200), 5))
    async with held_after(system.engine, 3):
        request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await system.engine.abort("nothing: only returns when the engine has passed this point")
    assert system.engine.stats().running == 0


async def test_statistics_count_every_token_and_sleep_when_idle(system: System) -> None:
    before = system.engine.stats()
    await system.engine.generate_group([1, 2, 3], Sampling(10), range(8))
    after = system.engine.stats()
    await asyncio.sleep(0.3)
    await system.publish()
    idle = system.engine.stats()
    assert after.tokens - before.tokens == 80
    assert 10 <= after.steps - before.steps <= 12
    assert idle.steps == after.steps
    assert idle.idle_s - after.idle_s >= 0.29
    assert (idle.swaps - after.swaps, idle.running) == (1, 0)
    assert idle.pause_s > after.pause_s


async def fails(system: System, break_it: Callable[[], Any], cause: str) -> None:
    """Breaking the engine fails what is pending, and what comes later at once."""
    pending = [asyncio.ensure_future(system.engine.generate([1, 2], Sampling(200), seed)) for seed in range(3)]
    async with held_after(system.engine, 6):
        broken = break_it()
    for result in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert cause in str(result)
    if broken is not None:
        with pytest.raises(EngineError, match=cause):
            await broken
    with pytest.raises(EngineError, match=cause):
        await system.engine.generate([1], Sampling(1), 0)


async def test_a_failing_write_fails_the_engine(doomed: System) -> None:
    """Half-written weights must not serve a single token."""

    def write(views: list[Tensor]) -> None:
        views[0].zero_()
        raise OSError("the network is gone")

    def swap() -> asyncio.Future[float]:
        doomed.engine.stage(write, Version(0, 9))
        return asyncio.ensure_future(doomed.engine.swap(Version(0, 9)))

    await fails(doomed, swap, r"writing weights of version 0.9: the network is gone")


async def test_weights_that_differ_from_the_trainers_end_the_replica_that_holds_them(doomed: System) -> None:
    """Case 35: the error names replica, version and tensor, and nothing more is served."""

    def compare(views: list[Tensor]) -> None:
        assert torch.equal(views[0], doomed.model.get_parameter(doomed.plan.pieces[0].name))
        raise WeightsDiffer(f"the live weights are not those of version 0.7: {doomed.plan.pieces[0].name} differs from trainer rank 1's")

    generator = Generator(load(["recipe=grpo_qwen", "profile=cpu", "weights.verify=every"]).config, 1, metrics=None)  # type: ignore[arg-type]
    generator._engine = doomed.engine
    doomed.engine.stage(doomed.write, Version(0, 7), compare)
    with pytest.raises(WeightsDiffer, match=r"^generator 1: .* not those of version 0\.7: model\.\S+ differs from trainer"):
        await generator._swap(Version(0, 7), 0, 0)
    with pytest.raises(EngineError):
        await doomed.engine.generate([1], Sampling(1), 0)


async def test_a_swap_that_has_begun_is_told_of_though_the_replica_is_to_pull_no_more(doomed: System) -> None:
    """Or a request for this very version would wait for the next one."""
    generator = Generator(load(["recipe=grpo_qwen", "profile=cpu"]).config, 1, metrics=Mock())
    generator._engine, generator._puller, generator._moved = doomed.engine, Mock(deltas=0), 0
    version, writes, may_end = Version(0, 9), threading.Event(), threading.Event()

    def write(views: list[Tensor]) -> None:
        writes.set()
        may_end.wait(60)
        doomed.write(views)

    doomed.engine.stage(write, version)
    pull = asyncio.create_task(generator._pull_once(Mock(newer=AsyncMock(return_value=Mock(version=version)), pull=AsyncMock())))
    waits = asyncio.create_task(generator._holds(version.pack()))
    await asyncio.to_thread(writes.wait, 60)
    pull.cancel()
    await asyncio.wait({pull})
    assert pull.cancelled()
    assert not waits.done()
    assert not generator._settled, "the engine still reads what was pulled"
    may_end.set()
    await asyncio.wait_for(waits, 60)
    assert generator._settled


async def test_a_failing_step_fails_what_is_pending(doomed: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 19: the death of an engine reaches everybody who waits for it."""

    def step() -> None:
        raise MemoryError("no memory left")

    await fails(doomed, lambda: monkeypatch.setattr(doomed.engine, "_step", step), "decoding: no memory left")


async def test_close_fails_what_is_pending(doomed: System) -> None:
    pending = asyncio.ensure_future(doomed.engine.generate([1, 2], Sampling(200), 0))
    async with held_after(doomed.engine, 3):
        closing = asyncio.ensure_future(doomed.engine.close())
    with pytest.raises(EngineError, match="closed"):
        await pending
    await closing
    await doomed.engine.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_num_seq": 8}, r"generator\.engine\.max_num_seq: .*did you mean max_num_seqs"),
        ({"async_scheduling": True}, r"generator\.engine\.async_scheduling: must be False"),
        ({"logprobs_mode": "raw_logprobs"}, r"generator\.engine\.logprobs_mode: must be 'processed_logprobs'"),
        ({"dtype": "bfloat16"}, r"generator\.engine\.dtype: must be 'float32'"),
        ({"enable_chunked_prefill": True}, r"generator\.engine\.enable_chunked_prefill: must be False on CPU"),
        ({"max_num_batched_tokens": 64}, r"generator\.engine\.max_num_batched_tokens: must be at least max_model_len=256"),
    ],
)
async def test_overrides_that_break_a_guarantee_are_refused(random_model: Path, overrides: dict[str, Any], message: str) -> None:
    engine = Engine(str(random_model), "float32", seed=0, overrides=overrides)
    with pytest.raises(EngineError, match=message):
        await engine.start()


async def test_a_model_that_this_machine_cannot_run_is_refused_at_start(random_model: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(random_model)
    config.head_dim = 16
    config.save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), "float32", seed=0, overrides={})
    with pytest.raises(EngineError, match=r"^model\.path: its attention heads are 16 wide; on a CPU vLLM can do 32, 64"):
        await engine.start()


async def test_experts_are_packed_again_after_every_swap(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=81,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    system = await started(tmp_path)
    for _ in range(2):
        await system.publish()
        (generation,) = await system.generate([[1, 2, 3]], Sampling(32))
        assert (torch.from_numpy(generation.logprobs_T) - reference(system.model, [1, 2, 3], generation)).abs().max() <= 1e-4
        system.train()
    await system.engine.close()


async def test_too_little_kv_memory_costs_time_but_changes_no_token(random_model: Path, doomed: System) -> None:
    """Requests that are put back and prefilled again go on where they were, seeds included."""
    tight = await started(random_model, kv_bytes=2 << 20)
    await tight.publish()
    prompts, sampling = doomed.prompts(48), Sampling(120)
    roomy = await doomed.generate(prompts, sampling)
    squeezed = await tight.generate(prompts, sampling)
    assert tight.engine.stats().steps > 1.5 * doomed.engine.stats().steps
    assert [g.ids_T.tolist() for g in squeezed] == [g.ids_T.tolist() for g in roomy]
    await tight.engine.close()


async def test_overrides_reach_vllm(random_model: Path) -> None:
    engine = Engine(str(random_model), "float32", seed=0, overrides={"max_model_len": 64, "max_num_seqs": 3})
    await engine.start()
    config = engine._llm.vllm_config
    assert (config.model_config.max_model_len, config.scheduler_config.max_num_seqs) == (64, 3)
    await engine.close()
