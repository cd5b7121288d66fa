"""Rewards → advantages. P groups of G episodes; everything is float64.

An advantage is a function of `rewards_PG` or of `turn_rewards_PGK` (it asks by the name of its parameter) and returns [P, G], one
for all tokens of an episode, or [P, G, K], one for each turn. Parameters after `*` are hyperparameters (`trainer.advantage_args`).

NaN (any value that is not finite) marks an unscorable episode: it is left out of every mean and gets advantage 0. Where there
is nothing to compare (all rewards equal, one scorable episode, none) it is exactly 0; no result is NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monarch_rl.trainer_config import AdvantageName


def mean(rewards_PG: Tensor) -> Tensor:
    """A = R − mean(R). Liu et al. 2025, "Understanding R1-Zero-Like Training" (2503.20783), Dr. GRPO."""
    return _centred(rewards_PG)


def grpo(rewards_PG: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """A = (R − mean(R)) / (std(R) + ε), std unbiased, ε as in TRL. Shao et al. 2024, "DeepSeekMath" (2402.03300), section 4.1.2.

    For g scorable episodes |A| ≤ (g − 1) / √g, whatever the rewards.
    """
    centred_PG = _centred(rewards_PG)
    variance_P1 = centred_PG.square().sum(-1, keepdim=True) / (_count(rewards_PG) - 1).clamp(min=1)
    return centred_PG / (variance_P1.sqrt() + epsilon)


def rloo(rewards_PG: Tensor) -> Tensor:
    """A_i = R_i − mean_{j≠i}(R_j) = g / (g − 1) · (R_i − mean(R)). Ahmadian et al. 2024, "Back to Basics" (2402.14740), RLOO.

    For g scorable episodes |A| ≤ max(R) − min(R).
    """
    count_P1 = _count(rewards_PG)
    return _centred(rewards_PG) * count_P1 / (count_P1 - 1).clamp(min=1)


def batch_norm(rewards_PG: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """A = (R − mean(R)) / (std_batch(R) + ε): mean of the group, unbiased std of all rewards. "Lite PPO" (2508.08221), section 4.1."""
    return _centred(rewards_PG) / (_batch_std(rewards_PG) + epsilon)


def reinforce_pp(rewards_PG: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """A = (R − mean_batch(R)) / (std_batch(R) + ε), both over all episodes. Hu et al. 2025, "REINFORCE++" (2501.03262).

    No group is needed, and one whose rewards are all equal is learned from too.
    """
    whole_1N = rewards_PG.reshape(1, -1)
    return (_centred(whole_1N) / (_batch_std(whole_1N) + epsilon)).reshape(rewards_PG.shape)


def reinforce_pp_baseline(rewards_PG: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """A = B / (std_batch(B) + ε), B = R − mean(R) of the group. REINFORCE++ (2501.03262), with baseline.

    The paper also subtracts the batch mean of B; it is 0, since the B of each group add up to 0.
    """
    centred_PG = _centred(rewards_PG)
    return centred_PG / (_batch_std(centred_PG.where(rewards_PG.isfinite(), torch.nan)) + epsilon)


def reward_to_go(turn_rewards_PGK: Tensor) -> Tensor:
    """A_k = S_k − mean_j(S_{j, min(k, last turn of j)}), S_k = Σ_{l≥k} r_l: what turn k and later ones earned, less the group's mean.

    Tokens of turn k get A_k (Sutton et al. 2000, policy gradient theorem). An episode that is over stands at its last turn, so that
    rewards that come at the end alone give A = R − mean(R) for every turn. Zero beyond an episode's last turn.
    """
    there_PGK = turn_rewards_PGK.isfinite()
    to_go_PGK = turn_rewards_PGK.where(there_PGK, 0.0).flip(-1).cumsum(-1).flip(-1)
    last_PG1 = (there_PGK.sum(-1, keepdim=True) - 1).clamp(min=0)
    to_go_PGK = torch.where(there_PGK, to_go_PGK, to_go_PGK.gather(-1, last_PG1))
    known_PG1 = there_PGK.any(-1, keepdim=True)
    centred_PKG = _centred(to_go_PGK.where(known_PG1, torch.nan).transpose(-1, -2))
    return centred_PKG.transpose(-1, -2) * there_PGK


def _count(rewards_PG: Tensor) -> Tensor:
    return rewards_PG.isfinite().sum(-1, keepdim=True)


def _centred(rewards_PG: Tensor) -> Tensor:
    """Rewards less the mean of the scorable ones; 0 where unscorable, and exactly 0 where all of a group are equal."""
    known_PG = rewards_PG.isfinite()
    rewards_PG = rewards_PG.double().where(known_PG, torch.nan)
    highest_P1 = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
    lowest_P1 = rewards_PG.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
    return torch.where(known_PG & (highest_P1 > lowest_P1), rewards_PG - rewards_PG.nanmean(-1, keepdim=True), 0.0)


def _batch_std(rewards_PG: Tensor) -> Tensor:
    """Unbiased, over all scorable episodes; from differences to the mean, which do not cancel as E[R²] − E[R]² does."""
    whole_1N = rewards_PG.reshape(1, -1)
    return (_centred(whole_1N).square().sum() / (_count(whole_1N) - 1).clamp(min=1)).sqrt()


ADVANTAGES: dict[AdvantageName, Callable[..., Tensor]] = {
    "mean": mean,
    "dr_grpo": mean,
    "grpo": grpo,
    "rloo": rloo,
    "batch_norm": batch_norm,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reward_to_go": reward_to_go,
}
