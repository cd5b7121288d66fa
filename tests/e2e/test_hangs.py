"""Processes that hang for good, as one that is stopped does, and prompts that end whatever works on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_rl import checkpoint
from tests.e2e.jobs import SMALL, finished, started

HANG_S = 12
LONG = [*SMALL, "steps=2000", "trainer.lr=1e-6", "eval.every=0"]


@pytest.mark.timeout(400)
def test_a_replay_buffer_that_hangs_ends_the_run_which_can_go_on_from_its_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, *LONG, "checkpoint.every=2", f"buffer.hang_s={HANG_S}") as job:
        job.until_row(3)
        job.roles()["replay_buffer 0"].suspend()
        assert job.wait() == 1
        assert job.gone_within(10.0) == []
        said = f"error: replay buffer gave no sign of life for {HANG_S} s (whole story in {job.output_dir / 'error.log'})\n"
        assert job.err == said
        assert "replay_buffer gives no sign of life" in job.out, "who waits for whom was shown"
    newest = checkpoint.to_resume("latest", job.output_dir)
    assert newest is not None
    assert checkpoint.read_progress(newest).step >= 2


DEADLY = """
import os
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt

class Deadly(Task):
    '''One prompt ends whoever judges it.'''
    name = "deadly"

    def prompt(self, ordinal, split):
        return Prompt(ordinal, f"{ordinal % 9}+1=", answer="deadly" if (ordinal, split) == (20, "train") else "")

    def reward(self, prompt, completion):
        if prompt.answer:
            os.kill(os.getppid(), 9)
        return float(len(completion) % 2)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prompt_that_ends_each_scorer_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    job = finished(tmp_path, *SMALL, "steps=8", "eval.every=0", f"task={tmp_path}/deadly.py:Deadly")
    assert job.process.returncode == 0, job.out + job.err
    assert [row["step"] for row in job.rows] == list(range(9))
    assert job.rows[-1]["buffer/dropped_lost"] == 1
    said = "prompt 20 is dropped: scorer 0, scorer 1, scorer 2 were lost while working on it (rollout.max_attempts=3)"
    assert said in job.err
    trained = [json.loads(line)["ordinal"] for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert 20 not in trained
    assert len(trained) == len(set(trained)) == 8 * 8
