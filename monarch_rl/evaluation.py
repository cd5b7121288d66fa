"""Held-out accuracy, by all rollout workers together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_rl.routes import Routes

if TYPE_CHECKING:
    from actors.rollout import Evaluation, RolloutWorker
    from monarch_rl.tasks import TaskSpec


@dataclass(frozen=True)
class Evaluated:
    """What came of held-out prompts, one episode each."""

    accuracy: float | None
    """Mean reward; None where nothing could be scored."""
    prompts: int
    """Scored."""
    unscorable: int
    tokens: int
    version: str
    """Of the weights behind the tokens: `0.12`, or `0.12-0.14` where they changed meanwhile."""

    @property
    def mixed(self) -> bool:
        """Whether the weights changed meanwhile."""
        return "-" in self.version

    def figures(self) -> dict[str, Any]:
        """As they stand in a row of metrics."""
        accuracy = {} if self.accuracy is None else {"eval/accuracy": self.accuracy}
        return accuracy | {"eval/prompts": self.prompts, "eval/unscorable": self.unscorable, "eval/version": self.version}


async def evaluate(
    workers: Routes[RolloutWorker], prompts: int, min_version: int, task: TaskSpec | None = None, replica: int | None = None
) -> Evaluated:
    """Sample `prompts` held-out prompts with weights of at least `min_version`, a `Version.pack()`; `task` in place of the one that is
    trained; on one `replica`, as long as that is there. What a worker that is lost had to do is done again by another."""
    count = max(1, len(workers))

    async def part(first: int) -> Evaluation:
        indices = range(first, prompts, count)
        return await workers.ask(lambda worker: worker.evaluate.call_one(indices, min_version, task, replica), len(indices))

    parts = await asyncio.gather(*map(part, range(count)))
    rewards = [reward for part in parts for reward in part.rewards]
    versions = [version for part in parts for version in (part.first, part.last) if version is not None]
    first, last = (min(versions), max(versions)) if versions else ("", "")
    return Evaluated(
        accuracy=sum(rewards) / len(rewards) if rewards else None,
        prompts=len(rewards),
        unscorable=sum(part.unscorable for part in parts),
        tokens=sum(part.tokens for part in parts),
        version=str(first) if first == last else f"{first}-{last}",
    )
