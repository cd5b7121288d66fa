"""The actors of a session, and what the loop asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from monarch_rl import checkpoint, resume
from monarch_rl.clocks import clock_offsets
from monarch_rl.config import Config
from monarch_rl.evaluation import Evaluated, evaluate
from monarch_rl.lives import Progress
from monarch_rl.loop import TrainerRestarted
from monarch_rl.meshes import START_DEADLINE_S, Meshes, first_failure
from monarch_rl.observe import timeline
from monarch_rl.observe.metrics import trainer_figures
from monarch_rl.recorded import Witness
from monarch_rl.records import Records
from monarch_rl.replicas import Replicas
from monarch_rl.saving import Saving, heard
from monarch_rl.supervise import answer, ended, root
from monarch_rl.trainers import Trainers
from monarch_rl.types import Version
from monarch_rl.watchdog import Watchdog
from monarch_rl.workers import Known, RolloutWorkers, Scorers

if TYPE_CHECKING:
    from monarch.actor import Future

    from monarch_rl.tasks import Task, TaskSpec

T = TypeVar("T")

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
        self._checkpointed = 0
        self._evaluations: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> Version:
        """Of the trainer's weights."""
        return self._records.version

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
            self._plans = await self._replicas.started()
            over = await self._trainers.answer(self._trainers.ranks.transport.call(), "trainers (transport)", START_DEADLINE_S)
            self._records.console.say(self._plans[0].summary(" and ".join(sorted(set(over.values())))))
            self._source = await self._trainers.open_rings(self._plans)
        elif version == self._published:
            return  # the loop asks for it whenever it begins
        await self._ask_trainers(lambda ranks: ranks.publish.call(self.version), "publish")
        self._published = self.version

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        await self._keep()
        unwritten = self._checkpoints.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                watches = [tasks.create_task(self._kept()), tasks.create_task(ended(unwritten))]
                yield
                await self._records.written()
                for watch in watches:
                    watch.cancel()
        except BaseExceptionGroup as group:
            raise first_failure(group) from None

    async def train_step(self, step: int) -> Mapping[str, float] | None:
        await self._go.wait()
        self._step_in_progress = asyncio.create_task(self._step(step), name=f"step {step}")
        self._step_in_progress.add_done_callback(heard)
        return await asyncio.shield(self._step_in_progress)

    def record(self, step: int, stats: Mapping[str, float]) -> None:
        self._unrecorded = None
        if step <= self.version.step:  # else it was undone before this was told
            self._records.put(step, stats)

    def due(self, what: Literal["eval", "checkpoint"], step: int) -> bool:
        every = getattr(self.config, what).every
        return bool(every and step % every == 0) or (step == self.config.steps and (what == "eval" or bool(every)))

    def start_evaluation(self, step: int) -> None:
        if self.config.eval.prompts and not self.config.replay:
            published = step if step == self.config.steps else step - step % self.config.weights.every
            of = self.version._replace(step=published)
            self._evaluations = {going for going in self._evaluations if not going.done()}
            self._evaluations.add(self._background.create_task(self._evaluate(of), name=f"evaluation of step {step}"))

    async def evaluations(self) -> None:
        ended = await asyncio.gather(*self._evaluations, return_exceptions=True)
        self._evaluations.clear()
        if any(isinstance(end, BaseException) for end in ended):
            await self._kept()  # it ends with whatever has ended them

    async def checkpoint(self) -> Path:
        """Write model, optimizer, ledger and waiting groups to `checkpoints/step_N`, for `resume`."""
        while True:
            await self.start_checkpoint()
            await self.checkpoints()
            if (folder := checkpoint.folder_of(self.output_dir, self._checkpointed)).exists():
                return folder  # else the trainers were lost before they had copied what they hold

    async def start_checkpoint(self) -> None:
        """What is to be written is copied between two steps; the writing goes on beside the training."""
        async with self._saving:
            await self.checkpoints()  # one at a time
            async with self._outlived(), self._turn:
                self._checkpointed = self.version.step
                self._trainers.check()
                await self._checkpoints.begin(self.version)

    async def checkpoints(self) -> None:
        async with self._outlived():
            await self._checkpoints.written()
            self._trainers.check()

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
            await self.restore()
            await self.checkpoints()
            if not self.version.step:
                return None
            folder = checkpoint.folder_of(self.output_dir, self.version.step)
            return folder if folder.exists() else await self.checkpoint()  # of an earlier step where the trainers are lost meanwhile

    async def save_model(self) -> Path:
        """Write the trained model as a Hugging Face directory, with adapters merged; these as peft does in `adapter/` beside it."""
        path = self.output_dir / "model"
        await self._ask_trainers(lambda ranks: ranks.save.call(path), "saving the model")
        if self.config.model.lora.rank:
            await self._ask_trainers(lambda ranks: ranks.save_adapters.call(path.with_name("adapter")), "saving the adapters")
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
        await self._trainers.load(found)
        self._records.trace.offsets_ns |= await clock_offsets(self._meshes.processes())

    def _spawn_actors(self, found: Path | None, keep_groups: bool) -> None:
        from actors.metrics import Metrics
        from actors.recording import Recording
        from actors.replay_buffer import ReplayBuffer

        config, meshes = self.config, self._meshes
        metrics = meshes["replay_buffer"].spawn("metrics", Metrics)
        say = self._records.console.say
        self._replicas, self._scorers = Replicas(config, meshes, metrics, say), Scorers(config, meshes, metrics, say)
        self._replicas.pool.spawn(0 if config.replay else config.generator.replicas)
        progress = Progress(0, 0, {}) if found is None else checkpoint.read_progress(found)
        if config.replay:
            self._buffer: Any = meshes["replay_buffer"].spawn("replay_buffer", Recording, config)
        else:
            self._buffer = meshes["replay_buffer"].spawn("replay_buffer", ReplayBuffer, config, found, keep_groups)
        self._trainers = Trainers(config, meshes, self._buffer, progress.lineage)
        self._checkpoints = Saving(config, self._task, self._trainers, self._buffer, found)
        self._records.begin(Version(progress.lineage, progress.step), metrics, self._buffer)
        known = Known(self._buffer, self._replicas.pool.joined, self._scorers.pool.joined, metrics)
        self._rollouts = RolloutWorkers(config, meshes, known, say)
        if not config.replay:
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
        for replies in ([buffer, *engines, *scorers], [self._trainers.ranks.shut.call()]):
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
            watchdog = Watchdog(self._meshes.processes, self._records.console.say, self._meshes.hung, self.config.buffer.hang_s)
            tasks.create_task(watchdog.watch(), name="watchdog")
            self._begun.set()
            self._trainers.watch()
            tasks.create_task(self._keep_trainers(), name="trainers")
            if not self.config.replay:
                self._rollouts.begin(tasks)
                self._scorers.begin(tasks, self._rollouts)
                self._replicas.begin(tasks, self._source, self._rollouts)

    def _over(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._state = f"failed: {root(first_failure(error))}"

    async def _kept(self) -> None:
        """Raises what ends the background."""
        assert self._keeper is not None
        await asyncio.shield(self._keeper)

    async def _step(self, step: int) -> Mapping[str, float] | None:
        async with self._outlived():
            return await self._step_once(step)
        raise TrainerRestarted

    async def _step_once(self, step: int) -> Mapping[str, float] | None:
        async with self._turn:
            if self._halted:
                raise Halted(f"stopped before step {step}")
            self._trainers.check()  # those that take their place know nothing yet, and would wait for a batch
            if step != self.version.step + 1:
                raise TrainerRestarted
            try:
                reply = self._trainers.ranks.step.call(step)
                ranks = list((await self._trainers.answer(reply, f"trainers (step {step})", None)).values())
            except Exception as error:
                raise Halted(f"stopped before step {step}") if self._halted else error from None
            for rank, stepped in enumerate(ranks):
                self._records.spans(f"trainer {rank}", stepped.spans)
            if not ranks[0].figures:
                self._set_steps(step - 1)
                return None
            self._records.version = self.version._replace(step=step)
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

    # --- when trainers are lost -------------------------------------------------------------------------------------

    async def _keep_trainers(self) -> None:
        """Restart the trainers whenever one is lost, for ever. Generators, rollouts and the replay buffer go on meanwhile."""
        while True:
            why = await self._trainers.lost()
            with timeline.span("restart"):
                await self._trainers.renew(why)
                async with self._turn:  # what held it has heard of the loss
                    try:
                        await self._go_back(why)
                    except Exception as error:
                        if not await self._trainers.one_died(error):
                            raise
            self._records.spans("trainer 0", timeline.drain())

    async def _go_back(self, why: str) -> None:
        """Have new trainers go on from the last checkpoint, and all others with them."""
        await self._checkpoints.abandon()
        newest, version = self._checkpoints.newest, Version(self._trainers.lineage, self._checkpoints.newest_step())
        self._records.console.say(f"{why}; the trainers start again at step {version.step}, from {newest or 'the initial model'}")
        await self._trainers.load(newest)
        await self._records.written()
        await answer(self._buffer.go_back.call_one(version.step, version.lineage), "replay buffer (going back)", START_DEADLINE_S)
        self._records.go_back(version)
        self._unrecorded, self._published = None, version
        self._source = await self._trainers.open_rings(self._plans)
        await self._trainers.answer(self._trainers.ranks.publish.call(version), "trainers (publish)", START_DEADLINE_S)
        self._replicas.renew(self._source)
        self._trainers.are_renewed()

    @contextlib.asynccontextmanager
    async def _outlived(self) -> AsyncIterator[None]:
        """Where the body fails since the trainers are lost, that is no failure; then they have been restarted when this returns."""
        renewed = self._trainers.renewed
        try:
            yield
        except (Halted, TrainerRestarted):
            raise
        except Exception as error:
            if self._keeper is None or not (renewed.done() or await self._trainers.are_lost(error)):
                raise
            await asyncio.wait({renewed, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
            if not renewed.done():
                await self._kept()

    async def _ask_trainers(self, ask: Callable[[Any], Future[T]], what: str) -> T:
        """Of all ranks, between two steps; again where they were restarted meanwhile."""
        while True:
            async with self._outlived(), self._turn:
                self._trainers.check()
                return await self._trainers.answer(ask(self._trainers.ranks), f"trainers ({what})", START_DEADLINE_S)

    async def _evaluate(self, of: Version) -> None:
        evaluated = await self._evaluated(self.config.eval.prompts, of)
        self._records.put_evaluation(evaluated.figures())

    async def _evaluated(self, prompts: int, of: Version, task: TaskSpec | None = None) -> Evaluated:
        """By weights of at least `of`."""
        while self.config.eval.pin:
            async with self._replicas.pinned(of.pack()) as replica:
                evaluated = await evaluate(self._rollouts.routes, prompts, of.pack(), task, replica)
            if not evaluated.mixed:  # else the replica was lost
                return evaluated
        return await evaluate(self._rollouts.routes, prompts, of.pack(), task)
