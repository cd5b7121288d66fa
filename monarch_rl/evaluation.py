"""Held-out accuracy, by all rollout workers together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rollout import RolloutWorker
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
    workers: Sequence[RolloutWorker], prompts: int, min_version: int, task: TaskSpec | None = None, replica: int | None = None
) -> Evaluated:
    """Sample `prompts` held-out prompts with weights of at least `min_version`, a `Version.pack()`; `task` in place of the one that is
    trained; on one `replica`, as long as that is there."""
    count = len(workers)
    asked = [worker.evaluate.call_one(range(i, prompts, count), min_version, task, replica) for i, worker in enumerate(workers)]
    parts = await asyncio.gather(*[reply.as_asyncio() for reply in asked])
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
