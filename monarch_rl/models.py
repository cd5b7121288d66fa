"""Hugging Face causal LM ↔ FSDP2: load, shard, read the local shards, save."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
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
from monarch_rl.model_config import LoraConfig
from monarch_rl.rendering import local_directory
from monarch_rl.router_replay import Replay
from monarch_rl.types import MASK, ROUTING, Rows
from monarch_rl.weights import adapters

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


def add_adapters(causal_lm: PreTrainedModel, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """Puts an adapter that changes nothing yet on every target and freezes all else, in place.

    Args:
        seed: of the adapters' first values, which are the same in every process.

    Raises:
        UserError: a target is no linear layer of the model.
    """
    from peft import LoraConfig as PeftConfig  # takes seconds

    targets = adapters.target_names(causal_lm, lora)
    causal_lm.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # No dropout: the ratio to the sampler must be 1 where weights are equal.
        causal_lm.add_adapter(PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"))
    return causal_lm


@contextmanager
def without_adapters(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes what its base model would. (peft's own switch touches `requires_grad`, which FSDP2 has settled.)"""
    layers: list[Any] = [module for module in causal_lm.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.set_scale(adapters.NAME, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(adapters.NAME, 1)


def has_adapters(causal_lm: PreTrainedModel) -> bool:
    return any("lora_A" in name for name, _ in causal_lm.named_parameters())


def base_weights(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Live parameters by their Hugging Face names, adapters left out; a tied head is not listed beside its embedding."""
    named = causal_lm.named_parameters()
    return {name.replace(".base_layer.", "."): p.detach() for name, p in named if f".{adapters.NAME}." not in name}


def adapter_weights(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Live parameters of the adapters, by the names that they have in peft's files."""
    infix = f".{adapters.NAME}."
    return {f"base_model.model.{name.replace(infix, '.')}": p.detach() for name, p in causal_lm.named_parameters() if infix in name}


def travelling(model: PolicyModel) -> dict[str, Tensor]:
    """What generators are sent: all weights, or the adapters, whose B has the scale multiplied in."""
    if not has_adapters(model.causal_lm):
        return base_weights(model.causal_lm)
    scale = _scale(model.causal_lm)
    return {name: p * scale if "lora_B" in name else p for name, p in adapter_weights(model.causal_lm).items()}


def local_shards(model: PolicyModel) -> dict[str, Tensor]:
    """This rank's rows (may be none) of what travels, float32; weights and A share memory with the live parameters."""
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in travelling(model).items()}


def full_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """What travels, whole, float32, on this rank's device; a collective."""
    return {name: whole(p) for name, p in travelling(model).items()}


def whole(tensor: Tensor) -> Tensor:
    """A collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_pretrained(model: PolicyModel, path: str | Path, tokenizer_from: str, dtype: torch.dtype) -> None:
    """Writes a Hugging Face directory (safetensors, configs, tokenizer) in `dtype` from rank 0; all ranks must call it.

    Raises:
        UserError: `tokenizer_from` has no tokenizer.
    """
    causal_lm, weights = model.causal_lm, {}
    pairs = adapter_weights(causal_lm)
    for name, parameter in base_weights(causal_lm).items():
        full = whole(parameter)
        if (a := pairs.get(adapters.file_name(layer := name.removesuffix(".weight"), "A"))) is not None:
            full = adapters.merged(full, whole(a), whole(pairs[adapters.file_name(layer, "B")]), _scale(causal_lm))
        if is_first_rank():
            weights[name] = full.to("cpu", dtype)
    if is_first_rank():
        _write(causal_lm, weights, Path(path), tokenizer_from, dtype)


def save_adapters(model: PolicyModel, path: str | Path) -> None:
    """Writes the two files that peft writes, float32, from rank 0; all ranks must call it."""
    from safetensors.torch import save_file

    tensors = {name: whole(p).cpu().contiguous() for name, p in adapter_weights(model.causal_lm).items()}
    if is_first_rank():
        with _draft(Path(path), "the adapters cannot be saved in") as draft:
            model.causal_lm.peft_config[adapters.NAME].save_pretrained(draft)
            save_file(tensors, draft / "adapter_model.safetensors", metadata={"format": "pt"})


def is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def digest(weights: Mapping[str, Tensor]) -> int:
    """Of names and values; equal for equal weights in the host's memory. Positive, 63 bits."""
    total = xxhash.xxh3_64()
    for name, weight in sorted(weights.items()):
        total.update(name.encode())
        total.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return int(total.intdigest() >> 1)


def _scale(causal_lm: PreTrainedModel) -> float:
    """alpha / rank of the adapters; 1 without."""
    made = getattr(causal_lm, "peft_config", None)
    return made[adapters.NAME].lora_alpha / made[adapters.NAME].r if made else 1.0


def _write(causal_lm: PreTrainedModel, weights: dict[str, Tensor], path: Path, tokenizer_from: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        copy = AutoModelForCausalLM.from_config(causal_lm.config, dtype=dtype)
    unmatched = copy.load_state_dict(weights | dict(causal_lm.named_buffers()), strict=False, assign=True)
    copy.tie_weights()
    if lacking := [name for name, parameter in copy.named_parameters() if parameter.is_meta]:
        raise RuntimeError(f"cannot save {path}: no values for {lacking} (left over: {unmatched.unexpected_keys})")
    copy.generation_config = causal_lm.generation_config
    with _draft(path, "the model cannot be saved in") as draft:
        copy.save_pretrained(draft)
        AutoTokenizer.from_pretrained(resolve_path(tokenizer_from)).save_pretrained(draft)


@contextmanager
def _draft(path: Path, failure: str) -> Iterator[Path]:
    """A folder for files that are to be in `path`: what is half written is no model.

    Raises:
        OSError: `failure`, where, and why.
    """
    draft = path.with_name(f".{path.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)  # transformers would only log that it cannot
        yield draft
        path.mkdir(exist_ok=True)
        for file in draft.iterdir():
            file.replace(path / file.name)
        draft.rmdir()
    except Exception as error:  # of a full disk, for one, which does not say where
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"{failure} {path}: {str(error).partition(chr(10))[0]}") from error
