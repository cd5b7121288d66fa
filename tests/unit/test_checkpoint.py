from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from monarch_rl import arrays, checkpoint
from monarch_rl.config import TrainerConfig, UserError
from monarch_rl.learner import Learner
from monarch_rl.ledger import Ledger
from monarch_rl.lives import Progress
from monarch_rl.models import local_shards
from monarch_rl.types import Group, Prompt, Rows, Version
from tests.batches import episode, sampled_by, save, shards, small_model


def learner(mesh: DeviceMesh, seed: int) -> Learner:
    return Learner(small_model(seed), TrainerConfig(schedule="linear", warmup_steps=2), total_steps=6, device_mesh=mesh)


def train(one: Learner, steps: range) -> None:
    for step in steps:
        draw = random.Random(step)
        group = [episode(3, draw.randint(2, 9), draw, reward=draw.random()) for _ in range(4)]
        sampled_by(small_model(), group, 1.0)
        one.step(shards([group], step=step)[0])


def test_steps_that_are_taken_while_it_is_written_are_not_in_it(mesh: DeviceMesh, tmp_path: Path) -> None:
    """What is written was copied before the call returned."""
    first, second = learner(mesh, 0), learner(mesh, 1)
    train(first, range(1, 3))
    then = {name: shard.clone() for name, shard in local_shards(first.model).items()}
    save(first, tmp_path / "c", meanwhile=lambda: train(first, range(3, 5)))
    checkpoint.load(second, tmp_path / "c")
    for name, expected in then.items():
        torch.testing.assert_close(local_shards(second.model)[name], expected, atol=0, rtol=0)
        assert not torch.equal(local_shards(first.model)[name], expected)


def test_a_checkpoint_that_cannot_be_written_is_one_line(mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"^the checkpoint cannot be written in .*file/c: .*") as raised:
        save(learner(mesh, 0), tmp_path / "file" / "c")
    assert "\n" not in str(raised.value)


