"""LoRA on the trainer's side: which layers, what is trained and kept, the base model as reference, exports."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from monarch_rl import checkpoint
from monarch_rl.config import Config, ConfigError, UserError, validate
from monarch_rl.configure import write
from monarch_rl.engine_setup import tensor_shapes
from monarch_rl.export import export
from monarch_rl.learner import Learner
from monarch_rl.lives import Progress
from monarch_rl.model_config import LoraConfig, ModelConfig
from monarch_rl.models import (
    PolicyModel,
    adapter_weights,
    add_adapters,
    base_weights,
    digest,
    load_causal_lm,
    local_shards,
    save_adapters,
    save_pretrained,
    shard_reference,
    without_adapters,
)
from monarch_rl.tasks.tiny import tiny_path
from monarch_rl.trainer_config import TrainerConfig
from monarch_rl.weights import adapters
from tests.batches import episode, sampled_by, save, shards, small_model

LORA = LoraConfig(rank=3, alpha=7)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def learner(mesh: DeviceMesh, *, base: int = 0, seed: int = 0, lora: LoraConfig | None = LORA, **config: Any) -> Learner:
    model = small_model(base)
    settings = TrainerConfig(**{"warmup_steps": 0, "lr": 0.01, **config})
    return Learner(add_adapters(model, lora, seed) if lora else model, settings, total_steps=10, device_mesh=mesh)


def train(one: Learner, steps: range) -> list[dict[str, float]]:
    rows = []
    for step in steps:
        draw = random.Random(step)
        group = [episode(3, draw.randint(2, 9), draw, reward=draw.random()) for _ in range(4)]
        sampled_by(small_model(), group, 1.0)
        rows.append(one.step(shards([group], step=step)[0]))
    return rows


def shaken(model: nn.Module) -> Any:
    """With adapters that do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


IDS = torch.arange(2, 22)[None]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_shapes_are_those_of_what_travels() -> None:
    made = {name: tuple(weight.shape) for name, weight in local_shards(PolicyModel(add_adapters(small_model(), LORA, 0), 64)).items()}
    assert adapters.shapes(small_model(), LORA) == made
    assert made["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (3, 48)
    assert len(made) == 2 * 7 * 2


def test_b_travels_with_the_scale_and_no_memory_is_shared_with_it() -> None:
    model = PolicyModel(shaken(add_adapters(small_model(), LORA, 0)), 64)
    plain = adapter_weights(model.causal_lm)
    for name, sent in local_shards(model).items():
        torch.testing.assert_close(sent, plain[name] * (7 / 3 if "lora_B" in name else 1), atol=0, rtol=0)


def test_a_new_adapter_changes_nothing_and_is_the_same_in_every_process() -> None:
    models = [small_model() for _ in range(3)]
    state = torch.get_rng_state()
    first, second, other = (add_adapters(model, LORA, seed) for model, seed in zip(models, (1, 1, 2), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(logits(first), logits(small_model()), atol=0, rtol=0)
    for name, weight in adapter_weights(first).items():
        assert torch.equal(weight, adapter_weights(second)[name])
        assert torch.equal(weight, adapter_weights(other)[name]) == ("lora_B" in name), "B begins as zeros"


def test_without_adapters_it_is_the_base_model_bit_for_bit() -> None:
    model = shaken(add_adapters(small_model(), LORA, 0))
    with without_adapters(model):
        torch.testing.assert_close(logits(model), logits(small_model()), atol=0, rtol=0)
    assert (logits(model) - logits(small_model())).abs().max() > 0.1
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [n for n, _ in model.named_parameters() if "lora_" in n]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "c_attn"], r"c_attn names no linear layer of Qwen3ForCausalLM; there are down_proj, gate_proj, k_proj, .*, v_proj$"),
        (["embed_tokens"], "embed_tokens names no linear layer of"),
        (["lm_head"], "lm_head is the output layer, which gets no adapter, in Qwen3ForCausalLM; there are"),
    ],
)
def test_targets_that_are_no_layers_of_the_decoder_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.lora\.targets: {message}"):
        add_adapters(small_model(), LoraConfig(rank=2, targets=targets), 0)
    with pytest.raises(UserError, match=message):
        tensor_shapes(str(tiny_path()), LoraConfig(rank=2, targets=targets))


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_experts=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model\.lora\.rank: adapters on a mixture of experts \(qwen3_moe\) are not supported$"):
        tensor_shapes(str(tmp_path), LORA)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=-1), r"model\.lora\.rank: must be at least 0, got -1"),
        (LoraConfig(rank=513), r"model\.lora\.rank: must be at most 512, the largest that vLLM serves, got 513"),
        (LoraConfig(rank=1, alpha=0), r"model\.lora\.alpha: must be at least 1, got 0"),
        (LoraConfig(rank=1, targets=[]), r"model\.lora\.targets: must name at least one linear layer; .*"),
    ],
)
def test_settings_out_of_range_are_refused(lora: LoraConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        validate(Config(model=ModelConfig(lora=lora)))


def test_the_reference_is_the_base_model_without_a_copy(mesh: DeviceMesh) -> None:
    """Its divergence is that from a frozen copy of the base model, which full training would be held to."""
    held = learner(mesh, kl=0.3)
    own = train(held, range(1, 4))
    copied = Learner(
        add_adapters(small_model(), LORA, 0),
        TrainerConfig(warmup_steps=0, lr=0.01),
        total_steps=10,
        device_mesh=mesh,
    )
    copied.reference = shard_reference(small_model(), mesh, bf16=False, logprob_chunk=64)
    copied.config.kl = 0.3
    expected = train(copied, range(1, 4))
    assert [row["kl/ref"] for row in own] == [row["kl/ref"] for row in expected]
    assert own[0]["kl/ref"] == 0 < own[2]["kl/ref"]
    assert [row["grad_norm"] for row in own] == [row["grad_norm"] for row in expected]


def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_adapters_alone(mesh: DeviceMesh, tmp_path: Path) -> None:
    whole, first, second = learner(mesh), learner(mesh), learner(mesh, seed=9)
    train(whole, range(1, 5))
    train(first, range(1, 3))
    save(first, tmp_path / "c")
    checkpoint.load(second, tmp_path / "c")
    train(second, range(3, 5))
    for name, expected in local_shards(whole.model).items():
        torch.testing.assert_close(local_shards(second.model)[name], expected, atol=0, rtol=0)
    names = [name for name in FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata if name.startswith("model.")]
    assert len(names) == 2 * 7 * 2
    assert all("lora_" in name for name in names)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"base": 1}, "its adapters were trained on other weights than those of model.path"),
        ({"lora": None}, {}, "does not fit this model, or is damaged: .*base of the adapters"),
        ({}, {"lora": None}, "does not fit this model, or is damaged: .*"),
        ({}, {"lora": LoraConfig(rank=4)}, "does not fit this model, or is damaged: .*"),
    ],
    ids=["another base", "full to adapters", "adapters to full", "another rank"],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(mesh: DeviceMesh, tmp_path: Path, then: Any, now: Any, message: str) -> None:
    save(learner(mesh, **then), tmp_path / "c")
    with pytest.raises(UserError, match=f"^resume=.*/c: {message}") as raised:
        checkpoint.load(learner(mesh, **now), tmp_path / "c")
    assert "\n" not in str(raised.value)


