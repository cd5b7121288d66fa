"""Trainer: one FSDP2 rank that takes optimizer steps and stages its shards of each new version.

Owns: model, optimizer, the ring of staging slots. One process per rank; all endpoints are called on the whole mesh.
Promises: a publish costs one copy of the local shards, whatever the generators do.
Called by: the controller. May be blocked by: the other ranks (collectives), a batch that is not complete (`take_deadline`).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from monarch.actor import Actor, current_rank, current_size, endpoint

from monarch_rl.config import Config
from monarch_rl.observe import timeline
from monarch_rl.supervise import answer_blocking
from monarch_rl.types import Version
from monarch_rl.weights.board import BOARD

if TYPE_CHECKING:
    from monarch.actor import Port

    from actors.replay_buffer import ReplayBuffer
    from monarch_rl.weights.plan import LoadPlan
    from monarch_rl.weights.slots import Ring, SlotBuffers


log = logging.getLogger(__name__)


def take_deadline(config: Config) -> float:
    """Seconds that a rank waits for a batch: every group of it may use up all its attempts."""
    return config.rollout.deadline_s * config.rollout.max_attempts + 60.0


class Stepped(NamedTuple):
    """What a rank has to tell of an optimizer step."""

    figures: dict[str, float]
    """Empty: there are no data left."""
    spans: list[timeline.Record]
    weights: str = ""
    """A fingerprint of its weights after the step, where the run is recorded or replayed; on GPUs none, whose bits are not repeatable."""


class Trainer(Actor):
    def __init__(self, config: Config, buffer: ReplayBuffer, lineage: int = 0) -> None:
        """`lineage`: of the versions that it makes."""
        self._config, self._buffer, self._lineage = config, buffer, lineage
        self._rank, self._world = current_rank().rank, sum(current_size().values())
        self._ring: Ring | None = None

    @endpoint
    def setup(self) -> None:
        """Join the process group, load the model and shard it."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from monarch_rl.checkpoint import Saver
        from monarch_rl.cluster.local import loopback_store
        from monarch_rl.learner import Learner
        from monarch_rl.models import add_adapters, load_causal_lm

        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.init()  # or the device mesh would choose a device by LOCAL_RANK, while each process sees just one
            torch.cuda.set_device(0)
        local, port = self._config.cluster.kind == "local", int(os.environ["MASTER_PORT"])
        store = loopback_store(self._rank, self._world, port) if local else None
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=self._rank, world_size=self._world)
        meeting = ("127.0.0.1" if local else os.environ["MASTER_ADDR"], port)
        self._saver = Saver(dist.new_group(backend="gloo"), apart=self._config.checkpoint.every > 0, store=meeting)
        mesh = init_device_mesh("cuda" if cuda else "cpu", (self._world,), mesh_dim_names=("fsdp",))
        model, bf16 = self._config.model, self._config.model.dtype == "bfloat16"
        policy = load_causal_lm(model.path)
        if model.lora.rank:
            add_adapters(policy, model.lora, self._config.seed)
        copied = self._config.trainer.kl and not model.lora.rank
        self._learner = Learner(
            policy,
            self._config.trainer,
            total_steps=self._config.steps,
            device_mesh=mesh,
            bf16=bf16,
            length_budget=self._config.generator.max_new_tokens,
            # Read here and nowhere else: a resume restores the policy alone, so the reference stays what it was.
            reference=load_causal_lm(model.path, torch.bfloat16 if bf16 else torch.float32) if copied else None,
        )

    @endpoint
    def restore(self, folder: Path) -> None:
        """Go on with model and optimizer of a checkpoint (collective)."""
        from monarch_rl.checkpoint import load

        load(self._learner, folder)

    @endpoint(explicit_response_port=True)
    def checkpoint(self, port: Port[None], folder: Path) -> None:
        """Copy model and optimizer (collective, each rank its shards). Answers when they are written, beside the steps that follow."""

        def told(error: Exception | None) -> None:
            port.send(None) if error is None else port.exception(error)

        self._saver.save(self._learner, folder, told)

    @endpoint
    def set_lr(self, lr: float) -> None:
        """The peak learning rate, from the next step on."""
        self._learner.config.lr = lr

    @endpoint
    def transport(self) -> str:
        """What readers' pulls go over. Raises UserError when it is not what was asked for."""
        from monarch_rl.weights import transport

        return transport.demand(self._config.weights.transport, f"trainer {self._rank}")

    @endpoint
    def open_ring(self, plans: list[LoadPlan]) -> list[list[SlotBuffers]]:
        """Register the staging slots that the load plans of a generator's ranks ask for; for each of them handles of this rank's ring."""
        from monarch_rl.weights.slots import Ring

        weights = self._config.weights
        deltas = weights.encoding != "full"
        cut = {"rank": self._rank, "world": self._world, "slots": weights.slots}
        self._ring = Ring(plans, **cut, board=BOARD, deltas=deltas, failed=self._end)
        return self._ring.register()

    @endpoint
    def publish(self, version: Version) -> None:
        """Stage the weights as they are, as `version`."""
        self._publish(version)

    @endpoint
    def step(self, step: int) -> Stepped:
        """Take this rank's shard of batch `step`, do one optimizer step, stage the result when it is due."""
        started = time.perf_counter()
        with timeline.span("wait"):
            reply = self._buffer.take.call_one(step, self._rank, self._lineage)
            shard = answer_blocking(reply, f"replay buffer (batch of step {step})", take_deadline(self._config))
        if shard is None:
            return Stepped({}, timeline.drain())
        ready = time.perf_counter()
        with timeline.span("train"):
            stats = self._learner.step(shard, before_update=self._wait_copied)
        trained = time.perf_counter()
        if self._rank == 0:
            self._buffer.trained.broadcast(step, self._lineage)
        if step % self._config.weights.every == 0 or step == self._config.steps:
            self._publish(Version(self._lineage, step))
        now = time.perf_counter()
        times = {
            "time/step_s": now - started,
            "time/wait_batch_s": ready - started,
            "time/train_s": trained - ready,
            "sync/stage_s": now - trained,
            "sync/bytes": float(self._ring.nbytes) if self._ring else 0.0,
        }
        return Stepped(stats | times, timeline.drain(), self._fingerprint())

    @endpoint
    def save(self, path: Path) -> None:
        """Write the model as a Hugging Face directory, adapters merged (collective; rank 0 writes)."""
        import torch

        from monarch_rl.models import save_pretrained

        dtype = torch.bfloat16 if self._config.model.dtype == "bfloat16" else torch.float32
        save_pretrained(self._learner.model, path, self._config.model.path, dtype)

    @endpoint
    def save_adapters(self, path: Path) -> None:
        """Write the adapters as peft does (collective; rank 0 writes)."""
        from monarch_rl.models import save_adapters

        save_adapters(self._learner.model, path)

    @endpoint
    def fingerprints(self, plans: list[LoadPlan]) -> list[dict[str, int]]:
        """What `Generator.fingerprints` must say when it holds these weights (collective); the plans may be those of the base model."""
        from monarch_rl.models import base_weights, travelling, whole
        from monarch_rl.weights.slots import fingerprints

        tensors = base_weights(self._learner.model.causal_lm) | travelling(self._learner.model)
        return [fingerprints(plan, (piece.cut(whole(tensors[piece.name])) for piece in plan.pieces)) for plan in plans]

    @endpoint
    def shut(self) -> None:
        import torch.distributed as dist

        if self._ring:
            self._ring.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _end(self, error: BaseException) -> None:
        """Nobody would get weights from here any more, so that another is to take this rank's place."""
        log.error("trainer %d: its weights cannot be sealed, it ends: %s: %s", self._rank, type(error).__name__, error)
        os._exit(os.EX_SOFTWARE)

    def _fingerprint(self) -> str:
        from monarch_rl.models import local_shards
        from monarch_rl.weights.slots import fingerprint

        wanted = (self._config.record or self._config.replay) and self._learner.device.type == "cpu"
        return fingerprint(local_shards(self._learner.model).values()) if wanted else ""

    def _wait_copied(self) -> None:
        if self._ring:
            self._ring.wait_copied()

    def _publish(self, version: Version) -> None:
        from monarch_rl.models import local_shards

        if self._ring is None:  # a replay, which nobody generates for
            return
        with timeline.span("stage", version=str(version)):
            self._ring.publish(local_shards(self._learner.model), version)
