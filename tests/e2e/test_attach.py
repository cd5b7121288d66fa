"""Workers that were started by hand: a run learns across them, and however it or they end, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from monarch_rl.cluster.local import ROLE
from tests.e2e.jobs import LOGS, ROOT, SMALL, finished, lives, started, within

pytestmark = pytest.mark.timeout(400)

LONG = [*SMALL, "steps=2000", "trainer.lr=1e-6", "eval.every=0", "eval.prompts=0"]
SPREAD = ["trainer.ranks=2", "rollout.workers=2", "cluster.placement.trainer=[0,1]", "cluster.placement.rollout=[0,1]"]
GONE_S = 15.0


class Worker:
    """`python -m monarch_rl.run worker --address tcp://127.0.0.1:0`, started; it says where it listens."""

    def __init__(self, folder: Path, name: str, *, pythonpath: str = "", options: tuple[str, ...] = ()) -> None:
        self.log = folder / f"{name}.log"
        LOGS.append(self.log)
        command = [sys.executable, "-m", "monarch_rl.run", "worker", "--address", "tcp://127.0.0.1:0", *options]
        path = os.pathsep.join(filter(None, [pythonpath, str(ROOT)]))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd="/", env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.address = self._address()

    def _address(self) -> str:
        assert within(60, lambda: "tcp://" in self.log.read_text() or self.process.poll() is not None)
        return next(word for word in self.log.read_text().split() if word.startswith("tcp://"))

    def wait(self) -> int:
        """For its end, which is near; the exit code."""
        assert within(GONE_S, lambda: self.process.poll() is not None), "the worker does not end"
        return int(self.process.returncode)

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def roles(self) -> set[str]:
        return {process.environ().get(ROLE, "") for process in self.below()} - {""}


@contextmanager
def workers(folder: Path, count: int = 2) -> Iterator[list[Worker]]:
    running = [Worker(folder, f"worker_{i}") for i in range(count)]
    try:
        yield running
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.wait()


def attach(*running: Worker) -> list[str]:
    return ["cluster.kind=attach", f"cluster.hosts=[{','.join(worker.address for worker in running)}]"]


def gone(processes: list[psutil.Process]) -> bool:
    return within(GONE_S, lambda: not any(map(lives, processes)))


def test_it_learns_with_trainers_on_one_host_and_generators_on_the_other_until_ctrl_c(tmp_path: Path) -> None:
    """With a task in a file that is named from the controller's working folder. Of the death of a process a worker tells at once, when
    Monarch would ask half a minute later. Nothing is left on the hosts."""
    (tmp_path / "mine.py").write_text("from monarch_rl.tasks.arithmetic import Arithmetic as Sums\n")
    with workers(tmp_path) as (first, second):
        with started(tmp_path, *SMALL, "steps=2000", "task=mine.py:Sums", *attach(first, second)) as job:
            job.until_steps(1)
            below = first.below() + second.below()
            assert first.roles() == {"trainer 0", "replay_buffer 0", "scorer_0 0"}
            assert second.roles() == {"generator_0 0", "rollout_0 0"}
            next(process for process in second.below() if process.environ().get(ROLE) == "generator_0 0").kill()
            assert within(5, lambda: "generator 0 was killed by signal 9 (SIGKILL); generator 1 takes its place\n" in job.out)
            job.until_row(20)
            below += second.below()
            job.signal(signal.SIGINT)
            assert job.wait() == 130
        assert [first.wait(), second.wait()] == [0, 0]
        assert gone(below)
    rewards = [row["reward/mean"] for row in job.rows[1:21]]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


def test_when_the_controller_is_killed_nothing_is_left_on_the_hosts(tmp_path: Path) -> None:
    """Also where trainer ranks and rollout workers are shared by the hosts, and each rank holds half of the model."""
    with workers(tmp_path) as (first, second), started(tmp_path, *LONG, *SPREAD, *attach(first, second)) as job:
        job.until_steps(1)
        assert first.roles() == {"trainer 0", "replay_buffer 0", "scorer_0 0", "rollout_0 0"}
        assert second.roles() == {"trainer 1", "generator_0 0", "rollout_1 0"}
        below = first.below() + second.below()
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert [first.wait(), second.wait()] == [1, 1]
        assert gone(below)


def test_a_worker_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with workers(tmp_path) as (first, second), started(tmp_path, *LONG, *attach(first, second)) as job:
        job.until_steps(1)
        below = first.below() + second.below()
        second.process.kill()
        assert job.wait(60) == 1
        named = f"worker {second.address} on {socket.gethostname()} was lost: it closed the connection"
        assert job.err == f"error: {named} (whole story in {job.output_dir / 'error.log'})\n"
        assert first.wait() == 0
        assert gone(below)


@pytest.mark.slow
def test_a_worker_that_is_terminated_ends_what_it_started(tmp_path: Path) -> None:
    with workers(tmp_path) as (first, second), started(tmp_path, *LONG, *SPREAD, *attach(first, second)) as job:
        job.until_steps(1)
        below = second.below()
        second.process.terminate()
        assert second.wait() == 128 + signal.SIGTERM
        assert gone(below)
        assert job.wait(60) == 1
        assert first.wait() == 0


def test_a_host_that_joins_takes_generators_and_gives_them_back(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as running:
        command = [sys.executable, "-m", "tests.e2e.joining_host", str(tmp_path / "run"), *[worker.address for worker in running]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [worker.wait() for worker in running] == [0, 0, 0]


def test_a_second_transport_in_one_process_is_one_line() -> None:
    code = "from monarch_rl.cluster import hosts, local; local.host(); hosts._use_transport(['127.0.0.1'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("monarch_rl.config.UserError: cluster.kind: this process has used Monarch in another way already"), done.stderr


def refused(folder: Path, *arguments: str) -> str:
    """What a run says that cannot begin."""
    job = finished(folder, *SMALL, *arguments)
    assert job.process.returncode == 2, job.out + job.err
    return job.err


def test_what_cannot_be_attached_is_named_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = refused(tmp_path, "cluster.kind=attach", f"cluster.hosts=[tcp://127.0.0.1:{port}]", "cluster.attach_deadline_s=1")
    assert nobody.startswith(f"error: cluster.hosts: no worker at tcp://127.0.0.1:{port} within 1 s: Connection refused")
    unknown = refused(tmp_path, "cluster.kind=attach", "cluster.hosts=[tcp://no.such.host.invalid:7000]")
    assert unknown.startswith("error: cluster.hosts: tcp://no.such.host.invalid:7000: ")
    assert len((nobody + unknown).splitlines()) == 2


def test_a_worker_with_other_software_is_refused_and_stays(tmp_path: Path) -> None:
    other = tmp_path / "other" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    worker = Worker(tmp_path, "other_torch", pythonpath=str(other.parent))
    try:
        said = refused(tmp_path, *attach(worker))
        name = f"worker {worker.address} on {socket.gethostname()}"
        assert said.startswith(f"error: {name}: torch is 1.0 there and ")
        assert len(said.splitlines()) == 1
        assert worker.process.poll() is None
    finally:
        worker.process.kill()
        worker.process.wait()


def test_folders_that_are_not_shared_are_named(tmp_path: Path) -> None:
    """What a worker says of a controller whose folders are not on its host: this test speaks for the controller."""
    elsewhere = {"from": "me", "cwd": "/not/here", "probe": "/", "heartbeat_s": 1}
    unseen = elsewhere | {"cwd": "/", "probe": f"{tmp_path}/out/.seen"}
    with workers(tmp_path, 1) as (worker,):
        host, _, port = worker.address.removeprefix("tcp://").partition(":")
        said = []
        for hello in (elsewhere, unseen):
            with socket.create_connection((host, int(port)), 30) as talk:
                talk.sendall(json.dumps(hello).encode() + b"\n")
                said.append(json.loads(talk.makefile().readline())["problem"])
    assert said == [
        "the working folder /not/here is not there; hosts must share it",
        f"output_dir {tmp_path}/out is not the same folder there; hosts must share it",
    ]


def test_an_address_that_is_taken_is_named_in_one_line(tmp_path: Path) -> None:
    with workers(tmp_path, 1) as (worker,):
        command = [sys.executable, "-m", "monarch_rl.run", "worker", "--address", worker.address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (2, f"error: --address {worker.address}: Address already in use\n")
