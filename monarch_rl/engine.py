"""vLLM inside this process, on a thread of its own: generations in, tokens with logprobs and versions out, weights swapped between steps.

The engine thread owns everything of vLLM. It decodes while there are requests, runs what it is asked between two steps, and sleeps
otherwise. What it was asked and what it answers passes through a queue and the event loop that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from monarch_rl.engine_bursts import Burst, Bursts, Call, Request
from monarch_rl.engine_channels import Recorded
from monarch_rl.engine_requests import count_tokens, generation_of, go_on, request_parameters
from monarch_rl.engine_setup import EngineError, build_llm, experts_to_pack, pack, record_loads, salt_anew, unpack
from monarch_rl.generator_config import COLDEST
from monarch_rl.observe import timeline
from monarch_rl.types import Generation, Sampling, Version

if TYPE_CHECKING:
    from torch import Tensor

    from monarch_rl.config import LoraConfig
    from monarch_rl.weights.plan import LoadPlan

T = TypeVar("T")

SHOWN_IDLE_S = 0.001
"""Shorter sleeps are not in the timeline."""


class UnusablePrompt(ValueError):
    """The model cannot go on from this prompt, however often it is tried; the engine is unharmed."""


class PromptTooLong(UnusablePrompt):
    """The prompt leaves no room for a single token."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start of the engine; cheap to take at any time."""

    tokens: int
    """Sampled, those of unfinished requests included."""
    steps: int
    running: int
    """Requests inside the engine now."""
    busy_s: float
    """Spent in decode steps."""
    idle_s: float
    """Spent asleep, without a request."""
    swaps: int
    pause_s: float
    """Spent writing weights, when nothing is decoded."""


