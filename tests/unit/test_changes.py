from __future__ import annotations

from typing import Any

import pytest

from monarch_rl.changes import settle
from monarch_rl.config import Config, ConfigError


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
