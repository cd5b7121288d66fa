"""The command line: exit codes, what it prints, and what it must not import."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from monarch_rl import configure
from monarch_rl.config import Config, UserError, schema
from monarch_rl.run import check_actors, main

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "monarch", "numpy", "actors"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configure, "find_gpu", lambda: (False, "no NVIDIA GPU found"))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Stands for `monarch_rl.job`, the heavy module that run hands over to; lists the configurations it was given."""
    seen: list[Config] = []
    module = ModuleType("monarch_rl.job")

    def run(config: Config) -> int:
        seen.append(config)
        return 7

    def dry_run(config: Config) -> list[str]:
        if config.model.path == "missing":
            raise UserError("model.path: no such directory: missing")
        return ["tokenizer ok", "reward ok"]

    module.__dict__.update(run=run, dry_run=dry_run)
    monkeypatch.setitem(sys.modules, "monarch_rl.job", module)
    return seen


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment, timeout=30)


def test_no_arguments_is_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "recipe=grpo_qwen" in shown.err
    assert len(shown.err.splitlines()) <= 4


def test_help_lists_every_key_whatever_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=nonsense", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in schema())
    assert "--dry-run" in shown


def test_help_answers_in_half_a_second(tmp_path: Path) -> None:
    """Interpreter included; in CPU seconds, which a busy machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "monarch_rl.run", "--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("arguments", ["--help", "recipe=grpo_qwen profile=cpu --print"])
def test_a_reader_that_stops_early_is_no_error(arguments: str, tmp_path: Path) -> None:
    code = "import sys; from monarch_rl.run import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0


def test_print_and_help_import_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; from monarch_rl.run import main; main(['--help']); main(['recipe=grpo_qwen', '--print']); "
    done = python("-c", code + f"sys.exit(str({HEAVY!r} & sys.modules.keys()))", cwd=tmp_path)
    assert done.stderr.strip() == "set()"


def test_print_shows_profile_first_and_runs_nothing(session: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=grpo_qwen", "seed=4", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "profile cpu (auto: no NVIDIA GPU found)"
    assert ["seed", "4", "command", "line"] in [line.split() for line in lines]
    assert session == []


def test_dry_run_prints_what_was_checked(session: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=grpo_qwen", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == ["profile cpu (auto: no NVIDIA GPU found)", "tokenizer ok", "reward ok"]
    assert session == []


def test_a_users_mistake_is_one_line_and_exit_code_2(session: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=grpo_qwen", "model.path=missing", "--dry-run"]) == 2
    assert capsys.readouterr().err == "error: model.path: no such directory: missing\n"
    assert main(["recipe=grpo_qwen", "learning_rte=1"]) == 2
    assert capsys.readouterr().err == "error: command line: unknown key 'learning_rte'; did you mean 'trainer.lr'?\n"


def test_run_hands_over_and_returns_the_sessions_exit_code(session: list[Config]) -> None:
    assert main(["recipe=grpo_qwen", "steps=3"]) == 7
    assert [config.steps for config in session] == [3]


def test_ctrl_c_before_the_session_takes_over(session: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["monarch_rl.job"], "run", interrupted)
    assert main(["recipe=grpo_qwen"]) == 130


def test_our_actors_are_found() -> None:
    check_actors()


@pytest.mark.parametrize("shadow", ["actors.py", "actors/__init__.py"])
def test_another_actors_package_is_named(shadow: str, tmp_path: Path) -> None:
    file = tmp_path / shadow
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('imported')")
    done = python("-m", "monarch_rl.run", "recipe=grpo_qwen", "profile=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"{file} hides it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
