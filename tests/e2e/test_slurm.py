"""A real Slurm of two nodes on this machine: jobs are submitted, run across nodes, are cancelled and refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from monarch_rl.checkpoint import read_progress
from monarch_rl.cluster.local import ROLE
from tests.e2e.dataset_task import hold
from tests.e2e.jobs import LOGS, ROOT, SMALL, Job, finished, started, within
from tests.e2e.slurm_cluster import ask, missing, slurm

pytestmark = pytest.mark.timeout(500)

FEW = f"task={Path(__file__).parent / 'dataset_task.py'}:Few"
ON_TWO = ["cluster.kind=slurm", "cluster.nodes=2"]
GONE_S = 60.0
"""Slurm looks after nodes every few seconds."""


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    LOGS.append(folder / "slurmctld.log")
    with slurm(folder) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def slurm_id(job: Job) -> str:
    job.until_said("submitted Slurm job")
    found = re.search(r"submitted Slurm job (\d+)", job.out)
    assert found
    return found[1]


def processes_of(slurm_job: str) -> list[dict[str, str]]:
    """The environment of everything that runs in a Slurm job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get("SLURM_JOB_ID") == slurm_job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(environment)
    return found


def until_free(slurm_job: str) -> None:
    """No process of the job is left, and its nodes are given back."""

    def free() -> bool:
        return not processes_of(slurm_job) and not ask(dict(os.environ), "squeue", "-h", "-j", slurm_job)

    assert within(GONE_S, free), processes_of(slurm_job)


def test_two_jobs_share_the_nodes_and_one_is_cancelled(tmp_path: Path) -> None:
    """The one ends by itself, with trainers on n1 and generators on n2; Ctrl-C ends the other in the middle: it is saved, and nothing is
    left."""
    long = [*SMALL, *ON_TWO, "steps=2000", "trainer.lr=1e-6", "eval.every=0", "eval.prompts=0"]
    with started(tmp_path, *SMALL, *ON_TWO, "steps=10", name="one") as one:
        with started(tmp_path, *long, name="other") as other:
            other.until_steps(1)
            node = {found[ROLE]: found["SLURMD_NODENAME"] for found in processes_of(slurm_id(other)) if ROLE in found}
            assert node == {"trainer 0": "n1", "replay_buffer 0": "n1", "scorer_0 0": "n1", "generator_0 0": "n2", "rollout_0 0": "n2"}
            other.signal(signal.SIGINT)
            assert other.wait() == 130, other.err
            until_free(slurm_id(other))
            assert other.err == f"error: interrupted; Slurm job {slurm_id(other)} is gone\n"
            assert re.search(r"^error: interrupted after step \d+: resume=latest goes on from .*step_\d+$", other.out, re.M), other.out
        assert one.wait() == 0, one.out + one.err
        until_free(slurm_id(one))
    assert [row["step"] for row in one.rows] == list(range(11))
    assert "done: model in" in one.out


def test_a_job_that_is_warned_saves_queues_again_and_goes_on(tmp_path: Path) -> None:
    """It cannot come further than step 5 before it is warned."""
    hold(gate := tmp_path / "gate", 5 * 8)
    few = [FEW, f"task_args.gate={gate}", "buffer.dead_groups=keep", "scorer.deadline_s=300"]
    with started(tmp_path, *SMALL, *few, "cluster.kind=slurm", "steps=8", "eval.every=0") as job:
        job.until_steps(3)
        ask(dict(os.environ), "scancel", "--signal=USR1", "--batch", slurm_id(job))
        job.until_said("stopped after step")
        hold(gate, 8 * 8)
        assert job.wait() == 0
        until_free(slurm_id(job))
    halted = re.search(r"stopped after step (\d+): resume=latest goes on", job.out)
    assert halted, job.out
    assert 3 <= int(halted[1]) <= 5
    assert [row["step"] for row in job.rows] == list(range(9))
    assert len(re.findall(r"^step +1/8", job.out, re.MULTILINE)) == 1, "it began anew"


@pytest.mark.timeout(400)
def test_a_job_that_is_cancelled_saves_first(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to the controller, the workers and what they have started, all at once."""
    with started(tmp_path, *SMALL, "cluster.kind=slurm", "steps=2000", "trainer.lr=1e-6", "eval.every=0", "close_deadline_s=100") as job:
        job.until_steps(1)
        ask(dict(os.environ), "scancel", slurm_id(job))
        assert job.wait() == 1, job.out
        until_free(slurm_id(job))
    assert job.err == f"error: Slurm job {slurm_id(job)} was cancelled\n"
    saved = re.search(r"^error: interrupted after step (\d+): resume=latest goes on from (.*step_\d+)$", job.out, re.MULTILINE)
    assert saved, job.out
    assert read_progress(Path(saved[2])).step == int(saved[1]) == job.rows[-1]["step"]


def test_a_failure_inside_the_job_is_streamed_and_gives_its_exit_code(tmp_path: Path) -> None:
    job = finished(tmp_path, *SMALL, "cluster.kind=slurm", "model.path=/nowhere")
    assert job.process.returncode == 2, job.err
    assert "error: model.path=/nowhere: there is no such directory" in job.out


def test_slurm_refuses_in_its_own_words(tmp_path: Path) -> None:
    job = finished(tmp_path, *SMALL, "cluster.kind=slurm", "cluster.partition=nope")
    assert job.process.returncode == 2
    assert job.err.startswith("error: cluster.kind=slurm: sbatch refused the job: invalid partition specified: nope")
    assert len(job.err.splitlines()) == 1


def test_an_allocation_that_is_too_small_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monarch_rl.run", *SMALL, "cluster.kind=slurm", "cluster.nodes=3", f"output_dir={tmp_path / 'out'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["salloc", "--quiet", "-N2", *command], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert done.stderr == "error: cluster.nodes=3: this allocation has 2\n"


def test_without_slurm_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = finished(tmp_path, *SMALL, "cluster.kind=slurm")
    said = "there is no Slurm here (sbatch not found); start it on a login node, or without this key"
    assert (job.process.returncode, job.err) == (2, f"error: cluster.kind=slurm: {said}\n")
