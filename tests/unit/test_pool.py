"""Members of a pool that die, stand still or cannot start; they are no processes here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from monarch_rl import pool as pools
from monarch_rl.config import Config
from monarch_rl.meshes import ActorDied, Meshes
from monarch_rl.pool import Pool, for_ever

HANG_S = 0.4


class Member:
    def __init__(self, number: int) -> None:
        self.number = number
        self.unfit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Its work, which ends when this does."""
        self.progress: int | None = None
        self.counts = True
        self.answers = True


class Hands:
    """A kind whose members do nothing, and what was heard of them."""

    name = "hand"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.members: dict[int, Member] = {}
        self.cannot_start: set[int] = set()
        self.may_start = asyncio.Event()
        self.may_start.set()

    def spawn(self, number: int) -> Member:
        self.members[number] = Member(number)
        return self.members[number]

    async def ready(self, number: int, member: Member) -> None:
        await self.may_start.wait()
        if number in self.cannot_start:
            raise OSError("no room")

    def joins(self, number: int, member: Member) -> None:
        self.heard.append(("joins", number))

    def lost(self, number: int) -> None:
        self.heard.append(("lost", number))

    async def work(self, number: int, member: Member) -> str:
        return await member.unfit

    async def progress(self, number: int, member: Member) -> int | None:
        if not member.answers:
            await for_ever()
        if member.progress is not None and member.counts:
            member.progress += 1
        return member.progress


class Rig:
    def __init__(self, tasks: asyncio.TaskGroup, count: int, max_restarts: int) -> None:
        self.hands, self.meshes, self.said = Hands(), Meshes(Config()), list[str]()
        limits = SimpleNamespace(max_restarts=max_restarts, hang_s=HANG_S)
        self.pool: Pool[Member] = Pool(self.hands, limits, self.meshes, self.said.append)
        self.pool.spawn(count)
        self.pool.begin(tasks)

    def die(self, number: int) -> None:
        """As Monarch tells it."""
        self.meshes._died(f"hand_{number}_process{{}}", f"hand {number} was killed")

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_live(self, *numbers: int) -> None:
        await self.until(lambda: self.hands.heard[-1] == ("joins", numbers[-1]) and sorted(self.pool.live) == sorted(numbers))


@asynccontextmanager
async def rig(count: int = 1, max_restarts: int = 8) -> AsyncIterator[Rig]:
    async with asyncio.TaskGroup() as tasks:
        made: list[Rig] = []

        async def run() -> None:
            async with asyncio.TaskGroup() as own:
                made.append(Rig(own, count, max_restarts))

        running = tasks.create_task(run())
        while not made:  # noqa: ASYNC110
            await asyncio.sleep(0)
        yield made[0]
        running.cancel()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BACK_OFF_S", 0.01)


async def test_one_that_dies_is_replaced_and_its_users_are_told() -> None:
    async with rig(count=2) as made:
        made.die(0)
        await made.until_live(1, 2)
        assert made.said == ["hand 0 was killed; hand 2 takes its place"]
        assert made.hands.heard == [("joins", 0), ("joins", 1), ("lost", 0), ("joins", 2)]
        made.die(2)
        await made.until_live(1, 3)


async def test_one_that_cannot_do_its_work_is_replaced_though_its_process_lives() -> None:
    async with rig() as made:
        made.hands.members[0].unfit.set_result("its thumb is broken")
        await made.until_live(1)
        assert made.said == ["hand 0: its thumb is broken; hand 1 takes its place"]


async def test_one_that_stands_still_is_replaced() -> None:
    async with rig(count=3) as made:
        made.hands.members[0].progress = 7
        made.hands.members[1].progress = 7
        made.hands.members[1].counts = False
        await made.until_live(0, 2, 3)
        made.hands.members[2].answers = False
        await made.until_live(0, 3, 4)
        stuck = [(1, 3), (2, 4)]
        assert made.said == [f"hand {old} stood still for {HANG_S:g} s; hand {new} takes its place" for old, new in stuck]


async def test_a_replacement_that_cannot_start_is_replaced_in_its_turn() -> None:
    async with rig() as made:
        made.hands.cannot_start = {1, 2}
        made.die(0)
        await made.until_live(3)
        assert made.said[1:] == [f"hand {number} could not be added: no room; hand {number + 1} takes its place" for number in (1, 2)]
        assert made.hands.heard == [("joins", 0), ("lost", 0), ("lost", 1), ("lost", 2), ("joins", 3)]


async def test_one_that_dies_while_it_starts_is_replaced_at_once() -> None:
    async with rig() as made:
        made.hands.may_start.clear()
        made.die(0)
        await made.until(lambda: 1 in made.pool.live)
        made.die(1)
        await made.until(lambda: 2 in made.pool.live)
        assert made.said[1] == "hand 1 could not be added: hand 1 was killed; hand 2 takes its place"


async def test_of_one_that_is_lost_its_users_hear_while_another_still_starts() -> None:
    async with rig(count=2) as made:
        made.hands.may_start.clear()
        made.die(0)
        await made.until(lambda: 2 in made.pool.live)
        made.die(1)
        await made.until(lambda: ("lost", 1) in made.hands.heard)
        assert (sorted(made.pool.live), list(made.pool.joined)) == ([1, 2], [])
        made.hands.may_start.set()
        await made.until_live(2, 3)
        assert made.hands.heard.count(("lost", 1)) == 1


@pytest.mark.parametrize(("most", "said"), [(0, "hand 0 was killed"), (2, "hand 2 was killed (hand.max_restarts=2 were used up)")])
async def test_when_the_restarts_are_used_up_it_ends(most: int, said: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with rig(max_restarts=most) as made:
            for number in range(most):
                made.die(number)
                await made.until_live(number + 1)
            made.die(most)
            await for_ever()
    (inner,) = caught.value.exceptions
    assert isinstance(inner, ExceptionGroup)
    (died,) = inner.exceptions
    assert isinstance(died, ActorDied)
    assert str(died) == said


async def test_one_that_was_ended_on_purpose_is_not_replaced() -> None:
    async with rig(count=2) as made:
        async with made.pool.changing:
            made.die(1)
            await asyncio.sleep(0.01)
            await made.pool.bury(1)
        await asyncio.sleep(0.05)
        assert list(made.pool.live) == [0]
        assert made.said == []
