"""What the soak calls growing: a leak, and not noise, nor a process that takes what it needs."""

import numpy as np
import pytest

from benchmarks.growth import LEAST_COUNT, LEAST_MIB, Life, Trend, trend

SETTLE_S = 60.0
AT_S = np.arange(0.0, 1800.0, 5.0)


def life(values: np.ndarray, begins_s: float = 0.0) -> Life:
    return list(zip((AT_S[: len(values)] + begins_s).tolist(), values.tolist(), strict=True))


def seen(*lives: Life) -> Trend:
    found = trend(lives, SETTLE_S)
    assert found is not None
    return found


def noise(seed: int, size: float = 3.0) -> np.ndarray:
    return 500 + np.random.default_rng(seed).normal(0, size, len(AT_S))


def test_a_leak_under_noise_is_seen_and_measured() -> None:
    found = seen(life(noise(0) + AT_S / 3600 * 60))
    assert found.grows(LEAST_MIB)
    assert found.per_hour == pytest.approx(60, abs=3 * found.error)
    assert 0 < found.error < 10


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat(seed: int) -> None:
    found = seen(life(noise(seed)))
    assert not found.grows(LEAST_MIB)


def test_noise_that_is_alike_for_long_is_as_unsure_as_it_should_be() -> None:
    """Waves of ten minutes: independent points would make their slope many standard errors."""
    waves = 500 + 20 * np.sin(AT_S / 600 * 2 * np.pi)
    found = seen(life(waves))
    assert not found.grows(LEAST_MIB)
    assert found.error > 10


def test_what_a_process_takes_first_is_left_out() -> None:
    starts = 500 + np.minimum(AT_S / SETTLE_S, 1) * 300
    found = seen(life(starts))
    assert found.per_hour == pytest.approx(0, abs=1e-6)
    assert not found.grows(LEAST_MIB)


def test_lives_may_stand_at_different_heights() -> None:
    leak = AT_S[:120] / 3600 * 60
    lives = [life(noise(at, 1.0)[:120] - 100 * at + leak, 700.0 * at) for at in range(3)]
    found = seen(*lives)
    assert found.lives == 3
    assert found.per_hour == pytest.approx(60, abs=3 * found.error)
    assert found.grows(LEAST_MIB)


def test_one_more_descriptor_is_no_growth_and_one_a_minute_is() -> None:
    once, every_minute = 40 + (AT_S > 900), 40 + AT_S // 60
    flat, leak = seen(life(once)), seen(life(every_minute))
    assert not flat.grows(LEAST_COUNT)
    assert leak.grows(LEAST_COUNT)
    assert leak.per_hour == pytest.approx(60, rel=0.05)


def test_short_lives_say_nothing() -> None:
    assert trend([life(noise(0)[:20]), []], SETTLE_S) is None
