"""The admission rule and the bookkeeping of prompts, by hand-made cases."""

from __future__ import annotations

import pytest

from monarch_rl.ledger import AgeError, Ledger
from monarch_rl.lives import Lost
from monarch_rl.types import Lease
from tests.virtual_time import check_account


def claim_all(ledger: Ledger, step: int, owner: str = "w", now: float = 0.0, deadline_s: float = 10.0) -> list[Lease]:
    leases = []
    while (lease := ledger.lease(owner, now, deadline_s, step)) is not None:
        leases.append(lease)
    return leases


def score_all(ledger: Ledger, leases: list[Lease]) -> None:
    for lease in leases:
        assert ledger.scored(lease.ordinal, lease.attempt, trainable=True)


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


def test_a_prompt_that_is_left_out_is_replaced_within_the_same_synchronous_wave() -> None:
    """It is the task's choice and nobody's timing; those that turn out to be dead have to wait for the wave's end."""
    ledger = Ledger(prompts_per_step=3, max_age=0)
    first = claim_all(ledger, step=0)
    score_all(ledger, first)
    assert ledger.take(1) == [0, 1, 2]
    ledger.trained(1)
    assert ledger.lease("w", 0.0, 10.0, step=1) == Lease(3, 1, 1)
    with pytest.raises(ValueError, match="prompt 5 cannot be skipped: the next one is 4"):
        ledger.skip(5)
    ledger.skip(4)
    ledger.skip(5)
    assert [(lease.ordinal, lease.min_step) for lease in claim_all(ledger, step=1)] == [(6, 1), (7, 1)]
    score_all(ledger, [Lease(ordinal, 1, 1) for ordinal in (3, 6, 7)])
    assert ledger.take(2) == [3, 6, 7]
    assert ledger.dropped == {"skipped": 2}
    life = ledger.life(4)
    assert life is not None
    assert (life.state, life.reason, life.attempt, life.owner) == ("dropped", "skipped", 0, "")
    check_account(ledger)


def test_data_whose_last_prompts_are_left_out_end() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=1, ordinals=3)
    lease = ledger.lease("w", 0.0, 10.0, step=0)
    assert lease == Lease(0, 1, 0)
    score_all(ledger, [lease])
    assert ledger.take(1) is None
    ledger.skip(1)
    ledger.skip(2)
    assert ledger.take(1) == [0]
    assert ledger.over
    assert claim_all(ledger, step=1) == []


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


def test_a_resumed_run_has_no_more_in_flight_than_before() -> None:
    """Case 1: S=1, P=4; killed after 50 steps with eight in flight: eight are leased again, and no more."""
    first = Ledger(prompts_per_step=4, max_age=1)
    for step in range(50):
        score_all(first, claim_all(first, step))
        assert first.take(step + 1) is not None
        first.trained(step + 1)
    held = claim_all(first, step=50)
    second = Ledger(prompts_per_step=4, max_age=1)
    second.load_state_dict(first.state_dict())
    again = claim_all(second, step=50)
    assert [(lease.ordinal, lease.min_step) for lease in again] == [(lease.ordinal, lease.min_step) for lease in held]
    assert second.counts.leased + second.counts.scored == 8
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
