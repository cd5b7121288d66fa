from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch_rl.changes import settle, tell
from monarch_rl.config import Config, ConfigError, UserError


def test_short_and_long_names_change_a_copy() -> None:
    config = Config()
    made, changed = settle(config, {"lr": 1e-5, "eval_every": 3, "buffer.max_age": 4})
    assert (made.trainer.lr, made.eval.every, made.buffer.max_age) == (1e-5, 3, 4)
    assert changed == {"trainer.lr": (3e-4, 1e-5), "eval.every": (10, 3), "buffer.max_age": (2, 4)}
    assert config == Config()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"group_size": 4},
            r"^group_size cannot change in a running session; these can: lr, temperature, max_new_tokens, top_k, top_p, min_p, max_age, ",
        ),
        ({"lr": 0.0}, r"^trainer\.lr: must be a finite number above 0"),
        ({"temperature": "hot"}, r"^generator\.temperature: must be a number"),
        ({"max_age": 0}, r"^buffer\.max_age: cannot change to or from 0"),
        ({"top_p": 0.9}, r"^generator\.top_k, top_p, min_p: cannot be switched on or off altogether"),
    ],
)
def test_a_refusal_names_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(Config(), values)


def test_what_leaves_ids_out_may_change_as_long_as_something_does() -> None:
    config = Config()
    config.generator.top_k = 5
    made, _ = settle(config, {"top_k": 0, "min_p": 0.1})
    assert (made.generator.top_k, made.generator.min_p) == (0, 0.1)
    with pytest.raises(ConfigError, match=r"^generator\.top_k, top_p, min_p"):
        settle(config, {"top_k": 0})
    config.generator.keep_mask = False
    settle(config, {"top_k": 0})


def test_rules_between_keys_hold() -> None:
    config = Config()
    config.weights.every = 3
    with pytest.raises(ConfigError, match=r"weights\.every=3 would stall generation at buffer\.max_age=1"):
        settle(config, {"max_age": 1})


class Listeners:
    """Three that remember the learning rate they were told last; `deaf` ones fail from that call on."""

    def __init__(self, **deaf: int) -> None:
        self.lr = {"trainers": 1.0, "replay buffer": 1.0, "rollout workers": 1.0}
        self._calls, self._deaf = dict.fromkeys(self.lr, 0), deaf

    def __call__(self) -> dict[str, Any]:
        return {who: self._listener(who) for who in self.lr}

    def _listener(self, who: str) -> Any:
        async def listener(config: Config) -> None:
            self._calls[who] += 1
            if self._calls[who] >= self._deaf.get(who.replace(" ", "_"), 99):
                raise TimeoutError(f"no answer from {who}")
            self.lr[who] = config.trainer.lr

        return listener


def at(lr: float) -> Config:
    config = Config()
    config.trainer.lr = lr
    return config


async def test_all_are_told() -> None:
    listeners = Listeners()
    await tell(listeners(), at(2.0), at(1.0))
    assert set(listeners.lr.values()) == {2.0}


async def test_where_one_fails_the_others_are_told_to_go_back() -> None:
    listeners = Listeners(replay_buffer=1)
    with pytest.raises(
        UserError, match=r"^set: replay buffer: no answer from replay buffer; it may be changed for replay buffer, and for nobody else$"
    ):
        await tell(listeners(), at(2.0), at(1.0))
    assert set(listeners.lr.values()) == {1.0}


async def test_one_that_answers_again_is_back_too() -> None:
    class Once(Listeners):
        def _listener(self, who: str) -> Any:
            plain = super()._listener(who)

            async def listener(config: Config) -> None:
                await plain(config)
                if who == "rollout workers" and config.trainer.lr == 2.0:
                    raise TimeoutError("the answer was lost")

            return listener

    listeners = Once()
    with pytest.raises(UserError, match=r"^set: rollout workers: the answer was lost; nothing is changed$"):
        await tell(listeners(), at(2.0), at(1.0))
    assert set(listeners.lr.values()) == {1.0}


async def test_a_cell_that_is_interrupted_leaves_all_as_they_were() -> None:
    listeners, begun = Listeners(), asyncio.Event()

    async def never(config: Config) -> None:
        if config.trainer.lr == 2.0:
            begun.set()
            await asyncio.Event().wait()

    telling = asyncio.create_task(tell(listeners() | {"slow": never}, at(2.0), at(1.0)))
    await begun.wait()
    assert set(listeners.lr.values()) == {2.0}
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert set(listeners.lr.values()) == {1.0}
