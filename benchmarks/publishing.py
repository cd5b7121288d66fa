"""The two sides of `benchmarks.weights`: a trainer rank without a model, readers without an engine, and a generator that pulls."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint
from torch import Tensor

from benchmarks.engines import ReadyGenerator, _tensors
from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.plan import LoadPlan, Piece, apply, layout, region_bytes, stage
from monarch_rl.weights.pull import Puller, Reader, RejectedPull
from monarch_rl.weights.slots import Ring, SlotBuffers

NEVER_S = 20.0
"""A blocking publish that takes longer is called off."""


def qwen_like(hidden: int, layers: int, vocabulary: int, dtype: str = "bfloat16") -> LoadPlan:
    """Shapes of a Qwen3 with a tied head: one piece per tensor, as a loader without tensor parallelism makes them."""
    heads, kv, wide = hidden, hidden // 2, 3 * hidden
    of_layer = {
        "q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads), "gate": (wide, hidden), "up": (wide, hidden),
        "down": (hidden, wide), "norm": (hidden,), "post_norm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden), "norm": (hidden,)}
    shapes |= {f"{layer}.{name}": shape for layer in range(layers) for name, shape in of_layer.items()}
    return LoadPlan(tuple(Piece(name, s, 0, s[0], 0, s[1] if len(s) > 1 else 1, dtype) for name, s in shapes.items()))


def random_shards(plan: LoadPlan) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {piece.name: torch.randn(piece.shape, generator=generator) for piece in plan.pieces}


def sealed(number: int) -> bool:
    """Wait for the side thread of this process; False: the version was lost."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        offer = BOARD._newest
        if offer is not None and offer.newest >= number:
            return True
        time.sleep(0.0005)
    return False


class Stager(Actor):
    """One trainer rank: float32 weights, a ring, and what it takes to publish."""

    def __init__(self, plan: LoadPlan, slots: int) -> None:
        self._plan, self._blocks = plan, layout(plan, 0, 1)
        self._shards = random_shards(plan)
        self._ring = Ring([plan], rank=0, world=1, slots=slots, board=BOARD)
        self._bare = torch.zeros(self._ring.nbytes, dtype=torch.uint8)
        self._other = torch.zeros_like(self._bare)
        self._number = -1

    @endpoint
    def register(self) -> list[list[SlotBuffers]]:
        return self._ring.register()

    @endpoint
    def stalls(self, rounds: int, gap_s: float) -> tuple[dict[str, list[float]], int]:
        """Seconds of a publish, of a bare loop of the same copies and of a memcpy, each some time after another publish, by the clock and
        (`… cpu`) of this thread. And how many publishes were lost."""
        chance, lost = random.Random(0), 0
        timed: dict[str, Callable[[], object]] = {"publish": self._publish, "bare": self._copy, "memcpy": self._memcpy}
        seconds: dict[str, list[float]] = {f"{name}{kind}": [] for name in timed for kind in ("", " cpu")}
        for warm_up in (self._publish, self._publish, self._publish, self._copy, self._memcpy):
            warm_up()
            self._sealed()
        for _ in range(rounds):
            for name in chance.sample(list(timed), len(timed)):
                self._publish()
                lost += not self._sealed()
                time.sleep(chance.random() * gap_s)
                start, cpu = time.perf_counter(), time.thread_time()
                timed[name]()
                seconds[name].append(time.perf_counter() - start)
                seconds[f"{name} cpu"].append(time.thread_time() - cpu)
                lost += not self._sealed()
        return seconds, lost

    @endpoint
    def blocking_stalls(self, readers: list[Any], rounds: int) -> list[float]:
        """Seconds of a publish that waits until all readers have the version; inf where one never has."""
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            self._publish()
            self._sealed()
            try:
                _all([reader.pull_once.call_one() for reader in readers], NEVER_S)
            except TimeoutError:
                return [*seconds, float("inf")]
            seconds.append(time.perf_counter() - start)
        return seconds

    @endpoint
    def publish(self) -> None:
        self._publish()

    @endpoint
    def publish_every(self, seconds: float, stop: Path) -> int:
        """Until there is a file `stop`; how often."""
        first = self._number
        while not stop.exists():
            self._publish()
            time.sleep(seconds)
        return self._number - first

    def _publish(self) -> None:
        self._number += 1
        self._ring.publish(self._shards, Version(0, self._number))

    def _sealed(self) -> bool:
        return sealed(self._number)

    def _copy(self) -> None:
        stage(self._blocks, self._plan, self._shards, self._bare, 0, 1)

    def _memcpy(self) -> None:
        self._other.copy_(self._bare)


