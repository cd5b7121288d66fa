"""What changed between two images of a region, without loss: where, as gaps between positions, and the new values.

An encoded delta holds for each `AT_ONCE` bytes of the region: three int64 (changed elements, bytes of their gaps, bytes of one number
of a gap), the gaps, the values. A gap is written in numbers of 8 or 16 bits, whichever take less: as often the largest number as it
goes into the gap, then the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monarch_rl.weights.plan import LoadPlan

HEAD = 24
"""Bytes."""

AT_ONCE = 4 << 20
"""Bytes of a region; what is needed on the way then stays in the processor's cache."""

Bytes = NDArray[np.uint8]
Elements = NDArray[np.unsignedinteger]


def element_size(plan: LoadPlan) -> int:
    """Bytes that are compared together: of the smallest elements of the plan."""
    return min((getattr(torch, piece.dtype).itemsize for piece in plan.pieces), default=1)


def encode(old: Tensor, new: Tensor, size: int, most: int) -> Bytes | None:
    """What turns the region `old` into `new`; None where that takes more than `most` bytes.

    Args:
        old: uint8, a multiple of `size` long, like `new`.
        size: bytes of an element. Elements are compared as integers: -0.0 differs from 0.0, a NaN is equal to itself.
    """
    parts: list[Bytes] = []
    nbytes = 0
    for at in range(0, len(old), AT_ONCE):
        parts += _encode(_elements(old[at : at + AT_ONCE], size), _elements(new[at : at + AT_ONCE], size))
        nbytes += sum(map(len, parts[-3:]))
        if nbytes > most:
            return None
    encoded: Bytes = np.concatenate([np.empty(0, np.uint8), *parts])
    return encoded


def apply_delta(delta: Bytes, region: Tensor, size: int) -> None:
    """Turn `region` from the image that the delta is based on into the one that it leads to."""
    for start in range(0, len(region), AT_ONCE):
        count, coded, width = np.frombuffer(delta[:HEAD].tobytes(), np.int64).tolist()
        gaps, values, delta = np.split(delta, [HEAD + coded, HEAD + coded + count * size])
        elements = _elements(region[start : start + AT_ONCE], size)
        elements[_decode(gaps[HEAD:], width)] = np.frombuffer(values.tobytes(), elements.dtype)


def _encode(old: Elements, new: Elements) -> tuple[Bytes, Bytes, Bytes]:
    positions = np.flatnonzero(old != new)
    gaps, width = _code(positions)
    return np.array([len(positions), len(gaps), width], np.int64).view(np.uint8), gaps, new[positions].view(np.uint8)


def _elements(region: Tensor, size: int) -> Elements:
    return region.numpy().view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])


def _code(positions: NDArray[np.int64]) -> tuple[Bytes, int]:
    """Rising positions as gaps, and the bytes of one of their numbers."""
    gaps = np.diff(positions, prepend=-1) - 1
    coded = [_in_numbers(gaps, unsigned) for unsigned in (np.uint8, np.uint16)]
    return min(coded, key=lambda each: len(each[0]))


def _in_numbers(gaps: NDArray[np.int64], unsigned: type[np.unsignedinteger]) -> tuple[Bytes, int]:
    largest = np.iinfo(unsigned).max
    more = np.zeros(len(gaps), np.int64)
    long = gaps >= largest
    more[long] = gaps[long] // largest
    numbers = np.full(len(gaps) + more.sum(), largest, unsigned)
    numbers[np.arange(len(gaps)) + np.cumsum(more)] = gaps - largest * more
    return numbers.view(np.uint8), numbers.itemsize


def _decode(coded: Bytes, width: int) -> NDArray[np.int64]:
    numbers = np.frombuffer(coded.tobytes(), {1: np.uint8, 2: np.uint16}[width])
    ends = numbers != np.iinfo(numbers.dtype).max
    positions: NDArray[np.int64] = np.cumsum(numbers + ends.astype(np.int64))[ends] - 1
    return positions
