from __future__ import annotations

from monarch_rl.config import Config
from monarch_rl.tables import Coloured, Table, of_buffer, of_session
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
    assert "dashboard" not in repr(of_session(Config(), "ready", Version(0, 0), []))
    table = of_session(Config(), "ready", Version(0, 0), [], "http://127.0.0.1:1")
    assert "http://127.0.0.1:1" in repr(table)
    assert "<a href='http://127.0.0.1:1' target='_blank'>http://127.0.0.1:1</a>" in table._repr_html_()


def test_an_empty_buffer_says_so() -> None:
    assert "nothing was started yet" in repr(of_buffer(None))
