"""The keys of `cluster.*`; a part of `config.py`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

ADDRESS = re.compile(r"tcp://(?P<host>[\w.-]+):(?P<port>\d{1,5})")
"""Of a worker."""


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
    if wrong := [address for address in cluster.hosts if not ADDRESS.fullmatch(address)]:
        return f"cluster.hosts: must be tcp://HOST:PORT, got {wrong[0]!r}"
    if cluster.heartbeat_s < 5:
        return f"cluster.heartbeat_s: must be at least 5, for there is one beat a second, got {cluster.heartbeat_s:g}"
    return ""
