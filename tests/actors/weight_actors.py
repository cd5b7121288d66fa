"""A writer and a reader of weights in processes of their own, for `test_weights.py`."""

from __future__ import annotations

import asyncio
import time

from monarch.actor import Actor, current_rank, current_size, endpoint

from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.plan import LoadPlan, shard_rows
from monarch_rl.weights.pull import Puller, RejectedPull
from monarch_rl.weights.slots import Offer, Ring, SlotBuffers


class Writer(Actor):
    """One rank whose every weight has the value of its version's step."""

    def __init__(self, plan: LoadPlan, slots: int) -> None:
        import torch

        rank, world = current_rank().rank, sum(current_size().values())
        self._shards = {}
        for piece in plan.pieces:
            low, high = shard_rows(piece.shape[0], rank, world)
            self._shards[piece.name] = torch.zeros(high - low, *piece.shape[1:])
        self._ring = Ring(plan, rank=rank, world=world, slots=slots, announce=BOARD.post)

    @endpoint
    def register(self) -> list[SlotBuffers]:
        return self._ring.register()

    @endpoint
    def publish(self, step: int) -> None:
        self._publish(step)

    @endpoint
    def hammer(self, first: int, seconds: float) -> int:
        """Publish in bursts far faster than any trainer, with a rest after each."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._publish(first)
            first += 1
            time.sleep(0.005 if first % 20 else 0.4)
        return first - 1

    def _publish(self, step: int) -> None:
        for shard in self._shards.values():
            shard.fill_(step)
        self._ring.publish(self._shards, Version(0, step))


class Reader(Actor):
    def __init__(self, plan: LoadPlan, slots: list[list[SlotBuffers]]) -> None:
        import torch

        self._puller = Puller(plan, slots)
        self._live = [torch.full((piece.rows, piece.cols), -1.0) for piece in plan.pieces]

    @endpoint
    async def pull(self, offer: Offer) -> set[float] | None:
        """The values of the live weights after the pull; None when it was rejected."""
        try:
            await self._puller.pull(offer)
        except RejectedPull:
            return None
        self._puller.write(self._live)
        return {float(value) for view in self._live for value in (view.min(), view.max())}

    @endpoint
    async def follow(self, publishers: object, seconds: float) -> tuple[int, int, int]:
        """(whole versions, rejected pulls, mixed versions) while pulling whatever is newest."""
        from monarch_rl.weights.pull import common_offer

        held, whole, rejected, mixed = None, 0, 0, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                offers = await asyncio.wait_for(publishers.next.call("reader", held).as_asyncio(), 1.0)  # type: ignore[attr-defined]
            except TimeoutError:
                break  # the writer is done
            offer = common_offer(list(offers.values()))
            try:
                await self._puller.pull(offer)
            except RejectedPull:
                rejected += 1
                continue
            self._puller.write(self._live)
            values = {float(value) for view in self._live for value in (view.min(), view.max())}
            whole += values == {float(offer.version.step)}
            mixed += values != {float(offer.version.step)}
            held = offer.version
        return whole, rejected, mixed
