"""Groups and bytes per second through the ReplayBuffer actor, against bare Monarch messages of the same size.

Another process leases a prompt and puts a group, several at a time, and takes a batch whenever one is complete. Bare: the same number of
messages, with the same groups, to an actor that only keeps them.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import time
from itertools import count
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint, this_host

from actors.replay_buffer import ReplayBuffer
from benchmarks.common import arguments, report, spread, table
from monarch_rl.config import Config
from monarch_rl.types import NOT_SAMPLED, Episode, Group, Prompt, Version

AT_ONCE = 16
"""Leases that are worked on at a time."""


class Bare(Actor):
    """Answers like a replay buffer, and does nothing else."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    @endpoint
    async def lease(self, worker: str) -> Prompt:
        return Prompt(0, "1+1=")

    @endpoint
    async def put(self, lease: object, group: Group) -> bool:
        self._groups.append(group)
        return True

    @endpoint
    async def take(self) -> list[Group]:
        groups, self._groups = self._groups, []
        return groups


def group(ordinal: int, episodes: int, tokens: int, step: int) -> Group:
    sampled_T = np.arange(tokens) >= 8
    versions_T = np.where(sampled_T, Version(0, step).pack(), NOT_SAMPLED)
    ids_T, logprobs_T = np.arange(tokens, dtype=np.int32), np.full(tokens, -1, np.float32)
    rows = [Episode(ids_T, sampled_T, logprobs_T, versions_T, "text", float(i % 2)) for i in range(episodes)]
    return Group(Prompt(ordinal, "1+1="), rows)


async def through_buffer(buffer: Any, groups: int, options: Any) -> float:
    """Seconds for `groups` groups, from lease to batch."""
    per_step = options.prompts_per_step

    async def work() -> None:
        while (leased := await buffer.lease.call_one("benchmark")) is not None:
            lease, prompt = leased
            await buffer.put.call_one(lease, group(prompt.ordinal, options.episodes, options.tokens, lease.min_step))

    await buffer.holdings.call_one()  # it has started
    began = time.perf_counter()
    workers = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
    for step in range(1, groups // per_step + 1):
        await buffer.take.call_one(step, 0)
    await asyncio.gather(*workers)
    return time.perf_counter() - began


async def bare(actor: Any, groups: int, options: Any) -> float:
    ordinals = iter(range(groups))

    async def work() -> None:
        for ordinal in ordinals:
            await actor.lease.call_one("benchmark")
            await actor.put.call_one(None, group(ordinal, options.episodes, options.tokens, 0))
            if (ordinal + 1) % options.prompts_per_step == 0:
                await actor.take.call_one()

    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(AT_ONCE)])
    return time.perf_counter() - began


async def turns(options: Any) -> dict[str, list[float]]:
    processes = this_host().spawn_procs({"proc": 1})
    numbers, groups = count(), options.groups
    actor: Any = processes.spawn("bare", Bare)
    seconds: dict[str, list[float]] = {"buffer": [], "bare": []}
    for _ in range(options.turns):
        config = Config(steps=groups // options.prompts_per_step, output_dir=tempfile.mkdtemp(prefix="buffer_"))
        config.buffer.prompts_per_step = options.prompts_per_step
        buffer: Any = processes.spawn(f"buffer_{next(numbers)}", ReplayBuffer, config)
        seconds["buffer"].append(await through_buffer(buffer, groups, options))
        await buffer.close.call_one()
        seconds["bare"].append(await bare(actor, groups, options))
    await processes.stop()
    return seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=512, help="in a turn (512)")
    parser.add_argument("--prompts-per-step", type=int, default=32, help="groups of a batch (32)")
    parser.add_argument("--episodes", type=int, default=8, help="of a group (8)")
    parser.add_argument("--tokens", type=int, default=1000, help="of an episode (1000)")
    parser.add_argument("--turns", type=int, default=5, help="of each, one after the other (5)")
    options = parser.parse_args()
    size = len(pickle.dumps(group(0, options.episodes, options.tokens, 0)))
    seconds = asyncio.run(turns(options))
    rows = []
    for name, taken in seconds.items():
        rates = [options.groups / s for s in taken]
        rows.append((name, spread(rates, 0), spread([rate * size / 1e6 for rate in rates], 0)))
    ratio = spread([bare_s / buffer_s for buffer_s, bare_s in zip(seconds["buffer"], seconds["bare"], strict=True)])
    text = table(("through", "groups/s", "MB/s"), rows) + f"\n\nbuffer / bare: {ratio}; a group is {size / 1e3:.0f} kB"
    report(options.out, text, {"bytes_per_group": size, **seconds})


if __name__ == "__main__":
    main()
