"""The admission rule and the bookkeeping of prompts, by hand-made cases and in virtual time with the real class."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from monarch_rl.ledger import AgeError, Ledger, Lost
from monarch_rl.types import Lease


def claim_all(ledger: Ledger, step: int, owner: str = "w", now: float = 0.0, deadline_s: float = 10.0) -> list[Lease]:
    leases = []
    while (lease := ledger.lease(owner, now, deadline_s, step)) is not None:
        leases.append(lease)
    return leases


def score_all(ledger: Ledger, leases: list[Lease]) -> None:
    for lease in leases:
        assert ledger.scored(lease.ordinal, lease.attempt, trainable=True)


def check_account(ledger: Ledger) -> None:
    """Every started ordinal is in exactly one place."""
    c = ledger.counts
    assert min(c) >= 0
    assert c.started == c.pending + c.leased + c.scored + c.taken + c.trained + c.dropped


# -- virtual time ----------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Rollouts, generators and a trainer around a real ledger, in virtual time. `chance` of what can go wrong with an attempt."""

    ledger: Ledger
    steps: int
    seed: int
    replicas: int = 3
    deadline_s: float = 60.0
    chance: dict[str, float] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()
    """Ordinals that take 40 times as long."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.step = 0
        self.training = False
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.held = [0] * self.replicas
        self.gate: list[Lease] = []  # leases that no replica may start yet
        self.start_step: dict[int, int] = {}  # ordinal → step of the weights of the attempt that scored
        self.fate: dict[int, str] = {}
        self.ages: list[int] = []
        self.overtaken: Counter[int] = Counter()
        self.batches: list[list[int]] = []

    def after(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, what, args))

    def run(self) -> World:
        self.settle()
        while self.step < self.steps:
            assert self.events, f"deadlock at step {self.step}: {self.ledger.counts}"
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
            self.settle()
        return self

    def settle(self) -> None:
        self.take()
        while (lease := self.ledger.lease(f"worker {self.random.randrange(4)}", self.now, self.deadline_s, self.step)) is not None:
            self.gate.append(lease)
        self.start()
        deadline = self.ledger.next_deadline()
        if deadline is not None:
            self.after(max(0.0, deadline - self.now), self.expire)

    def start(self) -> None:
        """Each replica starts only what its weights allow."""
        waiting = []
        for lease in self.gate:
            able = [held for held in self.held if held >= lease.min_step]
            if able:
                self.attempt(lease, self.random.choice(able))
            else:
                waiting.append(lease)
        self.gate = waiting

    def attempt(self, lease: Lease, held: int) -> None:
        duration = self.random.lognormvariate(0, 1) * (20 if self.random.random() < 0.05 else 1)
        duration *= 40 if lease.ordinal in self.slow else 1
        fault = self.random.random()
        for kind, share in self.chance.items():
            fault -= share
            if fault < 0:
                return self.after(duration, self.end, kind, lease, held)
        self.after(duration, self.end, "scored", lease, held)

    def end(self, kind: str, lease: Lease, held: int) -> None:
        o, attempt = lease.ordinal, lease.attempt
        if kind == "scored":
            if self.ledger.scored(o, attempt, trainable=True):
                self.start_step[o] = held
        elif kind == "dead":
            if self.ledger.scored(o, attempt, trainable=False):
                self.finish(o, "dead")
        elif kind == "fail":
            lost = self.ledger.failed(o, attempt, "failed")
            self.lose([lost] if lost else [])
        elif kind == "drop":
            if self.ledger.drop(o, "refused", attempt):
                self.finish(o, "refused")
        elif kind == "die":
            self.lose(self.ledger.release(f"worker {self.random.randrange(4)}"))
        # "silent": no answer ever comes; the deadline finds it

    def expire(self) -> None:
        self.lose(self.ledger.expire(self.now))

    def lose(self, losses: list[Lost]) -> None:
        for lost in losses:
            if lost.dropped:
                self.finish(lost.ordinal, "attempts")

    def finish(self, ordinal: int, how: str) -> None:
        assert ordinal not in self.fate, f"{ordinal} was {self.fate[ordinal]} and is now {how}"
        self.fate[ordinal] = how

    def take(self) -> None:
        if self.training or self.step == self.steps:
            return
        batch = self.ledger.take(self.step + 1)
        if batch is None:
            return
        assert len(batch) == self.ledger.prompts_per_step
        assert batch == sorted(batch)
        for ordinal in batch:
            self.finish(ordinal, "trained")
            self.ages.append(self.step - self.start_step[ordinal])
        for ordinal in set(range(max(batch))) - self.fate.keys():  # older and still here
            self.overtaken[ordinal] += sum(o > ordinal for o in batch)
        self.batches.append(batch)
        self.training = True
        self.after(self.random.uniform(0.2, 2), self.train)

    def train(self) -> None:
        self.step += 1
        self.training = False
        self.ledger.trained(self.step)
        check_account(self.ledger)
        for replica in range(self.replicas):  # one of them is slow to pull
            self.after(self.random.expovariate(0.05 if replica == 0 else 1.0), self.pull, replica, self.step)

    def pull(self, replica: int, step: int) -> None:
        self.held[replica] = max(self.held[replica], step)


SHAPES = [(8, 0, 1), (8, 1, 1), (8, 1, 8), (8, 2, 1), (8, 2, 4), (8, 2, 17), (4, 3, 9), (1, 0, 1), (1, 3, 2), (16, 2, 32)]
FAULTS: list[dict[str, float]] = [
    {},
    {"dead": 0.3},
    {"fail": 0.1, "silent": 0.05, "drop": 0.05, "dead": 0.1, "die": 0.05},
]


@pytest.mark.parametrize(("P", "S", "W"), SHAPES)
@pytest.mark.parametrize("chance", FAULTS, ids=["calm", "dead groups", "everything"])
def test_bounds_hold_in_virtual_time(P: int, S: int, W: int, chance: dict[str, float]) -> None:
    """Cases 13, 14, 19, 27, 29: whatever fails, no step waits forever, no token is too old, no ordinal is lost or trained twice."""
    for seed in range(4):
        ledger = Ledger(prompts_per_step=P, max_age=S, window=W, steps=40)
        world = World(ledger, steps=40, seed=seed, chance=chance, deadline_s=60.0 if "silent" in chance else 1e9).run()
        assert max(world.ages) <= S
        assert min(world.ages) >= 0
        assert max(world.overtaken.values(), default=0) <= W - 1
        assert ledger.over
        assert set(world.fate) == set(range(ledger.started))
        assert Counter(world.fate.values())["trained"] == 40 * P
        counts = ledger.counts
        assert counts.trained == 40 * P
        assert counts.pending == counts.leased == counts.scored == counts.taken == 0
        trained = [ordinal for batch in world.batches for ordinal in batch]
        if W == 1:
            assert trained == sorted(trained)
        if not chance:
            assert counts.dropped == 0


class Changing(World):
    """`max_age` is set anew every few steps."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.bounds: dict[int, int] = {}

    def take(self) -> None:
        taken = len(self.batches)
        super().take()
        self.bounds |= {ordinal: self.ledger.age_bound(ordinal) for batch in self.batches[taken:] for ordinal in batch}

    def train(self) -> None:
        super().train()
        if self.step % 5 == 0:
            self.ledger.set_max_age((1, 4, 2)[self.step // 5 % 3])


@pytest.mark.parametrize("chance", FAULTS, ids=["calm", "dead groups", "everything"])
def test_each_prompt_keeps_the_bound_that_it_was_started_with(chance: dict[str, float]) -> None:
    """`max_age` goes up and down in mid-run: no step waits forever, and no prompt is trained above its own bound."""
    oldest: Counter[int] = Counter()
    for seed in range(6):
        ledger = Ledger(prompts_per_step=8, max_age=2, steps=60)
        world = Changing(ledger, steps=60, seed=seed, chance=chance, deadline_s=60.0 if "silent" in chance else 1e9).run()
        assert ledger.over
        assert set(world.bounds.values()) == {1, 2, 4}
        for step, batch in enumerate(world.batches):
            for ordinal in batch:
                age, bound = step - world.start_step[ordinal], world.bounds[ordinal]
                assert 0 <= age <= bound
                oldest[bound] = max(oldest[bound], age)
    assert oldest[4] > 2, "a raised bound lets more be started ahead"


def test_ages_reach_the_bound() -> None:
    """The budget is not smaller than it must be: with one slow replica, some tokens are as old as allowed."""
    worlds = [World(Ledger(prompts_per_step=8, max_age=2, steps=40), steps=40, seed=seed).run() for seed in range(4)]
    assert max(max(w.ages) for w in worlds) == 2


@pytest.mark.parametrize(("P", "S", "W"), [(8, 0, 1), (8, 1, 8), (8, 2, 1), (8, 2, 4), (8, 2, 17), (4, 3, 9)])
def test_one_more_would_break_the_bound(P: int, S: int, W: int) -> None:
    """A budget larger by 1 lets a group get too old, and the ledger sees it (case 27: the assertion fires if it is forced)."""

    def breaks(seed: int) -> bool:
        ledger = Ledger(prompts_per_step=P, max_age=S, window=W)
        ledger.budget += 1
        try:
            return max(World(ledger, steps=60, seed=seed).run().ages) > S
        except AgeError:
            return True

    assert any(breaks(seed) for seed in range(20))


def test_slow_prompt_is_trained() -> None:
    """Case 29: a prompt 40 times slower than the rest keeps its place in order, and is trained within the bound."""
    worlds = [
        World(Ledger(prompts_per_step=4, max_age=2, window=4, steps=20), steps=20, seed=seed, deadline_s=1e9, slow=frozenset({5})).run()
        for seed in range(4)
    ]
    assert {world.fate[5] for world in worlds} == {"trained"}
    assert max(world.overtaken[5] for world in worlds) == 3
    assert max(max(world.ages) for world in worlds) <= 2


def test_a_million_events_take_seconds() -> None:
    """Every event costs O(1) amortised, however many prompts have passed."""
    ledger = Ledger(prompts_per_step=32, max_age=2, window=5)
    began, events, step = time.process_time(), 0, 0
    while events < 1_000_000:
        leases = claim_all(ledger, step, now=events, deadline_s=1e4)
        for lease in leases:
            ledger.scored(lease.ordinal, lease.attempt, trainable=lease.ordinal % 10 > 0)
            ledger.next_deadline()
        events += 3 * len(leases)
        while ledger.take(step + 1) is not None:
            step += 1
            ledger.trained(step)
            events += 2
    check_account(ledger)
    assert len(ledger._live) <= ledger.budget
    assert time.process_time() - began < 30


# -- hand-made cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompts_per_step": 0, "max_age": 1}, "buffer.prompts_per_step=0 must be at least 1"),
        ({"prompts_per_step": 4, "max_age": -1}, "buffer.max_age=-1 must be at least 0"),
        ({"prompts_per_step": 4, "max_age": 1, "window": 0}, "buffer.window=0 must be at least 1"),
        ({"prompts_per_step": 4, "max_age": 1, "max_attempts": 0}, "rollout.max_attempts=0 must be at least 1"),
        ({"prompts_per_step": 4, "max_age": 0, "window": 2}, "buffer.window=2 can be at most 1 with buffer.max_age=0"),
        ({"prompts_per_step": 4, "max_age": 2, "window": 10}, "at most 9"),
    ],
)
def test_refuses_what_cannot_work(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ledger(**values)  # type: ignore[arg-type]


def test_largest_window_leaves_one_step_of_budget() -> None:
    assert Ledger(prompts_per_step=4, max_age=2, window=9).budget == 4


def test_admits_the_budget_and_one_step_more_per_step() -> None:
    ledger = Ledger(prompts_per_step=4, max_age=2)
    leases = claim_all(ledger, step=0)
    assert [lease.ordinal for lease in leases] == list(range(12))
    assert {lease.min_step for lease in leases} == {0}
    assert [(lease.ordinal, lease.min_step) for lease in claim_all(ledger, step=1)] == [(12, 1), (13, 1), (14, 1), (15, 1)]
    assert [lease.min_step for lease in claim_all(ledger, step=3)] == [2] * 4 + [3] * 4


def test_dropped_prompts_are_replaced_at_once_and_earlier() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=1)
    assert len(claim_all(ledger, step=0)) == 4
    assert ledger.scored(1, 1, trainable=False)
    assert ledger.dropped == {"dead": 1}
    assert claim_all(ledger, step=0) == [Lease(4, 1, min_step=0)]


