"""Processes are killed while a run goes on: it finishes, every prompt is trained once, ages stay within bounds, nothing is left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import SMALL, Job, started

pytestmark = pytest.mark.timeout(600)

STEPS, PROMPTS = 30, 8
DRILL = [*SMALL, f"steps={STEPS}", f"buffer.prompts_per_step={PROMPTS}", "trainer.lr=1e-6", "eval.every=0"]
GONE_S = 10.0


def check(job: Job) -> None:
    assert job.wait() == 0, job.out + job.err
    assert job.gone_within(GONE_S) == []
    assert job.err == ""
    assert [row["step"] for row in job.rows] == list(range(STEPS + 1))
    assert max(row["age/max"] for row in job.rows[1:]) <= 2
    trained = [json.loads(line)["ordinal"] for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert trained == sorted(trained)
    assert max(trained) < STEPS * PROMPTS + job.rows[-1]["buffer/dropped"], "a prompt is neither trained nor reported as dropped"


def test_the_only_generator_is_killed(tmp_path: Path) -> None:
    """Case 19. Its replacement, a spare, holds weights before it serves; what was asked of the dead one is asked again."""
    with started(tmp_path, *DRILL, "generator.spares=1") as job:
        job.until_steps(2)
        job.until_process("generator_1 0")
        job.kill("generator_0 0")
        check(job)
        assert "generator 0 was killed by signal 9 (SIGKILL); generator 1 takes its place" in job.out.splitlines()


def test_a_generator_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, *DRILL, "generator.hang_s=4") as job:
        job.until_steps(2)
        job.roles()["generator_0 0"].suspend()
        job.until_said("generator 0 took no step for 4 s; generator 1 takes its place")
        check(job)


def test_one_of_two_generators_is_killed(tmp_path: Path) -> None:
    """Case 39: the other goes on, and the trainer with it. A user who wonders asks who waits for whom."""
    with started(tmp_path, *DRILL, "generator.replicas=2") as job:
        job.until_steps(2)
        job.process.send_signal(signal.SIGQUIT)
        job.until_said("who waits for whom")
        job.kill("generator_1 0")
        job.until_said("generator 2 takes its place")
        check(job)
