"""Hugging Face causal LM ↔ FSDP2: load, shard, read the local shards, save."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from monarch_rl.algorithms.logprobs import Kept, token_logprobs
from monarch_rl.config import UserError
from monarch_rl.rendering import local_directory
from monarch_rl.router_replay import Replay
from monarch_rl.types import MASK, ROUTING, Rows

disable_progress_bar()  # several ranks would draw over each other and over the console


class PolicyModel(nn.Module):
    """A causal LM whose forward gives log-probabilities of chosen tokens.

    Body and head run inside one forward, so that FSDP2's root keeps embedding and head (tied or not) gathered for both,
    also while chunks of the head are computed again in the backward pass.
    """

    def __init__(self, causal_lm: PreTrainedModel, logprob_chunk: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval()  # no dropout: the ratio to the sampler must be 1 where weights are equal
        self.logprob_chunk = logprob_chunk
        self.replay = Replay(causal_lm)

    def forward(
        self, inputs_BT: Tensor, positions_N: Tensor, targets_N: Tensor, temperatures_N: Tensor, channels: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy, [N] float32, see `Batch` for the arguments and `token_logprobs`.

        `channels`: from `on_device`.

        Rows are padded on the right, where a causal model does not look: no attention mask, which also lets attention take
        its fast path.
        """
        channels = channels or {}
        self.replay.use(channels.get(ROUTING))
        hidden_BTD = self.causal_lm.base_model(input_ids=inputs_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, positions_N)
        head = self.causal_lm.get_output_embeddings()
        return token_logprobs(hidden_ND, targets_N, head, temperatures_N, self.logprob_chunk, channels.get(MASK))


def on_device(channels: Mapping[str, Rows | NDArray[Any]], device: torch.device) -> dict[str, Any]:
    """`Batch.channels` as tensors: ragged ones as `Kept`, the others as they are, int64."""
    made: dict[str, Any] = {}
    for name, channel in channels.items():
        if isinstance(channel, Rows):
            made[name] = Kept(_integers(channel.values, device), _integers(channel.offsets, device))
        else:
            made[name] = _integers(channel, device)
    return made