def test_synchronous_replacements_come_as_a_second_wave() -> None:
    """`max_age=0`: what replaces dead groups starts when the first wave has ended, so that the waves do not depend on timing."""
    ledger = Ledger(prompts_per_step=4, max_age=0)
    first = claim_all(ledger, step=0)
    assert len(first) == 4
    ledger.scored(0, 1, trainable=False)
    ledger.scored(2, 1, trainable=False)
    ledger.scored(1, 1, trainable=True)
    assert claim_all(ledger, step=0) == []
    ledger.scored(3, 1, trainable=True)
    second = claim_all(ledger, step=0)
    assert [lease.ordinal for lease in second] == [4, 5]
    score_all(ledger, second)
    assert ledger.take(1) == [1, 3, 4, 5]
    assert claim_all(ledger, step=0) == []
    ledger.trained(1)
    assert [(lease.ordinal, lease.min_step) for lease in claim_all(ledger, step=1)] == [(6, 1), (7, 1), (8, 1), (9, 1)]


def test_lost_claims_in_flight_stay_within_the_budget() -> None:
    """Case 1: S=1, B=8; after 50 steps every claim is lost at once; what is leased again is not more than before."""
    ledger = Ledger(prompts_per_step=4, max_age=1)
    for step in range(50):
        score_all(ledger, claim_all(ledger, step))
        assert ledger.take(step + 1) is not None
        ledger.trained(step + 1)
    held = claim_all(ledger, step=50)
    assert len(ledger.release("w")) == len(held)
    again = claim_all(ledger, step=50)
    assert [lease.ordinal for lease in again] == [lease.ordinal for lease in held]
    assert ledger.counts.leased + ledger.counts.scored == 8
    assert all(50 - lease.min_step <= 1 for lease in again)


