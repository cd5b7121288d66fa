"""RolloutWorker: turns leased prompts into scored groups, turn by turn where the task has an environment.

Owns: nothing that outlives a group. Holds the leases it works on.
Promises: every lease it takes is answered with `put`, `fail` or `drop`; one failing group never takes another with it.
Called by: the controller (`work`, `evaluate`). May be blocked by: generators (their gate and their engine) and scorers, per group,
up to `rollout.deadline_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from monarch.actor import Actor, ActorError, concurrent_endpoint

from actors.metrics import Records
from actors.streams import Streams
from monarch_rl.calls import Calls
from monarch_rl.config import Config, UserError
from monarch_rl.generator_config import GeneratorConfig
from monarch_rl.observe import timeline
from monarch_rl.routes import Routes
from monarch_rl.supervise import HOLDING, NamedTimeout, answer, cause, together, waiting
from monarch_rl.suspects import LOSSES, Losses, TooManyLost
from monarch_rl.types import Episode, Generation, Group, Lease, Prompt, Sampling, Split, Version

if TYPE_CHECKING:
    from actors.generator import Generator
    from actors.metrics import Metrics
    from actors.replay_buffer import ReplayBuffer
    from actors.scorer import Scorer
    from monarch_rl.tasks import Observation, Task, TaskSpec
    from monarch_rl.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Evaluation:
    """Scores of held-out prompts, and the versions that produced them. Adds up over workers."""

    rewards: list[float] = field(default_factory=list)
    unscorable: int = 0
    tokens: int = 0
    first: Version | None = None
    last: Version | None = None

    def add(self, episode: Episode) -> None:
        if episode.reward is None:
            self.unscorable += 1
        else:
            self.rewards.append(episode.reward)
        self.tokens += episode.sampled_tokens
        span = episode.versions()
        if span is not None:
            self.first = span[0] if self.first is None else min(self.first, span[0])
            self.last = span[1] if self.last is None else max(self.last, span[1])


@dataclass(frozen=True, slots=True)
class Purpose:
    """What episodes are rolled out for, and how."""

    split: Split
    task: Task
    other: TaskSpec | None
    """The task where it is not the one that is trained, for the scorers."""
    sampling: Sampling
    """The same for all turns of an episode, whatever is set meanwhile."""
    min_version: int
    """`Version.pack()` of the oldest weights that may begin it."""
    attempt: int = 1
    replica: int | None = None
    """The only one to ask, as long as it is here; None: any."""


def episode_seed(run_seed: int, purpose: str, ordinal: int, attempt: int, index: int, turn: int = 0) -> int:
    """A sampling seed of its own for every turn of every episode: 63 bits of a hash, the same on every machine."""
    name = f"{run_seed}/{purpose}/{ordinal}/{attempt}/{index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


class RolloutWorker(Actor):
    def __init__(
        self,
        config: Config,
        number: int,
        buffer: ReplayBuffer,
        generators: Mapping[int, Generator],
        scorers: Mapping[int, Scorer],
        metrics: Metrics | None = None,
    ) -> None:
        from monarch_rl.rendering import Renderer
        from monarch_rl.tasks import load_task

        self._config, self._buffer = config, buffer
        self.name = f"rollout {number}"
        self._records = Records(metrics, self.name)
        self._renderer = Renderer.of(config.model)
        self._task = load_task(config.task, config.task_args, config.seed)
        self._generators, self._scorers = Routes(generators, "generator"), Routes(scorers, "scorer", config.rollout.deadline_s)
        self._calls = Calls()
        self._streams = Streams(self._generators, self._calls, self.name, config.generator.burst_tokens)
        self._sampling = Sampling.of(config.generator, self._renderer.stop_ids)

    @concurrent_endpoint
    async def work(self) -> None:
        """Take leases until the buffer says that the run is over; every group runs as a task of its own."""
        async with asyncio.TaskGroup() as groups:
            while (leased := await answer(self._calls.one(self._buffer.lease, self.name), "replay buffer (lease)", None)) is not None:
                groups.create_task(self._serve(*leased))
        self._records.send()

    @concurrent_endpoint
    async def set_sampling(self, generator: GeneratorConfig) -> None:
        """For groups that are started from now on."""
        self._sampling = Sampling.of(generator, self._renderer.stop_ids)

    @concurrent_endpoint
    async def add_generator(self, replica: int, generator: Generator) -> None:
        """Requests may go there from now on."""
        self._generators.add(replica, generator)

    @concurrent_endpoint
    async def lose_generator(self, replica: int) -> None:
        """It is gone; what it was asked is asked of others."""
        self._generators.lose(replica)

    @concurrent_endpoint
    async def pin_generator(self, replica: int, step: int | None) -> None:
        """It keeps to the weights of `step`; None: to the newest."""
        self._generators.pin(replica, step)

    @concurrent_endpoint
    async def drain_generator(self, replica: int) -> None:
        """No request goes there any more; answers when the last one has come back."""
        await self._generators.drain(replica)

    @concurrent_endpoint
    async def add_scorer(self, number: int, scorer: Scorer) -> None:
        """It may be asked from now on."""
        self._scorers.add(number, scorer)

    @concurrent_endpoint
    async def lose_scorer(self, number: int) -> None:
        """It is gone; what it was asked is asked of others."""
        self._scorers.lose(number)

    @concurrent_endpoint
    async def alive(self) -> None:
        """Answers while this worker gets on with anything at all."""

    @concurrent_endpoint
    async def until_lost(self) -> None:
        """Never answers; the call fails with this process."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def evaluate(
        self, indices: Sequence[int], min_version: int, task: TaskSpec | None = None, replica: int | None = None
    ) -> Evaluation:
        """One episode for each held-out prompt that there is, sampled as in training, by weights of at least `min_version`. By `replica`,
        as long as that is here.

        Raises:
            UserError: `task`, evaluated in place of the one that is trained, cannot be loaded. PromptError: it cannot make a prompt.
        """
        from monarch_rl.tasks import load_task, make_prompt

        asked = self._task if task is None else load_task(task, {}, self._config.seed)
        work = Purpose("eval", asked, task, self._sampling, min_version, replica=replica)
        size = work.task.eval_size
        prompts = [make_prompt(work.task, index, "eval") for index in indices if size is None or index < size]
        evaluation = Evaluation()
        with timeline.span("evaluate", prompts=len(prompts)):
            groups = await asyncio.gather(*[self._try(prompt, work) for prompt in prompts])
        self._records.soon()
        for group in groups:
            for episode in group.episodes:
                evaluation.add(episode)
            evaluation.unscorable += not group.episodes
        return evaluation

    async def _try(self, prompt: Prompt, work: Purpose) -> Group:
        """One episode of a held-out prompt; none when the model cannot go on from the prompt, or nobody survives it."""
        from monarch_rl.engine_requests import UnusablePrompt

        HOLDING.set(f"held-out prompt {prompt.ordinal}")
        LOSSES.set(Losses(self._config.rollout.max_attempts))
        try:
            return await self._roll(prompt, work, 1)
        except TooManyLost as error:
            log.warning("held-out prompt %d is unscorable: %s", prompt.ordinal, error)
            return Group(prompt, [])
        except ActorError as error:
            if isinstance(error.exception, UnusablePrompt):
                return Group(prompt, [])
            raise

    async def _serve(self, lease: Lease, prompt: Prompt) -> None:
        from monarch_rl.engine_requests import UnusablePrompt

        HOLDING.set(f"prompt {lease.ordinal}")
        LOSSES.set(Losses(self._config.rollout.max_attempts - lease.attempt + 1))
        work, buffer = Purpose("train", self._task, None, self._sampling, lease.min_version, lease.attempt), self._buffer
        told: Awaitable[None] | Awaitable[bool]
        try:
            with waiting("its group", self._config.rollout.deadline_s):
                async with asyncio.timeout(self._config.rollout.deadline_s):
                    group = await self._roll(prompt, work, self._config.generator.group_size)
        except NamedTimeout:
            told = self._calls.one(buffer.fail, lease, f"rollout.deadline_s={self._config.rollout.deadline_s:g} passed")
        except TooManyLost as error:
            spent = f"{error} (rollout.max_attempts={self._config.rollout.max_attempts})"
            told = self._calls.one(buffer.drop, lease, spent, lost=True)
        except ActorError as error:
            refused = isinstance(error.exception, UnusablePrompt)
            told = self._calls.one(buffer.drop if refused else buffer.fail, lease, cause(error))
        else:
            told = self._calls.one(buffer.put, lease, group)
        with waiting("replay buffer (end of a lease)"):
            await told

    async def _roll(self, prompt: Prompt, work: Purpose, episodes: int) -> Group:
        """Generate and score the episodes of one prompt. Their first turns are one message to the generator."""
        from monarch_rl.tasks import Completion, component, has_environment
        from monarch_rl.trajectory import Trajectory

        start_ns = time.time_ns()
        ids = self._render(prompt)
        seeds = [partial(episode_seed, self._config.seed, work.split, prompt.ordinal, work.attempt, index) for index in range(episodes)]
        first = [seed() for seed in seeds]
        generations = await self._streams.generate(ids, work.sampling, first, work.min_version, work.replica)
        rolled = [Trajectory(ids) for _ in seeds]
        for trajectory, generation in zip(rolled, generations, strict=True):
            self._append(trajectory, generation)
        if has_environment(component(work.task, prompt)):
            await together([self._play(prompt, work, *each) for each in zip(rolled, seeds, strict=True)])
        group = Group(prompt, [t.episode(Completion(self._text(t), t.turns), work.sampling.temperature) for t in rolled])
        await self._score(group, work)
        if work.split == "train":
            timeline.add(timeline.Span("rollout", start_ns, time.time_ns(), {"prompt": prompt.ordinal}))
            self._records.soon()
        return group

    def _render(self, prompt: Prompt) -> list[int]:
        try:
            return self._renderer.render(prompt.content)
        except Exception as error:  # a chat template may ask for anything
            raise UserError(f"task {self._task.name}: prompt {prompt.ordinal} cannot be rendered: {cause(error)}") from error

    async def _play(self, prompt: Prompt, work: Purpose, trajectory: Trajectory, seed: Callable[..., int]) -> None:
        """Turn after turn, until the environment ends the episode, or its token budget or the context does."""
        from monarch_rl.engine_requests import PromptTooLong

        while not trajectory.truncated:
            content, trajectory.error = await self._observe(prompt, work, trajectory.turns)
            if content is None:
                return
            left = work.sampling.max_new_tokens - trajectory.sampled_tokens
            trajectory.truncated = left == 0
            if trajectory.truncated:
                return
            told = self._renderer.continuation(content, after=trajectory.last_id)
            sampling, seeds = replace(work.sampling, max_new_tokens=left), [seed(turn=len(trajectory.turns))]
            try:
                (generation,) = await self._streams.generate(trajectory.ids + told, sampling, seeds, work.min_version, trajectory.replica)
            except ActorError as error:
                if not isinstance(error.exception, PromptTooLong):
                    raise
                trajectory.truncated = True
                return
            trajectory.append_told(told, self._renderer.decode(told))
            self._append(trajectory, generation)

    def _append(self, trajectory: Trajectory, generation: Generation) -> None:
        trajectory.append_sampled(generation, self._renderer.decode(generation.ids_T.tolist()))

    def _text(self, trajectory: Trajectory) -> str:
        return trajectory.turns[0] if len(trajectory.turns) == 1 else self._renderer.decode(trajectory.new_ids)

    async def _observe(self, prompt: Prompt, work: Purpose, turns: list[str]) -> Observation:
        observation: Observation = await self._scorers.ask(lambda scorer: self._calls.one(scorer.observe, prompt, turns, work.other), 1)
        return observation

    async def _score(self, group: Group, work: Purpose) -> None:
        from monarch_rl.tasks import component

        fixed = component(work.task, group.prompt).truncated_reward
        rule = self._config.generator.truncated if work.split == "train" else "keep"
        asked = []
        for episode in group.episodes:
            episode.trained = not (episode.truncated and rule == "mask")
            if episode.truncated and rule == "drop":
                episode.error = episode.error or "truncated (generator.truncated=drop)"
            elif episode.truncated and fixed is not None:
                episode.reward = fixed
            elif episode.error is None:
                asked.append(episode)
        parts = min(max(1, len(self._scorers)), len(asked))
        await together([self._judge(group.prompt, work, asked[part::parts]) for part in range(parts)])

    async def _judge(self, prompt: Prompt, work: Purpose, episodes: list[Episode]) -> None:
        texts = [episode.text for episode in episodes]
        scores = await self._scorers.ask(lambda scorer: self._calls.one(scorer.score, prompt, texts, work.other), len(texts))
        for episode, score in zip(episodes, scores, strict=True):
            episode.reward, episode.error, episode.turn_rewards = score.reward, score.error, list(score.turn_rewards)
