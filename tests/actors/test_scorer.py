"""The scorer against rewards that misbehave: in its own process first, then as an actor of a real mesh."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from monarch.actor import ActorError, this_host

from actors.scorer import Scorer
from monarch_rl.config import UserError
from monarch_rl.tasks import Completion, Score
from monarch_rl.tasks.reward_process import LENGTH, RewardProcess
from monarch_rl.types import Prompt

PROMPT = Prompt(0, "4+7+2=", answer=13)
PATIENCE_S = 60
"""Of deadlines that pass on a machine only that stands still."""

USER_FILE = '''
import asyncio, math, os, re, signal, subprocess, sys, threading, time
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt

class Odd(Task):
    """Does what the completion says."""
    name = "odd"

    def prompt(self, ordinal, split):
        return Prompt(ordinal, "")

    def reward(self, prompt, completion):
        word, _, rest = completion.partition(" ")
        return getattr(self, word)(rest)

    def give(self, rest): return eval(rest)
    def fail(self, rest): raise ValueError("bad\\nvalue")
    def leave(self, rest): sys.exit(3)
    def vanish(self, rest): os._exit(5)
    def cancel(self, rest): raise asyncio.CancelledError
    def interrupt(self, rest): raise KeyboardInterrupt
    def sleep(self, rest): time.sleep(1e6)
    def backtrack(self, rest): return re.match(r"(a+)+$", "a" * 40 + "b")
    def chatter(self, rest): print("x" * 100_000); sys.stdout.flush(); os.write(1, b"y"); return len(sys.stdin.read())
    def alarm(self, rest): signal.signal(signal.SIGALRM, signal.SIG_IGN); return threading.current_thread() is threading.main_thread()
    def hog(self, rest): return len(bytearray(int(rest)))
    def fork(self, rest): return os.fork() == 0
    def helper(self, rest):
        child = subprocess.Popen(["sleep", "1000"])
        open(rest, "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(1e6)

class Broken(Odd):
    def __init__(self): raise ValueError("no data")

class Dying(Odd):
    def __init__(self): os._exit(9)
'''


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(USER_FILE)
    return f"{tmp_path}/odd.py"


@pytest_asyncio.fixture
async def process(user_file: str) -> AsyncIterator[RewardProcess]:
    process = RewardProcess(f"{user_file}:Odd", {}, seed=0)
    yield process
    await process.close()


def gone(pid: int) -> bool:
    """No such process, or a zombie whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def libraries(pid: int) -> str:
    """That a process has loaded."""
    return Path(f"/proc/{pid}/maps").read_text()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (the file system sends no message)
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------- the process


async def test_scores_are_plain_numbers(process: RewardProcess) -> None:
    for said, reward in [("1", 1.0), ("-0.5", -0.5), ("True", 1.0), ("__import__('numpy').float32(0.5)", 0.5)]:
        assert await process.score(PROMPT, f"give {said}", PATIENCE_S) == Score(reward)


@pytest.mark.parametrize("value", ["None", "math.nan", "math.inf", "-math.inf", "'1.0'", "[1.0, 2.0]", "[None]", "1j"])
async def test_what_is_not_a_finite_number_is_unscorable(process: RewardProcess, value: str) -> None:
    """Case 46: None and NaN are neither a zero nor a crash."""
    score = await process.score(PROMPT, f"give {value}", PATIENCE_S)
    assert score.reward is None
    assert score.error is not None
    assert score.error.startswith("RewardError: reward is ")
    assert await process.score(PROMPT, "give 1", PATIENCE_S) == Score(1.0)


async def test_a_reward_can_have_a_part_for_each_turn(process: RewardProcess) -> None:
    said = Completion("give [0.5, 1]", ["give [0.5,", " 1]"])
    assert await process.score(PROMPT, said, PATIENCE_S) == Score(1.5, None, (0.5, 1.0))


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("fail", "RewardError: ValueError: bad value"),
        ("unknown", "RewardError: AttributeError: 'Odd' object has no attribute 'unknown'"),
        ("leave", "RewardError: SystemExit: 3"),
        ("cancel", "RewardError: CancelledError"),
        ("interrupt", "RewardError: KeyboardInterrupt"),
        ("vanish", "RewardError: the reward's process died (exit code 5)"),
    ],
)
async def test_a_reward_that_raises_or_leaves_costs_only_its_episode(process: RewardProcess, word: str, error: str) -> None:
    """Cases 18 and 20: the exception is reported with the episode, and the others are scored, though they were sent together."""
    said = ["give 0", word, f"give len('{'x' * 300_000}')", "give 1"]
    assert await process.scores(PROMPT, said, PATIENCE_S) == [Score(0.0), Score(None, error), Score(3e5), Score(1.0)]


