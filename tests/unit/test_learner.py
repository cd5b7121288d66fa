"""The learner on one rank, against plain Hugging Face forwards and hand-made losses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.config import UserError
from monarch_rl.groups import make_shards
from monarch_rl.learner import Learner, learning_rate
from monarch_rl.models import load_causal_lm, local_shards, resolve_path, save_pretrained
from monarch_rl.trainer_config import LossName, TrainerConfig, is_centred
from monarch_rl.types import Episode, Group, Prompt, Version
from tests.batches import VOCABULARY, episode, plain_logprobs, sampled_by, shards, small_model

TEMPERATURE = 0.7


@pytest.fixture
def groups() -> list[list[Episode]]:
    """2 groups of 4 with an unscorable episode, tokens of ages 0 and 1 in one episode, and a token without a logprob."""
    draw = random.Random(1)
    groups = [[episode(draw.randint(1, 9), draw.randint(1, 12), draw, reward=draw.random()) for _ in range(4)] for _ in range(2)]
    groups[0][1].reward = None
    sampled_by(small_model(), [e for group in groups for e in group], TEMPERATURE, lambda: draw.gauss(0, 0.3))
    for e in groups[1]:
        e.versions_T[-1] = Version(0, 1).pack()
    groups[1][2].logprobs_T[-1] = np.nan
    return groups


STEP = 2
LENGTH_BUDGET = 12


def test_temperatures_are_not_rounded_in_bfloat16(mesh: DeviceMesh) -> None:
    """0.7 would become 0.6992, and every log-probability with it."""
    model, seen = learner(mesh, bf16=True).model, []
    model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[3]))
    model(torch.ones(1, 3, dtype=torch.long), torch.arange(3), torch.ones(3, dtype=torch.long), torch.full((3,), 0.7))
    assert seen[0].tolist() == torch.full((3,), 0.7).tolist()


def learner(mesh: DeviceMesh, model: PreTrainedModel | None = None, bf16: bool = False, **config: Any) -> Learner:
    settings = TrainerConfig(**{"max_grad_norm": 0.0, "warmup_steps": 0, **config})
    return Learner(model or small_model(), settings, total_steps=10, device_mesh=mesh, bf16=bf16, length_budget=LENGTH_BUDGET)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in learner.model.causal_lm.named_parameters()}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: shard.clone() for name, shard in local_shards(learner.model).items()}


def by_hand(groups: list[list[Episode]], config: TrainerConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch, one plain forward per episode, straight from the formulas."""
    model, total = small_model(), torch.zeros(())
    scorable = [e for group in groups for e in group if e.reward is not None]
    tokens = sum(int((e.loss_mask_T & np.isfinite(e.logprobs_T)).sum()) for e in scorable)
    for group in groups:
        rewards_1G = torch.tensor([[math.nan if e.reward is None else e.reward for e in group]], dtype=torch.float64)
        for e, advantage in zip(group, ADVANTAGES[config.advantage](rewards_1G)[0].tolist(), strict=True):
            if e.reward is None:
                continue
            logprobs_T, own = plain_logprobs(model, e, TEMPERATURE), 0
            count = int((e.loss_mask_T & np.isfinite(e.logprobs_T)).sum())
            for t in np.flatnonzero(e.loss_mask_T & np.isfinite(e.logprobs_T)):
                mu, own = float(e.logprobs_T[t]), float(logprobs_T[t].detach())
                fresh = Version.unpack(int(e.versions_T[t])).step == STEP - 1
                old = own if fresh or config.loss == "reinforce" else mu
                length = {"sequence_mean": count, "constant": LENGTH_BUDGET}
                weight = 1 / tokens if config.aggregation == "token_mean" else 1 / (len(scorable) * length[config.aggregation])
                if config.correction == "tis":
                    weight *= min(math.exp(old - mu), 2.0)
                if config.loss == "reinforce":
                    total = total - weight * advantage * logprobs_T[t]
                    continue
                high = 0.28 if config.loss == "dapo" else 0.2
                ratio = (logprobs_T[t] - old).exp()
                total = total - weight * torch.min(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CONFIGS = [
    {"loss": loss, "aggregation": aggregation, "correction": correction, "advantage": advantage}
    for loss, aggregation, correction, advantage in [
        ("dapo", "token_mean", "none", "mean"),
        ("dapo", "sequence_mean", "tis", "grpo"),
        ("grpo", "sequence_mean", "none", "grpo"),
        ("reinforce", "token_mean", "tis", "rloo"),
        ("dr_grpo", "constant", "none", "mean"),
    ]
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(c.values()))
@pytest.mark.parametrize(("budget", "chunk"), [(4096, 1024), (40, 1024), (40, 5), (1, 1024)])
def test_gradients_are_those_of_the_formulas(mesh: DeviceMesh, groups: list[list[Episode]], config: Any, budget: int, chunk: int) -> None:
    """Cases 46, 49, 51, 52: one micro-batch, several, and one per row give the gradients of one plain forward per episode."""
    rank = learner(mesh, logprob_chunk=chunk, **config)
    (shard,) = shards(groups, budget=budget, step=STEP)
    metrics = rank.step(shard)
    loss, expected = by_hand(groups, rank.config)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(gradients(rank), expected, atol=1e-6, rtol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in expected.values())), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_order_and_padding_change_nothing(mesh: DeviceMesh, groups: list[list[Episode]], seed: int) -> None:
    one, other = learner(mesh), learner(mesh)
    (shard,) = shards(groups, budget=60, step=STEP)
    (shuffled,) = shards(groups, budget=4096, step=STEP, order=random.Random(seed))
    metrics, others = one.step(shard), other.step(shuffled)
    torch.testing.assert_close(gradients(one), gradients(other), atol=1e-6, rtol=1e-5)
    assert {**metrics, "padding/frac": 0} == pytest.approx({**others, "padding/frac": 0}, abs=1e-6)


