"""From the settings to one loss per token: the chosen advantage, old policy, loss, corrections and aggregation put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.corrections import CORRECTIONS, PROXIMALS
from monarch_rl.algorithms.losses import AGGREGATIONS, LOSSES
from monarch_rl.config import UserError, label
from monarch_rl.trainer_config import TrainerConfig, aggregation_of, listed, nearest, unknown_argument
from monarch_rl.user_files import load_attribute

TOKENS = ("logprobs_N", "old_N", "behaviour_N", "advantages_N", "rows_N", "ages_N")
"""What a loss or a correction can ask for. Only the `logprobs_N` of a loss carry a gradient."""
REWARDS = ("rewards_PG", "turn_rewards_PGK")
"""What an advantage can ask for; NaN where there is no reward or no such turn."""
TABLES: dict[str, tuple[tuple[str, ...], Mapping[Any, Callable[..., Any]]]] = {
    "loss": (TOKENS, LOSSES),
    "advantage": (REWARDS, ADVANTAGES),
    "correction": (TOKENS, CORRECTIONS),
}


@dataclass(frozen=True)
class Bound:
    """A function of the configuration with its hyperparameters."""

    said: str
    """`key=value`, for errors"""
    function: Callable[..., Any]
    wants: tuple[str, ...]
    """the tensors that it asks for"""
    arguments: dict[str, Any]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Any:
        try:
            return self.function(**{name: tensors[name] for name in self.wants}, **self.arguments)
        except Exception as error:
            error.add_note(self.said)
            raise


class Terms(NamedTuple):
    """Of N tokens. Only `loss_N` carries a gradient."""

    loss_N: Tensor
    """Weighted: the sum over the global batch is the policy loss."""
    cut_N: Tensor
    """1 where an upper bound of the loss cuts the token off, −1 where a lower one does, else 0."""
    old_N: Tensor
    correction_N: Tensor
    """Product of the corrections."""
    weights_N: Tensor
    """Of the aggregation; in `loss_N` already."""


@dataclass(frozen=True)
class Objective:
    advantage: Bound
    loss: Bound
    corrections: list[Bound]
    proximal: str
    aggregation: str
    length_budget: int
    """Most sampled tokens of an episode, for the constant aggregation."""

    @classmethod
    def of(cls, trainer: TrainerConfig, length_budget: int = 0) -> Objective:
        """Finds the functions and tries them on a made-up batch.

        Raises:
            UserError: naming the key: no such function, unknown arguments, or a result of another shape than is asked for.
        """
        args = trainer.correction_args
        corrections = [_bind("correction", one, args, strict=False) for one in listed(trainer.correction)]
        for name in args:
            known = {known for one in corrections for known in inspect.signature(one.function).parameters} - set(TOKENS)
            if wrong := unknown_argument("trainer.correction_args", str(label(trainer.correction)), name, known):
                raise UserError(wrong)
        made = cls(
            _bind("advantage", trainer.advantage, trainer.advantage_args),
            _bind("loss", trainer.loss, trainer.loss_args),
            corrections,
            trainer.proximal,
            aggregation_of(trainer),
            length_budget,
        )
        made._try()
        return made

    def advantages(self, rewards_PG: Tensor, turn_rewards_PGK: Tensor) -> Tensor:
        """[P, G, 1] or, where turns differ, [P, G, K]; 0 for unscorable episodes and where there is no such turn."""
        made = self.advantage({"rewards_PG": rewards_PG, "turn_rewards_PGK": turn_rewards_PGK})
        if not isinstance(made, Tensor) or made.shape not in (rewards_PG.shape, turn_rewards_PGK.shape):
            shapes = f"{list(rewards_PG.shape)} or {list(turn_rewards_PGK.shape)}"
            raise UserError(f"{self.advantage.said}: must return a tensor of {shapes}, got {_shown(made)}")
        by_turn = made.dim() == 3
        made = made.where((turn_rewards_PGK if by_turn else rewards_PG).isfinite(), 0.0)
        if not made.isfinite().all():
            raise UserError(f"{self.advantage.said}: an advantage of a scorable episode is {float(made[~made.isfinite()][0])}")
        return made if by_turn else made[..., None]

    def terms(
        self,
        logprobs_N: Tensor,
        behaviour_N: Tensor,
        advantages_N: Tensor,
        rows_N: Tensor,
        ages_N: Tensor,
        *,
        total_tokens: int,
        total_episodes: int,
    ) -> Terms:
        """Of the trained tokens of whole rows; the totals are those of the global batch."""
        own_N = logprobs_N.detach()
        given = {"logprobs_N": own_N, "behaviour_N": behaviour_N, "advantages_N": advantages_N, "rows_N": rows_N, "ages_N": ages_N}
        given["old_N"] = old_N = PROXIMALS[self._proximal](own_N, behaviour_N, ages_N)
        loss_N, cut_N = self._loss(given | {"logprobs_N": logprobs_N})
        correction_N = torch.ones_like(behaviour_N)
        with torch.no_grad():
            for correction in self.corrections:
                correction_N = correction_N * _of_shape(correction, correction(given), behaviour_N)
            weights_N = AGGREGATIONS[self.aggregation](rows_N, total_tokens, total_episodes, self.length_budget)
        return Terms(loss_N * (weights_N * correction_N), cut_N, old_N, correction_N, weights_N)

    @property
    def _proximal(self) -> str:
        """What the loss's own ratio does not cover of π / μ is left to the corrections: all of it where the loss has no ratio,
        nothing where its ratio is π / μ by definition."""
        if "behaviour_N" in self.loss.wants:
            return "sampler"
        return self.proximal if "old_N" in self.loss.wants else "recomputed"

    def _loss(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        made = self.loss(tensors)
        loss_N, cut_N = made if isinstance(made, tuple) and len(made) == 2 else (made, torch.zeros_like(tensors["behaviour_N"]))
        return _of_shape(self.loss, loss_N, tensors["behaviour_N"]), _of_shape(self.loss, cut_N, tensors["behaviour_N"])

    def _try(self) -> None:
        """On two prompts with two episodes of three tokens each: a mistake of the user's shows before anything is started."""
        rewards_PG = torch.tensor([[1.0, 0.0], [0.5, 0.25]], dtype=torch.float64)
        advantages_PGK = self.advantages(rewards_PG, rewards_PG[..., None].clone())
        rows_N, ages_N = torch.arange(4).repeat_interleave(3), torch.tensor([0, 0, 1] * 4)
        logprobs_N = torch.linspace(-1, -0.1, 12).requires_grad_()
        advantages_N = advantages_PGK.flatten().float()[rows_N]
        terms = self.terms(logprobs_N, torch.full((12,), -0.5), advantages_N, rows_N, ages_N, total_tokens=12, total_episodes=4)
        if not terms.loss_N.requires_grad:
            raise UserError(f"{self.loss.said}: its loss does not depend on logprobs_N")


