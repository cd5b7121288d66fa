"""However a run ends, its exit code tells how, its last line tells why, and no process is left."""

from __future__ import annotations

from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from tests.e2e.jobs import SMALL, Job, finished, started

LONG = [*SMALL, "steps=2000", "trainer.lr=1e-6", "eval.every=0"]
GONE_S = 10.0


def assert_interrupted(job: Job, code: int) -> None:
    assert job.wait(GONE_S + 5) == code
    assert job.gone_within(GONE_S) == []
    assert job.out.splitlines()[-1] == "closing (at most 10 s; once more to end at once)"
    assert job.err == f"error: interrupted; what was written is in {job.output_dir}\n"


def test_ctrl_c_while_the_system_starts(tmp_path: Path) -> None:
    """Case 71."""
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer 0")
        job.signal(SIGINT)
        assert_interrupted(job, 130)


@pytest.mark.timeout(400)
def test_ctrl_c_while_it_trains_leaves_what_was_written(tmp_path: Path) -> None:
    """Case 71."""
    with started(tmp_path, *LONG) as job:
        job.until_steps(2)
        job.signal(SIGINT)
        assert_interrupted(job, 130)
        assert [row["step"] for row in job.rows[:3]] == [0, 1, 2]
        assert (job.output_dir / "timeline.json").is_file()


@pytest.mark.timeout(400)
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer 0")
        job.signal(SIGINT)
        job.until_said("closing")
        job.signal(SIGINT)
        assert job.wait(GONE_S) == 130
        assert job.gone_within(2.0) == []
        assert job.err == f"error: interrupted; what was written is in {job.output_dir}\n"


@pytest.mark.timeout(400)
def test_a_controller_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    """Case 71."""
    with started(tmp_path, *LONG) as job:
        job.until_process("scorer 0")
        job.signal(SIGKILL)
        assert job.wait() == -SIGKILL
        assert job.gone_within(GONE_S) == []


@pytest.mark.timeout(400)
def test_a_generator_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Case 19, where it may not be replaced."""
    with started(tmp_path, *LONG, "generator.max_restarts=0") as job:
        job.until_steps(1)
        job.kill("generator_0 0")
        assert_died(job, "generator 0 was killed by signal 9 (SIGKILL)")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("role", "name"),
    [("trainer 1", "trainer 1"), ("rollout 0", "rollout"), ("replay_buffer 0", "replay buffer"), ("scorer 0", "scorer")],
)
def test_any_other_process_that_dies_ends_the_run_and_is_named(role: str, name: str, tmp_path: Path) -> None:
    """Also of two trainer ranks one, where the other first sees a broken connection."""
    with started(tmp_path, *LONG, "trainer.ranks=2") as job:
        job.until_steps(1)
        job.kill(role)
        hint = "; with checkpoint.every=N it would start again from the last checkpoint" if name == "trainer 1" else ""
        assert_died(job, f"{name} was killed by signal 9 (SIGKILL){hint}")


def assert_died(job: Job, said: str) -> None:
    assert job.wait(60) == 1
    assert job.gone_within(GONE_S) == []
    assert job.err == f"error: {said} (whole story in {job.output_dir / 'error.log'})\n"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 143), (SIGHUP, 129), (SIGKILL, -9)])
def test_signals_while_it_trains(number: int, code: int, tmp_path: Path) -> None:
    with started(tmp_path, *LONG) as job:
        job.until_steps(1)
        job.signal(number)
        if number != SIGKILL:
            assert_interrupted(job, code)
        assert job.wait() == code
        assert job.gone_within(GONE_S) == []
        assert number != SIGKILL or job.err == "", "what dies with its controller says nothing"


@pytest.mark.timeout(500)
def test_two_runs_at_once_on_one_host_both_finish(tmp_path: Path) -> None:
    """Case 72."""
    with started(tmp_path, *SMALL, "steps=3", name="one") as one:
        other = finished(tmp_path, *SMALL, "steps=3", name="other")
        assert one.wait() == 0, one.err
    for job in (one, other):
        assert job.process.returncode == 0, job.err
        assert [row["step"] for row in job.rows] == [0, 1, 2, 3]
        assert job.err == ""
