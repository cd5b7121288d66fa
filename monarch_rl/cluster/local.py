"""All meshes on this host: processes with the environment and the devices that fit them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch_rl.cluster.child import CONTROLLER
from monarch_rl.config import Config
from monarch_rl.engine import engine_environment
from monarch_rl.observe.quiet import silent_stderr

if TYPE_CHECKING:
    from monarch._rust_bindings.monarch_hyperactor.shape import Point
    from monarch.actor import HostMesh, ProcMesh

# Monarch's own settings are read when it is imported: a dead process is noticed within a second, and stopping takes seconds.
MONARCH_ENVIRONMENT = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "1s",
    "HYPERACTOR_CLEANUP_TIMEOUT": "500ms",
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "8",
}
ROLE = "MONARCH_RL_PROCESS"
"""Variable that tells which process of a run one is, e.g. `trainer 0`; the command lines are all alike (`ps e` shows it)."""


@dataclass(frozen=True, slots=True)
class Processes:
    """One process mesh to be spawned: how many processes, along which dimension, with which GPUs."""

    name: str
    dim: str
    count: int
    gpus: tuple[int, ...] = ()
    """GPU of each process; empty: none."""

    def __str__(self) -> str:
        devices = f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else "CPU"
        return f"{self.name}: {self.count} process{'es' if self.count > 1 else ''} on this host, {devices}"


def visible_gpus() -> list[int]:
    """Indices of the GPUs of this host that may be used, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(index) for index in visible.split(",") if index.strip().isdigit()]
    return sorted(int(name[6:]) for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())


def place(config: Config, replicas: int | None = None) -> list[Processes]:
    """The processes of a run, with as many generators as configured or `replicas`.

    Trainer ranks get the first GPUs, generators the next, round and round where there are too few.
    """
    gpus = visible_gpus() if config.profile == "cuda" else []
    at = [0]

    def deal(count: int) -> tuple[int, ...]:
        dealt = tuple(gpus[(at[0] + i) % len(gpus)] for i in range(count)) if gpus else ()
        at[0] += count
        return dealt

    trainer = Processes("trainer", "rank", config.trainer.ranks, deal(config.trainer.ranks))
    generators = [Processes(f"generator_{i}", "tp", 1, deal(1)) for i in range(config.generator.replicas if replicas is None else replicas)]
    return [
        trainer,
        *generators,
        Processes("replay_buffer", "proc", 1),
        Processes("rollout", "worker", config.rollout.workers),
        Processes("scorer", "worker", config.scorer.workers),
    ]


def environment(config: Config) -> dict[str, str]:
    """What every process of a run finds in its environment. On CPUs each computes with few threads: cores are shared by roles."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    threads = {} if config.profile == "cuda" else {"OMP_NUM_THREADS": str(config.cluster.cpu_threads)}
    return {**MONARCH_ENVIRONMENT, **engine_environment(cpu=config.profile != "cuda"), **quiet, **threads}


def host() -> HostMesh:
    """This host. The first call starts Monarch; its settings must be in the environment by then."""
    os.environ.update({key: value for key, value in MONARCH_ENVIRONMENT.items() if key not in os.environ})
    with silent_stderr():
        from monarch.actor import this_host

        return this_host()


def spawn(on: HostMesh, processes: Processes, environment: Mapping[str, str]) -> ProcMesh:
    """Start processes whose environment is set before Python starts, so that torch and CUDA see it when they are imported."""
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    def command(point: Point) -> BootstrapCommand:
        rank = point[processes.dim]
        own = {
            "CUDA_VISIBLE_DEVICES": str(processes.gpus[rank]) if processes.gpus else "",
            ROLE: f"{processes.name} {rank}",
            CONTROLLER: str(os.getpid()),
        }
        return BootstrapCommand(sys.executable, None, ["-m", "monarch_rl.cluster.child"], {**environment, **own})

    return on.spawn_procs({processes.dim: processes.count}, name=processes.name, bootstrap_command=command)
