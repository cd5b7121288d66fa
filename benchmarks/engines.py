"""The two sides of `generator_overhead`: the Generator actor with a caller of its own, and the bare engine, each in its process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.actor import Actor, concurrent_endpoint

from actors.generator import Generator
from actors.streams import Streams
from monarch_rl.calls import Calls
from monarch_rl.routes import Routes
from monarch_rl.types import Sampling, Version

if TYPE_CHECKING:
    from torch import Tensor


class Work(NamedTuple):
    """Groups to be sampled in one turn; as soon as one is finished, the next is started."""

    groups: list[tuple[list[int], list[int]]]
    """Prompt ids, and the seed of each episode."""
    at_once: int
    sampling: Sampling
    one_request_per_group: bool = False
    """Bare engine only: one request with n=G, by the first seed."""


class Usage(NamedTuple):
    """Totals of an engine's process since its start."""

    cpu_s: float
    """All threads."""
    steps: int
    """Decode steps."""
    decoding_s: float
    """In them."""


class Timing(NamedTuple):
    """One turn."""

    tokens: int
    wall_s: float
    cpu_s: float
    steps: int
    decoding_s: float

    @staticmethod
    def of(tokens: int, wall_s: float, before: Usage, after: Usage) -> Timing:
        return Timing(tokens, wall_s, after.cpu_s - before.cpu_s, after.steps - before.steps, after.decoding_s - before.decoding_s)


class ReadyGenerator(Generator):
    """A Generator that reads a checkpoint once instead of following a trainer."""

    @concurrent_endpoint
    async def load(self, model: Path) -> None:
        tensors = _tensors(model)

        def write(views: list[Tensor]) -> None:
            for piece, view in zip(self._plan.pieces, views, strict=True):
                view.copy_(piece.cut(tensors[piece.name]))

        self._engine.stage(write, Version(0, 0))
        await self._engine.swap(Version(0, 0))

    @concurrent_endpoint
    async def usage(self) -> Usage:
        stats = self._engine.stats()
        return Usage(time.process_time(), stats.steps, stats.busy_s)


class Caller(Actor):
    """Asks as a rollout worker does: one message per group, many groups at once."""

    def __init__(self, generator: ReadyGenerator, burst_tokens: int) -> None:
        self._generator = generator
        self._streams = Streams(Routes({0: generator}), Calls(), "caller", burst_tokens)

    @concurrent_endpoint
    async def run(self, work: Work) -> Timing:
        places = asyncio.Semaphore(work.at_once)

        async def group(ids: list[int], seeds: list[int]) -> int:
            async with places:
                generations = await self._streams.generate(ids, work.sampling, seeds, 0)
                return sum(len(generation.ids_T) for generation in generations)

        before, start = await self._generator.usage.call_one(), time.perf_counter()
        tokens = sum(await asyncio.gather(*[group(*asked) for asked in work.groups]))
        wall_s = time.perf_counter() - start
        return Timing.of(tokens, wall_s, before, await self._generator.usage.call_one())


class BareEngine:
    """vLLM's LLMEngine with our settings, stepped by the caller."""

    def __init__(self, model: Path, dtype: str) -> None:
        from monarch_rl.engine_setup import build_llm

        self._llm, self._recorded = build_llm(str(model), dtype, 0, {}, keep_masks=False, keep_routing=False)
        tensors = _tensors(model)
        self._llm.apply_model(lambda module: module.load_weights(iter(tensors.items())))
        self._left: dict[int, int] = {}  # group that is being sampled → episodes that are not finished
        self.steps: list[tuple[int, float]] = []
        """(unfinished episodes, seconds) of every decode step."""

    def run(self, work: Work) -> Timing:
        before, start, tokens = self._usage(), time.perf_counter(), 0
        waiting = deque(enumerate(work.groups))
        while waiting or self._left:
            while waiting and len(self._left) < work.at_once:
                number, (ids, seeds) = waiting.popleft()
                self._add(number, ids, seeds, work)
            tokens += self._step()
        return Timing.of(tokens, time.perf_counter() - start, before, self._usage())

    def _usage(self) -> Usage:
        return Usage(time.process_time(), len(self.steps), sum(seconds for _, seconds in self.steps))

    def _add(self, number: int, ids: list[int], seeds: list[int], work: Work) -> None:
        from vllm.inputs.engine import tokens_input

        from monarch_rl.engine_requests import request_parameters

        self._left[number] = len(seeds)
        for seed in seeds[:1] if work.one_request_per_group else seeds:
            parameters = request_parameters(work.sampling, seed, work.sampling.max_new_tokens, self._recorded)
            parameters.n = len(seeds) if work.one_request_per_group else 1
            self._llm.add_request(f"{number}/{seed}", tokens_input(ids), parameters)

    def _step(self) -> int:
        """Tokens of the episodes that ended in it."""
        running, start = sum(self._left.values()), time.perf_counter()
        outputs = self._llm.step()
        self.steps.append((running, time.perf_counter() - start))
        for output in outputs:
            number = int(output.request_id.partition("/")[0])
            self._left[number] -= len(output.outputs)
            if not self._left[number]:
                del self._left[number]
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def serve_bare(pipe: Connection, model: Path, dtype: str) -> None:
    """A process of its own: answers Work with a Timing, and None, which ends it, with all steps."""
    engine = BareEngine(model, dtype)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        pipe.send(engine.run(work))
    pipe.send(engine.steps)


def _tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")
