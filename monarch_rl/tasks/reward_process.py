"""Rewards and environments in a process of their own, so that a deadline can really end one.

Parent and child speak over a socket, the child's stdin and stdout: each message is an 8-byte length and a pickle. The child works on
its main thread (some verifiers need signals) and on one episode at a time. The program is
`python -m monarch_rl.tasks.reward_process [MEGABYTES]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

import cloudpickle

from monarch_rl.config import UserError, label
from monarch_rl.observe import timeline
from monarch_rl.tasks import Completion, Observation, Score, Task, TaskSpec, is_conversation, load_task
from monarch_rl.types import Message, Prompt

LENGTH = struct.Struct("!Q")
START_DEADLINE_S = 120.0
"""For loading the task, which may have a dataset to read."""
PR_SET_PDEATHSIG = 1
Call = Literal["reward", "observe"]
Answer = tuple[Any, str | None]
"""Value and error, as in `Score` and `Observation`."""
FAULT: dict[Call, str] = {"reward": "RewardError", "observe": "ObserveError"}
"""What an episode's error begins with."""
NO_REWARD = "reward is"
"""Begins the error of a reward that returns what is none."""


SPANS: dict[Call, str] = {"reward": "score", "observe": "observe"}
"""What the timeline calls a call."""


class Unusable(Exception):
    """A task returned what cannot be worked with."""


class Child(NamedTuple):
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class RewardProcess:
    """The parent's side: one child, started at the first score and again after each that ended it. Callers take turns.

    Args:
        memory_mb: that the child, and each process that it starts, may take; None: whatever there is.
    """

    def __init__(self, task_spec: TaskSpec, task_args: dict[str, Any], seed: int, memory_mb: int | None = None) -> None:
        self._task = (task_spec, task_args, seed)
        self._memory_mb = memory_mb
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Loads the task. Raises UserError as `load_task` does, RuntimeError when the child dies or takes too long."""
        async with self._turn:
            await self._started()

    async def score(self, prompt: Prompt, completion: str, deadline_s: float) -> Score:
        """Never raises for what the reward does: that becomes `Score.error`. The deadline counts from when the reward begins."""
        (score,) = await self.scores(prompt, [completion], deadline_s)
        return score

    async def scores(self, prompt: Prompt, completions: Sequence[str], deadline_s: float) -> list[Score]:
        """`score` of each, one after another; costs less than as many calls."""
        answers = await self._call("reward", prompt, completions, deadline_s)
        return [Score(sum(r), None, r) if isinstance(r, tuple) else Score(r, error) for r, error in answers]

    async def observe(self, prompt: Prompt, turns: Sequence[str], deadline_s: float) -> Observation:
        """As `score`, for the environment's answer to the last turn."""
        (answer,) = await self._call("observe", prompt, [tuple(turns)], deadline_s)
        return Observation(*answer)

    async def _call(self, what: Call, prompt: Prompt, said: Sequence[str | tuple[str, ...]], deadline_s: float) -> list[Answer]:
        answers: list[Answer] = []
        async with self._turn:
            while rest := said[len(answers) :]:
                answers += await self._answers(await self._started(), what, prompt, rest, deadline_s)
        return answers

    async def _answers(
        self, child: Child, what: Call, prompt: Prompt, said: Sequence[str | tuple[str, ...]], deadline_s: float
    ) -> list[Answer]:
        """Of as many as the child lives to answer, and what ended it; at least one. It finds the next when it has answered one."""
        _send(child, *[(what, prompt, each) for each in said])
        answers: list[Answer] = []
        for _ in said:
            start_ns = time.time_ns()
            try:
                answers.append(await self._next_answer(child, deadline_s))
            except TimeoutError:
                return [*answers, (None, f"deadline of {deadline_s:g} s passed")]
            except ChildProcessError as error:
                return [*answers, (None, f"{FAULT[what]}: the reward's process died ({error})")]
            finally:
                timeline.add_one_of_many(SPANS[what], start_ns, time.time_ns())
        return answers

    async def close(self) -> None:
        """Ends the child at once; a score in progress gets an error, later ones raise RuntimeError."""
        self._closed = True
        if self._child is not None:
            await self._end(self._child)

    async def _started(self) -> Child:
        if self._closed:
            raise RuntimeError("the reward process is closed")
        if self._child is None or self._child.process.returncode is not None:
            self._child = await _spawn(self._memory_mb)
            await self._load(self._child)
        return self._child

    async def _load(self, child: Child) -> None:
        try:
            _send(child, cloudpickle.dumps(self._task))
            failure = await self._next_answer(child, START_DEADLINE_S)
        except TimeoutError:
            raise RuntimeError(f"task {label(self._task[0])} was not loaded within {START_DEADLINE_S:g} s") from None
        except ChildProcessError as error:
            raise RuntimeError(f"the reward's process died while it loaded task {label(self._task[0])} ({error})") from None
        if failure is not None:
            await self._end(child)
            raise failure

    async def _next_answer(self, child: Child, deadline_s: float) -> Any:
        """The child's next answer. Whatever goes wrong ends the child. Raises TimeoutError, or ChildProcessError with the exit status."""
        try:
            async with asyncio.timeout(deadline_s):
                return await _receive(child)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._end(child)
            raise ChildProcessError(f"signal {-code}" if code < 0 else f"exit code {code}") from None
        except BaseException:  # late or cancelled: the answer, if it came, would be taken for the next one's
            await self._end(child)
            raise

    async def _end(self, child: Child) -> int:
        """Kills the child with all that it has started; returns its exit status, which stands if it was already ending."""
        if self._child is child:
            self._child = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.writer.close()
        return await child.process.wait()


