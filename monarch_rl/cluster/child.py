"""What each process of a run starts as: tied to its controller before anything else, then Monarch's own main.

Monarch ties its processes to their parent too, but only after half a second of imports; a controller that is killed
meanwhile would leave them behind.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

CONTROLLER = "MONARCH_RL_CONTROLLER"
"""Variable with the process id of the controller."""
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end it now when the parent is gone already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_sigterm() -> None:
    """A batch system sends it to all processes of a job at once. The controller ends this one, when it has saved with its help.

    It is not ignored: whatever is started from here would inherit that."""
    signal.signal(signal.SIGTERM, lambda *_: None)


if __name__ == "__main__":
    die_with_parent(int(os.environ[CONTROLLER]))
    outlive_sigterm()
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a terminal sends it to all; the controller shows who waits for whom
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
