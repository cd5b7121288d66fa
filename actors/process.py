"""Process: one in every process of a run, to end it, to read its clock, and to see what it takes and what it waits for.

Owns: nothing. Has a thread of its own, so that it answers while other actors of its process compute.
Promises: `end` ends the process. Nothing of it is finalized: the interpreter's own way out stops threads inside native code,
which takes seconds and is told to the console.
Called by: the controller, when everything that needs closing is closed. May be blocked by: native code that holds the GIL.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from monarch.actor import Actor, endpoint

from monarch_rl.observe import timeline
from monarch_rl.supervise import Wait, waits


class Usage(NamedTuple):
    host: str
    pid: int
    memory_bytes: int
    """resident"""
    cpu_s: float
    """of all its threads"""


class Process(Actor):
    @endpoint
    async def clock(self) -> tuple[str, int]:
        """Which running kernel this is, and its time in nanoseconds."""
        return timeline.kernel(), time.time_ns()

    @endpoint
    async def usage(self) -> Usage:
        """What it takes of its host by now."""
        return Usage(socket.gethostname(), os.getpid(), _resident_bytes(), time.process_time())

    @endpoint
    async def waits(self) -> tuple[list[Wait], list[Wait]]:
        """What its actors wait for now, and which deadlines have passed since the last call."""
        return waits()

    @endpoint
    async def end(self, in_s: float) -> None:
        """Ends the process `in_s` seconds after the answer; what its threads still have to say of others that end is heard no more."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        threading.Timer(in_s, os._exit, (0,)).start()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
