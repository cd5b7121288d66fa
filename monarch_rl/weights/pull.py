"""The generator's side of a weight update: read a version into staging memory, prove it whole, then write it live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from monarch_rl.types import Version
from monarch_rl.weights import transport
from monarch_rl.weights.plan import LoadPlan, apply, layout, region_bytes
from monarch_rl.weights.slots import Offer, SlotBuffers, as_bytes, checksum


class RejectedPull(Exception):
    """What was read is not one whole version; the live weights are untouched."""


def common_offer(offers: Sequence[Offer]) -> Offer:
    """The newest version that every trainer rank has sealed: the smallest that they name."""
    return min(offers, key=lambda offer: offer.version)


class Puller:
    """Staging memory of one generator for one version, filled from the slots of all trainer ranks.

    Args:
        slots: for each trainer rank, the handles of its ring.
    """

    def __init__(self, plan: LoadPlan, slots: Sequence[Sequence[SlotBuffers]], *, deadline_s: int = 60) -> None:
        self._plan, self._slots, self._deadline_s = plan, slots, deadline_s
        self._layouts = [layout(plan, rank, len(slots)) for rank in range(len(slots))]
        sizes = [region_bytes(blocks) for blocks in self._layouts]
        self._regions = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self._cuts = [transport.cut(size) for size in sizes]
        self._seals = [torch.zeros(1 + len(cuts), dtype=torch.int64) for cuts in self._cuts]

    @property
    def ranks(self) -> int:
        """Trainer ranks that each hold a part of a version."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes that one pull moves."""
        return sum(region.numel() for region in self._regions)

    async def pull(self, offer: Offer) -> None:
        """Fill the staging memory with `offer.version`.

        Raises:
            RejectedPull: a slot was written over meanwhile, or bytes do not match their checksum.
        """
        slots = [ring[offer.slot] for ring in self._slots]
        data = [
            (region[cut], buffer)
            for region, cuts, slot in zip(self._regions, self._cuts, slots, strict=True)
            for cut, buffer in zip(cuts, slot.data, strict=True)
        ]
        await transport.read(data, deadline_s=self._deadline_s)
        seals = [(as_bytes(seal), slot.seal) for seal, slot in zip(self._seals, slots, strict=True)]
        await transport.read(seals, deadline_s=self._deadline_s)
        await asyncio.to_thread(self._verify, offer.version)

    def write(self, views: list[Tensor]) -> None:
        """Copy the staged version into the engine's parameters (to be run between two decode steps)."""
        apply(self._plan, self._layouts, self._regions, views)

    def _verify(self, version: Version) -> None:
        for rank, (region, cuts, seal) in enumerate(zip(self._regions, self._cuts, self._seals, strict=True)):
            if int(seal[0]) != version.pack():
                raise RejectedPull(f"rank {rank}: slot of version {version} was written over while it was read")
            if [checksum(region[cut]) for cut in cuts] != seal[1:].tolist():
                raise RejectedPull(f"rank {rank}: bytes of version {version} do not match their checksums")
