"""How a vLLM engine is set up here: which settings are ours, which are the user's, and what CPU needs."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl import engine_adapter
from monarch_rl.config import UserError
from monarch_rl.engine_channels import Recorded, record_masks, record_routing
from monarch_rl.engine_errors import EngineError
from monarch_rl.engine_experts import count_experts, experts_to_keep

if TYPE_CHECKING:
    from torch import Tensor

    from monarch_rl.model_config import LoraConfig
    from monarch_rl.weights.plan import LoadPlan, Shape

CPU_CONTEXT = 4096
"""Tokens; the longest sequence on CPU unless the model's own limit is lower or `generator.engine.max_model_len` says otherwise."""
CPU_KV_BYTES = 256 << 20
"""The KV cache on CPU, unless one sequence of full length needs more."""
CPU_BLOCK = 32
"""Tokens per KV block on CPU: prefixes shorter than a block are never shared."""


def context_length(directory: Path, overrides: Mapping[str, Any], *, cpu: bool) -> int | None:
    """Tokens of the longest sequence, as far as it can be told without vLLM; None where it cannot."""
    asked = overrides.get("max_model_len")
    if asked is not None:
        return asked if isinstance(asked, int) and asked > 0 else None
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config = config.get("text_config", config)
    most = config.get("max_position_embeddings")
    if not isinstance(most, int) or (not cpu and config.get("rope_scaling")):
        return None
    return min(most, CPU_CONTEXT) if cpu else most


def engine_environment(cpu: bool) -> dict[str, str]:
    """Variables that the engine's process needs before it imports torch."""
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # NUMA binding is told to everybody
        "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
    }
    # With more threads than idle cores torch spins: one thread is 10 to 40 times faster. Compiling helps nothing in eager mode.
    return common | ({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} if cpu else {})


def import_vllm() -> None:
    """What is imported for an engine, ahead of it; it is most of the time that one takes to start."""
    for module in ("transformers", "vllm.v1.engine.llm_engine", "monarch_rl.engine", "monarch_rl.weights.pull"):
        importlib.import_module(module)


def build_llm(
    model_path: str,
    dtype: str,
    seed: int,
    overrides: dict[str, Any],
    *,
    keep_masks: bool,
    keep_routing: bool,
    stop_texts: bool = False,
    lora: LoraConfig | None = None,
    tensor_parallel: int = 1,
) -> tuple[Any, Recorded]:
    """An LLMEngine that has sampled one token, so that what this machine cannot run fails now and not at the first request.

    Where several ranks share the weights all of them build theirs at the same time, when they have met (see `lockstep`).

    Raises:
        EngineError: vLLM has no such setting, it breaks what is promised here, or the model's routing cannot be kept.
    """
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise EngineError("the variables of engine_environment() must be set before the engine's process imports torch")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    cpu = bool(current_platform.is_cpu())
    if cpu:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # there is no Triton for CPUs
        _keep_weights_live()
        if lora:
            engine_adapter.multiply_once()
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    experts = experts_to_keep(model_path) if keep_routing else None
    # vLLM's own switches need its second model runner, which there is not on CPUs.
    switches = {"return_sampling_mask": keep_masks, "enable_return_routed_experts": experts is not None}
    own: dict[str, Any] = {"skip_tokenizer_init": not stop_texts} | ({} if cpu else {name: True for name, on in switches.items() if on})
    if lora:
        own |= engine_adapter.arguments(lora.rank, tensor_shapes(model_path, lora)[1])
    own["tensor_parallel_size"] = tensor_parallel
    if tensor_parallel > 1:
        own["distributed_executor_backend"] = "external_launcher"
    arguments = _arguments(overrides, known, model=model_path, dtype=dtype, seed=seed, **own)
    if cpu:
        arguments = _cpu_arguments(arguments)
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    try:
        _warm_up(llm)
    except Exception:
        llm.engine_core.shutdown()  # nobody else knows it yet
        raise
    _remove_meeting_file()
    if cpu and keep_masks:
        record_masks(llm)
    if cpu and experts:
        record_routing(llm, experts)
    return llm, Recorded(int(llm.model_config.get_vocab_size()), keep_masks, experts)


