"""How far the clocks of a run's processes are ahead of the controller's, so that one timeline can show them all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from monarch_rl.observe.timeline import ahead_ns, kernel
from monarch_rl.supervise import answer

if TYPE_CHECKING:
    from actors.process import Process

READINGS = 5
"""Of each clock; the quickest counts, whose answer was least long under way."""
DEADLINE_S = 60.0


async def clock_offsets(processes: Mapping[str, Process]) -> dict[str, int]:
    """Nanoseconds by lane of the timeline, of the meshes `processes`. Processes of this host, which share our clock, are left out."""
    found: dict[str, int] = {}
    for name, mesh in processes.items():
        asked: dict[int, list[tuple[int, int, int]]] = {}
        for _ in range(READINGS):
            sent_ns = time.time_ns()
            replies = await answer(mesh.clock.call(), f"{name} (clock)", DEADLINE_S)
            for rank, (on, its_ns) in enumerate(replies.values()):
                if on == kernel():
                    continue
                asked.setdefault(rank, []).append((sent_ns, its_ns, time.time_ns()))
            if not asked:
                break
        found |= {lane(name, rank): ahead_ns(readings) for rank, readings in asked.items()}
    return found


def lane(mesh: str, rank: int) -> str:
    """What the timeline calls a process: `trainer 0`, `generator 2`."""
    if mesh == "replay_buffer":
        return "replay buffer"
    return mesh.replace("_", " ") if mesh[-1].isdigit() else f"{mesh} {rank}"
