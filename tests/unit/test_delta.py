"""The codec of deltas: whatever changed, what is applied is bit for bit the new image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from monarch_rl.weights import delta
from monarch_rl.weights.delta import _code, _decode, apply_delta, element_size, encode
from monarch_rl.weights.plan import LoadPlan, Piece

UNLIMITED = 1 << 30


def transfer(old: Tensor, new: Tensor, size: int) -> int:
    """Bytes of the delta, which leads to the new image."""
    encoded = encode(old, new, size, UNLIMITED)
    assert encoded is not None
    arrived = old.clone()
    apply_delta(np.frombuffer(encoded.tobytes(), np.uint8), arrived, size)
    assert torch.equal(arrived, new)
    return len(encoded)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(50))
def test_any_bytes_become_any_other_bytes(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also NaNs of every kind, -0.0, ranks without rows, and regions of which all, none or the ends have changed."""
    chance = np.random.default_rng(seed)
    length = 64 * int(chance.integers(0, 60))
    old, new = (chance.integers(0, 256, length, np.uint8) for _ in range(2))
    kept = chance.random(length) < chance.choice([0.0, 0.5, 0.95, 0.999, 1.0])
    new[kept] = old[kept]
    transfer(torch.tensor(old), torch.tensor(new), size)
    monkeypatch.setattr(delta, "AT_ONCE", 128)
    transfer(torch.tensor(old), torch.tensor(new), size)


def test_zero_and_minus_zero_differ_and_a_nan_equals_itself() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0]).bfloat16().view(torch.uint8)
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.0]).bfloat16().view(torch.uint8)
    assert transfer(old, new, 2) == transfer(old, old, 2) + 1 + 2


@pytest.mark.parametrize("seed", range(100))
def test_positions_come_back(seed: int) -> None:
    chance = np.random.default_rng(seed)
    come_back(np.flatnonzero(chance.random(20_000) < chance.choice([0.0, 1e-4, 0.01, 0.5, 1.0])))


@pytest.mark.parametrize("first", [0, 253, 254, 255, 256, 509, 510, 65533, 65534, 65535, 65536])
@pytest.mark.parametrize("gap", [1, 254, 255, 256, 511, 65534, 65535, 65536, 131071])
def test_gaps_at_the_limits_of_their_numbers(first: int, gap: int) -> None:
    come_back(np.arange(5) * gap + first)


def come_back(positions: NDArray[np.int64]) -> None:
    assert _decode(*_code(positions)).tolist() == positions.tolist()


@pytest.mark.parametrize(("share", "most"), [(0.001, 0.003), (0.01, 0.02), (0.05, 0.09)])
def test_a_few_changes_take_few_bytes(share: float, most: float) -> None:
    """Of an image in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(512, 512, generator=generator).bfloat16()
    new = torch.where(torch.rand(512, 512, generator=generator) < share, -old, old)
    assert transfer(old.view(torch.uint8).view(-1), new.view(torch.uint8).view(-1), 2) < most * 2 * old.numel()


def test_a_delta_that_would_be_too_large_is_none() -> None:
    old = torch.zeros(4096, dtype=torch.uint8)
    new = old.clone()
    new[::8] = 1
    nbytes = transfer(old, new, 2)
    assert encode(old, new, 2, nbytes - 1) is None
    assert encode(old, new, 2, nbytes) is not None
    assert encode(old, old + 1, 2, 4096) is None


def test_elements_are_as_small_as_the_smallest_of_the_plan() -> None:
    def plan(*dtypes: str) -> LoadPlan:
        return LoadPlan(tuple(Piece(dtype, (2, 2), 0, 2, 0, 2, dtype) for dtype in dtypes))

    assert element_size(plan("float32", "float32")) == 4
    assert element_size(plan("float32", "bfloat16")) == 2
    assert element_size(plan("bfloat16", "float8_e4m3fn")) == 1
