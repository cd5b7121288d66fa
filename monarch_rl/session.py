"""A running system: the actor meshes of one run, and what the loop asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monarch_rl.clocks import clock_offsets
from monarch_rl.cluster import local
from monarch_rl.config import Config, UserError
from monarch_rl.observe import console
from monarch_rl.observe.live import make_console
from monarch_rl.observe.metrics import GeneratorFigures, GeneratorReport, MetricsFile, trainer_figures
from monarch_rl.observe.report import write_report
from monarch_rl.observe.status import StatusFile
from monarch_rl.observe.timeline import Record, Span
from monarch_rl.observe.trace import Trace
from monarch_rl.observe.trackers import Trackers
from monarch_rl.supervise import PROCESS_DIED, NamedTimeout, answer, cause, obituary, root
from monarch_rl.types import Version

if TYPE_CHECKING:
    from monarch.actor import MeshFailure, ProcMesh

    from actors.process import Process

START_DEADLINE_S = 900.0
"""A large model may take minutes to load."""
LEAVE_S = 0.1
"""From when a process says that it ends until it does, for the word to get out."""
STOP_S = 1.0
"""For Monarch to take note, when all processes have ended."""
DEATH_NOTICE_S = 1.5
"""Monarch looks after its processes twice a second; so long may it take to hear of a death after its consequences."""


class ActorDied(Exception):
    """A process of the system ended by itself."""


class Session:
    """`async with Session(config) as session: await train(session)`. Satisfies `loop.System`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self._started = time.monotonic()
        self._processes: dict[str, tuple[ProcMesh, Process]] = {}
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault.add_done_callback(lambda fault: fault.cancelled() or fault.exception())  # may come when nobody waits for it
        self._serving = False
        self._rows: asyncio.Queue[tuple[int, Mapping[str, float]] | None] = asyncio.Queue()
        self._evaluations: set[asyncio.Task[None]] = set()
        self._evaluated: dict[str, Any] = {}
        self._step = 0
        self._generator_figures = GeneratorFigures()
        self._metrics_file = MetricsFile(self.output_dir / "metrics.jsonl")
        self._trace = Trace(self.output_dir / "timeline.json")
        self._trackers = Trackers(config)
        self._status = StatusFile(self.output_dir)
        self.console = make_console(config)

    async def __aenter__(self) -> Session:
        try:
            self.console.start()
            self._status.start()
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error)
            raise
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Raises ActorDied in place of the errors that a death has caused in others."""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._status.ends("failed", cause(error))
        try:
            if isinstance(error, Exception) and not isinstance(root(error), UserError):
                await asyncio.wait({self._fault}, timeout=DEATH_NOTICE_S)
                if self._fault.done() and (died := self._fault.exception()) is not error:
                    self._status.ends("failed", str(died))
                    raise ActorDied(str(died)) from error
        finally:
            await self.close()

    # --- what the loop asks for -------------------------------------------------------------------------------------

    async def restore(self) -> Version:
        return Version(0, 0)

    async def publish(self, version: Version) -> None:
        plans = await self._wait("generators (engine start)", asyncio.gather(*[f.as_asyncio() for f in self._engine_starts]))
        rings = await answer(self._trainers.open_ring.call(plans[0]), "trainers (staging slots)", START_DEADLINE_S)
        self._slots = list(rings.values())
        self._plan_digest = plans[0].digest
        await answer(self._trainers.publish.call(version), "trainers (first publish)", START_DEADLINE_S)
        self._serving = True

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._background = tasks
                watch = tasks.create_task(self._watch(), name="watch")
                listen = tasks.create_task(self._listen(), name="listen")
                tasks.create_task(self._record_rows(), name="records")
                for generator in self._generators:
                    tasks.create_task(_reply(generator.follow.call_one(self._publishers, self._slots, self._plan_digest)))
                tasks.create_task(_reply(self._rollouts.work.call()))
                yield
                await self._rest()
                watch.cancel()
                listen.cancel()
                await self._reports()  # of the last pull and swap
                if self._step == self.config.steps:
                    self._status.ends("done")
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def train_step(self, step: int) -> Mapping[str, float]:
        replies = await self._trainers.step.call(step)
        ranks = list(replies.values())
        for rank, (_, spans) in enumerate(ranks):
            self._spans(f"trainer {rank}", spans)
        self._step = step
        return trainer_figures([figures for figures, _ in ranks])

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        self._rows.put_nowait((step, stats))

    def due(self, what: Literal["eval"], step: int) -> bool:
        every = self.config.eval.every
        return step == self.config.steps or bool(every and step % every == 0)

    def start_evaluation(self, step: int) -> None:
        if self.config.eval.prompts:
            self._evaluations.add(self._background.create_task(self._evaluate(step), name=f"evaluation of step {step}"))

    async def evaluations(self) -> None:
        await asyncio.gather(*self._evaluations)
        self._evaluations.clear()

    # --- beyond the loop --------------------------------------------------------------------------------------------

    async def save_model(self) -> Path:
        """Write the trained model as a Hugging Face directory."""
        path = self.output_dir / "model"
        await answer(self._trainers.save.call(path), "trainers (saving the model)", START_DEADLINE_S)
        return path

    async def close(self) -> None:
        """End everything: rollouts, engines, trainers, processes. Takes at most `close_deadline_s`."""
        self.console.close()
        self._fault.cancel()  # whatever dies from here on is meant to
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.close_deadline_s - STOP_S):
                if self._serving:
                    await self._shut(self.config.close_deadline_s / 4)
                await self._end(*self._processes)
        with contextlib.suppress(TimeoutError):  # Monarch waits longer for those that were still starting
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*[mesh.stop() for mesh, _ in self._processes.values()], return_exceptions=True)
        self._metrics_file.close()
        await asyncio.to_thread(self._trackers.close)
        self._trace.close()
        self._status.close()
        write_report(self.output_dir)

    async def _shut(self, deadline_s: float) -> None:
        """Let actors put down what they hold. One that has died, hangs or computes for longer misses nothing but this."""
        await self._end("rollout")
        buffer = self._buffer.close.call_one()  # trainers that wait for a batch hear that there will be none
        engines = [generator.shut.call_one() for generator in self._generators]
        scorers = [scorer.shut.call_one() for scorer in self._scorers]
        for replies in ([buffer, *engines, *scorers], [self._trainers.shut.call()]):
            await asyncio.gather(*[answer(reply, "closing", deadline_s) for reply in replies], return_exceptions=True)

    async def _end(self, *names: str) -> None:
        """End processes; they are gone when this returns."""
        ends = [process.end.call(LEAVE_S) for _, process in (self._processes[name] for name in names if name in self._processes)]
        await asyncio.gather(*[_reply(end) for end in ends], return_exceptions=True)
        await asyncio.sleep(2 * LEAVE_S)

    # --- start ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._listen_for_faults()
        self._spawn_processes()
        self._spawn_actors()
        self._engine_starts = [generator.start.call_one() for generator in self._generators]
        from monarch.spmd import setup_torch_elastic_env_async

        await self._wait("trainer processes", setup_torch_elastic_env_async(self._processes["trainer"][0]))
        await self._wait("trainers (model load)", _reply(self._trainers.setup.call()))
        self._trace.offsets_ns |= await clock_offsets({name: process for name, (_, process) in self._processes.items()})

    def _listen_for_faults(self) -> None:
        import monarch.actor

        loop = asyncio.get_running_loop()

        def hook(failure: MeshFailure) -> None:
            # A process is mourned once, by its Process actor; and Monarch has actors of its own, which have no obituary.
            report = failure.report()
            if (died := obituary(report)) and ("_process{" in report or not PROCESS_DIED.search(report)):
                loop.call_soon_threadsafe(self._died, died)

        monarch.actor.unhandled_fault_hook = hook

    def _died(self, report: str) -> None:
        if not self._fault.done():
            self._fault.set_exception(ActorDied(report))

    def _spawn_processes(self) -> None:
        host = local.host()
        from actors.process import Process

        environment = local.environment(self.config)
        for processes in local.place(self.config):
            mesh = local.spawn(host, processes, environment)
            self._processes[processes.name] = mesh, mesh.spawn(f"{processes.name}_process", Process)

    def _spawn_actors(self) -> None:
        from actors.generator import Generator
        from actors.metrics import Metrics
        from actors.publisher import Publisher
        from actors.replay_buffer import ReplayBuffer
        from actors.rollout import RolloutWorker
        from actors.scorer import Scorer
        from actors.trainer import Trainer

        config, processes = self.config, {name: mesh for name, (mesh, _) in self._processes.items()}
        self._buffer = processes["replay_buffer"].spawn("replay_buffer", ReplayBuffer, config)
        self._metrics = processes["replay_buffer"].spawn("metrics", Metrics)
        self._trainers = processes["trainer"].spawn("trainer", Trainer, config, self._buffer)
        self._publishers = processes["trainer"].spawn("publisher", Publisher)
        self._generators = [
            processes[f"generator_{i}"].spawn(f"generator_{i}", Generator, config, i, self._metrics)
            for i in range(config.generator.replicas)
        ]
        scorers = processes["scorer"].spawn(
            "scorer", Scorer, config.task, config.task_args, config.seed, config.scorer.deadline_s, self._metrics
        )
        self._scorers = [scorers.slice(worker=i) for i in range(config.scorer.workers)]
        self._rollouts = processes["rollout"].spawn(
            "rollout", RolloutWorker, config, self._buffer, self._generators, self._scorers, self._metrics
        )

    # --- background -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self._fault)

    async def _rest(self) -> None:
        """Let the background come to its end: rollouts first, then pulls, then the last rows."""
        await answer(self._buffer.close.call_one(), "replay buffer (close)", 30.0)
        for i, generator in enumerate(self._generators):
            await answer(generator.unfollow.call_one(), f"generator {i} (stop pulling)", 30.0)
        self._rows.put_nowait(None)

    async def _record_rows(self) -> None:
        while (item := await self._rows.get()) is not None:
            step, stats = item
            row = await self._row(step, stats)
            self._metrics_file.write(row)
            self._trackers.row(row)
            self.console.row(row)
            every = self.config.console.rollouts_every
            if every and step and step % every == 0:
                self.console.rollouts(await self._buffer.samples.call_one(console.SAMPLES))

    async def _listen(self) -> None:
        """Hand on what the generators report as it comes, also within a long step."""
        while True:
            await self._metrics.news.call_one()
            await self._reports()

    async def _reports(self) -> list[GeneratorReport]:
        """The latest report of each generator; their spans go where spans go."""
        reports, spans = await answer(self._metrics.collect.call_one(), "metrics", 60.0)
        for lane, recorded in spans.items():
            self._spans(lane, recorded)
        self.console.reports(self._step, reports)
        return reports

    def _spans(self, lane: str, records: list[Record]) -> None:
        self._trace.add(lane, records)
        self.console.spans(lane, [record for record in records if isinstance(record, Span)])

    async def _row(self, step: int, stats: Mapping[str, float]) -> dict[str, Any]:
        reports = await self._reports()
        row: dict[str, Any] = {"step": step, "version": str(Version(0, step)), "wall_s": round(time.monotonic() - self._started, 3)}
        row |= {**stats, **self._generator_figures.row(step, reports)}
        if step:
            figures: dict[str, float] = await answer(self._buffer.stats.call_one(step), "replay buffer (stats)", 60.0)
            row |= figures
        evaluated, self._evaluated = self._evaluated, {}
        return row | evaluated

    async def _evaluate(self, step: int) -> None:
        workers, prompts = self.config.rollout.workers, self.config.eval.prompts
        published = step if step == self.config.steps else step - step % self.config.weights.every
        parts = await asyncio.gather(
            *[self._rollouts.slice(worker=i).evaluate.call_one(range(i, prompts, workers), published).as_asyncio() for i in range(workers)]
        )
        rewards = [reward for part in parts for reward in part.rewards]
        accuracy = {"eval/accuracy": sum(rewards) / len(rewards)} if rewards else {}
        self._evaluated = accuracy | {
            "eval/prompts": len(rewards),
            "eval/unscorable": sum(part.unscorable for part in parts),
            "eval/version": _version_span([v for part in parts for v in (part.first, part.last) if v is not None]),
        }

    async def _wait(self, who: str, waited: Awaitable[Any]) -> Any:
        """Await something of the start, unless a process dies meanwhile."""
        task = asyncio.ensure_future(waited)
        try:
            done, _ = await asyncio.wait({task, self._fault}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise NamedTimeout(who, START_DEADLINE_S)
            return task.result() if task in done else self._fault.result()
        finally:
            task.cancel()


async def _reply(future: Any) -> Any:
    return await future.as_asyncio()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that ended a task group: a root cause before what it dragged along."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda e: isinstance(e, ActorDied))
    return error


def _version_span(versions: list[Version]) -> str:
    """`0.12` or `0.12-0.14`."""
    if not versions:
        return ""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first}-{last}"
