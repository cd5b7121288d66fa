"""What requests have sampled while they still run, told every so many steps: with an engine no more is lost than came after that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from monarch_rl.engine_requests import generation_of
from monarch_rl.types import Generation

if TYPE_CHECKING:
    import asyncio

    from monarch_rl.engine_channels import Recorded

Burst = list[tuple[int, Generation]]
"""(request of the call, its tokens since the burst before), with finish reason `abort`; or, once, all tokens of one that has ended."""


@dataclass(slots=True, eq=False)
class Call:
    """What one caller waits for: the outputs of its requests, in the order in which it named them."""

    future: asyncio.Future[list[Any]]
    missing: int
    tell: Callable[[Burst], None] | None = None
    """Who is told of bursts."""
    running: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    """Of `outputs`, those that a burst had."""

    def finish(self, index: int, output: Any) -> bool:
        """Whether nothing is missing any more."""
        self.running.pop(index)
        self.outputs[index] = output
        self.missing -= 1
        return not self.missing

    def burst(self, recorded: Recorded) -> Burst:
        ended = [(index, generation_of(self.outputs[index], recorded)) for index in self.outputs.keys() - self.told]
        self.told.update(self.outputs)
        sampled = [(index, request.since_last(recorded)) for index, request in self.running.items()]
        return ended + [(index, generation) for index, generation in sampled if len(generation.ids_T)]


@dataclass(slots=True, eq=False)
class Request:
    """One inside the engine."""

    call: Call
    index: int
    state: Any
    """vLLM's account of it, to which each step appends."""
    tokens: int = 0
    """Told of by now."""
    masks: int = 0
    """Of its pieces, told by now."""
    experts: int = 0
    """As `masks`."""
    read: int = 0
    """Tokens whose experts were told."""

    def since_last(self, recorded: Recorded) -> Generation:
        """What was sampled since this was asked last; finish reason `abort`."""
        state, first = self.state, self.tokens
        ids = state.detokenizer.output_token_ids[first:]
        versions_T = np.empty(len(ids), np.int64)
        for version, start in state.weight_version_starts:
            versions_T[max(0, start - first) :] = int(version)  # up to the next one
        masks = list(chain.from_iterable(piece.to_nested_list() for piece in state.sampling_mask_chunks[self.masks :]))
        experts = state.routed_experts_chunks[self.experts :]
        channels = recorded.channels(
            len(state.prompt_token_ids) + first, len(ids), masks, np.concatenate(experts) if experts else None, self.read
        )
        self.tokens += len(ids)
        self.masks, self.experts = len(state.sampling_mask_chunks), len(state.routed_experts_chunks)
        self.read += sum(map(len, experts))
        logprobs_T = np.array(state.logprobs_processor.logprobs.logprobs[first:], np.float32)
        return Generation(np.array(ids, np.int32), logprobs_T, versions_T, "abort", channels=channels)


class Bursts:
    """Which calls are due, each `every` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._due: deque[tuple[int, Call]] = deque()  # in order, since all wait equally long

    def expect(self, call: Call, step: int) -> None:
        """Its first burst is due `every` steps from now; those that end before cost nothing."""
        if self._every and call.tell is not None:
            self._due.append((step + self._every, call))

    def due(self, step: int) -> Iterator[Call]:
        while self._due and self._due[0][0] <= step:
            _, call = self._due.popleft()
            if call.missing:
                self.expect(call, step)
                yield call
