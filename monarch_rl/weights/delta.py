"""What changed between two images of a region, without loss: where, as gaps between positions, and the new values.

An encoded delta: three int64 (changed elements, bytes of their gaps, bytes of one number of a gap), the gaps, the values.
A gap is written in numbers of 8 or 16 bits, whichever take less: as often the largest number as it goes into the gap, then the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monarch_rl.weights.plan import LoadPlan

HEAD = 24
"""Bytes."""

Bytes = NDArray[np.uint8]


def element_size(plan: LoadPlan) -> int:
    """Bytes that are compared together: of the smallest elements of the plan."""
    return min((getattr(torch, piece.dtype).itemsize for piece in plan.pieces), default=1)


def encode(old: Tensor, new: Tensor, size: int, most: int) -> Bytes | None:
    """What turns the region `old` into `new`; None where that takes more than `most` bytes.

    Args:
        old: uint8, a multiple of 8 long, like `new`.
        size: bytes of an element. Elements are compared as integers: -0.0 differs from 0.0, a NaN is equal to itself.
    """
    differ = _elements(old, 8) != _elements(new, 8)  # eight bytes at a time, which is quicker than to look at each element
    words = torch.nonzero(torch.from_numpy(differ))
    if len(words) * size > most:
        return None
    candidates = (words * (8 // size) + torch.arange(8 // size)).view(-1).numpy()
    before, after = _elements(old, size)[candidates], _elements(new, size)[candidates]
    changed = before != after
    gaps, width = _code(candidates[changed])
    values = after[changed].view(np.uint8)
    delta = np.concatenate([np.array([changed.sum(), len(gaps), width], np.int64).view(np.uint8), gaps, values])
    return delta if len(delta) <= most else None


def apply_delta(delta: Bytes, region: Tensor, size: int) -> None:
    """Turn `region` from the image that the delta is based on into the one that it leads to."""
    count, coded, width = np.frombuffer(delta[:HEAD].tobytes(), np.int64).tolist()
    positions = _decode(delta[HEAD : HEAD + coded], width)
    start = HEAD + coded
    elements = _elements(region, size)
    elements[positions] = np.frombuffer(delta[start : start + count * size].tobytes(), elements.dtype)


def _elements(region: Tensor, size: int) -> NDArray[np.unsignedinteger]:
    return region.numpy().view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])


def _code(positions: NDArray[np.int64]) -> tuple[Bytes, int]:
    """Rising positions as gaps, and the bytes of one of their numbers."""
    gaps = np.diff(positions, prepend=-1) - 1
    coded = [_in_numbers(gaps, unsigned) for unsigned in (np.uint8, np.uint16)]
    return min(coded, key=lambda each: len(each[0]))


def _in_numbers(gaps: NDArray[np.int64], unsigned: type[np.unsignedinteger]) -> tuple[Bytes, int]:
    largest = np.iinfo(unsigned).max
    ends = np.cumsum(gaps // largest + 1) - 1
    numbers = np.full(ends[-1] + 1 if len(ends) else 0, largest, unsigned)
    numbers[ends] = gaps % largest
    return numbers.view(np.uint8), numbers.itemsize


def _decode(coded: Bytes, width: int) -> NDArray[np.int64]:
    numbers = np.frombuffer(coded.tobytes(), {1: np.uint8, 2: np.uint16}[width])
    ends = numbers != np.iinfo(numbers.dtype).max
    positions: NDArray[np.int64] = np.cumsum(numbers + ends.astype(np.int64))[ends] - 1
    return positions
