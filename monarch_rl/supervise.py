"""Waiting for another actor: every wait has a name and a deadline that say who is waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from monarch.actor import Future

T = TypeVar("T")


class NamedTimeout(Exception):
    """An actor did not answer in time."""

    def __init__(self, who: str, deadline_s: float) -> None:
        super().__init__(f"no answer from {who} within {deadline_s:g} s")


async def answer(reply: Future[T], who: str, deadline_s: float) -> T:
    """The reply of an actor, awaited at most `deadline_s` seconds.

    Raises:
        NamedTimeout: says who did not answer.
    """
    try:
        return await asyncio.wait_for(reply.as_asyncio(), deadline_s)
    except TimeoutError:
        raise NamedTimeout(who, deadline_s) from None


def answer_blocking(reply: Future[T], who: str, deadline_s: float) -> T:
    """`answer` for actors without an event loop."""
    try:
        return reply.get(timeout=deadline_s)
    except TimeoutError:
        raise NamedTimeout(who, deadline_s) from None


def cause(error: BaseException) -> str:
    """The one line of an error that matters: the innermost actor's exception, without the layers around it."""
    while (inner := getattr(error, "exception", None)) is not None and isinstance(inner, BaseException):
        error = inner
    if isinstance(error, BaseExceptionGroup):
        return cause(error.exceptions[0])
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
