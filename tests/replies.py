"""What actors answer, where there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any


class Reply:
    """As Monarch's futures are: comes when `future` does."""

    def __init__(self, future: asyncio.Future[Any] | None = None) -> None:
        self.future = future or asyncio.get_running_loop().create_future()

    def as_asyncio(self) -> asyncio.Future[Any]:
        return self.future

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()


class Called:
    """In place of `Calls`, where endpoints are plain methods."""

    async def one(self, method: Any, *args: Any) -> Any:
        return await method(*args)


def replied(value: Any = None) -> Reply:
    """One that has come."""
    reply = Reply()
    reply.future.set_result(value)
    return reply
