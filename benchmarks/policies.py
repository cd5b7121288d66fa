"""Ways to decide what is sampled and trained when, on the same heavy-tailed durations in virtual time.

`slots` groups are sampled at a time; a group takes as long as it is long. The trainer takes `train_s` for each step of P groups, and new
weights are everywhere at once. So what differs between two rows is the policy alone.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from statistics import fmean
from typing import Protocol

from benchmarks.common import Row, table
from monarch_rl.ledger import Ledger
from monarch_rl.lives import Entry


class Policy(Protocol):
    """Prompts are ordinals from 0 on; a step is the number of optimizer steps done."""

    discarded: int
    """Finished groups that are never trained."""

    def start(self, step: int) -> int | None:
        """The next prompt to sample with the weights of `step`; None: not now."""
        ...

    def finish(self, ordinal: int) -> None: ...

    def take(self, step: int) -> list[int] | None:
        """The groups to train at trainer step `step`; None: not enough."""
        ...

    def trained(self, step: int) -> None: ...


class Ours:
    """The real ledger."""

    discarded = 0

    def __init__(self, P: int, S: int, window: int = 1, kind: Callable[..., Ledger] = Ledger) -> None:
        self._ledger = kind(prompts_per_step=P, max_age=S, window=window)

    def start(self, step: int) -> int | None:
        lease = self._ledger.lease("virtual", 0.0, math.inf, step)
        return None if lease is None else lease.ordinal

    def finish(self, ordinal: int) -> None:
        self._ledger.scored(ordinal, 1, trainable=True)

    def take(self, step: int) -> list[int] | None:
        return self._ledger.take(step + 1)

    def trained(self, step: int) -> None:
        self._ledger.trained(step)


def priority(ordinal: int) -> float:
    """What a group is worth, as far as anybody can tell: anything between 0 and 1."""
    return random.Random(f"worth/{ordinal}").random()


class Ordered(Ledger):
    """Takes another group than the oldest where the bound on age allows it: whoever is left behind, at most W - 1 later groups overtake."""

    @staticmethod
    def worth(ordinal: int) -> float:
        """The newest first."""
        return ordinal

    def take(self, step: int) -> list[int] | None:
        return super().take(step) if len(self._select()) == self.prompts_per_step else None

    def _select(self) -> list[int]:
        """All that are finished before the oldest one that stays, and of those within W of it the ones that are worth most."""
        before: list[int] = []
        for stays in range(self._head, self._front + 1):
            within = [o for o in range(stays + 1, stays + self.window) if self._is(o, "scored")]
            if len(before) + len(within) >= self.prompts_per_step:
                return sorted(before + sorted(within, key=self.worth)[len(before) + len(within) - self.prompts_per_step :])
            before += [stays] if self._is(stays, "scored") else []
            if len(before) == self.prompts_per_step:
                break
        return before


class Prioritized(Ordered):
    worth = staticmethod(priority)


class Reused(Ledger):
    """Where a step lacks groups, fills it with some that were trained before, each once more at most and none above `max_age`."""

    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]
        self._again: deque[int] = deque()
        self._began: dict[int, int] = {}  # ordinal → the step of the weights that may have sampled it

    def take(self, step: int) -> list[int] | None:
        new = self._select()
        self._again = deque(o for o in self._again if step - 1 - self._began[o] <= self.max_age)
        if len(new) + len(self._again) < self.prompts_per_step:
            return None
        again = [self._again.popleft() for _ in range(self.prompts_per_step - len(new))]
        self._hand_out(step, new)
        self._replaced -= len(again)  # each takes a place, as if it had been started
        self._again.extend(new)
        return new + again

    def _start(self) -> Entry:
        entry = super()._start()
        self._began[self.started - 1] = entry.min_step
        return entry

    def _check_age(self, step: int, ordinals: list[int]) -> None:
        """What the real one refuses is what is looked for here."""


class WindowedFifo:
    """A bounded number of groups between start and training, taken oldest first within a window from the unfinished head.

    With `depth` B and window W no group is older than (B+W-2) // P when it is trained. `share` makes the window that share of B,
    and B as large as S allows. A window of 1 is the strict FIFO.
    """

    discarded = 0

    def __init__(self, P: int, S: int, share: float = 0.0) -> None:
        fits = [b for b in range(1, (S + 1) * P + 1) if (b + max(1, round(share * b)) - 2) // P <= S]
        self._P, self._depth = P, max(fits)
        self._window = max(1, round(share * self._depth))
        self._started = self._untrained = self._head = 0
        self._done: set[int] = set()
        self._taken: set[int] = set()

    def start(self, step: int) -> int | None:
        if self._untrained >= self._depth:
            return None
        self._untrained += 1
        self._started += 1
        return self._started - 1

    def finish(self, ordinal: int) -> None:
        self._done.add(ordinal)

    def take(self, step: int) -> list[int] | None:
        while self._head in self._done or self._head in self._taken:
            self._head += 1
        ready = sorted(o for o in self._done if o < self._head + self._window)[: self._P]
        if len(ready) < self._P:
            return None
        self._done.difference_update(ready)
        self._taken.update(ready)
        return ready

    def trained(self, step: int) -> None:
        self._untrained -= self._P


class Arrival:
    """Groups in the order in which they are finished. `drop`: (S+1)·P are in flight or waiting, and those above S are thrown away; else the
    number that is started is paced by the version (capacity pacing), and what is too old is trained all the same."""

    def __init__(self, P: int, S: int, drop: bool) -> None:
        self._P, self._S, self._drop = P, S, drop
        self._versions: dict[int, int] = {}
        self._queue: deque[int] = deque()
        self._started = self._gone = 0
        self.discarded = 0

    def start(self, step: int) -> int | None:
        if self._started >= (self._gone if self._drop else step * self._P) + (self._S + 1) * self._P:
            return None
        self._versions[self._started] = step
        self._started += 1
        return self._started - 1

    def finish(self, ordinal: int) -> None:
        self._queue.append(ordinal)

    def take(self, step: int) -> list[int] | None:
        if self._drop:
            fresh = [o for o in self._queue if step - self._versions[o] <= self._S]
            self.discarded += len(self._queue) - len(fresh)
            self._gone += len(self._queue) - len(fresh)
            self._queue = deque(fresh)
        if len(self._queue) < self._P:
            return None
        self._gone += self._P
        return [self._queue.popleft() for _ in range(self._P)]

    def trained(self, step: int) -> None: ...


class UniformResampling:
    """A pool of the groups whose age is at most S, (S+1)·P with those in flight. Each step draws P of them, as likely one as another, and
    leaves them in. What leaves the pool without having been drawn is discarded."""

    def __init__(self, P: int, S: int) -> None:
        self._P, self._S = P, S
        self._random = random.Random(0)
        self._pool: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._used: set[int] = set()
        self._started = self._gone = 0
        self.discarded = 0

    def start(self, step: int) -> int | None:
        if self._started >= self._gone + (self._S + 1) * self._P:
            return None
        self._versions[self._started] = step
        self._started += 1
        return self._started - 1

    def finish(self, ordinal: int) -> None:
        self._pool[ordinal] = self._versions[ordinal]

    def take(self, step: int) -> list[int] | None:
        old = [o for o, version in self._pool.items() if step - version > self._S]
        self.discarded += sum(o not in self._used for o in old)
        self._gone += len(old)
        for ordinal in old:
            del self._pool[ordinal]
        if len(self._pool) < self._P:
            return None
        drawn = self._random.sample(list(self._pool), self._P)
        self._used.update(drawn)
        return drawn

    def trained(self, step: int) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    utilisation: float
    """share of the time in which the trainer trained"""
    age_mean: float
    age_max: int
    discarded: float
    """finished groups that were not trained, per trained one"""
    repeated: float
    """groups that were trained before, per trained one"""
    length_bias: float
    """mean length of what was trained over that of all prompts up to the last one that was"""
    worth: float
    """mean `priority` of what was trained over that of the same prompts"""


def simulate(policy: Policy, durations: Callable[[int], float], *, steps: int, slots: int, train_s: float) -> Outcome:
    """`steps` optimizer steps. `durations` of a prompt: how long it is sampled."""
    now, step, free, training = 0.0, 0, slots, False
    events: list[tuple[float, int]] = []  # heap of (time, ordinal); -1: the step in progress is done
    version: dict[int, int] = {}
    trained: list[int] = []
    ages: list[int] = []
    while step < steps:
        if not training and (batch := policy.take(step)) is not None:
            training = True
            trained += batch
            ages += [step - version[ordinal] for ordinal in batch]
            heappush(events, (now + train_s, -1))
        while free and (ordinal := policy.start(step)) is not None:
            free -= 1
            version[ordinal] = step
            heappush(events, (now + durations(ordinal), ordinal))
        now, ended = heappop(events)
        if ended < 0:
            step, training = step + 1, False
            policy.trained(step)
        else:
            free += 1
            policy.finish(ended)
    lengths = [durations(ordinal) for ordinal in range(max(trained) + 1)]
    worths = [priority(ordinal) for ordinal in range(max(trained) + 1)]
    return Outcome(
        utilisation=steps * train_s / now,
        age_mean=fmean(ages),
        age_max=max(ages),
        discarded=policy.discarded / len(trained),
        repeated=1 - len(set(trained)) / len(trained),
        length_bias=fmean(map(durations, trained)) / fmean(lengths),
        worth=fmean(map(priority, trained)) / fmean(worths),
    )


def made_up(stragglers: float, factor: float, *, median_s: float, seed: int = 0) -> Callable[[int], float]:
    """Log-normal durations (sigma 0.6), `factor` times as long for a share of `stragglers`; a pure function of the ordinal."""
    known: dict[int, float] = {}

    def duration(ordinal: int) -> float:
        if ordinal not in known:
            draw = random.Random(f"{seed}/{ordinal}")
            slow = factor if draw.random() < stragglers else 1.0
            known[ordinal] = median_s * draw.lognormvariate(0.0, 0.6) * slow
        return known[ordinal]

    return duration


def policies(P: int, S: int, windows: Iterable[int]) -> dict[str, Policy]:
    """By name, all for the same P and S."""
    named: dict[str, Policy] = {f"ours, window {window}": Ours(P, S, window) for window in windows}
    middle = max(1, S * P // 2)
    return named | {
        f"freshest first, window {middle}": Ours(P, S, middle, Ordered),
        f"by worth, window {middle}": Ours(P, S, middle, Prioritized),
        f"trained twice where it lacks, window {middle}": Ours(P, S, middle, Reused),
        "strict FIFO": WindowedFifo(P, S),
        "windowed FIFO 0.3": WindowedFifo(P, S, 0.3),
        "capacity pacing, arrival order": Arrival(P, S, drop=False),
        "arrival order, stale dropped": Arrival(P, S, drop=True),
        "uniform resampling": UniformResampling(P, S),
    }


def compare(
    *, P: int, ages: Sequence[int], tails: Sequence[tuple[float, float]], steps: int, slots: int, median_s: float, seed: int = 0
) -> tuple[str, Row]:
    """All policies on all `tails` (share of stragglers, how many times as long), as a table and as data."""
    rows, result = [], []
    for stragglers, factor in tails:
        durations = made_up(stragglers, factor, median_s=median_s, seed=seed)
        for S in ages:
            for name, policy in policies(P, S, sorted({1, max(1, S * P // 4), max(1, S * P // 2), S * P + 1})).items():
                made = simulate(policy, durations, steps=steps, slots=slots, train_s=1.0)
                shown = (f"{made.utilisation:.3f}", f"{made.age_mean:.2f}", made.age_max, f"{made.discarded:.1%}", f"{made.repeated:.1%}")
                rows.append((f"{stragglers:.0%} ×{factor:g}", S, name, *shown, f"{made.length_bias:.2f}", f"{made.worth:.2f}"))
                result.append({"stragglers": stragglers, "factor": factor, "max_age": S, "policy": name, **asdict(made)})
    header = (
        "stragglers",
        "max_age",
        "policy",
        "utilisation",
        "age mean",
        "age max",
        "discarded",
        "repeated",
        "length, trained / made",
        "worth",
    )
    setting = {"prompts_per_step": P, "steps": steps, "slots": slots, "median_s": median_s, "seed": seed}
    return table(header, rows), {"setting": setting, "outcomes": result}
