"""`record/`: what a replay needs, complete or absent; what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_rl import recorded, resume
from monarch_rl.cluster.machine import Facts
from monarch_rl.cluster.placement import place
from monarch_rl.config import Config, ConfigError, UserError, validate
from monarch_rl.observe.metrics import MetricsFile
from monarch_rl.output import check_output_dir
from tests.unit.test_checkpoint import groups
from tests.unit.test_resume import Rows


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        recorded.write(tmp_path, step, groups()[: 1 + step % 2], lineage=step)
    found = recorded.read(tmp_path, 1)
    assert found is not None
    assert ([group.ordinal for group in found.groups], found.lineage) == ([4, 5], 1)
    assert recorded.read(tmp_path, 3) is None
    with pytest.raises(UserError, match=r"replay=.*: record/step_3\.npz is missing"):
        recorded.check(tmp_path)
    witness = recorded.Witness(Config(output_dir=str(tmp_path), record=True), exact=False)
    for step in (1, 2, 3, 10):
        witness.see(step, [f"{step:x}", "0"])
    recorded.cut(tmp_path, after=2)
    assert recorded.check(tmp_path) == 2
    with (tmp_path / "record" / "weights.jsonl").open("a") as file:
        file.write('{"step": 3, "ra')  # killed
    assert recorded.fingerprints(tmp_path) == {1: ["1", "0"], 2: ["2", "0"]}
    recorded.cut(tmp_path, after=0)
    with pytest.raises(UserError, match="a run records its groups with record=true"):
        recorded.check(tmp_path)


def test_a_replay_tells_what_makes_it_another_training(tmp_path: Path) -> None:
    run = Config(output_dir=str(tmp_path / "run"), record=True)
    Path(run.output_dir).mkdir()
    resume.start(run, Rows())
    recorded.write(tmp_path / "run", 1, groups())
    replay = Config(output_dir=str(tmp_path / "again"), replay=run.output_dir)
    replay.generator.temperature, replay.buffer.prompts_per_step = 0.5, 3
    assert resume.start(replay, Rows())[1].told == ["replay: 1 recorded steps"]
    recorded.Witness(run, exact=False).see(1, ["a"])
    told, _, exact = resume.start(replay, Rows())[1]
    assert (told, exact) == (["replay: 1 recorded steps; on CPUs the weights are compared after 1 of them"], True)
    replay.trainer.lr = 1.0
    told, _, exact = resume.start(replay, Rows())[1]
    assert (told[0], exact) == ("replay: 1 recorded steps", False)
    assert told[1:] == ["replay: trainer.lr=1.0, was 0.0003: weights will differ"]


def test_a_replay_ends_at_the_first_step_that_leads_to_other_weights(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    witness = recorded.Witness(Config(output_dir=str(tmp_path), record=True), exact=False)
    for step in (1, 2, 4):
        witness.see(step, ["a", f"{step}"])
    replay = Config(output_dir=str(tmp_path / "again"), replay=str(tmp_path))
    compared = recorded.Witness(replay, exact=True)
    compared.see(1, ["a", "1"])
    compared.see(3, ["b", "1"])  # the run was killed before it had written this one
    with pytest.raises(
        UserError, match=r"step 2 is the first after which the weights are not those of the recorded run \(trainer rank 1\)"
    ):
        compared.see(2, ["a", "3"])
    recorded.Witness(replay, exact=False).see(2, ["a", "3"])


def test_a_replay_needs_trainers_and_groups_alone(tmp_path: Path) -> None:
    facts = Facts("here", 2, (), "python", {})
    assert [processes.name for processes in place(Config(replay="x"), [facts])] == ["trainer", "replay_buffer"]


def test_a_replay_is_a_run_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replay: trains from the first step to the last; leave out record, resume and checkpoint"):
        validate(Config(replay="x", resume="latest"))
    with pytest.raises(UserError, match="is the run that replay names; name another folder"):
        check_output_dir(Config(replay=str(tmp_path), output_dir=str(tmp_path)))


def test_the_last_row_can_be_written_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        file.write({"step": step})
    file.rewrite({"step": 2, "eval/accuracy": 0.5})
    file.write({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 1}', '{"step": 2, "eval/accuracy": 0.5}', '{"step": 3}']
