"""The virtual-time schedule against runs that can be worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.schedules import Costs, Episode, Schedule, heavy_tailed, total_s
from monarch_rl.ledger import Ledger

COSTS = Costs(decode_s=1.0, decode_per_request_s=0.0, train_s=3.0)


def ends(groups: list[list[Episode]], max_age: int, costs: Costs = COSTS, prompts_per_step: int = 1, window: int = 1) -> list[float]:
    steps = len(groups) // prompts_per_step
    return Schedule(groups, Ledger(prompts_per_step=prompts_per_step, max_age=max_age, window=window, steps=steps), costs).run()


def test_synchronous_steps_add_up() -> None:
    """Two tokens, a tool of four seconds, three seconds of training, one after the other."""
    assert ends([[Episode(2, 4.0)]] * 3, max_age=0) == [9, 18, 27]


def test_the_double_buffer_is_bound_by_the_slower_side() -> None:
    """Generation takes 2 s and hides behind 3 s of training, all but the first."""
    assert ends([[Episode(2)]] * 4, max_age=1) == [5, 8, 11, 14]
    assert ends([[Episode(5)]] * 3, max_age=1, costs=Costs(1.0, 0.0, 3.0, requests=1)) == [8, 13, 18]


def test_a_slow_tool_is_waited_for_once() -> None:
    """max_age=2 has three groups in flight: the tools of the second and third run beside the first one's twenty seconds.

    All decode their one token in the first second; steps end at 21+3 and, their groups being ready, 3 s later each.
    Group 3 is admitted with the weights of step 1, at 24, is decoded at 25, and its tool ends at 27, when step 3 needs it at 30.
    """
    slow, fast = [Episode(1, 20.0)], [Episode(1, 2.0)]
    assert ends([slow, fast, fast, fast], max_age=2) == [24, 27, 30, 33]
    assert ends([slow, fast, fast, fast], max_age=0) == [24, 30, 36, 42]


def test_a_window_lets_finished_groups_pass_a_slow_one() -> None:
    """Two groups are in flight either way. With window 2 the second is trained from 3 to 6, while the first sleeps until 21."""
    slow, fast = [Episode(1, 20.0)], [Episode(1, 2.0)]
    assert ends([slow, fast], max_age=2, window=2) == [6, 24]
    assert ends([slow, fast], max_age=1, window=1) == [24, 27]


def test_decoding_slows_with_the_requests_in_it() -> None:
    """Two requests at 1 + 2·0.5 s, one at 1.5 s: a token of both, then the rest of the longer one."""
    costs = Costs(decode_s=1.0, decode_per_request_s=0.5, train_s=3.0)
    assert ends([[Episode(1), Episode(3)]], 0, costs) == [2 + 1.5 + 1.5 + 3]


def test_few_tools_are_waited_for_in_turn() -> None:
    costs = Costs(decode_s=1.0, decode_per_request_s=0.0, train_s=3.0, tools=2)
    assert ends([[Episode(1, 4.0)] * 5], 0, costs) == [1 + 3 * 4 + 3]


def test_total_counts_whole_steps() -> None:
    groups = [[Episode(2)]] * 6
    assert total_s(groups, prompts_per_step=3, max_age=0, costs=COSTS) == 2 * (2 + 3)


def test_latencies_are_a_function_of_the_place_with_the_share_of_stragglers_asked_for() -> None:
    drawn = [heavy_tailed(f"{i}/0", median_s=0.1) for i in range(4000)]
    assert drawn == [heavy_tailed(f"{i}/0", median_s=0.1) for i in range(4000)]
    assert sum(latency > 0.6 for latency in drawn) / len(drawn) == pytest.approx(0.05, abs=0.01)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(0.105, abs=0.01)
