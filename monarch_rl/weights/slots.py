"""The trainer's side of a weight update: a ring of host slots that readers read whenever they like.

A slot is overwritten without asking anybody. Its header says which version it holds, or that it is being written;
the checksums beside it let a reader prove that what it read is one whole version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue

import torch
import xxhash
from torch import Tensor

from monarch_rl.types import Version
from monarch_rl.weights import transport
from monarch_rl.weights.board import Board, Delta, Offer, Sealed
from monarch_rl.weights.delta import element_size, encode
from monarch_rl.weights.handles import SlotBuffers as SlotBuffers
from monarch_rl.weights.plan import Block, LoadPlan, layout, region_bytes, stage

BEING_WRITTEN = -1
"""Header value of a slot whose bytes belong to no version."""


def most_delta(region: int) -> int:
    """Bytes of the largest delta of a region of so many bytes; a larger one would save too little."""
    return max(64, region // 2)


def delta_chunk(region: int) -> int:
    """Bytes of a registered piece of delta memory: a delta is read to the end of a piece."""
    return min(transport.CHUNK_BYTES, max(4096, region // 128))


def checksum(piece: Tensor) -> int:
    """64-bit xxh3 of a flat uint8 host tensor, as a signed integer (fits an int64 tensor)."""
    return _signed(xxhash.xxh3_64_intdigest(piece.numpy().data))


def checksums(region: Tensor, blocks: Sequence[Block]) -> list[int]:
    """`checksum` of each block of a rank's region."""
    if not blocks:
        return []
    data = memoryview(region.numpy())  # type: ignore[arg-type]
    return [_signed(xxhash.xxh3_64_intdigest(data[block.offset : block.offset + block.nbytes])) for block in blocks]


def fingerprints(plan: LoadPlan, views: Iterable[Tensor]) -> dict[str, int]:
    """Checkpoint tensor → checksum of its pieces, in the plan's order; equal on a trainer and a generator that hold the same weights.

    Args:
        views: for each piece its values, [rows, cols] in the piece's dtype, on any device; taken one at a time.
    """
    sums: dict[str, xxhash.xxh3_64] = {}
    for piece, view in zip(plan.pieces, views, strict=True):
        sums.setdefault(piece.name, xxhash.xxh3_64()).update(as_bytes(view.cpu().contiguous()).numpy().data)
    return {name: _signed(total.intdigest()) for name, total in sums.items()}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of the bits of all host tensors, one after the other."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(as_bytes(tensor.detach().contiguous()).numpy().data)
    return str(digest.hexdigest())


def as_bytes(host: Tensor) -> Tensor:
    return host.view(torch.uint8).view(-1)


class _Share:
    """What one rank of a generator reads of one trainer rank: a region, its seal and its delta, in every slot."""

    def __init__(self, plan: LoadPlan, rank: int, world: int, slots: int, *, pinned: bool, deltas: bool) -> None:
        self._plan, self._rank, self._world = plan, rank, world
        self._blocks = layout(plan, rank, world)
        self.nbytes = region_bytes(self._blocks)
        self._regions = [torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(slots)]
        self._seals = [torch.full((1 + len(self._blocks),), BEING_WRITTEN, dtype=torch.int64) for _ in range(slots)]
        self._deltas = [torch.zeros(most_delta(self.nbytes) if deltas else 0, dtype=torch.uint8) for _ in range(slots)]

    def register(self) -> list[SlotBuffers]:
        chunk = delta_chunk(self.nbytes)
        return [
            SlotBuffers(transport.register(region), transport.register(as_bytes(seal))[0], transport.register(delta, chunk))
            for region, seal, delta in zip(self._regions, self._seals, self._deltas, strict=True)
        ]

    def begin(self, slot: int) -> None:
        self._seals[slot][0] = BEING_WRITTEN

    def stage(self, shards: Mapping[str, Tensor], slot: int) -> None:
        stage(self._blocks, self._plan, shards, self._regions[slot], self._rank, self._world)

    def checksums(self, slot: int) -> Tensor:
        return torch.tensor(checksums(self._regions[slot], self._blocks), dtype=torch.int64)

    def seal(self, slot: int, version: Version, sums: Tensor) -> None:
        self._seals[slot][1:] = sums
        self._seals[slot][0] = version.pack()

    def find_delta(self, slot: int, base: Sealed | None) -> Delta | None:
        """Compare a slot with the one of the publish before, and leave what differs beside it."""
        memory = self._deltas[slot]
        if base is None or not len(memory):
            return None
        found = encode(self._regions[base.slot], self._regions[slot], element_size(self._plan), len(memory))
        if found is None:
            return None
        memory[: len(found)] = torch.from_numpy(found)
        return Delta(base.version, len(found), checksum(memory[: len(found)]))


