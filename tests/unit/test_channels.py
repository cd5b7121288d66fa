"""What travels with tokens: pickled, joined over turns, collated, used by the trainer. The engine's side is in tests/actors."""

from __future__ import annotations

import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from monarch_rl.algorithms.logprobs import Kept, token_logprobs
from monarch_rl.engine_errors import EngineError
from monarch_rl.engine_experts import experts_to_keep, speaks_of_experts
from monarch_rl.models import PolicyModel, on_device
from monarch_rl.packing import collate
from monarch_rl.trajectory import Trajectory, joined, spliced
from monarch_rl.types import MASK, ROUTING, Episode, Generation, Rows, row_offsets
from tests.random_models import SHAPES, write_model

CPU = torch.device("cpu")


def ragged(rows: list[list[int]], start: int = 0) -> Rows:
    return Rows(np.array([id for row in rows for id in row], np.int32), row_offsets(np.array([len(row) for row in rows])), start)


def lists(rows: Rows) -> list[list[int]]:
    assert rows.offsets is not None
    return [part.tolist() for part in np.split(rows.values, rows.offsets[1:-1])]


def generation(prompt: int, ids: list[int], mask: list[list[int]], seen: int, mark: int = 0) -> Generation:
    """Of a prompt of so many tokens; `seen` tokens of the sequence have the experts [[mark + t]]."""
    experts = (mark + np.arange(seen, dtype=np.uint8))[:, None, None]
    sampled = np.zeros(len(ids), np.float32)
    channels = {MASK: ragged(mask, prompt), ROUTING: Rows(experts)}
    return Generation(np.array(ids, np.int32), sampled - 1, sampled.astype(np.int64), "stop", channels=channels)


def test_channels_survive_pickling() -> None:
    made = pickle.loads(pickle.dumps(generation(2, [5, 6], [[5, 7], [6]], 3)))
    assert lists(made.channels[MASK]) == [[5, 7], [6]]
    assert (made.channels[MASK].start, made.channels[MASK].values.dtype, made.channels[MASK].offsets.dtype) == (2, np.int32, np.int32)
    assert (made.channels[ROUTING].values.shape, made.channels[ROUTING].values.dtype) == ((3, 1, 1), np.uint8)


def test_over_turns_each_token_keeps_the_row_that_sampled_it() -> None:
    trajectory = Trajectory([1, 2])
    trajectory.append_sampled(generation(2, [3, 4], [[3, 9], [4]], seen=3), "a")
    trajectory.append_told([5])
    trajectory.append_sampled(generation(5, [6], [[6, 7, 8]], seen=5, mark=100), "b")
    channels = trajectory.episode("", 1.0).channels
    assert lists(channels[MASK]) == [[], [], [3, 9], [4], [], [6, 7, 8]]
    assert channels[ROUTING].values[:, 0, 0].tolist() == [0, 1, 2, 103, 104, 0]


