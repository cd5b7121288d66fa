"""Calls whose answers come through ports that are used again, of a real actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint, this_host

from monarch_rl.calls import Calls


class Desk(Actor):
    """Answers at once, or when it is told to."""

    def __init__(self) -> None:
        self._go: dict[int, asyncio.Event] = {}

    @concurrent_endpoint
    async def double(self, number: int, *, plus: int = 0) -> int:
        if number < 0:
            raise ValueError(f"{number} is negative")
        return 2 * number + plus

    @concurrent_endpoint
    async def double_later(self, number: int) -> int:
        await self._go.setdefault(number, asyncio.Event()).wait()
        return 2 * number

    @endpoint
    async def go(self, number: int) -> None:
        self._go.setdefault(number, asyncio.Event()).set()


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[Any]:
    mesh = this_host().spawn_procs({"desk": 1})
    yield mesh.spawn("desk", Desk)
    await mesh.stop()


@pytest.mark.timeout(120)
async def test_each_gets_its_own_answer(desk: Any) -> None:
    calls = Calls()
    assert [await calls.one(desk.double, number, plus=1) for number in range(5)] == [1, 3, 5, 7, 9]
    assert len(calls._free) == 1, "the same port again and again"
    with pytest.raises(ActorError, match="-1 is negative"):
        await calls.one(desk.double, -1)
    waiting = [asyncio.create_task(calls.one(desk.double_later, number)) for number in (1, 2, 3)]
    await calls.one(desk.go, 2)
    assert await waiting[1] == 4
    await asyncio.gather(calls.one(desk.go, 3), calls.one(desk.go, 1))
    assert [await each for each in waiting] == [2, 4, 6]
    assert sorted(await asyncio.gather(*[calls.one(desk.double, number) for number in range(4)])) == [0, 2, 4, 6]


@pytest.mark.timeout(120)
async def test_an_answer_that_nobody_waits_for_any_more_is_taken_for_no_other(desk: Any) -> None:
    """And the actor that gives it lives on."""
    calls = Calls()
    given_up = asyncio.create_task(calls.one(desk.double_later, 7))
    assert await calls.one(desk.double, 1) == 2  # messages arrive in order: the other has been asked
    given_up.cancel()
    await asyncio.wait({given_up})
    assert await calls.one(desk.go, 7) is None
    assert [await calls.one(desk.double, number) for number in range(3)] == [0, 2, 4]
