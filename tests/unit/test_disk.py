"""On a full disk: an error that names the file, what was there before stays, and nothing that is half written is taken for whole."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from monarch_rl import arrays, checkpoint, recorded
from monarch_rl.config import Config
from monarch_rl.disk import write_whole
from monarch_rl.ledger import Ledger
from monarch_rl.lives import Life, Progress
from monarch_rl.models import PolicyModel, save_pretrained
from monarch_rl.observe.ledger_file import LedgerFile, lives
from monarch_rl.observe.metrics import MetricsFile
from monarch_rl.observe.rollouts import RolloutsFile
from monarch_rl.observe.status import StatusFile, read_status
from monarch_rl.observe.timeline import Span
from monarch_rl.observe.trace import Trace, read
from monarch_rl.records import Records
from monarch_rl.tasks.tiny import build_model
from monarch_rl.types import Group, Prompt
from tests.unit.test_checkpoint import groups


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows above so many bytes: the kernel refuses the rest of a write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def until_full(path: Path, write: Callable[[int], object]) -> None:
    def go_on() -> None:
        for step in range(1, 1000):
            write(step)

    with room_for(3000), pytest.raises(OSError, match=rf"^{path} cannot be written: File too large$"):
        go_on()


def test_metrics_and_rollouts_go_on_behind_the_last_line_that_is_whole(tmp_path: Path) -> None:
    metrics, rollouts = tmp_path / "metrics.jsonl", tmp_path / "rollouts.jsonl"
    rows, trained = MetricsFile(metrics), RolloutsFile(rollouts)
    group = Group(Prompt(0, "1+1=\u2028", "2"), [])
    until_full(metrics, lambda step: rows.write({"step": step, "loss/policy": 0.125}))
    until_full(rollouts, lambda step: trained.write(step, [group]))
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written"), room_for(3000):
        rows.close()
    for path in (metrics, rollouts):
        assert not path.read_text().endswith("\n"), "the last line was cut off"
    again, once_more = MetricsFile(metrics, after=5), RolloutsFile(rollouts, after=5)
    again.write({"step": 6})
    once_more.write(6, [group])
    for path in (metrics, rollouts):
        with path.open() as lines:
            assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("after", [0, 2, 3, 9])
def test_steps_that_are_undone_are_cut_off_where_the_file_is(after: int, tmp_path: Path) -> None:
    """It may be larger than memory: the rest of it is neither read nor written again."""
    path = tmp_path / "rollouts.jsonl"
    trained = RolloutsFile(path)
    groups = [Group(Prompt(ordinal, f"{ordinal}\u2028\n", "2"), []) for ordinal in range(3)]
    for step in range(1, 4):
        trained.write(step, groups)
    file_id = path.stat().st_ino
    trained.cut(after)
    trained.write(after + 1, groups)
    trained.close()
    with path.open() as lines:
        steps = [json.loads(line)["step"] for line in lines]
    kept = [step for step in (1, 2, 3) if step <= after]
    assert steps == [step for step in (*kept, after + 1) for _ in groups]
    assert path.stat().st_ino == file_id
    RolloutsFile(path, after=0).close()
    assert not path.read_bytes()


def test_the_ledger_is_read_up_to_the_last_line_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)

    def write(step: int) -> None:
        file.write(Life(step, "trained", 1.0, 1))
        file.mark(step)

    until_full(path, write)
    found = lives(path)
    assert list(found) == list(range(1, len(found) + 1))
    LedgerFile(path, after=3)
    assert list(lives(path)) == [1, 2, 3]


def test_the_timeline_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    trace = Trace(path)
    until_full(path, lambda step: trace.add("trainer 0", [Span("train", step, step + 1)]))
    assert len(read(path)) > 10


def test_what_is_written_whole_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "first")
    until_full(path, lambda step: write_whole(path, "x" * 2000 * step))
    assert (path.read_text(), len(list(tmp_path.iterdir()))) == ("x" * 2000, 1)


async def test_a_sign_of_life_that_cannot_be_written(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.start()
    with room_for(10), pytest.raises(OSError, match=r"status\.json cannot be written"):
        file.close()
    found = read_status(tmp_path)
    assert found
    assert found.state == "running", "its process says the rest"


def test_a_recorded_step_is_absent(tmp_path: Path) -> None:
    with room_for(1000), pytest.raises(OSError, match=r"step_1\.npz cannot be written: "):
        recorded.write(tmp_path, 1, 20 * groups())
    assert list((tmp_path / "record").iterdir()) == []


def test_a_checkpoint_of_the_buffer_is_absent(tmp_path: Path) -> None:
    folder = checkpoint.folder_of(tmp_path, 1)
    with room_for(1000), pytest.raises(OSError, match=r"ledger\.npz cannot be written|groups\.npz cannot be written"):
        checkpoint.write_buffer(checkpoint.unfinished(folder), Ledger(prompts_per_step=1, max_age=0).state_dict(), 20 * groups())
    with room_for(1), pytest.raises(OSError, match=r"progress\.json cannot be written"):
        checkpoint.complete(folder, Progress(1, 4, {}), keep=2)
    assert checkpoint.to_resume("latest", tmp_path) is None
    checkpoint.sweep(tmp_path)
    assert list(folder.parent.iterdir()) == []


def test_a_model_is_absent(tmp_path: Path) -> None:
    with room_for(100_000), pytest.raises(OSError, match=f"the model cannot be saved in {tmp_path}/model: "):
        save_pretrained(PolicyModel(build_model(0), 64), tmp_path / "model", "tiny", torch.float32)
    assert list(tmp_path.iterdir()) == []


async def test_what_still_can_be_written_at_the_end_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The timeline is at its limit, the status is not."""
    records = Records(Config(output_dir=str(tmp_path)))
    records.start()
    records.trace.add("trainer 0", [Span("train", step, step + 1) for step in range(20)])
    records.ends("failed", "the disk is full")
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    with room_for((tmp_path / "timeline.json").stat().st_size):
        await records.close()
    assert "timeline.json cannot be written: File too large" in capsys.readouterr().out
    assert str(read_status(tmp_path)) == "failed: the disk is full"


def test_arrays_name_their_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"^{tmp_path}/no/a\.npz cannot be written: No such file or directory$"):
        arrays.write(tmp_path / "no" / "a.npz", {}, {})
