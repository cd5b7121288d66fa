"""What passes through the controller on its way between generators and trainers: load plans, and handles of slots.

Imports no torch: the controller would need seconds for it at every start, and never touches a tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy that the loader makes: a rectangle of a checkpoint tensor to one view of an engine parameter.

    The tensor is seen as a matrix [shape[0], product of the rest]; a vector has one column.
    """

    name: str
    """Of the checkpoint tensor."""
    shape: Shape
    """Of the whole checkpoint tensor."""
    row0: int
    rows: int
    col0: int
    cols: int
    dtype: str
    """Of the engine's parameter, as torch names it: `float32`, `bfloat16`."""

    def cut(self, whole: Tensor) -> Tensor:
        """[rows, cols] of the whole checkpoint tensor, in the engine's dtype: what this copy must leave in the engine."""
        import torch

        rectangle = whole.reshape(whole.shape[0], -1)[self.row0 : self.row0 + self.rows, self.col0 : self.col0 + self.cols]
        return rectangle.to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class LoadPlan:
    """All copies that make up one load, in the loader's order."""

    pieces: tuple[Piece, ...]
    base: LoadPlan | None = None
    """What the engine reads from the model's directory by itself, once, where only adapters travel."""
    loader: str = ""
    """Why the engine's own loader runs at each swap; empty where copies are enough."""

    def summary(self, over: str) -> str:
        """What travels and how, for the console."""
        slower = f"; at each swap this model's own loader takes them, which is slower, for {self.loader}" if self.loader else ""
        return f"{'adapters' if self.base else 'weights'} travel over {over}{slower}"

    @cached_property
    def digest(self) -> str:
        """Equal plans have equal digests, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """Remote handles of one slot, in the order in which a reader must read: the data, then the seal."""

    data: list[RDMABuffer]
    seal: RDMABuffer
    """int64: the packed version, then the checksum of each block."""
    delta: list[RDMABuffer]
    """Of which as many are read as the delta is long; none where there are no deltas."""
