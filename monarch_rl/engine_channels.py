"""What vLLM is made to tell of each token beside its logprob: the ids that could be drawn in its place, and the experts it went through.

On CUDA vLLM's second model runner does both by itself. The runner of CPUs has the way out (from the scheduler to the finished
request) but nothing that fills it; two hooks around one decode step do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from monarch_rl.types import MASK, ROUTING, Rows, row_offsets

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Experts(NamedTuple):
    """Of a mixture of experts."""

    total: int
    layers: int
    """All layers of the model, also those without experts, whose rows are zeros."""
    per_token: int

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.total <= 256 else np.uint16


@dataclass(frozen=True)
class Recorded:
    """Which channels the generations of an engine have."""

    vocabulary: int
    masks: bool = False
    experts: Experts | None = None
    """Where routing is recorded."""

    def channels(
        self, before: int, tokens: int, masks: Sequence[list[int]], experts: NDArray[Any] | None, read: int = 0
    ) -> dict[str, Rows]:
        """Those of `tokens` sampled tokens that come after `before` others.

        Args:
            masks: the ids that were left to draw from, of each token.
            experts: of the tokens from `read` on, as far as the model has read them.
        """
        channels = {}
        if self.masks:
            channels[MASK] = self._mask(before, tokens, masks)
        if self.experts:
            none = np.zeros((0, self.experts.layers, self.experts.per_token), self.experts.dtype)
            channels[ROUTING] = Rows(none if experts is None else experts, start=read)
        return channels

    def _mask(self, before: int, tokens: int, masks: Sequence[list[int]]) -> Rows:
        """Rows of all ids become empty ones; there are such on CUDA."""
        rows = [[] if len(row) == self.vocabulary else row for row in masks]
        if len(rows) != tokens:
            raise RuntimeError(f"vLLM gave the sampling masks of {len(rows)} tokens with {tokens} tokens")
        values = np.fromiter(chain.from_iterable(rows), np.int32)
        return Rows(values, row_offsets(np.array([len(row) for row in rows])), before)


def record_masks(llm: Any) -> None:
    """On CPU: after each decode step hand the ids that were left to draw from to vLLM's scheduler, which brings them to their requests."""
    import torch
    from vllm.v1.outputs import SamplingMaskLists

    runner = _runner(llm)
    sampler, sample_tokens = runner.sampler.topk_topp_sampler, runner.sample_tokens
    draw = sampler.forward
    kept: list[Tensor] = []

    def observed(*arguments: Any) -> tuple[Tensor, Tensor]:
        sampled, logprobs = draw(*arguments)
        kept[:] = [torch.isfinite(logprobs)]  # what temperature, min-p, top-k and top-p have left, of each request of the batch
        return sampled, logprobs

    def with_masks(*arguments: Any, **named: Any) -> Any:
        kept.clear()
        output = sample_tokens(*arguments, **named)
        # Nothing is drawn where all requests are greedy.
        keep_BV = kept[0].numpy() if kept else np.zeros((len(output.req_ids), 0), np.bool_)
        keep_BV &= ~keep_BV.all(1, keepdims=True)  # where nothing was left out the row is empty
        output.sampling_masks = SamplingMaskLists(np.nonzero(keep_BV)[1].astype(np.int32), row_offsets(keep_BV.sum(1)))
        return output

    sampler.forward = observed
    runner.sample_tokens = with_masks
    llm.engine_core.engine_core.scheduler.return_sampling_mask = True


def record_routing(llm: Any, experts: Experts) -> None:
    """On CPU: after each forward pass hand the experts of its tokens to their requests.

    A token that is read again, since its request was put back for want of memory, keeps the experts of the first time: it was
    they that its logprob came from.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runner = _runner(llm)
    chosen: dict[int, Tensor] = {}
    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_note, chosen, module.layer_id))
    execute_model = runner.execute_model
    read: dict[str, int] = {}  # tokens of each request that were recorded

    def with_routing(scheduled: Any, *arguments: Any, **named: Any) -> Any:
        chosen.clear()
        output = execute_model(scheduled, *arguments, **named)
        for finished in scheduled.finished_req_ids:
            read.pop(finished, None)
        if chosen:
            batch = np.zeros((len(next(iter(chosen.values()))), experts.layers, experts.per_token), experts.dtype)
            for layer, ids_TK in chosen.items():
                batch[:, layer] = ids_TK.numpy()
            _hand_out(llm, runner, scheduled, batch, read)
        return output

    runner.execute_model = with_routing


def _note(chosen: dict[int, Tensor], layer: int, ids_TK: Tensor) -> None:
    chosen[layer] = ids_TK.clone()


def _hand_out(llm: Any, runner: Any, scheduled: Any, batch: NDArray[Any], read: dict[str, int]) -> None:
    """Append each request's rows of a forward pass, as far as they are new, to what vLLM collects for it."""
    names = runner.input_batch.req_ids
    starts = runner.query_start_loc.np[: len(names)].tolist()
    computed = runner.input_batch.num_computed_tokens_cpu[: len(names)].tolist()
    states = llm.output_processor.request_states
    for name, start, first in zip(names, starts, computed, strict=True):
        tokens, known = scheduled.num_scheduled_tokens.get(name, 0), read.get(name, 0)
        if first > known:
            raise RuntimeError(f"the experts of tokens {known} to {first - 1} of a request are unknown: they came from the prefix cache")
        if first + tokens > known and name in states:
            end = start + tokens
            states[name].routed_experts_chunks.append(batch[end - (first + tokens - known) : end])
            read[name] = first + tokens


def _runner(llm: Any) -> Any:
    return llm.model_executor.driver_worker.worker.model_runner
