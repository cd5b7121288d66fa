"""Processes of this host whose end is heard of at once: Monarch asks after them now and then, and on a busy host takes long to tell.

Those of other hosts are heard of by the workers there, see `link.Distant`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from monarch_rl.supervise import manner

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""As `linux/pidfd.h` has them; with exit codes since Linux 6.15."""
PIDFD_INFO = struct.Struct("=QQ11Ii")
"""mask, …, exit code"""


LOOK_S = 0.2
"""Between two looks, where the kernel does not tell; some sandboxes do not."""


class Child:
    """One, by its process id, until it has ended. Linux only; elsewhere nothing is heard of it but from Monarch."""

    def __init__(self, pid: int, tell: Callable[[str], object]) -> None:
        """`tell` is called once by the running loop when it has ended, a zombie too, with how it did: empty where its parent has asked
        an older kernel first."""
        self._pid, self._tell, self._loop = pid, tell, asyncio.get_running_loop()
        self._file: int | None = None
        self.ended = False
        """as far as is known"""
        if sys.platform == "linux":
            try:
                self._file = os.pidfd_open(pid)
                self._loop.add_reader(self._file, self._ended)
            except ProcessLookupError:
                self.ended = True
                self._loop.call_soon(tell, "")
            except OSError:
                self._look()

    def kill(self) -> None:
        """Unless it has ended. A stopped process too."""
        if sys.platform != "linux" or self.ended:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._file is None:
                os.kill(self._pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def _look(self) -> None:
        if _runs(self._pid):
            self._loop.call_later(LOOK_S, self._look)
        else:
            self.ended = True
            self._loop.call_soon(self._tell, "")

    def _ended(self) -> None:
        file, self._file, self.ended = self._file, None, True
        assert file is not None
        self._loop.remove_reader(file)
        how = _manner(file, self._pid)
        os.close(file)
        self._tell(how)


def _runs(pid: int) -> bool:
    """A zombie does not."""
    return (_stat(pid) or ["Z"])[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _manner(file: int, pid: int) -> str:
    """Of what has ended. Where it is a zombie it stays one, for its parent to ask after."""
    if sys.platform != "linux":
        return ""
    try:
        found = os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        statuses = _kept(file), _zombies(pid), _kept(file)  # another's, who may ask at any moment
        known = [status for status in statuses if status is not None]
        return manner(os.waitstatus_to_exitcode(known[0])) if known else ""
    if found is None:
        return ""
    return manner(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _kept(file: int) -> int | None:
    """The wait status of one whose parent has asked already; None where the kernel does not keep that."""
    info = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(file, PIDFD_GET_INFO, info)
    except OSError:
        return None
    known, *_, status = PIDFD_INFO.unpack(info)
    return int(status) if known & PIDFD_INFO_EXIT else None


def _zombies(pid: int) -> int | None:
    """The wait status of one whose parent has not asked yet."""
    stat = _stat(pid)
    return int(stat[-1]) if stat and stat[0] == "Z" else None
