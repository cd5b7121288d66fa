"""Checkpoints that a process writes beside the trainer's."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from monarch_rl import checkpoint
from monarch_rl.checkpoint import Saver
from monarch_rl.checkpoint_process import WriterProcess
from monarch_rl.config import TrainerConfig
from monarch_rl.learner import Learner
from monarch_rl.models import local_shards
from tests.batches import episode, sampled_by, shards, small_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the trainer's process writes")


def learner(mesh: DeviceMesh, seed: int) -> Learner:
    return Learner(small_model(seed), TrainerConfig(warmup_steps=0), total_steps=9, device_mesh=mesh)


def step(one: Learner, number: int) -> None:
    draw = random.Random(number)
    group = [episode(3, draw.randint(2, 9), draw, reward=draw.random()) for _ in range(4)]
    sampled_by(small_model(), group, 1.0)
    one.step(shards([group], step=number)[0])


def saved(saver: Saver, one: Learner, folder: Path) -> Exception | None:
    told: SimpleQueue[Exception | None] = SimpleQueue()
    saver.save(one, folder, told.put)
    return told.get(timeout=100)


def started(saver: Saver, one: Learner, folder: Path) -> WriterProcess:
    """Its first checkpoint is written by this process, as the other has just been started."""
    assert saved(saver, one, folder) is None
    assert saver._process is not None
    assert not saver._process._ready
    while not saver._process.is_ready():
        time.sleep(0.05)
    return saver._process


def test_it_writes_what_was_copied(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Steps that are taken meanwhile are not in it; weights, moments and step count come back bit for bit."""
    first, second = learner(mesh, 0), learner(mesh, 1)
    saver = Saver(None, apart=True)
    step(first, 1)
    process = started(saver, first, tmp_path / "a")
    step(first, 2)
    then = {name: shard.clone() for name, shard in local_shards(first.model).items()}
    moments = {key: value.clone() for key, value in first.optimizer.state[first.parameters[0]].items()}
    told: SimpleQueue[Exception | None] = SimpleQueue()
    saver.save(first, tmp_path / "b", told.put)
    step(first, 3)
    assert told.get(timeout=100) is None
    checkpoint.load(second, tmp_path / "b")
    for name, expected in then.items():
        torch.testing.assert_close(local_shards(second.model)[name], expected, atol=0, rtol=0)
        assert not torch.equal(local_shards(first.model)[name], expected)
    for key, expected in moments.items():
        torch.testing.assert_close(second.optimizer.state[second.parameters[0]][key], expected, atol=0, rtol=0)
    saver.close()
    assert process._process.poll() is not None


def test_what_it_cannot_write_is_one_line(mesh: DeviceMesh, tmp_path: Path) -> None:
    one, saver = learner(mesh, 0), Saver(None, apart=True)
    process = started(saver, one, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__0_0.distcp").mkdir()
    error = saved(saver, one, tmp_path / "b")
    assert isinstance(error, OSError)
    assert str(error).startswith(f"the checkpoint cannot be written in {tmp_path / 'b'}: ")
    assert "Is a directory" in str(error)
    assert "\n" not in str(error)
    assert saved(saver, one, tmp_path / "c") is None  # it goes on
    process._process.kill()
    error = saved(saver, one, tmp_path / "d")
    assert str(error).endswith("the process that writes it has ended (killed by signal 9)")
    saver.close()


PARENT = """
import sys, time
from queue import SimpleQueue
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from monarch_rl.checkpoint import Saver
from tests.unit.test_checkpoint_process import learner
from pathlib import Path
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
saver, told = Saver(None, apart=True), SimpleQueue()
saver.save(learner(init_device_mesh("cpu", (1,)), 0), Path(sys.argv[1]), told.put)
assert told.get() is None
print(saver._process._process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "a")], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    process = psutil.Process(pid)
    parent.kill()
    parent.wait()
    process.wait(60)
    parent.stdout.close()
