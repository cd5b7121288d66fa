"""What an engine thread does between two decode steps; with several ranks, all the same between the same two.

With tensor parallelism each rank runs a whole vLLM engine over its part of the weights, and their forward passes meet in collectives.
These fit together only as long as every rank admits, aborts and swaps alike. So rank 0 alone is asked, and tells the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from monarch_rl.cluster.local import loopback_store
from monarch_rl.engine_errors import EngineError
from monarch_rl.observe import timeline

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SHOWN_IDLE_S = 0.001
"""Shorter sleeps are not in the timeline."""
FOREVER = timedelta(days=365)
"""While rank 0 has nothing to do the others wait for its word, asleep; its death ends the wait."""


class Job(NamedTuple):
    run: Callable[[Any], Any] | None
    """Is given the engine; where there are several ranks it can be pickled. None: the engine ends."""
    future: asyncio.Future[Any] | None = None
    """Of the result, on the rank that was asked."""


class Jobs:
    """From the event loop to the engine thread. All but `put` and `idle_s` are for the thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self.lockstep: Lockstep | None = None
        self._idle_s = 0.0
        self._asleep_since: float | None = None

    def put(self, job: Job) -> None:
        self._queue.put(job)

    @property
    def idle_s(self) -> float:
        """Seconds asleep since the start."""
        since = self._asleep_since
        return self._idle_s + (time.perf_counter() - since if since is not None else 0.0)

    def next(self, *, busy: bool) -> list[Job]:
        """All that was asked for since the last step. Sleeps until something is, unless there is something to decode."""
        if self.lockstep and not self.lockstep.leads:
            return [Job(run) for run in self.lockstep.hear()]
        jobs = [] if busy else [self._sleep()]
        with contextlib.suppress(Empty):
            while True:
                jobs.append(self._queue.get_nowait())
        if self.lockstep:
            self.lockstep.tell([job.run for job in jobs])
        return jobs

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank. None goes on before all have."""
        return self.lockstep.gather(value) if self.lockstep else [value]

    def _sleep(self) -> Job:
        start = self._asleep_since = time.perf_counter()
        job = self._queue.get()
        slept_s, now_ns = time.perf_counter() - start, time.time_ns()
        self._asleep_since = None
        self._idle_s += slept_s
        if slept_s >= SHOWN_IDLE_S:
            timeline.add(timeline.Span("idle", now_ns - int(slept_s * 1e9), now_ns))
        return job


def meet() -> None:
    """Have the ranks of a generator, all on one host, find each other before they build their engines.

    The environment tells each who it is, as torchrun's. By itself vLLM would listen on every interface, and call the memory that ranks
    share on CPUs after the meeting place without its port: the same for all generators of a host.
    """
    import torch.distributed as dist
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    rank, ranks, local_rank, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    dist.init_process_group(current_platform.dist_backend, store=loopback_store(rank, ranks, port), rank=rank, world_size=ranks)
    ExecutorWithExternalLauncher._distributed_args = lambda _: (f"tcp://127.0.0.1:{port}", rank, local_rank)


class Lockstep:
    """To be made, and called, by the engine threads of all ranks alike, when they have built their engines."""

    def __init__(self, llm: Any) -> None:
        import torch.distributed as dist

        _leave_no_names()
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._sampled = 0
        self._watch(llm.engine_core)

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def tell(self, jobs: Sequence[Any]) -> None:
        """Rank 0: have the others do the same now. To be called before each step, also with nothing to do."""
        import torch

        payload = pickle.dumps(jobs) if jobs else b""
        self._broadcast(torch.tensor([len(payload), self._sampled]))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def hear(self) -> list[Any]:
        """The other ranks: wait for what rank 0 tells.

        Raises:
            EngineError: rank 0 is gone, or has sampled other tokens.
        """
        import torch

        header = torch.zeros(2, dtype=torch.int64)
        self._broadcast(header)
        nbytes, sampled = header.tolist()
        if sampled != self._sampled:
            raise EngineError(f"rank {self._rank} of the generator has sampled other tokens than rank 0")
        if not nbytes:
            return []
        payload = torch.empty(nbytes, dtype=torch.uint8)
        self._broadcast(payload)
        return list(pickle.loads(payload.numpy().tobytes()))

    def gather(self, value: T) -> list[T]:
        """See `Jobs.gather`."""
        import torch.distributed as dist

        found: list[Any] = [None] * self._ranks
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise EngineError(f"another rank of the generator is gone: {error}") from error
        return found

    def close(self) -> None:
        """The other ranks hear of it when they next want to go on."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)
        del self._group

    def _broadcast(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        try:
            dist.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as error:
            raise EngineError(f"another rank of the generator is gone: {error}") from error

    def _watch(self, core: Any) -> None:
        """Keep a checksum of all tokens that were sampled: ranks that differ in one would go apart from there on."""
        get_output = core.get_output

        def watched() -> Any:
            outputs = get_output()
            ids = array("q", chain.from_iterable(output.new_token_ids for output in outputs.outputs))
            self._sampled = zlib.crc32(ids.tobytes(), self._sampled)
            return outputs

        core.get_output = watched


def _leave_no_names() -> None:
    """Of memory that ranks share: it goes with the last process then, however that ends. All of them have it by now."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    group.mq_broadcaster = None  # for engines with a scheduler for all ranks
    if name := getattr(getattr(group.device_communicator, "dist_module", None), "group_name", ""):  # on CPUs
        Path(f"/dev/shm/{name}_{group.rank_in_group}").unlink(missing_ok=True)
