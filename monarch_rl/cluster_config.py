"""The keys of `cluster.*`; a part of `config.py`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

ADDRESS = re.compile(r"tcp://(?P<host>[\w.-]+):(?P<port>\d{1,5})")
"""Of a worker."""
DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
"""As Slurm writes and takes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, …"""


@dataclass
class ClusterConfig:
    kind: Literal["local", "attach", "slurm"] = "local"
    """this host; workers started by hand (`monarch-rl worker`); a Slurm job, submitted unless started inside an allocation"""
    placement: dict[str, Any] = field(default_factory=dict)
    """hosts by role, counted from 0, e.g. cluster.placement.generator=[1,2]; by default generators and rollout workers avoid host 0"""
    cpu_threads: int = 1
    """threads of each process that computes on the CPU, at most; a host's cores are shared by its trainer ranks and generators"""
    hosts: list[str] = field(default_factory=list)
    """addresses of the workers for kind attach, e.g. [tcp://10.0.0.1:7000, tcp://10.0.0.2:7000]"""
    attach_deadline_s: float = 60.0
    """so long workers may take to answer"""
    heartbeat_s: float = 30.0
    """a worker that hears nothing from its controller for so long ends all that it has started"""
    dashboard: bool = False
    """show meshes, actors and messages in Monarch's own dashboard; its address is printed, on the controller's loopback interface"""
    nodes: int = 1
    """for kind slurm: nodes of the job"""
    gpus_per_node: int = 0
    """of the submitted job; 0 means none are asked for"""
    partition: str = ""
    """of the submitted job; empty: Slurm's default"""
    time_limit: str = ""
    """of the submitted job, as sbatch takes it, e.g. 4:00:00; empty: the partition's"""
    account: str = ""
    """of the submitted job"""
    qos: str = ""
    """of the submitted job"""
    warning_s: int = 120
    """so long before its time limit the submitted job is told to save and to queue again"""
    sbatch_args: list[str] = field(default_factory=list)
    """further arguments of sbatch, e.g. [--exclusive, --mem=0]"""


def mistake(cluster: ClusterConfig) -> str:
    """What is wrong between its values, in a line that begins with the key; empty when nothing is."""
    if cluster.kind == "attach" and not cluster.hosts:
        return "cluster.hosts: cluster.kind=attach needs at least one address, e.g. [tcp://10.0.0.1:7000]"
    if twice := [address for address, count in Counter(cluster.hosts).items() if count > 1]:
        return f"cluster.hosts: names {twice[0]} twice"
    if wrong := [address for address in cluster.hosts if address_parts(address) is None]:
        return f"cluster.hosts: must be tcp://HOST:PORT, got {wrong[0]!r}"
    if cluster.heartbeat_s < 5:
        return f"cluster.heartbeat_s: must be at least 5, for there is one beat a second, got {cluster.heartbeat_s:g}"
    if (limit_s := duration_s(cluster.time_limit)) is not None and limit_s <= cluster.warning_s:
        return f"cluster.time_limit: must be more than cluster.warning_s={cluster.warning_s} seconds, got {cluster.time_limit}"
    return ""


def address_parts(text: str) -> tuple[str, int] | None:
    """Host and port; None: it is no address."""
    found = ADDRESS.fullmatch(text)
    return (found["host"], int(found["port"])) if found and int(found["port"]) <= 65535 else None


def duration_s(text: str) -> int | None:
    """Seconds; None: it is no duration, such as UNLIMITED."""
    found = DURATION.fullmatch(text)
    if found is None:
        return None
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        return int(found["days"]) * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if found["third"] else first * 60 + second
