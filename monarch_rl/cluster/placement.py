"""Which process runs on which host, with which GPUs and how many threads: a function of the configuration and the hosts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from monarch_rl.cluster.machine import Facts
from monarch_rl.config import Config, ConfigError

ROLES = ("trainer", "generator", "replay_buffer", "rollout", "scorer")
"""What `cluster.placement` may name; the metrics actor lives in the process of the replay buffer."""


@dataclass(frozen=True, slots=True)
class Processes:
    """One process mesh to be spawned."""

    name: str
    dim: str
    """of the mesh"""
    count: int
    hosts: tuple[int, ...] = (0,)
    """each takes an equal share of the processes, in the order of ranks"""
    gpus: tuple[str, ...] = ()
    """GPU of each process; empty: none"""
    threads: int = 1
    """of each process, for computing on the CPU"""

    def __str__(self) -> str:
        where = f"host{'s' * (len(self.hosts) > 1)} {', '.join(map(str, self.hosts))}"
        device = f"GPU {', '.join(self.gpus)}" if self.gpus else f"CPU, {self.threads} thread{'s' * (self.threads > 1)} each"
        return f"{self.name}: {self.count} process{'es' * (self.count > 1)} on {where}, {device}"


def place(config: Config, hosts: Sequence[Facts]) -> list[Processes]:
    """The processes of a run on these hosts.

    Trainer ranks get the first GPUs of their host, generators the next, round and round where there are too few.

    Raises:
        ConfigError: `cluster.placement` asks for what is not there.
    """
    trainer, buffer = place_single(config, hosts)
    placed = [trainer]
    if config.replay:
        return [trainer, buffer]
    for replica in range(config.generator.replicas):
        placed.append(place_generator(replica, config, hosts, placed))
    placed.append(buffer)
    for role, count in (("rollout", config.rollout.workers), ("scorer", config.scorer.workers)):
        for number in range(count):
            placed.append(place_worker(role, number, config, hosts, placed))
    return placed


def place_single(config: Config, hosts: Sequence[Facts]) -> tuple[Processes, Processes]:
    """Trainer and replay buffer, of which there is one mesh each. Raises ConfigError as `place` does."""
    where = hosts_by_role(config, len(hosts))
    trainer = _equipped(Processes("trainer", "rank", config.trainer.ranks, where["trainer"]), config, hosts, [])
    return trainer, Processes("replay_buffer", "proc", 1, where["replay_buffer"])


def place_generator(replica: int, config: Config, hosts: Sequence[Facts], placed: Iterable[Processes]) -> Processes:
    """One more generator: on the host of generators that has the fewest, on the GPU there that has the fewest processes.

    Hosts that joined later take generators whatever `cluster.placement` says.
    """
    placed = list(placed)
    start = host_count(config)
    host = _emptiest("generator", (*hosts_by_role(config, start)["generator"], *range(start, len(hosts))), placed)
    return _equipped(Processes(f"generator_{replica}", "tp", 1, (host,)), config, hosts, placed)


def place_worker(role: str, number: int, config: Config, hosts: Sequence[Facts], placed: Iterable[Processes]) -> Processes:
    """One more rollout worker or scorer: on the host of its role that has the fewest."""
    return Processes(f"{role}_{number}", "worker", 1, (_emptiest(role, hosts_by_role(config, host_count(config))[role], placed),))


def _emptiest(role: str, allowed: Sequence[int], placed: Iterable[Processes]) -> int:
    """The host that has the fewest of a role."""
    load = Counter(host for processes in placed if processes.name.startswith(f"{role}_") for host in processes.hosts)
    return min(allowed, key=lambda host: (load[host], host))


def host_count(config: Config) -> int:
    """Hosts that a run starts with."""
    cluster = config.cluster
    return {"local": 1, "attach": len(cluster.hosts), "slurm": cluster.nodes}[cluster.kind]


def hosts_by_role(config: Config, count: int) -> dict[str, tuple[int, ...]]:
    """`cluster.placement` over the default: generators and rollout workers away from the trainers where there are other hosts.

    Raises:
        ConfigError: names the role and what is wrong with its hosts.
    """
    others = tuple(range(1, count)) or (0,)
    asked = {str(role): _host_list(str(role), value, count) for role, value in config.cluster.placement.items()}
    default = {"trainer": (0,), "generator": others, "replay_buffer": (0,), "rollout": others, "scorer": (0,)}
    where = default | asked
    for role, size in {"trainer": config.trainer.ranks, "replay_buffer": 1}.items():
        if size % len(where[role]):
            raise ConfigError(
                f"cluster.placement.{role}: {size} process{'es' * (size > 1)} cannot be shared evenly by hosts {list(where[role])}"
            )
    return where


def _host_list(role: str, value: object, count: int) -> tuple[int, ...]:
    name = f"cluster.placement.{role}"
    if role not in ROLES:
        raise ConfigError(f"{name}: no such role; there are {', '.join(ROLES)}")
    if not isinstance(value, list) or not value or not all(isinstance(host, int) and not isinstance(host, bool) for host in value):
        raise ConfigError(f"{name}: must be a list of host indices, e.g. [0], got {value!r}")
    if wrong := [host for host in value if not 0 <= host < count]:
        raise ConfigError(f"{name}: no host {wrong[0]}; there {'is 1 host' if count == 1 else f'are {count} hosts'}, counted from 0")
    if len(set(value)) < len(value):
        raise ConfigError(f"{name}: names a host twice: {value}")
    return tuple(value)


def _equipped(processes: Processes, config: Config, hosts: Sequence[Facts], placed: Sequence[Processes]) -> Processes:
    """With a GPU for each process, the one of its host that the fewest have; else with threads that fit the cores."""
    if config.profile != "cuda" or not all(hosts[host].gpus for host in processes.hosts):
        return replace(processes, threads=min(_threads(config, hosts, host) for host in processes.hosts))
    used = Counter((host, gpu) for other in placed for host, gpu in zip(_ranks(other), other.gpus, strict=False))
    gpus = []
    for host in _ranks(processes):
        gpu = min((used[host, name], at, name) for at, name in enumerate(hosts[host].gpus))[2]
        used[host, gpu] += 1
        gpus.append(gpu)
    return replace(processes, gpus=tuple(gpus))


def _threads(config: Config, hosts: Sequence[Facts], host: int) -> int:
    """At most `cluster.cpu_threads`, and an equal share of the host's cores for each trainer rank and generator on it."""
    where = hosts_by_role(config, host_count(config))
    sizes = {"trainer": config.trainer.ranks, "generator": config.generator.replicas}
    computing = sum(math.ceil(size / len(where[role])) for role, size in sizes.items() if host in where[role])
    return min(config.cluster.cpu_threads, max(1, hosts[host].cores // max(1, computing)))


def _ranks(processes: Processes) -> list[int]:
    """Host of each process."""
    return [host for host in processes.hosts for _ in range(processes.count // len(processes.hosts))]
