"""Processes are killed while a run goes on: it finishes, every prompt is trained once, ages stay within bounds, nothing is left."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from random import Random

import pytest

from tests.e2e.jobs import SMALL, Job, started

pytestmark = pytest.mark.timeout(600)

STEPS, PROMPTS = 30, 8
DRILL = [*SMALL, f"steps={STEPS}", f"buffer.prompts_per_step={PROMPTS}", "trainer.lr=1e-6", "eval.every=0"]
GONE_S = 10.0
KILLED = r"(was killed by signal 9 \(SIGKILL\)|is gone: its process does not answer any more)"
"""On a busy host Monarch may find the second before the first."""


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
    """Case 19. Its replacement holds weights before it serves; what was asked of the dead one is asked again."""
    with started(tmp_path, *DRILL) as job:
        job.until_steps(2)
        job.kill("generator_0 0")
        check(job)
        assert re.search(f"^generator 0 {KILLED}; generator 1 takes its place$", job.out, re.MULTILINE)


def test_a_generator_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, *DRILL, "generator.hang_s=4") as job:
        job.until_steps(2)
        job.roles()["generator_0 0"].suspend()
        job.until_said("generator 0 stood still for 4 s; generator 1 takes its place")
        check(job)


def test_one_of_two_generators_is_killed(tmp_path: Path) -> None:
    """Case 39: the other goes on, and the trainer with it."""
    with started(tmp_path, *DRILL, "generator.replicas=2") as job:
        job.until_steps(2)
        job.process.send_signal(signal.SIGQUIT)
        job.until_said("who waits for whom")
        job.kill("generator_1 0")
        job.until_said("generator 2 takes its place")
        check(job)


def test_the_only_rollout_worker_and_the_only_scorer_are_killed(tmp_path: Path) -> None:
    """Case 19. What the worker had leased is tried again, what the scorer was asked is asked of its replacement."""
    with started(tmp_path, *DRILL) as job:
        job.until_steps(2)
        job.kill("rollout_0 0")
        job.until_said("; rollout 1 takes its place")
        job.kill("scorer_0 0")
        job.until_said("; scorer 1 takes its place")
        check(job)
        for name in ("rollout", "scorer"):
            assert re.search(f"^{name} 0 {KILLED}; {name} 1 takes its place$", job.out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollout", "scorer"])
def test_a_worker_that_stands_still_is_replaced(name: str, tmp_path: Path) -> None:
    with started(tmp_path, *DRILL, f"{name}.hang_s=8") as job:
        job.until_steps(2)
        job.roles()[f"{name}_0 0"].suspend()
        job.until_said(f"{name} 0 stood still for 8 s; {name} 1 takes its place")
        check(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_are_lost_at_any_time(seed: int, tmp_path: Path) -> None:
    """Twenty in all; also while the run evaluates, and while what was lost before is still being replaced."""
    drawn = Random(seed)
    two = [f"{key}=2" for key in ("generator.replicas", "rollout.workers", "scorer.workers")]
    hangs = [f"{name}.hang_s=8" for name in ("generator", "rollout", "scorer")]
    victims = drawn.sample([f"{name}_{number} 0" for name in ("generator", "rollout", "scorer") for number in (0, 1)], 2)
    with started(tmp_path, *DRILL, *two, *hangs, "eval.every=5") as job:
        for step, role in zip(sorted(drawn.choices(range(STEPS // 2), k=2)), victims, strict=True):
            job.until_steps(step)
            how = "stopped" if drawn.random() < 0.3 else "killed"
            print(f"step {step}: {role} is {how}")
            victim = job.roles()[role]
            (victim.suspend if how == "stopped" else victim.kill)()
        check(job)
        assert job.out.count("takes its place") == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns_though_a_generator_is_killed_every_fifteen_steps(tmp_path: Path) -> None:
    """As the undisturbed run does, within noise."""
    learn = ["recipe=grpo_qwen", "steps=60", "generator.replicas=2", "eval.every=20", "console.rollouts_every=0"]
    with started(tmp_path, *learn, name="calm") as calm:
        assert calm.wait(600) == 0, calm.err
    with started(tmp_path, *learn, name="killed") as job:
        for kills in range(3):
            job.until_steps(15 * (kills + 1))
            job.kill(f"generator_{kills} 0")
        assert job.wait(600) == 0, job.err
        assert job.gone_within(GONE_S) == []
    assert job.out.count("takes its place") == 3
    first, last, undisturbed = job.rows[0]["eval/accuracy"], job.rows[-1]["eval/accuracy"], calm.rows[-1]["eval/accuracy"]
    assert last - first > 0.3
    assert abs(last - undisturbed) < 0.15
