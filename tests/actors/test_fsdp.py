"""The learner on two FSDP2 ranks (processes, gloo) gives what one rank gives."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from monarch_rl.checkpoint import Saver, load
from monarch_rl.config import TrainerConfig
from monarch_rl.learner import Learner
from monarch_rl.models import local_shards, save_pretrained
from monarch_rl.types import Episode, Shard
from tests.batches import VOCABULARY, episode, sampled_by, shards, small_model

RANKS = 2
STEPS = 3
TEMPERATURE = 0.7


def batch(seed: int) -> list[list[Episode]]:
    """3 groups of 3 rows, 5 to 40 tokens long, one unscorable."""
    draw = random.Random(seed)
    groups = [[episode(draw.randint(1, 9), draw.randint(4, 31), draw, reward=draw.random()) for _ in range(3)] for _ in range(3)]
    groups[1][2].reward = None
    sampled_by(small_model(), [e for group in groups for e in group], TEMPERATURE, lambda: draw.gauss(0, 0.1))
    return groups


def learner(ranks: int, bf16: bool = False, **config: Any) -> Learner:
    settings = TrainerConfig(warmup_steps=0, **config)
    return Learner(small_model(), settings, total_steps=STEPS, device_mesh=init_device_mesh("cpu", (ranks,)), bf16=bf16)


def full(rank: Learner, gradients: bool) -> dict[str, torch.Tensor]:
    return {name: (p.grad if gradients else p).full_tensor().detach() for name, p in rank.model.causal_lm.named_parameters()}


def one_step(rank: Learner, shard: Shard) -> dict[str, Any]:
    metrics = rank.step(shard)
    return {"metrics": metrics, "gradients": full(rank, gradients=True), "weights": full(rank, gradients=False)}


def several_steps(rank: Learner, place: int, ranks: int) -> dict[str, Any]:
    return [one_step(rank, shards(batch(step), ranks, budget=80, step=step)[place]) for step in range(1, STEPS + 1)][-1]


def one_rank_without_work(rank: Learner, place: int) -> dict[str, Any]:
    (shard,) = shards(batch(1), budget=80)
    idle = replace(shard, episodes=[], places=[], microbatches=[[] for _ in shard.microbatches])
    return one_step(rank, idle if place else shard)


def error_of_a_bad_batch(rank: Learner, place: int) -> str:
    groups = batch(1)
    for e in groups[0]:
        e.logprobs_T[e.loss_mask_T] = -1e4
    with pytest.raises(RuntimeError) as caught:
        rank.step(replace(shards(groups, RANKS)[place], step=2))
    return str(caught.value)


def written(saver: Saver, trained: Learner, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Empty, or why it is not."""
    told = SimpleQueue[Exception | None]()
    saver.save(trained, folder, told.put)
    meanwhile()
    return str(told.get(timeout=100) or "")


