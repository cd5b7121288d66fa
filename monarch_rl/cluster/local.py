"""Processes with the environment and the devices that fit them, and the host mesh that is this host."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from monarch_rl.cluster.child import CONTROLLER
from monarch_rl.cluster.link import Host
from monarch_rl.cluster.machine import MONARCH_ENVIRONMENT, set_monarch_up
from monarch_rl.cluster.placement import Processes
from monarch_rl.config import Config
from monarch_rl.engine_setup import engine_environment
from monarch_rl.observe.quiet import silent_stderr

if TYPE_CHECKING:
    from monarch._rust_bindings.monarch_hyperactor.shape import Point
    from monarch.actor import HostMesh, ProcMesh

ROLE = "MONARCH_RL_PROCESS"
"""Variable that tells which process of a run one is, e.g. `trainer 0`; the command lines are all alike (`ps e` shows it)."""


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that say on which network interface trainer ranks listen for each other."""


def environment(config: Config) -> dict[str, str]:
    """What every process of a run finds in its environment."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    tcp = {"MONARCH_RDMA_DISABLE_IBVERBS": "1"} if config.weights.transport == "tcp" else {}
    local = config.cluster.kind == "local"
    loopback = {name: os.environ.get(name, "lo") for name in INTERFACES} if local and sys.platform == "linux" else {}
    return {**MONARCH_ENVIRONMENT, **engine_environment(cpu=config.profile != "cuda"), **quiet, **tcp, **loopback}


def loopback_store(rank: int, world: int, port: int) -> Any:
    """Where the ranks of one host meet. The one that torch makes by itself listens on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listening = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
    return TCPStore("127.0.0.1", port, world, rank == 0, master_listen_fd=listening)


def host() -> HostMesh:
    """This host. The first call starts Monarch; its settings must be in the environment by then."""
    set_monarch_up()
    with silent_stderr():
        from monarch.actor import this_host

        here = this_host()
    end_quietly()
    return here


@cache
def end_quietly() -> None:
    """Have Monarch end before its own exit handler would have it; to be called when it has been started."""
    atexit.register(_end_monarch)


def _end_monarch() -> None:
    """As Monarch's own handler, which has words for a host that is gone already, and for a second that was not enough."""
    from monarch.actor import shutdown_context

    with contextlib.suppress(TimeoutError):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)


def spawn(on: HostMesh, processes: Processes, environment: Mapping[str, str], parents: Sequence[Host] = ()) -> ProcMesh:
    """Start processes whose environment is set before Python starts, so that torch and CUDA see it when they are imported.

    Args:
        parents: of the processes on each host of the mesh; this process when there is none.
    """
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    parents = parents or [Host(sys.executable, os.getpid())]
    each = processes.count // len(parents)

    def command(point: Point) -> BootstrapCommand:
        rank = point.rank
        parent = parents[rank // each]
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(processes.gpus if processes.one_engine else processes.gpus[rank : rank + 1]),
            ROLE: f"{processes.name} {rank}",
            CONTROLLER: str(parent.pid),
        }
        threads = {"OMP_NUM_THREADS": str(processes.threads)} if "OMP_NUM_THREADS" in environment else {}
        return BootstrapCommand(parent.python, None, ["-m", "monarch_rl.cluster.child"], {**environment, **threads, **own})

    return on.spawn_procs({processes.dim: each}, name=processes.name, bootstrap_command=command)
