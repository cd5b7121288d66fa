"""The output folder: nothing of the user's is moved or written over, and what cannot be had is said in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from monarch_rl import job
from monarch_rl.config import Config, ConfigError, UserError, validate
from monarch_rl.output import check_output_dir, make_output_dir


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "home").mkdir()
    (folder / "afile").write_text("mine")
    monkeypatch.chdir(folder)
    return folder


def earlier(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "report.html", "timeline.json", "timeline.1.json"):
        (path / name).write_text("earlier")
    (path / "model").mkdir()
    return path


@pytest.mark.parametrize("name", ["a/b/new", "empty"])
def test_a_new_or_empty_folder_is_filled(name: str, here: Path) -> None:
    (here / "empty").mkdir()
    check_output_dir(Config(output_dir=name))
    assert sorted(path.name for path in here.rglob("*")) == ["afile", "empty"], "looking leaves nothing behind"
    assert [file.name for file in make_output_dir(Config(output_dir=name)).iterdir()] == ["config.yaml"]


def test_an_earlier_run_is_moved_aside_and_each_later_one_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier(here / "runs" / "x")
    earlier(here / "runs" / "x.1")
    config = Config(output_dir="runs/x")
    assert "moved aside" in check_output_dir(config)
    make_output_dir(config)
    assert capsys.readouterr().out == "runs/x held an earlier run: moved to runs/x.2\n"
    assert (here / "runs/x.2/metrics.jsonl").read_text() == "earlier"
    assert not (here / "runs/x/metrics.jsonl").exists()


@pytest.mark.parametrize("resume", ["none", "latest"])
def test_a_run_that_goes_on_keeps_its_folder_to_itself(resume: str, here: Path) -> None:
    path = earlier(here / "runs/x")
    status = {"state": "running", "started": 1.0, "updated": time.time(), "host": "elsewhere", "pid": 7, "process_started": 1}
    (path / "status.json").write_text(json.dumps(status))
    said = r"^output_dir=runs/x: a run goes on there \(process 7 on elsewhere, heard of \d+ s ago\); end it first, or name a folder"
    with pytest.raises(UserError, match=said):
        make_output_dir(Config(output_dir="runs/x", resume=resume))
    assert (path / "metrics.jsonl").read_text() == "earlier"


def test_a_job_that_slurm_starts_again_has_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = earlier(here / "runs/x")
    status = {"state": "running", "started": 1.0, "updated": time.time(), "host": "elsewhere", "pid": 7, "process_started": 1}
    (path / "status.json").write_text(json.dumps(status))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert check_output_dir(Config(output_dir="runs/x", resume="latest")) == "runs/x"


@pytest.mark.parametrize("resume", ["latest", "elsewhere/checkpoints/step_2"])
def test_a_run_that_resumes_keeps_its_folder(resume: str, here: Path) -> None:
    (earlier(here / "x") / "notes.txt").write_text("mine")
    make_output_dir(Config(output_dir="x", resume=resume))
    assert (here / "x/metrics.jsonl").read_text() == "earlier"
    assert (here / "x/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", [".", "..", "/", "../home", "link"])
def test_the_folder_one_stands_in_is_refused(path: str, here: Path) -> None:
    (here / "link").symlink_to(here)
    with pytest.raises(UserError, match=f"output_dir={path}: the folder you start from lies in it") as refused:
        make_output_dir(Config(output_dir=path))
    assert refused.value.__cause__ is None
    assert (here / "afile").read_text() == "mine"


def test_a_folder_with_files_of_another_kind_is_refused(here: Path) -> None:
    (earlier(here / "x") / "thesis.tex").write_text("mine")
    (here / "data").mkdir()
    (here / "data" / "rows.jsonl").write_text("mine")
    for name, file in (("x", "thesis.tex"), ("data", "rows.jsonl")):
        with pytest.raises(UserError, match=f"output_dir={name}: holds {file}, which no run has written"):
            make_output_dir(Config(output_dir=name))
    assert (here / "x" / "thesis.tex").exists()


def test_a_model_is_not_moved_away_from_its_run(here: Path) -> None:
    earlier(here / "x")
    config = Config(output_dir="x")
    config.model.path = "x/model"
    with pytest.raises(UserError, match="moved aside, and model"):
        make_output_dir(config)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/proc/x", ""),
        ("afile", "afile is no folder"),
        ("afile/sub/sub", "afile is no folder"),
        ("x" * 300, "name too long"),
        ("circle", ""),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(path: str, why: str, here: Path) -> None:
    (here / "circle").symlink_to(here / "circle")
    for resume in ("none", "latest"):
        with pytest.raises(UserError, match=f"output_dir={path}: cannot be written: (?i:.*{why})") as refused:
            check_output_dir(Config(output_dir=path, resume=resume))
        assert refused.value.__cause__ is None


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_name_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="output_dir: must name a folder"):
        validate(Config(output_dir=path))


def test_an_error_that_cannot_be_logged_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.failed(RuntimeError("no luck"), Path("afile")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no luck (afile/error.log cannot be written: ")
