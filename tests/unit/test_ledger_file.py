"""`ledger.jsonl` and the command that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_rl import commands
from monarch_rl.config import UserError
from monarch_rl.ledger import Ledger
from monarch_rl.observe.ledger_file import LedgerFile, changes, counted, lives
from monarch_rl.types import Version


def ledger(path: Path, after: int = 0) -> Ledger:
    return Ledger(prompts_per_step=2, max_age=1, clock=lambda: 100.0, on_change=LedgerFile(path / "ledger.jsonl", after).write)


def lived(path: Path) -> Ledger:
    """0 and 2 are trained, 1 is dead, 3 is leased for the second time."""
    made = ledger(path)
    for _ in range(4):
        made.lease("rollout 0", 0.0, 9.0, step=0)
    made.scored(1, 1, trainable=False)
    made.failed(3, 1, "failed")
    made.lease("rollout 1", 0.0, 9.0, step=0)
    for ordinal in (0, 2):
        made.scored(ordinal, 1, True, Version(0, 0).pack(), Version(0, 1).pack())
    assert made.take(1) == [0, 2]
    made.trained(1)
    assert made._on_change is not None
    made._on_change.__self__.flush()  # type: ignore[attr-defined]
    return made


def test_what_is_written_is_what_the_ledger_knows(tmp_path: Path) -> None:
    made = lived(tmp_path)
    found = lives(tmp_path / "ledger.jsonl")
    assert found == {ordinal: made.life(ordinal) for ordinal in range(4)}
    assert counted(found) == {"pending": 0, "leased": 1, "scored": 0, "taken": 0, "trained": 2, "dropped": 1}
    assert [life.state for life in changes(tmp_path / "ledger.jsonl") if life.ordinal == 3] == ["leased", "pending", "leased"]
    assert (found[3].attempt, found[3].owner, found[1].reason) == (2, "rollout 1", "dead")


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    lived(tmp_path)
    file = tmp_path / "ledger.jsonl"
    file.write_text(file.read_text()[:-9])
    assert lives(file)[2].state == "taken"


def test_a_run_that_goes_on_keeps_what_its_checkpoint_holds(tmp_path: Path) -> None:
    """Lines after the mark are of work that is done again."""
    path = tmp_path / "ledger.jsonl"
    made = lived(tmp_path)
    written = made._on_change.__self__  # type: ignore[union-attr]
    written.mark(1)
    state = made.state_dict()
    made.drop(3, "refused")
    written.flush()
    assert lives(path)[3].state == "dropped"
    again = LedgerFile(path, after=1)
    assert lives(path)[3].state == "leased"
    second = Ledger(prompts_per_step=2, max_age=1, clock=lambda: 200.0, on_change=again.write)
    second.load_state_dict(state)
    again.flush()
    assert lives(path) == {ordinal: second.life(ordinal) for ordinal in range(4)}
    assert lives(path)[3].state == "pending"
    assert next(iter(changes(path))).owner == "rollout 0"
    LedgerFile(path, after=7).flush()
    assert lives(path) == {}, "a checkpoint of another folder: this one begins anew"


def test_inspect_tells_what_is_in_flight_and_what_was_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lived(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert commands.run("inspect", [str(tmp_path)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dropped", "1", "1", "to", "1", "1", "dead"] in said
    assert ["trained", "2", "0", "to", "2"] in said
    (in_flight,) = [line for line in said if line[:2] == ["3", "leased"]]
    assert in_flight[3:6] == ["2", "rollout", "1"]
    assert commands.run("inspect", [str(tmp_path), "--prompt", "3"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.strip().startswith("3")] == [
        "leased",
        "pending",
        "leased",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "9"], "--prompt 9: was not started"),
        (["--prompt", "x"], "--prompt must be an ordinal, got 'x'"),
        (["--all"], "unknown option '--all'; there are --prompt"),
    ],
)
def test_inspect_says_what_is_wrong(arguments: list[str], words: str, tmp_path: Path) -> None:
    lived(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=words):
        commands.run("inspect", [str(tmp_path), *arguments])


def test_inspect_of_a_run_without_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=r"there is no ledger\.jsonl"):
        commands.run("inspect", [str(tmp_path)])
