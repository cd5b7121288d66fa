"""Who holds which prompt, and until when. No asyncio, no Monarch, no torch."""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush


class Claims:
    """Claims of workers on prompts, at most one on each. O(1), or a heap operation where deadlines are touched."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, str]] = {}  # ordinal → (attempt, owner)
        self._deadlines: list[tuple[float, int, int]] = []  # heap of (deadline, ordinal, attempt); those of ended claims are skipped
        self._owned: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, ordinal: int, attempt: int, owner: str, deadline: float) -> None:
        """A prompt that nobody holds."""
        self._held[ordinal] = attempt, owner
        self._owned[owner].add(ordinal)
        heappush(self._deadlines, (deadline, ordinal, attempt))
        if len(self._deadlines) > 64 + 2 * len(self._held):
            self._deadlines = [claim for claim in self._deadlines if self.holds(*claim[1:])]
            heapify(self._deadlines)

    def holds(self, ordinal: int, attempt: int) -> bool:
        """Whether that very claim goes on."""
        return ordinal in self._held and self._held[ordinal][0] == attempt

    def end(self, ordinal: int) -> None:
        """Of one that is held."""
        _, owner = self._held.pop(ordinal)
        self._owned[owner].discard(ordinal)
        if not self._owned[owner]:
            del self._owned[owner]

    def of(self, owner: str) -> list[int]:
        """What an owner holds, in order."""
        return sorted(self._owned.get(owner, ()))

    def next_deadline(self) -> tuple[float, int] | None:
        """When the next claim is over, and on what."""
        while self._deadlines and not self.holds(*self._deadlines[0][1:]):
            heappop(self._deadlines)
        return self._deadlines[0][:2] if self._deadlines else None

    def __len__(self) -> int:
        """Places that are taken up by all that is kept here."""
        return max(len(self._held), len(self._deadlines), len(self._owned))
