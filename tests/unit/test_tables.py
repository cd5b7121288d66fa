from __future__ import annotations

from collections.abc import Sequence

import pytest

from monarch_rl.config import Config, UserError
from monarch_rl.ledger import Ledger
from monarch_rl.lives import STATES, Life, State
from monarch_rl.tables import Coloured, Table, of_buffer, of_lives, of_session
from monarch_rl.types import Version


def test_text_and_html_hold_the_same_cells() -> None:
    table = Table("a <title>", ("x", "y"), [(1.23456, "a\nb"), ("<b>", 2)], "a note")
    for part in ("a <title>", "1.235", "<b>", "a note"):
        assert part in repr(table)
    html = table._repr_html_()
    assert "&lt;b&gt;" in html
    assert "a<br>b" in html
    assert "<b>" not in html.removeprefix("<b>a")


def test_each_version_has_a_colour_of_its_own() -> None:
    first, second = Version(0, 1), Version(0, 2)
    html = Coloured([("1", first), ("+", None), ("2", second), ("3", first)]).html()
    assert html.count("#4477aa") == 2
    assert html.count("#ee6677") == 1
    assert html.count("title='version 0.1'") == 2
    assert str(Coloured([("1", first), ("+", None)])) == "1+"


def test_a_session_links_its_dashboard() -> None:
    assert "dashboard" not in repr(of_session(Config(), "ready", Version(0, 0), {}, {}))
    table = of_session(Config(), "ready", Version(0, 0), {}, {}, "http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in repr(table)
    assert "<a href='http://127.0.0.1:1' target='_blank'>http://127.0.0.1:1</a>" in table._repr_html_()


def test_an_empty_buffer_says_so() -> None:
    assert "nothing was started yet" in repr(of_buffer(None))


async def test_the_ledger_of_a_buffer_is_asked_for_by_state() -> None:
    ledger = Ledger(prompts_per_step=2, max_age=1, clock=lambda: 100.0)
    for _ in range(4):
        ledger.lease("rollout 0", 0.0, 9.0, step=0)
    ledger.scored(0, 1, True, Version(0, 0).pack(), Version(0, 2).pack())
    ledger.scored(1, 1, trainable=False)

    async def ask(states: Sequence[State], last: int) -> list[Life]:
        return ledger.newest(states, last)

    buffer = of_buffer(ledger.holdings(), ask)
    assert [row[1] for row in buffer.rows] == [0, 2, 1, 0, 0, 1]
    assert [row[:2] for row in (await buffer.ledger()).rows] == [(0, "scored"), (1, "dropped"), (2, "leased"), (3, "leased")]
    assert [row[0] for row in (await buffer.ledger("leased", last=1)).rows] == [3]
    assert of_lives(ledger.newest(STATES, 2), now=107.5).rows[0] == (2, "leased", "7.5", 1, "rollout 0", "", "", "")
    assert of_lives(ledger.newest(["scored", "dropped"], 2), now=107.5).rows == [
        (0, "scored", "7.5", 1, "rollout 0", "", "0.0-0.2", ""),
        (1, "dropped", "7.5", 1, "rollout 0", "", "", "dead"),
    ]
    with pytest.raises(UserError, match="there is no state 'lost'; there are pending, leased"):
        await buffer.ledger("lost")  # type: ignore[arg-type]