async def _spawn(memory_mb: int | None) -> Child:
    """A child that imports from where this process does, in a process group of its own."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __spec__.name, *([] if memory_mb is None else [str(memory_mb)])),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    return Child(process, *await asyncio.open_connection(sock=ours))


def _send(child: Child, *messages: Any) -> None:
    bodies = [pickle.dumps(message) for message in messages]
    child.writer.write(b"".join(LENGTH.pack(len(body)) + body for body in bodies))


async def _receive(child: Child) -> Any:
    (length,) = LENGTH.unpack(await child.reader.readexactly(LENGTH.size))
    return pickle.loads(await child.reader.readexactly(length))


def main() -> None:
    """The child's side: load the task, then answer until the parent closes the socket or is gone."""
    _die_with_parent()
    memory_mb = int(sys.argv[1]) if len(sys.argv) > 1 else None
    if memory_mb is not None:
        _limit_memory(memory_mb)
    requests, replies = _take_socket()
    own_pid, named = os.getpid(), "the task"
    try:
        spec, args, seed = pickle.loads(pickle.loads(_read(requests) or b""))
        named = f"task {label(spec)}"
        task = load_task(spec, args, seed)
    except Exception as error:
        said = UserError(str(error)) if isinstance(error, UserError) else RuntimeError(f"{named} cannot be loaded: {_one_line(error)}")
        _write(replies, said)
        return
    try:
        _write(replies, None)
        while (body := _read(requests)) is not None:
            answer = _answer(task, memory_mb, *pickle.loads(body))
            if os.getpid() != own_pid:
                os._exit(0)  # a fork that the reward has come back from twice: one answer is enough
            _write(replies, answer)
    except ConnectionError:
        os._exit(0)  # the parent is gone, and nobody is to hear of it: not from the buffer's own end either


def _answer(task: Task, memory_mb: int | None, what: Call, prompt: Prompt, said: Any) -> Answer:
    """Value and error, as in `Score` and `Observation`."""
    try:
        return (_reward(task, prompt, said) if what == "reward" else _observation(task, prompt, said)), None
    except Unusable as error:
        return None, f"{FAULT[what]}: {_clip(str(error))}"
    except MemoryError as error:
        return None, f"{FAULT[what]}: {_one_line(error)}" + (f" (scorer.memory_mb={memory_mb})" if memory_mb else "")
    except BaseException as error:  # sys.exit and CancelledError too: the task is the user's, this loop is ours
        return None, f"{FAULT[what]}: {_one_line(error)}"


def _reward(task: Task, prompt: Prompt, completion: str) -> float | tuple[float, ...]:
    """One number, or one for each turn."""
    completion = completion if isinstance(completion, Completion) else Completion(completion)
    reward: Any = task.reward(prompt, completion)
    if not isinstance(reward, (list, tuple)):
        return _number(reward)
    if len(reward) != len(completion.turns):
        raise Unusable(f"{NO_REWARD} a list of {len(reward)} numbers, but there are {len(completion.turns)} turns")
    return tuple(map(_number, reward))


def _number(reward: Any) -> float:
    if not hasattr(reward, "__float__"):
        raise Unusable(f"{NO_REWARD} {reward!r}, not a number")
    if not math.isfinite(reward):
        raise Unusable(f"{NO_REWARD} {float(reward)}")
    return float(reward)


def _observation(task: Task, prompt: Prompt, turns: Sequence[str]) -> str | list[Message] | None:
    """Raises Unusable for what cannot follow a prompt of this kind."""
    told = task.observe(prompt, turns)
    if told is None:
        return None
    if isinstance(prompt.content, str):
        if not isinstance(told, str):
            raise Unusable(f"the prompt is text, so an observation must be text: {told!r}")
        return told
    if not is_conversation(told):
        raise Unusable(f"the prompt is messages, so an observation must be a list of messages: {told!r}")
    return told


def _die_with_parent() -> None:
    """Linux ends this process with its parent, also in the middle of a reward; elsewhere the closed socket does, after it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(megabytes: int) -> None:
    """Of memory that can be written: neither of mapped data files nor of addresses that are only reserved, as CUDA does."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = megabytes << 20 if hard == resource.RLIM_INFINITY else min(megabytes << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _take_socket() -> tuple[BinaryIO, BinaryIO]:
    """Moves the protocol off file descriptors 0 and 1: what a reward prints goes to stderr, what it reads is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def _read(pipe: BinaryIO) -> bytes | None:
    """The next message; None when the parent has closed the socket."""
    head = pipe.read(LENGTH.size)
    return pipe.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(pipe: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def _one_line(error: BaseException) -> str:
    return _clip(f"{type(error).__name__}: {error}".rstrip(": "))


def _clip(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}…"


if __name__ == "__main__":
    main()