def _integers(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def resolve_path(path: str) -> str:
    """The directory behind `model.path`, or the name of a model on the Hub.

    Raises:
        UserError: a directory without config.json, or something that is neither a directory nor can name a Hub model.
    """
    directory = local_directory(path)
    if directory is None:
        return path
    if not (directory / "config.json").is_file():
        raise UserError(f"model.path={path}: the directory has no config.json, so it is no Hugging Face model")
    return str(directory)


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in host memory.

    Raises:
        UserError: nothing there, weights missing, not a causal LM, or one whose logits are more than head(hidden states).
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_path(path), dtype=dtype, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: cannot be loaded as a causal language model: {str(error).splitlines()[0]}") from error
    causal_lm: PreTrainedModel
    info: dict[str, Any]
    causal_lm, info = loaded
    if info["missing_keys"]:
        raise UserError(f"model.path={path}: the checkpoint lacks {len(info['missing_keys'])} weights, e.g. {min(info['missing_keys'])}")
    if not _has_plain_head(causal_lm):
        name = type(causal_lm).__name__
        raise UserError(f"model.path={path}: {name} changes its logits after the head (a scale or a soft cap), which the trainer cannot do")
    return causal_lm


@torch.no_grad()
def _has_plain_head(causal_lm: PreTrainedModel) -> bool:
    """Whether logits are head(last hidden state), with a linear head: `PolicyModel` takes that for granted."""
    ids_BT = torch.arange(8)[None]
    head = causal_lm.eval().get_output_embeddings()
    hidden_BTD = causal_lm.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return isinstance(head, nn.Linear) and torch.equal(head(hidden_BTD), causal_lm(input_ids=ids_BT, use_cache=False).logits)


def shard(model: PolicyModel, device_mesh: DeviceMesh, *, bf16: bool, activation_checkpointing: bool) -> PolicyModel:
    """Moves the model to the mesh's device and shards it in place: each decoder layer, then the rest.

    Args:
        device_mesh: one-dimensional; on CUDA the process has chosen its device before.
        bf16: forward and backward in bfloat16; weights, gradient reduction and optimizer stay float32.
        activation_checkpointing: keep only the inputs of each layer for the backward pass.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in decoder_layers(model.causal_lm):
        if activation_checkpointing:
            # Inside of FSDP's hooks, which stay on the module, so that weights are gathered once for recomputation and backward.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer, mesh=device_mesh, mp_policy=policy)
    # Of the root's inputs only temperatures are no integers; they are not to be rounded.
    fully_shard(model, mesh=device_mesh, mp_policy=replace(policy, cast_forward_inputs=False))
    return model


def shard_reference(causal_lm: PreTrainedModel, device_mesh: DeviceMesh, *, bf16: bool, logprob_chunk: int) -> PolicyModel:
    """A frozen copy to compare the policy with, sharded like it; between two forward passes nothing of it is gathered."""
    model = PolicyModel(causal_lm.requires_grad_(False), logprob_chunk)
    sharded: Any = shard(model, device_mesh, bf16=bf16, activation_checkpointing=False)
    sharded.set_reshard_after_forward(True)
    return model


def decoder_layers(causal_lm: nn.Module) -> nn.ModuleList:
    """The list of layers: of all module lists the one with most parameters, the outermost where several have as many.

    Raises:
        UserError: the model has no list of layers.
    """
    lists = [module for module in causal_lm.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UserError(f"{type(causal_lm).__name__} has no list of decoder layers to shard")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def local_shards(model: PolicyModel) -> dict[str, Tensor]:
    """This rank's rows of each weight (may be none), float32, sharing memory with the live parameters.

    Keys are the Hugging Face names of `named_parameters()`: a tied head is not listed beside its embedding.
    """
    return {name: p.to_local() if isinstance(p, DTensor) else p.data for name, p in model.causal_lm.named_parameters()}


def full_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Each weight whole, float32, on this rank's device; a collective."""
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.data for name, p in model.causal_lm.named_parameters()}


def save_pretrained(model: PolicyModel, path: str | Path, tokenizer_from: str, dtype: torch.dtype) -> None:
    """Writes a Hugging Face directory (safetensors, configs, tokenizer) in `dtype` from rank 0; all ranks must call it.

    Raises:
        UserError: `tokenizer_from` has no tokenizer.
    """
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    weights = {}
    for name, parameter in model.causal_lm.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
        if first_rank:
            weights[name] = full.to("cpu", dtype)
    if first_rank:
        _write(model.causal_lm, weights, Path(path), tokenizer_from, dtype)


def _write(causal_lm: PreTrainedModel, weights: dict[str, Tensor], path: Path, tokenizer_from: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        copy = AutoModelForCausalLM.from_config(causal_lm.config, dtype=dtype)
    unmatched = copy.load_state_dict(weights | dict(causal_lm.named_buffers()), strict=False, assign=True)
    copy.tie_weights()
    if lacking := [name for name, parameter in copy.named_parameters() if parameter.is_meta]:
        raise RuntimeError(f"cannot save {path}: no values for {lacking} (left over: {unmatched.unexpected_keys})")
    copy.generation_config = causal_lm.generation_config
    draft = path.with_name(f".{path.name}")  # what is half written is no model
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)  # transformers would only log that it cannot
        copy.save_pretrained(draft)
        AutoTokenizer.from_pretrained(resolve_path(tokenizer_from)).save_pretrained(draft)
        path.mkdir(exist_ok=True)
        for file in draft.iterdir():
            file.replace(path / file.name)
        draft.rmdir()
    except Exception as error:  # of a full disk, for one, which does not say where
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"the model cannot be saved in {path}: {str(error).partition(chr(10))[0]}") from error
