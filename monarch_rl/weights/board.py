"""Where the trainer's side thread leaves the newest offer for the Publisher actor of the same process.

Both actors live in one process with a thread each; this module's global is what they share.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_rl.weights.slots import Offer


class Board:
    """One offer, and the event loop to wake when a newer one is posted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Offer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[Offer], None] | None = None

    def listen(self, wake: Callable[[Offer], None]) -> None:
        """Call `wake(offer)` on the running event loop for the newest offer, if any, and for each that comes."""
        with self._lock:
            self._loop, self._wake = asyncio.get_running_loop(), wake
            newest = self._newest
        if newest is not None:
            wake(newest)

    def post(self, offer: Offer) -> None:
        """Called from any thread."""
        with self._lock:
            self._newest = offer
            loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            loop.call_soon_threadsafe(wake, offer)


BOARD = Board()