def test_order_and_window() -> None:
    """Window 1: nothing overtakes. Window 3: two groups may overtake the unfinished head, and no more."""
    for window, ready in ((1, None), (3, [1, 2])):
        ledger = Ledger(prompts_per_step=2, max_age=2, window=window)
        leases = claim_all(ledger, step=0)
        score_all(ledger, leases[1:])
        assert ledger.take(1) == ready
    assert ledger.take(2) is None
    score_all(ledger, leases[:1])
    assert ledger.take(2) == [0, 3]


def test_a_dropped_head_lets_the_next_pass() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=1)
    score_all(ledger, claim_all(ledger, step=0)[1:])
    assert ledger.take(1) is None
    assert ledger.drop(0, "refused")
    assert ledger.take(1) == [1, 2]
    assert not ledger.drop(1, "refused")
    assert not ledger.drop(0, "refused")


def test_a_scored_group_can_be_dropped() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=2, window=3)
    head, *others = claim_all(ledger, step=0)
    score_all(ledger, others)
    assert ledger.drop(2, "refused")
    assert ledger.take(1) is None
    score_all(ledger, [head])
    assert [ledger.take(1), ledger.take(2)] == [[0, 1], None]
    check_account(ledger)


def test_lost_answer_is_issued_again() -> None:
    """Case 14: an answer never comes; the deadline names the ordinal, and the next claim is on the same prompt."""
    ledger = Ledger(prompts_per_step=2, max_age=0)
    first, second = claim_all(ledger, step=0, owner="rollout 0", now=5.0, deadline_s=10.0)
    score_all(ledger, [second])
    assert ledger.next_deadline() == 15.0
    assert ledger.expire(14.9) == []
    assert ledger.expire(15.0) == [Lost(0, 1, "rollout 0", dropped=False)]
    assert ledger.next_deadline() is None
    again = ledger.lease("rollout 1", 16.0, 10.0, step=0)
    assert again == Lease(0, 2, first.min_step)
    assert not ledger.scored(0, 1, trainable=True)
    assert not ledger.drop(0, "refused", attempt=1)
    assert ledger.failed(0, 1, "failed") is None
    assert ledger.stale == 3
    score_all(ledger, [again])
    assert not ledger.scored(0, 2, trainable=True)
    assert ledger.take(1) == [0, 1]


