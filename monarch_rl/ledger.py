"""The life of every prompt, and the rule that says when the next one may be started. No asyncio, no Monarch, no torch.

An ordinal goes `pending → leased → scored → taken → trained`, or ends as `dropped` with a reason. A lost or late claim goes
back to `pending` until its attempts are used up. Time and the trainer's step are arguments, so that the rule can be tested
in virtual time. An event costs O(1) amortised, plus a heap operation where deadlines or returned prompts are touched.
The rule and its proof: `docs/staleness.md`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Literal, NamedTuple

from monarch_rl.types import Lease

State = Literal["pending", "leased", "scored", "taken"]
"""Of a prompt that the ledger still remembers; trained and dropped ones are only counted."""


class AgeError(AssertionError):
    """A group would be trained at an age above `max_age`; the message names its ordinal."""


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


class Holding(NamedTuple):
    """A prompt that is neither trained nor dropped, for display."""

    ordinal: int
    state: State
    owner: str
    """Of the claim; the last one where it is not leased."""
    attempt: int
    min_step: int


class Holdings(NamedTuple):
    """What a ledger holds at one moment, for display."""

    counts: Counts
    dropped: dict[str, int]
    """By reason."""
    budget: int
    """Groups that may be started ahead of the step of the weights."""
    max_age: int
    prompts: list[Holding]
    """Every one that is neither trained nor dropped, in order."""


@dataclass(slots=True)
class _Entry:
    min_step: int
    max_age: int
    state: State = "pending"
    attempt: int = 0
    owner: str = ""


class Ledger:
    """Counters, and one small record per prompt that is neither trained nor dropped.

    Args:
        prompts_per_step: P, groups per optimizer step.
        max_age: S, most optimizer steps between sampling and training; 0 is synchronous.
        window: W, ordinals from the unfinished head that may be taken out of order; 1 is strictly in order.
        max_attempts: claims on one prompt before it is dropped.
        steps: length of the run, so that nothing is started that no step would train; None: endless.
        after: where an earlier run stood. What it had started and not trained is started again.
    Raises:
        ValueError: a value is out of range, or the window leaves less than one step's worth of budget.
    """

    def __init__(
        self,
        *,
        prompts_per_step: int,
        max_age: int,
        window: int = 1,
        max_attempts: int = 3,
        steps: int | None = None,
        after: Progress | None = None,
    ) -> None:
        after = after or Progress(0, 0, {})
        _check(prompts_per_step, max_age, window, max_attempts)
        self.prompts_per_step = prompts_per_step
        self.window = window
        self.max_attempts = max_attempts
        self.steps = steps
        self.set_max_age(max_age)
        self.started = after.next_ordinal
        """Ordinals leased at least once, so also the next fresh one."""
        self.dropped: Counter[str] = Counter(after.dropped)
        """Dropped prompts by reason."""
        self.stale = 0
        """Answers of claims that were no longer held; they change nothing."""
        self.taken_steps = after.step
        """The last optimizer step whose groups were handed out."""
        self.trained_steps = after.step
        """The last optimizer step that is done."""
        self._live: dict[int, _Entry] = {}
        self._count: Counter[State] = Counter()
        # Started ordinals that count in no step's P: dropped prompts whose replacement may be started, and what a wider
        # window had trained beyond the first unfinished one when the earlier run ended.
        self._skipped = after.next_ordinal - after.step * prompts_per_step - self.dropped.total()
        self._replaced = self._skipped + self.dropped.total()
        self._returned: list[int] = []  # heap of pending ordinals; those no longer pending are skipped
        self._deadlines: list[tuple[float, int, int]] = []  # heap of (deadline, ordinal, attempt); lost claims are skipped
        self._owned: defaultdict[str, set[int]] = defaultdict(set)
        self._batches: deque[list[int]] = deque()  # taken, not yet trained
        self._head = self.started  # everything below is taken or dropped
        self._front = self.started  # the unfinished head: nothing below is pending or leased
        self._ready = 0  # scored ordinals below _front + window

    def set_max_age(self, max_age: int) -> None:
        """S of the prompts that are started from now on. The proof is about one prompt at a time, so others keep theirs."""
        _check(self.prompts_per_step, max_age, self.window, self.max_attempts)
        self.max_age = max_age
        self.budget = (max_age + 1) * self.prompts_per_step - (self.window - 1)
        """B of the admission rule: groups that may be started ahead of the step of the weights."""

    @property
    def counts(self) -> Counts:
        """How many prompts stand where."""
        c = self._count
        trained = self.trained_steps * self.prompts_per_step
        return Counts(self.started, c["pending"], c["leased"], c["scored"], c["taken"], trained, self.dropped.total())

    @property
    def fill(self) -> float:
        """Finished groups that wait, in steps' worth; at most B/P."""
        return self._count["scored"] / self.prompts_per_step

    def progress(self) -> Progress:
        """For a run that goes on after the last step that is done."""
        return Progress(self.trained_steps, min(self._live, default=self.started), dict(self.dropped))

    def holdings(self) -> Holdings:
        """All of it as it is now; costs as much as there are prompts."""
        prompts = [Holding(o, e.state, e.owner, e.attempt, e.min_step) for o, e in sorted(self._live.items())]
        return Holdings(self.counts, dict(self.dropped), self.budget, self.max_age, prompts)

    def age_bound(self, ordinal: int) -> int:
        """`max_age` as it was when this prompt was started; of prompts that are not trained yet."""
        return self._live[ordinal].max_age

    @property
    def over(self) -> bool:
        """True when the last step has been handed out: nothing will be leased again."""
        return self.steps is not None and self.taken_steps >= self.steps

    def next_ordinal(self, step: int) -> int | None:
        """What `lease` would hand out at trainer step `step`: returned prompts first, then fresh ones, in order."""
        while self._returned and not self._is(self._returned[0], "pending"):
            heappop(self._returned)
        if self._returned:
            return self._returned[0]
        return self.started if self._may_start(step) else None

    def lease(self, owner: str, now: float, deadline_s: float, step: int) -> Lease | None:
        """Claim the next prompt until `now + deadline_s`; None when none may be started at trainer step `step`."""
        ordinal = self.next_ordinal(step)
        if ordinal is None:
            return None
        entry = self._start() if ordinal == self.started else self._live[heappop(self._returned)]
        self._move(entry, "leased")
        entry.attempt += 1
        entry.owner = owner
        self._owned[owner].add(ordinal)
        heappush(self._deadlines, (now + deadline_s, ordinal, entry.attempt))
        return Lease(ordinal, entry.attempt, entry.min_step)

    def scored(self, ordinal: int, attempt: int, trainable: bool) -> bool:
        """The claim ended with a group; one that is not trainable is dropped as `dead`. False: the claim was lost before."""
        if not trainable:
            return self.drop(ordinal, "dead", attempt)
        entry = self._claim(ordinal, attempt)
        if entry is None:
            return False
        self._disown(ordinal, entry)
        self._move(entry, "scored")
        self._ready += ordinal < self._front + self.window
        self._advance()
        return True

    def failed(self, ordinal: int, attempt: int, reason: str) -> Lost | None:
        """The claim ended without a group: pending again, or dropped with `reason`. None: the claim was lost before."""
        entry = self._claim(ordinal, attempt)
        return None if entry is None else self._give_up(ordinal, entry, reason)

    def release(self, owner: str) -> list[Lost]:
        """The owner is gone: give up all of its claims (reason `lost`)."""
        return [self._give_up(o, self._live[o], "lost") for o in sorted(self._owned.get(owner, ()))]

    def expire(self, now: float) -> list[Lost]:
        """Give up every claim whose deadline has passed (reason `deadline`)."""
        lost = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            ordinal = heappop(self._deadlines)[1]
            lost.append(self._give_up(ordinal, self._live[ordinal], "deadline"))
        return lost

    def next_deadline(self) -> float | None:
        """When `expire` will find something next."""
        while self._deadlines and not self._holds(*self._deadlines[0][1:]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def drop(self, ordinal: int, reason: str, attempt: int | None = None) -> bool:
        """Take a prompt out for good; with `attempt` only while that claim is held.

        False: the claim was lost before; or, without `attempt`, the prompt was taken or had ended.
        """
        entry = self._live.get(ordinal) if attempt is None else self._claim(ordinal, attempt)
        if entry is None or entry.state == "taken":
            return False
        self._drop(ordinal, entry, reason)
        return True

    def take(self, step: int) -> list[int] | None:
        """Hand out the P groups of optimizer step `step` (from 1, each once), sorted by ordinal; None: not complete yet.

        Raises:
            ValueError: not the step after the last one taken.
            AgeError: a group's weights may be too old, which the admission rule excludes.
        """
        if step != self.taken_steps + 1:
            raise ValueError(f"step {step} cannot be taken: the next one is {self.taken_steps + 1}")
        if self._ready < self.prompts_per_step:
            return None
        ordinals = self._select()
        self._check_age(step, ordinals)
        for ordinal in ordinals:
            self._move(self._live[ordinal], "taken")
        self._ready -= len(ordinals)
        self._batches.append(ordinals)
        self.taken_steps = step
        while self._head < self._front and not self._is(self._head, "scored"):
            self._head += 1
        return ordinals

    def trained(self, step: int) -> None:
        """The optimizer steps up to and including `step` are done; saying it again changes nothing.

        Raises:
            ValueError: a step that was not taken.
        """
        if step > self.taken_steps:
            raise ValueError(f"step {step} cannot be trained: the last one taken is {self.taken_steps}")
        for _ in range(self.trained_steps, step):
            for ordinal in self._batches.popleft():
                self._count[self._live.pop(ordinal).state] -= 1
        self.trained_steps = max(self.trained_steps, step)

    def _may_start(self, step: int) -> bool:
        """The admission rule. A synchronous step starts replacements only when its first wave has ended."""
        if self.max_age > 0 or not (self._count["pending"] or self._count["leased"]):
            self._replaced = self._skipped + self.dropped.total()
        limit = step * self.prompts_per_step + self.budget
        if self.steps is not None:
            limit = min(limit, self.steps * self.prompts_per_step)
        return self.started - self._replaced < limit

    def _start(self) -> _Entry:
        index = self.started - self._replaced
        entry = self._live[self.started] = _Entry(max(0, (index - self.budget) // self.prompts_per_step + 1), self.max_age)
        self._count["pending"] += 1
        self.started += 1
        return entry

    def _is(self, ordinal: int, *states: State) -> bool:
        entry = self._live.get(ordinal)
        return entry is not None and entry.state in states

    def _holds(self, ordinal: int, attempt: int) -> bool:
        entry = self._live.get(ordinal)
        return entry is not None and entry.state == "leased" and entry.attempt == attempt

    def _claim(self, ordinal: int, attempt: int) -> _Entry | None:
        if self._holds(ordinal, attempt):
            return self._live[ordinal]
        self.stale += 1
        return None

    def _move(self, entry: _Entry, state: State) -> None:
        self._count[entry.state] -= 1
        self._count[state] += 1
        entry.state = state

    def _disown(self, ordinal: int, entry: _Entry) -> None:
        owned = self._owned[entry.owner]
        owned.discard(ordinal)
        if not owned:
            del self._owned[entry.owner]

    def _give_up(self, ordinal: int, entry: _Entry, reason: str) -> Lost:
        lost = Lost(ordinal, entry.attempt, entry.owner, dropped=entry.attempt >= self.max_attempts)
        if lost.dropped:
            self._drop(ordinal, entry, reason)
        else:
            self._disown(ordinal, entry)
            self._move(entry, "pending")
            heappush(self._returned, ordinal)
        return lost

    def _drop(self, ordinal: int, entry: _Entry, reason: str) -> None:
        if entry.state == "leased":
            self._disown(ordinal, entry)
        self._ready -= entry.state == "scored" and ordinal < self._front + self.window
        self._count[self._live.pop(ordinal).state] -= 1
        self.dropped[reason] += 1
        self._advance()

    def _advance(self) -> None:
        """Move the unfinished head up; scored groups that its window now reaches are ready."""
        while self._front < self.started and not self._is(self._front, "pending", "leased"):
            self._ready += self._is(self._front + self.window, "scored")
            self._front += 1

    def _select(self) -> list[int]:
        """The P oldest ready groups. Whatever is skipped here is unfinished, so at most W - 1 groups overtake it."""
        reach = range(self._head, self._front + self.window)
        return list(islice((ordinal for ordinal in reach if self._is(ordinal, "scored")), self.prompts_per_step))

    def _check_age(self, step: int, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            age, bound = step - 1 - self._live[ordinal].min_step, self.age_bound(ordinal)
            if age > bound:
                raise AgeError(f"prompt {ordinal} may be {age} steps old at step {step}, above buffer.max_age={bound}")


def _check(prompts_per_step: int, max_age: int, window: int, max_attempts: int) -> None:
    lowest = {"buffer.prompts_per_step": 1, "buffer.max_age": 0, "buffer.window": 1, "rollout.max_attempts": 1}
    for (key, low), value in zip(lowest.items(), (prompts_per_step, max_age, window, max_attempts), strict=True):
        if value < low:
            raise ValueError(f"{key}={value} must be at least {low}")
    most = max_age * prompts_per_step + 1
    if window > most:
        raise ValueError(
            f"buffer.window={window} can be at most {most} with buffer.max_age={max_age} and buffer.prompts_per_step={prompts_per_step}"
        )