class PullingReader(Actor):
    """Pulls what there is and puts it nowhere."""

    def __init__(
        self, plan: LoadPlan, rings: list[list[list[SlotBuffers]]], publishers: Any, encoding: Literal["full", "delta"] = "full"
    ) -> None:
        self._puller = Puller(plan, rings, encoding=encoding)
        self._reader = Reader(f"reader {os.getpid()}", publishers, len(rings), self._puller.pull)
        self._held: Version | None = None
        self._following: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def follow(self) -> None:
        """From now on, beside whatever is asked."""
        self._following = asyncio.create_task(self._follow())

    @concurrent_endpoint
    async def unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    @concurrent_endpoint
    async def pull_once(self) -> None:
        while not await self._pull():
            pass

    @concurrent_endpoint
    async def timed_pull(self) -> tuple[float, int]:
        """Seconds and bytes of the pull of a newer version, from when it is there until it is proven whole."""
        target = await self._reader.newer(self._held)
        start = time.perf_counter()
        await self._reader.pull(target)
        self._held = target.version
        return time.perf_counter() - start, self._puller.moved

    @concurrent_endpoint
    async def bandwidths(self, rounds: int) -> dict[str, list[float]]:
        """Bytes per second of a pull (with its checksums), of a raw loopback socket and of a memcpy, in turn."""
        target = await self._reader.newer(None)
        size, there = self._puller.nbytes, torch.zeros(self._puller.nbytes, dtype=torch.uint8)
        socket_ = Loopback(size)
        seconds: dict[str, list[float]] = {"pull": [], "loopback": [], "memcpy": []}
        for round_ in range(rounds + 1):  # the first is for the connections
            start = time.perf_counter()
            await self._puller.pull(target)
            pulled = time.perf_counter()
            await asyncio.to_thread(socket_.receive)
            received = time.perf_counter()
            there.copy_(socket_.here)
            for name, taken in zip(seconds, (pulled - start, received - pulled, time.perf_counter() - received), strict=True):
                seconds[name] += [taken] if round_ else []
        socket_.close()
        return {name: [size / s for s in taken] for name, taken in seconds.items()}

    async def _follow(self) -> None:
        while True:
            await self._pull()

    async def _pull(self) -> bool:
        target = await self._reader.newer(self._held)
        try:
            await self._reader.pull(target)
        except RejectedPull:
            return False
        self._held = target.version
        return True


def _all(replies: list[Any], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    for reply in replies:
        reply.get(timeout=max(0.1, end - time.monotonic()))


class Loopback:
    """Another process that sends `size` bytes over a TCP connection whenever it is asked."""

    def __init__(self, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        listener = socket.create_server(("127.0.0.1", 0))
        self._process = spawn.Process(target=_send, args=(theirs, listener.getsockname(), size), daemon=True)
        self._process.start()
        self._socket, _ = listener.accept()
        self.here = torch.zeros(size, dtype=torch.uint8)

    def receive(self) -> None:
        self._pipe.send(True)
        view, got = memoryview(self.here.numpy()), 0
        while got < len(view):
            got += self._socket.recv_into(view[got:])

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def _send(pipe: Connection, address: tuple[str, int], size: int) -> None:
    connection, data = socket.create_connection(address), bytes(size)
    while pipe.recv():
        connection.sendall(data)


class SwappingGenerator(ReadyGenerator):
    """A Generator whose swaps can be compared with what the engine's own loader takes."""

    @concurrent_endpoint
    async def pauses(self, model: Path, times: int) -> tuple[list[float], list[float]]:
        """Seconds of a swap of staged weights, and of one `load_weights` of the same tensors, in turn, on the engine's thread."""
        tensors, blocks = _tensors(model), layout(self._plan, 0, 1)
        region = torch.zeros(region_bytes(blocks), dtype=torch.uint8)
        stage(blocks, self._plan, tensors, region, 0, 1)

        def write(views: list[Tensor]) -> None:
            apply(self._plan, [blocks], [region], views)

        def load(_: object) -> float:
            (module,) = self._engine._llm.apply_model(lambda module: module)
            start = time.perf_counter()
            with torch.no_grad():
                module.load_weights(iter(tensors.items()))
            return time.perf_counter() - start

        swaps, loads = [], []
        for step in range(times):
            self._engine.stage(write, Version(0, 1 + step))
            swaps.append(await self._engine.swap(Version(0, 1 + step)))
            loads.append(await self._engine._ask(load))
        return swaps, loads


def bytes_of(plans: Sequence[LoadPlan], trainers: int) -> tuple[Counter[str], int]:
    """What the ranks of a generator pull: bytes by checkpoint tensor, and all bytes with alignment."""
    layouts = [(plan, layout(plan, rank, trainers)) for plan in plans for rank in range(trainers)]
    moved = Counter[str]()
    for plan, blocks in layouts:
        for block in blocks:
            moved[plan.pieces[block.piece].name] += block.nbytes
    return moved, sum(region_bytes(blocks) for _, blocks in layouts)