@pytest.mark.parametrize("temperatures", [[1.0], [0.7], [0.6, 1.0, 1.7]], ids=str)
def test_at_age_zero_the_ratio_is_one(mesh: DeviceMesh, groups: list[list[Episode]], temperatures: list[float]) -> None:
    """Case 60: the trainer's logprobs are those of a plain forward at the temperature at which each episode was sampled."""
    everything = [e for group in groups for e in group]
    for at, temperature in enumerate(temperatures):
        sampled_by(small_model(), everything[at :: len(temperatures)], temperature)
    for e in everything:
        e.versions_T[e.loss_mask_T] = Version(0, STEP - 1).pack()
    metrics = learner(mesh).step(shards(groups, budget=60, step=STEP)[0])
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch/max_abs"] <= 1e-5
    assert metrics["mismatch/mean_abs"] <= 2e-6
    assert metrics["mismatch/kl"] <= 1e-9
    assert metrics["clip/frac"] == 0
    everything[0].temperature *= 2
    wrong = learner(mesh).step(shards(groups, budget=60, step=STEP)[0])
    assert wrong["mismatch/max_abs"] > 0.1


def test_at_age_zero_the_gradient_does_not_depend_on_the_sampler(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    """The ratio inside the loss is exactly 1, however far off the sampler's logprobs are."""
    results = []
    for shift in (0.0, 3.0):
        for e in (e for group in groups for e in group):
            e.versions_T[e.loss_mask_T] = Version(0, STEP - 1).pack()
            e.logprobs_T = np.where(e.loss_mask_T, e.logprobs_T - np.float32(shift), e.logprobs_T)
        rank = learner(mesh)
        assert rank.step(shards(groups, step=STEP)[0])["clip/frac"] == 0
        results.append(gradients(rank))
    torch.testing.assert_close(*results, atol=0, rtol=0)


def test_metrics_of_a_scripted_batch(mesh: DeviceMesh) -> None:
    """Case 66: every metric of a batch with known values (a model whose head is 0 is uniform over its vocabulary)."""
    model = small_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    draw = random.Random(0)
    fresh, stale = episode(2, 2, draw, 1.0, Version(0, 4)), episode(4, 1, draw, 0.0, Version(0, 2))
    uniform = -math.log(VOCABULARY)
    fresh.logprobs_T[2:] = [uniform, uniform - math.log(2)]  # ratios 1 and 2
    stale.logprobs_T[4:] = uniform + math.log(4)  # ratio 1/4, clipped since A < 0
    metrics = learner(mesh, model, lr=0.5).step(shards([[fresh, stale]], budget=8, step=5)[0])
    mismatch = {
        "mismatch/kl": (2 - 1 - math.log(2)) / 2,
        "mismatch/k1": -math.log(2) / 2,
        "mismatch/mean_abs": math.log(2) / 2,
        "mismatch/max_abs": math.log(2),
    }
    expected = {
        "loss/policy": -(0.5 * 1 + 0.5 * 1 - 0.5 * 0.8) / 3,
        "loss/kl": 0.0,
        "entropy": -uniform,
        "ratio/mean": (1 + 2 + 0.25) / 3,
        "ratio/max": 2.0,
        "ratio/policy_mean": (1 + 1 + 0.25) / 3,
        "ratio/policy_max": 1.0,
        "ratio/old_mean": (1 + 2 + 1) / 3,
        "ratio/old_max": 2.0,
        "ratio/ess": 3.25**2 / (3 * (1 + 4 + 1 / 16)),
        "clip/frac": 1 / 3,
        "clip/frac_low": 1 / 3,
        "clip/frac_high": 0.0,
        "correction/mean": 1.0,
        "correction/frac_masked": 0.0,
        "correction/frac_masked_episodes": 0.0,
        "age/mean": 2 / 3,
        "age/max": 2.0,
        "tokens/trained": 3.0,
        "padding/frac": 0.0,
        "lr": 0.5,
    }
    assert {k: v for k, v in metrics.items() if k != "grad_norm"} == pytest.approx(expected | mismatch, rel=1e-5, abs=1e-7)


def test_metrics_of_corrections_and_of_the_upper_clip(mesh: DeviceMesh) -> None:
    """Case 66: one episode of two is masked whole, of the other one token; with the trainer as old policy, ρ is π / μ."""

    def uniform_model() -> PreTrainedModel:
        torch.nn.init.zeros_((model := small_model()).lm_head.weight)
        return model

    draw = random.Random(0)
    uniform = -math.log(VOCABULARY)
    kept, gone = episode(2, 2, draw, 1.0, Version(0, 4)), episode(4, 2, draw, 0.0, Version(0, 3))
    kept.logprobs_T[2:] = [uniform - math.log(1.5), uniform - math.log(6)]
    gone.logprobs_T[4:] = uniform + math.log(4)
    metrics = learner(mesh, uniform_model(), proximal="recomputed", correction="icepop").step(shards([[kept, gone]], step=5)[0])
    expected = {
        "loss/policy": -0.5 * 1.5 / 4,
        "ratio/policy_max": 1.0,
        "ratio/old_max": 6.0,
        "ratio/old_mean": (1.5 + 6 + 0.25 * 2) / 4,
        "correction/mean": 1.5 / 4,
        "correction/frac_masked": 3 / 4,
        "correction/frac_masked_episodes": 1 / 2,
        "clip/frac": 0.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    clipped = learner(mesh, uniform_model(), proximal="sampler").step(shards([[kept, gone]], step=5)[0])
    assert (clipped["clip/frac_high"], clipped["clip/frac_low"], clipped["clip/frac"]) == (2 / 4, 2 / 4, 1)


@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_is_the_same_however_the_batch_is_cut(mesh: DeviceMesh, groups: list[list[Episode]], loss: LossName) -> None:
    """Case 52: losses and corrections of whole sequences too."""
    settings = {"loss": loss, "correction": ["tis_sequence", "mask_geometric", "opsm"], "correction_args": {"drift": 0.3}}
    whole, cut = (learner(mesh, **settings) for _ in range(2))
    metrics, others = (rank.step(shards(groups, budget=budget, step=STEP)[0]) for rank, budget in ((whole, 4096), (cut, 30)))
    torch.testing.assert_close(gradients(whole), gradients(cut), atol=1e-6, rtol=1e-5)
    assert {**metrics, "padding/frac": 0} == pytest.approx({**others, "padding/frac": 0}, abs=1e-6)
    assert metrics["grad_norm"] > 0


def turned(reward: float, turn_rewards: tuple[float, ...]) -> Episode:
    """Three turns of 1, 2 and 1 tokens, with something told in between."""
    made = episode(2, 6, random.Random(7), reward, Version(0, STEP - 1))
    made.loss_mask_T = np.array([False, False, True, False, True, True, False, True])
    made.turn_tokens, made.turn_rewards = [1, 2, 1], list(turn_rewards)
    return made


@pytest.mark.parametrize(
    ("advantage", "turn_rewards", "expected"),
    [
        ("mean", (), [0.5, 0.5, 0.5, 0.5]),
        ("reward_to_go", (), [0.5, 0.5, 0.5, 0.5]),
        ("mean", (0.5, 0.5, 0.0), [0.5, 0.5, 0.5, 0.5]),
        ("reward_to_go", (0.5, 0.5, 0.0), [0.5, 0.25, 0.25, 0.0]),
    ],
)
def test_advantages_reach_the_tokens_of_their_turns(
    mesh: DeviceMesh, advantage: Any, turn_rewards: tuple[float, ...], expected: list[float]
) -> None:
    """Case 54: 3-turn trajectory → every assistant token has the scalar; with rewards of turns, what they and later ones earned."""
    seen: list[torch.Tensor] = []

    def spy(logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        seen.append(advantages_N)
        return -advantages_N * logprobs_N

    one, other = turned(1.0, turn_rewards), turned(0.0, tuple(0.0 for _ in turn_rewards))
    learner(mesh, loss=spy, advantage=advantage).step(shards([[one, other]], step=STEP)[0])
    tokens = seen[-1].tolist()  # after the trial
    assert sorted([tokens[:4], tokens[4:]]) == [[-x for x in expected], expected]


def test_groups_with_equal_rewards_teach_where_the_batch_is_the_baseline(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    """`reinforce_pp` with `buffer.dead_groups=keep`: one group is right throughout, the other wrong."""
    for reward, group in zip((1.0, 0.0), groups, strict=True):
        for e in group:
            e.reward = reward
    whole = [Group(Prompt(n, ""), group) for n, group in enumerate(groups)]
    (shard,) = make_shards(whole, STEP, 1, 4096, dead_too=not is_centred("reinforce_pp"))
    metrics = learner(mesh, advantage="reinforce_pp").step(shard)
    assert metrics["tokens/trained"] == shard.total_tokens > 0
    assert metrics["grad_norm"] > 0


def test_tokens_of_an_older_lineage_are_never_fresh(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    (shard,) = shards(groups, step=STEP)
    shard.lineage = 1
    metrics = learner(mesh).step(shard)
    assert (metrics["age/max"], metrics["age/mean"]) == (1, 1)  # by their steps, some would be 0
    assert "mismatch/kl" not in metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_batch_without_a_trainable_token_changes_nothing(mesh: DeviceMesh, groups: list[list[Episode]], aggregation: Any) -> None:
    """Case 49: all masked → loss 0, finite."""
    for e in (e for group in groups for e in group):
        e.reward = None
    rank = learner(mesh, aggregation=aggregation)
    before = weights(rank)
    metrics = rank.step(shards(groups, budget=60, step=STEP)[0])
    assert (metrics["loss/policy"], metrics["grad_norm"], metrics["tokens/trained"]) == (0, 0, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    torch.testing.assert_close(weights(rank), before, atol=0, rtol=0)


def test_an_empty_microbatch_is_harmless(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    one, other = learner(mesh), learner(mesh)
    (shard,) = shards(groups, step=STEP)
    one.step(shard)
    other.step(replace(shard, microbatches=[[], *shard.microbatches, []]))
    torch.testing.assert_close(gradients(one), gradients(other), atol=0, rtol=0)


def test_a_gradient_that_is_not_finite_is_an_error_that_names_the_step(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    for e in groups[0]:
        e.logprobs_T = np.where(e.loss_mask_T, np.float32(-1e4), e.logprobs_T)  # ratio overflows; A < 0 is not clipped from above
    rank = learner(mesh)
    before = weights(rank)
    with pytest.raises(RuntimeError, match="step 2: the gradient norm is"):
        rank.step(shards(groups, step=STEP)[0])
    torch.testing.assert_close(weights(rank), before, atol=0, rtol=0)


def test_a_wrong_denominator_is_an_error(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    rank = learner(mesh)
    before = weights(rank)
    (shard,) = shards(groups, step=STEP)
    with pytest.raises(ValueError, match=f"announces {shard.total_tokens + 1} trained tokens, its shards hold {shard.total_tokens}"):
        rank.step(replace(shard, total_tokens=shard.total_tokens + 1))
    torch.testing.assert_close(weights(rank), before, atol=0, rtol=0)


def test_gradients_are_clipped_to_the_global_norm(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    rank = learner(mesh, max_grad_norm=1e-3)
    norm = rank.step(shards(groups, step=STEP)[0])["grad_norm"]
    assert norm > 1e-2
    assert math.sqrt(sum(float(g.square().sum()) for g in gradients(rank).values())) == pytest.approx(1e-3, rel=1e-3)


def test_learning_rate_schedules_end_at_zero() -> None:
    """Case 75: linear and cosine are 0 at the last step, whatever the warm-up."""
    config = TrainerConfig(lr=2.0, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (1, 2, 4, 10)] == [0.5, 1, 2, 2]
    linear, cosine = replace(config, schedule="linear"), replace(config, schedule="cosine")
    assert [learning_rate(linear, step, 10) for step in (1, 4, 7, 10)] == pytest.approx([0.5, 2, 1, 0])
    assert [learning_rate(cosine, step, 10) for step in (1, 4, 7, 10)] == pytest.approx([0.5, 2, 1, 0])
    assert learning_rate(replace(cosine, warmup_steps=0), 1, 10) < 2


def test_activation_checkpointing_changes_no_gradient(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    plain, checkpointed = learner(mesh), learner(mesh, activation_checkpointing=True)
    for rank in (plain, checkpointed):
        rank.step(shards(groups, budget=60, step=STEP)[0])
    torch.testing.assert_close(gradients(plain), gradients(checkpointed), atol=0, rtol=0)


def test_bfloat16_keeps_float32_weights_and_the_direction(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    full, half = learner(mesh), learner(mesh, bf16=True, activation_checkpointing=True)
    for rank in (full, half):
        rank.step(shards(groups, budget=60, step=STEP)[0])
    assert {w.dtype for w in weights(half).values()} == {torch.float32}
    flat = [torch.cat([g.flatten() for g in gradients(rank).values()]) for rank in (full, half)]
    assert not torch.equal(*flat)
    assert torch.cosine_similarity(*flat, dim=0) > 0.9


def test_an_untied_head_is_trained(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    rank = learner(mesh, small_model(tied=False))
    rank.step(shards(groups, step=STEP)[0])
    assert gradients(rank)["lm_head.weight"].abs().max() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_local_shards_have_the_names_of_the_model(mesh: DeviceMesh, tied: bool) -> None:
    """Case 36: a tied head has no copy of its own that could be left behind."""
    expected = {name: p.detach().clone() for name, p in small_model(tied=tied).named_parameters()}
    shards_of_rank = local_shards(learner(mesh, small_model(tied=tied), activation_checkpointing=True).model)
    assert ("lm_head.weight" in shards_of_rank) != tied
    torch.testing.assert_close(shards_of_rank, expected, atol=0, rtol=0)


def test_local_shards_follow_training(mesh: DeviceMesh, groups: list[list[Episode]]) -> None:
    rank = learner(mesh)
    live, before = local_shards(rank.model), weights(rank)
    rank.step(shards(groups, step=STEP)[0])
    assert all(not torch.equal(live[name], before[name]) for name in live)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(VOCABULARY)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b").save_pretrained(tmp_path / "model")
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_model_loads_equal(mesh: DeviceMesh, groups: Any, model_directory: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    rank = learner(mesh, load_causal_lm(str(model_directory)))
    rank.step(shards(groups, step=STEP)[0])
    save_pretrained(rank.model, tmp_path / "saved", str(model_directory), dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert loaded.dtype == dtype
    expected = small_model()
    expected.load_state_dict({name: weight.to(dtype) for name, weight in weights(rank).items()}, strict=False, assign=True)
    expected.tie_weights()
    ids_BT = torch.arange(VOCABULARY)[None]
    torch.testing.assert_close(loaded(ids_BT).logits, expected(ids_BT).logits, atol=0, rtol=0)
    assert loaded.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("b")["input_ids"] == [1]


def test_bad_model_paths_are_errors_of_one_line(tmp_path: Path, model_directory: Path) -> None:
    for path in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(UserError, match="no such directory"):
            resolve_path(path)
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_path(str(tmp_path))
    (model_directory / "model.safetensors").unlink()
    for path in (str(model_directory), "nobody/nothing"):
        with pytest.raises(UserError, match=f"model.path={path}: cannot be loaded") as caught:
            load_causal_lm(path)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model = small_model(tied=False)
    model.save_pretrained(tmp_path, state_dict={name: p for name, p in model.state_dict().items() if "layers.1" not in name})
    with pytest.raises(UserError, match=r"lacks 11 weights, e\.g\. model\.layers\.1"):
        load_causal_lm(str(tmp_path))


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, head_dim=8, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Gemma2ForCausalLM changes its logits after the head"):
        load_causal_lm(str(tmp_path))
