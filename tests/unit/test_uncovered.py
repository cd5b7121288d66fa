"""What trainers go back to: the groups that they trained since the last checkpoint, as long as there is room for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config, ConfigError, can_restart, validate
from monarch_rl.ledger import Ledger
from monarch_rl.observe.ledger_file import LedgerFile, changes, lives
from monarch_rl.types import Lease, Version
from monarch_rl.uncovered import Again, Uncovered
from tests.virtual_time import GROUP_BYTES, check_account, group


class Run:
    """A ledger whose prompts are scored as soon as they may be started, and what is uncovered of it."""

    def __init__(self, max_age: int = 1, most_groups: float = 99, **ledger: Any) -> None:
        self.ledger = Ledger(prompts_per_step=2, max_age=max_age, steps=9, clock=lambda: 100.0, **ledger)
        self.uncovered = Uncovered(most_groups * GROUP_BYTES)

    def leases(self, step: int) -> Iterator[Lease]:
        return iter(partial(self.ledger.lease, "w", 0.0, 9.0, step), None)

    def score(self, step: int, lineage: int = 0) -> None:
        for lease in self.leases(step):
            self.ledger.scored(lease.ordinal, lease.attempt, True, *[Version(lineage, step).pack()] * 2)

    def train(self, step: int, lineage: int = 0) -> list[int]:
        self.score(step - 1, lineage)
        batch = self.ledger.take(step)
        assert batch is not None
        self.uncovered.add(step, map(group, batch), map(self.ledger.age_bound, batch))
        self.ledger.trained(step)
        return batch

    def go_back(self, step: int, waiting: tuple[int, ...] = ()) -> Again:
        keep_groups = self.ledger.max_age > 0
        again = self.uncovered.go_back(self.ledger.state_dict(), step, map(group, waiting), keep_groups)
        self.ledger.load_state_dict(again.ledger, keep_groups)
        check_account(self.ledger)
        return again


def test_the_same_batches_are_trained_again() -> None:
    """Those after the checkpoint and no others; what waited still waits, what was in flight is claimed again as the same attempt."""
    run = Run()
    batches = {step: run.train(step) for step in (1, 2, 3)}
    run.uncovered.covered(1)
    flown = next(run.leases(3))
    before = run.ledger.life(flown.ordinal)
    again = run.go_back(1, waiting=(6, 7))
    assert set(again.groups) == {*batches[2], *batches[3], 6, 7}
    assert not again.prompts
    assert (run.ledger.trained_steps, run.ledger.counts.trained) == (1, 2)
    assert run.ledger.life(0) is not None
    assert [life.state for o in batches[2] if (life := run.ledger.life(o)) is not None] == ["scored", "scored"]
    assert [run.train(step, lineage=1) for step in (2, 3)] == [batches[2], batches[3]]
    (claimed,) = [lease for lease in run.leases(3) if lease.ordinal == flown.ordinal] or [flown]
    assert before is not None
    assert claimed.attempt == before.attempt == 1


def test_groups_without_room_are_sampled_again_when_the_trainer_is_there() -> None:
    run = Run(most_groups=2)
    batches = [run.train(step) for step in (1, 2, 3)]
    assert run.uncovered.figures() == {"buffer/uncovered_mb": 2 * GROUP_BYTES / 2**20, "buffer/uncovered_left_out": 4}
    again = run.go_back(0)
    assert sorted(again.groups) == batches[0]
    assert sorted(again.prompts) == batches[1] + batches[2]
    first = {life.min_step: ordinal for ordinal in batches[2] if (life := run.ledger.life(ordinal)) is not None}
    assert all(lease.attempt == 1 for lease in run.leases(0))
    assert set(first) <= {0, 1}, "they may be started no earlier than the rule allows, and no later than their step needs"


def test_synchronous_batches_are_sampled_again() -> None:
    """The weights of the checkpoint are those that sampled them: nothing older than the trainer may be trained."""
    run = Run(max_age=0)
    batches = {step: run.train(step) for step in (1, 2, 3)}
    again = run.go_back(1)
    assert not again.groups
    assert set(again.prompts) == {*batches[2], *batches[3]}
    assert [lease.ordinal for lease in run.leases(0)] == []
    assert [(lease.ordinal, lease.attempt, lease.min_step) for lease in run.leases(1)] == [(o, 1, 1) for o in batches[2]]


def test_what_a_checkpoint_covers_is_let_go() -> None:
    run = Run()
    for step in (1, 2, 3):
        run.train(step)
    run.uncovered.covered(2)
    assert run.uncovered.nbytes == 2 * GROUP_BYTES
    run.uncovered.covered(3)
    assert run.uncovered.nbytes == 0
    assert not run.go_back(3).groups


def test_what_was_dropped_stays_dropped() -> None:
    run = Run()
    run.train(1)
    lease = next(run.leases(1))
    run.ledger.scored(lease.ordinal, lease.attempt, trainable=False)
    run.go_back(0)
    assert run.ledger.counts.dropped == 1
    assert run.ledger.life(lease.ordinal) == run.ledger.ended.get(lease.ordinal)
    assert [run.train(1, 1), run.train(2, 1)][0] == [0, 1]


def test_the_ledger_file_tells_of_it_and_a_resume_finds_its_place(tmp_path: Path) -> None:
    """A checkpoint of step 2 that was not completed before the trainers went back to step 1 is not the one that was completed after."""
    file = LedgerFile(tmp_path / "ledger.jsonl")
    run = Run(on_change=file.write)
    for step in (1, 2):
        run.train(step)
        file.mark(step)
    file.back(1)
    run.go_back(1)
    run.train(2, lineage=1)
    file.mark(2)
    run.train(3, lineage=1)
    file.flush()
    assert [life.state for life in changes(tmp_path / "ledger.jsonl") if life.ordinal == 2] == [
        *("leased", "scored", "taken", "trained"),
        *("scored", "taken", "trained"),
    ]
    assert lives(tmp_path / "ledger.jsonl") == {o: run.ledger.life(o) for o in range(run.ledger.started)}
    LedgerFile(tmp_path / "ledger.jsonl", after=2)
    kept = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kept[-1] == {"checkpoint": 2}
    assert {"back": 1} in kept
    assert max(row.get("step", 0) for row in kept) == 2


def test_who_can_restart() -> None:
    config = Config()
    assert not can_restart(config), "nothing to start from"
    config.checkpoint.every = 2
    assert can_restart(config)
    config.trainer.max_restarts = 0
    validate(config)
    assert not can_restart(config)
    config.checkpoint.uncovered_mb = -1.0
    with pytest.raises(ConfigError, match=r"checkpoint\.uncovered_mb: must be a finite number of at least 0"):
        validate(config)
