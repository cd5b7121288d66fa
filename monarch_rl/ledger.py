"""The life of every prompt, and the rule that says when the next one may be started. No asyncio, no Monarch, no torch.

An ordinal goes `pending → leased → scored → taken → trained`, or ends as `dropped` with a reason. A lost or late claim goes
back to `pending` until its attempts are used up. Deadlines and the trainer's step are arguments, so that the rule can be tested
in virtual time. An event costs O(1) amortised, plus a heap operation where deadlines or returned prompts are touched, and a look at all
that live where a returned one must wait for newer weights. The rule and its proof: `docs/staleness.md`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Literal

from monarch_rl.claims import Claims
from monarch_rl.lives import Counts, Ended, Entry, Holdings, Life, Lost, Progress, State, TailError, check_shape
from monarch_rl.types import NOT_SAMPLED, Lease

Tail = Literal["train", "drop", "error"]


class AgeError(AssertionError):
    """A group would be trained at an age above `max_age`; the message names its ordinal."""


class Ledger:
    """Counters, one small record per prompt that is neither trained nor dropped, and the book of those that are.

    Args:
        prompts_per_step: P, groups per optimizer step.
        max_age: S, most optimizer steps between sampling and training; 0 is synchronous.
        window: W, ordinals from the unfinished head that may be taken out of order; 1 is strictly in order.
        max_attempts: claims on one prompt before it is dropped.
        steps: length of the run, so that nothing is started that no step would train; None: endless.
        ordinals: prompts that there are; None: endless.
        tail: what becomes of the last groups where they are fewer than P: a smaller step, dropped, or a TailError.
        clock: the time for `Life.since`.
        on_change: is told of every change.
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
        ordinals: int | None = None,
        tail: Tail = "train",
        clock: Callable[[], float] = time.time,
        on_change: Callable[[Life], None] | None = None,
    ) -> None:
        check_shape(prompts_per_step, max_age, window, max_attempts)
        self.prompts_per_step, self.window, self.max_attempts = prompts_per_step, window, max_attempts
        self.steps, self.ordinals, self.tail = steps, ordinals, tail
        self.set_max_age(max_age)
        self._clock, self._on_change = clock, on_change
        self._clear()

    def _clear(self) -> None:
        self.started = 0
        """Ordinals leased at least once, so also the next fresh one."""
        self.dropped: Counter[str] = Counter()
        """Dropped prompts by reason."""
        self.stale = 0
        """Answers of claims that were no longer held; they change nothing."""
        self.taken_steps = 0
        """The last optimizer step whose groups were handed out."""
        self.trained_steps = 0
        """The last optimizer step that is done."""
        self.ended = Ended()
        self._live: dict[int, Entry] = {}
        self._count: Counter[State] = Counter()
        self._replaced = 0  # started ordinals that count in no step's P: dropped prompts whose replacement may be started ...
        self._vacant = 0  # ... and those whose replacement has to wait for the end of a synchronous wave
        self._returned: list[int] = []  # heap of pending ordinals; those no longer pending are skipped
        self._claims = Claims()
        self._batches: deque[list[int]] = deque()  # taken, not yet trained
        self._head = 0  # everything below is taken or dropped
        self._front = 0  # the unfinished head: nothing below is pending or leased
        self._ready = 0  # scored ordinals below _front + window

    def set_max_age(self, max_age: int) -> None:
        """S of the prompts that are started from now on. The proof is about one prompt at a time, so others keep theirs."""
        check_shape(self.prompts_per_step, max_age, self.window, self.max_attempts)
        self.max_age = max_age
        self.budget = (max_age + 1) * self.prompts_per_step - (self.window - 1)
        """B of the admission rule: groups that may be started ahead of the step of the weights."""

    @property
    def counts(self) -> Counts:
        """How many prompts stand where."""
        c = self._count
        return Counts(self.started, c["pending"], c["leased"], c["scored"], c["taken"], c["trained"], self.dropped.total())

    @property
    def fill(self) -> float:
        """Finished groups that wait, in steps' worth; at most B/P."""
        return self._count["scored"] / self.prompts_per_step

    def progress(self) -> Progress:
        """For a run that goes on after the last step that is done."""
        return Progress(self.trained_steps, min(self._live, default=self.started), dict(self.dropped))

    def holdings(self) -> Holdings:
        """All of it as it is now; costs as much as there are prompts."""
        prompts = [entry.life(ordinal) for ordinal, entry in sorted(self._live.items())]
        return Holdings(self.counts, dict(self.dropped), self.budget, self.max_age, prompts)

    def life(self, ordinal: int) -> Life | None:
        """What became of a prompt; None: it was not started yet."""
        entry = self._live.get(ordinal)
        return self.ended.get(ordinal) if entry is None else entry.life(ordinal)

    def pending(self) -> list[int]:
        """Prompts that wait for another attempt, in the order of their leases."""
        return sorted(ordinal for ordinal in self._returned if self._is(ordinal, "pending"))

    def newest(self, states: Sequence[State], last: int) -> list[Life]:
        """The last prompts that are in any of these states, in order."""
        live = [entry.life(ordinal) for ordinal, entry in self._live.items() if entry.state in states]
        return sorted(live + self.ended.newest(states, last))[-last:] if last > 0 else []

    def age_bound(self, ordinal: int) -> int:
        """`max_age` as it was when this prompt was started; of prompts that are not trained yet."""
        return self._live[ordinal].max_age

    @property
    def over(self) -> bool:
        """True when the last step has been handed out, or all prompts have ended or wait for a step: nothing will be leased again."""
        return (self.steps is not None and self.taken_steps >= self.steps) or (self._all_started and not self._unfinished)

    def next_ordinal(self, step: int) -> int | None:
        """What `lease` would hand out at trainer step `step`: returned prompts first, then fresh ones, in order."""
        while self._returned and not self._is(self._returned[0], "pending"):
            heappop(self._returned)
        if self._returned:
            return self._returned[0] if self._may_go_on(self._returned[0], step) else None
        return self.started if self._may_start(step) else None

    def lease(self, owner: str, now: float, deadline_s: float, step: int) -> Lease | None:
        """Claim the next prompt until `now + deadline_s`; None when none may be started at trainer step `step`."""
        ordinal = self.next_ordinal(step)
        if ordinal is None:
            return None
        entry = self._start() if ordinal == self.started else self._live[heappop(self._returned)]
        entry.attempt += 1
        entry.owner = owner
        self._move(ordinal, entry, "leased")
        self._claims.add(ordinal, entry.attempt, owner, now + deadline_s)
        return Lease(ordinal, entry.attempt, entry.min_step)

    def skip(self, ordinal: int) -> None:
        """Start the next fresh prompt, `next_ordinal`, and drop it unsampled (reason `skipped`). Its place is free at once, in a
        synchronous wave too, since that depends on no timing.

        Raises:
            ValueError: it is another one's turn.
        """
        if ordinal != self.started:
            raise ValueError(f"prompt {ordinal} cannot be skipped: the next one is {self.started}")
        self._drop(ordinal, self._start(), "skipped")
        self._vacant -= 1
        self._replaced += 1

    def scored(self, ordinal: int, attempt: int, trainable: bool, oldest: int = NOT_SAMPLED, newest: int = NOT_SAMPLED) -> bool:
        """The claim ended with a group; one that is not trainable is dropped as `dead`. False: the claim was lost before.

        `oldest`, `newest`: `Version.pack()` of the weights behind its tokens.
        """
        if not trainable:
            return self.drop(ordinal, "dead", attempt)
        entry = self._claim(ordinal, attempt)
        if entry is None:
            return False
        self._claims.end(ordinal)
        entry.oldest, entry.newest = oldest, newest
        self._move(ordinal, entry, "scored")
        self._ready += ordinal < self._front + self.window
        self._advance()
        return True

    def failed(self, ordinal: int, attempt: int, reason: str) -> Lost | None:
        """The claim ended without a group: pending again, or dropped with `reason`. None: the claim was lost before."""
        entry = self._claim(ordinal, attempt)
        return None if entry is None else self._give_up(ordinal, entry, reason)

    def release(self, owner: str) -> list[Lost]:
        """The owner is gone: give up all of its claims (reason `lost`)."""
        return [self._give_up(ordinal, self._live[ordinal], "lost") for ordinal in self._claims.of(owner)]

    def expire(self, now: float) -> list[Lost]:
        """Give up every claim whose deadline has passed (reason `deadline`)."""
        lost = []
        while (due := self._claims.next_deadline()) is not None and due[0] <= now:
            lost.append(self._give_up(due[1], self._live[due[1]], "deadline"))
        return lost

    def next_deadline(self) -> float | None:
        """When `expire` will find something next."""
        due = self._claims.next_deadline()
        return None if due is None else due[0]

    def drop(self, ordinal: int, reason: str, attempt: int | None = None) -> bool:
        """Take a prompt out for good; with `attempt` only while that claim is held. False: it was lost, was taken, or had ended."""
        entry = self._live.get(ordinal) if attempt is None else self._claim(ordinal, attempt)
        if entry is None or entry.state == "taken":
            return False
        self._drop(ordinal, entry, reason)
        return True

    def take(self, step: int) -> list[int] | None:
        """Hand out the groups of optimizer step `step` (from 1, each once), sorted by ordinal: P, or fewer for the last step of the data.

        None: not complete yet. Empty: there is no such step, since the data have ended before it.

        Raises:
            ValueError: not the step after the last one taken.
            TailError: the data end with fewer than P groups, and `tail` is `error`.
            AgeError: a group's weights may be too old, which the admission rule excludes.
        """
        if step != self.taken_steps + 1:
            raise ValueError(f"step {step} cannot be taken: the next one is {self.taken_steps + 1}")
        if self._ready < self.prompts_per_step and (self._unfinished or not self._all_started):
            return None
        ordinals = self._select()
        if len(ordinals) < self.prompts_per_step and self.tail != "train":
            self._leave(ordinals)
            return []
        if ordinals:
            self._hand_out(step, ordinals)
        return ordinals

    def trained(self, step: int) -> None:
        """Steps up to and including `step` are done; saying it again changes nothing. Raises ValueError: it was not taken."""
        if step > self.taken_steps:
            raise ValueError(f"step {step} cannot be trained: the last one taken is {self.taken_steps}")
        for _ in range(self.trained_steps, step):
            for ordinal in self._batches.popleft():
                entry = self._live.pop(ordinal)
                self._move(ordinal, entry, "trained")
                self.ended.add(entry.life(ordinal))
        self.trained_steps = max(self.trained_steps, step)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on after the last step that is trained, as numbers, text and (`columns`) arrays.

        A claim is no attempt any more, for the run is what failed; a group that was taken is scored again.
        """
        live = [
            [o, e.state in ("scored", "taken"), e.attempt - (e.state == "leased"), e.owner, e.min_step, e.max_age, e.oldest, e.newest]
            for o, e in sorted(self._live.items())
        ]
        words, columns = self.ended.arrays()
        starts = {"started": self.started, "replaced": self._replaced, "vacant": self._vacant, "stale": self.stale}
        ends = {"step": self.trained_steps, "trained": self._count["trained"], "dropped": dict(self.dropped)}
        return starts | ends | {"live": live, "words": words, "columns": columns}

    def load_state_dict(self, state: Mapping[str, Any], keep_groups: bool = True) -> None:
        """Go on from there, whatever stood here. Without `keep_groups` finished ones are sampled again, and P, S, W may differ."""
        self._clear()
        self.started, self.stale = state["started"], state["stale"]
        self._replaced, self._vacant = state["replaced"], state["vacant"]
        self.taken_steps = self.trained_steps = state["step"]
        self.dropped = Counter(state["dropped"])
        self.ended = Ended.of(state["words"], state["columns"])
        self._count["trained"] = state["trained"]
        if not keep_groups:
            self._replaced, self._vacant = self.started - self.trained_steps * self.prompts_per_step - len(state["live"]), 0
        for at, (ordinal, scored, attempt, owner, min_step, max_age, oldest, newest) in enumerate(state["live"]):
            if keep_groups:
                entry = Entry(min_step, max_age, attempt=attempt, owner=owner, oldest=oldest, newest=newest)
            else:
                entry = Entry(self._first_step(self.trained_steps * self.prompts_per_step + at), self.max_age, attempt=attempt - scored)
            self._live[ordinal] = entry
            self._count["pending"] += 1
            self._move(ordinal, entry, "scored" if scored and keep_groups else "pending")
        self._returned = sorted(ordinal for ordinal, entry in self._live.items() if entry.state == "pending")
        self._front = min(self._returned, default=self.started)
        self._head = min(self._live, default=self.started)
        self._ready = sum(e.state == "scored" and o < self._front + self.window for o, e in self._live.items())

    @property
    def _unfinished(self) -> int:
        return self._count["pending"] + self._count["leased"]

    @property
    def _all_started(self) -> bool:
        return self.ordinals is not None and self.started >= self.ordinals

    def _may_start(self, step: int) -> bool:
        """The admission rule. A synchronous step starts replacements only when its first wave has ended."""
        if self._all_started:
            return False
        if self.max_age > 0 or not self._unfinished:
            self._replaced += self._vacant
            self._vacant = 0
        limit = step * self.prompts_per_step + self.budget
        if self.steps is not None:
            limit = min(limit, self.steps * self.prompts_per_step)
        return self.started - self._replaced < limit

    def _may_go_on(self, ordinal: int, step: int) -> bool:
        """The rule for one that was started before: what was dropped since makes it earlier."""
        entry = self._live[ordinal]
        if entry.min_step > step:
            before = self.trained_steps * self.prompts_per_step + sum(live < ordinal for live in self._live)
            entry.min_step = min(entry.min_step, self._first_step(before - (entry.max_age - self.max_age) * self.prompts_per_step))
        return entry.min_step <= step

    def _start(self) -> Entry:
        entry = self._live[self.started] = Entry(self._first_step(self.started - self._replaced), self.max_age)
        self._count["pending"] += 1
        self.started += 1
        return entry

    def _first_step(self, index: int) -> int:
        """The smallest step of weights that the admission rule allows to the prompt that `index` others may be trained before."""
        return max(0, (index - self.budget) // self.prompts_per_step + 1)

    def _is(self, ordinal: int, *states: State) -> bool:
        return ordinal in self._live and self._live[ordinal].state in states

    def _claim(self, ordinal: int, attempt: int) -> Entry | None:
        if self._claims.holds(ordinal, attempt):
            return self._live[ordinal]
        self.stale += 1
        return None

    def _move(self, ordinal: int, entry: Entry, state: State, reason: str = "") -> None:
        self._count[entry.state] -= 1
        self._count[state] += 1
        entry.state, entry.since = state, self._clock()
        if self._on_change is not None:
            self._on_change(entry.life(ordinal, reason))

    def _give_up(self, ordinal: int, entry: Entry, reason: str) -> Lost:
        lost = Lost(ordinal, entry.attempt, entry.owner, dropped=entry.attempt >= self.max_attempts)
        if lost.dropped:
            self._drop(ordinal, entry, reason)
        else:
            self._claims.end(ordinal)
            self._move(ordinal, entry, "pending")
            heappush(self._returned, ordinal)
        return lost

    def _drop(self, ordinal: int, entry: Entry, reason: str) -> None:
        if entry.state == "leased":
            self._claims.end(ordinal)
        self._ready -= entry.state == "scored" and ordinal < self._front + self.window
        self._move(ordinal, self._live.pop(ordinal), "dropped", reason)
        self.ended.add(entry.life(ordinal, reason))
        self.dropped[reason] += 1
        self._vacant += 1
        self._advance()

    def _leave(self, ordinals: list[int]) -> None:
        """The last groups, which are fewer than P and are not to be trained."""
        if ordinals and self.tail == "error":
            raise TailError(
                f"the data end with {len(ordinals)} groups (prompts {ordinals[0]} to {ordinals[-1]}), fewer than "
                f"buffer.prompts_per_step={self.prompts_per_step}, and buffer.tail=error"
            )
        for ordinal in ordinals:
            self._drop(ordinal, self._live[ordinal], "tail")

    def _hand_out(self, step: int, ordinals: list[int]) -> None:
        self._check_age(step, ordinals)
        for ordinal in ordinals:
            self._live[ordinal].step = step
            self._move(ordinal, self._live[ordinal], "taken")
        self._ready -= len(ordinals)
        self._batches.append(ordinals)
        self.taken_steps = step
        while self._head < self._front and not self._is(self._head, "scored"):
            self._head += 1

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
