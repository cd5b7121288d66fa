"""The actors of a session, and what the loop asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monarch_rl import checkpoint, resume
from monarch_rl.clocks import clock_offsets
from monarch_rl.config import Config
from monarch_rl.evaluation import Evaluated, evaluate
from monarch_rl.lives import Progress
from monarch_rl.meshes import SILENT_S, START_DEADLINE_S, ActorDied, Meshes
from monarch_rl.observe.metrics import trainer_figures
from monarch_rl.recorded import Witness
from monarch_rl.records import Records
from monarch_rl.replicas import Replicas, Source
from monarch_rl.supervise import answer, ended, root
from monarch_rl.types import Version
from monarch_rl.watchdog import Watchdog
from monarch_rl.workers import Known, RolloutWorkers, Scorers

if TYPE_CHECKING:
    from monarch.actor import Future

    from monarch_rl.tasks import Task, TaskSpec
    from monarch_rl.weights.plan import LoadPlan

CLOSE_S = 10.0
"""For an orderly end of all processes, once nothing more is to be saved."""
STOP_S = 1.0
"""For Monarch to take note, when all processes have ended."""


class Halted(Exception):
    """The session was asked to stop, and stands between two steps."""


class Running:
    """Starts the actors of a run and keeps them going. Satisfies `loop.System`; `Session` is this and what a user does with it."""

    _task: Task
    """Known when the configuration was looked at."""

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
        self._setting = asyncio.Lock()
        self._turn = asyncio.Lock()  # held by a step, and by what must stand between two steps
        self._keeper: asyncio.Task[None] | None = None
        self._step_in_progress: asyncio.Task[Mapping[str, float] | None] | None = None
        self._unrecorded: tuple[int, Mapping[str, float]] | None = None
        self._training: asyncio.Task[Any] | None = None
        self._halted = False
        self._published: Version | None = None
        self._saving = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None  # a checkpoint
        self._unwritten: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # fails when one cannot be written
        self._checkpointed = 0
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
        if self.config.replay:
            self._published = self.version
            return
        if self._published is None:
            plan = await self._replicas.started()
            over = await answer(self._trainers.transport.call(), "trainers (transport)", START_DEADLINE_S)
            what = "weights travel" if plan.base is None else "adapters travel"
            self._records.console.say(f"{what} over {' and '.join(sorted(set(over.values())))}")
            rings = await answer(self._trainers.open_ring.call(plan), "trainers (staging slots)", START_DEADLINE_S)
            self._source = Source(self._publishers, list(rings.values()), plan.digest, await self._base(plan))
        elif version == self._published:
            return  # the loop asks for it whenever it begins
        async with self._turn:
            await answer(self._trainers.publish.call(self.version), "trainers (publish)", START_DEADLINE_S)
            self._published = self.version

    async def _base(self, plan: LoadPlan) -> dict[str, int]:
        """Fingerprints of what generators have read from the model's directory, for them to compare."""
        if plan.base is None or self.config.weights.verify == "off":
            return {}
        ranks = await answer(self._trainers.fingerprints.call(plan.base), "trainers (base model)", START_DEADLINE_S)
        return dict(next(iter(ranks.values())))

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        await self._keep()
        self._unwritten = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._kept()), tasks.create_task(ended(self._unwritten))]
                yield
                await self._records.written()
                for watch in watches:
                    watch.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def train_step(self, step: int) -> Mapping[str, float] | None:
        await self._go.wait()
        self._step_in_progress = asyncio.create_task(self._step(step), name=f"step {step}")
        self._step_in_progress.add_done_callback(_heard)
        return await asyncio.shield(self._step_in_progress)

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        self._unrecorded = None
        self._records.put(step, stats)

    def due(self, what: Literal["eval", "checkpoint"], step: int) -> bool:
        every = getattr(self.config, what).every
        return bool(every and step % every == 0) or (step == self.config.steps and (what == "eval" or bool(every)))

    def start_evaluation(self, step: int) -> None:
        if self.config.eval.prompts and not self.config.replay:
            self._evaluations.add(self._background.create_task(self._evaluate(step), name=f"evaluation of step {step}"))

    async def evaluations(self) -> None:
        ended = await asyncio.gather(*self._evaluations, return_exceptions=True)
        self._evaluations.clear()
        if any(isinstance(end, BaseException) for end in ended):
            await self._kept()  # it ends with whatever has ended them

    async def checkpoint(self) -> Path:
        """Write model, optimizer, ledger and waiting groups to `checkpoints/step_N`, for `resume`."""
        await self.start_checkpoint()
        await self.checkpoints()
        return checkpoint.folder_of(self.output_dir, self._checkpointed)

    async def start_checkpoint(self) -> None:
        """What is to be written is copied between two steps; the writing goes on beside the training."""
        async with self._saving:
            await self.checkpoints()  # one at a time
            await self._start_checkpoint()

    async def _start_checkpoint(self) -> None:
        async with self._turn:
            self._checkpointed = self.version.step
            folder = checkpoint.folder_of(self.output_dir, self._checkpointed)
            snapshot = self._buffer.snapshot.call_one(self._checkpointed)
            progress: Progress = await answer(snapshot, "replay buffer (snapshot)", 60.0)
            copied = self._trainers.checkpoint.call(checkpoint.unfinished(folder))  # before the next step, since messages keep their order
        self._writing = asyncio.create_task(self._write_checkpoint(folder, progress, copied), name=f"checkpoint of step {progress.step}")
        self._writing.add_done_callback(self._written)

    def _written(self, writing: asyncio.Task[None]) -> None:
        """A training that goes on beside it hears at once of a checkpoint that cannot be written."""
        if not writing.cancelled() and (error := writing.exception()) is not None and not self._unwritten.done():
            self._unwritten.set_exception(error)
            self._unwritten.exception()  # there may be no training

    async def checkpoints(self) -> None:
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            finally:
                if self._writing is writing and writing.done():
                    self._writing = None

    async def _write_checkpoint(self, folder: Path, progress: Progress, copied: Future[Any]) -> None:
        unfinished = checkpoint.unfinished(folder)
        try:
            await answer(copied, "trainers (checkpoint)", START_DEADLINE_S)
            await answer(self._buffer.save.call_one(unfinished), "replay buffer (checkpoint)", START_DEADLINE_S)
            resume.write(unfinished, self.config, self._task)
            checkpoint.complete(folder, progress, self.config.checkpoint.keep)
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    async def halt(self) -> None:
        """Have the training end with `Halted` after the step in progress, or before it where its batch is not complete."""
        self._halted = True
        self._go.set()
        await answer(self._buffer.close.call_one(), "replay buffer (close)", 30.0)

    @property
    def worth_saving(self) -> bool:
        """Whether a step was begun, after which `stop` writes a checkpoint."""
        return self._step_in_progress is not None and not self.config.replay

    async def stop(self) -> Path | None:
        """After training was cancelled: wait for the step in progress where its batch is complete, record it, and see that there is a
        checkpoint of it, which is returned. None: no step is done."""
        await self.halt()
        async with self.background():
            version = await self.restore()
            await self.checkpoints()
            folder = checkpoint.folder_of(self.output_dir, version.step)
            if version.step and not folder.exists():
                await self.checkpoint()
        return folder if version.step else None

    async def save_model(self) -> Path:
        """Write the trained model as a Hugging Face directory, with adapters merged; these as peft does in `adapter/` beside it."""
        path = self.output_dir / "model"
        await answer(self._trainers.save.call(path), "trainers (saving the model)", START_DEADLINE_S)
        if self.config.model.lora.rank:
            await answer(self._trainers.save_adapters.call(path.with_name("adapter")), "trainers (saving the adapters)", START_DEADLINE_S)
        return path

    def close_console(self) -> None:
        """Give the terminal back, whatever the actors do."""
        self._records.console.close()

    # --- start and end ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        found, resumed = resume.start(self.config, self._task)
        for line in resumed.told:
            self._records.console.say(line)
        self._meshes.watch()
        await self._meshes.open()
        if url := self._meshes.hosts.dashboard.url:
            self._records.console.say(f"Monarch's dashboard: {url} on {socket.gethostname()}")
        self._witness = Witness(self.config, resumed.exact)
        self._spawn_actors(found, resumed.keep_groups)
        from monarch.spmd import setup_torch_elastic_env_async

        await self._meshes.alive("trainer processes", setup_torch_elastic_env_async(self._meshes["trainer"]))
        await self._meshes.alive("trainers (model load)", self._trainers.setup.call().as_asyncio())
        self._records.trace.offsets_ns |= await clock_offsets(self._meshes.processes())
        if found is not None:
            await self._meshes.alive("trainers (checkpoint)", self._trainers.restore.call(found).as_asyncio())

    def _spawn_actors(self, found: Path | None, keep_groups: bool) -> None:
        from actors.metrics import Metrics
        from actors.publisher import Publisher
        from actors.recording import Recording
        from actors.replay_buffer import ReplayBuffer
        from actors.trainer import Trainer

        config, meshes = self.config, self._meshes
        metrics = meshes["replay_buffer"].spawn("metrics", Metrics)
        say = self._records.console.say
        self._replicas, self._scorers = Replicas(config, meshes, metrics, say), Scorers(config, meshes, metrics, say)
        self._replicas.pool.spawn(0 if config.replay else config.generator.replicas)
        after = 0 if found is None else checkpoint.read_progress(found).step
        if config.replay:
            self._buffer: Any = meshes["replay_buffer"].spawn("replay_buffer", Recording, config)
        else:
            self._buffer = meshes["replay_buffer"].spawn("replay_buffer", ReplayBuffer, config, found, keep_groups)
        self._trainers = meshes["trainer"].spawn("trainer", Trainer, config, self._buffer)
        self._records.begin(after, metrics, self._buffer)
        known = Known(self._buffer, self._replicas.pool.joined, self._scorers.pool.joined, metrics)
        self._rollouts = RolloutWorkers(config, meshes, known, say)
        if not config.replay:
            self._publishers = meshes["trainer"].spawn("publisher", Publisher)
            self._scorers.pool.spawn(config.scorer.workers)
            self._rollouts.pool.spawn(config.rollout.workers)

    async def _shut(self, deadline_s: float) -> None:
        """Let actors put down what they hold. One that has died, hangs or computes for longer misses nothing but this."""
        await self._replicas.shut(deadline_s)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._records.collect(), deadline_s)  # of the last pull and swap
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._meshes.fault.cancel()
        await self._meshes.end(*self._rollouts.pool.meshes)
        buffer = self._buffer.close.call_one()  # trainers that wait for a batch hear that there will be none
        engines = [generator.shut.call_one() for generator in self._replicas.live.values()]
        scorers = [scorer.shut.call_one() for scorer in self._scorers.pool.live.values()]
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
            watchdog = Watchdog(self._meshes.processes, self._records.console.say, self._meshes.hung, SILENT_S)
            tasks.create_task(watchdog.watch(), name="watchdog")
            self._begun.set()
            if not self.config.replay:
                self._rollouts.begin(tasks)
                self._scorers.begin(tasks, self._rollouts)
                self._replicas.begin(tasks, self._source, self._rollouts)

    def _over(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._state = f"failed: {root(_first(error))}"

    async def _kept(self) -> None:
        """Raises what ends the background."""
        assert self._keeper is not None
        await asyncio.shield(self._keeper)

    async def _step(self, step: int) -> Mapping[str, float] | None:
        async with self._turn:
            if self._halted:
                raise Halted(f"stopped before step {step}")
            try:
                ranks = list((await answer(self._trainers.step.call(step), f"trainers (step {step})", None)).values())
            except Exception as error:
                raise Halted(f"stopped before step {step}") if self._halted else error from None
            for rank, stepped in enumerate(ranks):
                self._records.spans(f"trainer {rank}", stepped.spans)
            if not ranks[0].figures:
                self._set_steps(step - 1)
                return None
            self._records.step = step
            if fingerprints := [stepped.weights for stepped in ranks if stepped.weights]:
                self._witness.see(step, fingerprints)
            if step % self.config.weights.every == 0 or step == self.config.steps:
                self._published = self.version
            self._unrecorded = step, trainer_figures([stepped.figures for stepped in ranks])
            return self._unrecorded[1]

    def _set_steps(self, steps: int) -> None:
        """The data hold no more than so many."""
        self.config.steps = steps
        self._records.console.set_steps(steps)

    async def _evaluate(self, step: int) -> None:
        published = step if step == self.config.steps else step - step % self.config.weights.every
        evaluated = await self._evaluated(self.config.eval.prompts, published)
        self._records.put_evaluation(evaluated.figures())

    async def _evaluated(self, prompts: int, min_step: int, task: TaskSpec | None = None) -> Evaluated:
        while self.config.eval.pin:
            async with self._replicas.pinned(min_step) as replica:
                evaluated = await evaluate(self._rollouts.routes, prompts, min_step, task, replica)
            if not evaluated.mixed:  # else the replica was lost
                return evaluated
        return await evaluate(self._rollouts.routes, prompts, min_step, task)


def _heard(step: asyncio.Task[Any]) -> None:
    """A step that fails after its caller was cancelled, because the run ends, has nothing to tell."""
    if not step.cancelled():
        step.exception()


def _first(error: BaseException) -> BaseException:
    """The failure that ended a task group: a root cause before what it dragged along."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda e: isinstance(e, ActorDied))
    return error
