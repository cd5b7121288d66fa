"""The generator's side of a weight update: read a version into staging memory, prove it whole, then write it live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from monarch_rl.supervise import waiting
from monarch_rl.types import Version
from monarch_rl.weights import transport
from monarch_rl.weights.board import Delta, Offer, Sealed
from monarch_rl.weights.delta import apply_delta, element_size
from monarch_rl.weights.plan import LoadPlan, apply, layout, region_bytes
from monarch_rl.weights.slots import SlotBuffers, as_bytes, checksum, checksums, delta_chunk, most_delta

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

TOO_OFTEN = 3
"""After so many rejected pulls in a row a reader has the trainers keep a version for it."""
PATIENCE_S = 1.0
"""Or four times as long as the last pull, if that is more, a version is waited for that is to be kept."""
MARGINS = 12
"""A version to come is asked for 1, 2, 4 … publishes ahead, until every rank hears of it in time."""


NOTHING = Version(-1, 0)
"""Of staging memory: it is an image of no version."""


class RejectedPull(Exception):
    """What was read is not one whole version; the live weights are untouched."""


class WeightsDiffer(Exception):
    """What is live is not what the trainer published."""


@dataclass(frozen=True, slots=True)
class Target:
    """A version that every trainer rank has sealed."""

    number: int
    """Of its publish."""
    sealed: list[Sealed]
    """By rank."""
    before: tuple[list[Sealed], ...] = ()
    """The same of the publishes before it as far as all ranks still hold them, from the last one back."""

    @property
    def version(self) -> Version:
        return self.sealed[0].version


class Arriving(NamedTuple):
    """One delta of one trainer rank."""

    delta: Delta
    memory: Tensor
    """Where it arrives."""
    pieces: list[tuple[Tensor, RDMABuffer]]
    """What is read to where."""


def common(offers: Sequence[Offer], number: int | None = None) -> Target | None:
    """The newest version that every rank holds, or the one of publish `number`; None where they have none in common."""
    numbers = set.intersection(*[set(offer.sealed) for offer in offers])
    found = max(numbers, default=None) if number is None else number
    if found is None or found not in numbers:
        return None
    back = takewhile(numbers.__contains__, count(found, -1))
    target, *before = [[offer.sealed[each] for offer in offers] for each in back]
    return Target(found, target, tuple(before))


class Puller:
    """Staging memory of one rank of a generator for one version, filled from the slots of all trainer ranks.

    Args:
        plan: of this rank.
        rings: for each trainer rank, what its `Ring.register` gave.
        rank: of the generator.
        encoding: whether to pull deltas where the staging memory holds what they are based on; auto: where that has been faster.
    """

    def __init__(
        self,
        plan: LoadPlan,
        rings: Sequence[Sequence[Sequence[SlotBuffers]]],
        *,
        rank: int = 0,
        encoding: Literal["full", "delta", "auto"] = "full",
        deadline_s: int = 60,
    ) -> None:
        self._plan, self._rank, self._encoding, self._deadline_s = plan, rank, encoding, deadline_s
        self._slots = [ring[rank] for ring in rings]
        self._layouts = [layout(plan, trainer, len(rings)) for trainer in range(len(rings))]
        self._sizes = [region_bytes(blocks) for blocks in self._layouts]
        self._read_s = self._apply_s = 0.0  # of a byte that is read, of a byte of a delta that is applied; as last measured
        self.moved = 0
        """Bytes of the last pull."""
        self.deltas = 0
        """Pulls that moved deltas."""
        self._allocate()

    @property
    def nbytes(self) -> int:
        """Bytes of a whole image."""
        return sum(self._sizes)

    async def pull(self, target: Target) -> None:
        """Fill the staging memory with the target's version.

        Raises:
            RejectedPull: a slot was written over meanwhile, bytes do not match their checksum, or they came too late.
        """
        slots = [ring[sealed.slot] for ring, sealed in zip(self._slots, target.sealed, strict=True)]
        deltas = self._usable(target)
        if deltas is None:
            self._holds = NOTHING
            regions = zip(self._regions, slots, strict=True)
            parts = [(own[cut], part) for own, slot in regions for cut, part in zip(transport.cut(len(own)), slot.data, strict=True)]
        else:
            parts = [part for rank in deltas for arriving in rank for part in arriving.pieces]
        start = time.perf_counter()
        await self._read(parts)
        self.moved = sum(len(part) for part, _ in parts)
        self._read_s = (time.perf_counter() - start) / max(1, self.moved)
        await self._read([(as_bytes(seal), slot.seal) for seal, slot in zip(self._seals, slots, strict=True)])
        await asyncio.to_thread(self._take, target.version, deltas)

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
        self._regions = [torch.zeros(size, dtype=torch.uint8) for size in self._sizes]
        self._seals = [torch.zeros(1 + len(blocks), dtype=torch.int64) for blocks in self._layouts]
        self._delta_memory = [torch.zeros(most_delta(size) if self._encoding != "full" else 0, dtype=torch.uint8) for size in self._sizes]
        self._holds = NOTHING

    def _usable(self, target: Target) -> list[list[Arriving]] | None:
        """For each trainer rank the deltas that lead on from what the staging memory holds, where all have them and they are worth it."""
        if self._encoding == "full" or (publishes := self._chain(target)) is None:
            return None
        arriving = [self._arriving(rank, [sealed[rank] for sealed in publishes]) for rank in range(len(self._slots))]
        if None in arriving:
            return None
        known = cast(list[list[Arriving]], arriving)
        nbytes = sum(each.delta.nbytes for rank in known for each in rank)
        pays = self._encoding == "delta" or (self.nbytes - nbytes) * self._read_s > nbytes * self._apply_s
        return known if pays else None

    def _chain(self, target: Target) -> list[list[Sealed]] | None:
        """The publishes, by rank, from the one after what the staging memory holds up to the target."""
        publishes: list[list[Sealed]] = []
        for sealed in (target.sealed, *target.before):
            bases = {None if delta is None else delta.base for delta in (each.deltas[self._rank] for each in sealed)}
            if None in bases:
                return None
            publishes.insert(0, sealed)
            if bases == {self._holds}:
                return publishes
        return None

    def _arriving(self, rank: int, publishes: list[Sealed]) -> list[Arriving] | None:
        """Each behind the one before; None where there is no room for all, who together are no smaller than an image then."""
        memory, size, arriving = self._delta_memory[rank], self._sizes[rank], []
        cuts = transport.cut(most_delta(size), delta_chunk(size))
        for sealed in publishes:
            delta = sealed.deltas[self._rank]
            assert delta is not None
            own = [cut for cut in cuts if cut.start < delta.nbytes]
            if (end := own[-1].stop if own else 0) > len(memory):
                return None
            remote = self._slots[rank][sealed.slot].delta
            arriving.append(Arriving(delta, memory[: delta.nbytes], [(memory[cut], remote[i]) for i, cut in enumerate(own)]))
            memory = memory[end:]
        return arriving

    async def _read(self, pieces: list[tuple[Tensor, RDMABuffer]]) -> None:
        try:
            await transport.read(pieces, deadline_s=self._deadline_s)
        except Exception as error:
            self._allocate()  # what is still under way may arrive later: not in the memory of the next pull
            raise RejectedPull(f"the transport failed: {error}") from error

    def _take(self, version: Version, deltas: list[list[Arriving]] | None) -> None:
        """Prove what has arrived, and apply it where it is deltas."""
        self._prove_headers(version)
        if deltas is not None:
            self._apply(deltas)
        self._prove_bytes(version)
        self._holds = version

    def _apply(self, deltas: list[list[Arriving]]) -> None:
        for delta, memory, _ in chain.from_iterable(deltas):
            if checksum(memory) != delta.checksum:
                raise RejectedPull(f"bytes of a delta on version {delta.base} do not match their checksum")
        self._holds = NOTHING  # unless all goes well
        start = time.perf_counter()
        for rank, region in zip(deltas, self._regions, strict=True):
            for each in rank:
                apply_delta(each.memory.numpy(), region, element_size(self._plan))
        self._apply_s = (time.perf_counter() - start) / max(1, sum(each.delta.nbytes for rank in deltas for each in rank))
        self.deltas += 1

    def _prove_headers(self, version: Version) -> None:
        for rank, seal in enumerate(self._seals):
            if int(seal[0]) != version.pack():
                raise RejectedPull(f"rank {rank}: slot of version {version} was written over while it was read")

    def _prove_bytes(self, version: Version) -> None:
        for rank, (region, blocks, seal) in enumerate(zip(self._regions, self._layouts, self._seals, strict=True)):
            if checksums(region, blocks) != seal[1:].tolist():
                raise RejectedPull(f"rank {rank}: bytes of version {version} do not match their checksums")


class Reader:
    """How one generator comes by each newer version: whom it asks, and what it does when it is always too slow.

    Args:
        name: of the generator.
        publishers: the mesh of Publisher actors, one per trainer rank, of which there are `trainers`.
        pull: has every rank of the generator pull, see `Puller.pull`.
    """

    def __init__(self, name: str, publishers: Any, trainers: int, pull: Callable[[Target], Awaitable[None]]) -> None:
        self._name, self._publishers, self._trainers, self._pull = name, publishers, trainers, pull
        self._known = -1  # number of the newest publish that was heard of
        self._late = 0
        self._pull_s = 0.0
        self.too_slow = 0
        """Times that `TOO_OFTEN` pulls in a row were rejected."""

    async def newer(self, held: Version | None) -> Target:
        """The newest version above `held` that every trainer rank has sealed. Parks at the publishers until there is one."""
        target, least = None, 0
        if self._late >= TOO_OFTEN and (kept := await self._keep()) is not None:
            target = await self._wait_for(kept, held)
        while target is None or (held is not None and target.version <= held):
            offers = await self._offers(held, least)
            least = self._known
            target = common(offers)
        return target

    async def pull(self, target: Target) -> None:
        """Raises RejectedPull, see `Puller.pull`."""
        start = time.monotonic()
        try:
            await self._pull(target)
        except RejectedPull:
            self._late += 1
            self.too_slow += self._late == TOO_OFTEN
            raise
        finally:
            self._pull_s = time.monotonic() - start
        self._late = 0

    async def _offers(self, held: Version | None, least: int, *, releases: bool = True) -> list[Offer]:
        ranks = range(self._trainers)
        asked = [self._publishers.slice(rank=rank).next.call_one(self._name, held, least, releases).as_asyncio() for rank in ranks]
        with waiting("trainers (a newer version)"):
            offers: list[Offer | None] = await asyncio.gather(*asked)
        if None in offers:
            raise RuntimeError(f"two readers of the weights call themselves {self._name}")
        known = cast(list[Offer], offers)
        self._known = max(offer.newest for offer in known)
        return known

    async def _wait_for(self, number: int, held: Version | None) -> Target | None:
        """A publish that is kept for this reader, unless it takes long to come: then nobody is too slow for what there is."""
        try:
            async with asyncio.timeout(max(PATIENCE_S, 4 * self._pull_s)):
                return common(await self._offers(held, number, releases=False), number)
        except TimeoutError:
            return None

    async def _keep(self) -> int | None:
        """Have all ranks keep a publish that is to come; its number. None: they do that for another reader, or go too fast."""
        for margin in range(MARGINS):
            number = self._known + (1 << margin)
            with waiting("trainers (keeping a version)"):
                agreed = await self._publishers.keep.call(self._name, number)
            if all(agreed.values()):
                self._late = 0  # one that is kept and comes too late all the same is not kept again at once
                return number
        return None