def test_both_exports_are_the_policy(tmp_path: Path) -> None:
    """Merged by transformers alone, and the adapter by peft on the base model."""
    base = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
    policy = PolicyModel(shaken(add_adapters(AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32), LORA, 0)), 64)
    save_pretrained(policy, tmp_path / "model", "tiny", torch.float32)
    save_adapters(policy, tmp_path / "adapter")
    expected = logits(policy.causal_lm)
    assert (expected - logits(base)).abs().max() > 0.1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), expected, atol=0, rtol=0)


def run_that_died(folder: Path, policy: PolicyModel, base: int) -> Path:
    """Its settings and one checkpoint, as the trainers of a run leave it."""
    write(Config(output_dir=str(folder), model=ModelConfig(path="tiny", lora=LORA)), folder / "config.yaml")
    trained = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    state = {"model": trained, "optimizer": {"state": {"x": torch.ones(3)}}, checkpoint.BASE: torch.tensor([base])}
    save_state(state, checkpoint_id=checkpoint.unfinished(into := checkpoint.folder_of(folder, 10)), no_dist=True)
    checkpoint.complete(into, Progress(10, 320, {}), keep=2)
    return folder


@pytest.mark.filterwarnings("ignore:.*single process")
def test_exports_of_a_run_that_died_come_from_its_checkpoint(tmp_path: Path) -> None:
    policy = PolicyModel(add_adapters(load_causal_lm("tiny"), LORA, 0), 64)
    base = digest(base_weights(policy.causal_lm))
    shaken(policy)
    run = run_that_died(tmp_path / "run", policy, base)
    merged = AutoModelForCausalLM.from_pretrained(export(run), dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged), logits(policy.causal_lm), atol=1e-4, rtol=1e-4)
    adapter = export(run, tmp_path / "adapter", adapter=True)
    on_base = PeftModel.from_pretrained(load_causal_lm("tiny"), str(adapter)).eval()
    torch.testing.assert_close(logits(on_base), logits(policy.causal_lm), atol=0, rtol=0)
    other = run_that_died(tmp_path / "other", policy, base + 1)
    with pytest.raises(UserError, match=r"step_10: its adapters were trained on other weights than those of model\.path=tiny$"):
        export(other)


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    write(Config(output_dir=str(tmp_path), model=ModelConfig(path="tiny")), tmp_path / "config.yaml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(UserError, match=r"the run trained all weights \(model\.lora\.rank=0\), so it has no adapter$"):
        export(tmp_path, tmp_path / "to", adapter=True)
