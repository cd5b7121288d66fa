"""vLLM inside this process, on a thread of its own: generations in, tokens with logprobs and versions out, weights swapped between steps.

The engine thread owns everything of vLLM. It decodes while there are requests, runs what it is asked between two steps, and sleeps
otherwise. What it was asked and what it answers passes through a queue and the event loop that started it. With tensor parallelism
there is one such thread in the process of each rank, see `lockstep`.
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
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from monarch_rl.engine_bursts import Burst, Bursts, Call, Request
from monarch_rl.engine_channels import Recorded
from monarch_rl.engine_errors import EngineError
from monarch_rl.engine_experts import experts_to_pack, pack, unpack
from monarch_rl.engine_requests import count_tokens, generation_of, go_on, request_parameters, room_for
from monarch_rl.engine_setup import build_llm, record_loads, salt_anew
from monarch_rl.lockstep import Job, Jobs, Lockstep, meet
from monarch_rl.types import Generation, Sampling, Version

if TYPE_CHECKING:
    from torch import Tensor

    from monarch_rl.model_config import LoraConfig
    from monarch_rl.weights.plan import LoadPlan

T = TypeVar("T")
Write = Callable[[list["Tensor"]], None]


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
        tensor_parallel: ranks that share the weights, one engine each. Rank 0 is asked; of the others only `start`, `stage` and `failed`
            are to be called.
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
        tensor_parallel: int = 1,
    ) -> None:
        self._model_path, self._kv, self._lora = model_path, kv, lora if lora and lora.rank else None
        self._tensor_parallel = tensor_parallel
        switches: dict[str, Any] = {"keep_masks": keep_masks, "keep_routing": keep_routing, "stop_texts": stop_texts}
        switches |= {"lora": self._lora, "tensor_parallel": tensor_parallel}
        self._build_llm = partial(build_llm, model_path, dtype, seed, overrides, **switches)
        self._failure: EngineError | None = EngineError("the engine was not started")
        self._waiting: set[asyncio.Future[Any]] = set()
        self._jobs = Jobs()
        self._staged: dict[Version, tuple[Write, Write | None]] = {}
        self.closed = False
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
        self._busy_s = self._pause_s = 0.0

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
        return await self._ask(methodcaller("_build"))

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
        await self._ask(methodcaller("_abort", request_id))

    def stage(self, write: Write, version: Version, compare: Write | None = None) -> None:
        """Say how a version that is here whole is made live on this rank; to be done on all ranks before `swap`.

        Args:
            write: is given the destinations of the plan's pieces, on the engine thread.
            compare: is given them again when they are live, and raises `WeightsDiffer` where they are not what they should be.
        """
        live = self._version
        self._staged = {known: how for known, how in self._staged.items() if live is None or known >= live}
        self._staged[version] = write, compare

    async def swap(self, version: Version) -> float:
        """Make a staged version live between two decode steps. Requests go on, with the keys and values they have or with new ones (`kv`).

        Returns:
            Seconds in which nothing was decoded, but for `compare`.

        Raises:
            EngineError: `write` or `compare` raised, on any rank. The weights may be a mix, so the engine serves nothing any more.
        """
        return await self._ask(methodcaller("_swap", version))

    async def fingerprints(self, *, base: bool = False) -> list[dict[str, int]]:
        """For each rank: checkpoint tensor → checksum of what it holds of it (`weights.slots.fingerprints`); `base`: of `LoadPlan.base`."""
        return await self._ask(methodcaller("_fingerprints", base))

    async def failed(self) -> None:
        """Raises EngineError when the engine fails; until then it waits."""
        await self._promise()

    def stats(self) -> EngineStats:
        return EngineStats(self._tokens, self._steps, len(self._requests), self._busy_s, self._jobs.idle_s, self._swaps, self._pause_s)

    async def close(self) -> None:
        """Fail what is still waited for and end the engine thread. May be called twice."""
        if not self._thread.is_alive():
            return
        self._shut()
        self._jobs.put(Job(None))
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
        # Before the promise: one that nobody awaits would be heard of when the engine closes.
        room = room_for(ids, sampling, self._llm.model_config, self._context)
        call = Call(future := self._promise(), len(seeds), tell)
        self._jobs.put(Job(methodcaller("_admit", call, seeds, list(ids), sampling, room)))
        try:
            return [generation_of(output, self._recorded) for output in await future]
        except asyncio.CancelledError:
            self._jobs.put(Job(methodcaller("_abandon", list(seeds))))
            raise

    def _promise(self) -> asyncio.Future[Any]:
        self._check()
        future = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def _ask(self, job: Callable[[Engine], T]) -> T:
        """Run `job` on the engine thread between two steps. If it raises, the engine has failed."""
        future = self._promise()
        self._jobs.put(Job(job, future))
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

    def _shut(self) -> None:
        self.closed = True
        self._fail(EngineError("the engine is closed"))

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
            self._tell(self._shut)
        except Exception as error:
            failure = error if isinstance(error, EngineError) else EngineError(f"the engine failed while {self._doing}: {error}")
            failure.__cause__ = failure.__cause__ or error
            self._tell(self._fail, failure)
        finally:
            if self._jobs.lockstep:
                self._jobs.lockstep.close()
            if self._llm is not None:
                self._llm.engine_core.shutdown()

    def _tell(self, callback: Callable[..., None], *values: Any) -> None:
        # A closed loop refuses: then nobody is waiting for an answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *values)

    def _drain(self) -> bool:
        """Run all that was asked for since the last step. False: that was to end."""
        for run, future in self._jobs.next(busy=bool(self._requests)):
            if run is None:
                return False
            result = run(self)
            if future is not None:
                self._results.append((future, result))
        return True

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
        if call.finish(request.index, output) and call.future is not None:
            self._results.append((call.future, [call.outputs[index] for index in range(len(call.outputs))]))

    def _admit(self, call: Call, seeds: dict[str, int], ids: list[int], sampling: Sampling, room: int) -> None:
        from vllm.inputs.engine import tokens_input

        taken = next((name for name in seeds if name in self._requests), None)
        if taken is not None:
            if call.future is not None:
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

    def _swap(self, version: Version) -> float:
        import torch

        self._doing = f"writing weights of version {version}"
        start = time.perf_counter()
        write, compare = self._staged[version]
        with torch.no_grad():
            write(self._views)
            self._load()
            pack(self._experts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the staging memory is free to be filled again when this returns
        self._llm.set_weight_version(str(version.pack()))
        self._version = version
        if self._kv == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
        salt_anew(self._llm, str(version))
        self._jobs.gather(None)  # or a rank might be given the next version while it still writes this one
        pause_s = time.perf_counter() - start
        self._swaps += 1
        self._pause_s += pause_s
        if compare is not None:
            self._doing = f"comparing its weights with those of version {version}"
            if differences := [each for each in self._jobs.gather(self._difference(compare)) if each is not None]:
                raise differences[0]
        return pause_s

    def _difference(self, compare: Write) -> Exception | None:
        """Not raised before all ranks know of it: those that are told only that one is gone would not know why."""
        from monarch_rl.weights.pull import WeightsDiffer

        try:
            self._read_live(compare)
        except WeightsDiffer as difference:
            return difference
        return None

    def _fingerprints(self, base: bool) -> list[dict[str, int]]:
        from monarch_rl.weights.slots import fingerprints

        if base:
            return self._jobs.gather(fingerprints(self._plan.base, self._base_views) if self._plan.base else {})
        return self._jobs.gather(self._read_live(partial(fingerprints, self._plan)))

    def _read_live(self, read: Callable[[list[Tensor]], T]) -> T:
        """What `read` finds in the live parameters, in the layout in which they were written."""
        unpack(self._experts)
        found = read(self._views)
        pack(self._experts)
        return found

    def _build(self) -> LoadPlan:
        if self._tensor_parallel > 1:
            meet()
        self._llm, self._recorded = self._build_llm()
        self._context = int(self._llm.model_config.max_model_len)
        count_tokens(self._llm, self._count)
        (model,) = self._llm.apply_model(lambda model: model)
        self._experts = experts_to_pack(model)
        loads = record_loads(self._llm, model, self._model_path, self._lora)
        self._plan, self._views, self._base_views, self._adapter, self._load = loads
        if self._tensor_parallel > 1:
            self._jobs.lockstep = Lockstep(self._llm)
        return self._plan

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
