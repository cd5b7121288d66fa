"""A real Slurm on this machine, in a folder of its own: munged, slurmctld and two slurmd that are nodes n1 and n2.

`python -m tests.e2e.slurm_cluster FOLDER` starts one for a shell: it says what to export, and ends with Ctrl-C.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "srun", "munged"]
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
START_S = 60.0

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=120
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; installs Debian's packages where that is all that is needed."""
    if all(shutil.which(program, path=PATH) for program in PROGRAMS):
        return ""
    if os.geteuid() or not shutil.which("apt-get"):
        return f"no {', '.join(PACKAGES)} here, and no root or no apt-get to install them"
    quiet = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True, "check": True}
    subprocess.run(["apt-get", "update", "-q"], **quiet)  # type: ignore[call-overload]
    subprocess.run(["apt-get", "install", "-qy", "--no-install-recommends", *PACKAGES], **quiet)  # type: ignore[call-overload]
    return ""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find this cluster. Nothing of it is left afterwards."""
    configure(folder)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    munge = ["--socket", f"{folder}/munge.socket", "--key-file", f"{folder}/munge.key", "--pid-file", f"{folder}/munge.pid"]
    files = ["--log-file", f"{folder}/munge.log", "--seed-file", f"{folder}/munge.seed"]
    commands = [
        ["munged", "--foreground", "--force", *munge, *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.log").open("wb") as log:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
                if command[0] == "munged":
                    until((folder / "munge.socket").exists, folder)
        until(lambda: ask(environment, "sinfo", "-h", "-o", "%D%T") == "2idle", folder)
        yield environment
    finally:
        end(daemons)


def configure(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(128))
    ports = free_ports()
    text = CONFIGURATION.format(
        folder=folder, host=socket.gethostname(), user=getpass.getuser(), controller_port=ports[0], node_ports=f"{ports[1]}-{ports[1] + 1}"
    )
    (folder / "slurm.conf").write_text(text)


def free_ports() -> tuple[int, int]:
    """One port, and the first of two in a row."""
    for first in range(20000, 30000, 10):
        try:
            with socket.create_server(("", first)), socket.create_server(("", first + 1)), socket.create_server(("", first + 2)):
                return first, first + 1
        except OSError:
            continue
    raise AssertionError("no ports")


def ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def until(reached: object, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in folder.glob("*.log"))
        time.sleep(0.1)


def end(daemons: list[subprocess.Popen[bytes]]) -> None:
    """Steps that still run end with their slurmd's children."""
    running = [psutil.Process(daemon.pid) for daemon in daemons if daemon.poll() is None]
    below = [process for daemon in running for process in daemon.children(recursive=True)]
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in below:
        if process.is_running():
            process.kill()


if __name__ == "__main__":
    assert not (why := missing()), why
    with slurm(Path(sys.argv[1]).absolute()) as found:
        print(f"export SLURM_CONF={found['SLURM_CONF']} PATH=$PATH:/usr/sbin", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, ends := {signal.SIGINT, signal.SIGTERM})  # else SIGTERM would leave the daemons
        signal.sigwait(ends)
