"""Writers and readers of weights in processes of their own, for `test_weights.py`.

What a weight must be is a function of its place and of the version, so that a reader can tell by the weights alone, element by
element and without any header or checksum, whether they are one version.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, current_rank, current_size, endpoint
from torch import Tensor

from monarch_rl.types import Version
from monarch_rl.weights import pull, transport
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.plan import LoadPlan, shard_rows
from monarch_rl.weights.pull import Puller, Reader, RejectedPull, Target
from monarch_rl.weights.slots import Ring, SlotBuffers

SMALL_CHUNKS = 64 << 10
"""Bytes of a registered piece here, so that small weights come in several."""


def base(plan: LoadPlan) -> dict[str, Tensor]:
    """Version 0, different at every place; whole numbers, so that adding the step is exact."""
    generator = torch.Generator().manual_seed(0)
    return {piece.name: torch.randint(0, 1 << 22, piece.shape, generator=generator).float() for piece in plan.pieces}


def resident_mb() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Writer(Actor):
    """One trainer rank. Its weights of version v are those of version 0 plus v."""

    def __init__(self, plan: LoadPlan, slots: int, counters: Path) -> None:
        transport.CHUNK_BYTES = SMALL_CHUNKS
        self._rank, world = current_rank().rank, sum(current_size().values())
        self._shards = {name: whole[slice(*shard_rows(len(whole), self._rank, world))] for name, whole in base(plan).items()}
        self._ring = Ring([plan], rank=self._rank, world=world, slots=slots, board=BOARD)
        self._steps = torch.from_file(str(counters), shared=True, size=world, dtype=torch.int64)
        self._step = 0

    @endpoint
    def register(self) -> list[list[SlotBuffers]]:
        return self._ring.register()

    @endpoint
    def publish(self, times: int = 1) -> float:
        """The next versions; this process's memory in MB."""
        for _ in range(times):
            self._publish()
        return resident_mb()

    @endpoint
    def hammer(self, stop: Path) -> int:
        """Publish as fast as it can, in step with the other ranks as trainers are, until there is a file `stop`; how often."""
        first = self._step
        while self._step % 64 or not stop.exists():
            self._publish()
            self._steps[self._rank] = self._step
            while int(self._steps.min()) < self._step - 1 and not stop.exists():
                time.sleep(0)
        return self._step - first

    @endpoint
    def die_in_publish(self) -> None:
        """Killed when a part of the slot is written."""
        self._shards = Deadly(self._shards)
        self._publish()

    def _publish(self) -> None:
        self._ring.publish(self._shards, Version(0, self._step))
        self._step += 1
        for shard in self._shards.values():
            shard.add_(1)


class Deadly(dict[str, Tensor]):
    """Shards of which the second kills who asks for it."""

    def __getitem__(self, name: str) -> Tensor:
        if name == list(self)[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


class Trusting(Puller):
    """Looks neither at headers nor at checksums."""

    def _take(self, version: Version, deltas: object) -> None: ...


class Follower(Actor):
    """A generator without an engine."""

    def __init__(self, plan: LoadPlan, rings: list[list[list[SlotBuffers]]], publishers: Any, *, trusting: bool = False) -> None:
        transport.CHUNK_BYTES = SMALL_CHUNKS
        self._publishers, self._plan = publishers, plan
        self._base = base(plan)
        self._puller = (Trusting if trusting else Puller)(plan, rings, deadline_s=5)
        self._reader = Reader(f"reader {os.getpid()}", publishers, len(rings), self._puller.pull)
        self._live = [torch.full((piece.rows, piece.cols), -1.0) for piece in plan.pieces]
        self._held: Version | None = None

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def pull(self, target: Target | None = None) -> int | None:
        """The next newer version, or this one; the step that the live weights are of, None when the pull was rejected."""
        return self._step() if await self._pull(target or await self._reader.newer(self._held)) else None

    @endpoint
    async def live(self) -> int:
        """The step that the live weights are of; -1 when they are of no one."""
        return self._step()

    @endpoint
    async def pull_slowed(self, times: int, seed: int) -> tuple[int, int, int, list[float]]:
        """(accepted, of them torn, times that a version was kept, memory in MB after every tenth of the pulls)."""
        chance = random.Random(seed)
        pull.PATIENCE_S = 60.0
        transport.read = slowed(transport.read, chance)  # type: ignore[assignment]
        accepted, torn, memory = 0, 0, []
        for number in range(times):
            target = await self._reader.newer(self._held)
            if await self._pull(target):
                accepted += 1
                torn += self._step() != target.version.step
            if number % (times // 10) == 0:
                memory.append(resident_mb())
        return accepted, torn, self._reader.too_slow, memory

    @endpoint
    async def pull_too_slowly(self, slots: int, times: int, patience_s: float = 60.0) -> tuple[list[bool], int, bool]:
        """Read the data so slowly that `slots` more versions come meanwhile. (Accepted?, times it was too slow, all whole?)"""
        accepted, whole = [], True
        pull.PATIENCE_S = patience_s
        for _ in range(times):
            target = await self._reader.newer(self._held)
            transport.read = waits_for(self._publishers, target.number + slots, read := transport.read)  # type: ignore[assignment]
            accepted.append(await self._pull(target))
            transport.read = read
            whole &= not accepted[-1] or self._step() == target.version.step
        return accepted, self._reader.too_slow, whole

    @endpoint
    async def start_to_pull(self) -> None:
        """Begins a pull that does not end."""
        target = await self._reader.newer(self._held)
        transport.read = never(transport.read)  # type: ignore[assignment]
        self._pulling = asyncio.create_task(self._pull(target))
        await asyncio.sleep(0.2)

    async def _pull(self, target: Target) -> bool:
        try:
            await self._reader.pull(target)
        except RejectedPull:
            return False
        self._puller.write(self._live)
        self._held = target.version
        return True

    def _step(self) -> int:
        step = int((self._live[0] - self._base[self._plan.pieces[0].name])[0, 0])
        pairs = zip(self._plan.pieces, self._live, strict=True)
        same = all(torch.equal(live, self._base[piece.name].view(piece.rows, piece.cols) + step) for piece, live in pairs)
        return step if same else -1


Read = Callable[..., Awaitable[None]]


def slowed(read: Read, chance: random.Random) -> Read:
    """Some reads are interrupted for a while, some are late."""

    async def slow(pieces: list[Any], *, deadline_s: int) -> None:
        cut = chance.randrange(len(pieces) + 1) if chance.random() < 0.5 else 0
        for part in (pieces[:cut], pieces[cut:]):
            if part:
                await read(part, deadline_s=deadline_s)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.004)

    return slow


def waits_for(publishers: Any, number: int, read: Read) -> Read:
    """Every read is followed by a wait for publish `number`."""

    async def slow(pieces: list[Any], *, deadline_s: int) -> None:
        await read(pieces, deadline_s=deadline_s)
        await publishers.next.call(f"clock {os.getpid()}", None, number)

    return slow


def never(read: Read) -> Read:
    """Half of the pieces arrive."""

    async def slow(pieces: list[Any], *, deadline_s: int) -> None:
        await read(pieces[: len(pieces) // 2], deadline_s=deadline_s)
        await asyncio.Event().wait()

    return slow
