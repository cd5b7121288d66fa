"""What the Trainer's ring and the Publisher actor of the same process tell each other: what is sealed, and what is to be kept.

Both actors live in one process with a thread each; this module's global is what they share.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monarch_rl.types import Version

KEPT_S = 120.0
"""Longest time for which a sealed version is kept for one reader."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from the version before to this one, beside the image in the same slot."""

    base: Version
    nbytes: int
    checksum: int
    """Of its bytes."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One whole version of a rank."""

    version: Version
    slot: int
    deltas: tuple[Delta | None, ...] = (None,)
    """For each rank of a generator, where there is one."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one trainer rank has sealed and not begun to write over."""

    sealed: Mapping[int, Sealed]
    """By number of the publish: 0 is the first, and the same version has the same number on every rank."""

    @property
    def newest(self) -> int:
        """Number of the newest publish."""
        return max(self.sealed)

    @property
    def version(self) -> Version:
        """Of the newest publish."""
        return self.sealed[self.newest].version


@dataclass(slots=True)
class Kept:
    """A publish whose slot is left alone for a reader that was always too slow."""

    reader: str
    number: int
    until: float | None = None
    """Known once it is sealed."""


class Board:
    """The newest offer, whom to wake when a newer one is posted, and at most one publish that is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Offer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[Offer], None] | None = None
        self._begun = -1
        self._kept: Kept | None = None

    # --- for the Publisher

    def listen(self, wake: Callable[[Offer], None]) -> None:
        """Call `wake(offer)` on the running event loop for the newest offer, if any, and for each that comes."""
        with self._lock:
            self._loop, self._wake = asyncio.get_running_loop(), wake
            newest = self._newest
        if newest is not None:
            wake(newest)

    def keep(self, reader: str, number: int) -> bool:
        """Have publish `number` keep its slot until `release`, or for `KEPT_S`. Refused when it has begun, or another is kept."""
        with self._lock:
            kept = self._living()
            if number <= self._begun or (kept is not None and kept.reader != reader):
                return False
            self._kept = Kept(reader, number)
            return True

    def release(self, reader: str) -> None:
        with self._lock:
            if self._kept is not None and self._kept.reader == reader:
                self._kept = None

    # --- for the ring

    def begin(self, number: int) -> int | None:
        """Publish `number` begins; returns the one whose slot must be left alone."""
        with self._lock:
            self._begun = number
            kept = self._living()
            return None if kept is None else kept.number

    def post(self, offer: Offer) -> None:
        """Called from any thread."""
        with self._lock:
            self._newest = offer
            loop, wake = self._loop, self._wake
            if self._kept is not None and self._kept.until is None and offer.newest >= self._kept.number:
                self._kept.until = time.monotonic() + KEPT_S
        if loop is not None and wake is not None:
            loop.call_soon_threadsafe(wake, offer)

    def _living(self) -> Kept | None:
        if self._kept is not None and self._kept.until is not None and time.monotonic() > self._kept.until:
            self._kept = None
        return self._kept


BOARD = Board()
