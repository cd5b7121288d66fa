"""Where a worker is reached: `tcp://HOST:PORT`."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from monarch_rl.cluster_config import address_parts
from monarch_rl.config import ConfigError

SIOCGIFADDR = 0x8915
"""ioctl: the IPv4 address of a network interface."""


@dataclass(frozen=True)
class Address:
    host: str
    """a name or an IPv4 address"""
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse(text: str, key: str) -> Address:
    """Raises ConfigError that names `key`."""
    parts = address_parts(text)
    if parts is None:
        raise ConfigError(f"{key}: must be tcp://HOST:PORT, got {text!r}")
    return Address(*parts)


def own_ip() -> str:
    """By which the other hosts of a Slurm step reach this one; elsewhere by which its name is known.

    Raises:
        ConfigError: the name leads to the loopback interface only.
    """
    if launcher := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return ip_toward(launcher)
    ip = socket.gethostbyname(socket.gethostname())
    if ip.startswith("127."):
        raise ConfigError(f"--address: {socket.gethostname()} is only known as {ip} here; say --address tcp://IP:0")
    return ip


def ip_toward(host: str) -> str:
    """This host's own IP on the route to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(ip: str) -> str:
    """Name of the network interface that has this address; empty when none has. Linux only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return ""
