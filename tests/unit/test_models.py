"""Saving a model, without processes; the rest of it is in tests/actors/test_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch_rl.models import PolicyModel, save_pretrained
from monarch_rl.tasks.tiny import build_model


def test_a_model_that_cannot_be_saved_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(OSError, match=f"the model cannot be saved in {tmp_path}/afile/model: .*Not a directory"):
        save_pretrained(PolicyModel(build_model(0), 64), tmp_path / "afile" / "model", "tiny", torch.float32)
