"""Placement, addresses, what must agree between hosts, and the script of a Slurm job."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.cluster.address import Address, interface_of, ip_toward, parse
from monarch_rl.cluster.link import Distant, Heart, Link
from monarch_rl.cluster.machine import Facts, differences, versions, visible_gpus
from monarch_rl.cluster.placement import Processes, place, place_generator
from monarch_rl.cluster.worker import Worker, _until_over
from monarch_rl.cluster_config import duration_s
from monarch_rl.config import Config, ConfigError
from monarch_rl.configure import load
from monarch_rl.submit import Job, batch_script

ROOT = Path(__file__).parents[2]


def config(*keys: str, profile: str = "cpu") -> Config:
    return load(["recipe=grpo_qwen", f"profile={profile}", *keys]).config


def hosts(count: int, *gpus: str, cores: int = 8) -> list[Facts]:
    return [Facts(f"h{i}", cores, gpus, sys.executable, {}) for i in range(count)]


def attach(count: int) -> list[str]:
    return ["cluster.kind=attach", f"cluster.hosts=[{','.join(f'tcp://h{i}:1' for i in range(count))}]"]


def where(placed: list[Processes]) -> dict[str, tuple[int, ...]]:
    return {processes.name: processes.hosts for processes in placed}


def refusal(*keys: str) -> str:
    made = config(*keys)
    with pytest.raises(ConfigError) as caught:
        place(made, hosts(max(1, len(made.cluster.hosts))))
    return str(caught.value)


# Placement


def test_one_host_has_everything() -> None:
    assert set(where(place(config("generator.replicas=2"), hosts(1))).values()) == {(0,)}


def test_generators_and_rollout_workers_avoid_the_trainers_where_there_are_other_hosts() -> None:
    placed = place(config("generator.replicas=3", "rollout.workers=3", *attach(3)), hosts(3))
    assert where(placed) == {
        "trainer": (0,),
        "generator_0": (1,),
        "generator_1": (2,),
        "generator_2": (1,),
        "replay_buffer": (0,),
        "rollout_0": (1,),
        "rollout_1": (2,),
        "rollout_2": (1,),
        "scorer_0": (0,),
    }


def test_a_placement_is_taken_as_it_is() -> None:
    asked = ["cluster.placement.trainer=[0,1]", "cluster.placement.generator=[0]", "trainer.ranks=2"]
    placed = where(place(config(*asked, *attach(2)), hosts(2)))
    assert (placed["trainer"], placed["generator_0"], placed["rollout_0"]) == ((0, 1), (0,), (1,))


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ("trainers=[0]", "cluster.placement.trainers: no such role; there are trainer, generator, replay_buffer, rollout, scorer"),
        ("trainer=[2]", "cluster.placement.trainer: no host 2; there are 2 hosts, counted from 0"),
        ("trainer=0", "cluster.placement.trainer: must be a list of host indices, e.g. [0], got 0"),
        ("trainer=[]", "cluster.placement.trainer: must be a list of host indices, e.g. [0], got []"),
        ("scorer=[1,1]", "cluster.placement.scorer: names a host twice: [1, 1]"),
        ("trainer=[0,1]", "cluster.placement.trainer: 1 process cannot be shared evenly by hosts [0, 1]"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placement: str, said: str) -> None:
    assert refusal(f"cluster.placement.{placement}", *attach(2)) == said


def test_gpus_are_counted_per_host() -> None:
    made = config("trainer.ranks=2", "generator.replicas=3", *attach(2), profile="cuda")
    gpus = {processes.name: processes.gpus for processes in place(made, hosts(2, "0", "1"))}
    assert gpus["trainer"] == ("0", "1")
    assert [gpus[f"generator_{i}"] for i in range(3)] == [("0",), ("1",), ("0",)]
    assert gpus["rollout_0"] == ()


def test_on_one_host_trainers_get_the_first_gpus_and_generators_the_next_round_and_round() -> None:
    made = config("trainer.ranks=2", "generator.replicas=3", profile="cuda")
    gpus = [gpu for processes in place(made, hosts(1, "4", "5", "6")) for gpu in processes.gpus]
    assert gpus == ["4", "5", "6", "4", "5"]


def test_ranks_on_several_hosts_are_equipped_in_the_order_of_ranks() -> None:
    made = config("trainer.ranks=4", "cluster.placement.trainer=[1,0]", *attach(2), profile="cuda")
    trainer = place(made, [Facts("a", 8, ("0", "1"), "", {}), Facts("b", 8, ("6", "7"), "", {})])[0]
    assert (trainer.hosts, trainer.gpus) == ((1, 0), ("6", "7", "0", "1"))


def test_ranks_of_a_generator_are_together_each_with_a_gpu_of_its_own() -> None:
    made = config("generator.replicas=2", "generator.tensor_parallel=2", profile="cuda")
    placed = place(made, hosts(1, "0", "1", "2"))
    generators = [processes for processes in placed if processes.name.startswith("generator_")]
    assert [(processes.count, processes.gpus, processes.one_engine) for processes in generators] == [
        (2, ("1", "2"), True),
        (2, ("0", "1"), True),
    ]
    with pytest.raises(ConfigError, match=r"^generator\.tensor_parallel=2: host 0 has 1 GPU, and each rank needs its own$"):
        place(made, hosts(1, "0"))
    assert place(made, hosts(1))[1].gpus == ()


def test_threads_fit_the_cores() -> None:
    made = config("cluster.cpu_threads=8", "trainer.ranks=2", "generator.replicas=2")
    assert {processes.threads for processes in place(made, hosts(1, cores=8)) if processes.name.startswith(("tr", "gen"))} == {2}
    assert place(made, hosts(1, cores=2))[0].threads == 1
    assert place(config("cluster.cpu_threads=8", "generator.tensor_parallel=3"), hosts(1, cores=8))[1].threads == 2
    assert place(config("cluster.cpu_threads=8", *attach(2)), hosts(2, cores=6))[0].threads == 6


def test_a_late_generator_goes_where_there_are_the_fewest_also_to_a_host_that_joined() -> None:
    made = config("generator.replicas=2", "cluster.placement.generator=[1]", *attach(2))
    placed = place(made, hosts(2))
    assert place_generator(2, made, hosts(2), placed).hosts == (1,)
    assert place_generator(2, made, hosts(3), placed).hosts == (2,)


def test_a_placement_reads_as_a_line() -> None:
    assert [str(processes) for processes in place(config("trainer.ranks=2", *attach(2)), hosts(2))][:2] == [
        "trainer: 2 processes on host 0, CPU, 1 thread each",
        "generator_0: 1 process on host 1, CPU, 1 thread each",
    ]
    assert str(Processes("trainer", "rank", 2, (0, 1), ("3", "4"))) == "trainer: 2 processes on hosts 0, 1, GPU 3, 4"


# Keys


def test_hosts_are_asked_for_and_named_once() -> None:
    with pytest.raises(ConfigError, match=r"cluster.hosts: cluster.kind=attach needs at least one address"):
        config("cluster.kind=attach")
    with pytest.raises(ConfigError, match=r"cluster.hosts: names tcp://h:1 twice"):
        config("cluster.kind=attach", "cluster.hosts=[tcp://h:1,tcp://h:1]")


def test_a_heartbeat_leaves_time_for_some_beats() -> None:
    with pytest.raises(ConfigError, match=r"cluster.heartbeat_s: must be at least 5, .* got 1$"):
        config("cluster.heartbeat_s=1")


def test_an_address_is_checked_with_the_other_keys() -> None:
    with pytest.raises(ConfigError, match=r"cluster.hosts: must be tcp://HOST:PORT, got 'h:1'"):
        config("cluster.kind=attach", "cluster.hosts=[h:1]")


def test_a_port_is_checked_with_the_other_keys() -> None:
    with pytest.raises(ConfigError, match=r"cluster.hosts: must be tcp://HOST:PORT, got 'tcp://h:70000'"):
        config("cluster.kind=attach", "cluster.hosts=[tcp://h:70000]")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 180), ("2:30", 150), ("1:00:05", 3605), ("2-0", 172800), ("1-02:03", 93780), ("1-0:0:1", 86401), ("INFINITE", None), ("", None)],
)
def test_durations_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds


def test_a_time_limit_leaves_time_before_the_warning() -> None:
    with pytest.raises(ConfigError, match=r"cluster.time_limit: must be more than cluster.warning_s=120 seconds, got 2"):
        config("cluster.kind=slurm", "cluster.time_limit=2")
    assert config("cluster.kind=slurm", "cluster.time_limit=2:01").cluster.time_limit == "2:01"


@pytest.mark.parametrize("text", ["h:1", "tcp://h", "tcp://:1", "tcp://h:x", "tcp://h:70000", "ipc://x:1", "tcp://h:1/"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cluster.hosts: must be tcp://HOST:PORT, got {text!r}")):
        parse(text, "cluster.hosts")


def test_an_address_reads_back() -> None:
    assert parse("tcp://node-1.x.org:7000", "") == Address("node-1.x.org", 7000)
    assert str(parse("tcp://10.0.0.1:0", "")) == "tcp://10.0.0.1:0"


# Machines


def test_the_way_to_this_host_is_its_loopback_interface() -> None:
    assert ip_toward("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""


@pytest.mark.parametrize(("variable", "gpus"), [("", ()), ("2,0", ("2", "0")), ("-1", ()), ("GPU-ab, GPU-cd", ("GPU-ab", "GPU-cd"))])
def test_visible_gpus_are_what_the_variable_names(variable: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == gpus


def test_differences_are_said_in_words() -> None:
    here = versions()
    assert differences(here, here) == ""
    assert {"Python", "torch", "torchmonarch", "source of monarch_rl"} <= here.keys()
    there = {name: version for name, version in here.items() if name != "transformers"} | {"Python": "3.99"}
    assert differences(here, there) == (
        f"Python is 3.99 there and {here['Python']} here, transformers is not installed there and {here['transformers']} here"
    )


@pytest.mark.parametrize("unread", [b"", b"a heartbeat"])
def test_a_worker_that_is_gone_is_told_of_in_one_way(unread: bytes) -> None:
    """Also where it had not read all, so that the connection is reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(Address("127.0.0.1", server.getsockname()[1]), 10)
        there, _ = server.accept()
        link._socket.sendall(unread)
        there.close()
        assert link.hear() == "it closed the connection"
        link.close()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


