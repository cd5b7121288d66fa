"""Waiting for another actor: every wait has a name and a deadline that say who is waited for. And what to say when one fails."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from monarch.actor import Future

T = TypeVar("T")

LONGEST = 2000
"""Characters of an error's line: about a screen. Users' code may raise with whole documents."""


class NamedTimeout(Exception):
    """An actor did not answer in time."""

    def __init__(self, who: str, deadline_s: float) -> None:
        super().__init__(f"no answer from {who} within {deadline_s:g} s")


class Wait(NamedTuple):
    """Of this process."""

    who: str
    """is waited for: an actor, and in brackets what for"""
    for_s: float
    """so long by now"""
    deadline_s: float | None
    """None: as long as the other process gives signs of life, which the controller's watchdog sees to"""
    holding: str
    """what the waiter holds meanwhile, such as a lease"""


HOLDING: ContextVar[str] = ContextVar("HOLDING", default="")
"""What the running task holds, for those who look at its waits."""

_open: dict[object, tuple[str, float, float | None, str]] = {}
_passed: deque[Wait] = deque(maxlen=100)


@contextmanager
def waiting(who: str, deadline_s: float | None = None) -> Iterator[None]:
    """Shown among the waits of this process; a TimeoutError inside gets its name.

    Raises:
        NamedTimeout: says who did not answer.
    """
    key, holding, since = object(), HOLDING.get(), time.monotonic()
    _open[key] = who, since, deadline_s, holding
    try:
        yield
    except TimeoutError:
        if deadline_s is None:
            raise
        _passed.append(Wait(who, time.monotonic() - since, deadline_s, holding))
        raise NamedTimeout(who, deadline_s) from None
    finally:
        del _open[key]


def waits() -> tuple[list[Wait], list[Wait]]:
    """All that are open in this process, and those whose deadline has passed since this was asked last."""
    now = time.monotonic()
    passed = [_passed.popleft() for _ in range(len(_passed))]
    return [Wait(who, now - since, deadline_s, holding) for who, since, deadline_s, holding in list(_open.values())], passed


async def answer(reply: Awaitable[T], who: str, deadline_s: float | None) -> T:
    """The reply of an actor, awaited at most `deadline_s` seconds; None: as long as its process gives signs of life.

    Raises:
        NamedTimeout: says who did not answer.
    """
    with waiting(who, deadline_s):
        async with asyncio.timeout(deadline_s):  # `wait_for` of Python 3.11 is deaf to a cancellation that comes together with the answer
            return await reply


def answer_blocking(reply: Future[T], who: str, deadline_s: float) -> T:
    """`answer` for actors without an event loop."""
    with waiting(who, deadline_s):
        return reply.get(timeout=deadline_s)


async def ended(waited: asyncio.Future[Any]) -> None:
    """Wait for what is not to be cancelled with its waiter, and may fail when nobody waits any more."""
    waited.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(waited)


async def together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. The first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def root(error: BaseException) -> BaseException:
    """The innermost actor's exception, without the layers around it; of a group the first."""
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else getattr(error, "exception", None)
    return root(inner) if isinstance(inner, BaseException) else error


def cause(error: BaseException) -> str:
    """The one line of an error that matters, of at most `LONGEST` characters."""
    text = str(root(error)).strip()
    line = obituary(text) or text.partition("\n")[0] or type(root(error)).__name__
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


DEATH = re.compile(
    r"\b(?P<actor>\w+)\{[^}]{0,200}?(?P<rank>\d+)/(?P<size>\d+)\}> "
    r"(?:failed|and all its descendants have failed|has status):\s+(?P<why>.*)",
    re.DOTALL,
)
"""Monarch's report of a dead actor, in bounds that let any text be searched in a time that grows with its length alone;
e.g. `actor <root>.<actors.trainer.Trainer trainer{'rank': 1/2}> failed: …`."""
PROCESS_DIED = re.compile(r"the process this actor was running on ")
UNREACHED = re.compile(r"(?P<actor>\w{1,64})-(?P<rank>\d{1,9})<[^>\s]{1,64}>\S{1,256},proc_agent and all its descendants have failed")
"""What it reports instead on a busy host: that the process, of which this is the agent, does not answer any more."""
STILLBORN = re.compile(r'error creating proc [^{]{1,512}\{"id":"(?P<actor>\w{1,64})-(?P<rank>\d{1,9})<(?P<why>.*)', re.DOTALL)
"""And of a process that has ended before it was there; no actor of it is mourned."""
LAST_WORDS = re.compile(r"^ *([A-Za-z_][\w.]*: .*|[A-Za-z_][\w.]*)$", re.MULTILINE)
"""Lines of an indented traceback that name an exception."""


def obituary(report: str) -> str:
    """Which actor ended and why, in one line, from Monarch's report of it; empty when the text is none."""
    if found := DEATH.search(report):
        alone = found["size"] == "1"
        return f"{_who(found['actor'].removesuffix('_process'), '' if alone else found['rank'])} {_manner(found['why'])}"
    if found := UNREACHED.search(report):
        who = _who(found["actor"], "" if found["rank"] == "0" else found["rank"])
        return f"{who} is gone: its process does not answer any more"
    return stillborn(report)


def stillborn(report: str) -> str:
    """As `obituary`, where a process could not be started; empty otherwise."""
    if not (found := STILLBORN.search(report)):
        return ""
    killed = re.search(r"Killed \{ signal: (\d+)", found["why"])
    who = _who(found["actor"], "" if found["rank"] == "0" else found["rank"])
    return f"{who} {manner(-int(killed[1])) if killed else 'ended'} while it started"


def named(mesh: str, rank: int, ranks: int) -> str:
    """A process of a mesh, as obituaries have it."""
    return _who(mesh, str(rank) if ranks > 1 else "")


def manner(code: int) -> str:
    """How a process has ended: with an exit code, or by signal -`code`."""
    return f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def _who(mesh: str, rank: str) -> str:
    """`trainer 1`, or, of what is itself numbered, `generator 0, rank 1,`."""
    name = mesh.replace("_", " ")
    if not rank:
        return name
    return f"{name}, rank {rank}," if name[-1].isdigit() else f"{name} {rank}"


def _manner(why: str) -> str:
    if killed := re.search(r"Killed\(sig=(\d+)", why):
        return manner(-int(killed[1]))
    if exited := re.search(r"exited with \S* ?code (-?\d+)", why):
        return f"ended with exit code {exited[1]}"
    if "Traceback" in why and (said := LAST_WORDS.findall(why)):
        return f"failed: {said[-1]}"
    return f"ended: {why.partition(chr(10))[0]}"


class Alarm:
    """One timer of the running loop, which can be set to another moment."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, moment: float | None) -> None:
        """Ring at this time of the loop, and no more at any other; None: not at all."""
        if self._timer is not None:
            if self._timer.when() == moment:
                return
            self._timer.cancel()
        self._timer = None if moment is None else asyncio.get_running_loop().call_at(moment, self._rings)

    def _rings(self) -> None:
        self._timer = None
        self._ring()
