"""The policies that the ledger is compared with, on schedules that can be worked out by hand and on made-up ones."""

from __future__ import annotations

import pytest

from benchmarks.policies import Arrival, Ordered, Ours, Policy, Prioritized, Reused, UniformResampling, WindowedFifo, made_up, simulate
from monarch_rl.ledger import Ledger


def one_slow(ordinal: int) -> float:
    return 10.0 if ordinal == 1 else 1.0


def test_in_order_waits_for_a_slow_group_and_arrival_does_not() -> None:
    """P=1, S=1, two slots, a step takes 1 s: 0 is trained from 1 to 2, 1 from 10 to 11; 2, sampled from 2 to 3 with it, from 11 to 12."""
    in_order = simulate(Ours(1, 1), one_slow, steps=3, slots=2, train_s=1.0)
    assert in_order.utilisation == 3 / 12
    assert (in_order.age_max, in_order.discarded) == (1, 0)
    # 2 starts at 2 and 3 at 4, for each trained group one; they pass the slow one, which is still in flight at the end.
    by_arrival = simulate(Arrival(1, 1, drop=False), one_slow, steps=3, slots=2, train_s=1.0)
    assert by_arrival.utilisation == 3 / 6
    assert by_arrival.length_bias == pytest.approx(1.0 / (13 / 4))


@pytest.mark.parametrize("S", [1, 2, 4])
def test_the_ledger_is_as_fast_as_what_discards_nothing_at_equal_age(S: int) -> None:
    """It discards nothing and prefers no length. Whoever is faster at the same bound throws work away, or breaks the bound."""
    durations = made_up(0.05, 20.0, median_s=0.1)

    def outcome(policy: Policy) -> tuple[float, int, float, float]:
        made = simulate(policy, durations, steps=60, slots=64, train_s=1.0)
        return made.utilisation, made.age_max, made.discarded, made.length_bias

    utilisation, age_max, discarded, length_bias = outcome(Ours(8, S))
    assert (age_max, discarded, length_bias) == (S, 0, 1)
    for policy in (WindowedFifo(8, S), WindowedFifo(8, S, 0.3)):
        other = outcome(policy)
        assert other[1:3] == (S, 0)
        assert utilisation >= other[0] - 0.02
    for drops in (Arrival(8, S, drop=True), UniformResampling(8, S)):
        other = outcome(drops)
        assert other[1] <= S
        assert other[2] > 0 or other[3] < 0.9
    assert outcome(Arrival(8, S, drop=False))[1] > S


@pytest.mark.parametrize("kind", [Ordered, Prioritized])
def test_another_order_inside_the_window_gains_nothing(kind: type[Ordered]) -> None:
    """Each group is trained once, so their mean age is the same whatever the order, and so is what they are worth."""
    durations = made_up(0.05, 20.0, median_s=0.1)
    fifo, other = [simulate(Ours(8, 2, 8, each), durations, steps=200, slots=64, train_s=1.0) for each in (Ledger, kind)]
    assert (other.age_max, other.discarded, other.repeated) == (2, 0, 0)
    assert abs(other.utilisation - fifo.utilisation) <= 0.02
    assert abs(other.age_mean - fifo.age_mean) <= 0.05
    assert abs(other.worth - 1) <= 0.02


def test_groups_that_are_trained_again_make_those_in_flight_too_old() -> None:
    made = simulate(Ours(8, 2, 1, Reused), made_up(0.05, 20.0, median_s=0.1), steps=60, slots=64, train_s=1.0)
    assert made.repeated > 0
    assert made.age_max > 2
