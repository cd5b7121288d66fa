"""The ledger in virtual time: what must hold whatever fails, whoever is slow, and wherever a run is killed."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from functools import partial
from statistics import fmean, stdev
from typing import Any

import pytest

from monarch_rl.ledger import AgeError, Ledger, Tail
from monarch_rl.types import Version
from tests.virtual_time import FAULTS, World, check_account

SCHEDULES = 2_000
PROMPTS = 30_000

SHAPES = [(8, 0, 1), (8, 1, 1), (8, 1, 8), (8, 2, 1), (8, 2, 4), (8, 2, 17), (4, 3, 9), (1, 0, 1), (1, 3, 2), (16, 2, 32)]


@pytest.mark.parametrize(("P", "S", "W"), SHAPES)
@pytest.mark.parametrize("chance", FAULTS, ids=["calm", "dead groups", "everything"])
def test_bounds_hold_in_virtual_time(P: int, S: int, W: int, chance: dict[str, float]) -> None:
    """Cases 13, 14, 19, 27, 29: whatever fails, no step waits forever, no token is too old, no ordinal is lost or trained twice."""
    for seed in range(4):
        world = World(lambda: Ledger(prompts_per_step=P, max_age=S, window=W, steps=40), steps=40, seed=seed, chance=chance).run()
        ledger = world.ledger
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

    def train(self, lineage: int) -> None:
        super().train(lineage)
        if self.step % 5 == 0:
            self.ledger.set_max_age((1, 4, 2)[self.step // 5 % 3])


@pytest.mark.parametrize("chance", FAULTS, ids=["calm", "dead groups", "everything"])
def test_each_prompt_keeps_the_bound_that_it_was_started_with(chance: dict[str, float]) -> None:
    """`max_age` goes up and down in mid-run: no step waits forever, and no prompt is trained above its own bound."""
    oldest: Counter[int] = Counter()
    for seed in range(6):
        world = Changing(lambda: Ledger(prompts_per_step=8, max_age=2, steps=60), steps=60, seed=seed, chance=chance).run()
        assert world.ledger.over
        assert set(world.bounds.values()) == {1, 2, 4}
        for step, batch in enumerate(world.batches):
            for ordinal in batch:
                age, bound = step - world.start_step[ordinal], world.bounds[ordinal]
                assert 0 <= age <= bound
                oldest[bound] = max(oldest[bound], age)
    assert oldest[4] > 2, "a raised bound lets more be started ahead"


def test_ages_reach_the_bound() -> None:
    """The budget is not smaller than it must be: with one slow replica, some tokens are as old as allowed."""
    worlds = [World(lambda: Ledger(prompts_per_step=8, max_age=2, steps=40), steps=40, seed=seed).run() for seed in range(4)]
    assert max(max(w.ages) for w in worlds) == 2


def test_slow_prompt_is_trained() -> None:
    """Case 29: a prompt 40 times slower than the rest keeps its place in order, and is trained within the bound."""

    def make() -> Ledger:
        return Ledger(prompts_per_step=4, max_age=2, window=4, steps=20)

    worlds = [World(make, steps=20, seed=seed, slow=frozenset({5})).run() for seed in range(4)]
    assert {world.fate[5] for world in worlds} == {"trained"}
    assert max(world.overtaken[5] for world in worlds) == 3
    assert max(max(world.ages) for world in worlds) <= 2


def schedule(seed: int) -> None:
    """One random run: its shape, its faults, its data, its restarts; and what must hold whatever they are."""
    draw = random.Random(seed)
    P, S = draw.randint(1, 4), draw.randint(0, 3)
    W, steps = draw.randint(1, S * P + 1), draw.randint(3, 10)
    ordinals = draw.choice([None, draw.randint(1, steps * P + 3)])
    tail: Tail = draw.choice(["train", "drop"])

    def make() -> Ledger:
        return Ledger(prompts_per_step=P, max_age=S, window=W, steps=steps, ordinals=ordinals, tail=tail)

    restarts, save_every = draw.choice([0, 0, 1, 3]), draw.randint(1, 3)
    shape = {"replicas": draw.randint(1, 3), "restarts": restarts, "save_every": save_every, "chance": draw.choice(FAULTS)}
    shape |= {"trainer_restarts": draw.choice([0, 0, 1, 3]), "most_kept": draw.choice([math.inf, math.inf, 2 * P, 0])}
    world = World(make, steps, seed, skipped=draw.choice([0.0, 0.2, 0.7]), **shape).run()
    ledger = world.ledger
    assert all(0 <= age <= S for age in world.ages)
    assert max(world.overtaken.values(), default=0) <= W - 1
    trained = [ordinal for batch in world.batches for ordinal in batch]
    assert len(set(trained)) == len(trained) == ledger.counts.trained
    ended = {ordinal: life for ordinal in range(ledger.started) if (life := ledger.life(ordinal)) is not None}
    assert set(ended) == set(range(ledger.started)) == set(world.fate) | {o for o, life in ended.items() if life.reason == "tail"}
    assert {life.state for life in ended.values()} <= {"trained", "dropped"}
    for ordinal in trained:
        assert (ended[ordinal].state, ended[ordinal].step) == ("trained", 1 + next(s for s, b in enumerate(world.batches) if ordinal in b))
        assert ended[ordinal].oldest == Version(0, world.start_step[ordinal]).pack()
    left_out = {ordinal for ordinal, life in ended.items() if life.reason == "skipped"}
    assert left_out == {ordinal for ordinal in ended if world.skips(ordinal)} == {o for o, how in world.fate.items() if how == "skipped"}
    assert {ended[ordinal].attempt for ordinal in left_out} <= {0}
    if world.step < steps:
        assert ledger.started == ordinals, "a run ends early only with its data"
        assert ledger.dropped["tail"] < P
    assert len(world.batches) == ledger.trained_steps == world.step
    assert all(len(batch) == P for batch in world.batches[:-1])
    assert not world.batches or len(world.batches[-1]) == P or (tail == "train" and ledger.started == ordinals)


def test_random_schedules() -> None:
    """Cases 1, 2, 4, 13, 14, 19, 23, 27, 29 on virtual time."""
    for seed in range(SCHEDULES):
        schedule(seed)


@pytest.mark.slow
def test_many_more_random_schedules() -> None:
    for seed in range(SCHEDULES, 10_000):
        schedule(seed)


SMALL = [(P, S, W) for P in (1, 2, 3, 4) for S in (0, 1, 2, 3) for W in range(1, S * P + 1)]
"""Shapes whose budget is above P: beyond, nothing can be started early enough to get old."""


def worst_age(P: int, S: int, W: int, loosened: int = 0) -> int:
    """Of the prompt that an adversary chose to hold up: everything else is done at once, and it only when all else waits for it."""
    worst = 0
    for victim in range((S + 2) * P):
        ledger = Ledger(prompts_per_step=P, max_age=S, window=W)
        ledger.budget += loosened
        claim, done = None, False
        while not done:
            step = ledger.trained_steps
            for lease in iter(partial(ledger.lease, "w", 0.0, 1.0, step), None):
                if lease.ordinal == victim:
                    claim = lease
                else:
                    ledger.scored(lease.ordinal, lease.attempt, trainable=True)
            try:
                batch = ledger.take(step + 1)
            except AgeError:
                return S + 1
            if batch is None:
                assert claim is not None, "a deadlock"
                ledger.scored(victim, claim.attempt, trainable=True)
                continue
            if victim in batch:
                assert claim is not None
                worst, done = max(worst, step - claim.min_step), True
            ledger.trained(step + 1)
    return worst


@pytest.mark.parametrize(("P", "S", "W"), SMALL)
def test_the_bound_is_met_by_an_adversary_and_broken_by_a_budget_of_one_more(P: int, S: int, W: int) -> None:
    """Case 27: no smaller promise would be true, no larger budget would keep it, and the ledger sees it."""
    assert worst_age(P, S, W) == S
    assert worst_age(P, S, W, loosened=1) == S + 1


def test_trained_lengths_are_those_that_were_generated() -> None:
    """A group takes as long as it is long. What is trained is as long as what was finished, but for dead groups, which are so by chance."""
    gaps = []
    for seed in range(40):
        world = World(lambda: Ledger(prompts_per_step=8, max_age=2, steps=25), steps=25, seed=seed, chance={"dead": 0.2}).run()
        made = [math.log(duration) for duration in world.durations.values()]
        trained = [math.log(world.durations[ordinal]) for batch in world.batches for ordinal in batch]
        gaps.append(fmean(trained) - fmean(made))
    assert abs(fmean(gaps)) < 3 * stdev(gaps) / math.sqrt(len(gaps))
    assert stdev(gaps) < 0.1


def test_a_million_prompts_are_remembered_in_little_memory() -> None:
    """Every event costs O(1) amortised, however many prompts have passed, and a prompt that has ended some 41 bytes."""
    ledger = Ledger(prompts_per_step=256, max_age=2, window=5)
    tracemalloc.start()
    step = 0
    while ledger.started < PROMPTS:
        for lease in iter(partial(ledger.lease, "w", 0.0, 1e9, step), None):
            ledger.scored(lease.ordinal, lease.attempt, trainable=lease.ordinal % 10 > 0)
        while ledger.take(step + 1) is not None:
            step += 1
            ledger.trained(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check_account(ledger)
    assert max(map(len, (ledger._live, ledger._returned, ledger._batches))) <= ledger.budget
    assert len(ledger._claims) <= 4 * ledger.budget
    lost, kept = ledger.life(70), ledger.life(71)
    assert lost is not None
    assert (lost.state, lost.reason, lost.owner, lost.attempt) == ("dropped", "dead", "w", 1)
    assert kept is not None
    assert (kept.state, kept.step) == ("trained", 1)
    assert peak < PROMPTS * 120, f"{peak / PROMPTS:.0f} bytes for each prompt"