class Engine:
    """One vLLM engine. All methods are to be called from the event loop that called `start`.

    Args:
        model_path: a Hugging Face directory or hub name; only its configuration is read, weights arrive by `swap`. See `lora`.
        overrides: `generator.engine.*`, passed on to vLLM's EngineArgs.
        kv: what becomes of the keys and values of unfinished requests at a swap.
        keep_masks: generations have the channel `MASK`, even those that leave nothing out.
        keep_routing: generations of a mixture of experts have the channel `ROUTING`; their prefixes are never taken from the cache.
        lora: with a rank, weights are the model's own and stay so, and what arrives by `swap` is the adapter of all requests.
        stop_texts: requests may have `Sampling.stop`, for which vLLM loads the tokenizer.
        burst_tokens: tokens after which a call that asks for it is told what its requests have sampled, again and again; 0: never.
    """

    def __init__(
        self,
        model_path: str,
        dtype: str,
        *,
        seed: int,
        overrides: dict[str, Any],
        kv: Literal["keep", "recompute"] = "keep",
        keep_masks: bool = False,
        keep_routing: bool = False,
        stop_texts: bool = False,
        lora: LoraConfig | None = None,
        burst_tokens: int = 0,
    ) -> None:
        self._model_path, self._kv, self._lora = model_path, kv, lora if lora and lora.rank else None
        switches = {"keep_masks": keep_masks, "keep_routing": keep_routing, "stop_texts": stop_texts}
        self._build_llm = partial(build_llm, model_path, dtype, seed, overrides, lora=self._lora, **switches)
        self._failure: EngineError | None = EngineError("the engine was not started")
        self._waiting: set[asyncio.Future[Any]] = set()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ids = count()
        # From here on: written by the engine thread only.
        self._llm: Any = None
        self._recorded = Recorded(0)
        self._version: Version | None = None
        self._requests: dict[str, Request] = {}
        self._bursts = Bursts(burst_tokens)
        self._results: list[tuple[asyncio.Future[Any], Any]] = []
        self._doing = "starting"
        self._tokens = self._steps = self._swaps = 0
        self._busy_s = self._idle_s = self._pause_s = 0.0
        self._asleep_since: float | None = None

    @property
    def version(self) -> Version | None:
        """Of the live weights; None until the first swap."""
        return self._version

    async def start(self) -> LoadPlan:
        """Build the engine with arbitrary weights and say which copies make up a load of real ones.

        Raises:
            EngineError: vLLM refuses the model or an override, or its loader does more than copy.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = None
        self._thread.start()
        return await self._ask(self._build)

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int, *, request_id: str | None = None) -> Generation:
        """Sample one completion. It ends with a token of `sampling.stop_ids`, with the one that completes a text of `sampling.stop`,
        or as long as asked or as the context allows.

        Raises:
            PromptTooLong: the prompt fills the context. UnusablePrompt: it is empty or holds ids that the model does not know.
            EngineError: the engine failed, or holds no weights yet.
        """
        (generation,) = await self._generate(ids, sampling, {request_id or str(next(self._ids)): seed})
        return generation

    async def generate_group(
        self, ids: Sequence[int], sampling: Sampling, seeds: Sequence[int], tell: Callable[[Burst], None] | None = None
    ) -> list[Generation]:
        """`generate` once per seed; costs less than as many calls. `tell` is told of bursts, on the event loop."""
        return await self._generate(ids, sampling, {str(next(self._ids)): seed for seed in seeds}, tell)

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what it has, with finish reason `abort`. An unknown or finished one is let be."""
        await self._ask(partial(self._abort, request_id))

    async def swap(
        self, write: Callable[[list[Tensor]], None], version: Version, compare: Callable[[list[Tensor]], None] | None = None
    ) -> float:
        """Make `version` live between two decode steps. Requests go on, with the keys and values that they have, or computed anew (`kv`).

        Args:
            write: is given the destinations of the plan's pieces, on the engine thread.
            compare: is given them again when they are live, and raises where they are not what they should be.

        Returns:
            Seconds in which nothing was decoded, but for `compare`.

        Raises:
            EngineError: `write` or `compare` raised. The weights may be a mix, so the engine serves nothing any more.
        """
        return await self._ask(partial(self._swap, write, version, compare))

    async def fingerprints(self, *, base: bool = False) -> dict[str, int]:
        """Checkpoint tensor → checksum of what the engine holds of it, see `weights.slots.fingerprints`; `base`: of `LoadPlan.base`."""
        return await self._ask(partial(self._fingerprints, base))

    async def failed(self) -> None:
        """Raises EngineError when the engine fails; until then it waits."""
        await self._promise()

    def stats(self) -> EngineStats:
        since = self._asleep_since
        idle_s = self._idle_s + (time.perf_counter() - since if since is not None else 0.0)
        return EngineStats(self._tokens, self._steps, len(self._requests), self._busy_s, idle_s, self._swaps, self._pause_s)

    async def close(self) -> None:
        """Fail what is still waited for and end the engine thread. May be called twice."""
        if not self._thread.is_alive():
            return
        self._fail(EngineError("the engine is closed"))
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- on the event loop

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__

    async def _generate(
        self, ids: Sequence[int], sampling: Sampling, seeds: dict[str, int], tell: Callable[[Burst], None] | None = None
    ) -> list[Generation]:
        """One request per name and seed."""
        self._check()
        if self._version is None:
            raise EngineError("the engine holds no weights yet: nothing can be generated before the first swap")
        room = self._room(ids, sampling)  # before the promise: one that nobody awaits would be heard of when the engine closes
        call = Call(self._promise(), len(seeds), tell)
        self._jobs.put(partial(self._admit, call, seeds, list(ids), sampling, room))
        try:
            return [generation_of(output, self._recorded) for output in await call.future]
        except asyncio.CancelledError:
            self._jobs.put(partial(self._abandon, seeds))
            raise

    def _room(self, ids: Sequence[int], sampling: Sampling) -> int:
        """How many tokens may be sampled."""
        if not ids:
            raise UnusablePrompt("a prompt without a token: the model has nothing to go on from")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            strange = next(id for id in ids if not 0 <= id < self._vocabulary)
            raise UnusablePrompt(f"token {strange} is unknown to the model, whose ids go from 0 to {self._vocabulary - 1}")
        if 0 < sampling.temperature < COLDEST:
            raise ValueError(f"temperature {sampling.temperature:g} is below {COLDEST:g}, the lowest that vLLM samples at")
        if sampling.temperature == 0 and self._llm.model_config.return_sampling_mask:
            raise ValueError("temperature 0: vLLM decodes nothing greedily while it records sampling masks; see generator.keep_mask")
        if len(ids) >= self._context:
            raise PromptTooLong(f"a prompt of {len(ids)} tokens leaves no room in a context of {self._context} tokens")
        return min(sampling.max_new_tokens, self._context - len(ids))

    def _promise(self) -> asyncio.Future[Any]:
        self._check()
        future = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def _ask(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread between two steps. If it raises, the engine has failed."""
        future = self._promise()
        self._jobs.put(lambda: self._results.append((future, function())))
        answer: T = await future
        return answer

    def _settle(self, results: list[tuple[asyncio.Future[Any], Any]]) -> None:
        for future, result in results:
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _fail(self, failure: EngineError) -> None:
        self._failure = self._failure or failure
        for future in [future for future in self._waiting if not future.done()]:
            error = EngineError(str(failure))
            error.__cause__ = failure.__cause__
            future.set_exception(error)

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            while self._drain():
                if self._requests:
                    self._step()
                if self._results:
                    self._tell(self._settle, self._results)
                    self._results = []
        except Exception as error:
            failure = error if isinstance(error, EngineError) else EngineError(f"the engine failed while {self._doing}: {error}")
            failure.__cause__ = failure.__cause__ or error
            self._tell(self._fail, failure)
        finally:
            if self._llm is not None:
                self._llm.engine_core.shutdown()

    def _tell(self, callback: Callable[[Any], None], value: Any) -> None:
        # A closed loop refuses: then nobody is waiting for an answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, value)

    def _drain(self) -> bool:
        """Run all that was asked for since the last step; sleep until something is, when there is nothing to decode."""
        jobs = [] if self._requests else [self._sleep()]
        with contextlib.suppress(Empty):
            while True:
                jobs.append(self._jobs.get_nowait())
        for job in jobs:
            if job is None:
                return False
            job()
        return True

    def _sleep(self) -> Callable[[], None] | None:
        start = self._asleep_since = time.perf_counter()
        job = self._jobs.get()
        slept_s, now_ns = time.perf_counter() - start, time.time_ns()
        self._asleep_since = None
        self._idle_s += slept_s
        if slept_s >= SHOWN_IDLE_S:
            timeline.add(timeline.Span("idle", now_ns - int(slept_s * 1e9), now_ns))
        return job

    def _step(self) -> None:
        self._doing = "decoding"
        start = time.perf_counter()
        for output in self._llm.step():
            self._finish(self._requests.pop(output.request_id), output)
        self._steps += 1
        for call in self._bursts.due(self._steps):
            if call.tell and (burst := call.burst(self._recorded)):
                self._tell(call.tell, burst)
        self._busy_s += time.perf_counter() - start

    def _finish(self, request: Request, output: Any) -> None:
        call = request.call
        if call.finish(request.index, output):
            self._results.append((call.future, [call.outputs[index] for index in range(len(call.outputs))]))

    def _admit(self, call: Call, seeds: dict[str, int], ids: list[int], sampling: Sampling, room: int) -> None:
        from vllm.inputs.engine import tokens_input

        taken = next((name for name in seeds if name in self._requests), None)
        if taken is not None:
            self._results.append((call.future, EngineError(f"request {taken} is already running")))
            return
        self._doing = "admitting a request"
        # The salt keeps a prefix that other weights computed from being found in the cache.
        prompt = tokens_input(ids, cache_salt=str(self._version))
        for index, (name, seed) in enumerate(seeds.items()):
            parameters = request_parameters(sampling, seed, room, self._recorded)
            internal = self._llm.add_request(name, prompt, parameters, lora_request=self._adapter)
            state = self._llm.output_processor.request_states[internal]
            go_on(self._llm, state, sampling)
            self._requests[name] = call.running[index] = Request(call, index, state)
        self._bursts.expect(call, self._steps)

    def _abandon(self, names: Iterable[str]) -> None:
        for name in names:
            self._abort(name)

    def _abort(self, name: str) -> None:
        from vllm.v1.engine import FinishReason

        if name not in self._requests:
            return
        self._doing = "aborting a request"
        request = self._requests.pop(name)
        # vLLM returns nothing for an aborted request, so what it sampled is taken first.
        output = request.state.make_request_output([], None, FinishReason.ABORT, None)
        self._llm.abort_request([request.state.request_id], internal=True)
        self._finish(request, output)

    def _swap(self, write: Callable[[list[Tensor]], None], version: Version, compare: Callable[[list[Tensor]], None] | None) -> float:
        import torch

        self._doing = f"writing weights of version {version}"
        start = time.perf_counter()
        with torch.no_grad():
            write(self._views)
            pack(self._experts)
        if self._views[0].is_cuda:
            torch.cuda.synchronize()  # the staging memory is free to be filled again when this returns
        self._llm.set_weight_version(str(version.pack()))
        self._version = version
        if self._kv == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
        salt_anew(self._llm, str(version))
        pause_s = time.perf_counter() - start
        self._swaps += 1
        self._pause_s += pause_s
        if compare is not None:
            self._doing = f"comparing its weights with those of version {version}"
            self._read_live(compare)
        return pause_s

    def _fingerprints(self, base: bool) -> dict[str, int]:
        from monarch_rl.weights.slots import fingerprints

        if base:
            return fingerprints(self._plan.base, self._base_views) if self._plan.base else {}
        return self._read_live(partial(fingerprints, self._plan))

    def _read_live(self, read: Callable[[list[Tensor]], T]) -> T:
        """What `read` finds in the live parameters, in the layout in which they were written."""
        unpack(self._experts)
        found = read(self._views)
        pack(self._experts)
        return found

    def _build(self) -> LoadPlan:
        self._llm, self._recorded = self._build_llm()
        self._context = int(self._llm.model_config.max_model_len)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        count_tokens(self._llm, self._count)
        (model,) = self._llm.apply_model(lambda model: model)
        self._experts = experts_to_pack(model)
        self._plan, self._views, self._base_views, self._adapter = record_loads(self._llm, model, self._model_path, self._lora)
        return self._plan

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
