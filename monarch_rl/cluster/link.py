"""The controller's connections to its workers: what each host is, a heartbeat, whose end was heard of there, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.cluster.address import Address
from monarch_rl.cluster.machine import Facts, differences, versions
from monarch_rl.config import UserError

BEAT_S = 1.0
ANSWER_S = 30.0
"""For a worker that is there to say what it is."""
MONARCH_S = 90.0
"""For it to start Monarch's host process."""
RETRY_S = 0.25
CLOSED = "it closed the connection"
"""However that shows: where it had not read what it was told last, the connection is reset."""


class Lost(Exception):
    """A worker closed its connection, or said why it cannot go on."""


@dataclass
class Host:
    """The parent of processes that are spawned on one host."""

    python: str
    pid: int
    """its children end when this process does"""
    monarch: str = ""
    """Monarch's address of it; empty: this process itself"""


class Link:
    """One connection. All methods block, and only one thread at a time may use it; while one hears, others may tell."""

    def __init__(self, address: Address, deadline_s: float) -> None:
        """Waits for a worker to listen. Raises UserError when none does within the deadline."""
        self.address = address
        self.who = f"worker {address}"
        self._unread = b""
        self._telling = threading.Lock()
        self._watched: dict[int, Callable[[str], object]] = {}
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self._socket = socket.create_connection((address.host, address.port), max(0.1, deadline - time.monotonic()))
                break
            except socket.gaierror as error:
                raise UserError(f"cluster.hosts: {address}: {error.strerror}") from None
            except OSError as error:
                if time.monotonic() + RETRY_S > deadline:
                    why = error.strerror or "no answer"
                    start = f"on that host: monarch-rl worker --address {address}"
                    raise UserError(f"cluster.hosts: no worker at {address} within {deadline_s:g} s: {why}; {start}") from None
            time.sleep(RETRY_S)

    @property
    def own_ip(self) -> str:
        """By which that host reaches this process."""
        return str(self._socket.getsockname()[0])

    def ask(self, output_dir: Path, heartbeat_s: float) -> Facts:
        """What that host is.

        Raises:
            UserError: it is no worker, or one that does not fit: other software, other folders, taken.
        """
        who = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            with _probe(output_dir.absolute()) as probe:
                self._tell({"from": who, "cwd": os.getcwd(), "probe": str(probe), "heartbeat_s": heartbeat_s})
                answer = self._hear(ANSWER_S)
            found = Facts(**answer["facts"] | {"gpus": tuple(answer["facts"]["gpus"])})
        except (Lost, KeyError, TypeError, ValueError):
            raise UserError(f"cluster.hosts: what listens at {self.address} is no worker of monarch_rl") from None
        self.who = f"worker {self.address} on {found.name}"
        if answer["problem"]:
            raise UserError(f"{self.who}: {answer['problem']}")
        if unlike := differences(versions(), found.versions):
            raise UserError(f"{self.who}: {unlike}; it was started with {found.python}, this run with {sys.executable}")
        return found

    def start(self, python: str) -> Host:
        """Have it start Monarch's host process. Raises UserError when that fails."""
        try:
            self._tell({"start": True})
            answer = self._hear(MONARCH_S)
        except Lost as error:
            raise UserError(f"{self.who} was lost: {error}") from None
        if "problem" in answer:
            raise UserError(f"{self.who}: {answer['problem']}")
        return Host(python, answer["pid"], answer["monarch"])

    def fileno(self) -> int:
        return self._socket.fileno()

    def beat(self) -> None:
        """Raises OSError when nobody is there."""
        self._tell({})

    def watch(self, pid: int, ended: Callable[[str], object]) -> None:
        """Hear of the end of a process there. `ended` is called by whoever calls `hear`, with how it did. Raises OSError as `beat` does."""
        self._watched[pid] = ended
        self._tell({"watch": pid})

    def kill(self, pid: int) -> None:
        """A process that is watched. Raises OSError as `beat` does."""
        self._tell({"kill": pid})

    def hear(self) -> str | None:
        """Take in whose end the worker tells of. Why it ends the connection, where it does that instead. Blocks until it says something."""
        try:
            while "ended" in (message := self._hear(ANSWER_S)):
                self._watched.pop(message["ended"])(message["how"])
                if b"\n" not in self._unread:
                    return None
            return str(message.get("problem", "it was ended"))
        except (Lost, ValueError) as error:
            return str(error)

    def close(self, deadline_s: float = 0.0) -> None:
        """Say good-bye; with a deadline also wait until all that was started there is gone."""
        try:
            if deadline_s:
                self._tell({"bye": True})
                while "gone" not in self._hear(deadline_s):
                    pass
        except (Lost, OSError, ValueError):
            pass  # it has ended already, or does not answer: its own heartbeat ends it
        finally:
            self._socket.close()

    def _tell(self, message: dict[str, Any]) -> None:
        with self._telling:
            self._socket.settimeout(ANSWER_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self, deadline_s: float) -> dict[str, Any]:
        """The next message. Raises Lost at the end or when none comes, ValueError for what is none."""
        self._socket.settimeout(deadline_s)
        try:
            while b"\n" not in self._unread:
                received = self._socket.recv(65536)
                if not received:
                    raise Lost(CLOSED)
                self._unread += received
        except ConnectionError:
            raise Lost(CLOSED) from None
        except OSError as error:
            raise Lost(error.strerror or f"no answer within {deadline_s:g} s") from None
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(line)
        return message


class Distant:
    """A process of another host, as `children.Child` is one of this host."""

    def __init__(self, link: Link, pid: int, tell: Callable[[str], object]) -> None:
        self._link, self._pid, self._tell, self._loop = link, pid, tell, asyncio.get_running_loop()
        self.ended = False
        with contextlib.suppress(OSError):  # that the host is lost is told as such
            link.watch(pid, self._heard)

    def kill(self) -> None:
        if not self.ended:
            with contextlib.suppress(OSError):
                self._link.kill(self._pid)

    def _heard(self, how: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, how)

    def _end(self, how: str) -> None:
        self.ended = True
        self._tell(how)


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """A file that whoever shares the folder can see. Leaves a folder as it was that is there only for this."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".seen-{os.urandom(8).hex()}"
    probe.touch()
    try:
        yield probe
    finally:
        probe.unlink()
        if made:
            with contextlib.suppress(OSError):  # others may look at the same time
                folder.rmdir()


class Heart(threading.Thread):
    """Beats to all workers once a second, whatever the event loop does, and hears at once when one is lost."""

    def __init__(self, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called from this thread, with one line that names the worker."""
        super().__init__(name="heart", daemon=True)
        self._on_lost = on_lost
        self._links: list[Link] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def add(self, link: Link) -> None:
        with self._lock:
            self._links.append(link)

    def run(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                links = list(self._links)
            readable, _, _ = select.select(links, [], [], BEAT_S)
            for link in links:
                self._tend(link, link in readable)

    def _tend(self, link: Link, spoke: bool) -> None:
        try:
            if not spoke:
                return link.beat()
            if (why := link.hear()) is None:
                return None
        except ConnectionError:
            why = CLOSED
        except OSError as error:
            why = error.strerror or "it takes no heartbeat"
        with self._lock:
            self._links.remove(link)
        if not self._ending.is_set():
            self._on_lost(f"{link.who} was lost: {why}")

    def stop(self) -> None:
        """No beat is sent and no loss reported when this returns."""
        self._ending.set()
        if self.is_alive():
            self.join()