@pytest.mark.parametrize("word", ["sleep", "backtrack"])
async def test_a_hanging_reward_is_ended_at_its_deadline(process: RewardProcess, word: str) -> None:
    """Cases 21 and 62: one of several never returns (in Python, or in C with the interpreter lock held)."""
    await process.start()
    said = [word if n == 1 else "give 1" for n in range(4)]
    scores = await process.scores(PROMPT, said, 2)
    assert scores == [Score(1.0), Score(None, "deadline of 2 s passed"), Score(1.0), Score(1.0)]


async def test_what_a_reward_prints_or_reads_does_not_reach_the_protocol(process: RewardProcess, capfd: pytest.CaptureFixture[str]) -> None:
    assert await process.score(PROMPT, "chatter", PATIENCE_S) == Score(0.0)
    assert capfd.readouterr().out == ""


async def test_rewards_run_on_the_main_thread(process: RewardProcess) -> None:
    """Verifiers that use signals refuse any other."""
    assert await process.score(PROMPT, "alarm", PATIENCE_S) == Score(1.0)


async def test_memory_has_a_limit(user_file: str) -> None:
    """A reward that wants more fails like any other; what it holds goes with it."""
    process = RewardProcess(f"{user_file}:Odd", {}, seed=0, memory_mb=512)
    for _ in range(2):
        assert await process.score(PROMPT, "hog 1000000000", PATIENCE_S) == Score(None, "RewardError: MemoryError (scorer.memory_mb=512)")
        assert await process.score(PROMPT, "hog 1000000", PATIENCE_S) == Score(1e6)
    pid = (await process.score(PROMPT, "give os.getpid()", PATIENCE_S)).reward
    assert await process.score(PROMPT, "hog 1000000000", PATIENCE_S) == Score(None, "RewardError: MemoryError (scorer.memory_mb=512)")
    assert (await process.score(PROMPT, "give os.getpid()", PATIENCE_S)).reward == pid, "the process need not be replaced for it"
    await process.close()


async def test_a_reward_that_forks_is_answered_once(process: RewardProcess) -> None:
    """Both of the two come back from the reward, and hold the socket."""
    for number in range(3):
        assert await process.score(PROMPT, "fork", PATIENCE_S) == Score(0.0)
        assert await process.score(PROMPT, f"give {number}", PATIENCE_S) == Score(float(number))


async def test_callers_take_turns(process: RewardProcess) -> None:
    scores = await asyncio.gather(*(process.score(PROMPT, f"give {n}", PATIENCE_S) for n in range(20)))
    assert scores == [Score(float(n)) for n in range(20)]


async def test_a_cancelled_caller_does_not_shift_the_answers(process: RewardProcess) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.score(PROMPT, "sleep", 60), 0.5)
    assert await process.score(PROMPT, "give 2", PATIENCE_S) == Score(2.0)


async def test_a_child_killed_while_idle_is_replaced(process: RewardProcess) -> None:
    """Case 19: nobody's episode pays for a scorer that was killed between two scores."""
    pid = await process.score(PROMPT, "give os.getpid()", PATIENCE_S)
    assert pid.reward is not None
    os.kill(child := int(pid.reward), signal.SIGKILL)
    await eventually(lambda: gone(child))
    assert await process.score(PROMPT, "give 1", PATIENCE_S) == Score(1.0)


async def test_the_deadline_ends_what_the_reward_has_started(process: RewardProcess, tmp_path: Path) -> None:
    """Case 71: no orphan."""
    await process.start()
    assert (await process.score(PROMPT, f"helper {tmp_path}/pids", 3)).reward is None
    for pid in (tmp_path / "pids").read_text().split():
        await eventually(lambda pid=int(pid): gone(pid))  # type: ignore[misc]


