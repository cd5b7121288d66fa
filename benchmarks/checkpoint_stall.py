"""What a checkpoint costs the training, against one copy of the state in memory: blocks of steps taken in turns on the same machine.

Trainer ranks with a random Qwen3, each on one thread. A block of steps begins with a checkpoint that is written by a process beside the
rank, as those of a run are, or by a thread of its own, or with none. The floor is a block that begins with one copy of the state, while a
process at the same priority writes as many bytes to a file: what no checkpoint that is written meanwhile can save. `lost` is how much
longer a block took than the one of its turn that began with nothing, so it holds the copy, what Python of the rank does for the checkpoint
and what the writing takes from the others. CPU time is the same without what other programs of the machine do. The unit is a copy under
the same load: one that is made while the other process writes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import arguments, median, report, spread, table
from monarch_rl.checkpoint import Saver
from monarch_rl.checkpoint_process import NICE
from monarch_rl.config import TrainerConfig
from monarch_rl.learner import Learner
from monarch_rl.types import NOT_SAMPLED, Episode, Shard, Version


def model(width: int, layers: int, vocabulary: int = 4096) -> Qwen3ForCausalLM:
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, max_position_embeddings=512, tie_word_embeddings=True, **shape, **heads))


def batch(step: int, episodes: int, tokens: int, vocabulary: int = 4096, rank: int = 0, ranks: int = 1) -> Shard:
    """One group, of which each rank has so many episodes."""
    draw = np.random.default_rng(step * ranks + rank)
    sampled_T = np.arange(tokens) >= 4
    versions_T = np.where(sampled_T, Version(0, step - 1).pack(), NOT_SAMPLED)
    ids_BT, logprobs_T = draw.integers(0, vocabulary, (episodes, tokens), np.int32), np.full(tokens, -8, np.float32) * sampled_T
    places = [(0, rank * episodes + i) for i in range(episodes)]
    rows = [Episode(ids_T, sampled_T, logprobs_T, versions_T, reward=float(i % 2)) for ids_T, (_, i) in zip(ids_BT, places, strict=True)]
    rewards_PG = np.arange(ranks * episodes, dtype=np.float64)[None] % 2
    total = ranks * episodes * (tokens - 4)
    return Shard(step, rows, places, [list(range(episodes))], rewards_PG, rewards_PG[..., None], total, ranks * episodes)


SKIPPED = 2
"""Turns that get memory first."""
Told = Callable[[Exception | None], None]
Turn = dict[str, dict[str, float]]
Begin = Callable[[Told], None]
"""Begins with what a block of steps begins with; told when it is done."""


class Trainer:
    """Steps on the same small batch."""

    def __init__(self, learner: Learner, tokens: int) -> None:
        self.learner, self._tokens, self._step = learner, tokens, 0
        self._kept: list[torch.Tensor] = []

    def step(self) -> None:
        self._step += 1
        self.learner.step(batch(self._step, 1, self._tokens, rank=dist.get_rank(), ranks=dist.get_world_size()))

    def shards(self) -> list[torch.Tensor]:
        """Of weights and moments."""
        moments = [value for state in self.learner.optimizer.state.values() for value in state.values()]
        held = [value for value in [*self.learner.parameters, *moments] if isinstance(value, torch.Tensor)]
        return [(value.to_local() if isinstance(value, DTensor) else value).detach() for value in held]

    def copy_s(self) -> float:
        """Seconds of a copy of them into memory that is there already."""
        shards = self.shards()
        if not self._kept:
            self._kept = [shard.clone() for shard in shards]
        began = time.perf_counter()
        for kept, shard in zip(self._kept, shards, strict=True):
            kept.copy_(shard)
        return time.perf_counter() - began


class Floor:
    """One copy, and a process that writes as many bytes."""

    def __init__(self, trainer: Trainer, file: Path) -> None:
        self._trainer = trainer
        size = sum(shard.nbytes for shard in trainer.shards())
        self._pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=write_bytes, args=(theirs, file, size), daemon=True)
        process.start()
        theirs.close()
        self._pipe.recv()

    def begin(self, told: Told) -> None:
        self._trainer.copy_s()
        self._pipe.send(None)
        Thread(target=lambda: told(self._pipe.recv())).start()

    def loaded_copy_s(self) -> float:
        """Seconds of a copy while it writes."""
        self._pipe.send(None)
        copies = []
        while not self._pipe.poll():
            copies.append(self._trainer.copy_s())
        self._pipe.recv()
        return median(copies)


def write_bytes(pipe: Connection, file: Path, size: int) -> None:
    os.nice(NICE)
    file.parent.mkdir(exist_ok=True)
    content = memoryview(np.random.default_rng(0).bytes(size))
    pipe.send(None)
    while True:
        pipe.recv()
        with file.open("wb", buffering=0) as written:
            for start in range(0, size, 2**23):
                written.write(content[start : start + 2**23])
            os.fsync(written.fileno())
        pipe.send(None)


def clear(folder: Path) -> None:
    """Of what all ranks have written, since to write over it takes longer."""
    dist.barrier()
    if dist.get_rank() == 0:
        for file in folder.glob("*/*"):
            file.unlink()
    dist.barrier()


def everywhere(done: bool) -> bool:
    least = torch.tensor(int(done))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)


def block(trainer: Trainer, begin: Begin | None, folder: Path, steps: int) -> dict[str, float]:
    """At least so many steps, until what they begin with is done. Seconds: of all, of the call, of CPU time of this process and of its
    other threads."""
    done: SimpleQueue[Exception | None] = SimpleQueue()
    clear(folder)
    began, process_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
    if begin is not None:
        begin(done.put)
    called, taken = time.perf_counter(), 0
    while taken < steps or not everywhere(begin is None or not done.empty()):
        trainer.step()
        taken += 1
    ended, process_s, thread_s = time.perf_counter(), time.process_time() - process_s, time.thread_time() - thread_s
    if begin is not None and (error := done.get()) is not None:
        raise error
    return {"call_s": called - began, "block_s": ended - began, "cpu_s": process_s, "threads_s": process_s - thread_s, "steps": taken}


def turn(trainer: Trainer, ways: dict[str, Begin | None], floor: Floor, folder: Path, options: Namespace, first: int) -> Turn:
    """A block of each, in turn; those with a checkpoint as what they lose against as many steps of the one without."""
    names = list(ways)[first % len(ways) :] + list(ways)[: first % len(ways)]
    taken = {name: block(trainer, ways[name], folder, options.steps) for name in names}
    clear(folder)
    alone_s, loaded_s = trainer.copy_s(), floor.loaded_copy_s()
    without = {key: value / options.steps for key, value in taken.pop("none").items()}
    lost = {
        name: {"call_s": of["call_s"], **{key: of[key] - of["steps"] * without[key] for key in ("block_s", "cpu_s", "threads_s")}}
        for name, of in taken.items()
    }
    return {**lost, "none": {"step_s": without["block_s"], "copy_s": alone_s, "loaded_copy_s": loaded_s}}


def likely(values: Sequence[float], unit: float) -> str:
    """`1.1 (0.9 to 1.4)`: the median, and where that of all turns is with a probability of 95 %, whatever their distribution."""
    ordered, skipped = sorted(value / unit for value in values), max(0, int(len(values) / 2 - 0.98 * len(values) ** 0.5))
    return f"{median(ordered):.1f} ({ordered[skipped]:.1f} to {ordered[-1 - skipped]:.1f})"


def started(saver: Saver, trainer: Trainer, folder: Path) -> Begin:
    """After a first checkpoint, which gets the memory, and when the process that is to write is there."""
    begin = partial(saver.save, trainer.learner, folder)
    told: SimpleQueue[Exception | None] = SimpleQueue()
    begin(told.put)
    if (error := told.get()) is not None:
        raise error
    while saver._process is not None and not saver._process.is_ready():
        time.sleep(0.1)
    return begin


def work(rank: int, options: Namespace, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    learner = Learner(model(options.width, options.layers), TrainerConfig(), total_steps=10**6, device_mesh=mesh)
    trainer = Trainer(learner, tokens=64)
    for _ in range(2):
        trainer.step()
    process = Saver(dist.new_group(backend="gloo"), apart=True, store=("127.0.0.1", port))
    thread, floor = Saver(dist.new_group(backend="gloo")), Floor(trainer, folder / "floor" / str(rank))
    ways: dict[str, Begin | None] = {
        "process": started(process, trainer, folder / "process"),
        "thread": started(thread, trainer, folder / "thread"),
        "floor": floor.begin,
        "none": None,
    }
    turns, end = [], time.perf_counter() + 60 * options.minutes
    while len(turns) < SKIPPED + 1 or everywhere(time.perf_counter() < end):
        turns.append(turn(trainer, ways, floor, folder, options, len(turns)))
    megabytes = sum(shard.nbytes for shard in trainer.shards()) / 1e6
    process.close()
    thread.close()
    dist.destroy_process_group()
    if rank == 0:
        show(options, turns[SKIPPED:], megabytes)


def show(options: Namespace, turns: list[Turn], megabytes: float) -> None:
    columns = {name: {key: [turn[name][key] for turn in turns] for key in of} for name, of in turns[0].items()}
    beyond = {key: [a - b for a, b in zip(of, columns["floor"][key], strict=True)] for key, of in columns["process"].items()}
    alone_s, loaded_s = (median(columns["none"][key]) for key in ("copy_s", "loaded_copy_s"))
    about = f"{options.ranks} rank(s), state of {megabytes:.0f} MB each, {len(turns)} turns"
    basis = ", ".join(f"{key} {spread(values, 3)}" for key, values in columns["none"].items())
    header = ("written by", "stands still / copy", "lost / loaded copy", "CPU of the rank / loaded copy", "of other threads, ms")
    rows = [
        (name, likely(of["call_s"], alone_s), likely(of["block_s"], loaded_s), likely(of["cpu_s"], loaded_s), likely(of["threads_s"], 1e-3))
        for name, of in (*((name, columns[name]) for name in ("process", "thread", "floor")), ("process - floor", beyond))
    ]
    text = table(header, rows)
    report(options.out, f"{about}\n{basis}\n\n{text}", {"state_mb": megabytes, **columns})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (6)")
    parser.add_argument("--minutes", type=float, default=4.0, help="to take turns (4)")
    parser.add_argument("--steps", type=int, default=3, help="from one checkpoint to the next, or more until it is written (3)")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, on this host (1)")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="checkpoint_") as folder:
        torch.multiprocessing.spawn(work, (options, store.port, Path(folder)), nprocs=options.ranks)


if __name__ == "__main__":
    main()
