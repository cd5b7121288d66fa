"""Which publish keeps its slot, for whom, and for how long."""

from __future__ import annotations

import pytest

from monarch_rl.types import Version
from monarch_rl.weights import board as board_module
from monarch_rl.weights.board import Board, Offer, Sealed
from monarch_rl.weights.pull import Target, common


def offer(numbers: dict[int, int]) -> Offer:
    """From numbers of publishes to their slots."""
    return Offer({number: sealed(number, slot) for number, slot in numbers.items()})


def sealed(number: int, slot: int) -> Sealed:
    return Sealed(Version(0, 10 * number), slot)


def test_a_publish_is_kept_from_its_seal_until_its_reader_asks_for_more() -> None:
    board = Board()
    assert board.begin(0) is None
    assert board.keep("slow", 1)
    for number in (1, 2, 3):
        assert board.begin(number) == 1
        board.post(offer({number: 0}))
    board.release("another")
    assert board.begin(4) == 1
    board.release("slow")
    assert board.begin(5) is None


def test_one_that_has_begun_cannot_be_kept() -> None:
    board = Board()
    board.begin(3)
    assert not board.keep("slow", 3)
    assert board.keep("slow", 4)


def test_one_reader_at_a_time() -> None:
    board = Board()
    assert board.keep("first", 1)
    assert not board.keep("second", 1)
    board.release("first")
    assert board.keep("second", 1)


def test_a_reader_that_died_holds_no_slot_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now)
    board = Board()
    assert board.keep("dead", 1)
    now = 1000.0  # the trainer was slow: the time is that since the seal
    assert board.begin(1) == 1
    board.post(offer({1: 0}))
    now += board_module.KEPT_S - 1
    assert board.begin(2) == 1
    now += 2
    assert board.begin(3) is None
    assert board.keep("another", 4)


def test_ranks_agree_on_the_newest_publish_that_all_have_sealed() -> None:
    """Their slots may differ: one rank may have passed over one that it keeps."""
    ahead, behind = offer({3: 0, 4: 2, 5: 1}), offer({2: 1, 3: 2, 4: 0})
    third = [sealed(3, 0), sealed(3, 2)]
    assert common([ahead, behind]) == Target(4, [sealed(4, 2), sealed(4, 0)], (third,))
    assert common([ahead, behind], 3) == Target(3, third)
    assert common([ahead, behind], 5) is None
    assert common([offer({5: 0, 6: 1}), behind]) is None
