"""`monarch-rl worker`: lends this host to a run.

Serves one controller at a time over a connection of its own: says what this host is, starts Monarch's host process when asked to,
and ends it with all that it has started when the controller says so, falls silent or is gone. Whoever reaches its port can run
what he likes here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from monarch_rl.cluster import machine
from monarch_rl.cluster.address import Address, own_ip, parse
from monarch_rl.cluster.children import Child
from monarch_rl.cluster.host_process import HostProcess, end_children
from monarch_rl.config import UserError

PR_SET_CHILD_SUBREAPER = 36
UNCLAIMED_S = 300.0
"""So long a worker that published its address waits for a controller."""
LOOK_S = 0.2
"""Between two looks at Monarch's host process."""
NO_MESSAGE = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
"""Raised for the end of a connection, and for what no controller of ours would say."""


def main(arguments: Sequence[str]) -> int:
    """The subcommand. Returns the exit code: 0 when the controller was done, 1 when it was lost, 128 + n after signal n."""
    parser = argparse.ArgumentParser("monarch-rl worker", description="Lend this host to a run (cluster.kind=attach).")
    parser.add_argument("--address", help="tcp://HOST:PORT where controllers reach this host; port 0 takes a free one")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write the address into a file of this folder")
    parser.add_argument("--stay", action="store_true", help="serve another controller when one is done")
    options = parser.parse_args(arguments)
    if not (options.address or options.publish):
        parser.error("say --address tcp://HOST:PORT, or --publish DIR")
    address = parse(options.address, "--address") if options.address else Address(own_ip(), 0)
    return asyncio.run(Worker(options.stay).run(address, options.publish))


class Worker:
    """One host that may be attached."""

    def __init__(self, stay: bool) -> None:
        self._stay = stay
        self._owner = ""
        """who is served; empty: nobody"""

    async def run(self, address: Address, publish: Path | None) -> int:
        """Listen until a controller is done. Raises UserError when the address cannot be had."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent below us becomes ours to end
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = loop.create_future()
        loop.add_signal_handler(signal.SIGINT, self._finish, 128 + signal.SIGINT)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        try:
            self._ip = socket.gethostbyname(address.host)
            server = await asyncio.start_server(self._serve, self._ip, address.port)
        except OSError as error:
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise UserError(f"--address {address}: {why}") from error
        self.address = Address(address.host, server.sockets[0].getsockname()[1])
        _say(f"{self.address} on {socket.gethostname()}")
        if publish:
            write_address(publish, self.address)
        if publish and not self._stay:
            loop.call_later(UNCLAIMED_S, self._finish_unclaimed)
        try:
            return await self._over
        finally:
            end_children()

    def _finish_unclaimed(self) -> None:
        if not self._owner:
            self._finish(1)

    def _terminate(self) -> None:
        """When a Slurm job is cancelled its controller hears of it too, saves what it has with the processes here, and lets them go."""
        if self._owner and "SLURM_STEP_ID" in os.environ:
            _say(f"Slurm ends this job; {self._owner} may save first")
        else:
            self._finish(128 + signal.SIGTERM)

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One connection: a question about this host, and perhaps the run that follows."""
        with contextlib.suppress(ConnectionError, *NO_MESSAGE), contextlib.closing(writer):
            hello = await _hear(reader)
            _tell(writer, facts=asdict(machine.facts()), problem=self._taken() or _unshared(hello))
            start = await _hear(reader)
            if "start" in start:
                await self._lend(hello, reader, writer)

    def _taken(self) -> str:
        return f"it serves {self._owner} already" if self._owner else ""

    async def _lend(self, hello: dict[str, Any], reader: StreamReader, writer: StreamWriter) -> None:
        if taken := self._taken():
            return _tell(writer, problem=taken)
        self._owner = hello["from"]
        _say(f"lent to {self._owner}")
        code = 1
        try:
            host = await HostProcess.start(self._ip, Path(hello["cwd"]))
            _tell(writer, monarch=str(host.address), pid=host.pid)
            why = await _until_over(host, reader, writer, hello["heartbeat_s"])
            code = 0 if why == "done" else 1
            _say(f"{self._owner}: {why}")
            if why != "done":
                _tell(writer, problem=why)
        except RuntimeError as error:
            _tell(writer, problem=str(error))
        finally:
            self._owner = ""
            end_children()
            _tell(writer, gone=True)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if not self._stay:
                self._finish(code)


async def _until_over(host: HostProcess, reader: StreamReader, writer: StreamWriter, heartbeat_s: float) -> str:
    """Why there is nothing more to do for this controller. Until then it hears of the end of processes that it watches."""
    watched: dict[int, Child] = {}
    died = asyncio.create_task(_death(host))
    word = asyncio.create_task(_hear(reader))
    try:
        while True:
            await asyncio.wait({word, died}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return died.result()
            if not word.done():
                return f"nothing was heard from it for {heartbeat_s:g} s"
            if word.exception() is not None:
                return "it is gone"
            message = word.result()
            if "bye" in message:
                return "done"
            if "watch" in message:
                watched[message["watch"]] = Child(message["watch"], partial(_tell_end, writer, message["watch"]))
            if "kill" in message:
                watched[message["kill"]].kill()
            word = asyncio.create_task(_hear(reader))
    finally:
        died.cancel()
        word.cancel()


def _tell_end(writer: StreamWriter, pid: int, how: str) -> None:
    if not writer.is_closing():
        _tell(writer, ended=pid, how=how)


async def _death(host: HostProcess) -> str:
    while True:
        if (code := host.ended()) is not None:
            return f"Monarch's host process ended with exit code {code}"
        await asyncio.sleep(LOOK_S)


def _unshared(hello: dict[str, Any]) -> str:
    """What of the controller's file system cannot be seen from here."""
    if not Path(hello["cwd"]).is_dir():
        return f"the working folder {hello['cwd']} is not there; hosts must share it"
    if not Path(hello["probe"]).exists():
        return f"output_dir {Path(hello['probe']).parent} is not the same folder there; hosts must share it"
    return ""


async def _hear(reader: StreamReader) -> dict[str, Any]:
    """The next message: one object of JSON on a line. Raises one of NO_MESSAGE."""
    message = json.loads(await reader.readuntil())
    if not isinstance(message, dict):
        raise ValueError(message)
    return message


def _tell(writer: StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def write_address(folder: Path, address: Address) -> None:
    """One file per worker, there completely or not at all; a Slurm task's is named by its rank."""
    folder.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("SLURM_PROCID") or f"{socket.gethostname()}-{os.getpid()}"
    draft = folder / f".{name}"
    draft.write_text(str(address), encoding="utf-8")
    draft.rename(folder / f"{name}.address")


def _say(text: str) -> None:
    print(f"worker: {text}", file=sys.stderr, flush=True)
