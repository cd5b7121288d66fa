"""Commands of the command line: what they say of themselves, and one line for every wrong turn."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from monarch_rl.commands import COMMANDS
from monarch_rl.config import Config
from monarch_rl.configure import write
from monarch_rl.run import main
from tests.unit.test_run import HEAVY, python


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with nothing in it yet but the settings, below the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "one"
    write(Config(output_dir=str(folder), steps=3), folder / "config.yaml")
    return folder


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "nonsense", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: monarch-rl {name} ")


def test_help_and_wrong_turns_import_nothing_heavy(tmp_path: Path) -> None:
    calls = "main(['export', '--help']); main(['eval', 'gone']); main(['watch', 'gone']); "
    done = python(
        "-c", f"import sys; from monarch_rl.run import main; {calls} print({HEAVY!r} - {{'numpy'}} & sys.modules.keys())", cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("wach runs/one", f"no command 'wach'; did you mean 'watch'? commands: {', '.join(COMMANDS)}; settings are key=value"),
        ("report", "report takes one output folder: monarch-rl report OUTPUT_DIR"),
        ("report runs/one runs/one", "report takes one output folder: monarch-rl report OUTPUT_DIR"),
        ("report runs/two", "runs/two: there is no such folder"),
        ("report runs", "runs is no output folder of a run: it has no config.yaml; below it are runs/one"),
        ("report runs/one/config.yaml", "runs/one/config.yaml is no output folder of a run: it has no config.yaml"),
        ("watch runs/one", "runs/one has no status.json: the run has not started yet, or was moved"),
        ("export runs/one", "runs/one holds no weights yet: neither model/ nor a checkpoint in checkpoints/"),
        ("export runs/one --to", "--to needs a value: a folder"),
        ("export runs/one --dtype=int4", "--dtype must be float32 or bfloat16, got 'int4'"),
        ("export runs/one --too x", "unknown option '--too'; there are --to, --dtype"),
        ("eval", "eval takes a model or an output folder first: monarch-rl eval MODEL_OR_OUTPUT_DIR"),
        ("eval task=arithmetic", "eval takes a model or an output folder first: monarch-rl eval MODEL_OR_OUTPUT_DIR"),
        ("eval runs/one", "runs/one holds no weights yet: neither model/ nor a checkpoint in checkpoints/"),
        ("eval runs", "runs is no output folder of a run: to evaluate it as a model, say what to ask it with task=NAME"),
        ("eval gone", "gone is no folder: to evaluate it as a model, say what to ask it with task=NAME"),
        ("eval ./gone task=arithmetic", "model.path=gone: no such directory"),
        ("eval tiny task=arithmetc", "task=arithmetc: neither a built-in task"),
        ("eval tiny task=arithmetic steps=3", "steps: not a setting of eval, which trains nothing and writes nothing"),
        ("eval tiny task=arithmetic eval.prompts=0", "eval.prompts=0: there is nothing to evaluate; say eval.prompts=N"),
        ("eval tiny task=arithmetic eval.promts=4", "command line: unknown key 'eval.promts'; did you mean 'eval.prompts'?"),
    ],
)
def test_a_wrong_turn_is_one_line(arguments: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {said}")
    assert len(shown.err.splitlines()) == 1


def test_export_writes_over_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (run / "export").mkdir()
    (run / "export" / "mine").touch()
    assert main(["export", str(run)]) == 2
    assert capsys.readouterr().err == "error: runs/one/export is not empty; choose another folder with --to\n"


def test_report_says_where_it_is_and_that_there_are_no_rows_yet(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "runs/one/report.html\n"
    assert shown.err == "runs/one has no rows yet: metrics.jsonl is empty\n"
    assert "no rows yet" in (run / "report.html").read_text()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "wall_s": 1.0}) + "\n")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""


def test_nothing_of_eval_is_left_behind(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    assert main(["eval", "tiny", "task=arithmetc"]) == 2
    assert set(tmp_path.iterdir()) == before
