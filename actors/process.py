"""Process: one in every process of a run, to end it, and to read its clock.

Owns: nothing. Has a thread of its own, so that it answers while other actors of its process compute.
Promises: `end` ends the process. Nothing of it is finalized: the interpreter's own way out stops threads inside native code,
which takes seconds and is told to the console.
Called by: the controller, when everything that needs closing is closed. May be blocked by: native code that holds the GIL.
"""

from __future__ import annotations

import os
import threading
import time

from monarch.actor import Actor, endpoint

from monarch_rl.observe import timeline


class Process(Actor):
    @endpoint
    async def clock(self) -> tuple[str, int]:
        """Which running kernel this is, and its time in nanoseconds."""
        return timeline.kernel(), time.time_ns()

    @endpoint
    async def end(self, in_s: float) -> None:
        """Ends the process `in_s` seconds after the answer."""
        threading.Timer(in_s, os._exit, (0,)).start()
