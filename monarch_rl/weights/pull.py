"""The generator's side of a weight update: read a version into staging memory, prove it whole, then write it live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from monarch_rl.types import Version
from monarch_rl.weights import transport
from monarch_rl.weights.board import Offer
from monarch_rl.weights.plan import LoadPlan, apply, layout, region_bytes
from monarch_rl.weights.slots import SlotBuffers, as_bytes, checksum, checksums

TOO_OFTEN = 3
"""After so many rejected pulls in a row a reader has the trainers keep a version for it."""
MARGINS = 12
"""A version to come is asked for 1, 2, 4 … publishes ahead, until every rank hears of it in time."""


class RejectedPull(Exception):
    """What was read is not one whole version; the live weights are untouched."""


class WeightsDiffer(Exception):
    """What is live is not what the trainer published."""


@dataclass(frozen=True, slots=True)
class Target:
    """A version that every trainer rank has sealed."""

    number: int
    """Of its publish."""
    version: Version
    slots: list[int]
    """That hold it, by rank."""


def common(offers: Sequence[Offer], number: int | None = None) -> Target | None:
    """The newest version that every rank holds, or the one of publish `number`; None where they have none in common."""
    numbers = set.intersection(*[set(offer.sealed) for offer in offers])
    found = max(numbers, default=None) if number is None else number
    if found not in numbers:
        return None
    return Target(found, offers[0].sealed[found][0], [offer.sealed[found][1] for offer in offers])


class Puller:
    """Staging memory of one generator for one version, filled from the slots of all trainer ranks.

    Args:
        slots: for each trainer rank, the handles of its ring.
    """

    def __init__(self, plan: LoadPlan, slots: Sequence[Sequence[SlotBuffers]], *, deadline_s: int = 60) -> None:
        self._plan, self._slots, self._deadline_s = plan, slots, deadline_s
        self._layouts = [layout(plan, rank, len(slots)) for rank in range(len(slots))]
        self._cuts = [transport.cut(region_bytes(blocks)) for blocks in self._layouts]
        self._allocate()

    @property
    def ranks(self) -> int:
        """Trainer ranks that each hold a part of a version."""
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes that one pull moves."""
        return sum(region.numel() for region in self._regions)

    async def pull(self, target: Target) -> None:
        """Fill the staging memory with the target's version.

        Raises:
            RejectedPull: a slot was written over meanwhile, bytes do not match their checksum, or they came too late.
        """
        slots = [ring[slot] for ring, slot in zip(self._slots, target.slots, strict=True)]
        data = [
            (region[cut], buffer)
            for region, cuts, slot in zip(self._regions, self._cuts, slots, strict=True)
            for cut, buffer in zip(cuts, slot.data, strict=True)
        ]
        await self._read(data)
        await self._read([(as_bytes(seal), slot.seal) for seal, slot in zip(self._seals, slots, strict=True)])
        await asyncio.to_thread(self._prove, target.version)

    def write(self, views: list[Tensor]) -> None:
        """Copy the staged version into the engine's parameters (to be run between two decode steps)."""
        apply(self._plan, self._layouts, self._regions, views)

    def compare(self, views: Sequence[Tensor]) -> None:
        """Hold the engine's live parameters against the checksums that came with the staged version.

        Raises:
            WeightsDiffer: names the tensor.
        """
        for rank, (blocks, seal) in enumerate(zip(self._layouts, self._seals, strict=True)):
            for block, expected in zip(blocks, seal[1:].tolist(), strict=True):
                live = views[block.piece][block.row : block.row + block.rows]
                if checksum(as_bytes(live.cpu().contiguous())) != expected:
                    version, name = Version.unpack(int(seal[0])), self._plan.pieces[block.piece].name
                    raise WeightsDiffer(f"the live weights are not those of version {version}: {name} differs from trainer rank {rank}'s")

    def _allocate(self) -> None:
        self._regions = [torch.zeros(region_bytes(blocks), dtype=torch.uint8) for blocks in self._layouts]
        self._seals = [torch.zeros(1 + len(blocks), dtype=torch.int64) for blocks in self._layouts]

    async def _read(self, pieces: list[tuple[Tensor, Any]]) -> None:
        try:
            await transport.read(pieces, deadline_s=self._deadline_s)
        except Exception as error:
            self._allocate()  # what is still under way may arrive later: not in the memory of the next pull
            raise RejectedPull(f"the transport failed: {error}") from error

    def _prove(self, version: Version) -> None:
        for rank, (region, blocks, seal) in enumerate(zip(self._regions, self._layouts, self._seals, strict=True)):
            if int(seal[0]) != version.pack():
                raise RejectedPull(f"rank {rank}: slot of version {version} was written over while it was read")
            if checksums(region, blocks) != seal[1:].tolist():
                raise RejectedPull(f"rank {rank}: bytes of version {version} do not match their checksums")


class Reader:
    """How one generator comes by each newer version: whom it asks, and what it does when it is always too slow.

    Args:
        name: of the generator.
        publishers: the mesh of Publisher actors, one per trainer rank.
    """

    def __init__(self, name: str, publishers: Any, puller: Puller) -> None:
        self._name, self._publishers, self._puller = name, publishers, puller
        self._known = -1  # number of the newest publish that was heard of
        self._late = 0
        self.too_slow = 0
        """Times that `TOO_OFTEN` pulls in a row were rejected."""

    async def newer(self, held: Version | None) -> Target:
        """The newest version above `held` that every trainer rank has sealed. Parks at the publishers until there is one."""
        kept = await self._keep() if self._late >= TOO_OFTEN else None
        target, least = None, kept
        while target is None or (held is not None and target.version <= held):
            offers = await self._offers(held, least, releases=kept is None)
            self._known = least = max(offer.newest for offer in offers)
            target = common(offers, kept)
            if target is None and kept is not None:  # not there any more
                target, kept = common(offers), None
        return target

    async def pull(self, target: Target) -> None:
        """Raises RejectedPull, see `Puller.pull`."""
        try:
            await self._puller.pull(target)
        except RejectedPull:
            self._late += 1
            self.too_slow += self._late == TOO_OFTEN
            raise
        self._late = 0

    async def _offers(self, held: Version | None, least: int | None, *, releases: bool) -> list[Offer]:
        ranks = range(self._puller.ranks)
        asked = [self._publishers.slice(rank=rank).next.call_one(self._name, held, least or 0, releases).as_asyncio() for rank in ranks]
        offers: list[Offer | None] = await asyncio.gather(*asked)
        if None in offers:
            raise RuntimeError(f"two readers of the weights call themselves {self._name}")
        return cast(list[Offer], offers)

    async def _keep(self) -> int | None:
        """Have all ranks keep a publish that is to come; its number. None: they do that for another reader, or go too fast."""
        for margin in range(MARGINS):
            number = self._known + (1 << margin)
            agreed = await self._publishers.keep.call(self._name, number)
            if all(agreed.values()):
                self._late = 0  # one that is kept and comes too late all the same is not kept again at once
                return number
        return None