def test_what_is_continued_elsewhere_has_one_row_for_each_token() -> None:
    """An aborted request goes on as a new one, whose prompt is all that there was; also where not a token had come of the first."""
    trajectory = Trajectory([1, 2])
    trajectory.append_sampled(generation(2, [], [], seen=0), "")
    trajectory.append_sampled(generation(2, [3], [[3]], seen=2), "a")
    trajectory.append_sampled(generation(3, [4, 5], [[4], [5, 6]], seen=4, mark=100), "b")
    channels = trajectory.episode("", 1.0).channels
    assert lists(channels[MASK]) == [[], [], [3], [4], [5, 6]]
    assert channels[ROUTING].values[:, 0, 0].tolist() == [0, 1, 102, 103, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_joining_pieces_is_looking_each_token_up(turns: list[tuple[int, int]], draw: random.Random) -> None:
    """`turns`: (tokens told, tokens sampled). The straight-line reference asks the pieces one by one."""
    pieces, expected, at = [], [], 0
    for told, sampled in turns:
        rows = [[draw.randrange(9) for _ in range(draw.randrange(4))] for _ in range(sampled)]
        pieces.append(ragged(rows, at + told))
        expected += [[] for _ in range(told)] + rows
        at += told + sampled
    assert lists(joined(pieces, at)) == expected if at else True
    fixed, end = [], 0
    for told, sampled in turns:
        end += told + sampled
        fixed.append(Rows(np.array([[len(fixed), t] for t in range(max(0, end - 1))], np.int32).reshape(-1, 2)))
    values = joined(fixed, at).values.tolist()
    for token in range(at - 1):
        assert values[token] == next([n, token] for n, piece in enumerate(fixed) if token < len(piece))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([Rows(np.zeros((2, 1)), None, 0), Rows(np.zeros((1, 1)), None, 3)], "no rows for tokens 2 to 2"),
        ([Rows(np.zeros((2, 1)))], "rows for 2 of 4 tokens"),
        ([ragged([[1]] * 5)], "rows for 5 of 4 tokens"),
    ],
)
def test_rows_that_are_missing_or_too_many_are_refused(pieces: list[Rows], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        joined(pieces, 4)


def test_parts_of_a_generation_become_one() -> None:
    """What goes on elsewhere reads the first part again: each token keeps the experts that sampled it."""
    first, more = generation(2, [3, 4], [[3, 9], [4]], seen=3), generation(4, [5, 6], [[], [6, 8]], seen=5, mark=10)
    whole = spliced([first, more])
    assert (whole.ids_T.tolist(), whole.finish_reason) == ([3, 4, 5, 6], "stop")
    assert (lists(whole.channels[MASK]), whole.channels[MASK].start) == ([[3, 9], [4], [], [6, 8]], 2)
    assert whole.channels[ROUTING].values[:, 0, 0].tolist() == [0, 1, 2, 13, 14]
    later = spliced([generation(4, [5], [[5]], seen=5), generation(5, [6], [[6]], seen=6)])
    assert (lists(later.channels[MASK]), later.channels[MASK].start) == ([[5], [6]], 4)


def test_a_channel_of_some_turns_only_is_refused() -> None:
    trajectory = Trajectory([1])
    trajectory.append_sampled(generation(1, [2], [[2]], 1), "")
    bare = generation(2, [3], [[3]], 2)
    bare.channels.pop(ROUTING)
    trajectory.append_sampled(bare, "")
    with pytest.raises(ValueError, match="some turns come with the channel routing"):
        trajectory.episode("", 1.0)


def episode(prompt: list[int], turn: Generation) -> Episode:
    trajectory = Trajectory(prompt)
    trajectory.append_sampled(turn, "")
    made = trajectory.episode("", 1.0)
    made.reward = 1.0
    return made


def test_collate_gives_rows_to_targets_and_inputs() -> None:
    first = episode([1, 2], generation(2, [3, 4], [[3, 9], []], seen=3))
    second = episode([1], generation(1, [7, 8], [[6, 7], [8]], seen=2, mark=50))
    second.logprobs_T[1] = np.nan  # is not trained
    batch = collate([first, second])
    assert batch.targets_N.tolist() == [3, 4, 8]
    mask, routing = batch.channels[MASK], batch.channels[ROUTING]
    assert isinstance(mask, Rows)
    assert isinstance(routing, np.ndarray)
    assert lists(mask) == [[3, 9], [], [8]]
    assert routing[:, :, 0, 0].tolist() == [[0, 1, 2], [50, 51, 0]]
    assert collate([]).channels == {}


def test_channels_that_belong_to_other_tokens_are_refused() -> None:
    whole = episode([1], generation(1, [2, 3], [[2], [3]], 2))
    bare = episode([1], generation(1, [2, 3], [[2], [3]], 2))
    bare.channels.clear()
    with pytest.raises(ValueError, match="some episodes of the micro-batch come with the channel mask and some without"):
        collate([whole, bare])
    with pytest.raises(ValueError, match="token 2 was sampled, but is not among the ids that could be drawn"):
        collate([episode([1], generation(1, [2, 3], [[3], [2]], 2))])
    whole.channels[ROUTING] = whole.channels[ROUTING].after(1)
    with pytest.raises(ValueError, match="the channel routing of an episode has not one row for each token"):
        collate([whole])


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_logprobs_over_what_was_kept_equal_a_plain_softmax(chunk: int) -> None:
    """In value and gradient, per token; a token with an empty row is over everything."""
    torch.manual_seed(0)
    hidden_ND, targets_N = torch.randn(7, 5, requires_grad=True), torch.randint(11, (7,))
    head, temperatures_N = torch.nn.Linear(5, 11), torch.linspace(0.5, 1.7, 7)
    rows = [sorted({int(t), *range(n, 2 * n)}) if n else [] for n, t in enumerate(targets_N % 11)]
    rows = [[id % 11 for id in row] for row in rows]
    kept = Kept(*(torch.from_numpy(a.astype(np.int64)) for a in (ragged(rows).values, ragged(rows).offsets)))  # type: ignore[union-attr]
    logprobs_N, entropy_N = token_logprobs(hidden_ND, targets_N, head, temperatures_N, chunk, kept)
    expected, entropies = [], []
    for n, row in enumerate(rows):
        ids = sorted(set(row)) or list(range(11))
        logprobs = (head(hidden_ND[n]) / temperatures_N[n])[ids].log_softmax(-1)
        expected.append(logprobs[ids.index(int(targets_N[n]))])
        entropies.append(-(logprobs.exp() * logprobs).sum())
    torch.testing.assert_close(logprobs_N, torch.stack(expected))
    torch.testing.assert_close(entropy_N, torch.stack(entropies))
    inputs = [hidden_ND, head.weight, head.bias]
    actual = torch.autograd.grad(logprobs_N.square().sum(), inputs)
    torch.testing.assert_close(actual, torch.autograd.grad(torch.stack(expected).square().sum(), inputs))


def mixture(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(write_model(path, "qwen3_moe")).eval()
    return model


def forward(policy: PolicyModel, inputs_BT: torch.Tensor, routing_BTLK: np.ndarray[Any, Any] | None) -> torch.Tensor:
    tokens = inputs_BT.numel()
    channels = {} if routing_BTLK is None else on_device({ROUTING: routing_BTLK}, CPU)
    logprobs_N, _ = policy(inputs_BT, torch.arange(tokens), inputs_BT.flatten(), torch.ones(tokens), channels)
    return logprobs_N


def own_routing(model: PreTrainedModel, inputs_BT: torch.Tensor) -> np.ndarray[Any, Any]:
    logits = model(inputs_BT, output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, -1).indices for layer in logits], 1).view(*inputs_BT.shape, 2, 2).numpy()


