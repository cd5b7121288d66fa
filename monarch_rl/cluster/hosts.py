"""The hosts of a run, by index: this one, or workers on others. Processes are spawned on them where they were placed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from monarch_rl.cluster import local
from monarch_rl.cluster.address import Address, parse
from monarch_rl.cluster.children import Child
from monarch_rl.cluster.dashboard import Dashboard
from monarch_rl.cluster.link import Distant, Heart, Host, Link
from monarch_rl.cluster.machine import Facts, facts, set_monarch_up
from monarch_rl.cluster.placement import Processes
from monarch_rl.cluster.slurm import Allocation
from monarch_rl.config import Config, UserError
from monarch_rl.observe.quiet import silent_stderr
from monarch_rl.supervise import answer

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh

A = TypeVar("A")
B = TypeVar("B")

ATTACH_S = 60.0
"""For Monarch to reach a host process that listens."""
GONE_S = 10.0
"""For a worker to end what it has started."""


class Hosts:
    """To be opened first. Whatever was started on hosts other than this one has ended when `close` returns."""

    def __init__(self, config: Config) -> None:
        self.facts: list[Facts] = []
        """of each host, by index"""
        self._config = config
        self._environment = local.environment(config)
        self._heart: Heart | None = None
        self._parents: list[Host] = []
        self._links: list[Link] = []
        self._meshes: dict[tuple[int, ...], HostMesh] = {}
        self._allocation: Allocation | None = None
        self.dashboard = Dashboard(Path(config.output_dir).absolute() / "workers/dashboard.log")
        """of `cluster.dashboard`; its `url` is empty where there is none"""

    async def open(self, on_lost: Callable[[str], object]) -> None:
        """Have the hosts that the configuration names. `on_lost` is called with one line when one goes away, from another thread.

        Raises:
            UserError: names the worker that cannot be had, and why. To be closed then, too.
        """
        cluster = self._config.cluster
        set_monarch_up()
        if cluster.kind == "local":
            await self._start_dashboard()
            self.facts, self._parents = [facts()], [Host(sys.executable, os.getpid())]
            self._meshes[0,] = local.host()
            return await self._show([0])
        addresses = cluster.hosts
        if cluster.kind == "slurm":
            self._allocation = Allocation(self._config)
            addresses = await self._allocation.start()
        self._heart = Heart(on_lost)
        self._heart.start()
        await self.add(addresses)
        if self._allocation:
            self._allocation.all_attached()

    async def add(self, addresses: Sequence[str]) -> list[int]:
        """Attach workers; their indices.

        Raises:
            UserError: names the worker that cannot be had, and why.
        """
        heart = self._heart
        if heart is None:
            raise UserError("cluster.kind=local: a run on this host only takes no others; see cluster.kind=attach")
        found = await _each(partial(_look, self._config), [parse(address, "cluster.hosts") for address in addresses])
        self._links += [link for link, _ in found]
        _use_transport([link.own_ip for link in self._links])
        await self._start_dashboard(f"tcp://{self._links[0].own_ip}:0")

        def start(looked: tuple[Link, Facts]) -> Host:
            link, seen = looked
            parent = link.start(seen.python)
            heart.add(link)  # at once: others may take longer than a worker waits for a heartbeat
            return parent

        parents = await _each(start, found)
        first = len(self.facts)
        self._parents += parents
        self.facts += [seen for _, seen in found]
        indices = list(range(first, len(self.facts)))
        for index in indices:
            self._meshes[index,] = self._mesh((index,))
        await asyncio.gather(*[answer(self._meshes[i,].initialized, self._links[i].who, ATTACH_S) for i in indices])
        await self._show(indices)
        return indices

    async def _start_dashboard(self, *transport: str) -> None:
        if self._config.cluster.dashboard and not self.dashboard.url:
            await self.dashboard.start(*transport)

    async def _show(self, indices: Sequence[int]) -> None:
        if self.dashboard.url:
            await self.dashboard.show([self._meshes[i,].with_python_executable(self._parents[i].python) for i in indices])

    def spawn(self, processes: Processes) -> ProcMesh:
        """Start processes where they were placed: a mesh of one dimension, whatever the hosts."""
        on = self._meshes.get(processes.hosts) or self._mesh(processes.hosts)
        self._meshes[processes.hosts] = on
        mesh = local.spawn(on, processes, self._environment, [self._parents[index] for index in processes.hosts])
        return mesh.flatten(processes.dim) if self._links else mesh

    def child(self, processes: Processes, rank: int, pid: int, tell: Callable[[str], object]) -> Child | Distant:
        """One of the processes that were spawned, to hear of its end. `tell`: see `Child`."""
        host = processes.hosts[rank // (processes.count // len(processes.hosts))]
        return Distant(self._links[host], pid, tell) if self._links else Child(pid, tell)

    def _mesh(self, hosts: tuple[int, ...]) -> HostMesh:
        from monarch.actor import attach_to_workers

        return attach_to_workers(ca="trust_all_connections", workers=[self._parents[index].monarch for index in hosts], name="hosts")

    async def close(self) -> None:
        """Let the hosts go; takes at most some `GONE_S` seconds."""
        await self.dashboard.close()
        if self._heart:
            await asyncio.to_thread(self._heart.stop)
        await _each(lambda link: link.close(GONE_S), self._links)
        self._links.clear()
        if self._allocation:
            await self._allocation.end()


async def look(config: Config) -> list[Facts]:
    """What the hosts of a run are, or for Slurm nodes will be; nothing is started. Raises UserError as `Hosts.open` does."""
    cluster = config.cluster
    if cluster.kind == "attach":
        found = await _each(partial(_look, config), [parse(address, "cluster.hosts") for address in cluster.hosts])
        for link, _ in found:
            link.close()
        return [seen for _, seen in found]
    return expected_nodes(config) if cluster.kind == "slurm" else [facts()]


def expected_nodes(config: Config) -> list[Facts]:
    """What a Slurm job will find, as far as it asks for it."""
    gpus = tuple(map(str, range(config.cluster.gpus_per_node)))
    return [Facts(f"node {i}", sys.maxsize, gpus, sys.executable, {}) for i in range(config.cluster.nodes)]


def _look(config: Config, address: Address) -> tuple[Link, Facts]:
    link = Link(address, config.cluster.attach_deadline_s)
    try:
        return link, link.ask(Path(config.output_dir), config.cluster.heartbeat_s)
    except BaseException:
        link.close()
        raise


async def _each(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Blocking work on all items at once; the first failure is raised when all are done."""
    results = await asyncio.gather(*[asyncio.to_thread(work, item) for item in items], return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def _use_transport(ips: Sequence[str]) -> None:
    """Have Monarch talk by TCP, on the way that leads to the workers. Must come before anything else of Monarch.

    Raises:
        UserError: the workers do not share a network, or this process talks otherwise already.
    """
    if len({ip.startswith("127.") for ip in ips}) > 1:
        raise UserError("cluster.hosts: 127.0.0.1 is this host only; name each by an address that all of them can reach")
    from monarch.actor import context, enable_transport

    try:
        enable_transport(f"tcp://{ips[0]}:0")
        with silent_stderr():
            context()  # starts Monarch, which says so
        local.end_quietly()
    except RuntimeError:
        raise UserError(
            f"cluster.kind: this process has used Monarch in another way already, and cannot change to tcp://{ips[0]}; "
            "start a new one (in a notebook: restart the kernel)"
        ) from None
