"""Slots, seals and pulls between real processes: what a reader accepts is one whole version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import monarch.actor
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import this_host

from actors.publisher import Publisher
from monarch_rl.types import Version
from monarch_rl.weights.board import Sealed
from monarch_rl.weights.plan import LoadPlan, Piece
from monarch_rl.weights.pull import TOO_OFTEN, Target
from tests.actors.weight_actors import Follower, Writer

pytestmark = pytest.mark.timeout(300)

ROWS, COLUMNS = 131, 1024  # 0.5 MB, in nine registered pieces of which the last is short
SLOTS = 3


def plan() -> LoadPlan:
    return LoadPlan(
        (
            Piece("a", (ROWS, COLUMNS), 0, ROWS, 0, COLUMNS, "float32"),
            Piece("b", (7,), 0, 7, 0, 1, "float32"),
            Piece("c", (1, 3), 0, 1, 0, 3, "float32"),
        )
    )


class System:
    """Trainer ranks with their publishers, and readers that can be added."""

    def __init__(self, ranks: int, slots: int, counters: Path) -> None:
        counters.write_bytes(bytes(8 * ranks))
        self.meshes = [this_host().spawn_procs({"rank": ranks})]
        self.writer: Any = self.meshes[0].spawn("writer", Writer, plan(), slots, counters)
        self.publishers: Any = self.meshes[0].spawn("publisher", Publisher)

    async def reader(self, *, trusting: bool = False) -> Any:
        if len(self.meshes) == 1:
            self.rings = list((await self.writer.register.call()).values())
        self.meshes.append(this_host().spawn_procs({"tp": 1}))
        return self.meshes[-1].spawn("reader", Follower, plan(), self.rings, self.publishers, trusting=trusting)


@contextlib.asynccontextmanager
async def started(folder: Path, ranks: int = 2, slots: int = SLOTS) -> AsyncIterator[System]:
    system = System(ranks, slots, folder / "counters")
    yield system
    await asyncio.gather(*[mesh.stop() for mesh in system.meshes])


@pytest.fixture
def deaths_are_meant() -> None:
    """For the rest of this process: Monarch may tell of a death when the test that meant it is long over, and would interrupt another."""
    monarch.actor.unhandled_fault_hook = lambda failure: None


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_version_arrives_whole_from_all_ranks(tmp_path: Path, ranks: int) -> None:
    async with started(tmp_path, ranks) as system:
        reader = await system.reader()
        for step in range(5):
            pulled = reader.pull.call_one()
            await system.writer.publish.call()
            assert await pulled == step


async def test_an_overwritten_slot_is_rejected(tmp_path: Path) -> None:
    """Case 38: what was offered as version 0 now holds version 3; the live weights stay what they were."""
    async with started(tmp_path) as system:
        reader = await system.reader()
        await system.writer.publish.call()
        assert await reader.pull.call_one() == 0
        await system.writer.publish.call(SLOTS)
        await system.publishers.next.call("settle", None, SLOTS)
        assert await reader.pull.call_one(Target(0, [Sealed(Version(0, 0), 0)] * 2)) is None
        assert await reader.live.call_one() == 0
        assert await reader.pull.call_one() == SLOTS


async def hostile(folder: Path, pulls: int, *, trusting: bool = False) -> list[tuple[int, int, int, list[float]]]:
    """Two ranks that publish as fast as they can, two readers that are slowed at random."""
    async with started(folder) as system:
        readers = [await system.reader(trusting=trusting) for _ in range(2)]
        hammered = system.writer.hammer.call(folder / "stop")
        try:
            return list(await asyncio.gather(*[reader.pull_slowed.call_one(pulls // 2, seed) for seed, reader in enumerate(readers)]))
        finally:
            (folder / "stop").touch()
            await hammered


def check_hostile(seen: list[tuple[int, int, int, list[float]]], pulls: int) -> None:
    accepted, torn, kept = (sum(reader[i] for reader in seen) for i in range(3))
    print(f"{pulls} pulls: {accepted} accepted, {torn} torn, {kept} times too slow; memory {[reader[3][1::8] for reader in seen]} MB")
    assert torn == 0
    assert accepted >= pulls // 10
    assert kept > 0, "no reader was ever too slow: the test proves nothing"
    for *_, memory in seen:
        assert memory[-1] - memory[1] < 64


async def test_no_mixture_passes_under_a_hostile_writer(tmp_path: Path) -> None:
    """Case 38: every accepted version is one version at every element, while most of what is read is written over meanwhile."""
    check_hostile(await hostile(tmp_path, 200), 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_pulls_under_a_hostile_writer(tmp_path: Path) -> None:
    """Case 38, and memory stays as it is."""
    check_hostile(await hostile(tmp_path, 10_000), 10_000)


async def test_the_hostile_writer_tears_what_a_reader_without_checks_takes(tmp_path: Path) -> None:
    """Case 38: with neither header nor checksum the same readers accept mixtures."""
    assert sum(torn for _, torn, *_ in await hostile(tmp_path, 200, trusting=True)) > 0


async def publish_until(system: System, done: Any) -> None:
    waited = asyncio.ensure_future(done.as_asyncio())
    while not waited.done():
        await system.writer.publish.call()


async def test_a_reader_that_is_always_too_slow_is_named_and_has_a_version_kept(tmp_path: Path) -> None:
    """While it reads, as many versions come as there are slots; another reader has every version meanwhile."""
    async with started(tmp_path) as system:
        slow, fast = await system.reader(), await system.reader()
        cycles = 2
        pulling = asyncio.ensure_future(slow.pull_too_slowly.call_one(SLOTS, cycles * (TOO_OFTEN + 1)).as_asyncio())
        step = 0
        while not pulling.done():
            await system.writer.publish.call()
            assert await fast.pull.call_one() == step
            step += 1
        accepted, too_slow, whole = pulling.result()
        await publish_until(system, slow.pull_too_slowly.call_one(SLOTS, TOO_OFTEN, 0.5))
        last = await slow.pull.call_one()
        assert last == await fast.pull.call_one(), "no version comes any more that could be kept for it"
    assert accepted == cycles * ([False] * TOO_OFTEN + [True])
    assert too_slow == cycles
    assert whole


async def test_memory_is_flat_over_a_thousand_publishes(tmp_path: Path) -> None:
    async with started(tmp_path) as system:
        reader = await system.reader()
        memory = []
        for _ in range(20):
            memory.append(max((await system.writer.publish.call(50)).values()))
            await reader.pull.call_one()
        assert memory[-1] - memory[1] < 32, "a slot a publish would be 250 MB"


async def test_readers_that_are_killed_in_mid_pull_trouble_nobody(tmp_path: Path, deaths_are_meant: None) -> None:
    """Case 39: one of two readers dies while it reads; the other and one that comes later have whole versions."""
    async with started(tmp_path) as system:
        doomed, other = await system.reader(), await system.reader()
        await system.writer.publish.call()
        await doomed.start_to_pull.call_one()
        os.kill(await doomed.pid.call_one(), signal.SIGKILL)
        for step in range(1, SLOTS + 2):
            await system.writer.publish.call()
            await system.publishers.next.call("settle", None, step)
            assert await other.pull.call_one() == step
        later = await system.reader()
        assert await later.pull.call_one() == SLOTS + 1


async def test_a_rank_that_is_killed_in_mid_publish_serves_nothing_wrong(tmp_path: Path, deaths_are_meant: None) -> None:
    """Its slot is half written, and the other rank's holds the new version: no reader takes either of them."""
    async with started(tmp_path, slots=2) as system:
        reader = await system.reader()
        await system.writer.publish.call(2)
        await system.publishers.next.call("settle", None, 1)
        assert await reader.pull.call_one() == 1
        with pytest.raises(SupervisionError):
            await asyncio.gather(
                system.writer.slice(rank=0).publish.call_one().as_asyncio(),
                system.writer.slice(rank=1).die_in_publish.call_one().as_asyncio(),
            )
        assert await reader.pull.call_one(Target(2, [Sealed(Version(0, 2), 0)] * 2)) is None
        assert await reader.live.call_one() == 1
