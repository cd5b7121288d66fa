"""A running system: what the loop asks of it, and what a user does with it while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monarch_rl import checkpoint, loop
from monarch_rl.changes import settle
from monarch_rl.cluster import local
from monarch_rl.config import Config, UserError
from monarch_rl.evaluation import Evaluated, evaluate
from monarch_rl.ledger import Progress
from monarch_rl.meshes import START_DEADLINE_S, ActorDied, Meshes
from monarch_rl.observe import tables
from monarch_rl.observe.metrics import trainer_figures
from monarch_rl.observe.tables import Samples, Table
from monarch_rl.records import Records
from monarch_rl.replicas import Replicas
from monarch_rl.supervise import answer, root
from monarch_rl.types import Sampling, Version

if TYPE_CHECKING:
    from actors.rollout import RolloutWorker
    from monarch_rl.rendering import Renderer
    from monarch_rl.types import Message

STOP_S = 1.0
"""For Monarch to take note, when all processes have ended."""


class Halted(Exception):
    """The session was asked to stop, and stands between two steps."""


class Session:
    """`async with Session(config) as session: await session.train()`. Satisfies `loop.System`.

    In a notebook, where a session outlives a cell: `session = await Session(config).start()`, and at the end `await session.close()`.
    Training can run in the background, as `asyncio.create_task(session.train())`; everything else works meanwhile.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self._meshes = Meshes(config)
        self._records = Records(config)
        self._state = "not started"
        self._go = asyncio.Event()
        self._go.set()
        self._begun = asyncio.Event()
        self._turn = asyncio.Lock()  # held by a step, and by what must stand between two steps
        self._scaling = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._step_in_progress: asyncio.Task[Mapping[str, float]] | None = None
        self._unrecorded: tuple[int, Mapping[str, float]] | None = None
        self._training = self._halted = self._published = False
        self._evaluations: set[asyncio.Task[None]] = set()

    async def start(self) -> Session:
        """Start all processes, and load the model. Engines may still be starting when this returns."""
        try:
            self._records.console.start()
            self._state = "starting"
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error)
            raise
        self._state = "ready"
        return self

    __aenter__ = start

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Raises ActorDied in place of the errors that a death has caused in others."""
        try:
            if isinstance(error, Exception) and not isinstance(root(error), UserError):
                died = await self._meshes.death()
                if died is not None and died is not error:
                    raise ActorDied(str(died)) from error
        finally:
            await self.close()

    # --- what the loop asks for -------------------------------------------------------------------------------------

    async def restore(self) -> Version:
        if self._step_in_progress is not None:  # an earlier call was cancelled in the middle of a step
            await asyncio.wait({self._step_in_progress})
        if self._unrecorded is not None:
            self.record(*self._unrecorded)
        return self.version

    async def publish(self, version: Version | None = None) -> None:
        """Stage the trainer's weights for the generators, which pull them if they are newer than what they have."""
        if not self._published:
            plan = await self._replicas.started()
            rings = await answer(self._trainers.open_ring.call(plan), "trainers (staging slots)", START_DEADLINE_S)
            self._followed = self._publishers, list(rings.values()), plan.digest
        elif version is not None:
            return  # the loop asks for it whenever it begins
        self._published = True
        async with self._turn:
            await answer(self._trainers.publish.call(version or self.version), "trainers (publish)", START_DEADLINE_S)

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

    # --- training by hand -------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        """Of the trainer's weights."""
        return Version(0, self._records.step)

    async def train(self, until: int | None = None) -> None:
        """Train until `until` optimizer steps are done (None: all of `steps`), as the command line does.

        Raises:
            UserError: it is training already, or closed.
        """
        if self._training:
            raise UserError("this session is training already; pause() and resume() it, or wait for that to end")
        if self._state in ("not started", "closed"):
            raise UserError(f"this session is {self._state}")
        self._training, self._state = True, "training"
        try:
            await loop.train(self, until)
            self._state = "done" if self.version.step >= self.config.steps else "ready"
        except BaseException as error:
            self._state = "interrupted" if isinstance(error, (asyncio.CancelledError, Halted)) else f"failed: {root(error)}"
            raise
        finally:
            self._training = False

    async def step(self, n: int = 1) -> Table:
        """Train `n` optimizer steps and show their rows."""
        first = self.version.step
        await self.train(first + n)
        return tables.of_rows([row for row in self._records.rows if row["step"] > first])

    async def pause(self) -> None:
        """Begin no optimizer step until `resume`; returns when the one in progress is done. Rollouts go on as far as `max_age` allows."""
        self._go.clear()
        async with self._turn:
            self._state = "paused"

    def resume(self) -> None:
        """Go on after `pause`."""
        self._state = "training" if self._training else "ready"
        self._go.set()

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

    async def set(self, **values: Any) -> Table:
        """Change what may change while it runs: lr, temperature, max_new_tokens, max_age (among values above 0), and how often to evaluate,
        checkpoint and print. Groups that were started keep what they were started with.

        Raises:
            ConfigError: one of the keys or values is not allowed; then nothing is changed.
        """
        config, changed = settle(self.config, values)
        if "trainer.lr" in changed:
            await answer(self._trainers.set_lr.call(config.trainer.lr), "trainers (learning rate)", START_DEADLINE_S)
        if changed.keys() & {"generator.temperature", "generator.max_new_tokens"}:
            sampling = config.generator.temperature, config.generator.max_new_tokens
            await answer(self._rollouts.set_sampling.call(*sampling), "rollout workers (sampling)", 60.0)
        if "buffer.max_age" in changed:
            await answer(self._buffer.set_max_age.call_one(config.buffer.max_age), "replay buffer (max_age)", 60.0)
        for name in vars(config):
            setattr(self.config, name, getattr(config, name))
        return Table("changed", ("key", "was", "is"), [(key, was, now) for key, (was, now) in changed.items()])

    async def scale(self, generators: int) -> Table:
        """Start or end generator replicas while everything goes on. A new one takes requests when it holds the newest weights; one that
        leaves is sent no more, and ends when its last request has come back."""
        if generators < 1:
            raise UserError(f"generators={generators}: there must be at least 1")
        await self._live()
        async with self._scaling:
            live = self._replicas.live
            if (more := generators - len(live)) > 0:
                await asyncio.gather(*[self._add(number) for number in self._replicas.spawn(more)])
            for number in sorted(live, reverse=True)[: max(0, -more)]:
                await self._remove(number)
        return self.generators

    # --- looking at it ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | list[Message],
        n: int = 1,
        *,
        replica: int | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> Samples:
        """`n` completions by the live policy, with the version behind each token.

        Raises:
            UserError: there is no such replica.
        """
        await self._live()
        live, asked = self._replicas.live, self.config.generator
        if replica is not None and replica not in live:
            raise UserError(f"replica={replica}: there are {', '.join(map(str, sorted(live)))}")
        limit = asked.max_new_tokens if max_new_tokens is None else max_new_tokens
        sampling = Sampling(limit, asked.temperature if temperature is None else temperature, self._renderer.stop_ids)
        generator = live[min(live) if replica is None else replica]
        reply = generator.generate.call_one(self._renderer.render(prompt), sampling, [seed + i for i in range(n)], 0)
        generations = await answer(reply, "generator", self.config.rollout.deadline_s)
        return tables.of_generations(prompt, generations, self._renderer)

    async def evaluate(self, task: str | None = None, prompts: int | None = None) -> Evaluated:
        """Held-out accuracy of the live policy, on the task that is trained or another one.

        Raises:
            UserError: there is no such task.
        """
        await self._live()
        return await self._evaluated(prompts or self.config.eval.prompts or 256, 0, task)

    async def rollouts(self, k: int = 8) -> Samples:
        """The `k` groups that were finished last, one episode a line."""
        groups = await answer(self._buffer.samples.call_one(k), "replay buffer (samples)", 60.0)
        return tables.of_groups(groups, self.version)

    @property
    def buffer(self) -> Table:
        """Who holds which prompt, as of the last second."""
        return tables.of_buffer(self._records.holdings)

    @property
    def generators(self) -> Table:
        """What each generator holds and does, as it last reported."""
        return tables.of_generators([r for r in self._records.reports if r.replica in self._replicas.live], self.version)

    @property
    def weights(self) -> Table:
        """How the weights travel."""
        return tables.of_weights([r for r in self._records.reports if r.replica in self._replicas.live], self.version)

    @property
    def trainer(self) -> Table:
        """The last steps."""
        return tables.of_rows(self._records.rows[-8:])

    def __repr__(self) -> str:
        return repr(self._summary())

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    async def close(self) -> None:
        """End everything: rollouts, engines, trainers, processes. Takes at most `close_deadline_s`. May be called twice."""
        if self._state == "closed":
            return
        deadline_s = self.config.close_deadline_s - STOP_S
        ended = asyncio.get_running_loop().time() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                if self._published:
                    await self._shut(deadline_s / 4)
        self._records.console.close()
        await self._meshes.close(max(1.0, ended - asyncio.get_running_loop().time()), STOP_S)
        self._records.close()
        self._state = "closed"

    # --- start and end ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        found = checkpoint.to_resume(self.config.resume, self.output_dir)
        progress = Progress(0, 0, {}) if found is None else checkpoint.read_progress(found)
        self._meshes.watch()
        self._meshes.spawn(local.place(self.config, 0))
        self._spawn_actors(progress)
        from monarch.spmd import setup_torch_elastic_env_async

        await self._meshes.alive("trainer processes", setup_torch_elastic_env_async(self._meshes["trainer"]))
        await self._meshes.alive("trainers (model load)", self._trainers.setup.call().as_asyncio())
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
        self._replicas = Replicas(config, meshes, metrics)
        self._replicas.spawn(config.generator.replicas)
        self._buffer = meshes["replay_buffer"].spawn("replay_buffer", ReplayBuffer, config, progress)
        self._trainers = meshes["trainer"].spawn("trainer", Trainer, config, self._buffer)
        self._publishers = meshes["trainer"].spawn("publisher", Publisher)
        scorers = meshes["scorer"].spawn("scorer", Scorer, config.task, config.task_args, config.seed, config.scorer.deadline_s)
        self._scorers = [scorers.slice(worker=i) for i in range(config.scorer.workers)]
        self._rollouts = meshes["rollout"].spawn("rollout", RolloutWorker, config, self._buffer, self._replicas.live, self._scorers)
        self._records.begin(progress.step, metrics, self._buffer)

    async def _shut(self, deadline_s: float) -> None:
        """Let actors put down what they hold. One that has died, hangs or computes for longer misses nothing but this."""
        unfollowed = [self._replicas.unfollow(number) for number in self._replicas.live]
        await asyncio.gather(*[asyncio.wait_for(each, deadline_s) for each in unfollowed], return_exceptions=True)
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
            tasks.create_task(_ended(self._meshes.fault), name="watch")
            tasks.create_task(self._records.listen(), name="listen")
            tasks.create_task(self._records.write(), name="records")
            for number in self._replicas.live:
                tasks.create_task(self._replicas.follow(number, *self._followed), name=f"generator {number}")
            self._begun.set()
            tasks.create_task(_ended(self._rollouts.work.call().as_asyncio()), name="rollouts")

    def _over(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._state = f"failed: {root(_first(error))}"

    async def _kept(self) -> None:
        """Raises what ends the background."""
        assert self._keeper is not None
        await asyncio.shield(self._keeper)

    async def _live(self) -> None:
        """The policy can be asked: the first weights are published, and the background runs."""
        if not self._published:
            await self.publish(self.version)
        await self._keep()
        if self._keeper is not None and self._keeper.done():
            raise UserError(f"this session has {self._state}")

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
            self._unrecorded = step, trainer_figures([figures for figures, _ in ranks])
            return self._unrecorded[1]

    async def _evaluate(self, step: int) -> None:
        published = step if step == self.config.steps else step - step % self.config.weights.every
        evaluated = await self._evaluated(self.config.eval.prompts, published)
        self._records.put_evaluation(evaluated.figures())

    async def _evaluated(self, prompts: int, min_step: int, task: str | None = None) -> Evaluated:
        workers: list[RolloutWorker] = [self._rollouts.slice(worker=i) for i in range(self.config.rollout.workers)]
        return await evaluate(workers, prompts, min_step, task)

    async def _add(self, number: int) -> None:
        publishers, slots, _ = self._followed
        following = await self._replicas.add(number, publishers, slots)
        self._background.create_task(_ended(following), name=f"generator {number}")
        await answer(self._rollouts.add_generator.call(number, self._replicas.live[number]), "rollout workers (new generator)", 60.0)

    async def _remove(self, number: int) -> None:
        await answer(self._rollouts.drain_generator.call(number), f"generator {number} (last requests)", self.config.rollout.deadline_s)
        await self._replicas.unfollow(number)
        await self._replicas.end(number)

    @cached_property
    def _renderer(self) -> Renderer:
        from monarch_rl.rendering import Renderer

        return Renderer.of(self.config.model)

    def _summary(self) -> Table:
        return tables.of_session(self.config, self._state, self.version, self._records.rows)


async def _ended(waited: asyncio.Future[Any]) -> None:
    """Wait for what is not to be cancelled with its waiter."""
    await asyncio.shield(waited)


def _first(error: BaseException) -> BaseException:
    """The failure that ended a task group: a root cause before what it dragged along."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda e: isinstance(e, ActorDied))
    return error
