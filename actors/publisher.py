"""Publisher: tells generators which versions of the weights they can pull, and keeps one for a reader that is always too slow.

Owns: the parked `next` calls of one trainer rank. Lives in that rank's process, beside the busy Trainer actor.
Promises: answers as soon as the rank has sealed a newer version; at most one parked call per reader.
Called by: Generator. May be blocked by: nothing.
"""

from __future__ import annotations

from monarch.actor import Actor, Port, endpoint

from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD, Offer


class Publisher(Actor):
    def __init__(self) -> None:
        self._newest: Offer | None = None
        self._parked: dict[str, tuple[Version | None, int, Port[Offer | None]]] = {}
        self._listening = False

    @endpoint(explicit_response_port=True)
    async def next(self, port: Port[Offer | None], reader: str, after: Version | None, least: int = 0, releases: bool = True) -> None:
        """Answers with what is sealed once that is newer than `after` (None: any) and publish `least` has been sealed.

        A second call of the same reader replaces the first, which is answered with None.

        Args:
            releases: what was kept for this reader need not be kept any more.
        """
        if not self._listening:
            self._listening = True
            BOARD.listen(self._wake)
        if releases:
            BOARD.release(reader)
        replaced = self._parked.pop(reader, None)
        if replaced is not None:
            replaced[2].send(None)
        self._parked[reader] = after, least, port
        self._answer()

    @endpoint
    async def keep(self, reader: str, number: int) -> bool:
        """Have publish `number`, which is to come, left in its slot until the reader asks for a newer one; False: that is refused."""
        return BOARD.keep(reader, number)

    @endpoint
    async def alive(self) -> None:
        """Answers while the process of this rank gets on with anything at all."""

    def _wake(self, offer: Offer) -> None:
        self._newest = offer
        self._answer()

    def _answer(self) -> None:
        newest = self._newest
        if newest is None:
            return
        for reader, (after, least, port) in list(self._parked.items()):
            if newest.newest >= least and (after is None or newest.version > after):
                del self._parked[reader]
                port.send(newest)