def test_replayed_routing_is_what_the_router_is_told_and_carries_a_gradient(tmp_path: Path) -> None:
    """Its own choice told back to it changes nothing, gradients of the routers included; another choice changes much."""
    model = mixture(tmp_path)
    inputs_BT = torch.randint(0, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    routing = own_routing(model, inputs_BT)
    policy = PolicyModel(model, 64)
    routers = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    free = forward(policy, inputs_BT, None)
    free_gradients = torch.autograd.grad(free.sum(), routers)
    told = forward(policy, inputs_BT, routing.astype(np.uint8))
    torch.testing.assert_close(told, free)
    torch.testing.assert_close(torch.autograd.grad(told.sum(), routers), free_gradients)
    assert min(float(g.abs().max()) for g in free_gradients) > 1e-3
    other = forward(policy, inputs_BT, (routing + 1) % SHAPES["qwen3_moe"]["num_experts"])
    assert (other - free).abs().max() > 0.1


def with_channels(draw: random.Random) -> Episode:
    prompt, ids = [draw.randrange(98) for _ in range(draw.randint(1, 6))], [draw.randrange(98) for _ in range(draw.randint(1, 9))]
    mask = [[] if draw.random() < 0.2 else sorted({id, *draw.sample(range(98), 12)}) for id in ids]
    turn = generation(len(prompt), ids, mask, 0)
    experts = [[draw.sample(range(5), 2) for _ in range(2)] for _ in range(len(prompt) + len(ids) - 1)]
    turn.channels[ROUTING] = Rows(np.array(experts, np.uint8).reshape(-1, 2, 2))
    return episode(prompt, turn)


def gradients(model: PreTrainedModel, batches: list[list[Episode]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of all tokens of all micro-batches, and the gradient of their squares."""
    policy, found = PolicyModel(model, 5), []
    model.zero_grad()
    for rows in batches:
        batch = collate(rows)
        arrays = (batch.inputs_BT, batch.positions_N, batch.targets_N, batch.temperatures_N)
        logprobs_N, _ = policy(*map(torch.from_numpy, arrays), on_device(batch.channels, CPU))
        logprobs_N.square().sum().backward()
        found.append(logprobs_N.detach())
    return torch.cat(found), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_channels_follow_their_rows_into_micro_batches(tmp_path: Path) -> None:
    """One micro-batch, one row each, and layers that are computed again in the backward pass: the same values and gradients."""
    draw = random.Random(3)
    rows, model = [with_channels(draw) for _ in range(6)], mixture(tmp_path)
    logprobs_N, expected = gradients(model, [rows])
    alone_N, apart = gradients(model, [[row] for row in rows])
    torch.testing.assert_close(alone_N, logprobs_N)
    torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-4)
    for layer in model.get_submodule("model.layers").children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    again_N, recomputed = gradients(model, [rows[:3], rows[3:]])
    torch.testing.assert_close(again_N, logprobs_N)
    torch.testing.assert_close(recomputed, expected, rtol=1e-4, atol=1e-4)


def test_gate_weights_are_of_the_told_experts_normalised_as_the_model_says(tmp_path: Path) -> None:
    model = mixture(tmp_path)
    policy = PolicyModel(model, 64)
    router = model.get_submodule("model.layers.1.mlp.gate")
    hidden, told = torch.randn(2, 64), np.array([[[[9, 9], [0, 3]], [[9, 9], [4, 1]]]])
    policy.replay.use(torch.from_numpy(told))
    probabilities = (hidden @ router.weight.T).softmax(-1)  # type: ignore[operator]
    expected = torch.stack([probabilities[0, [0, 3]], probabilities[1, [4, 1]]])
    for normalised in (True, False):
        router.norm_topk_prob = normalised  # type: ignore[assignment]
        _, weights, chosen = router(hidden)
        assert chosen.tolist() == [[0, 3], [4, 1]]
        torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalised else expected)


def test_a_model_without_routers_cannot_be_told(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path, "llama"))
    with pytest.raises(ValueError, match="routing of their tokens, which LlamaForCausalLM cannot repeat"):
        forward(PolicyModel(model, 64), torch.ones(1, 3, dtype=torch.long), np.zeros((1, 3, 2, 2), np.uint8))


def test_which_models_routing_is_kept(tmp_path: Path) -> None:
    for config in (Qwen3Config(), Qwen3MoeConfig(num_experts=8), Qwen3MoeConfig(num_experts=512), OlmoeConfig()):
        config.save_pretrained(tmp_path / f"{config.model_type}{getattr(config, 'num_experts', '')}")
    assert {path.name for path in tmp_path.iterdir() if speaks_of_experts(path)} == {"qwen3_moe8", "qwen3_moe512", "olmoe64"}
    assert experts_to_keep(str(tmp_path / "qwen3")) is None
    small, large = (experts_to_keep(str(tmp_path / f"qwen3_moe{n}")) for n in (8, 512))
    assert small is not None
    assert large is not None
    assert (small.total, small.per_token, small.dtype, large.dtype) == (8, 8, np.uint8, np.uint16)
    with pytest.raises(EngineError, match=r"^generator\.keep_routing: the trainer cannot repeat the routing of olmoe models"):
        experts_to_keep(str(tmp_path / "olmoe64"))
