from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from monarch_rl import checkpoint
from monarch_rl.config import TrainerConfig, UserError
from monarch_rl.learner import Learner
from monarch_rl.ledger import Ledger
from monarch_rl.lives import Progress
from monarch_rl.models import local_shards
from tests.batches import episode, sampled_by, shards, small_model


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def learner(mesh: DeviceMesh, seed: int) -> Learner:
    return Learner(small_model(seed), TrainerConfig(schedule="linear", warmup_steps=2), total_steps=6, device_mesh=mesh)


def train(one: Learner, steps: range) -> None:
    for step in steps:
        draw = random.Random(step)
        group = [episode(3, draw.randint(2, 9), draw, reward=draw.random()) for _ in range(4)]
        sampled_by(small_model(), group, 1.0)
        one.step(shards([group], step=step)[0])


def test_training_goes_on_bit_for_bit(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Model, both moments of AdamW, its step count and the place in the learning rate schedule."""
    whole, first, second = learner(mesh, 0), learner(mesh, 0), learner(mesh, 1)
    train(whole, range(1, 5))
    train(first, range(1, 3))
    checkpoint.save(first, tmp_path / "c")
    checkpoint.load(second, tmp_path / "c")
    train(second, range(3, 5))
    for name, expected in local_shards(whole.model).items():
        torch.testing.assert_close(local_shards(second.model)[name], expected, atol=0, rtol=0)


def finished(output_dir: Path, step: int, keep: int = 2) -> Path:
    folder = checkpoint.folder_of(output_dir, step)
    checkpoint.unfinished(folder).mkdir(parents=True)
    checkpoint.complete(folder, Progress(step, 8 * step, {}), keep)
    return folder


def test_complete_or_absent_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    assert checkpoint.to_resume("latest", tmp_path) is None
    assert checkpoint.to_resume("none", tmp_path) is None
    folders = [finished(tmp_path, step) for step in (2, 9, 10)]
    checkpoint.unfinished(checkpoint.folder_of(tmp_path, 11)).mkdir()  # the run died while it wrote
    assert checkpoint.found(tmp_path / "checkpoints") == folders[1:]
    assert checkpoint.to_resume("latest", tmp_path) == folders[2]
    assert checkpoint.to_resume(str(folders[1]), tmp_path) == folders[1]
    assert checkpoint.read_progress(folders[2]) == Progress(10, 80, {})
    assert finished(tmp_path, 10) == folders[2]  # written again
    with pytest.raises(UserError, match=r"resume=.*/nowhere: no checkpoint, its progress\.json cannot be read"):
        checkpoint.to_resume(str(tmp_path / "nowhere"), tmp_path)


def work(ledger: Ledger, steps: range, dead: int) -> list[list[int]]:
    """Rollouts run ahead as far as they may; every `dead`-th prompt has nothing to learn."""
    batches = []
    for step in steps:
        while (lease := ledger.lease("w", 0.0, 1e9, step - 1)) is not None:
            ledger.scored(lease.ordinal, lease.attempt, trainable=bool(lease.ordinal % dead))
        batch = ledger.take(step)
        assert batch is not None
        batches.append(batch)
        ledger.trained(step)
    return batches


@pytest.mark.parametrize("max_age", [0, 2])
def test_a_ledger_goes_on_where_another_stood(max_age: int) -> None:
    """What was started and not trained is started again; no prompt is trained twice or left out."""
    whole, first = Ledger(prompts_per_step=4, max_age=max_age, steps=6), Ledger(prompts_per_step=4, max_age=max_age, steps=6)
    expected = work(whole, range(1, 7), dead=5)
    begun = work(first, range(1, 4), dead=5)
    progress = first.progress()
    assert progress.step == 3
    assert max(begun[-1]) < progress.next_ordinal <= first.started
    second = Ledger(prompts_per_step=4, max_age=max_age, steps=6, after=progress)
    assert begun + work(second, range(4, 7), dead=5) == expected
    assert second.over
    assert second.counts.trained == 24
