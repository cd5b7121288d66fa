"""Whether something grows: the slope of samples over time, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BIN_S = 30.0
"""Samples so close together are one mean."""
LEAST_BINS = 4
"""Of a life that counts."""
SURE = 3.0
"""Standard errors that a slope must be above 0."""
LEAST_COUNT, LEAST_MIB = 2.5, 4.0
"""Growth over the time that was seen, below which nothing can be told: a thread pool or an allocator takes single steps for long."""

Life = Sequence[tuple[float, float]]
"""Of one process: seconds, and what was found then."""


@dataclass(frozen=True)
class Trend:
    """A straight line through the lives of one kind of process: one slope, and a height of its own for each."""

    lives: int
    """that were long enough"""
    hours: float
    """of the longest"""
    level: float
    """mean of the last bins"""
    per_hour: float
    error: float
    """standard error of `per_hour`"""

    def grows(self, least: float) -> bool:
        """By no less than `least` over the longest life, beyond noise."""
        return self.per_hour > SURE * self.error and self.per_hour * self.hours >= least


def trend(lives: Iterable[Life], settle_s: float) -> Trend | None:
    """None where no life is long enough once its first `settle_s` are left out, in which a process takes what it goes on to need.

    Neighbours in time are alike: the standard error of independent points is widened by the correlation of the residuals of one bin
    with the next (as of an autoregression of first order, with Kendall's correction for few points).
    """
    binned = [bins for life in lives if len(bins := _bins(life, settle_s)) >= LEAST_BINS]
    if not binned:
        return None
    x, y = (np.concatenate([bins[:, at] - bins[:, at].mean() for bins in binned]) for at in (0, 1))
    slope = float(x @ y / (x @ x))
    residuals = y - slope * x
    free = len(x) - len(binned) - 1
    alone = float(np.sqrt(residuals @ residuals / free / (x @ x)))
    rho = _correlation(residuals, [len(bins) for bins in binned])
    hours = max(float(bins[-1, 0] - bins[0, 0]) for bins in binned)
    level = float(np.mean([bins[-1, 1] for bins in binned]))
    return Trend(len(binned), hours, level, slope, alone * float(np.sqrt((1 + rho) / (1 - rho))))


def _bins(life: Life, settle_s: float) -> NDArray[np.float64]:
    """Rows of (hours, mean)."""
    samples = np.array(life, np.float64).reshape(-1, 2)
    kept = samples[samples[:, 0] >= samples[0, 0] + settle_s] if len(samples) else samples
    numbers = np.floor(kept[:, 0] / BIN_S)
    means = [kept[numbers == number].mean(axis=0) for number in np.unique(numbers)]
    return np.array(means).reshape(-1, 2) / (3600.0, 1.0)


def _correlation(residuals: NDArray[np.float64], lengths: list[int]) -> float:
    """Of neighbours within a life, corrected for what a fitted line takes out of it; below 1."""
    parts = np.split(residuals, np.cumsum(lengths)[:-1])
    total = float(residuals @ residuals)
    if total == 0.0:
        return 0.0
    found = sum(float(part[1:] @ part[:-1]) for part in parts) / total
    return float(np.clip(found + (2 + 4 * found) / len(residuals), 0.0, 0.99))
