"""What is said of generators beside their figures."""

from __future__ import annotations

from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.records import too_slow


def test_a_generator_that_is_too_slow_is_named_each_time_that_a_version_is_kept_for_it() -> None:
    def reports(**times: int) -> list[GeneratorReport]:
        return [GeneratorReport(int(name[1:]), rejected=3 * n, too_slow=n) for name, n in times.items()]

    assert too_slow([], reports(g0=0)) == []
    (said,) = too_slow(reports(g0=0), reports(g0=0, g1=1))
    assert said.startswith("generator 1 is too slow for the weights: its pulls are written over while it reads (3 so far)")
    assert too_slow(reports(g0=0, g1=1), reports(g0=0, g1=1)) == []
    assert len(too_slow(reports(g0=0, g1=1), reports(g0=1, g1=2))) == 2
