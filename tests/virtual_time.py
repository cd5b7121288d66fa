"""Rollouts, generators and a trainer around a real ledger, in virtual time."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from monarch_rl.ledger import Ledger
from monarch_rl.lives import Lost
from monarch_rl.types import Episode, Group, Lease, Prompt, Version
from monarch_rl.uncovered import Uncovered, nbytes

FAULTS: list[dict[str, float]] = [
    {},
    {"dead": 0.3},
    {"fail": 0.1, "silent": 0.05, "drop": 0.05, "dead": 0.1, "die": 0.05},
]


ONE = np.zeros(1, np.int32)
EPISODE = Episode(ONE, ONE > 0, ONE.astype(np.float32), ONE.astype(np.int64))


def group(ordinal: int) -> Group:
    return Group(Prompt(ordinal, ""), [EPISODE])


GROUP_BYTES = nbytes(group(0))


def check_account(ledger: Ledger) -> None:
    """Every started ordinal is in exactly one place."""
    c = ledger.counts
    assert min(c) >= 0
    assert c.started == c.pending + c.leased + c.scored + c.taken + c.trained + c.dropped


@dataclass
class Saved:
    """What a checkpoint holds of a world."""

    state: dict[str, Any]
    step: int
    fate: dict[int, str]
    start_step: dict[int, int]
    overtaken: Counter[int]
    groups: dict[int, Group]
    lineage: int


@dataclass
class World:
    """`make` makes its ledgers: one, and one more for each restart. `chance` of what can go wrong with an attempt."""

    make: Callable[[], Ledger]
    steps: int
    seed: int
    replicas: int = 3
    deadline_s: float = 60.0
    """Of a claim; looked at where `chance` has attempts that end in silence."""
    chance: dict[str, float] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()
    """Ordinals that take 40 times as long."""
    skipped: float = 0.0
    """Share of the prompts that a curriculum leaves out when it is their turn."""
    restarts: int = 0
    """Times that everything is killed, to go on from the last checkpoint."""
    save_every: int = 1
    """Steps between checkpoints."""
    trainer_restarts: int = 0
    """Times that the trainer alone is killed, to go on from the last checkpoint."""
    most_kept: float = float("inf")
    """Groups that are kept for it."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ledger = self.make()
        self.now = 0.0
        self.step = 0
        self.training = self.over = False
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.held = [0] * self.replicas
        self.gate: list[Lease] = []  # leases that no replica may start yet
        self.start_step: dict[int, int] = {}  # ordinal → step (packed version) of the weights of the attempt that scored
        self.durations: dict[int, float] = {}  # of that attempt
        self.fate: dict[int, str] = {}
        self.ages: list[int] = []
        self.overtaken: Counter[int] = Counter()
        self.batches: list[list[int]] = []
        self.armed = -1.0  # the deadline that `expire` waits for
        self.saving = self.restarts > 0 or self.trainer_restarts > 0
        self.lineage = 0
        self.groups: dict[int, Group] = {}  # scored or taken
        self.uncovered = Uncovered(self.most_kept * GROUP_BYTES)
        self.save()

    def after(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, what, args))

    def run(self) -> World:
        self.settle()
        while self.step < self.steps and not self.over:
            assert self.events, f"deadlock at step {self.step}: {self.ledger.counts}"
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
            if self.restarts and self.random.random() < 0.02:
                self.restart()
            if self.trainer_restarts and self.random.random() < 0.02:
                self.lose_trainer()
            self.settle()
        return self

    def settle(self) -> None:
        self.take()
        while (lease := self.lease()) is not None:
            self.gate.append(replace(lease, lineage=self.lineage))
        self.take()  # the last prompts of the data may have been left out
        self.start()
        deadline = self.ledger.next_deadline()
        if deadline is not None and deadline != self.armed and "silent" in self.chance:
            self.armed = deadline
            self.after(max(0.0, deadline - self.now), self.expire)

    def lease(self) -> Lease | None:
        while self.ledger.next_ordinal(self.step) == self.ledger.started and self.skips(self.ledger.started):
            self.finish(self.ledger.started, "skipped")
            self.ledger.skip(self.ledger.started)
        return self.ledger.lease(f"worker {self.random.randrange(4)}", self.now, self.deadline_s, self.step)

    def skips(self, ordinal: int) -> bool:
        """The same after a restart."""
        return self.skipped > 0 and random.Random(f"{self.seed}/{ordinal}").random() < self.skipped

    def start(self) -> None:
        """Each replica starts only what its weights allow."""
        waiting = []
        for lease in self.gate:
            able = [held for held in self.held if held >= lease.min_version]
            if able:
                self.attempt(lease, self.random.choice(able))
            else:
                waiting.append(lease)
        self.gate = waiting

    def attempt(self, lease: Lease, held: int) -> None:
        duration = self.random.lognormvariate(0, 1) * (20 if self.random.random() < 0.05 else 1)
        duration *= 40 if lease.ordinal in self.slow else 1
        self.durations[lease.ordinal] = duration
        fault = self.random.random()
        for kind, share in self.chance.items():
            fault -= share
            if fault < 0:
                return self.after(duration, self.end, kind, lease, held)
        self.after(duration, self.end, "scored", lease, held)

    def end(self, kind: str, lease: Lease, held: int) -> None:
        o, attempt = lease.ordinal, lease.attempt
        if lease.lineage < self.lineage and kind != "die":
            return
        if kind == "scored":
            if self.ledger.scored(o, attempt, True, Version(0, held).pack(), Version(0, held).pack()):
                self.start_step[o], self.groups[o] = held, group(o)
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
        self.armed = -1.0
        self.lose(self.ledger.expire(self.now))

    def lose(self, losses: list[Lost]) -> None:
        for lost in losses:
            if lost.dropped:
                self.finish(lost.ordinal, "attempts")

    def finish(self, ordinal: int, how: str) -> None:
        assert ordinal not in self.fate, f"{ordinal} was {self.fate[ordinal]} and is now {how}"
        self.fate[ordinal] = how

    def take(self) -> None:
        if self.training or self.over or self.step == self.steps:
            return
        batch = self.ledger.take(self.step + 1)
        if batch is None:
            return
        if not batch:
            self.over = True
            return
        assert len(batch) == self.ledger.prompts_per_step or self.ledger.over
        assert batch == sorted(batch)
        for ordinal in batch:
            self.finish(ordinal, "trained")
            start = Version.unpack(self.start_step[ordinal])
            self.ages.append(max(self.step - start.step, int(start.lineage < self.lineage)))
        for ordinal in set(range(max(batch))) - self.fate.keys():  # older and still here
            self.overtaken[ordinal] += sum(o > ordinal for o in batch)
        self.batches.append(batch)
        self.training = True
        self.after(self.random.uniform(0.2, 2), self.train, self.lineage)

    def train(self, lineage: int) -> None:
        if lineage < self.lineage:
            return
        self.step += 1
        self.training = False
        batch = self.batches[-1]
        self.uncovered.add(self.step, [self.groups.pop(o) for o in batch], map(self.ledger.age_bound, batch))
        self.ledger.trained(self.step)
        check_account(self.ledger)
        if self.saving and self.step % self.save_every == 0:
            self.save()
        for replica in range(self.replicas):  # one of them is slow to pull
            self.after(self.random.expovariate(0.05 if replica == 0 else 1.0), self.pull, replica, self.version())

    def version(self) -> int:
        return Version(self.lineage, self.step).pack()

    def pull(self, replica: int, version: int) -> None:
        self.held[replica] = max(self.held[replica], version)

    def save(self) -> None:
        state = self.ledger.state_dict()
        columns = state.pop("columns")
        copies = dict(self.fate), dict(self.start_step), Counter(self.overtaken), dict(self.groups), self.lineage
        self.uncovered.covered(self.step)
        self.saved = Saved(json.loads(json.dumps(state)) | {"columns": columns}, self.step, *copies)

    def restart(self) -> None:
        """Everything is killed, in the middle of whatever it does; new processes go on from the last checkpoint."""
        self.restarts -= 1
        self.ledger = self.make()
        self.ledger.load_state_dict(self.saved.state)
        check_account(self.ledger)
        self.step, self.training = self.saved.step, False
        self.fate, self.start_step = dict(self.saved.fate), dict(self.saved.start_step)
        self.overtaken = Counter(self.saved.overtaken)
        self.groups, self.lineage = dict(self.saved.groups), self.saved.lineage
        self.uncovered = Uncovered(self.most_kept * GROUP_BYTES)
        del self.batches[self.step :]
        self.events, self.gate, self.armed = [], [], -1.0
        self.held = [-1] * self.replicas
        for replica in range(self.replicas):
            self.after(self.random.expovariate(1.0), self.pull, replica, self.version())

    def lose_trainer(self) -> None:
        """It goes on from the last checkpoint; generators, and the claims that they work on, know nothing of it."""
        self.trainer_restarts -= 1
        self.lineage += 1
        keep_groups = self.ledger.max_age > 0
        again = self.uncovered.go_back(self.ledger.state_dict(), self.saved.step, self.groups.values(), keep_groups)
        self.ledger.load_state_dict(again.ledger, keep_groups)
        check_account(self.ledger)
        self.groups = again.groups
        self.step, self.training, self.over = self.saved.step, False, False
        for ordinal in (ordinal for batch in self.batches[self.step :] for ordinal in batch):
            del self.fate[ordinal]
        del self.batches[self.step :]
        self.overtaken = Counter(self.saved.overtaken)
        self.gate = []
        for replica in range(self.replicas):
            self.after(self.random.expovariate(1.0), self.pull, replica, self.version())
