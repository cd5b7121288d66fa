"""An adapter inside vLLM: one, which stays in its place for good and is written over like other weights.

vLLM loads an adapter from files, copies it into memory that its layers read, and would do both again for each version. Here its
loader runs once, on tensors without data, and every copy that it makes is written down (`weights.plan`); from then on a swap writes
to the same places between two decode steps. vLLM never learns that anything has changed, so no request can hold an older adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from monarch_rl.weights.plan import LoadPlan, Shape

ID, NAME = 1, "policy"
"""Of the adapter."""


def arguments(rank: int, adapter: dict[str, Shape]) -> dict[str, Any]:
    """EngineArgs with which vLLM has room for this adapter and reads the base model from its directory."""
    from threading import RLock
    from typing import get_args

    from tqdm import tqdm
    from vllm.config.lora import MaxLoRARanks

    tqdm.set_lock(RLock())  # that of a progress bar (of weights that are read) would be a semaphore, which a process that is killed leaves
    return {
        "load_format": "auto",
        "use_tqdm_on_load": False,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(most for most in get_args(MaxLoRARanks) if most >= rank),
        "lora_target_modules": sorted({name.split(".")[-3] for name in adapter}),
    }


def multiply_once() -> None:
    """On CPU vLLM copies the adapter for each token, which costs more than the rest of the model; all tokens have the same one."""
    from torch.nn.functional import linear
    from vllm.lora.punica_wrapper import punica_cpu

    def add(self: Any, y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float, slices: Any, **_: Any) -> None:
        if self.no_lora:  # the request that warms up
            return
        inputs, outputs = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]).split(slices, 1)
        for output, own_a, own_b in zip(outputs, a, b, strict=True):
            output += linear(linear(inputs, own_a[0, 0]), own_b[0, 0]) * scale

    wrapper: Any = punica_cpu.PunicaWrapperCPU
    wrapper.add_lora_linear = add


def request() -> Any:
    """What a request says of its adapter. The path is never read, for the adapter is there."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ID, "in memory")


def record_adapter(
    llm: Any, model: Any, base: dict[str, Shape], adapter: dict[str, Shape], rank: int
) -> tuple[LoadPlan, list[Tensor], list[Tensor]]:
    """The plan of the adapter with that of the base model in it, and where the pieces of either are.

    Args:
        base: name → shape of the base model's tensors. adapter: of those that travel.

    Raises:
        PlanError: vLLM ignores a part of the adapter, or does more than copy it.
    """
    from monarch_rl.weights.plan import LoadPlan, record, record_copies

    with _bare(model):
        base_plan, base_views = record(model, base)
    worker = llm.model_executor.driver_worker.worker.model_runner.lora_manager
    plan, views = record_copies(partial(_load, worker, rank), adapter, worker.lora_config.lora_dtype)
    return LoadPlan(plan.pieces, base_plan), views, base_views


def live_adapters(llm: Any) -> list[int]:
    """Ids of the adapters that vLLM holds."""
    return sorted(llm.list_loras())


def _load(worker: Any, rank: int, sources: dict[str, Tensor]) -> None:
    """What vLLM does with an adapter's files once they are read."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker._adapter_manager
    renamed = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ID,
        sources,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # a scale of 1: it travels inside of B
        device="meta",
        dtype=worker.lora_config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=None if renamed is None else renamed.get_rename_mapper(),
    )
    manager.add_adapter(adapter)
    manager.activate_adapter(ID)


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """The model without the layers that vLLM has put around its own, whose names its loader would not know."""
    from vllm.lora.utils import replace_submodule

    wrapped = model.lora_manager.modules
    for name, layer in wrapped.items():
        replace_submodule(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in wrapped.items():
            replace_submodule(model, name, layer)
