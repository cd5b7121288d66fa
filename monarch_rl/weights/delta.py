"""What changed between two images of a region, without loss: where, as gaps between positions, and the new values.

An encoded delta holds, block after block: a row of the table (`COLUMNS`), and in the two streams behind the table the gaps and the values.
A gap is written in base `limit` = 255 or 65535, with unsigned integers of that many bits: as often `limit` as it goes into the
gap, then the rest. What a block is made of (`Block.nbytes`, the size of its elements) both sides know from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monarch_rl.weights.plan import Block, LoadPlan

COLUMNS = 3
"""Of the table, int64: changed elements, bytes of their gaps, bytes of one number of a gap."""

Bytes = NDArray[np.uint8]


def encode(plan: LoadPlan, blocks: Sequence[Block], old: Tensor, new: Tensor, most: int) -> Bytes | None:
    """What turns the region `old` into `new`; None where that takes more than `most` bytes.

    Args:
        old: uint8 [region_bytes(blocks)], like `new`.
    """
    table = np.zeros((len(blocks), COLUMNS), np.int64)
    gaps: list[Bytes] = []
    values: list[Bytes] = []
    size = table.nbytes
    for row, block in zip(table, blocks, strict=True):
        before, after = _elements(plan, block, old), _elements(plan, block, new)
        positions = torch.nonzero(before != after).view(-1)
        coded, width = _code(positions.numpy())
        row[:] = len(positions), len(coded), width
        gaps.append(coded)
        values.append(after[positions].view(torch.uint8).numpy())
        size += len(coded) + values[-1].nbytes
        if size > most:
            return None
    return np.concatenate([table.view(np.uint8).reshape(-1), *chain(gaps, values)])


def apply_delta(plan: LoadPlan, blocks: Sequence[Block], delta: Bytes, region: Tensor) -> None:
    """Turn `region` from the image that the delta is based on into the one that it leads to."""
    head = len(blocks) * COLUMNS * 8
    table = delta[:head].view(np.int64).reshape(-1, COLUMNS)
    gap_at, value_at = head, head + int(table[:, 1].sum())
    for (count, coded, width), block in zip(table.tolist(), blocks, strict=True):
        elements = _elements(plan, block, region)
        nbytes = count * elements.itemsize
        positions = _decode(delta[gap_at : gap_at + coded], width)
        values = np.frombuffer(delta[value_at : value_at + nbytes].tobytes(), elements.numpy().dtype)
        elements.numpy()[positions] = values
        gap_at, value_at = gap_at + coded, value_at + nbytes


def _elements(plan: LoadPlan, block: Block, region: Tensor) -> Tensor:
    """Elements of a block as integers, for which -0.0 differs from 0.0 and a NaN is equal to itself."""
    size = getattr(torch, plan.pieces[block.piece].dtype).itemsize
    return region[block.offset : block.offset + block.nbytes].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _code(positions: NDArray[np.int64]) -> tuple[Bytes, int]:
    """Rising positions as gaps, in the width that takes less: (bytes, width in bytes)."""
    gaps = np.diff(positions, prepend=-1) - 1
    coded = [_in_base(gaps, unsigned) for unsigned in (np.uint8, np.uint16)]
    return min(coded, key=lambda each: len(each[0]))


def _in_base(gaps: NDArray[np.int64], unsigned: type[np.unsignedinteger]) -> tuple[Bytes, int]:
    limit = np.iinfo(unsigned).max
    ends = np.cumsum(gaps // limit + 1) - 1
    numbers = np.full(ends[-1] + 1 if len(ends) else 0, limit, unsigned)
    numbers[ends] = gaps % limit
    return numbers.view(np.uint8), numbers.itemsize


def _decode(coded: Bytes, width: int) -> NDArray[np.int64]:
    unsigned = {1: np.uint8, 2: np.uint16}[width]
    numbers = np.frombuffer(coded.tobytes(), unsigned)
    ends = numbers != np.iinfo(unsigned).max
    steps: NDArray[np.int64] = np.cumsum(numbers + ends.astype(np.int64))[ends] - 1
    return steps
