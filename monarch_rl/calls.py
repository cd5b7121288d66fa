"""Frequent calls of one actor, whose answers come through ports that are used again.

Of each port to which an answer was ever sent Monarch remembers the number, at both ends and for ever; `call_one` opens two each time, and
removes one. That makes two kilobytes of a call (docs/failures.md has the figures).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from monarch.actor import Endpoint, Port, PortReceiver

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Those of one actor, or of a process that is none."""

    def __init__(self) -> None:
        self._free: list[tuple[Port[Any], PortReceiver[Any]]] = []

    async def one(self, endpoint: Endpoint[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call_one`, but there is no answer when the other actor is lost: for those who hear of that in another way.

        Raises:
            ActorError: the endpoint did.
        """
        from monarch.actor import send

        port, answers = self._free.pop() if self._free else _open()
        send(endpoint, args, kwargs, port, "choose")  # "all" would have another port for each message, in between
        answered: asyncio.Future[T] = answers.recv().as_asyncio()
        try:
            return await answered
        finally:
            if answered.done() and not answered.cancelled():  # else an answer is to come yet, to nobody
                self._free.append((port, answers))


def _open() -> tuple[Port[Any], PortReceiver[Any]]:
    from monarch.actor import Channel

    port, answers = Channel[Any].open()
    port.return_undeliverable = False
    return port, answers
