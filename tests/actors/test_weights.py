"""Slots, seals and pulls between real processes: what a reader accepts is one whole version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from monarch.actor import this_host

from actors.publisher import Publisher
from monarch_rl.types import Version
from monarch_rl.weights.plan import LoadPlan, Piece
from monarch_rl.weights.slots import Offer
from tests.actors.weight_actors import Reader, Writer

ROWS, COLUMNS = 2051, 1024  # 8 MB: three registered pieces, the last one short


def plan() -> LoadPlan:
    return LoadPlan(
        (
            Piece("a", (ROWS, COLUMNS), 0, ROWS, 0, COLUMNS, "float32"),
            Piece("b", (7,), 0, 7, 0, 1, "float32"),
            Piece("c", (1, 3), 0, 1, 0, 3, "float32"),
        )
    )


@contextlib.asynccontextmanager
async def started(ranks: int, slots: int) -> AsyncIterator[tuple[Any, Any, Any]]:
    trainers = this_host().spawn_procs({"rank": ranks})
    generators = this_host().spawn_procs({"tp": 1})
    writer = trainers.spawn("writer", Writer, plan(), slots)
    publishers = trainers.spawn("publisher", Publisher)
    rings = await writer.register.call()
    reader = generators.spawn("reader", Reader, plan(), list(rings.values()))
    yield writer, publishers, reader
    await asyncio.gather(trainers.stop(), generators.stop())


@pytest.fixture(params=[1, 2])
async def system(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Any, Any, Any]]:
    async with started(ranks=request.param, slots=3) as actors:
        yield actors


async def test_a_version_arrives_whole_from_all_ranks(system: tuple[Any, Any, Any]) -> None:
    writer, publishers, reader = system
    for step in range(5):
        parked = publishers.slice(rank=0).next.call_one("reader", Version(0, step - 1) if step else None).as_asyncio()
        await writer.publish.call(step)
        offer = await asyncio.wait_for(parked, 10)
        assert offer == Offer(Version(0, step), step % 3)
        assert await reader.pull.call_one(offer) == {float(step)}


async def test_an_overwritten_slot_is_rejected(system: tuple[Any, Any, Any]) -> None:
    """Case 38: what was offered as version 0 now holds version 3; the live weights stay what they were."""
    writer, publishers, reader = system
    for step in range(4):
        await writer.publish.call(step)
        await publishers.next.call("settle", Version(0, step - 1) if step else None)
    assert await reader.pull.call_one(Offer(Version(0, 0), 0)) is None
    assert await reader.pull.call_one(Offer(Version(0, 3), 0)) == {3.0}


async def test_no_mixture_passes_under_a_hostile_writer() -> None:
    """Case 38: torn reads happen (a single slot, overwritten while it is read) and every one of them is noticed."""
    async with started(ranks=2, slots=1) as (writer, publishers, reader):
        await writer.publish.call(1)
        await reader.follow.call_one(publishers, 1.0)  # connections are made
        hammered = writer.hammer.call(2, 4.0)
        whole, rejected, mixed = await reader.follow.call_one(publishers, 10.0)
        await hammered
    assert mixed == 0
    assert whole > 0
    assert rejected > 0, "no slot was overwritten while it was read: the test proves nothing"
