"""Runs that are killed, go on, end with their data, and are replayed; counted from what was trained, and not from the ledger."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.e2e.dataset_task import hold
from tests.e2e.jobs import Job, finished, started

pytestmark = pytest.mark.timeout(900)

FEW = f"task={Path(__file__).parent / 'dataset_task.py'}:Few"
SMALL = [
    *("recipe=grpo_qwen", "profile=cpu", FEW, "buffer.prompts_per_step=4", "eval.prompts=0", "trainer.warmup_steps=1"),
    *("console.rollouts_every=0", "buffer.dead_groups=keep", "generator.max_new_tokens=16", "generator.group_size=4", "trainer.lr=1e-3"),
    "scorer.deadline_s=120",  # on a busy machine a reward that is late would make it another run
]
SIZE, STEPS = 42, 11
"""Prompts, and steps of four of them; two are left over for the last one."""
DATA = [*SMALL, "epochs=1", f"task_args.size={SIZE}", "task_args.slow=9", "task_args.pause_s=0.03", "checkpoint.every=1", "record=true"]


def weights(job: Job) -> bytes:
    return (job.output_dir / "model" / "model.safetensors").read_bytes()


def trained(job: Job) -> Counter[int]:
    """How often each prompt was trained, by the recorded batches."""
    lines = (job.output_dir / "rollouts.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["ordinal"] for line in lines)


def kill_and_go_on(folder: Path, kills: int) -> Job:
    """Kill -9 at random points after a first checkpoint, each time going on from the latest; then let it end."""
    draw = random.Random(kills)
    seen, gate = 0, folder / "gate"
    data = [*DATA, f"task_args.gate={gate}"]
    for kill in range(kills):
        hold(gate, 4 * (seen + 4))  # or the run might be over before
        with started(folder, *data, "resume=latest" if kill else "resume=none") as job:
            job.until_row(seen + draw.randint(1, 3))
            time.sleep(draw.random())
            job.signal(signal.SIGKILL)
            job.wait()
            assert job.gone_within(60) == []
        seen = job.rows[-1]["step"]
    hold(gate, SIZE)
    return finished(folder, *data, "resume=latest")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return kill_and_go_on(tmp_path_factory.mktemp("killed"), kills=1)


def check_each_was_trained_once(job: Job) -> None:
    assert job.process.returncode == 0, job.err
    assert trained(job) == Counter(range(SIZE))
    rows: list[dict[str, Any]] = job.rows
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(row["age/max"] for row in rows[1:]) <= 2
    assert rows[-1]["buffer/dropped"] == 0


def test_a_run_that_was_killed_trains_each_prompt_once(killed: Job) -> None:
    """Cases 2, 4, 23: 42 prompts, one of them slow; kill -9 of the whole run, resume, until the data end by themselves with half a
    batch."""
    check_each_was_trained_once(killed)


@pytest.mark.slow
def test_a_run_that_was_killed_three_times_trains_each_prompt_once(tmp_path: Path) -> None:
    check_each_was_trained_once(kill_and_go_on(tmp_path, kills=3))


def test_a_replay_reaches_the_same_weights(killed: Job, tmp_path: Path) -> None:
    """Of an asynchronous run that was killed in between: without engines, bit for bit after every step."""
    assert killed.process.returncode == 0, killed.err
    replay = finished(tmp_path, *DATA[:-2], f"replay={killed.output_dir}")
    assert replay.process.returncode == 0, replay.err
    assert f"replay: {STEPS} recorded steps; on CPUs the weights are compared after {STEPS} of them" in replay.out
    exact = ("loss/policy", "grad_norm", "lr", "entropy", "ratio/mean", "ratio/max", "tokens/trained", "reward/mean", "age/max")
    for was, now in zip(killed.rows[1:], replay.rows[1:], strict=True):
        assert [now[key] for key in exact] == [was[key] for key in exact], f"step {was['step']}"
    assert weights(replay) == weights(killed)


def test_a_replay_says_where_weights_differ(killed: Job, tmp_path: Path) -> None:
    """The groups of step 4 are exchanged for those of step 3."""
    shutil.copytree(killed.output_dir / "record", tmp_path / "other" / "record")
    shutil.copy(tmp_path / "other" / "record" / "step_3.npz", tmp_path / "other" / "record" / "step_4.npz")
    replay = finished(tmp_path, *DATA[:-2], f"replay={tmp_path / 'other'}")
    assert replay.process.returncode == 2
    assert "step 4 is the first after which the weights are not those of the recorded run (trainer rank 0)" in replay.err
    assert len(replay.err.splitlines()) == 1


def test_going_on_from_the_middle_gives_the_weights_of_the_whole(tmp_path: Path) -> None:
    """`buffer.max_age=0`: eight steps at once, and the last four of them by another run from its checkpoint of step 4.

    Cases 7, 9, 10: the first step after it is 5, of groups that the restored weights have sampled and not those of the reference; the
    divergence from the reference goes on where it was.
    """
    eight = ["buffer.prompts_per_step=2", "task_args.size=40", "buffer.max_age=0", "steps=8", "checkpoint.every=4", "trainer.kl=0.01"]
    whole = finished(tmp_path, *SMALL, *eight, name="whole")
    assert whole.process.returncode == 0, whole.err
    half = finished(tmp_path, *SMALL, *eight, f"resume={whole.output_dir}/checkpoints/step_4", name="half")
    assert half.process.returncode == 0, half.err
    assert [row["step"] for row in half.rows] == list(range(5, 9))
    for key in ("grad_norm", "kl/ref", "version"):
        assert [row[key] for row in half.rows] == [row[key] for row in whole.rows[5:]], key
    assert min(row["kl/ref"] for row in half.rows) > 0
    assert max(row["age/max"] for row in half.rows) == 0
    assert weights(half) == weights(whole)
    was, now = checkpointed(whole, 8), checkpointed(half, 8)
    assert was.keys() == now.keys()
    assert {kind for name in was for kind in ("exp_avg", "exp_avg_sq", "step") if name.endswith(f".{kind}")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert [name for name in was if not torch.equal(was[name], now[name])] == []


def checkpointed(job: Job, step: int) -> dict[str, Tensor]:
    """Model and optimizer as they were written after `step`."""
    reader = FileSystemReader(job.output_dir / "checkpoints" / f"step_{step}")
    written = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in reader.read_metadata().state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    load(written, storage_reader=reader, no_dist=True)
    return written