def test_one_failed_claim_is_replaced_and_the_run_ends() -> None:
    """Case 13: a worker gives nothing once; its prompt is tried again and trained."""
    ledger = Ledger(prompts_per_step=2, max_age=0, steps=1)
    claim_all(ledger, step=0)
    assert ledger.failed(1, 1, "failed") == Lost(1, 1, "w", dropped=False)
    assert claim_all(ledger, step=0) == [Lease(1, 2, 0)]
    score_all(ledger, [Lease(0, 1, 0), Lease(1, 2, 0)])
    assert ledger.take(1) == [0, 1]


def test_attempts_are_bounded() -> None:
    """Case 29: what fails every time is dropped and replaced, not tried forever."""
    ledger = Ledger(prompts_per_step=1, max_age=0, max_attempts=2)
    for attempt, dropped in ((1, False), (2, True)):
        lease = ledger.lease("w", 0.0, 1.0, step=0)
        assert lease == Lease(0, attempt, 0)
        assert ledger.failed(0, attempt, "failed") == Lost(0, attempt, "w", dropped)
    assert ledger.dropped == {"failed": 1}
    assert claim_all(ledger, step=0) == [Lease(1, 1, 0)]


def test_release_returns_only_the_prompts_of_that_owner() -> None:
    """Case 19: a dead worker's places are free again, others keep theirs."""
    ledger = Ledger(prompts_per_step=4, max_age=0)
    for owner in ("a", "b", "a", "b"):
        ledger.lease(owner, 0.0, 10.0, step=0)
    ledger.scored(0, 1, trainable=True)
    assert ledger.release("a") == [Lost(2, 1, "a", dropped=False)]
    assert ledger.release("a") == []
    assert ledger.counts.leased == 2
    assert ledger.lease("b", 0.0, 10.0, step=0) == Lease(2, 2, 0)


