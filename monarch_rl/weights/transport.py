"""Monarch's RDMA, made quiet and uniform: registering host memory in pieces and reading many pieces in one action."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from monarch_rl.config import UserError
from monarch_rl.observe.quiet import silent_stderr

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

CHUNK_BYTES = 4 << 20
"""Size of one registered buffer: one action pipelines its buffers, while the bytes of one buffer go one after the other."""


def cut(nbytes: int, chunk: int = 0) -> list[slice]:
    """The pieces in which memory of `nbytes` is registered and read."""
    chunk = chunk or CHUNK_BYTES
    return [slice(a, min(a + chunk, nbytes)) for a in range(0, nbytes, chunk)]


def register(host: Tensor, chunk: int = 0) -> list[RDMABuffer]:
    """Register a flat uint8 host tensor piece by piece. Once per tensor: memory stays registered for good."""
    from monarch.rdma import RDMABuffer

    _without_fallback_warning()
    with silent_stderr():
        return [RDMABuffer(host[piece]) for piece in cut(host.numel(), chunk)]


async def warm_up() -> None:
    """Start this process's RDMA manager now, where its complaints about a missing CUDA driver can be kept from the console."""
    import torch
    from monarch.rdma import RDMABuffer

    _without_fallback_warning()
    with silent_stderr():
        await RDMABuffer(torch.zeros(1, dtype=torch.uint8)).drop()


def backend() -> str:
    """What reads go over from here: `ibverbs`, or `tcp` where there is none."""
    from monarch.rdma import get_rdma_backend

    with silent_stderr():
        return get_rdma_backend()


def demand(asked: str, who: str) -> str:
    """The backend of this process, which is the one that was asked for.

    Raises:
        UserError: `weights.transport` asks for one that cannot be had.
    """
    found = backend()
    if asked not in ("auto", found):
        raise UserError(f"weights.transport={asked}: {who} has only {found}")
    return found


def _without_fallback_warning() -> None:
    """Monarch sets the filter for its own warning anew when it is imported, so the environment cannot turn it off."""
    from monarch.rdma import RDMATcpFallbackWarning

    warnings.simplefilter("ignore", RDMATcpFallbackWarning)


async def read(pieces: Sequence[tuple[Tensor, RDMABuffer]], *, deadline_s: int) -> None:
    """Read every remote buffer into its local flat uint8 tensor, all in one action.

    Raises whatever Monarch raises on a lost peer or after `deadline_s` seconds.
    """
    from monarch.rdma import RDMAAction

    action = RDMAAction()
    for local, remote in pieces:
        action.read_remote(local, remote)
    await action.submit(timeout=deadline_s)
