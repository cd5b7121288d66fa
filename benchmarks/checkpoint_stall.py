"""What a checkpoint costs the training: time lost against one copy of the state in memory, taken in turns on the same machine.

One trainer rank with a random Qwen3, on one thread, whose checkpoints are written by a process beside it, as those of a run are, and by a
thread of its own. `call` is how long the trainer stands still (the copy); `lost` is how much longer the steps from the call to the end of
the writing took than as many steps without it, in turn, so it also holds what the writing takes from the others.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import arguments, report, spread, table
from monarch_rl.checkpoint import Saver
from monarch_rl.config import TrainerConfig
from monarch_rl.learner import Learner
from monarch_rl.types import NOT_SAMPLED, Episode, Shard, Version


def model(width: int, layers: int, vocabulary: int = 4096) -> Qwen3ForCausalLM:
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, max_position_embeddings=512, tie_word_embeddings=True, **shape, **heads))


def batch(step: int, episodes: int, tokens: int, vocabulary: int = 4096) -> Shard:
    draw = np.random.default_rng(step)
    sampled_T = np.arange(tokens) >= 4
    versions_T = np.where(sampled_T, Version(0, step - 1).pack(), NOT_SAMPLED)
    ids_BT, logprobs_T = draw.integers(0, vocabulary, (episodes, tokens), np.int32), np.full(tokens, -8, np.float32) * sampled_T
    rows = [Episode(ids_T, sampled_T, logprobs_T, versions_T, reward=float(i % 2)) for i, ids_T in enumerate(ids_BT)]
    rewards_PG = np.array([[row.reward for row in rows]], np.float64)
    places, total = [(0, i) for i in range(episodes)], episodes * (tokens - 4)
    return Shard(step, rows, places, [list(range(episodes))], rewards_PG, rewards_PG[..., None], total, episodes)


class Trainer:
    """Steps on the same small batch."""

    def __init__(self, learner: Learner, episodes: int, tokens: int) -> None:
        self.learner, self._size, self._step = learner, (episodes, tokens), 0
        self._kept: list[torch.Tensor] = []

    def step(self) -> None:
        self._step += 1
        self.learner.step(batch(self._step, *self._size))

    def copy_s(self) -> float:
        """Seconds of a copy of weights and moments into memory that is there already."""
        moments = [value for state in self.learner.optimizer.state.values() for value in state.values()]
        held = [value for value in [*self.learner.parameters, *moments] if isinstance(value, torch.Tensor)]
        tensors = [value.to_local() if isinstance(value, DTensor) else value for value in held]
        if not self._kept:
            self._kept = [tensor.detach().clone() for tensor in tensors]
        began = time.perf_counter()
        for kept, tensor in zip(self._kept, tensors, strict=True):
            kept.copy_(tensor.detach())
        return time.perf_counter() - began


def block(trainer: Trainer, saver: Saver, folder: Path | None, steps: int) -> tuple[float, float]:
    """Seconds of so many steps that begin with a checkpoint, or without a folder do not; and of the call."""
    done: SimpleQueue[Any] = SimpleQueue()
    began = time.perf_counter()
    if folder is not None:
        saver.save(trainer.learner, folder, done.put)
    called = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    ended = time.perf_counter()
    if folder is not None:
        if done.empty():
            raise SystemExit(f"{steps} steps are over before the checkpoint is written: --steps must be more")
        if (error := done.get()) is not None:
            raise error
        shutil.rmtree(folder)
    return ended - began, called - began


def turn(trainer: Trainer, saver: Saver, folder: Path, steps: int, first: bool) -> dict[str, float]:
    """Steps with a checkpoint and without one, in this order or the other."""
    taken = {saves: block(trainer, saver, folder if saves else None, steps) for saves in (first, not first)}
    copy_s = trainer.copy_s()
    lost_s = taken[True][0] - taken[False][0]
    return {"step_s": taken[False][0] / steps, "copy_s": copy_s, "call": taken[True][1] / copy_s, "lost": lost_s / copy_s}


def measure(trainer: Trainer, folder: Path, options: Namespace, apart: bool) -> list[dict[str, float]]:
    saver = Saver(None, apart)
    while apart and (saver._process is None or not saver._process.is_ready()):
        block(trainer, saver, folder, 4 * options.steps)
    turns = [turn(trainer, saver, folder, options.steps, bool(i % 2)) for i in range(1 + options.turns)][1:]  # the first gets the memory
    saver.close()
    return turns


def mean(values: list[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.1f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (6)")
    parser.add_argument("--turns", type=int, default=40, help="checkpoints (40)")
    parser.add_argument("--steps", type=int, default=5, help="steps from one checkpoint to the next (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    learner = Learner(model(options.width, options.layers), TrainerConfig(), total_steps=10**6, device_mesh=init_device_mesh("cpu", (1,)))
    trainer = Trainer(learner, episodes=1, tokens=64)
    for _ in range(2):
        trainer.step()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_"))
    results = {how: measure(trainer, folder / "c", options, how == "process") for how in ("process", "thread")}
    shutil.rmtree(folder)
    dist.destroy_process_group()
    megabytes = 3 * sum(p.numel() for p in learner.parameters) * 4 / 1e6
    columns = {how: {key: [turn[key] for turn in turns] for key in turns[0]} for how, turns in results.items()}
    rows = [(how, *(spread(of[key]) for key in ("step_s", "copy_s", "call")), mean(of["lost"])) for how, of in columns.items()]
    text = table(("written by a", "step, s", "copy of the state, s", "call / copy", "lost / copy, mean"), rows)
    report(options.out, f"State of {megabytes:.0f} MB, {options.turns} checkpoints\n\n{text}", {"state_mb": megabytes, **columns})


if __name__ == "__main__":
    main()
