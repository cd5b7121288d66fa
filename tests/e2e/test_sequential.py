"""`buffer.max_age=0` against the loop that it must equal: one thing after the other, with neither actors nor a buffer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from actors.rollout import episode_seed
from monarch_rl.config import Config
from monarch_rl.configure import load
from monarch_rl.engine import Engine
from monarch_rl.groups import judge, make_shards
from monarch_rl.learner import Learner
from monarch_rl.models import load_causal_lm, local_shards
from monarch_rl.recorded import fingerprints
from monarch_rl.rendering import Renderer, model_directory
from monarch_rl.tasks import Completion, load_task, make_prompt
from monarch_rl.trajectory import Trajectory
from monarch_rl.types import Episode, Generation, Group, Prompt, Sampling, Version
from monarch_rl.weights.slots import fingerprint
from tests.e2e.jobs import finished

pytestmark = pytest.mark.timeout(400)

STEPS = 6
KEYS = [
    *("recipe=grpo_qwen", "profile=cpu", "buffer.max_age=0", f"steps={STEPS}", "eval.prompts=0", "console.rollouts_every=0"),
    *("buffer.prompts_per_step=4", "generator.group_size=4", "generator.max_new_tokens=24", "trainer.lr=1e-3", "trainer.warmup_steps=1"),
    "scorer.deadline_s=120",  # on a busy machine a reward that is late would make it another run
]


class Sequential:
    """Generate the groups of a step, score them, train, write the weights into the engine; then the next step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.renderer = Renderer.of(config.model)
        self.task = load_task(config.task, config.task_args, config.seed)
        self.sampling = Sampling.of(config.generator, self.renderer.stop_ids)
        self.engine = Engine(str(model_directory(config.model.path)), config.model.dtype, seed=config.seed, overrides={})
        self.next_ordinal = 0

    async def run(self) -> AsyncIterator[str]:
        """The fingerprint of the weights after each step."""
        config = self.config
        self.plan = await self.engine.start()
        mesh = init_device_mesh("cpu", (1,))
        model = load_causal_lm(config.model.path)
        self.learner = Learner(model, config.trainer, total_steps=config.steps, device_mesh=mesh)
        for step in range(1, config.steps + 1):
            await self.engine.swap(self.write, Version(0, step - 1))
            groups = sorted(await self.groups(), key=lambda group: group.ordinal)
            (shard,) = make_shards(groups, step, 1, config.trainer.tokens_per_microbatch)
            self.learner.step(shard)
            yield fingerprint(local_shards(self.learner.model).values())

    def write(self, views: list[Tensor]) -> None:
        weights = local_shards(self.learner.model)
        with torch.no_grad():
            for piece, view in zip(self.plan.pieces, views, strict=True):
                view.copy_(piece.cut(weights[piece.name]))

    async def groups(self) -> list[Group]:
        """As many as a step trains; those with nothing to learn are replaced when all others are done."""
        kept: list[Group] = []
        while (missing := self.config.buffer.prompts_per_step - len(kept)) > 0:
            prompts = [make_prompt(self.task, self.next_ordinal + at, "train") for at in range(missing)]
            self.next_ordinal += missing
            groups = await asyncio.gather(*[self.group(prompt) for prompt in prompts])
            kept += [group for group in groups if judge(group) == "trainable"]
        return kept

    async def group(self, prompt: Prompt) -> Group:
        ids = self.renderer.render(prompt.content)
        seeds = [episode_seed(self.config.seed, "train", prompt.ordinal, 1, index) for index in range(self.config.generator.group_size)]
        generations = await self.engine.generate_group(ids, self.sampling, seeds)
        return Group(prompt, [self.episode(prompt, ids, generation) for generation in generations])

    def episode(self, prompt: Prompt, ids: list[int], generation: Generation) -> Episode:
        trajectory = Trajectory(ids)
        text = self.renderer.decode(generation.ids_T.tolist())
        trajectory.append_sampled(generation, text)
        episode = trajectory.episode(Completion(text), self.sampling.temperature)
        fixed = self.task.truncated_reward
        reward = fixed if episode.truncated and fixed is not None else self.task.reward(prompt, Completion(text))
        assert isinstance(reward, float)
        episode.reward = reward
        return episode


async def test_a_synchronous_run_is_the_sequential_loop_bit_for_bit(tmp_path: Path) -> None:
    """After every step; groups without anything to learn among them, which are replaced in a second wave."""
    run = finished(tmp_path, *KEYS, "record=true")
    assert run.process.returncode == 0, run.err
    assert run.rows[-1]["buffer/dropped_dead"] > 0
    loop = Sequential(load(KEYS).config)
    try:
        weights = [fingerprint async for fingerprint in loop.run()]
    finally:
        await loop.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert len(set(weights)) == STEPS
    assert fingerprints(run.output_dir) == {step: [fingerprint] for step, fingerprint in enumerate(weights, start=1)}
    assert loop.next_ordinal == 4 * STEPS + run.rows[-1]["buffer/dropped"]
    trained = [json.loads(line) for line in (run.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(row["ordinal"] for row in trained) == [row["ordinal"] for row in trained]