async def test_closing_ends_a_score_in_progress(process: RewardProcess) -> None:
    await process.start()
    waiting = asyncio.create_task(process.score(PROMPT, "sleep", 60))
    await asyncio.sleep(0.2)
    await process.close()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == Score(None, "RewardError: the reward's process died (signal 9)")
    with pytest.raises(RuntimeError, match="closed"):
        await process.score(PROMPT, "give 1", PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("None_", UserError, "has no attribute 'None_'"),
        ("Broken", RuntimeError, "ValueError: no data"),
        ("Dying", RuntimeError, "died while it loaded"),
    ],
)
async def test_a_task_that_cannot_be_loaded_is_an_error(user_file: str, name: str, kind: type[Exception], message: str) -> None:
    process = RewardProcess(f"{user_file}:{name}", {}, seed=0)
    with pytest.raises(kind, match=message) as caught:
        await process.start()
    assert user_file in str(caught.value)


async def test_the_child_starts_without_torch() -> None:
    process = RewardProcess("arithmetic", {}, seed=0)
    assert await process.score(PROMPT, "#13", PATIENCE_S) == Score(1.0)
    assert process._child is not None
    assert "libtorch" not in libraries(process._child.process.pid)
    await process.close()


async def test_the_child_dies_with_its_parent_in_the_middle_of_a_reward(user_file: str, tmp_path: Path) -> None:
    """Case 71: the parent is killed outright."""
    program = f"""
    import asyncio
    from monarch_rl.tasks.reward_process import LENGTH, RewardProcess
    from monarch_rl.types import Prompt
    asyncio.run(RewardProcess({f"{user_file}:Odd"!r}, {{}}, 0).score(Prompt(0, ""), "helper {tmp_path}/pids", 60))
    """
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(program))
    await eventually(lambda: (tmp_path / "pids").exists() and " " in (tmp_path / "pids").read_text())
    parent.kill()
    await parent.wait()
    child, helper = map(int, (tmp_path / "pids").read_text().split())
    await eventually(lambda: gone(child))
    os.kill(helper, signal.SIGKILL)  # the reward's own children are ended by a deadline, not by the parent's death


async def test_the_child_says_nothing_when_its_parent_has_gone(user_file: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It finds the socket closed when it has a score to send."""
    process = RewardProcess(f"{user_file}:Odd", {}, seed=0)
    await process.start()
    child = process._child
    assert child is not None
    body = pickle.dumps(("reward", PROMPT, "give time.sleep(0.3)"))
    child.writer.write(LENGTH.pack(len(body)) + body)
    child.writer.close()
    assert await asyncio.wait_for(child.process.wait(), PATIENCE_S) == 0
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- the actor


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[Any]:
    mesh = this_host().spawn_procs({"scorers": 1})
    yield mesh
    await mesh.stop()


async def test_scorer_actor(mesh: Any, user_file: str) -> None:
    """Cases 13, 21 and 62: a group with one hanging reward comes back complete, and others are served meanwhile."""
    scorer = mesh.spawn("scorer", Scorer, f"{user_file}:Odd", {}, 0, 2.0)
    await scorer.load.call_one()
    group = scorer.score.call_one(PROMPT, ["give 1", "sleep", "fail", "give None", "give 0"])
    other = scorer.score.call_one(PROMPT, ["give 2"])
    assert await other == [Score(2.0)]
    scores = await group
    assert [score.reward for score in scores] == [1.0, None, None, None, 0.0]
    assert scores[1].error == "deadline of 2 s passed"
    pid = int((await scorer.score.call_one(PROMPT, ["give os.getpid()"]))[0].reward)
    await scorer.shut.call_one()
    assert gone(pid)


async def test_a_scorer_whose_task_cannot_be_loaded_says_so(mesh: Any, user_file: str) -> None:
    scorer = mesh.spawn("scorer", Scorer, f"{user_file}:Missing", {}, 0, 1.0)
    with pytest.raises(ActorError, match="has no attribute 'Missing'"):
        await scorer.load.call_one()


async def test_the_reward_process_ends_with_its_mesh(user_file: str) -> None:
    mesh = this_host().spawn_procs({"scorers": 1})
    scorer = mesh.spawn("scorer", Scorer, f"{user_file}:Odd", {}, 0, 10.0)
    pid = int((await scorer.score.call_one(PROMPT, ["give os.getpid()"]))[0].reward)
    assert not gone(pid)
    await mesh.stop()
    await eventually(lambda: gone(pid))