def _warm_up(llm: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    llm.add_request("warm-up", tokens_input([0]), SamplingParams(max_tokens=1, top_k=1, seed=0, logprobs=0, detokenize=False))
    while llm.has_unfinished_requests():
        llm.step()


def _remove_meeting_file() -> None:
    """Where an engine of one rank has met itself. Torch removes it at the orderly end of a process, to which ours do not come."""
    from torch._C._distributed_c10d import FileStore, PrefixStore
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        path: str = getattr(store, "path")  # noqa: B009 - the stub does not know it
        Path(path).unlink(missing_ok=True)


def check_split(model_path: str, ranks: int) -> None:
    """See that vLLM can share a model evenly, and in a way that a swap can repeat.

    Raises:
        EngineError: says what stands in the way.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    key = f"generator.tensor_parallel={ranks}"
    if count_experts(config) > 1:
        raise EngineError(f"{key}: a mixture of experts ({config.model_type}) cannot be shared by ranks yet; set it to 1")
    heads = int(config.num_attention_heads)
    kv = int(getattr(config, "num_key_value_heads", None) or heads)
    wide = int(getattr(config, "intermediate_size", None) or ranks)
    for count, what in ((heads, "attention heads"), (wide, "rows of its feed-forward layers")):
        if count % ranks:
            raise EngineError(f"{key}: cannot share the {count} {what} of the model evenly")
    if kv % ranks and ranks % kv:
        raise EngineError(f"{key}: can neither share nor repeat the {kv} key-value heads of the model evenly")


def salt_anew(llm: Any, salt: str) -> None:
    """What waits in vLLM's queue will be computed by the new weights, and must not find prefixes that the old ones computed."""
    for request in llm.engine_core.engine_core.scheduler.requests.values():
        if request.num_computed_tokens == 0:
            request.cache_salt = salt
            request.block_hashes = []
            request.update_block_hashes()


def _keep_weights_live() -> None:
    """On CPU vLLM packs the weights of linear layers and drops the parameters; a write to those would change nothing."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain


def _arguments(overrides: dict[str, Any], known: set[str], **own: Any) -> dict[str, Any]:
    """EngineArgs with the user's overrides, which may not undo what the versions and logprobs of tokens rest on."""
    fixed = {
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "generation_config": "vllm",
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        **own,
    }
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise EngineError(f"generator.engine.{key}: vLLM has no such setting" + (f"; did you mean {near[0]}?" if near else ""))
        if key in fixed and value != fixed[key]:
            raise EngineError(f"generator.engine.{key}: must be {fixed[key]!r} here, not {value!r}")
    return {"disable_log_stats": True, **overrides, **fixed}


def _cpu_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults for CPU, where a prompt with a seed must be prefilled in one piece."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(arguments["model"]).get_text_config()
    if not hasattr(config, "kv_lora_rank"):  # latent attention has heads of other kinds
        _check_heads(_head_size(config))
    context = int(arguments.get("max_model_len", min(config.max_position_embeddings, CPU_CONTEXT)))
    defaults = {
        "enforce_eager": True,
        "block_size": CPU_BLOCK,
        "max_num_seqs": 256,
        "max_model_len": context,
        "max_num_batched_tokens": max(context, 4096),
        "kv_cache_memory_bytes": max(CPU_KV_BYTES, _kv_bytes(config, context, arguments["dtype"])),
        "enable_chunked_prefill": False,
    }
    merged = defaults | arguments
    if merged["enable_chunked_prefill"]:
        raise EngineError("generator.engine.enable_chunked_prefill: must be False on CPU, where a split prompt cannot have a seed")
    if merged["max_num_batched_tokens"] < context:
        raise EngineError(f"generator.engine.max_num_batched_tokens: must be at least max_model_len={context} on CPU")
    return merged


def _check_heads(size: int) -> None:
    """vLLM would find out when it computes its first token, and say it in terms of its kernels."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if size not in (able := CPUAttentionBackend.get_supported_head_sizes()):
        raise EngineError(f"model.path: its attention heads are {size} wide; on a CPU vLLM can do {', '.join(map(str, able))}")


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_bytes(config: Any, context: int, dtype: str) -> int:
    """Keys and values of one sequence of full length, and of two blocks that vLLM keeps for itself."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = _head_size(config)
    tokens = (-(-context // CPU_BLOCK) + 2) * CPU_BLOCK
    return int(2 * config.num_hidden_layers * heads * size * tokens * (4 if dtype == "float32" else 2))


class Loads(NamedTuple):
    """How weights arrive in an engine."""

    plan: LoadPlan
    views: list[Tensor]
    """Where the pieces go."""
    base_views: list[Tensor]
    """Where those of the base model are, with adapters."""
    adapter: Any = None
    """What requests say of it."""
    load: Callable[[], object] = lambda: None
    """To be called when all pieces of a version are where they go."""


def record_loads(llm: Any, model: Any, model_path: str, lora: LoraConfig | None) -> Loads:
    """Raises PlanError: weights cannot arrive, whole or by copies."""
    from vllm.config import set_current_vllm_config

    from monarch_rl.weights.plan import PlanError, record, record_whole

    weights, adapter = tensor_shapes(model_path, lora)
    # Some of vLLM's models are built on transformers' classes and look for the configuration wherever one is made.
    with set_current_vllm_config(llm.vllm_config):
        if lora is not None:
            return Loads(*engine_adapter.record_adapter(llm, model, weights, adapter, lora.rank), engine_adapter.request())
        try:
            return Loads(*record(model, weights), [])
        except (PlanError, ValueError) as error:  # what a loader raises that knows the weights by other names
            loader = partial(_load_as_saved, llm, model, _without_weights(model_path))
            plan, views, load = record_whole(model, loader, weights, str(error).partition(". ")[0])
            return Loads(plan, views, [], load=load)


def _load_as_saved(llm: Any, model: Any, source: Any, tensors: Mapping[str, Tensor]) -> None:
    """Have the model's own loader take what transformers would write into a checkpoint of `source`."""
    from transformers.core_model_loading import revert_weight_conversion
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(llm.vllm_config):
        model.load_weights(iter(revert_weight_conversion(source, dict(tensors)).items()))


def tensor_shapes(model_path: str, lora: LoraConfig | None = None) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Name → shape of what a trainer holds of this model, tied tensors once, and of its adapters.

    Raises:
        UserError: the adapters do not fit the model.
    """
    from monarch_rl.weights import adapters

    model = _without_weights(model_path)
    if lora and count_experts(model.config) > 1:
        raise UserError(f"model.lora.rank: adapters on a mixture of experts ({model.config.model_type}) are not supported")
    weights = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return weights, adapters.shapes(model, lora) if lora else {}


def _without_weights(model_path: str) -> Any:
    """The model as transformers makes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
