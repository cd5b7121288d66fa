"""What a delta takes against a whole image: the part `delta` of `benchmarks.weights`.

Made: a share of the bfloat16 weights changes from version to version. Seconds to find a delta (the trainer's side thread) and to apply
it, and what two readers take to pull each version from its slot until it is proven whole, one as an image, one as a delta.

Trained: optimizer steps at a learning rate of 1e-6 on weights in float32, which travel in bfloat16: the share that changes, and the delta
of it. The steps are the trainer's own, on random tokens. Weights that come out of a bfloat16 file change more seldom at first: each has to
move by half of what tells two such numbers apart. The tiny model is also trained as the default job, with all its processes.

Deltas pay on a network slower than the bytes that they save over the seconds that they cost.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint_stall import batch, model
from benchmarks.common import Row, median, run_job, table
from benchmarks.publishing import PullingReader, qwen_like, sealed
from monarch_rl.cluster import local
from monarch_rl.cluster.placement import Processes
from monarch_rl.config import Config, TrainerConfig
from monarch_rl.learner import Learner
from monarch_rl.models import local_shards
from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD
from monarch_rl.weights.delta import apply_delta, encode
from monarch_rl.weights.plan import LoadPlan, Piece, layout, region_bytes, stage
from monarch_rl.weights.slots import Ring, SlotBuffers

SHARES = (0.001, 0.01, 0.05)
ROUNDS = 5
"""Of each measurement but the first, which is for memory and connections."""
LR = 1e-6
JOB_STEPS = 12
SIZE = 2
"""Bytes of an element."""
T = TypeVar("T")


class Shape(NamedTuple):
    """Of a Qwen3."""

    hidden: int
    layers: int
    vocabulary: int


MODELS = {"tiny": Shape(128, 2, 128), "0.5B": Shape(1024, 28, 151_936)}


async def measure(config: Config, _: LoadPlan, options: Namespace) -> tuple[str, Row]:
    made, trained, result = [], [], {}
    for name in options.models:
        shape = MODELS[name]
        costs, pulled = await in_a_process(made_costs, shape), await pulls(config, qwen_like(*shape))
        for share in SHARES:
            result[f"{name} {share}"] = costs[share] | pulled[share]
            made.append((name, *columns(costs[share]), *map(milliseconds, pulled[share].values())))
        cost = result[f"{name} trained"] = await in_a_process(trained_cost, shape)
        trained.append((name, *columns(cost)))
    header = ("model", "changed", "image, MB", "delta, of it", "encode, ms", "apply, ms", "pays below, GB/s")
    job = result["job"] = await asyncio.to_thread(default_job)
    text = f"default job in bfloat16 at lr {LR:g}: {job['sync/deltas']:.0f} of {JOB_STEPS} pulls after the first were deltas, "
    text += f"the last of {job['sync/pulled_bytes'] / job['sync/bytes']:.3f} of an image"
    tables = table((*header, "pull of the image, ms", "of the delta, ms"), made), table(header, trained)
    return f"Made\n\n{tables[0]}\n\nTrained at lr {LR:g}\n\n{tables[1]}\n\n{text}", result


def columns(cost: Row) -> tuple[str, ...]:
    pays = (cost["image"] - cost["delta"]) / (cost["encode_s"] + cost["apply_s"]) / 1e9
    sizes = f"{cost['changed']:.2%}", f"{cost['image'] / 1e6:.1f}", f"{cost['delta'] / cost['image']:.4f}"
    return *sizes, milliseconds(cost["encode_s"]), milliseconds(cost["apply_s"]), f"{pays:.2f}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


async def in_a_process(measured: Callable[[Shape], T], shape: Shape) -> T:
    """Its memory is given back before the next begins."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, measured, shape)


# --- the codec