async def test_a_worker_tells_of_the_end_of_what_it_watches_until_its_controller_goes() -> None:
    """Of two that end at once, too, and of one that the controller has it kill."""
    over: asyncio.Queue[str] = asyncio.Queue()

    async def lend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host: Any = SimpleNamespace(ended=lambda: None)
        over.put_nowait(await _until_over(host, reader, writer, heartbeat_s=30))
        writer.close()

    server = await asyncio.start_server(lend, "127.0.0.1", 0)
    link = await asyncio.to_thread(Link, Address("127.0.0.1", server.sockets[0].getsockname()[1]), 10.0)
    heart = Heart(pytest.fail)
    heart.add(link)
    heart.start()
    sleepers = [sleeper() for _ in range(3)]
    ended: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    tell = [partial(lambda pid, how: ended.put_nowait((pid, how)), one.pid) for one in sleepers]
    distant = [Distant(link, one.pid, told) for one, told in zip(sleepers, tell, strict=True)]
    for one in sleepers[:2]:
        one.terminate()
    distant[2].kill()
    heard = dict([await asyncio.wait_for(ended.get(), 60) for _ in sleepers])
    by_signal = [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert heard == {
        one.pid: f"was killed by signal {number.value} ({number.name})" for one, number in zip(sleepers, by_signal, strict=True)
    }
    assert all(each.ended for each in distant)
    assert [one.wait() for one in sleepers] == [-number for number in by_signal]
    await asyncio.to_thread(heart.stop)
    link.close()
    assert await asyncio.wait_for(over.get(), 60) == "it is gone"
    server.close()


def test_a_worker_ends_everything_below_it_also_what_has_lost_its_parent() -> None:
    """In a process of its own, which starts a shell that starts a sleeper in another session and ends."""
    code = f"""
import ctypes, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from monarch_rl.cluster.host_process import end_children
ctypes.CDLL(None).prctl(36, 1)
subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $!"])
sys.stdout.flush()
end_children()
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


# Slurm


def test_the_script_asks_for_what_the_keys_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ["cluster.kind=slurm", "cluster.nodes=2", "cluster.partition=gpu", "cluster.time_limit=1:00:00", "cluster.gpus_per_node=4"]
    more = ["cluster.account=me", "cluster.sbatch_args=[--mem=0]", "generator.replicas=3", "cluster.cpu_threads=2", "output_dir=my run"]
    script = batch_script(config(*keys, *more), Path("/x/console.log"), ["recipe=grpo_qwen", "output_dir=my run"])
    options = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    expected = ["nodes=2", "ntasks-per-node=1", "cpus-per-task=6", "gpus-per-node=4", "partition=gpu", "time=1:00:00", "account=me"]
    last = ["output=/x/console.log", "open-mode=append", "signal=B:USR1@120", "requeue", "mem=0"]
    assert options == [f"--{option}" for option in ["job-name=grpo_qwen", *expected, *last]]
    assert script.endswith("-m monarch_rl.run recipe=grpo_qwen 'output_dir=my run' ${SLURM_RESTART_COUNT:+resume=latest}\n")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for Slurm's program shows of every job; below it, what it was asked."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> "${0%/*}/asked"\ncat "${0%/*}/shown"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path / "shown"


@pytest.mark.parametrize(("limit", "died"), [("00:03:00", True), ("UNLIMITED", False), ("04:00:00", False)])
def test_an_early_warning_ends_only_a_job_that_could_never_train(limit: str, died: bool, scontrol: Path) -> None:
    scontrol.write_text(f"JobId=7 JobState=RUNNING Reason=None RunTime=00:00:20 TimeLimit={limit} ExitCode=0:0\n")
    code = "from monarch_rl.cluster.slurm import warned_early; warned_early(120)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (-15 if died else 0)
    assert ("cluster.time_limit: Slurm warns job 7" in done.stderr) == died
    assert ("requeue 7" in (scontrol.parent / "asked").read_text()) == (not died)


def test_what_a_job_waits_for_is_said_once(scontrol: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("7", scontrol.parent / "console.log")
    for state, reason in [("PENDING", "None"), ("PENDING", "Resources"), ("PENDING", "Resources"), ("RUNNING", "None")]:
        scontrol.write_text(f"JobId=7 JobState={state} Reason={reason} Dependency=(null) ExitCode=0:0\n")
        assert job._state() == (state, 0)
    assert capsys.readouterr().out == "Slurm job 7 waits: Resources (they are in use)\n"


def test_the_script_adds_resume_when_slurm_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    script = batch_script(config("cluster.kind=slurm"), Path("console.log"), ["recipe=grpo_qwen"])
    said = [
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | count).stdout.strip()
        for count in ({}, {"SLURM_RESTART_COUNT": "1"})
    ]
    assert said == ["-m monarch_rl.run recipe=grpo_qwen", "-m monarch_rl.run recipe=grpo_qwen resume=latest"]


async def test_a_worker_of_a_slurm_job_that_is_cancelled_is_let_go_by_its_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, and while nobody is served, it ends at once."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    for owner, step, ends in (("process 1 on n1", "0", False), ("", "0", True), ("process 1 on n1", "", True)):
        if step:
            monkeypatch.setenv("SLURM_STEP_ID", step)
        else:
            monkeypatch.delenv("SLURM_STEP_ID")
        worker = Worker(stay=False)
        worker._owner, worker._over = owner, asyncio.get_running_loop().create_future()
        worker._terminate()
        assert worker._over.done() == ends
        assert not ends or worker._over.result() == 143