def test_training_goes_on_bit_for_bit(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Model, both moments of AdamW, its step count and the place in the learning rate schedule."""
    whole, first, second = learner(mesh, 0), learner(mesh, 0), learner(mesh, 1)
    train(whole, range(1, 5))
    train(first, range(1, 3))
    save(first, tmp_path / "c")
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
    """What was finished is trained, what was started and not finished is started again; no prompt is trained twice or left out."""
    whole, first = Ledger(prompts_per_step=4, max_age=max_age, steps=6), Ledger(prompts_per_step=4, max_age=max_age, steps=6)
    expected = work(whole, range(1, 7), dead=5)
    begun = work(first, range(1, 4), dead=5)
    assert first.progress() == Progress(3, first.progress().next_ordinal, dict(first.dropped))
    second = Ledger(prompts_per_step=4, max_age=max_age, steps=6)
    second.load_state_dict(first.state_dict())
    assert second.counts.scored == first.counts.scored
    assert begun + work(second, range(4, 7), dead=5) == expected
    assert second.over
    assert second.counts == whole.counts
    assert [second.life(o)._replace(since=0) for o in range(30)] == [whole.life(o)._replace(since=0) for o in range(30)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("max_age", "window"), [(0, 1), (2, 1), (2, 5)])
def test_what_was_finished_can_be_sampled_again_under_other_rules(max_age: int, window: int) -> None:
    """P goes from 4 to 3: the same prompts are pending, each with the bound of the new rule, and none is handed out too early."""
    first = Ledger(prompts_per_step=4, max_age=3)
    work(first, range(1, 4), dead=5)
    second = Ledger(prompts_per_step=3, max_age=max_age, window=window, steps=9)
    second.load_state_dict(first.state_dict(), keep_groups=False)
    waiting = second.counts.pending
    assert waiting == first.counts.scored == 12
    batches = work(second, range(4, 10), dead=5)
    assert all(len(batch) == 3 for batch in batches)
    trained = [ordinal for batch in batches for ordinal in batch]
    assert len(set(trained)) == 18
    assert min(trained) == first.progress().next_ordinal


def test_what_was_sampled_ahead_is_trained_after_the_data_have_been_handed_out() -> None:
    """Case 4: eight prompts, the first of them dead, four sampled ahead, two to a step. Killed after one step, the rest is trained once."""

    def data() -> Ledger:
        return Ledger(prompts_per_step=2, max_age=1, ordinals=8)

    first = data()
    assert work(first, range(1, 2), dead=99) == [[1, 2]]
    second = data()
    second.load_state_dict(first.state_dict())
    assert work(second, range(2, 5), dead=99) == [[3, 4], [5, 6], [7]]
    assert second.take(5) == []
    assert second.over


def groups() -> list[Group]:
    draw = random.Random(0)
    first = [episode(3, draw.randint(0, 5), draw, reward) for reward in (1.0, None, 0.1 + 0.2)]
    first[1].error = "TypeError: kein Wert ☹"
    first[0].logprobs_T[-1] = float("nan")
    second = [episode(2, 4, draw, reward=float("nan"), version=Version(1, 7)) for _ in range(2)]
    second[0].transcript, second[1].truncated, second[1].temperature = "⟨x⟩", True, 0.7
    return [Group(Prompt(4, "1+1=", "2", "sums"), first), Group(Prompt(5, [{"role": "user", "content": "?"}], Fraction(1, 2)), second)]


def test_groups_come_back_bit_for_bit(tmp_path: Path) -> None:
    written = groups()
    checkpoint.write_buffer(tmp_path, Ledger(prompts_per_step=1, max_age=0).state_dict(), written)
    _, found = checkpoint.read_buffer(tmp_path)
    assert [group.prompt for group in found] == [written[0].prompt, replace(written[1].prompt, answer="1/2")]
    for old, new in zip([e for g in written for e in g.episodes], [e for g in found for e in g.episodes], strict=True):
        for field in fields(old):
            was, now = getattr(old, field.name), getattr(new, field.name)
            if isinstance(was, np.ndarray):
                assert (now.dtype, now.shape, now.tobytes()) == (was.dtype, was.shape, was.tobytes()), field.name
            else:
                assert now == was or (now != now and was != was), field.name


def test_arrays_come_back_wherever_they_are(tmp_path: Path) -> None:
    """As channels may hold them beside the tokens."""
    inside = episode(2, 3, random.Random(0), 1.0)
    inside.channels["mask"] = Rows(np.arange(4, dtype=np.int32), np.array([0, 1, 4], np.int32), start=3)
    answer = {"mask": [np.zeros((2, 0, 3), np.int16), inside], "text": None, "number": np.float32(0.5)}
    arrays.write(tmp_path / "x.npz", *arrays.pack([Group(Prompt(0, "", answer), [])]))
    (found,) = arrays.unpack(*arrays.read(tmp_path / "x.npz"))
    empty, inner = found.prompt.answer["mask"]
    assert (empty.shape, empty.dtype) == ((2, 0, 3), np.int16)
    np.testing.assert_array_equal(inner.ids_T, inside.ids_T)
    rows = inner.channels["mask"]
    assert (rows.values.tolist(), rows.offsets.tolist(), rows.start) == ([0, 1, 2, 3], [0, 1, 4], 3)
    assert (found.prompt.answer["text"], found.prompt.answer["number"]) == (None, 0.5)


def test_an_empty_buffer_is_a_buffer(tmp_path: Path) -> None:
    checkpoint.write_buffer(tmp_path, Ledger(prompts_per_step=1, max_age=0).state_dict(), [])
    state, found = checkpoint.read_buffer(tmp_path)
    assert found == []
    Ledger(prompts_per_step=1, max_age=0).load_state_dict(state)


def test_a_checkpoint_runs_no_code_when_it_is_read(tmp_path: Path) -> None:
    """An npz with a pickle in it is refused, and a damaged one is named."""
    checkpoint.write_buffer(tmp_path, Ledger(prompts_per_step=1, max_age=0).state_dict(), groups())
    np.savez(tmp_path / checkpoint.GROUPS, about=np.array([object()]))
    with pytest.raises(UserError, match=r"groups\.npz: cannot be read: Object arrays cannot be loaded"):
        checkpoint.read_buffer(tmp_path)
    (tmp_path / checkpoint.LEDGER).write_bytes(b"PK")
    with pytest.raises(UserError, match=r"ledger\.npz: cannot be read"):
        checkpoint.read_buffer(tmp_path)


SAVER = """
import sys
from pathlib import Path
from monarch_rl import checkpoint
from monarch_rl.lives import Progress

state, groups = checkpoint.read_buffer(Path(sys.argv[1]))
for step in range(1, 1_000_000):
    folder = checkpoint.folder_of(Path(sys.argv[2]), step)
    checkpoint.write_buffer(checkpoint.unfinished(folder), state | {"step": step}, groups)
    checkpoint.complete(folder, Progress(step, 4 * step, {}), keep=2)
"""


def newest(output_dir: Path) -> int:
    try:
        folder = checkpoint.to_resume("latest", output_dir)
    except UserError:  # an old one was removed while they were listed
        return newest(output_dir)
    return 0 if folder is None else checkpoint.read_progress(folder).step


def test_a_run_that_is_killed_while_it_saves_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Case 12: kill -9 at 20 random points of one save after another: the newest complete one loads, and is as new as was seen before."""
    ledger = Ledger(prompts_per_step=4, max_age=2)
    work(ledger, range(1, 2), dead=5)
    checkpoint.write_buffer(tmp_path / "begin", ledger.state_dict(), 50 * groups())
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SAVER, str(tmp_path / "begin")]
    folders = [tmp_path / str(kill) for kill in range(20)]
    for four in (folders[at : at + 4] for at in range(0, 20, 4)):
        children = [subprocess.Popen([*command, str(folder)], env=environment) for folder in four]
        for child, folder in zip(children, four, strict=True):
            while newest(folder) < 3:
                assert child.poll() is None
                time.sleep(0.01)
            time.sleep(random.random() / 20)
            seen = newest(folder)
            child.kill()
            child.wait()
            found = checkpoint.to_resume("latest", folder)
            assert found is not None
            assert newest(folder) >= seen
            state, loaded = checkpoint.read_buffer(found)
            assert (state["step"], len(loaded)) == (newest(folder), 100)
            Ledger(prompts_per_step=4, max_age=2).load_state_dict(state)


def test_checkpoints_of_another_way_are_set_aside(tmp_path: Path) -> None:
    """A run that goes on from step 2 does not find step 9 as its latest."""
    folders = [finished(tmp_path, step, keep=3) for step in (2, 9, 10)]
    checkpoint.set_aside(tmp_path, after=2)
    assert checkpoint.found(tmp_path / "checkpoints") == folders[:1]
    assert (tmp_path / "checkpoints" / "aside_step_10" / checkpoint.PROGRESS).is_file()
