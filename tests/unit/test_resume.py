"""What is told and what is kept when a run goes on under another configuration or with other data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from monarch_rl import checkpoint, resume
from monarch_rl.config import Config, UserError
from monarch_rl.lives import Progress
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt, Split

AGAIN = "resume: groups that were finished and not trained do not fit this any more; their prompts are sampled again"


class Rows(Task):
    name = "rows"

    def __init__(self, size: int | None = 100, offset: int = 0) -> None:
        self.size, self.offset = size, offset

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        return Prompt(ordinal, f"row {ordinal + self.offset}", answer=ordinal)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 0.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run whose checkpoint of step 3 is the latest."""
    config = Config(output_dir=str(tmp_path), resume="latest")
    folder = checkpoint.folder_of(tmp_path, 3)
    checkpoint.unfinished(folder).mkdir(parents=True)
    resume.write(checkpoint.unfinished(folder), config, Rows())
    checkpoint.complete(folder, Progress(3, 96, {}), keep=2)
    return config


def test_nothing_is_told_where_nothing_has_changed(config: Config) -> None:
    folder, resumed = resume.start(config, Rows())
    assert folder is not None
    assert folder.name == "step_3"
    assert resumed == resume.Resumed([], keep_groups=True)
    config.output_dir, config.cluster.nodes, config.trackers = "elsewhere", 2, ["wandb"]
    assert resume.compare(folder, config, Rows()).told == []


def test_a_changed_configuration_is_told(config: Config) -> None:
    config.trainer.lr, config.buffer.max_age, config.trainer.ranks = 1e-5, 1, 2
    told = ["resume: buffer.max_age=1, was 2 in the checkpoint", "resume: trainer.ranks=2, was 1 in the checkpoint"]
    told += ["resume: trainer.lr=1e-05, was 0.0003 in the checkpoint"]
    assert resume.start(config, Rows())[1] == resume.Resumed(told, keep_groups=True)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("buffer", "prompts_per_step", 16), ("buffer", "window", 3), ("generator", "group_size", 4), ("buffer", "max_age", 0)],
)
def test_groups_that_do_not_fit_are_sampled_again(config: Config, section: str, key: str, value: int) -> None:
    was = getattr(getattr(config, section), key)
    setattr(getattr(config, section), key, value)
    resumed = resume.start(config, Rows())[1]
    assert resumed == resume.Resumed([f"resume: {section}.{key}={value}, was {was} in the checkpoint", AGAIN], keep_groups=False)


@pytest.mark.parametrize("task", [Rows(offset=1), Rows(size=99), Rows(size=None)])
def test_changed_data_are_noticed(config: Config, task: Rows) -> None:
    told, kept, _ = resume.start(config, task)[1]
    assert told == ["resume: task rows makes other prompts than it did for the checkpoint; their ordinals go on", AGAIN]
    assert not kept


def test_a_new_run_has_nothing_to_go_on_from(config: Config) -> None:
    config.resume = "none"
    assert resume.start(config, Rows()) == (None, resume.Resumed([], keep_groups=True))


def test_a_checkpoint_without_its_settings_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_3" / resume.SETTINGS).unlink()
    with pytest.raises(UserError, match=r"resume=.*step_3: its settings\.json cannot be read"):
        resume.start(config, Rows())
    shutil.rmtree(tmp_path / "checkpoints")
    assert resume.start(config, Rows())[0] is None
