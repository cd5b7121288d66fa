"""The actors of a session, and what the loop asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monarch_rl import checkpoint
from monarch_rl.clocks import clock_offsets
from monarch_rl.config import Config
from monarch_rl.evaluation import Evaluated, evaluate
from monarch_rl.ledger import Progress
from monarch_rl.meshes import START_DEADLINE_S, ActorDied, Meshes
from monarch_rl.observe.metrics import trainer_figures
from monarch_rl.records import Records
from monarch_rl.replicas import Replicas, Source
from monarch_rl.supervise import answer, ended, root
from monarch_rl.types import Version

if TYPE_CHECKING:
    from actors.rollout import RolloutWorker
    from monarch_rl.tasks import TaskSpec

STOP_S = 1.0
"""For Monarch to take note, when all processes have ended."""


class Halted(Exception):
    """The session was asked to stop, and stands between two steps."""


class Running:
    """Starts the actors of a run and keeps them going. Satisfies `loop.System`; `Session` is this and what a user does with it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self._meshes = Meshes(config)
        self._records = Records(config)
        self._state = "not started"
        self._go = asyncio.Event()
        self._go.set()
        self._begun = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._turn = asyncio.Lock()  # held by a step, and by what must stand between two steps
        self._keeper: asyncio.Task[None] | None = None
        self._step_in_progress: asyncio.Task[Mapping[str, float]] | None = None
        self._unrecorded: tuple[int, Mapping[str, float]] | None = None
        self._training: asyncio.Task[Any] | None = None
        self._halted = False
        self._published: Version | None = None
        self._evaluations: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> Version:
        """Of the trainer's weights."""
        return Version(0, self._records.step)

    # --- what the loop asks for -------------------------------------------------------------------------------------

    async def restore(self) -> Version:
        if self._step_in_progress is not None:  # an earlier call was cancelled in the middle of a step
            await asyncio.wait({self._step_in_progress})
        if self._unrecorded is not None:
            self.record(*self._unrecorded)
        return self.version

    async def publish(self, version: Version | None = None) -> None:
        """Stage the trainer's weights for the generators, which pull them if they are newer than what they have."""
        async with self._publishing:  # two may find that nothing is published yet
            await self._publish(version)

    async def _publish(self, version: Version | None) -> None:
        if self._published is None:
            plan = await self._replicas.started()
            rings = await answer(self._trainers.open_ring.call(plan), "trainers (staging slots)", START_DEADLINE_S)
            self._source = Source(self._publishers, list(rings.values()), plan.digest)
        elif version is not None:
            return  # the loop asks for it whenever it begins
        async with self._turn:
            self._published = self.version
            await answer(self._trainers.publish.call(self.version), "trainers (publish)", START_DEADLINE_S)

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        await self._keep()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._kept())
                yield
                await self._records.written()
                watch.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def train_step(self, step: int) -> Mapping[str, float]:
        await self._go.wait()
        self._step_in_progress = asyncio.create_task(self._step(step), name=f"step {step}")
        self._step_in_progress.add_done_callback(_heard)
        return await asyncio.shield(self._step_in_progress)

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        self._unrecorded = None
        self._records.put(step, stats)

    def due(self, what: Literal["eval", "checkpoint"], step: int) -> bool:
        every = getattr(self.config, what).every
        return (what == "eval" and step == self.config.steps) or bool(every and step % every == 0)

    def start_evaluation(self, step: int) -> None:
        if self.config.eval.prompts:
            self._evaluations.add(self._background.create_task(self._evaluate(step), name=f"evaluation of step {step}"))

    async def evaluations(self) -> None:
        await asyncio.gather(*self._evaluations)
        self._evaluations.clear()

    async def checkpoint(self) -> Path:
        """Write model, optimizer and progress to `checkpoints/step_N`, for `resume`. Stands between two steps."""
        async with self._turn:
            folder = checkpoint.folder_of(self.output_dir, self.version.step)
            unfinished = checkpoint.unfinished(folder)
            await answer(self._trainers.checkpoint.call(unfinished), "trainers (checkpoint)", START_DEADLINE_S)
            await answer(self._buffer.trained.call_one(self.version.step), "replay buffer (trained)", 60.0)
            progress: Progress = await answer(self._buffer.progress.call_one(), "replay buffer (progress)", 60.0)
        checkpoint.complete(folder, progress, self.config.checkpoint.keep)
        return folder

    async def halt(self) -> None:
        """Have the training end with `Halted` after the step in progress, or before it where its batch is not complete."""
        self._halted = True
        self._go.set()
        await answer(self._buffer.close.call_one(), "replay buffer (close)", 30.0)

    async def save_model(self) -> Path:
        """Write the trained model as a Hugging Face directory."""
        path = self.output_dir / "model"
        await answer(self._trainers.save.call(path), "trainers (saving the model)", START_DEADLINE_S)
        return path

    def close_console(self) -> None:
        """Give the terminal back, whatever the actors do."""
        self._records.console.close()

    # --- start and end ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        found = checkpoint.to_resume(self.config.resume, self.output_dir)
        progress = Progress(0, 0, {}) if found is None else checkpoint.read_progress(found)
        self._meshes.watch()
        await self._meshes.open()
        if url := self._meshes.hosts.dashboard.url:
            self._records.console.say(f"Monarch's dashboard: {url} on {socket.gethostname()}")
        self._spawn_actors(progress)
        from monarch.spmd import setup_torch_elastic_env_async

        await self._meshes.alive("trainer processes", setup_torch_elastic_env_async(self._meshes["trainer"]))
        await self._meshes.alive("trainers (model load)", self._trainers.setup.call().as_asyncio())
        self._records.trace.offsets_ns |= await clock_offsets(self._meshes.processes())
        if found is not None:
            await self._meshes.alive("trainers (checkpoint)", self._trainers.restore.call(found).as_asyncio())

    def _spawn_actors(self, progress: Progress) -> None:
        from actors.metrics import Metrics
        from actors.publisher import Publisher
        from actors.replay_buffer import ReplayBuffer
        from actors.rollout import RolloutWorker
        from actors.scorer import Scorer
        from actors.trainer import Trainer

        config, meshes = self.config, self._meshes
        metrics = meshes["replay_buffer"].spawn("metrics", Metrics)
        self._replicas = Replicas(config, meshes, metrics, self._records.console.say)
        self._replicas.spawn(config.generator.replicas)
        self._buffer = meshes["replay_buffer"].spawn("replay_buffer", ReplayBuffer, config, progress)
        self._trainers = meshes["trainer"].spawn("trainer", Trainer, config, self._buffer)
        self._publishers = meshes["trainer"].spawn("publisher", Publisher)
        judged_by = config.task, config.task_args, config.seed, config.scorer.deadline_s
        scorers = meshes["scorer"].spawn("scorer", Scorer, *judged_by, metrics)
        self._scorers = [scorers.slice(worker=i) for i in range(config.scorer.workers)]
        self._rollouts = meshes["rollout"].spawn(
            "rollout", RolloutWorker, config, self._buffer, self._replicas.live, self._scorers, metrics
        )
        self._records.begin(progress.step, metrics, self._buffer)

    async def _shut(self, deadline_s: float) -> None:
        """Let actors put down what they hold. One that has died, hangs or computes for longer misses nothing but this."""
        await self._replicas.shut(deadline_s)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._records.collect(), deadline_s)  # of the last pull and swap
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._meshes.fault.cancel()
        await self._meshes.end("rollout")
        buffer = self._buffer.close.call_one()  # trainers that wait for a batch hear that there will be none
        engines = [generator.shut.call_one() for generator in self._replicas.live.values()]
        scorers = [scorer.shut.call_one() for scorer in self._scorers]
        for replies in ([buffer, *engines, *scorers], [self._trainers.shut.call()]):
            await asyncio.gather(*[answer(reply, "closing", deadline_s) for reply in replies], return_exceptions=True)

    # --- background -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Begin what runs beside the training, for as long as the session is open."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._run_background(), name="background")
            self._keeper.add_done_callback(self._over)
            await self._begun.wait()

    async def _run_background(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._background = tasks
            tasks.create_task(ended(self._meshes.fault), name="watch")
            tasks.create_task(self._records.listen(), name="listen")
            tasks.create_task(self._records.write(), name="records")
            self._replicas.begin(tasks, self._source, self._rollouts)
            self._begun.set()
            tasks.create_task(ended(self._rollouts.work.call().as_asyncio()), name="rollouts")

    def _over(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._state = f"failed: {root(_first(error))}"

    async def _kept(self) -> None:
        """Raises what ends the background."""
        assert self._keeper is not None
        await asyncio.shield(self._keeper)

    async def _step(self, step: int) -> Mapping[str, float]:
        async with self._turn:
            if self._halted:
                raise Halted(f"stopped before step {step}")
            try:
                ranks = list((await self._trainers.step.call(step)).values())
            except Exception as error:
                raise Halted(f"stopped before step {step}") if self._halted else error from None
            for rank, (_, spans) in enumerate(ranks):
                self._records.spans(f"trainer {rank}", spans)
            self._records.step = step
            if step % self.config.weights.every == 0 or step == self.config.steps:
                self._published = self.version
            self._unrecorded = step, trainer_figures([figures for figures, _ in ranks])
            return self._unrecorded[1]

    async def _evaluate(self, step: int) -> None:
        published = step if step == self.config.steps else step - step % self.config.weights.every
        evaluated = await self._evaluated(self.config.eval.prompts, published)
        self._records.put_evaluation(evaluated.figures())

    async def _evaluated(self, prompts: int, min_step: int, task: TaskSpec | None = None) -> Evaluated:
        workers: list[RolloutWorker] = [self._rollouts.slice(worker=i) for i in range(self.config.rollout.workers)]
        return await evaluate(workers, prompts, min_step, task)


def _heard(step: asyncio.Task[Any]) -> None:
    """A step that fails after its caller was cancelled, because the run ends, has nothing to tell."""
    if not step.cancelled():
        step.exception()


def _first(error: BaseException) -> BaseException:
    """The failure that ended a task group: a root cause before what it dragged along."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda e: isinstance(e, ActorDied))
    return error
