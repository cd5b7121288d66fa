"""Which transport there is, and that one which was asked for is had or refused."""

from __future__ import annotations

import pytest

from monarch_rl.cluster.local import environment
from monarch_rl.config import UserError
from monarch_rl.configure import load
from monarch_rl.weights import transport


@pytest.mark.parametrize(
    ("there", "asked", "fine"), [("tcp", "auto", True), ("tcp", "tcp", True), ("tcp", "ibverbs", False), ("ibverbs", "ibverbs", True)]
)
def test_a_transport_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, there: str, asked: str, fine: bool) -> None:
    monkeypatch.setattr(transport, "backend", lambda: there)
    if fine:
        assert transport.demand(asked, "trainer 0") == there
    else:
        with pytest.raises(UserError, match=r"^weights\.transport=ibverbs: trainer 0 has only tcp$"):
            transport.demand(asked, "trainer 0")


def test_this_process_knows_its_backend() -> None:
    assert transport.backend() in ("tcp", "ibverbs")


def test_tcp_on_demand_also_where_there_is_hardware() -> None:
    def of(asked: str) -> dict[str, str]:
        return environment(load(["recipe=grpo_qwen", "profile=cpu", f"weights.transport={asked}"]).config)

    assert of("tcp")["MONARCH_RDMA_DISABLE_IBVERBS"] == "1"
    assert "MONARCH_RDMA_DISABLE_IBVERBS" not in of("auto")
