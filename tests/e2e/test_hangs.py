"""Processes that hang for good, as one that is stopped does, and prompts that end whatever works on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_rl import checkpoint
from tests.e2e.jobs import SMALL, started

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
