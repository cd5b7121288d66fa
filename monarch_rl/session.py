"""A session: a running system, and what a user does with it while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from monarch_rl import figures, loop, preflight, tables, watchdog
from monarch_rl.changes import settle, tell
from monarch_rl.config import Config, UserError
from monarch_rl.evaluation import Evaluated
from monarch_rl.generator_config import SAMPLED_BY
from monarch_rl.meshes import ActorDied
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.report import read_rows
from monarch_rl.output import check_output_dir, make_output_dir
from monarch_rl.running import CLOSE_S, STOP_S, Halted, Running
from monarch_rl.supervise import answer, cause, root
from monarch_rl.tables import BufferTable, Samples, Table
from monarch_rl.types import Sampling, Version

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from monarch_rl.lives import Life, State
    from monarch_rl.rendering import Renderer
    from monarch_rl.tasks import TaskSpec
    from monarch_rl.types import Message


DEFAULT_CURVES = (("reward/mean", "eval/accuracy"), ("age/mean", "age/max"), ("idle/trainer", "idle/generator"))


class Session(Running):
    """`async with Session(config) as session: await session.train()`. Satisfies `loop.System`.

    In a notebook, where a session outlives a cell: `session = await Session(config).start()`, and at the end `await session.close()`.
    Training can run in the background, as `asyncio.create_task(session.train())`; everything else works meanwhile.
    """

    _open: ClassVar[Session | None] = None
    """Monarch tells a process of deaths in one place only, so sessions follow one another."""

    async def start(self) -> Session:
        """Look for mistakes, make the output folder, start all processes, load the model. Engines may still be starting when this returns.

        Raises:
            UserError: something in the configuration is wrong, it was started before, or another session of this process is open.
        """
        if self._state != "not started":
            raise UserError(f"this session is {self._state}; make a new one: Session(config)")
        if Session._open is not None:
            raise UserError(
                f"another session is open in this process ({Session._open.output_dir}): close it first, `await session.close()`"
            )
        check_output_dir(self.config)
        _, self._task = preflight.check(self.config)
        make_output_dir(self.config)
        if (steps := preflight.steps_of_data(self.config, self._task)) is not None:
            asked = self.config.steps
            self._set_steps(min(steps, asked))
            cut = f"; steps={asked} ends the run before" if asked < steps else ""
            self._records.console.say(f"epochs={self.config.epochs}: {_count(steps, 'step')} in the data{cut}")
        ranks, generator = self.config.trainer.ranks, self.config.generator
        of = f" of {generator.tensor_parallel} ranks" if generator.tensor_parallel > 1 else ""
        self._records.console.say(f"starting {_count(ranks, 'trainer rank')} and {_count(generator.replicas, 'vLLM engine')}{of}")
        Session._open = self
        try:
            self._records.start()
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
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._records.ends("failed", cause(error))
        try:
            if isinstance(error, Exception) and not isinstance(root(error), UserError):
                died = await self._meshes.death()
                if died is not None and died is not error:
                    self._records.ends("failed", str(died))
                    raise ActorDied(str(died)) from error
        finally:
            await self.close()

    async def close(self) -> None:
        """End everything: rollouts, engines, trainers, processes. Takes at most `CLOSE_S`, or `close_deadline_s`. May be called twice."""
        if self._state == "closed":
            return
        if self._training not in (None, asyncio.current_task()):
            self._training.cancel()
        deadline_s = min(CLOSE_S, self.config.close_deadline_s) - STOP_S
        ended = asyncio.get_running_loop().time() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                if self._published is not None:
                    await self._shut(deadline_s / 4)
        self._records.console.close()
        await self._meshes.close(max(1.0, ended - asyncio.get_running_loop().time()), STOP_S)
        await self._records.close()
        self._state = "closed"
        if Session._open is self:
            Session._open = None

    # --- training ---------------------------------------------------------------------------------------------------

    async def train(self, until: int | None = None) -> None:
        """Train until `until` optimizer steps are done (None: all of `steps`), as the command line does.

        Raises:
            UserError: it is training already, or closed.
        """
        if self._training is not None:
            raise UserError("this session is training already; pause() and resume() it, or wait for that to end")
        self._check_open()
        self._training, self._state = asyncio.current_task(), "training"
        try:
            await loop.train(self, until)
            self._state = "done" if self.version.step >= self.config.steps else "ready"
            if self._state == "done":
                self._records.ends("done")
        except BaseException as error:
            self._state = "interrupted" if isinstance(error, (asyncio.CancelledError, Halted)) else f"failed: {root(error)}"
            raise
        finally:
            self._training = None

    async def step(self, n: int = 1) -> Table:
        """Train `n` optimizer steps and show their rows."""
        first = self.version.step
        await self.train(first + n)
        return tables.of_rows([row for row in self._rows() if row["step"] > first])

    async def pause(self) -> None:
        """Begin no optimizer step until `resume`; returns when the one in progress is done. Rollouts go on as far as `max_age` allows."""
        self._go.clear()
        async with self._turn:
            self._state = "paused"

    def resume(self) -> None:
        """Go on after `pause`."""
        self._state = "training" if self._training else "ready"
        self._go.set()

    async def set(self, **values: Any) -> Table:
        """Change what may change while it runs: lr, temperature, max_new_tokens, max_age (among values above 0), top_k, top_p and min_p
        (as long as one of them leaves ids out), and how often to evaluate, checkpoint and print. Groups that were started keep what they
        were started with.

        Raises:
            ConfigError: one of the keys or values is not allowed; then nothing is changed.
            UserError: an actor could not be told; then all are as before, but for those that it names.
        """
        async with self._setting:
            config, changed = settle(self.config, values)
            self._check_open()
            await tell(self._listeners(changed), config, self.config)
            for key, (_, now) in changed.items():
                section, field = key.split(".")
                setattr(getattr(self.config, section), field, now)
        return Table("changed", ("key", "was", "is"), [(key, was, now) for key, (was, now) in changed.items()])

    def _listeners(self, changed: Iterable[str]) -> Mapping[str, Callable[[Config], Awaitable[Any]]]:
        """The actors that go by these keys, by name, and how they are told."""

        async def learning_rate(config: Config) -> None:
            await self._ask_trainers(lambda ranks: ranks.set_lr.call(config.trainer.lr), "learning rate")

        async def sampling(config: Config) -> None:
            told = config.generator
            await self._rollouts.each(lambda worker: worker.set_sampling.call_one(told), "rollout workers (sampling)", 60.0)

        async def max_age(config: Config) -> None:
            await answer(self._buffer.set_max_age.call_one(config.buffer.max_age), "replay buffer (max_age)", 60.0)

        told = {"trainers": (learning_rate, {"trainer.lr"}), "replay buffer": (max_age, {"buffer.max_age"})}
        told["rollout workers"] = sampling, {f"generator.{name}" for name in SAMPLED_BY}
        concerned = {who: listener for who, (listener, keys) in told.items() if keys & set(changed)}
        if self.config.replay and (absent := concerned.keys() - {"trainers"}):
            raise UserError(f"set: a replay (of {self.config.replay}) has no {' and no '.join(sorted(absent))} to tell")
        return concerned

    async def scale(self, generators: int) -> Table:
        """Start or end generator replicas while everything goes on. A new one takes requests when it holds the newest weights; one that
        leaves is sent no more, and ends when its last request has come back."""
        if generators < 1:
            raise UserError(f"generators={generators}: there must be at least 1")
        await self._live()
        await self._replicas.scale(generators)
        return self.generators

    async def add_hosts(self, *addresses: str) -> list[int]:
        """Attach hosts on which `monarch-rl worker` runs; `scale` places generators there. Returns their indices (cluster.kind=attach).

        Raises:
            UserError: names the worker that cannot be had, and why.
        """
        return await self._meshes.hosts.add(addresses)

    async def hold(self) -> None:
        """Have all generators keep the weights that they hold, until `pull` or `follow`. If training goes on, `max_age` stalls them."""
        await self._live()
        await self._replicas.hold()

    async def pull(self, replica: int) -> Table:
        """Have a generator that holds its weights pull the newest published ones, once."""
        await self._live()
        assert self._published is not None
        await self._replicas.pull(self._replica(replica), self._published)
        await self._records.collect()
        return self.weights

    async def follow(self) -> None:
        """Have all generators follow the trainer again, after `hold`."""
        await self._live()
        self._replicas.follow()

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
        sampling = Sampling.of(self.config.generator, self._renderer.stop_ids)
        sampling = sampling if temperature is None else replace(sampling, temperature=temperature)
        sampling = sampling if max_new_tokens is None else replace(sampling, max_new_tokens=max_new_tokens)
        generator = self._replicas.live[self._replica(replica)]
        reply = generator.generate.call_one(self._renderer.render(prompt), sampling, [seed + i for i in range(n)], 0)
        generations = await answer(reply, "generator", self.config.rollout.deadline_s)
        return tables.of_generations(prompt, generations, self._renderer)

    async def evaluate(self, task: TaskSpec | None = None, prompts: int | None = None) -> Evaluated:
        """Held-out accuracy of the live policy, on the task that is trained or on another, given as `task` in the configuration.

        Raises:
            UserError: there is no such task, or the model's tokenizer cannot render it.
        """
        await self._live()
        try:
            return await self._evaluated(prompts or self.config.eval.prompts or 256, Version(0, 0), task)
        except Exception as error:
            if isinstance(mistake := root(error), UserError):
                raise mistake from error
            raise

    async def rollouts(self, k: int = 8) -> Samples:
        """The `k` groups that were finished last, one episode a line."""
        self._check_open()
        groups = await answer(self._buffer.samples.call_one(k), "replay buffer (samples)", 60.0)
        return tables.of_groups(groups, self.version)

    @property
    def buffer(self) -> BufferTable:
        """Who holds which prompt, as of the last second; `await buffer.ledger()` asks for the life of each."""
        return tables.of_buffer(self._records.holdings, self._lives)

    @property
    def generators(self) -> Table:
        """What each generator holds and does, as it last reported."""
        return tables.of_generators(self._reported(), self.version)

    @property
    def weights(self) -> Table:
        """How the weights travel."""
        return tables.of_weights(self._reported(), self.version)

    async def processes(self) -> Table:
        """Every process of this run: where it is, and what it takes."""
        self._check_open()
        asked = [(name, process.usage.call().as_asyncio()) for name, process in self._meshes.processes().items()]
        answers = await asyncio.gather(*[asyncio.wait_for(reply, 10.0) for _, reply in asked], return_exceptions=True)
        usages = [None if isinstance(reply, BaseException) else list(reply.values()) for reply in answers]
        return tables.of_processes({name: usage for (name, _), usage in zip(asked, usages, strict=True)})

    async def waits(self) -> Table:
        """Who waits for whom, for how long, and holding which prompt. `kill -QUIT` of the controller prints the same."""
        self._check_open()
        return watchdog.table(await watchdog.look(self._meshes.processes()))

    def show_waits(self) -> None:
        """Print `waits`, soon."""
        self._shown = asyncio.get_running_loop().create_task(self._show_waits(), name="who waits for whom")

    async def _show_waits(self) -> None:
        self._records.console.say(repr(watchdog.table(await watchdog.look(self._meshes.processes()))))

    @property
    def trainer(self) -> Table:
        """The last steps."""
        return tables.of_rows(list(self._records.rows)[-8:])

    def curves(self, *groups: Sequence[str]) -> Figure:
        """Metrics over the optimizer steps, as a plotly figure with one chart for each group of names.

        Raises:
            UserError: plotly is not installed.
        """
        return figures.curves(self._rows(), groups or DEFAULT_CURVES)

    def lanes(self, last_s: float = 20.0) -> Figure:
        """Who did what in the last seconds, as a plotly figure.

        Raises:
            UserError: plotly is not installed.
        """
        return figures.lanes(self._records.recent, last_s)

    def __repr__(self) -> str:
        return repr(self._summary())

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    def _check_open(self) -> None:
        if self._state in ("not started", "starting", "closed"):
            raise UserError(f"this session is {self._state}" + ("; `await session.start()`" if self._state == "not started" else ""))

    async def _live(self) -> None:
        """The policy can be asked: the first weights are published, and the background runs."""
        self._check_open()
        if self.config.replay:
            raise UserError(f"a replay (of {self.config.replay}) has no generators and no replay buffer to ask")
        if self._published is None:
            await self.publish(self.version)
        await self._keep()
        if self._keeper is not None and self._keeper.done():
            raise UserError(f"this session has {self._state}")

    async def _lives(self, states: Sequence[State], last: int) -> list[Life]:
        self._check_open()
        if self.config.replay:
            raise UserError(f"a replay (of {self.config.replay}) has no ledger; that of the run is in its ledger.jsonl")
        return await answer(self._buffer.lives.call_one(states, last), "replay buffer (lives)", 60.0)

    def _replica(self, number: int | None) -> int:
        live = self._replicas.live
        if number is not None and number not in live:
            raise UserError(f"replica={number}: there are {', '.join(map(str, sorted(live)))}")
        return min(live) if number is None else number

    def _reported(self) -> list[GeneratorReport]:
        """Of the generators that are here."""
        self._check_open()
        reported = {report.replica: report for report in self._records.reports}
        return [reported.get(number, GeneratorReport(number)) for number in sorted(self._replicas.live)]

    @cached_property
    def _renderer(self) -> Renderer:
        from monarch_rl.rendering import Renderer

        return Renderer.of(self.config.model)

    def _summary(self) -> Table:
        records, dashboard = self._records, self._meshes.hosts.dashboard.url
        last = records.rows[-1] if records.rows else {}
        return tables.of_session(self.config, self._state, self.version, last, records.evaluated, dashboard)

    def _rows(self) -> list[dict[str, Any]]:
        """All that are written, also those of an earlier run that this one goes on with."""
        return read_rows(self.output_dir / "metrics.jsonl")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
