"""Publisher: tells generators which version of the weights they can pull.

Owns: the parked `next` calls of one trainer rank. Lives in that rank's process, beside the busy Trainer actor.
Promises: answers as soon as the rank has sealed a newer version; at most one parked call per reader.
Called by: Generator. May be blocked by: nothing.
"""

from __future__ import annotations

from monarch.actor import Actor, Port, endpoint

from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.slots import Offer


class Publisher(Actor):
    def __init__(self) -> None:
        self._newest: Offer | None = None
        self._parked: dict[str, tuple[Version | None, Port[Offer | None]]] = {}
        self._listening = False

    @endpoint(explicit_response_port=True)
    async def next(self, port: Port[Offer | None], reader: str, after: Version | None) -> None:
        """Answers with the newest offer once it is newer than `after` (None: any).

        A second call of the same reader replaces the first, which is answered with None.
        """
        if not self._listening:
            self._listening = True
            BOARD.listen(self._wake)
        replaced = self._parked.pop(reader, None)
        if replaced is not None:
            replaced[1].send(None)
        self._parked[reader] = (after, port)
        self._answer()

    def _wake(self, offer: Offer) -> None:
        self._newest = offer
        self._answer()

    def _answer(self) -> None:
        newest = self._newest
        if newest is None:
            return
        for reader, (after, port) in list(self._parked.items()):
            if after is None or newest.version > after:
                del self._parked[reader]
                port.send(newest)
