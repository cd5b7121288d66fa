from __future__ import annotations

from monarch_rl.observe.seldom import Seldom


def test_a_thousand_events_are_told_of_nine_times() -> None:
    seldom = Seldom()
    assert [n for n in range(1, 1001) if seldom.due()] == [1, 10, 20, 40, 80, 160, 320, 640]


def test_many_at_once_are_told_of_once() -> None:
    seldom = Seldom()
    assert [seldom.due(25), seldom.due(14), seldom.due(), seldom.count] == [True, False, True, 40]
