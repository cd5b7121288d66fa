"""Messages about things that may happen thousands of times."""

from __future__ import annotations


class Seldom:
    """Says which of many like events to tell a person of: the first, then the 10th, the 20th, the 40th, and so on."""

    def __init__(self) -> None:
        self.count = 0
        self._next = 1

    def due(self, events: int = 1) -> bool:
        """So many have happened since the last call."""
        self.count += events
        if self.count < self._next:
            return False
        while self._next <= self.count:
            self._next = max(10, 2 * self._next)
        return True
