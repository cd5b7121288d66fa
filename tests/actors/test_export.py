"""The newest weights of a run become a Hugging Face directory, from the model that it left or from a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from monarch_rl.checkpoint import complete, folder_of, unfinished
from monarch_rl.config import Config, UserError
from monarch_rl.configure import write
from monarch_rl.export import export, newest
from monarch_rl.lives import Progress
from monarch_rl.model_config import ModelConfig
from monarch_rl.models import load_causal_lm
from tests.random_models import write_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The settings of a run that trains the built-in model."""
    folder = tmp_path / "run"
    write(Config(output_dir=str(folder), model=ModelConfig(path="tiny")), folder / "config.yaml")
    return folder


def checkpoint(run: Path, step: int, add: float, model: str = "tiny") -> dict[str, Any]:
    """As a run leaves it: the base model with `add` on every weight, and some of an optimizer; the weights."""
    weights = {name: parameter.detach() + add for name, parameter in load_causal_lm(model).named_parameters()}
    state = {"model": {f"causal_lm.{name}": weight for name, weight in weights.items()}, "optimizer": {"state": {"x": torch.ones(3)}}}
    with pytest.warns(UserWarning, match="single process"):
        save(state, checkpoint_id=unfinished(folder := folder_of(run, step)), no_dist=True)
    complete(folder, Progress(step, 32 * step, {}), keep=2)
    return weights


def test_the_last_checkpoint_of_a_run_that_died(run: Path) -> None:
    checkpoint(run, 10, add=1.0)
    weights = checkpoint(run, 20, add=2.0)
    unfinished(folder_of(run, 30)).mkdir()  # was being written
    assert newest(run).step == 20
    path = export(run)
    exported = AutoModelForCausalLM.from_pretrained(path)
    found = dict(exported.named_parameters())
    assert found.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(found[name], weight)] == []
    assert AutoTokenizer.from_pretrained(path).eos_token_id == exported.generation_config.eos_token_id


def test_the_newer_of_model_and_checkpoint_in_another_dtype(run: Path, tmp_path: Path) -> None:
    weights = checkpoint(run, 10, add=1.0)
    load_causal_lm("tiny").save_pretrained(run / "model")
    AutoTokenizer.from_pretrained(load_causal_lm("tiny").name_or_path).save_pretrained(run / "model")
    assert not newest(run).is_checkpoint
    os.utime(run / "model" / "config.json", (1.0, 1.0))
    assert newest(run).is_checkpoint
    path = export(run, tmp_path / "to", "bfloat16")
    found = dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto").named_parameters())
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    assert [name for name, weight in weights.items() if not torch.equal(found[name], weight.bfloat16())] == []


def test_a_checkpoint_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    checkpoint(run, 10, add=1.0, model=str(write_model(tmp_path / "llama", "llama")))
    with pytest.raises(UserError, match=r"step_10: (the checkpoint lacks \d+ weights of the model, e\.g\. |.* is \[.*\] there and )"):
        export(run)
