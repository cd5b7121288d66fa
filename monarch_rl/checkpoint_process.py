"""A process beside a trainer rank that writes its shards of checkpoints: Python that writes would take turns with Python that trains.

Both see the memory of the copy. The parent has torch plan what goes into which file; the process writes that, at a lower priority,
and answers with what torch keeps of it in `.metadata`. It ends with its parent. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl.cluster.child import die_with_parent
from monarch_rl.cluster.local import ROLE

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

ALIGNED = 64
NICE = 5
"""Trainers and generators come first; a checkpoint must be written all the same before the next is due."""
HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable"""
END_S = 10.0
"""For the process to end when it is told to."""


class Place(NamedTuple):
    """Of a tensor in the memory that both see."""

    offset: int
    shape: tuple[int, ...]
    dtype: dtype


class WriterProcess:
    """Made and used by one thread, with which the process ends."""

    def __init__(self, tensors: Sequence[Tensor], pinned: bool) -> None:
        """Moves what these hold into memory that the process sees; what shares memory stays that. `pinned`: a GPU copies to it."""
        import torch

        distinct = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        ends = list(accumulate((-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in distinct.values()), initial=0))
        offsets, size = dict(zip(distinct, ends, strict=False)), max(1, ends[-1])
        file = os.memfd_create("checkpoint")
        os.ftruncate(file, size)
        self._memory, self._pinned = mmap.mmap(file, size), pinned
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        if pinned and torch.cuda.cudart().cudaHostRegister(self._base, size, HOST_REGISTER_PORTABLE):
            raise RuntimeError(f"{size} bytes for the copy of a checkpoint cannot be pinned")
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    place = Place(offsets[tensor.data_ptr()], tuple(tensor.shape), tensor.dtype)
                    tensor.set_(_at(self._memory, place).copy_(tensor))  # type: ignore[call-overload]
        self._start(file)

    def _start(self, file: int) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(file), str(os.getpid())],
            env={name: value for name, value in os.environ.items() if name != ROLE} | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), file),
        )
        theirs.close()
        os.close(file)
        self._ready = False

    def is_ready(self) -> bool:
        """It has started; that takes seconds.

        Raises:
            OSError: it has ended.
        """
        if not self._ready and self._pipe.poll():
            self._hear()
            self._ready = True
        return self._ready

    def write(self, folder: Path, plan: SavePlan, tensors: Mapping[MetadataIndex, Tensor]) -> list[WriteResult]:
        """Write these, as planned. Raises OSError: that failed, or the process has ended."""
        places = {index: self._place(tensor) for index, tensor in tensors.items()}
        with contextlib.suppress(BrokenPipeError):  # what is heard next tells
            self._pipe.send((folder, plan, places))
        written = self._hear()
        if isinstance(written, Exception):
            raise written
        return written  # type: ignore[no-any-return]

    def _place(self, tensor: Tensor) -> Place:
        offset = tensor.data_ptr() - self._base if tensor.numel() else 0
        return Place(offset, tuple(tensor.shape), tensor.dtype)

    def close(self) -> None:
        import torch

        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._base)
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()

    def _hear(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise OSError(f"the process that writes it has ended ({_exit(self._process.wait())})") from None


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


def _at(memory: mmap.mmap, place: Place) -> Tensor:
    """With a storage of its own, as torch's writer copies what is part of a larger one."""
    import torch

    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def writer(folder: Path, process: WriterProcess | None) -> FileSystemWriter:
    """torch's writer of files; what goes into them is written by the process, when that has started."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.futures import Future

    class Apart(FileSystemWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            if process is None or not process.is_ready():
                return super().write_data(plan, planner)
            written: Future[list[WriteResult]] = Future()
            tensors: dict[MetadataIndex, Any] = {item.index: planner.resolve_data(item) for item in plan.items}
            written.set_result(process.write(folder, plan, tensors))
            return written

    return Apart(folder)


class _Planned:
    """What torch's writer asks of a planner: the data."""

    def __init__(self, memory: mmap.mmap, places: Mapping[MetadataIndex, Place]) -> None:
        self._memory, self._places = memory, places

    def resolve_data(self, item: Any) -> Tensor:
        return _at(self._memory, self._places[item.index])


def _serve(pipe: Connection, memory: mmap.mmap) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    pipe.send(None)
    while True:
        folder, plan, places = pipe.recv()
        try:
            planned: SavePlanner = _Planned(memory, places)  # type: ignore[assignment]
            pipe.send(FileSystemWriter(folder).write_data(plan, planned).value())
        except Exception as error:
            pipe.send(error)


def main(pipe: int, memory: int, parent: int) -> None:
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a terminal or Slurm sends them to all
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(Connection(pipe), mmap.mmap(memory, os.fstat(memory).st_size))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
