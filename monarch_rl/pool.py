"""Numbered processes that are watched, and replaced within a bound: what generators, rollout workers and scorers have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from monarch_rl.config import UserError
from monarch_rl.meshes import DEATH_NOTICE_S, ActorDied, Meshes, unless_dead
from monarch_rl.supervise import cause, obituary

LOOKS = 4
"""So many in a row must see an actor stand still before it is taken for stuck."""
NO_ANSWER = -1
BACK_OFF_S = 1.0
"""Before the second replacement in a row; twice as long before each further one."""
MOST_BACK_OFF_S = 60.0

A = TypeVar("A")


async def for_ever() -> str:
    """For `Kind.work`, where there is nothing more to hear of."""
    await asyncio.Event().wait()
    raise AssertionError


async def until_stuck(progress: Callable[[], Awaitable[int | None]], hang_s: float) -> None:
    """Returns when an actor has made no `progress` for `hang_s`, see `Kind.progress`, or has not answered.

    Looks are counted, not seconds: the controller may have been stopped itself, as a notebook's kernel is by a long cell.
    """
    seen: int | None = None
    stood_still = 0
    while stood_still < LOOKS:
        found = await _look(progress, hang_s / LOOKS)
        stood_still = stood_still + 1 if found == NO_ANSWER or (found is not None and found == seen) else 0
        seen = found


async def _look(progress: Callable[[], Awaitable[int | None]], pause_s: float) -> int | None:
    """The progress of an actor, or NO_ANSWER; after `pause_s`, whatever it is."""
    pause = asyncio.create_task(asyncio.sleep(pause_s))
    found: int | None = NO_ANSWER
    with contextlib.suppress(Exception):
        async with asyncio.timeout(pause_s):
            found = await progress()
    await pause
    return found


class Limits(Protocol):
    """The keys of a kind's section of the configuration that the pool goes by."""

    max_restarts: int
    hang_s: float


class Kind(Protocol[A]):
    """What is special about the members of a pool."""

    name: str
    """The section of the configuration; a member's mesh is called `{name}_{number}`, and so is its actor."""

    def spawn(self, number: int) -> A:
        """Start a process and its actor; returns at once."""

    async def ready(self, number: int, member: A) -> None:
        """Wait until it can do its work."""

    def joins(self, number: int, member: A) -> None:
        """It can be used from now on."""

    def lost(self, number: int) -> None:
        """It is of no use any more, whatever its process does. Told once, and at once: who waits for its answer may hear of it in no other
        way."""

    async def work(self, number: int, member: A) -> str:
        """Have it do what it is there for; fails when its process dies. Answers when it can do it no more all the same, and says why."""

    async def progress(self, number: int, member: A) -> int | None:
        """What changes while it has something to do; None while there is nothing, or where an answer is all that can be asked."""


class Pool(Generic[A]):
    """Members by number; a number is never given twice."""

    def __init__(self, kind: Kind[A], limits: Limits, meshes: Meshes, say: Callable[[str], None]) -> None:
        self._kind, self._limits, self._meshes, self._say = kind, limits, meshes, say
        self.next = 0
        """Number of the member that is spawned next."""
        self._lost = 0
        self._unfit: set[int] = set()  # told to be lost
        self._tasks: asyncio.TaskGroup | None = None
        self.changing = asyncio.Lock()
        """Held while members come and go."""
        self.live: dict[int, A] = {}
        """Those that can be used, and those that start."""
        self.joined: dict[int, A] = {}
        """Those that can be used."""

    def spawn(self, count: int) -> list[int]:
        """Start processes; returns their numbers at once."""
        numbers = list(range(self.next, self.next + count))
        self.next += count
        for number in numbers:
            self.live[number] = self._kind.spawn(number)
            if self._tasks is not None:
                self._meshes.leave(self._name(number))
        return numbers

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """From now on those that are lost are replaced."""
        self._tasks = tasks
        for number in self.live:
            self._join(number, tasks)

    async def add(self, number: int) -> None:
        """Wait until one that was spawned can be used.

        Raises:
            UserError: it cannot start; it is ended.
        """
        assert self._tasks is not None
        try:
            await unless_dead(self._kind.ready(number, self.live[number]), self._meshes.leave(self._name(number)))
        except Exception as error:
            await self.bury(number)
            raise UserError(f"{self._kind.name} {number} could not be added: {cause(error)}") from error
        self._join(number, self._tasks)

    async def bury(self, number: int) -> None:
        """End one, in whatever state it is."""
        self._lose(number)
        self._unfit.discard(number)
        del self.live[number]
        await self._meshes.bury(self._name(number))

    def _lose(self, number: int) -> None:
        """Nobody is to ask it any more."""
        self.joined.pop(number, None)
        if number not in self._unfit:
            self._unfit.add(number)
            self._kind.lost(number)

    @property
    def meshes(self) -> list[str]:
        """Names of the members' process meshes."""
        return [self._name(number) for number in self.live]

    def _name(self, number: int) -> str:
        return f"{self._kind.name}_{number}"

    def _join(self, number: int, tasks: asyncio.TaskGroup) -> None:
        died, member = self._meshes.leave(self._name(number)), self.live[number]
        self.joined[number] = member
        self._kind.joins(number, member)
        tasks.create_task(self._replace_when_lost(number, member, died), name=f"{self._kind.name} {number} (replacement)")

    async def _replace_when_lost(self, number: int, member: A, died: asyncio.Future[str]) -> None:
        who = f"{self._kind.name} {number}"
        work, stuck = asyncio.ensure_future(self._work(number, member)), asyncio.ensure_future(self._until_stuck(number, member))
        watched = {died: "", work: "", stuck: f"{who} "}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            why = next(said + watch.result() for watch, said in watched.items() if watch.done())
        finally:
            work.cancel()
            stuck.cancel()
        if number not in self.live:  # it has left
            return
        self._lose(number)  # also while others come and go, which may take minutes
        async with self.changing:
            if number in self.live:  # else it was about to leave
                await self._replace(number, why)

    async def _work(self, number: int, member: A) -> str:
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

        who = f"{self._kind.name} {number}"
        try:
            return f"{who}: {await self._kind.work(number, member)}"
        except SupervisionError as error:
            await asyncio.sleep(DEATH_NOTICE_S)  # of how it died others tell better: this may be of a message that could not be delivered
            return obituary(str(error)) or f"{who}: {cause(error)}"

    async def _until_stuck(self, number: int, member: A) -> str:
        hang_s = self._limits.hang_s
        await until_stuck(partial(self._kind.progress, number, member), hang_s)
        return f"stood still for {hang_s:g} s"

    async def _replace(self, number: int, why: str) -> None:
        """Start another until one can be used.

        Raises:
            ActorDied: `max_restarts` were not enough.
        """
        wait_s = 0.0
        name, most = self._kind.name, self._limits.max_restarts
        while True:
            self._lost += 1
            if self._lost > most:
                raise ActorDied(f"{why} ({name}.max_restarts={most} were used up)" if most else why)
            await asyncio.sleep(wait_s)
            self._meshes.vacate(self._name(number))
            (new,) = self.spawn(1)
            self._say(f"{why}; {name} {new} takes its place")
            if number in self.live:
                await self.bury(number)
            try:
                return await self.add(new)
            except UserError as error:
                why, number = str(error), new
            wait_s = min(MOST_BACK_OFF_S, 2 * wait_s or BACK_OFF_S)