def made_costs(shape: Shape) -> dict[float, Row]:
    held = torch.randint(0, 1 << 15, (region_bytes(layout(qwen_like(*shape), 0, 1)) // SIZE,), dtype=torch.int16)
    new = held.clone()

    def images(share: float) -> Iterator[Tensor]:
        for _ in range(1 + ROUNDS):
            change(new, share)
            yield new.view(torch.uint8)

    return {share: cost_of(held.view(torch.uint8), images(share)) for share in SHARES}


def trained_cost(shape: Shape) -> Row:
    """Of a learner's steps after the first, which moves every weight alike."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = TrainerConfig(lr=LR, warmup_steps=0)
    learner = Learner(model(*shape), config, total_steps=10**6, device_mesh=init_device_mesh("cpu", (1,)), bf16=True)
    weights = local_shards(learner.model)
    plan = LoadPlan(tuple(Piece(name, tuple(w.shape), 0, len(w), 0, w[0].numel(), "bfloat16") for name, w in weights.items()))
    blocks = layout(plan, 0, 1)

    def image() -> Tensor:
        region = torch.zeros(region_bytes(blocks), dtype=torch.uint8)
        stage(blocks, plan, local_shards(learner.model), region, 0, 1)
        return region

    def images() -> Iterator[Tensor]:
        for step in range(1, 2 + ROUNDS):
            learner.step(batch(step, 4, 24, shape.vocabulary))
            yield image()

    cost = cost_of(image(), images())
    dist.destroy_process_group()
    return cost


def cost_of(held: Tensor, images: Iterator[Tensor]) -> Row:
    """Medians over the deltas that lead from each image to the next, without the first. Fails where one leads elsewhere."""
    costs = []
    for image in images:
        changed = int((held.view(torch.int16) != image.view(torch.int16)).sum()) / (len(held) // SIZE)
        start = time.perf_counter()
        found = encode(held, image, SIZE, len(held))
        encoded = time.perf_counter()
        assert found is not None
        apply_delta(found, held, SIZE)
        applied = time.perf_counter()
        assert torch.equal(held, image)
        del image  # the next step needs the memory
        costs.append({"changed": changed, "delta": len(found), "encode_s": encoded - start, "apply_s": applied - encoded})
    return {"image": len(held), **{key: median(cost[key] for cost in costs[1:]) for key in costs[0]}}


def change(numbers: Tensor, share: float) -> None:
    """Every one that is hit is another than before."""
    numbers[torch.randint(len(numbers), (round(share * len(numbers)),))] ^= 1


# --- pulls


class Changer(Actor):
    """A trainer rank without a model, of whose weights a share changes with each version."""

    def __init__(self, plan: LoadPlan) -> None:
        self._weights = {piece.name: torch.randn(piece.shape, dtype=torch.bfloat16) for piece in plan.pieces}
        self._number = -1
        self._ring = Ring([plan], rank=0, world=1, slots=2, board=BOARD, deltas=True)

    @endpoint
    def register(self) -> list[list[SlotBuffers]]:
        return self._ring.register()

    @endpoint
    def publish(self, share: float) -> None:
        for weight in self._weights.values():
            change(weight.view(torch.int16).view(-1), share)
        self._number += 1
        self._ring.publish(self._weights, Version(0, self._number))
        if not sealed(self._number):
            raise RuntimeError("a version was lost")


async def pulls(config: Config, plan: LoadPlan) -> dict[float, Row]:
    """For each share that changes the median seconds of the pulls of two readers, one after the other."""
    from actors.publisher import Publisher

    host, environment = local.host(), local.environment(config)
    names = ("trainer", "reader_image", "reader_delta")
    meshes = [local.spawn(host, Processes(name, "rank", 1), environment) for name in names]
    try:
        changer: Any = meshes[0].spawn("changer", Changer, plan)
        publishers = meshes[0].spawn("publisher", Publisher)
        rings = list((await changer.register.call()).values())
        encodings = {"image": (meshes[1], "full"), "delta": (meshes[2], "delta")}
        readers: dict[str, Any] = {
            name: mesh.spawn("reader", PullingReader, plan, rings, publishers, encoding) for name, (mesh, encoding) in encodings.items()
        }
        await pull_in_turn(changer, readers, 0.0)  # an image for both
        return {share: await timed(changer, readers, share) for share in SHARES}
    finally:
        for mesh in meshes:
            await mesh.stop()


async def timed(changer: Any, readers: dict[str, Any], share: float) -> Row:
    found = [await pull_in_turn(changer, readers, share, bool(round_ % 2)) for round_ in range(1 + ROUNDS)][1:]
    if any(moved["delta"] >= moved["image"] for _, moved in found):
        raise RuntimeError(f"no delta was pulled: {found}")
    return {f"{name}_s": median(seconds[name] for seconds, _ in found) for name in readers}


async def pull_in_turn(changer: Any, readers: dict[str, Any], share: float, turned: bool = False) -> tuple[Row, Row]:
    """Publish a version; seconds and bytes of each reader's pull of it."""
    await changer.publish.call_one(share)
    seconds, moved = {}, {}
    for name in sorted(readers, reverse=turned):
        seconds[name], moved[name] = await readers[name].timed_pull.call_one()
    return seconds, moved


# --- the default job


def default_job() -> Row:
    """Figures of its last step."""
    keys = ("model.dtype=bfloat16", f"trainer.lr={LR:g}", "weights.encoding=delta", f"steps={JOB_STEPS}", "eval.prompts=0")
    with tempfile.TemporaryDirectory() as folder:
        last = run_job(Path(folder) / "run", *keys, "buffer.dead_groups=keep").rows[-1]
    return {key: last[key] for key in ("sync/bytes", "sync/pulled_bytes", "sync/deltas")}
