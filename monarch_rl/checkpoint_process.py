"""A process beside each trainer rank that writes its checkpoints: Python that writes would take turns with Python that trains.

Both see the memory of the copy. What is in it stays the same, so torch plans this rank's part once, when the process is started. From then
on it is told a folder and saves, together with the processes of the other ranks, in a group of their own and at a lower priority. It
ends with its parent. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import accumulate
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl.cluster.child import die_with_parent
from monarch_rl.cluster.local import ROLE
from monarch_rl.supervise import manner

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan

ALIGNED = 64
NICE = 5
"""Trainers and generators come first; a checkpoint must be written all the same before the next is due."""
HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable"""
NO_GROUP = "torch.distributed is disabled"
"""What torch warns of when a rank alone saves."""


class Peers(NamedTuple):
    """How the processes of all ranks find each other."""

    host: str
    port: int
    """of the store where the ranks have met"""
    name: str
    """of this meeting"""
    rank: int
    world: int


class Place(NamedTuple):
    """Of a tensor in the memory that both see."""

    offset: int
    shape: tuple[int, ...]
    dtype: dtype


class WriterProcess:
    """Made and used by one thread, with which the process ends."""

    def __init__(self, state: Mapping[str, Any], pinned: bool, peers: Peers | None) -> None:
        """Moves the tensors of `state` into memory that the process sees; what shares memory stays that.

        `pinned`: a GPU copies to it. `peers`: None for a rank alone."""
        import torch

        plan, tensors = _planned(state)
        distinct = {tensor.data_ptr(): tensor for tensor in tensors.values() if tensor.numel()}
        ends = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in distinct.values()), initial=0))
        offsets, size = dict(zip(distinct, ends, strict=False)), max(1, ends[-1])
        places = {index: Place(offsets.get(t.data_ptr(), 0), tuple(t.shape), t.dtype) for index, t in tensors.items()}
        told = pickle.dumps((plan, places, peers))
        file = os.memfd_create("checkpoint")
        os.ftruncate(file, size + len(told))
        memory = mmap.mmap(file, size + len(told))
        memory[size:] = told
        self._memory, self._pinned = memory, pinned
        self._base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if pinned and int(torch.cuda.cudart().cudaHostRegister(self._base, size, HOST_REGISTER_PORTABLE)):  # the enum itself is always true
            raise RuntimeError(f"{size} bytes for the copy of a checkpoint cannot be pinned")
        with torch.no_grad():
            for index, tensor in tensors.items():
                if tensor.numel():
                    tensor.set_(_at(memory, places[index]).copy_(tensor))  # type: ignore[call-overload]
        self._start(file, size)

    def _start(self, file: int, size: int) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, (theirs.fileno(), file, size, os.getpid()))],
            env={name: value for name, value in os.environ.items() if name != ROLE} | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), file),
        )
        theirs.close()
        os.close(file)
        self._ready = False

    def is_ready(self) -> bool:
        """It has started, which takes seconds, and so have those of the other ranks.

        Raises:
            OSError: it has ended.
        """
        if self._pipe.poll():  # then it says that it is ready, or has ended
            self._hear()
            self._ready = True
        return self._ready

    def write(self, folder: Path) -> bool:
        """Whether it is written; if not, another rank's process has ended. Raises OSError: that failed, or this one has ended."""
        with contextlib.suppress(BrokenPipeError):  # what is heard next tells
            self._pipe.send(folder)
        answer = self._hear()
        if isinstance(answer, str):
            raise OSError(answer)
        return bool(answer)

    def close(self) -> None:
        """When it has nothing to write."""
        import torch

        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._base)
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise OSError(f"the process that writes it {manner(self._process.wait())}") from None


def _planned(state: Mapping[str, Any]) -> tuple[SavePlan, dict[MetadataIndex, Tensor]]:
    """What this rank has to write, of all that the ranks have, and the tensors that the plan names."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    with torch.no_grad():  # or what is found would be views
        planner.set_up_planner(dict(state))
        plan = planner.create_local_plan()
        return plan, {item.index: planner.lookup_object(item.index) for item in plan.items}


def _at(memory: mmap.mmap, place: Place) -> Tensor:
    """With a storage of its own, as torch's writer copies what is part of a larger one."""
    import torch

    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def _meet(peers: Peers) -> None:
    from torch.distributed import PrefixStore, TCPStore, init_process_group  # type: ignore[attr-defined]

    store = PrefixStore(peers.name, TCPStore(peers.host, peers.port, is_master=False))
    init_process_group("gloo", store=store, rank=peers.rank, world_size=peers.world)


def _serve(pipe: Connection, plan: SavePlan, tensors: Mapping[MetadataIndex, Tensor], alone: bool) -> None:
    import warnings

    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planned(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return plan

        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return tensors[index]

    warnings.filterwarnings("ignore", NO_GROUP, UserWarning)
    pipe.send(None)
    while True:
        folder = pipe.recv()
        try:
            save({}, checkpoint_id=folder, planner=Planned(), no_dist=alone)
        except CheckpointException as error:  # all of them hear of it
            pipe.send(str(error))
        except Exception:  # they cannot hear each other any more: those that wait for this one are to know
            pipe.send(False)
            raise
        else:
            pipe.send(True)


def main(pipe: int, file: int, size: int, parent: int) -> None:
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a terminal or Slurm sends them to all
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    memory = mmap.mmap(file, os.fstat(file).st_size)
    plan, places, peers = pickle.loads(memory[size:])
    if peers is not None:
        _meet(peers)
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(Connection(pipe), plan, {index: _at(memory, place) for index, place in places.items()}, alone=peers is None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
