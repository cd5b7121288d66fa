"""Prompts under which actors are lost: one of them may be what ends them, and must not do so for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial

from monarch_rl.supervise import Alarm

APART_S = 5.0
"""For a suspect to show that it does no harm, before the next one begins."""


class TooManyLost(Exception):
    """The prompt is given up; says who was lost over it."""


class Losses:
    """Of the actors that worked on one prompt, whatever each of them was asked."""

    def __init__(self, most: int) -> None:
        """`most`: with so many it is given up."""
        self._most = most
        self._who: dict[str, None] = {}
        self._harmless = False

    @property
    def suspect(self) -> bool:
        """The next one would be the last."""
        return 0 < len(self._who) == self._most - 1 and not self._harmless

    def add(self, who: str) -> None:
        """Raises TooManyLost."""
        self._who[who] = None
        if len(self._who) >= self._most:
            raise TooManyLost(f"{', '.join(self._who)} {'were' if len(self._who) > 1 else 'was'} lost while working on it")

    def clear(self) -> None:
        """It has worked meanwhile."""
        self._harmless = True


LOSSES: ContextVar[Losses | None] = ContextVar("LOSSES", default=None)
"""Of the prompt that the running task works on."""


class Turns:
    """Suspects begin one after another, so that the one that ends actors takes no other with it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._whose: Losses | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], object]]:
        """Waited for where the prompt of the running task is a suspect. Over with the body, or `APART_S` after it says that it begins."""
        losses = LOSSES.get()
        if losses is None or not losses.suspect:
            yield lambda: None
            return
        await self._lock.acquire()
        self._whose = losses
        timer = Alarm(partial(self._over, losses))
        loop = asyncio.get_running_loop()
        try:
            yield lambda: timer.set(loop.time() + (APART_S if losses.suspect else 0.0))
        finally:
            timer.set(None)
            self._over(losses)

    def _over(self, losses: Losses) -> None:
        if self._whose is losses:
            losses.clear()
            self._whose = None
            self._lock.release()
