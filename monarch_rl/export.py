"""The newest weights of a run as a Hugging Face directory."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl import checkpoint
from monarch_rl.config import Config, UserError
from monarch_rl.configure import load

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.causal_lm."
"""What the names of weights in a checkpoint begin with."""


@dataclass(frozen=True)
class Weights:
    """Where the newest weights of a run are."""

    path: Path
    step: int
    is_checkpoint: bool
    """a folder of torch's distributed checkpoint; else a Hugging Face directory"""


def newest(output_dir: Path) -> Weights:
    """The newer of the model that a run left at its end and its last checkpoint.

    Raises:
        UserError: there is neither.
    """
    complete = checkpoint.found(output_dir / "checkpoints")
    found = [(_written(path / checkpoint.PROGRESS), Weights(path, checkpoint.read_progress(path).step, True)) for path in complete]
    model = output_dir / "model"
    if (model / "config.json").is_file():
        found.append((_written(model / "config.json"), Weights(model, _last_step(output_dir), False)))
    if not found:
        raise UserError(f"{output_dir} holds no weights yet: neither model/ nor a checkpoint in checkpoints/")
    return max(found, key=lambda each: each[0])[1]


def export(output_dir: Path, to: Path | None = None, dtype: str | None = None, *, adapter: bool = False) -> Path:
    """Write the newest weights to `to`, in `dtype` (None: the run's `model.dtype`); the directory.

    Args:
        adapter: of a run with `model.lora.rank` the adapters alone, in peft's format and float32; else they are merged.

    Raises:
        UserError: there are none, or the directory is in use.
    """
    weights = newest(output_dir)
    to = to or output_dir / "export"
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} is not empty; choose another folder with --to")
    config = load([f"recipe={output_dir / 'config.yaml'}", f"output_dir={output_dir}"]).config
    model = config.model
    if adapter and not model.lora.rank:
        raise UserError(f"{output_dir}: the run trained all weights (model.lora.rank=0), so it has no adapter")
    if adapter and not weights.is_checkpoint:
        shutil.copytree(output_dir / "adapter", to, dirs_exist_ok=True)
    elif weights.is_checkpoint and model.lora.rank:
        _write_adapted(weights.path, config, to, None if adapter else dtype or model.dtype)
    else:
        _write(weights, model.path, to, dtype or model.dtype)
    return to


def _write(weights: Weights, base: str, to: Path, dtype: str) -> None:
    import torch
    from transformers import AutoTokenizer

    from monarch_rl.models import load_causal_lm, resolve_path

    causal_lm: Any = load_causal_lm(base if weights.is_checkpoint else str(weights.path), getattr(torch, dtype))
    if weights.is_checkpoint:
        fill(causal_lm, read_checkpoint(weights.path)[0], weights.path)
    causal_lm.save_pretrained(to)
    AutoTokenizer.from_pretrained(resolve_path(base)).save_pretrained(to)


def _write_adapted(folder: Path, config: Config, to: Path, dtype: str | None) -> None:
    """Base model and adapters of a checkpoint merged; without `dtype` the adapters alone."""
    import torch

    from monarch_rl.models import PolicyModel, add_adapters, base_weights, digest, load_causal_lm, save_adapters, save_pretrained

    causal_lm = load_causal_lm(config.model.path)
    found, base = read_checkpoint(folder)
    if base != digest(base_weights(causal_lm)):
        raise UserError(f"{folder}: its adapters were trained on other weights than those of model.path={config.model.path}")
    policy = PolicyModel(add_adapters(causal_lm, config.model.lora, config.seed), config.trainer.logprob_chunk)
    fill(policy.causal_lm, found, folder)
    if dtype is None:
        save_adapters(policy, to)
    else:
        save_pretrained(policy, to, config.model.path, getattr(torch, dtype))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], int]:
    """The weights in a folder of torch's distributed checkpoint, whole, by their names in the model, and the digest of the base model where
    they are adapters; of the optimizer nothing is read.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as read

    checkpoint.check_metadata(path)
    reader = FileSystemReader(path)
    there = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in there.items()
        if name.startswith(WEIGHTS) and isinstance(found, TensorStorageMetadata)
    }
    if checkpoint.BASE in there:
        state[checkpoint.BASE] = torch.zeros(1, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be here
        read(state, storage_reader=reader, no_dist=True)
    base = int(state.pop(checkpoint.BASE, 0))
    return {name.removeprefix(WEIGHTS): weight for name, weight in state.items()}, base


def fill(causal_lm: Any, weights: dict[str, Tensor], path: Path) -> None:
    """Put the weights of a checkpoint into a model, of one with adapters into these. Raises UserError: they are of another model."""
    own = {name: parameter for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    lacking = sorted(own.keys() - weights.keys())
    if lacking:
        raise UserError(f"{path}: the checkpoint lacks {len(lacking)} weights of the model, e.g. {lacking[0]}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise UserError(f"{path}: {name} is {list(weights[name].shape)} there and {list(parameter.shape)} in the model")
        parameter.data.copy_(weights[name])


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _last_step(output_dir: Path) -> int:
    from monarch_rl.observe.report import read_rows

    rows = read_rows(output_dir / "metrics.jsonl", last_bytes=1 << 20)
    return int(rows[-1]["step"]) if rows else 0
