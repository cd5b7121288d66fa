"""Sessions that are driven by hand, step by step, and what can be asked of them between two steps."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import Actor, endpoint

from monarch_rl.config import Config
from monarch_rl.configure import load
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.rendering import Renderer
from monarch_rl.session import Session
from monarch_rl.types import Generation, Group, Sampling, Version

DEADLINE_S = 120.0
"""Of every wait here; nothing is measured with it."""

SMALL = [
    *("recipe=grpo_qwen", "profile=cpu", "generator.group_size=4", "generator.max_new_tokens=64", "trainer.lr=1e-3"),
    *("trainer.warmup_steps=1", "eval.prompts=0", "console.rollouts_every=0"),
]


class ProcessId(Actor):
    """Says in which process it lives."""

    @endpoint
    async def tell(self) -> int:
        return os.getpid()


class Audit:
    """One session, its trainer's weights of every version in `weights/STEP`, and the groups that were seen."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.weights = self.folder / "weights"
        self.groups: dict[int, Group] = {}
        self.stats: list[dict[str, float]] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with Session(self.config) as self._session:
            await self._session.publish(await self._session.restore())
            yield self._session

    async def run(self, *, keep_weights: bool = False) -> None:
        """All steps, one after the other, until every generator holds the last version."""
        async with self.session() as session, session.background():
            if keep_weights:
                await self.keep_weights(0)
            for step in range(1, self.config.steps + 1):
                await self.train_step(step)
                if keep_weights:
                    await self.keep_weights(step)
            self.held = await self.generator_fingerprints(min_step=self.config.steps)
            self.trained = await self.trainer_fingerprints()

    async def train_step(self, step: int) -> None:
        """Fails where the step does not end in time."""
        training = asyncio.create_task(self._session.train_step(step))
        async with asyncio.timeout(DEADLINE_S):
            while not (await asyncio.wait({training}, timeout=0.2))[0]:
                await self.look()
        await self.look()
        self._session.record(step, training.result())
        self.stats.append(dict(training.result()))

    async def look(self) -> None:
        """Remember the groups that were finished of late; the buffer shows the last 16 only."""
        self.groups |= {group.ordinal: group for group in await self._session._buffer.samples.call_one(16)}

    async def keep_weights(self, step: int) -> None:
        await self._session._trainers.ranks.save.call(self.weights / str(step))

    async def trainer_fingerprints(self) -> dict[str, int]:
        """The same on all ranks."""
        plans = self._session._replicas.plans
        ranks = list((await self._session._trainers.ranks.fingerprints.call(plans)).values())
        assert all(rank == ranks[0] for rank in ranks)
        return by_rank(ranks[0])

    async def generator_fingerprints(self, min_step: int | None = None) -> list[dict[str, int]]:
        """Of each replica, at once or when it holds `min_step`."""
        if min_step is not None:
            await asyncio.gather(*[self.ask(replica, min_step) for replica in range(self.config.generator.replicas)])
        return [by_rank(await generator.fingerprints.call_one()) for generator in self._session._replicas.live.values()]

    async def ask(self, replica: int, min_step: int) -> Generation:
        """One short completion from a replica that holds at least `min_step`."""
        renderer = Renderer(self.config.model.path)
        sampling = Sampling(4, 1.0, renderer.stop_ids)
        asked = self._session._replicas.live[replica].generate.call_one(renderer.render("1+2="), sampling, [1], min_step)
        (generation,) = await asyncio.wait_for(asked.as_asyncio(), DEADLINE_S)
        return generation

    async def process_id(self, replica: int) -> int:
        return int(await self._session._meshes[f"generator_{replica}"].spawn("process_id", ProcessId).tell.call_one())

    async def until_nothing_more_may_start(self) -> None:
        """Every prompt that may be started before the first optimizer step has its group (dead ones are kept)."""
        budget = (self.config.buffer.max_age + 1) * self.config.buffer.prompts_per_step
        async with asyncio.timeout(DEADLINE_S):
            while set(self.groups) != set(range(budget)):
                await asyncio.sleep(0.05)
                await self.look()

    async def until_row(self, step: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(DEADLINE_S):
            while not any(row["step"] == step for row in self.rows()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def reports(self) -> list[GeneratorReport]:
        """What each replica said last, by number."""
        return sorted(self._session._records.reports, key=lambda report: report.replica)

    def pulled(self) -> list[Version]:
        """Every version that some replica made live, from the timeline (written at the end)."""
        events = json.loads((self.folder / "timeline.json").read_text())["traceEvents"]
        texts = [event["args"]["version"] for event in events if event["name"] == "swap"]
        return [Version(*map(int, text.split("."))) for text in texts]


def by_rank(found: list[dict[str, int]]) -> dict[str, int]:
    """Of all ranks of a generator, as one."""
    return {f"{name} of rank {rank}": print for rank, prints in enumerate(found) for name, print in prints.items()}


def audit(folder: Path, *keys: str) -> Audit:
    return Audit(load([*SMALL, f"output_dir={folder}", *keys]).config)
