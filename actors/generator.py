"""Generator: one vLLM replica that keeps decoding while new weights arrive; with tensor parallelism, one rank of it.

Owns: the engine, the staging memory of its pulls. One process mesh per replica, whose rank 0 is asked and answers for all.
Promises: serves nothing before it holds a complete version; a request waits until the replica holds the step that it asks for;
weights arrive in the background and become live between two decode steps, on all ranks between the same two.
Called by: RolloutWorker (`generate`), the controller (`start`, `follow`), rank 0 (`prepare`, `stage`). May be blocked by: nothing but
its own engine, whose steps wait for those of the other ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from monarch.actor import Actor, concurrent_endpoint, current_rank

from monarch_rl.config import Config, UserError
from monarch_rl.observe import timeline
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.supervise import answer
from monarch_rl.types import Generation, Sampling, Version

if TYPE_CHECKING:
    from monarch.actor import Port

    from actors.metrics import Metrics
    from actors.publisher import Publisher
    from monarch_rl.engine_bursts import Burst
    from monarch_rl.weights.plan import LoadPlan
    from monarch_rl.weights.pull import Reader, Target
    from monarch_rl.weights.slots import SlotBuffers

PULL_S = 300.0
"""More than the transport gives each rank."""
REPORT_S = 0.2
"""Finished generations are reported together, at most so long after the first of them."""


class Generator(Actor):
    def __init__(self, config: Config, replica: int, metrics: Metrics) -> None:
        self._config, self._replica, self._metrics = config, replica, metrics
        self.name = f"generator {replica}"
        self._rank = 0
        self._moved = self._earlier_deltas = 0
        self._arrived: asyncio.Event = asyncio.Event()
        self._pulls = GeneratorReport(replica)
        self._report_due: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None
        self._workers: dict[str, Port[tuple[int, Burst]]] = {}
        self._pinned, self._unpinned = False, asyncio.Event()
        self._unpinned.set()
        self._base_checked = False
        self._settled = False  # nobody reads or writes the memory of the last pull any more: it has been swapped to

    @concurrent_endpoint
    async def warm_up(self) -> None:
        """Import what an engine needs, which takes longer than all else about its start."""
        from monarch_rl.engine_setup import import_vllm

        import_vllm()

    @concurrent_endpoint
    async def start(self, ranks: Generator | None = None) -> LoadPlan:
        """Build the engine; the plan says which rectangles of which checkpoint tensors its parameters are made of.

        Args:
            ranks: this mesh, where it has several.

        Raises:
            UserError: vLLM refuses the model or a setting. EngineError: it failed.
        """
        from monarch_rl.engine import Engine
        from monarch_rl.engine_errors import EngineError
        from monarch_rl.rendering import model_directory

        config = self._config
        self._ranks = ranks
        if ranks is not None:
            self._rank = current_rank().rank
        self._directory = str(model_directory(config.model.path, weights=config.model.lora.rank > 0))
        self._engine = Engine(
            self._directory,
            config.model.dtype,
            seed=config.seed,
            overrides=dict(config.generator.engine),
            kv=config.generator.kv,
            keep_masks=config.generator.keep_mask and Sampling.of(config.generator).truncates,
            keep_routing=config.generator.keep_routing,
            stop_texts=bool(config.generator.stop),
            lora=config.model.lora,
            burst_tokens=config.generator.burst_tokens,
            tensor_parallel=config.generator.tensor_parallel,
        )
        try:
            self._plan = await self._engine.start()
        except EngineError as error:
            if isinstance(error.__cause__, (EngineError, ValueError)):
                raise UserError(_refusal(error.__cause__)) from error
            raise
        return self._plan

    @concurrent_endpoint
    async def generate(
        self, ids: list[int], sampling: Sampling, seeds: list[int], min_version: int, stream: tuple[str, int] | None = None
    ) -> list[Generation]:
        """Sample one completion per seed, each as a request of its own.

        Waits until this replica holds at least `min_version`, a `Version.pack()` (the gate of the admission rule). `stream`: who was
        introduced and shall be told every `generator.burst_tokens` tokens what was sampled meanwhile, and the number that this is to have.
        """
        await self._holds(min_version)
        if self._pulls.asleep:
            self._report_soon()  # that it is busy again
        with timeline.span("generate", episodes=len(seeds)):
            tell = partial(self._send_burst, *stream) if stream else None
            generations = await self._engine.generate_group(ids, sampling, seeds, tell)
        for generation in generations:
            generation.replica = self._replica
        self._report_soon()
        return generations

    @concurrent_endpoint
    async def introduce(self, worker: str, port: Port[tuple[int, Burst]]) -> None:
        """Where a rollout worker hears what its requests have sampled so far."""
        port.return_undeliverable = False  # one that is gone misses nothing
        self._workers[worker] = port

    @concurrent_endpoint
    async def follow(
        self, publishers: Publisher, rings: list[list[list[SlotBuffers]]], plans: list[str], base: list[dict[str, int]]
    ) -> None:
        """Pull and swap every version that the trainers publish, until `unfollow`, or until they are gone. A second call takes the place
        of the first.

        Args:
            rings: of each trainer rank: for each rank of a generator its slots.
            plans: digests of the load plans that the slots are laid out for, by rank.
            base: the trainer's fingerprints of the base model, by rank; empty where all weights travel, or nothing is to be compared.

        Raises:
            WeightsDiffer: the engine has read another base model than the trainer.
        """
        reader = await self._reader(publishers, rings, plans)
        await self._check_base(base)
        if self._following is not None:
            self._following.cancel()
        following = self._following = asyncio.create_task(self._follow(reader), name="follow")
        await asyncio.wait({following})
        if not following.cancelled():
            following.result()

    @concurrent_endpoint
    async def ready(self, min_version: int) -> None:
        """Answers when this replica holds at least `min_version`, a `Version.pack()`."""
        await self._holds(min_version)

    @concurrent_endpoint
    async def pull(self, publishers: Publisher, rings: list[list[list[SlotBuffers]]], plans: list[str], newest: Version) -> None:
        """Pull and swap once, to `newest` or beyond; nothing where it holds that already. For a replica that does not follow."""
        held = self._engine.version
        settled = self._settled and held is not None and held.lineage == newest.lineage
        reader = await self._reader(publishers, rings, plans, keep=settled)
        while self._engine.version is None or self._engine.version < newest:
            await self._pull_once(reader)

    @concurrent_endpoint
    async def prepare(self, rings: list[list[list[SlotBuffers]]], plans: list[str], keep: bool) -> None:
        """Have memory for what rank 0 will have this rank `stage`; `keep`: what there is, of the same rings."""
        await self._prepare(rings, plans, keep)

    @concurrent_endpoint
    async def stage(self, target: Target) -> int | str:
        """Pull this rank's part of a version, for rank 0 to swap to. Bytes that were moved, or why they had to be thrown away."""
        from monarch_rl.weights.pull import RejectedPull

        try:
            await self._stage(target)
        except RejectedPull as rejected:
            return str(rejected)
        return self._moved

    @concurrent_endpoint
    async def unfollow(self) -> None:
        """Stop pulling; `follow` returns."""
        if self._following is not None:
            self._following.cancel()

    @concurrent_endpoint
    async def pin(self, min_version: int) -> int:
        """From when this replica holds `min_version`, a `Version.pack()`, keep the weights that it holds until `unpin`. Answers with their
        version, at least."""
        await self._holds(min_version)
        assert self._engine.version is not None
        self._pinned = True
        self._unpinned.clear()
        return self._engine.version.pack()

    @concurrent_endpoint
    async def unpin(self) -> None:
        """Take the newest weights again."""
        self._pinned = False
        self._unpinned.set()

    @concurrent_endpoint
    async def shut_or_failed(self) -> None:
        """Answers when this replica has been shut.

        Raises:
            EngineError: the engine fails, after which it serves nothing any more.
        """
        from monarch_rl.engine_errors import EngineError

        try:
            await self._engine.failed()
        except EngineError:
            if not self._engine.closed:
                raise

    @concurrent_endpoint
    async def steps(self) -> int | None:
        """Decode steps so far; None while there is nothing to decode."""
        stats = self._engine.stats()
        return stats.steps if stats.running else None

    @concurrent_endpoint
    async def fingerprints(self) -> list[dict[str, int]]:
        """For each rank: checkpoint tensor → checksum (for tests and for comparing replicas)."""
        return await self._engine.fingerprints()

    @concurrent_endpoint
    async def base_fingerprints(self) -> list[dict[str, int]]:
        """The same of the base model, where only adapters travel."""
        return await self._engine.fingerprints(base=True)

    @concurrent_endpoint
    async def shut(self) -> None:
        """Stop pulling and decoding."""
        if self._following is not None:
            self._following.cancel()
        await self._engine.close()

    def _send_burst(self, worker: str, number: int, burst: Burst) -> None:
        for _, generation in burst:
            generation.replica = self._replica
        self._workers[worker].send((number, burst))

    async def _reader(self, publishers: Publisher, rings: list[list[list[SlotBuffers]]], plans: list[str], *, keep: bool = False) -> Reader:
        """Of this replica, all of whose ranks are prepared to pull."""
        from monarch_rl.weights.pull import Reader

        if self._ranks is None:
            await self._prepare(rings, plans, keep)
            return Reader(self.name, publishers, len(rings), self._stage)
        await answer(self._ranks.prepare.call(rings, plans, keep), f"{self.name} (all ranks)", PULL_S)
        return Reader(self.name, publishers, len(rings), self._stage_all)

    async def _prepare(self, rings: list[list[list[SlotBuffers]]], plans: list[str], keep: bool) -> None:
        from monarch_rl.weights import transport
        from monarch_rl.weights.pull import Puller

        if keep:
            return
        if [self._plan.digest] != plans[self._rank : self._rank + 1]:
            raise RuntimeError(f"{self.name}: its engine cuts the weights differently from generator 0; all replicas must share one layout")
        transport.demand(self._config.weights.transport, self.name)
        await transport.warm_up()
        self._earlier_deltas = self._pulls.deltas
        self._puller = Puller(self._plan, rings, rank=self._rank, encoding=self._config.weights.encoding)

    async def _stage(self, target: Target) -> None:
        """Raises RejectedPull."""
        puller = self._puller  # another takes its place where the trainers are started again
        await puller.pull(target)
        self._moved = puller.moved
        verify = self._config.weights.verify
        compared = verify == "every" or (verify == "first" and self._engine.version is None)
        self._engine.stage(puller.write, target.version, puller.compare if compared else None)

    async def _stage_all(self, target: Target) -> None:
        """Raises RejectedPull where any rank has to throw away what it pulled; none of them still pulls then."""
        from monarch_rl.weights.pull import RejectedPull

        assert self._ranks is not None
        found = list((await answer(self._ranks.stage.call(target), f"{self.name} (pull by all ranks)", PULL_S)).values())
        for rejected in found:
            if isinstance(rejected, str):
                raise RejectedPull(rejected)
        self._moved = sum(found)

    async def _follow(self, reader: Reader) -> None:
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

        with contextlib.suppress(SupervisionError):  # the trainers are gone; whoever starts them again has this replica follow those
            while True:
                await self._pull_once(reader)

    async def _pull_once(self, reader: Reader) -> None:
        """The next newer version, unless the pull has to be thrown away.

        Raises:
            WeightsDiffer: what is live after the swap is not what the trainer published (`weights.verify`).
        """
        from monarch_rl.weights.pull import RejectedPull

        await self._unpinned.wait()
        target = await reader.newer(self._engine.version)
        before, start_ns, started = self._engine.stats().tokens, time.time_ns(), time.perf_counter()
        self._settled = False
        try:
            await reader.pull(target)
        except RejectedPull:
            self._pulls.rejected += 1
            self._pulls.too_slow = reader.too_slow
            self._report_soon()
            return
        if self._pinned:  # meanwhile; what is newest when that is over is pulled then
            return
        self._pulls.pull_s = time.perf_counter() - started
        # Whoever has it stop pulling now finds the engine about to swap: those who wait for this version have to hear of it.
        await asyncio.shield(self._swap(target.version, start_ns, before))

    async def _swap(self, version: Version, start_ns: int, tokens_before: int) -> None:
        from monarch_rl.engine_errors import EngineError
        from monarch_rl.weights.pull import WeightsDiffer

        pulled_ns = time.time_ns()
        try:
            pause_s = await self._engine.swap(version)
        except EngineError as error:
            if isinstance(error.__cause__, WeightsDiffer):
                raise WeightsDiffer(f"{self.name}: {error.__cause__}") from error
            raise
        self._settled = True
        self._pulls.bytes_per_pull, self._pulls.deltas = self._moved, self._earlier_deltas + self._puller.deltas
        self._swapped(version, start_ns, pulled_ns, pause_s, self._engine.stats().tokens - tokens_before)

    async def _check_base(self, expected: list[dict[str, int]]) -> None:
        from monarch_rl.weights.pull import WeightsDiffer

        if self._base_checked or not expected:
            return
        ranks = zip(expected, await self._engine.fingerprints(base=True), strict=True)
        if other := [name for own, found in ranks for name in own | found if own.get(name) != found.get(name)]:
            raise WeightsDiffer(
                f"{self.name}: the base model that it has read from {self._directory} is not the trainer's: {other[0]} differs"
            )
        self._base_checked = True

    async def _holds(self, min_version: int) -> None:
        while self._engine.version is None or self._engine.version.pack() < min_version:
            arrived = self._arrived
            await arrived.wait()

    def _swapped(self, version: Version, start_ns: int, pulled_ns: int, pause_s: float, tokens_meanwhile: int) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()
        timeline.add(timeline.Span("pull", start_ns, pulled_ns, {"version": str(version), "tokens_meanwhile": tokens_meanwhile}))
        timeline.add(timeline.Span("swap", pulled_ns, time.time_ns(), {"version": str(version)}))
        pulls = self._pulls
        pulls.lineage, pulls.step = version
        pulls.pause_s = pause_s
        pulls.pulled += 1
        pulls.tokens_during_pulls += tokens_meanwhile
        self._report()

    def _report_soon(self) -> None:
        if self._report_due is None:
            self._report_due = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _report(self) -> None:
        """Tell the metrics actor; fire and forget, so that nobody ever waits for a generator to learn how it is."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        stats = self._engine.stats()
        pulls = self._pulls
        pulls.tokens, pulls.idle_s, pulls.asleep = stats.tokens, stats.idle_s, stats.running == 0
        levels = {"step": pulls.step, "running": stats.running, "tokens": pulls.tokens, "idle_s": round(pulls.idle_s, 3)}
        timeline.add(timeline.Count("generator", time.time_ns(), levels))
        self._metrics.report.broadcast(pulls, timeline.drain())


def _refusal(error: Exception) -> str:
    """What vLLM has against its settings, in one line; it checks them with pydantic, whose errors come in paragraphs."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error).partition("\n")[0]
    first = listed()[0]
    return f"{'.'.join(['generator.engine', *map(str, first['loc'])])}: {first['msg'].removeprefix('Value error, ')}"