class Ring:
    """K slots of one trainer rank, and the side thread that seals what the trainer staged.

    The trainer's thread pays for one copy of its local shards per publish; checksums, deltas and announcement are the side thread's.

    Args:
        plans: of the ranks of a generator; each reads a region of its own.
    """

    def __init__(
        self,
        plans: Sequence[LoadPlan],
        *,
        rank: int,
        world: int,
        slots: int,
        board: Board,
        deltas: bool = False,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`failed` is called by the side thread when it can seal nothing any more."""
        self._board = board
        self._cuda = torch.cuda.is_available()
        self._shares = [_Share(plan, rank, world, slots, pinned=self._cuda, deltas=deltas) for plan in plans]
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._failed = failed
        self._published = 0
        self._slot = -1
        self._lock = threading.Lock()
        self._owners: list[int | None] = [None] * slots  # number of the publish that has taken the slot
        self._sealed: dict[int, Sealed] = {}
        self._copied: torch.cuda.Event | None = None
        self._staged: SimpleQueue[tuple[int, int, Version, torch.cuda.Event | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._seal_forever, name="weights-seal", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return sum(share.nbytes for share in self._shares)

    def register(self) -> list[list[SlotBuffers]]:
        """Handles of all slots, for each rank of a generator. To be called once, inside the actor that owns the ring."""
        return [share.register() for share in self._shares]

    def publish(self, shards: Mapping[str, Tensor], version: Version) -> None:
        """Copy this rank's shards into the next slot. On CUDA the copy runs beside the compute stream.

        Args:
            shards: parameter name → this rank's rows of it.
        """
        number, self._published = self._published, self._published + 1
        slot = self._take(number)
        self._copied = self._copy(shards, slot)
        self._staged.put((number, slot, version, self._copied))

    def wait_copied(self) -> None:
        """Make the compute stream wait for the last copy; to be called before parameters change again."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def close(self) -> None:
        self._staged.put(None)
        self._thread.join()

    def _take(self, number: int) -> int:
        """The next slot, or the one after it where that one is kept for a slow reader."""
        kept = self._board.begin(number)
        with self._lock:
            slot = (self._slot + 1) % len(self._owners)
            if kept is not None and self._owners[slot] == kept:
                slot = (slot + 1) % len(self._owners)
            for share in self._shares:
                share.begin(slot)
            if (owner := self._owners[slot]) is not None:
                self._sealed.pop(owner, None)
            self._owners[slot], self._slot = number, slot
        return slot

    def _copy(self, shards: Mapping[str, Tensor], slot: int) -> torch.cuda.Event | None:
        if self._stream is None:
            self._stage(shards, slot)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._stage(shards, slot)
            for shard in shards.values():  # some were made for this publish: their memory is not to be given away before they are copied
                shard.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _stage(self, shards: Mapping[str, Tensor], slot: int) -> None:
        for share in self._shares:
            share.stage(shards, slot)

    def _seal_forever(self) -> None:
        try:
            while (staged := self._staged.get()) is not None:
                number, slot, version, copied = staged
                if copied is not None:
                    copied.synchronize()
                self._seal(number, slot, version)
        except BaseException as error:
            if self._failed is None:
                raise
            self._failed(error)

    def _seal(self, number: int, slot: int, version: Version) -> None:
        if self._owners[slot] != number:  # the trainer has begun to write over it
            return
        sums = [share.checksums(slot) for share in self._shares]
        base = self._sealed.get(number - 1)
        deltas = tuple(share.find_delta(slot, base) for share in self._shares)
        with self._lock:
            if self._owners[slot] != number:
                return
            if number - 1 not in self._sealed:  # it was written over while it was compared
                deltas = (None,) * len(deltas)
            for share, own in zip(self._shares, sums, strict=True):
                share.seal(slot, version, own)
            self._sealed[number] = Sealed(version, slot, deltas)
            offer = Offer(dict(self._sealed))
        self._board.post(offer)


def _signed(digest: int) -> int:
    return digest - (1 << 64) if digest >= 1 << 63 else digest
