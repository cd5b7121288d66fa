"""What tests of several files look at, and what is shown beside a test that failed."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.e2e.jobs import LOGS, MAIN, Job, command, said, started

SHOWN = 60
"""Last lines of each file."""


@pytest.fixture(scope="session")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A short run of `recipe=grpo_qwen` as a user starts it, with a tracker; what `watch` said of it is in `watch.out`."""
    home = tmp_path_factory.mktemp("main")
    with started(home, *MAIN, "trackers=[tensorboard]") as job:
        job.until_steps(0)
        watching = command("watch", "job", cwd=home)
        assert job.wait() == 0
        code, out, err = said(watching)
    assert (code, err) == (0, "")
    (home / "watch.out").write_text(out)
    return job


@pytest.fixture(autouse=True, scope="module")
def logs_of_this_module() -> None:
    LOGS.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With what the latest runs of the module said last."""
    report = yield
    if report.failed:
        for log in filter(lambda log: log.is_file(), LOGS):
            lines = log.read_text(errors="replace").splitlines()[-SHOWN:]
            report.sections.append((f"end of {log}", "\n".join(lines)))
    return report