def _bind(kind: str, chosen: Any, args: Mapping[str, Any], *, strict: bool = True) -> Bound:
    """`strict`: every argument must be known; else those that are not are left out."""
    names, table = TABLES[kind]
    key = f"trainer.{kind}"
    said = f"{key}={label(chosen)}"
    function = chosen if callable(chosen) else table[chosen] if chosen in table else load_attribute(key, chosen)
    if not callable(function):
        raise UserError(f"{said}: is {function!r}, not a function")
    parameters = inspect.signature(function).parameters
    free = [name for name in parameters if name not in names]
    if strict:
        for name in args:
            if wrong := unknown_argument(f"{key}_args", label(chosen), name, free):
                raise UserError(wrong)
    for name in free:
        if name not in args and parameters[name].default is inspect.Parameter.empty:
            hint = nearest(name, names)
            raise UserError(f"{said}: parameter {name!r} is neither one of {', '.join(names)} nor has it a value in {key}_args{hint}")
    return Bound(said, function, tuple(name for name in parameters if name in names), {n: args[n] for n in free if n in args})


def _of_shape(by: Bound, made: Any, like_N: Tensor) -> Tensor:
    if not isinstance(made, Tensor) or made.shape != like_N.shape:
        raise UserError(f"{by.said}: must return one number per token, a tensor of {list(like_N.shape)}, got {_shown(made)}")
    return made


def _shown(made: Any) -> str:
    return f"a tensor of {list(made.shape)}" if isinstance(made, Tensor) else f"{made!r:.60}"
