"""Which keys may change while a session runs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from typing import Any

from monarch_rl.config import Config, ConfigError, UserError, validate
from monarch_rl.supervise import cause
from monarch_rl.types import Sampling

CHANGEABLE = (
    "trainer.lr",
    "generator.temperature",
    "generator.max_new_tokens",
    "generator.top_k",
    "generator.top_p",
    "generator.min_p",
    "buffer.max_age",
    "eval.every",
    "eval.prompts",
    "eval.pin",
    "checkpoint.every",
    "checkpoint.keep",
    "console.rollouts_every",
)
SHORT = {key.split(".")[1]: key for key in CHANGEABLE[:7]}
"""Names for Python's keyword arguments; other keys are written with `_` for the dot, e.g. `eval_every`."""


def settle(config: Config, values: Mapping[str, Any]) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """A copy of `config` with `values`, checked as on the command line, and what each changed key was and is.

    Raises:
        ConfigError: a key that cannot change, or a value that is not allowed; the message names the keys.
    """
    names = SHORT | {key.replace(".", "_"): key for key in CHANGEABLE} | {key: key for key in CHANGEABLE}
    made, changed = copy.deepcopy(config), {}
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{name} cannot change in a running session; these can: {', '.join([*SHORT, *CHANGEABLE[len(SHORT) :]])}")
        section, field = names[name].split(".")
        changed[names[name]] = (attrgetter(names[name])(config), value)
        setattr(getattr(made, section), field, value)
    validate(made)
    if 0 in (config.buffer.max_age, made.buffer.max_age) and "buffer.max_age" in changed:
        raise ConfigError("buffer.max_age: cannot change to or from 0 in a running session: a synchronous run orders its work differently")
    if config.generator.keep_mask and Sampling.of(config.generator).truncates != Sampling.of(made.generator).truncates:
        raise ConfigError(
            "generator.top_k, top_p, min_p: cannot be switched on or off altogether in a running session: engines are built for recording "
            "sampling masks, or not"
        )
    return made, changed


async def tell(listeners: Mapping[str, Callable[[Config], Awaitable[Any]]], now: Config, was: Config) -> None:
    """Have each listener go by `now`; where one fails, or the caller is cancelled, have all that were told go by `was` again.

    Raises:
        UserError: names who failed and, if there are any, those who may go by `now` all the same.
    """
    told: list[str] = []
    try:
        for who, listener in listeners.items():
            told.append(who)  # it may have changed before its answer was lost
            await listener(now)
    except BaseException as error:
        back = await asyncio.gather(*[listeners[who](was) for who in told], return_exceptions=True)
        left = [who for who, end in zip(told, back, strict=True) if isinstance(end, BaseException)]
        if not isinstance(error, Exception):
            raise
        outcome = f"it may be changed for {', '.join(left)}, and for nobody else" if left else "nothing is changed"
        raise UserError(f"set: {told[-1]}: {cause(error)}; {outcome}") from error
