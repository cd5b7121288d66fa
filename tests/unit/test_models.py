"""Where a model and a checkpoint cannot be written; the rest of it is in tests/actors/test_models.py and tests/e2e/test_session.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_rl import checkpoint
from monarch_rl.config import UserError
from monarch_rl.models import PolicyModel, save_pretrained
from monarch_rl.tasks.tiny import build_model
from tests.batches import save


def test_a_model_that_cannot_be_saved_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(OSError, match=f"the model cannot be saved in {tmp_path}/afile/model: .*Not a directory"):
        save_pretrained(PolicyModel(build_model(0), 64), tmp_path / "afile" / "model", "tiny", torch.float32)


def learner(inputs: int) -> Any:
    model = torch.nn.Linear(inputs, 2)
    return SimpleNamespace(
        model=model, adapted=False, parameters=list(model.parameters()), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_cannot_be_written_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(OSError, match=f"the checkpoint cannot be written in {tmp_path}/afile/step_1: .*Not a directory"):
        save(learner(2), tmp_path / "afile" / "step_1")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_another_model_is_a_mistake_of_the_users(tmp_path: Path) -> None:
    save(learner(2), tmp_path / "step_1")
    checkpoint.load(learner(2), tmp_path / "step_1")
    with pytest.raises(UserError, match=f"resume={tmp_path}/step_1: does not fit this model, or is damaged: .*[Ss]ize mismatch"):
        checkpoint.load(learner(3), tmp_path / "step_1")