def saved_apart(trained: Learner, place: int, folder: Path) -> dict[str, Any]:
    """What becomes of a checkpoint by the ranks, one by the processes beside them, and one whose second process is killed meanwhile."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if place == 0 else None
    ports = [store and store.port]
    dist.broadcast_object_list(ports)
    saver = Saver(None, apart=True, store=("127.0.0.1", int(ports[0] or 0)))
    errors = [written(saver, trained, folder / "by the ranks")]
    process = saver._process
    assert process is not None
    while not process.is_ready():
        time.sleep(0.05)
    with mock.patch("torch.distributed.checkpoint.state_dict_saver.save", side_effect=OSError("the rank writes")):
        errors.append(written(saver, trained, folder / "apart"))
        (folder / "file").touch()
        errors.append(written(saver, trained, folder / "file" / "c"))
        if place == 1:
            process._process.send_signal(signal.SIGSTOP)
        dist.barrier()
        errors.append(written(saver, trained, folder / "killed", lambda: process._process.kill() if place == 1 else None))
        errors.append(written(saver, trained, folder / "after"))
    saver.close()
    other = learner(RANKS)
    load(other, folder / "apart")
    same = [torch.equal(shard, local_shards(other.model)[name]) for name, shard in local_shards(trained.model).items()]
    return {"errors": errors, "restored": all(same)}


def work(place: int, folder: str) -> None:
    """What each of the two ranks does; its results go to a file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=place, world_size=RANKS)
    trained = learner(RANKS)
    results = {
        "steps": several_steps(trained, place, RANKS),
        "shards": {name: shard.clone() for name, shard in local_shards(trained.model).items()},
        "idle": one_rank_without_work(learner(RANKS), place),
        "half": several_steps(learner(RANKS, bf16=True, activation_checkpointing=True), place, RANKS),
        "error": error_of_a_bad_batch(learner(RANKS), place),
        "saved apart": saved_apart(trained, place, Path(folder)) if sys.platform == "linux" else None,
    }
    save_pretrained(trained.model, f"{folder}/saved", f"{folder}/tokenizer", torch.float32)
    torch.save(results, f"{folder}/{place}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(VOCABULARY)}, unk_token="a"))
    small_model().config.save_pretrained(folder / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b").save_pretrained(folder / "tokenizer")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=RANKS)
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    return [torch.load(folder / f"{place}.pt", weights_only=False) for place in range(RANKS)]


@pytest.fixture(scope="module")
def one() -> Iterator[dict[str, Any]]:
    """The same work by a single rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = learner(1)
    first = one_step(rank, shards(batch(1), budget=80)[0])
    yield {"first": first, "steps": several_steps(learner(1), 0, 1)}
    dist.destroy_process_group()


def test_two_uneven_ranks_train_as_one(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Case 52: gradients, weights and metrics after several steps do not depend on the number of ranks."""
    for rank in two:
        torch.testing.assert_close(rank["steps"]["gradients"], one["steps"]["gradients"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(rank["steps"]["weights"], one["steps"]["weights"], atol=1e-5, rtol=1e-5)
        metrics, expected = dict(rank["steps"]["metrics"]), dict(one["steps"]["metrics"])
        del metrics["padding/frac"], expected["padding/frac"]
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert two[0]["steps"]["metrics"] == two[1]["steps"]["metrics"]


def test_a_rank_without_work_takes_part(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        torch.testing.assert_close(rank["idle"]["gradients"], one["first"]["gradients"], atol=1e-6, rtol=1e-5)


def test_local_shards_are_the_rows_of_the_model(two: list[dict[str, Any]]) -> None:
    names = [name for name, _ in small_model().named_parameters()]
    assert [list(rank["shards"]) for rank in two] == [names, names]
    for name, weight in two[0]["steps"]["weights"].items():
        torch.testing.assert_close(torch.cat([rank["shards"][name] for rank in two]), weight, atol=0, rtol=0)


def test_bfloat16_with_checkpointing_trains_alike_on_all_ranks(two: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(two[0]["half"]["weights"], two[1]["half"]["weights"], atol=0, rtol=0)
    assert two[0]["half"]["metrics"] == two[1]["half"]["metrics"]
    assert all(weight.isfinite().all() for weight in two[0]["half"]["weights"].values())


def test_a_bad_gradient_stops_all_ranks_with_one_message(two: list[dict[str, Any]]) -> None:
    assert two[0]["error"] == two[1]["error"]
    assert "step 2: the gradient norm is" in two[0]["error"]


def test_a_model_saved_by_two_ranks_loads(folder: Path, two: list[dict[str, Any]]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype="auto")
    torch.testing.assert_close(dict(loaded.named_parameters()), two[0]["steps"]["weights"], atol=0, rtol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ranks write")
def test_processes_beside_the_ranks_write_their_shards(two: list[dict[str, Any]]) -> None:
    """One that is killed ends the checkpoint of all ranks, with one reason, and none after it is written."""
    for rank in two:
        assert rank["saved apart"]["restored"]
        by_the_ranks, apart, in_a_file, killed, after = rank["saved apart"]["errors"]
        assert by_the_ranks == apart == ""
        assert re.fullmatch(r"the checkpoint cannot be written in .*/file/c: .*Not a directory.*", in_a_file)
        assert re.fullmatch(r"the checkpoint cannot be written in .*/killed: the process that writes it was killed by signal 9 .*", killed)
        assert re.fullmatch(r"the checkpoint cannot be written in .*/after: the process that writes it .*", after)
