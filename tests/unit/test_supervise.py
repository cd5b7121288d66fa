"""What is said of failures fits a screen, and no wait goes by a clock that somebody may set."""

from __future__ import annotations

import ast

from monarch_rl.supervise import LONGEST, cause
from tests.unit.test_docs import sources

STAMPS = {
    "ledger.py": "since when a prompt is how it is",
    "tables.py": "shown beside it",
    "inspect_command.py": "shown beside it",
    "output.py": "a message about a run that goes on",
    "status.py": "signs of life, which other hosts read",
    "watch.py": "how long a run has gone on",
    "live.py": "how long a run has gone on",
    "clocks.py": "how far clocks are apart",
}
"""Files that ask for the time of day, and what for."""
SPANS = {"timeline.py", "trace.py", "clocks.py", "reward_process.py", "lockstep.py", "rollout.py", "process.py", "generator.py"}
"""Files that stamp the timeline, in nanoseconds."""


def test_the_time_of_day_is_for_stamps() -> None:
    """Durations and deadlines go by monotonic clocks: a clock that jumps changes what is shown, and nothing else."""
    asked = {
        (path.name, node.attr)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now")
    }
    assert {name for name, what in asked if what == "time"} <= STAMPS.keys()
    assert {name for name, what in asked if what == "time_ns"} <= SPANS
    assert {what for _, what in asked} == {"time", "time_ns"}


def test_an_error_is_one_line_that_fits_a_screen() -> None:
    """Whatever users' code raises with, also where it looks like one of Monarch's reports."""
    for text in ("x" * 10**6, "a{" * 10**5, "é 1/2}>" * 10**5):
        assert cause(ValueError(text)) == text[:LONGEST] + "…"
    assert cause(ValueError("first\nsecond")) == "first"
    assert cause(ValueError()) == "ValueError"
