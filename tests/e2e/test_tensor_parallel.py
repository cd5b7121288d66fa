"""A job whose generator is two processes that share its weights, one of which is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.dataset_task import hold
from tests.e2e.jobs import SMALL, started, within

pytestmark = pytest.mark.timeout(600)

KEYS = ["generator.tensor_parallel=2", "trainer.ranks=2", "buffer.max_age=0", "steps=4", "eval.every=0", "weights.verify=every"]
FEW = [f"task={Path(__file__).parent / 'dataset_task.py'}:Few", "buffer.dead_groups=keep", "scorer.deadline_s=300"]


def shared_memory() -> set[str]:
    """What ranks of a generator share with each other by a name."""
    return {name for name in os.listdir("/dev/shm") if "-tp:" in name}


def test_two_ranks_train_with_two_that_generate_and_are_replaced_together(tmp_path: Path) -> None:
    """Every version is held against the trainers' checksums on both ranks, and at zero lag the sampler's log-probabilities are the
    trainer's (T=1). Case 19: who dies takes the other rank with it, and a whole replica takes their place."""
    hold(gate := tmp_path / "gate", 2 * 8)  # or the last step might be over before anybody hears of the death
    names = shared_memory()
    with started(tmp_path, *SMALL, *KEYS, *FEW, f"task_args.gate={gate}") as job:
        job.until_steps(1)
        job.kill("generator_0 1")
        job.until_said("; generator 1 takes its place")
        hold(gate, 4 * 8)
        assert job.wait() == 0
        assert job.gone_within(10) == []
    assert job.err == ""
    assert within(60, lambda: shared_memory() <= names), "another run of this host has names only while it starts"
    (replaced,) = [line for line in job.out.splitlines() if line.endswith("; generator 1 takes its place")]
    assert replaced.startswith("generator 0")
    assert [row["step"] for row in job.rows] == list(range(5))
    for row in job.rows[1:]:
        assert row["age/max"] == 0
        assert row["mismatch/max_abs"] <= 1e-4
        assert row["mismatch/mean_abs"] <= 2e-6
        assert row["mismatch/kl"] <= 1e-9
