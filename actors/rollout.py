"""RolloutWorker: turns leased prompts into scored groups.

Owns: nothing that outlives a group. Holds the leases it works on.
Promises: every lease it takes is answered with `put`, `fail` or `drop`; one failing group never takes another with it.
Called by: the controller (`work`, `evaluate`). May be blocked by: generators (their gate and their engine) and scorers, per group,
up to `rollout.deadline_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch.actor import Actor, ActorError, concurrent_endpoint, current_rank

from monarch_rl.config import Config
from monarch_rl.supervise import answer, cause
from monarch_rl.types import Episode, Generation, Group, Lease, Prompt, Sampling, Version

if TYPE_CHECKING:
    from actors.generator import Generator
    from actors.replay_buffer import ReplayBuffer
    from actors.scorer import Scorer


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


def episode_seed(run_seed: int, purpose: str, ordinal: int, attempt: int, index: int) -> int:
    """A sampling seed of its own for every episode: 63 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{ordinal}/{attempt}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RolloutWorker(Actor):
    def __init__(self, config: Config, buffer: ReplayBuffer, generators: Sequence[Generator], scorers: Sequence[Scorer]) -> None:
        from monarch_rl.rendering import Renderer
        from monarch_rl.tasks import load_task

        self._config, self._buffer, self._generators, self._scorers = config, buffer, generators, scorers
        self.name = f"rollout {current_rank().rank}"
        self._renderer = Renderer(config.model.path)
        self._task = load_task(config.task, config.task_args, config.seed)
        self._load = [0] * len(generators)
        self._scored = 0
        self._sampling = Sampling(config.generator.max_new_tokens, config.generator.temperature, self._renderer.stop_ids)

    @concurrent_endpoint
    async def work(self) -> None:
        """Take leases until the buffer says that the run is over; every group runs as a task of its own."""
        async with asyncio.TaskGroup() as groups:
            while (leased := await self._buffer.lease.call_one(self.name)) is not None:
                groups.create_task(self._serve(*leased))

    @concurrent_endpoint
    async def evaluate(self, indices: Sequence[int], min_step: int) -> Evaluation:
        """One episode for each held-out prompt, sampled as in training, by weights of at least step `min_step`."""
        evaluation = Evaluation()
        prompts = [self._task.prompt(index, "eval") for index in indices]
        for group in await asyncio.gather(*[self._roll(prompt, 1, min_step, "eval", 1) for prompt in prompts]):
            for episode in group.episodes:
                evaluation.add(episode)
        return evaluation

    async def _serve(self, lease: Lease, prompt: Prompt) -> None:
        from monarch_rl.engine import PromptTooLong

        try:
            async with asyncio.timeout(self._config.rollout.deadline_s):
                group = await self._roll(prompt, self._config.generator.group_size, lease.min_step, "train", lease.attempt)
        except TimeoutError:
            await self._buffer.fail.call_one(lease, f"rollout.deadline_s={self._config.rollout.deadline_s:g} passed")
        except ActorError as error:
            if isinstance(error.exception, PromptTooLong):
                await self._buffer.drop.call_one(lease, cause(error))
            else:
                await self._buffer.fail.call_one(lease, cause(error))
        else:
            await self._buffer.put.call_one(lease, group)

    async def _roll(self, prompt: Prompt, episodes: int, min_step: int, purpose: str, attempt: int) -> Group:
        """Generate and score the episodes of one prompt."""
        ids = self._renderer.render(prompt.content)
        seeds = [episode_seed(self._config.seed, purpose, prompt.ordinal, attempt, index) for index in range(episodes)]
        generations = await self._generate(ids, seeds, min_step)
        group = Group(prompt, [self._episode(ids, generation) for generation in generations])
        await self._score(group)
        return group

    async def _generate(self, ids: list[int], seeds: list[int], min_step: int) -> list[Generation]:
        replica = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[replica] += len(seeds)
        try:
            generations: list[Generation] = await self._generators[replica].generate.call_one(ids, self._sampling, seeds, min_step)
            return generations
        finally:
            self._load[replica] -= len(seeds)

    def _episode(self, prompt_ids: list[int], generation: Generation) -> Episode:
        import numpy as np

        from monarch_rl.types import NOT_SAMPLED

        prompt, sampled = len(prompt_ids), len(generation.ids_T)
        return Episode(
            ids_T=np.concatenate([np.asarray(prompt_ids, np.int32), generation.ids_T]),
            loss_mask_T=np.arange(prompt + sampled) >= prompt,
            logprobs_T=np.concatenate([np.zeros(prompt, np.float32), generation.logprobs_T]),
            versions_T=np.concatenate([np.full(prompt, NOT_SAMPLED, np.int64), generation.versions_T]),
            text=self._renderer.decode(generation.ids_T.tolist()),
            truncated=generation.finish_reason == "length",
        )

    async def _score(self, group: Group) -> None:
        fixed = self._task.truncated_reward
        asked = [e for e in group.episodes if not (e.truncated and fixed is not None)]
        for episode in group.episodes:
            episode.reward = fixed
        if not asked:
            return
        scorer = self._scorers[self._scored % len(self._scorers)]
        self._scored += 1
        asked_for = scorer.score.call_one(group.prompt, [e.text for e in asked])
        scores = await answer(asked_for, f"scorer (prompt {group.ordinal})", self._config.rollout.deadline_s)
        for episode, score in zip(asked, scores, strict=True):
            episode.reward, episode.error = score.reward, score.error
