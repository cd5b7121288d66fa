"""The codec of deltas: whatever changed, what is applied is bit for bit the new image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from monarch_rl.weights.delta import _code, _decode, apply_delta, encode
from monarch_rl.weights.plan import LoadPlan, Piece, layout, region_bytes

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")
UNLIMITED = 1 << 30


def plan_of(pieces: Sequence[tuple[int, int, str]]) -> LoadPlan:
    return LoadPlan(tuple(Piece(f"t{i}", (rows, cols), 0, rows, 0, cols, dtype) for i, (rows, cols, dtype) in enumerate(pieces)))


def transfer(plan: LoadPlan, old: Tensor, new: Tensor, rank: int = 0, world: int = 1) -> int:
    """Bytes of the delta, which leads to the new image."""
    blocks = layout(plan, rank, world)
    delta = encode(plan, blocks, old, new, UNLIMITED)
    assert delta is not None
    arrived = old.clone()
    apply_delta(plan, blocks, np.frombuffer(delta.tobytes(), np.uint8), arrived)
    for block in blocks:
        assert torch.equal(arrived[block.offset : block.offset + block.nbytes], new[block.offset : block.offset + block.nbytes])
    return len(delta)


@pytest.mark.parametrize("seed", range(200))
def test_any_bytes_become_any_other_bytes(seed: int) -> None:
    """Also NaNs of every kind, -0.0, ranks without rows, and blocks of which all, none or the ends have changed."""
    chance = np.random.default_rng(seed)
    sizes = [(*chance.integers(1, (12, 30)).tolist(), str(chance.choice(DTYPES))) for _ in range(chance.integers(1, 5))]
    plan, world = plan_of(sizes), int(chance.integers(1, 4))
    rank = int(chance.integers(world))
    old = chance.integers(0, 256, region_bytes(layout(plan, rank, world)), np.uint8)
    new = chance.integers(0, 256, old.shape, np.uint8)
    kept = chance.random(old.shape) < chance.choice([0.0, 0.5, 0.95, 0.999, 1.0])
    new[kept] = old[kept]
    transfer(plan, torch.from_numpy(old), torch.from_numpy(new), rank, world)


@pytest.mark.parametrize("seed", range(100))
def test_positions_come_back(seed: int) -> None:
    chance = np.random.default_rng(seed)
    positions = np.flatnonzero(chance.random(20_000) < chance.choice([0.0, 1e-4, 0.01, 0.5, 1.0]))
    assert _decode(*_code(positions)).tolist() == positions.tolist()


@pytest.mark.parametrize("first", [0, 253, 254, 255, 256, 509, 510, 65533, 65534, 65535, 65536])
@pytest.mark.parametrize("gap", [1, 254, 255, 256, 511, 65534, 65535, 65536, 131071])
def test_gaps_at_the_limits_of_their_width(first: int, gap: int) -> None:
    positions = np.arange(5) * gap + first
    assert _decode(*_code(positions)).tolist() == positions.tolist()


@pytest.mark.parametrize(("share", "most"), [(0.001, 0.01), (0.01, 0.04), (0.05, 0.16)])
def test_a_few_changes_take_few_bytes(share: float, most: float) -> None:
    plan = plan_of([(512, 512, "bfloat16")])
    old = torch.randn(512, 512).bfloat16()
    new = torch.where(torch.rand(512, 512) < share, torch.randn(512, 512).bfloat16(), old)
    size = transfer(plan, old.view(torch.uint8).view(-1), new.view(torch.uint8).view(-1))
    assert size < most * 2 * old.numel()


def test_a_delta_that_would_be_too_large_is_none() -> None:
    plan = plan_of([(64, 64, "bfloat16"), (64, 64, "bfloat16")])
    blocks = layout(plan, 0, 1)
    old = torch.zeros(region_bytes(blocks), dtype=torch.uint8)
    assert encode(plan, blocks, old, old + 1, region_bytes(blocks)) is None
    assert encode(plan, blocks, old, old, region_bytes(blocks)) is not None
