"""However a run ends, its exit code tells how, its last line tells why, what was done is saved, and no process is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from monarch_rl.checkpoint import read_progress
from tests.e2e.jobs import KILLED, SMALL, Job, finished, started

pytestmark = pytest.mark.timeout(600)

LONG = [*SMALL, "steps=2000", "trainer.lr=1e-6", "eval.every=0", "close_deadline_s=200"]
GONE_S = 10.0


def test_ctrl_c_while_the_system_starts_closes_at_once(tmp_path: Path) -> None:
    """Case 71. There is nothing to save yet."""
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer_0 0")
        job.signal(SIGINT)
        assert job.wait(GONE_S + 5) == 130
        assert job.gone_within(GONE_S) == []
        assert job.out.splitlines()[-1] == "closing (at most 10 s; once more to end at once)"
        assert job.err == f"error: interrupted; what was written is in {job.output_dir}\n"


def assert_saved(job: Job, code: int) -> int:
    """The step after which the run was closed: it is recorded, and there is a checkpoint of it."""
    assert job.wait() == code, job.err
    assert job.gone_within(GONE_S) == []
    assert "closing after the step in progress and a checkpoint (at most 200 s; once more to close without)" in job.out.splitlines()
    step = int(job.rows[-1]["step"])
    folder = job.output_dir / "checkpoints" / f"step_{step}"
    assert job.err == f"error: interrupted after step {step}: resume=latest goes on from {folder}\n"
    assert read_progress(folder).step == step
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return step


def test_ctrl_c_while_it_trains_saves_and_the_run_goes_on_from_there_beside_another(tmp_path: Path) -> None:
    """Cases 71, 72: the two share a host, and both finish."""
    with started(tmp_path, *LONG) as job:
        job.until_steps(2)
        assert set().union(*job.listens().values()) <= {"127.0.0.1"}, f"open to others: {job.listens()}"
        assert "libtorch" not in Path(f"/proc/{job.process.pid}/maps").read_text(), "a start waits for what the controller never needs"
        job.signal(SIGINT)
        step = assert_saved(job, 130)
        assert (job.output_dir / "timeline.json").is_file()
    with started(tmp_path, *SMALL, "steps=3", name="other") as other:
        again = finished(tmp_path, *LONG, f"steps={step + 2}", "resume=latest")
        assert other.wait() == 0
    assert again.process.returncode == 0
    assert again.err == other.err == ""
    assert [row["step"] for row in other.rows] == [0, 1, 2, 3]
    assert [row["step"] for row in again.rows] == list(range(step + 3))
    trained = [json.loads(line)["ordinal"] for line in (again.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(trained) == len(set(trained)) == 8 * (step + 2)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer_0 0")
        job.signal(SIGINT)
        job.until_said("closing")
        job.signal(SIGINT)
        assert job.wait(GONE_S) == 130
        assert job.gone_within(2.0) == []
        assert job.err == f"error: interrupted; what was written is in {job.output_dir}\n"


def test_a_controller_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    """Case 71."""
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer_0 0")
        job.signal(SIGKILL)
        assert job.wait() == -SIGKILL
        assert job.gone_within(GONE_S) == []


@pytest.mark.parametrize("name", ["generator", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rollout", "scorer"))])
def test_what_dies_and_may_not_be_replaced_ends_the_run_and_is_named(name: str, tmp_path: Path) -> None:
    """Case 19."""
    with started(tmp_path, *LONG, f"{name}.max_restarts=0") as job:
        job.until_steps(1)
        job.kill(f"{name}_0 0")
        assert_died(job, f"{name} 0 {KILLED}")


@pytest.mark.slow
@pytest.mark.parametrize(("role", "name"), [("trainer 1", "trainer 1"), ("replay_buffer 0", "replay buffer")])
def test_any_other_process_that_dies_ends_the_run_and_is_named(role: str, name: str, tmp_path: Path) -> None:
    """Also of two trainer ranks one, where the other first sees a broken connection."""
    with started(tmp_path, *LONG, "trainer.ranks=2") as job:
        job.until_steps(1)
        job.kill(role)
        hint = "; with checkpoint.every=N it would start again from the last checkpoint" if name == "trainer 1" else ""
        assert_died(job, f"{name} {KILLED}{hint}")


def assert_died(job: Job, said: str) -> None:
    """With one line that matches `said`."""
    assert job.wait(60) == 1
    assert job.gone_within(GONE_S) == []
    assert re.fullmatch(rf"error: {said} \(whole story in {re.escape(str(job.output_dir))}/error\.log\)\n", job.err), job.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 143), (SIGHUP, 129), (SIGKILL, -9)])
def test_signals_while_it_trains(number: int, code: int, tmp_path: Path) -> None:
    with started(tmp_path, *LONG) as job:
        job.until_steps(1)
        job.signal(number)
        if number != SIGKILL:
            assert_saved(job, code)
        assert job.wait() == code
        assert job.gone_within(GONE_S) == []
        assert number != SIGKILL or job.err == "", "what dies with its controller says nothing"


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_once(tmp_path: Path) -> None:
    """And not with the next one. The folder's place is taken by a file, which root cannot write into either."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "checkpoints").touch()
    job = finished(tmp_path, *LONG, "checkpoint.every=20", "resume=latest")
    assert job.process.returncode == 1
    assert job.gone_within(GONE_S) == []
    folder = job.output_dir / "checkpoints" / ".step_20"
    said = rf"error: the checkpoint cannot be written in {folder}: .*Not a directory.* \(whole story in \S+\)\n"
    assert re.fullmatch(said, job.err), job.err
    assert 20 <= job.rows[-1]["step"] < 40
