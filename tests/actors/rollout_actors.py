"""Actors of the rollout worker's tests: a generator that follows a script, and a desk that hands out leases."""

from __future__ import annotations

from typing import Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, endpoint

from monarch_rl.engine_requests import PromptTooLong, UnusablePrompt
from monarch_rl.rendering import Renderer
from monarch_rl.types import Generation, Group, Lease, Prompt, Sampling, Version


class ScriptedGenerator(Actor):
    """Answers a context with what `script` has for it: one list of ids per seed, or why it refuses. Version 0.n for the nth request."""

    def __init__(self, script: dict[str, Any], model: str = "tiny") -> None:
        self._script, self._renderer = script, Renderer(model)
        self._asked: list[tuple[list[int], Sampling, list[int], int]] = []

    @concurrent_endpoint
    async def generate(
        self, ids: list[int], sampling: Sampling, seeds: list[int], min_step: int, stream: tuple[str, int] | None = None
    ) -> list[Generation]:
        self._asked.append((ids, sampling, seeds, min_step))
        replies = self._script[self._renderer.decode(ids)]
        if replies == "too long":
            raise PromptTooLong("no room")
        if replies == "unusable":
            raise UnusablePrompt("no token")
        version = Version(0, len(self._asked)).pack()
        return [self._generation(reply[: sampling.max_new_tokens], len(reply) > sampling.max_new_tokens, version) for reply in replies]

    @concurrent_endpoint
    async def asked(self) -> list[tuple[list[int], Sampling, list[int], int]]:
        return self._asked

    def _generation(self, ids: list[int], cut: bool, version: int) -> Generation:
        count = len(ids)
        logprobs_T = np.linspace(-1, -2, count, dtype=np.float32)
        return Generation(np.array(ids, np.int32), logprobs_T, np.full(count, version), "length" if cut else "stop")


class Desk(Actor):
    """Stands where the replay buffer does: gives each prompt once and keeps what comes back."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self._done: list[Group | str] = []

    @endpoint
    async def lease(self, worker: str) -> tuple[Lease, Prompt] | None:
        if not self._prompts:
            return None
        prompt = self._prompts.pop(0)
        return Lease(prompt.ordinal, 1, 5), prompt

    @endpoint
    async def put(self, lease: Lease, group: Group) -> bool:
        self._done.append(group)
        return True

    @endpoint
    async def fail(self, lease: Lease, reason: str) -> None:
        self._done.append(f"failed: {reason}")

    @endpoint
    async def drop(self, lease: Lease, reason: str, lost: bool = False) -> None:
        self._done.append(f"{'lost' if lost else 'dropped'}: {reason}")

    @endpoint
    async def done(self) -> list[Group | str]:
        return self._done
