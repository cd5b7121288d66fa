"""Who is asked, where several can answer: the one that has least to do, and another where that one is lost meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from monarch_rl.engine_errors import EngineError, is_lost
from monarch_rl.supervise import waiting
from monarch_rl.suspects import LOSSES, Turns

A = TypeVar("A")
T = TypeVar("T")


class Routes(Generic[A]):
    """Actors by number, and how much each has been asked that it has not answered.

    Args:
        kind: what they are called.
        deadline_s: for an answer; None: as long as they are not lost.
    """

    def __init__(self, actors: Mapping[int, A], kind: str = "", deadline_s: float | None = None) -> None:
        self._actors, self._kind, self._deadline_s = dict(actors), kind, deadline_s
        self._load = Counter[int]()
        self._asked: defaultdict[int, set[asyncio.Timeout]] = defaultdict(set)
        self._pinned: dict[int, int] = {}  # to a step
        self._changed = asyncio.Event()
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._actors)

    def add(self, number: int, actor: A) -> None:
        self._actors[number] = actor
        self._tell()

    def lose(self, number: int) -> None:
        """It is gone: who waits for its answer hears of it at once, and not when Monarch does."""
        self._actors.pop(number, None)
        for waited in self._asked.pop(number, ()):
            if not waited.expired():
                waited.reschedule(0)

    def pin(self, number: int, step: int | None) -> None:
        """It keeps to what it has of `step`, so that what needs newer had better go elsewhere; None: it keeps up again."""
        self._pinned.pop(number, None)
        if step is not None:
            self._pinned[number] = step

    async def drain(self, number: int) -> None:
        """Choose it no more, and wait until nothing is left to come back from it."""
        self._actors.pop(number, None)
        while self._load[number]:
            await self._changed.wait()

    async def ask(self, ask: Callable[[A], Awaitable[T]], load: int, preferred: int | None = None, step: int = 0) -> T:
        """`once`, of one after another until one is not lost meanwhile."""
        while True:
            try:
                return await self.once(ask, load, preferred, step)
            except Exception as error:
                if not is_lost(error):
                    raise

    async def once(self, ask: Callable[[A], Awaitable[T]], load: int, preferred: int | None = None, step: int = 0) -> T:
        """What the one that has least to do answers, or `preferred` if it is still here; `load` is what this adds to it, and `step` what
        it needs, see `pin`.

        Where there is none, one is waited for. One that is lost meanwhile is asked no more, and the error is raised.

        Raises:
            NamedTimeout: it did not answer in time. TooManyLost: another was lost over the same prompt, and that is to end.
        """
        async with self._turns.turn() as begins:
            while not self._actors:
                await self._changed.wait()
            chosen = preferred if preferred in self._actors else self._choose(step)
            begins()
            return await self._once(ask, load, chosen)

    async def _once(self, ask: Callable[[A], Awaitable[T]], load: int, chosen: int) -> T:
        self._load[chosen] += load
        try:
            with waiting(f"{self._kind} {chosen}", self._deadline_s):
                async with self._unless_lost(chosen):
                    return await ask(self._actors[chosen])
        except Exception as error:
            if is_lost(error):
                self.lose(chosen)
                if (losses := LOSSES.get()) is not None:
                    losses.add(f"{self._kind} {chosen}")
            raise
        finally:
            self._load[chosen] -= load
            self._tell()

    @asynccontextmanager
    async def _unless_lost(self, number: int) -> AsyncIterator[None]:
        """At most `deadline_s`. Raises EngineError: the actor was lost meanwhile."""
        asked = self._asked[number]
        waited = asyncio.timeout(self._deadline_s)
        try:
            async with waited:
                asked.add(waited)
                yield
        except TimeoutError:
            if self._asked.get(number) is asked:
                raise
            raise EngineError(f"{self._kind} {number} is lost") from None
        finally:
            asked.discard(waited)

    def _choose(self, step: int) -> int:
        able = [number for number in self._actors if self._pinned.get(number, step) >= step]
        return min(able or self._actors, key=self._load.__getitem__)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
