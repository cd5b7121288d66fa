"""Log-probabilities: the mismatch of sampler and trainer."""

from __future__ import annotations

import math

import pytest
import torch

from monarch_rl.algorithms.logprobs import mismatch_kl


def test_mismatch_kl_is_accurate_for_tiny_differences() -> None:
    delta = torch.tensor([0.0, 2e-6, -2e-6, 0.5, -0.5])
    expected = [0.0, 2e-12, 2e-12, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5]
    assert mismatch_kl(delta, torch.zeros(5)).tolist() == pytest.approx(expected, rel=0.06, abs=0)
    assert (mismatch_kl(delta, torch.zeros(5)) >= 0).all()
