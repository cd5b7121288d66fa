from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone, for what is sharded by FSDP."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