def test_nothing_is_started_that_no_step_would_train() -> None:
    """Case 23: a run of 2 steps starts 2 steps' worth of prompts and ends, though the budget would allow more."""
    ledger = Ledger(prompts_per_step=4, max_age=2, steps=2)
    leases = claim_all(ledger, step=0)
    assert len(leases) == 8
    score_all(ledger, leases[1:])
    ledger.scored(0, 1, trainable=False)
    score_all(ledger, claim_all(ledger, step=0))
    assert ledger.take(1) == [1, 2, 3, 4]
    assert not ledger.over
    assert ledger.take(2) == [5, 6, 7, 8]
    assert ledger.over
    ledger.trained(2)
    assert claim_all(ledger, step=2) == []
    check_account(ledger)


def test_steps_are_taken_and_trained_once_in_order() -> None:
    ledger = Ledger(prompts_per_step=1, max_age=2)
    score_all(ledger, claim_all(ledger, step=0))
    with pytest.raises(ValueError, match="step 2 cannot be taken: the next one is 1"):
        ledger.take(2)
    assert ledger.take(1) == [0]
    with pytest.raises(ValueError, match="step 1 cannot be taken"):
        ledger.take(1)
    with pytest.raises(ValueError, match="step 2 cannot be trained"):
        ledger.trained(2)
    assert ledger.take(2) == [1]
    ledger.trained(2)
    ledger.trained(1)
    assert ledger.counts.trained == 2
    assert ledger.trained_steps == 2


def test_queued_groups_that_got_too_old_are_refused() -> None:
    """Case 27: forced past the rule (a claim admitted by a wrong budget), the ledger names the prompt instead of training it."""
    ledger = Ledger(prompts_per_step=1, max_age=1)
    ledger.budget = 6
    score_all(ledger, claim_all(ledger, step=0))
    for step in (1, 2):
        ledger.take(step)
        ledger.trained(step)
    with pytest.raises(AgeError, match="prompt 2 may be 2 steps old at step 3"):
        ledger.take(3)


def test_fill_counts_waiting_groups_in_steps() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=1)
    score_all(ledger, claim_all(ledger, step=0)[:3])
    assert ledger.fill == 1.5
