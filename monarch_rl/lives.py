"""What became of each prompt: a word for every state, and the book of those that have ended. No asyncio, no Monarch, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monarch_rl.types import NOT_SAMPLED

State = Literal["pending", "leased", "scored", "taken", "trained", "dropped"]
STATES: tuple[State, ...] = ("pending", "leased", "scored", "taken", "trained", "dropped")


class Life(NamedTuple):
    """A prompt that was started, as it stands."""

    ordinal: int
    state: State
    since: float
    """When it came into this state, in seconds since the epoch."""
    attempt: int = 0
    owner: str = ""
    """Of the claim; the last one where it is not leased."""
    reason: str = ""
    """Why it was dropped."""
    step: int = 0
    """Optimizer step that took it; 0: none."""
    min_step: int = 0
    """Generators may start it when they hold this step."""
    oldest: int = NOT_SAMPLED
    """`Version.pack()` of the oldest weights behind the tokens of its group, and of the newest."""
    newest: int = NOT_SAMPLED


class TailError(ValueError):
    """The data ended with fewer groups than a step takes, and `tail` is `error`."""


class Counts(NamedTuple):
    """Prompts by where they stand; all but `started` add up to `started`."""

    started: int
    """Leased at least once."""
    pending: int
    """Wait for another attempt."""
    leased: int
    scored: int
    """Finished groups that wait for a step."""
    taken: int
    """In a step that is not trained yet."""
    trained: int
    dropped: int


class Lost(NamedTuple):
    """A claim that ended without a group."""

    ordinal: int
    attempt: int
    owner: str
    dropped: bool
    """True: that was the last attempt. False: the prompt is pending again."""


class Progress(NamedTuple):
    """Where a run stands between two steps, as far as prompts go: enough to go on from, see `Ledger`."""

    step: int
    """Optimizer steps done."""
    next_ordinal: int
    """The first prompt that is neither trained nor dropped."""
    dropped: dict[str, int]
    """By reason, since the start of the run. What was dropped above `next_ordinal` will be started again."""
    lineage: int = 0
    """Restarts of the trainers from a checkpoint."""


class Holdings(NamedTuple):
    """What a ledger holds at one moment, for display."""

    counts: Counts
    dropped: dict[str, int]
    """By reason."""
    budget: int
    """Groups that may be started ahead of the step of the weights."""
    max_age: int
    prompts: list[Life]
    """Every one that is neither trained nor dropped, in order."""


@dataclass(slots=True)
class Entry:
    """A life that goes on; Life says what its fields are."""

    min_step: int
    max_age: int
    state: State = "pending"
    since: float = 0.0
    attempt: int = 0
    owner: str = ""
    step: int = 0
    oldest: int = NOT_SAMPLED
    newest: int = NOT_SAMPLED

    def life(self, ordinal: int, reason: str = "") -> Life:
        claim = self.attempt, self.owner, reason, self.step, self.min_step
        return Life(ordinal, self.state, self.since, *claim, self.oldest, self.newest)


class Ended:
    """Lives that are over, by ordinal, in 41 bytes each: columns, since a million small objects would take a gigabyte."""

    _TYPES: Mapping[str, str] = {
        **{"state": "B", "reason": "B", "attempt": "I", "owner": "I", "step": "i", "min_step": "i"},
        **{"since": "d", "oldest": "q", "newest": "q"},
    }

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in self._TYPES.items()}
        self._words: list[str] = [""]  # owners and reasons; the columns hold their indices
        self._places: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self._columns["state"])

    def add(self, life: Life) -> None:
        """State 0 in the column is a prompt that has not ended: ordinals end in any order."""
        columns, at = self._columns, life.ordinal
        if (missing := at + 1 - len(self)) > 0:
            for column in columns.values():
                column.frombytes(bytes(column.itemsize * missing))
        columns["state"][at] = STATES.index(life.state)
        columns["reason"][at], columns["owner"][at] = self._place(life.reason), self._place(life.owner)
        columns["attempt"][at], columns["step"][at], columns["min_step"][at] = life.attempt, life.step, life.min_step
        columns["since"][at], columns["oldest"][at], columns["newest"][at] = life.since, life.oldest, life.newest

    def get(self, ordinal: int) -> Life | None:
        """None: it has not ended."""
        c = self._columns
        if ordinal >= len(self) or not c["state"][ordinal]:
            return None
        reason, owner = self._words[c["reason"][ordinal]], self._words[c["owner"][ordinal]]
        state, since = STATES[c["state"][ordinal]], c["since"][ordinal]
        claim = c["attempt"][ordinal], owner, reason, c["step"][ordinal], c["min_step"][ordinal]
        return Life(ordinal, state, since, *claim, c["oldest"][ordinal], c["newest"][ordinal])

    def newest(self, states: Sequence[State], last: int) -> list[Life]:
        """The last ones in any of these states, in order."""
        wanted = [STATES.index(state) for state in states if state in ("trained", "dropped")]
        found = np.flatnonzero(np.isin(np.array(self._columns["state"]), wanted))[-last:].tolist()
        return [life for ordinal in found if (life := self.get(ordinal)) is not None]

    def __iter__(self) -> Iterator[Life]:
        return (life for ordinal in range(len(self)) if (life := self.get(ordinal)) is not None)

    def arrays(self) -> tuple[list[str], dict[str, NDArray[np.generic]]]:
        """Copies, for a checkpoint: the words, and the columns."""
        return list(self._words), {name: np.array(column) for name, column in self._columns.items()}

    @classmethod
    def of(cls, words: list[str], arrays: Mapping[str, NDArray[np.generic]]) -> Ended:
        """From what `arrays` gave."""
        made = cls()
        made._words, made._places = list(words), {word: at for at, word in enumerate(words)}
        for name, column in made._columns.items():
            column.frombytes(arrays[name].tobytes())
        return made

    def _place(self, word: str) -> int:
        if word not in self._places:
            self._places[word] = len(self._words)
            self._words.append(word)
        return self._places[word]


def check_shape(prompts_per_step: int, max_age: int, window: int, max_attempts: int) -> None:
    """Raises ValueError: a value is out of range, or the window leaves less than one step's worth of budget; names the key."""
    lowest = {"buffer.prompts_per_step": 1, "buffer.max_age": 0, "buffer.window": 1, "rollout.max_attempts": 1}
    for (key, low), value in zip(lowest.items(), (prompts_per_step, max_age, window, max_attempts), strict=True):
        if value < low:
            raise ValueError(f"{key}={value} must be at least {low}")
    most = max_age * prompts_per_step + 1
    if window > most:
        raise ValueError(
            f"buffer.window={window} can be at most {most} with buffer.max_age={max_age} and buffer.prompts_per_step={prompts_per_step}"
        )
