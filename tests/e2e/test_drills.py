"""Processes are killed while a run goes on: it finishes, every prompt is trained once, ages stay within bounds, nothing is left."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from random import Random

import pytest

from monarch_rl.observe.ledger_file import lives
from tests.e2e.jobs import KILLED, SMALL, Job, finished, started

pytestmark = pytest.mark.timeout(600)

STEPS, PROMPTS = 30, 8
DRILL = [*SMALL, f"steps={STEPS}", f"buffer.prompts_per_step={PROMPTS}", "trainer.lr=1e-6", "eval.every=0"]
GONE_S = 10.0


def check(job: Job, steps: int = STEPS) -> None:
    assert job.wait() == 0, job.out + job.err
    assert job.gone_within(GONE_S) == []
    assert job.err == ""
    assert [row["step"] for row in job.rows] == list(range(steps + 1))
    age, dropped = max(row["age/max"] for row in job.rows[1:]), job.rows[-1]["buffer/dropped"]
    assert age <= 2
    trained = [json.loads(line)["ordinal"] for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(trained) == len(set(trained)) == steps * PROMPTS
    assert trained == sorted(trained)
    assert max(trained) < steps * PROMPTS + dropped, "a prompt is neither trained nor reported as dropped"
    print(f"{steps} steps, {len(trained)} prompts trained, {dropped:g} dropped, age at most {age:g}, no process left")


def test_the_only_generator_is_killed(tmp_path: Path) -> None:
    """Case 19. Its replacement holds weights before it serves; what was asked of the dead one is asked again."""
    with started(tmp_path, *DRILL) as job:
        job.until_steps(2)
        job.kill("generator_0 0")
        check(job)
        assert re.search(f"^generator 0 {KILLED}; generator 1 takes its place$", job.out, re.MULTILINE)


def test_a_generator_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with started(tmp_path, *DRILL, "generator.hang_s=4") as job:
        job.until_steps(2)
        job.roles()["generator_0 0"].suspend()
        job.until_said("generator 0 stood still for 4 s; generator 1 takes its place")
        check(job)


def test_one_of_two_generators_is_killed(tmp_path: Path) -> None:
    """Case 39: the other goes on, and the trainer with it."""
    with started(tmp_path, *DRILL, "generator.replicas=2") as job:
        job.until_steps(2)
        job.process.send_signal(signal.SIGQUIT)
        job.until_said("who waits for whom")
        job.kill("generator_1 0")
        job.until_said("generator 2 takes its place")
        check(job)


def test_the_only_rollout_worker_and_the_only_scorer_are_killed(tmp_path: Path) -> None:
    """Case 19. What the worker had leased is tried again, what the scorer was asked is asked of its replacement."""
    with started(tmp_path, *DRILL) as job:
        job.until_steps(2)
        job.kill("rollout_0 0")
        job.until_said("; rollout 1 takes its place")
        job.kill("scorer_0 0")
        job.until_said("; scorer 1 takes its place")
        check(job)
        for name in ("rollout", "scorer"):
            assert re.search(f"^{name} 0 {KILLED}; {name} 1 takes its place$", job.out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollout", "scorer"])
def test_a_worker_that_stands_still_is_replaced(name: str, tmp_path: Path) -> None:
    with started(tmp_path, *DRILL, f"{name}.hang_s=8") as job:
        job.until_steps(2)
        job.roles()[f"{name}_0 0"].suspend()
        job.until_said(f"{name} 0 stood still for 8 s; {name} 1 takes its place")
        check(job)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [False, True])
def test_what_is_to_take_the_place_of_a_generator_is_killed_too(spare: bool, tmp_path: Path) -> None:
    """As soon as its process is there, or while it is a spare."""
    with started(tmp_path, *DRILL, f"generator.spares={int(spare)}") as job:
        job.until_steps(2)
        if not spare:
            job.kill("generator_0 0")
        job.until_process("generator_1 0")
        job.kill("generator_1 0")
        if spare:
            job.kill("generator_0 0")
        check(job)
        said = f"^generator 1 could not be added: generator 1 {KILLED}( while it started)?; generator 2 takes its place$"
        assert re.search(said, job.out, re.MULTILINE), job.out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_two_are_lost_at_any_time(seed: int, tmp_path: Path) -> None:
    """Twenty in all; also while the run evaluates, and while what was lost before is still being replaced."""
    drawn = Random(seed)
    two = [f"{key}=2" for key in ("generator.replicas", "rollout.workers", "scorer.workers")]
    hangs = [f"{name}.hang_s=8" for name in ("generator", "rollout", "scorer")]
    victims = drawn.sample([f"{name}_{number} 0" for name in ("generator", "rollout", "scorer") for number in (0, 1)], 2)
    with started(tmp_path, *DRILL, *two, *hangs, "eval.every=5") as job:
        for step, role in zip(sorted(drawn.choices(range(STEPS // 2), k=2)), victims, strict=True):
            job.until_steps(step)
            how = "stopped" if drawn.random() < 0.3 else "killed"
            print(f"step {step}: {role} is {how}")
            victim = job.roles()[role]
            (victim.suspend if how == "stopped" else victim.kill)()
        check(job)
        assert job.out.count("takes its place") == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns_though_a_generator_is_killed_every_fifteen_steps(tmp_path: Path) -> None:
    """As the undisturbed run does, within noise."""
    learn = ["recipe=grpo_qwen", "steps=60", "generator.replicas=2", "eval.every=20", "console.rollouts_every=0"]
    with started(tmp_path, *learn, name="calm") as calm:
        assert calm.wait(600) == 0, calm.err
    with started(tmp_path, *learn, name="killed") as job:
        for kills in range(3):
            job.until_steps(15 * (kills + 1))
            job.kill(f"generator_{kills} 0")
        assert job.wait(600) == 0, job.err
        assert job.gone_within(GONE_S) == []
    assert job.out.count("takes its place") == 3
    first, last, undisturbed = job.rows[0]["eval/accuracy"], job.rows[-1]["eval/accuracy"], calm.rows[-1]["eval/accuracy"]
    assert last - first > 0.3
    assert abs(last - undisturbed) < 0.15


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keys", [["recipe=grpo_qwen", "weights.encoding=delta"], ["recipe=grpo_qwen_lora"]], ids=["delta", "lora"])
def test_it_learns_too_where_deltas_may_travel_or_adapters_do(keys: list[str], tmp_path: Path) -> None:
    """At the default job's learning rate nearly all weights change with each step, so that most versions are pulled as images; that deltas
    leave the same bits, other tests see."""
    with started(tmp_path, *keys, "console.rollouts_every=0") as job:
        assert job.wait(600) == 0, job.err
    assert job.rows[-1]["eval/accuracy"] - job.rows[0]["eval/accuracy"] > 0.3


FEW = 16
TRAINER = [*DRILL, f"steps={FEW}", "checkpoint.every=2", "weights.verify=every"]


def check_lineages(job: Job, losses: int) -> list[int]:
    """Each step and prompt once in what is left; the last weights are those of the last lineage, and the generators hold them. Where the
    trainers went back to."""
    check(job, FEW)
    back = [int(step) for step in re.findall(r"the trainers start again at step (\d+), from ", job.out)]
    assert len(back) == losses
    assert all(step % 2 == 0 for step in back), "from a checkpoint"
    versions = [row["version"] for row in job.rows]
    assert versions == [f"{sum(step > start for start in back)}.{step}" for step in range(FEW + 1)]
    assert job.rows[-1]["eval/version"] == versions[-1]
    ended = lives(job.output_dir / "ledger.jsonl").values()
    assert sum(life.state == "trained" for life in ended) == FEW * PROMPTS
    assert sum(life.state == "dropped" for life in ended) == job.rows[-1]["buffer/dropped"]
    return back


def check_restarts(job: Job, losses: int) -> None:
    back = check_lineages(job, losses)
    ages = [row["age/max"] for row in job.rows[1:]]
    assert all(age >= 1 for age, step in zip(ages, range(1, FEW + 1), strict=True) if step - 1 in back), "tokens of an older lineage"


def test_the_trainer_is_killed(tmp_path: Path) -> None:
    """It goes on from its last checkpoint by itself, with the groups that it had trained since."""
    with started(tmp_path, *TRAINER) as job:
        job.until_row(3)
        job.kill("trainer 0")
        check_restarts(job, 1)


@pytest.mark.slow
def test_a_trainer_rank_is_killed_again_and_again(tmp_path: Path) -> None:
    """One of two, which takes the other with it. A third time is one too many."""
    with started(tmp_path, *TRAINER, "trainer.ranks=2", "trainer.max_restarts=2") as job:
        for lineage in range(3):
            job.until_row(3)
            job.until_process("trainer 1")
            job.kill("trainer 1")
            if lineage < 2:
                job.until_said("the trainers start again", times=lineage + 1)
        assert job.wait() == 1
        assert job.gone_within(GONE_S) == []
        assert "(trainer.max_restarts=2 were used up)" in job.err


@pytest.mark.slow
def test_a_trainer_that_stands_still_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path, *TRAINER, "trainer.ranks=2", "trainer.hang_s=20") as job:
        job.until_row(3)
        job.roles()["trainer 0"].suspend()
        job.until_said("trainer answered nothing for 20 s; the trainers start again at step ")
        check_restarts(job, 1)


@pytest.mark.slow
def test_a_synchronous_run_loses_its_trainer(tmp_path: Path) -> None:
    """Its prompts since the checkpoint are sampled again, by the weights of the checkpoint: no token is older than its step."""
    with started(tmp_path, *TRAINER, "buffer.max_age=0") as job:
        job.until_row(3)
        job.kill("trainer 0")
        assert job.wait() == 0, job.out + job.err
    assert [row["step"] for row in job.rows] == list(range(FEW + 1))
    assert {row["age/max"] for row in job.rows[1:]} == {0}
    assert job.rows[-1]["version"] == f"1.{FEW}"


@pytest.mark.slow
def test_a_recorded_run_that_lost_its_trainer_is_replayed(tmp_path: Path) -> None:
    """Also the steps that were trained again, on tokens of an older lineage: bit for bit."""
    with started(tmp_path, *TRAINER, "trainer.lr=1e-3", "record=true") as job:
        job.until_row(3)
        job.kill("trainer 0")
        check_restarts(job, 1)
    replay = finished(tmp_path, *DRILL, f"steps={FEW}", "trainer.lr=1e-3", f"replay={job.output_dir}", name="replay")
    assert replay.process.returncode == 0, replay.err
    model = Path("model/model.safetensors")
    assert (replay.output_dir / model).read_bytes() == (job.output_dir / model).read_bytes()


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_trainer_goes_on(tmp_path: Path) -> None:
    """The checkpoint knows the lineage of the tokens that it holds."""
    with started(tmp_path, *TRAINER) as job:
        job.until_row(3)
        job.kill("trainer 0")
        job.until_row(FEW - 4)
        job.process.kill()
        job.process.wait()
    with started(tmp_path, *TRAINER, "resume=latest") as again:
        assert again.wait() == 0, again.err
    assert [row["step"] for row in again.rows] == list(range(FEW + 1))
    assert again.rows[-1]["version"] == f"1.{FEW}"
    assert max(row["age/max"] for row in again.rows[1:]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_trainer_is_lost_at_any_time_and_another_with_it(seed: int, tmp_path: Path) -> None:
    """In mid-step, in mid-publish, while a checkpoint is written; the other one at the same moment, or while the trainers start again."""
    drawn = Random(seed)
    ranks = drawn.choice((1, 2))
    with started(tmp_path, *TRAINER, "generator.replicas=2", f"trainer.ranks={ranks}", "eval.every=4") as job:
        job.until_row(drawn.randrange(1, FEW - 4))
        time.sleep(drawn.random())
        first, other = f"trainer {drawn.randrange(ranks)}", drawn.choice(["generator_0 0", "generator_1 0", "rollout_0 0", "scorer_0 0"])
        later_s = drawn.choice((0.0, 5 * drawn.random()))
        print(f"after row {len(job.rows) - 1}: {first} is killed, and {other} {later_s:.1f} s later")
        job.kill(first)
        time.sleep(later_s)
        job.kill(other)
        check_lineages(job, 1)
        assert job.out.count("takes its place") == 1


@pytest.mark.slow
def test_the_trainer_is_killed_again_while_it_starts(tmp_path: Path) -> None:
    with started(tmp_path, *TRAINER) as job:
        job.until_row(3)
        first = job.roles()["trainer 0"]
        first.kill()
        job._until(lambda: job.roles().get("trainer 0", first) != first, "another trainer")
        job.kill("trainer 0")
        job.until_said("the trainers start again")
        assert job.wait() == 0, job.out + job.err
        assert job.gone_within(GONE_S) == []
        assert [row["step"] for row in job.rows] == list(range(FEW + 1))
        assert job.rows[-1]["version"] == f"2.{FEW}"


@pytest.mark.slow
def test_trainers_that_cannot_go_on_from_their_checkpoint_end_the_run(tmp_path: Path) -> None:
    with started(tmp_path, *TRAINER, "checkpoint.every=5", f"steps={10 * FEW}") as job:
        job.until_row(6)
        folder = job.output_dir / "checkpoints" / "step_5"
        job._until((folder / "progress.json").is_file, "checkpoint of step 5")
        (folder / ".metadata").write_bytes(b"damaged")
        job.kill("trainer 0")
        assert job.wait() == 2
        assert job.gone_within(GONE_S) == []
        assert re.fullmatch(rf"error: {folder}/.metadata: cannot be read: .* \(whole story in .*\)\n", job.err), job.err


@pytest.mark.slow
def test_an_interrupt_while_trainers_start_again(tmp_path: Path) -> None:
    """Nothing is lost that a checkpoint covers, and the run goes on from there."""
    with started(tmp_path, *TRAINER, f"steps={10 * FEW}", "close_deadline_s=200") as job:
        job.until_row(5)
        job.kill("trainer 0")
        job.until_said("the trainers start again")
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        assert job.gone_within(GONE_S) == []
        saved = re.fullmatch(r"error: interrupted after step (\d+): resume=latest goes on from \S+/step_(\d+)\n", job.err)
        assert saved, job.err
        assert saved[1] == saved[2]
    with started(tmp_path, *TRAINER, "resume=latest") as again:
        check(again, FEW)


@pytest.mark.slow
def test_the_replay_buffer_is_killed(tmp_path: Path) -> None:
    """The run ends and says from where another goes on, with nothing lost that was checkpointed."""
    with started(tmp_path, *TRAINER) as job:
        job.until_row(5)
        job.kill("replay_buffer 0")
        assert job.wait(60) == 1
        assert job.gone_within(GONE_S) == []
        said = rf"error: replay buffer {KILLED}; resume=latest goes on from \S+/step_(?P<step>\d+), what came after it is lost \(.*\)\n"
        told = re.fullmatch(said, job.err)
        assert told, job.err
        before = [row for row in job.rows if row["step"] <= int(told["step"])]
    with started(tmp_path, *TRAINER, "resume=latest") as again:
        check(again, FEW)
        assert again.rows[: len(before)] == before
