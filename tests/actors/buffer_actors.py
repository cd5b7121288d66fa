"""Actors of the replay buffer's tests."""

from __future__ import annotations

import os
from typing import Any

from monarch.actor import Actor, endpoint


class Bystander(Actor):
    """Waits for a lease."""

    @endpoint
    async def ready(self) -> None: ...

    @endpoint
    async def wait_for_lease(self, buffer: Any, worker: str) -> int:
        """Asks for a lease and does not wait for it; this process's id."""
        self._waiting = buffer.lease.call_one(worker)
        await buffer.samples.call_one(0)  # messages arrive in order: the lease has been asked for
        return os.getpid()
