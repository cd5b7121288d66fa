"""How a run that is interrupted ends, in a process of its own; with whole systems in tests/e2e/test_closing.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

STUCK = """
import asyncio, time
from monarch_rl.config import Config
from monarch_rl.job import Interrupt

class Session:
    def close_console(self): print("the terminal is free", flush=True)

async def main():
    Interrupt(Config(output_dir="runs/x", close_deadline_s=DEADLINE)).watch(Session())
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        BLOCK

asyncio.run(main())
"""
LAST = "error: interrupted; what was written is in runs/x\n"


def started(deadline_s: float, block: str, *before: str) -> subprocess.Popen[str]:
    program = STUCK.replace("DEADLINE", str(deadline_s)).replace("BLOCK", block)
    process = subprocess.Popen([*before, sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(SIGINT, 130), (SIGTERM, 143), (SIGHUP, 129)])
def test_a_close_that_does_not_end_is_ended_at_its_deadline_with_the_last_line(number: signal.Signals, code: int) -> None:
    """Even where the event loop is what hangs."""
    process = started(0.2, "time.sleep(60)")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert out == "closing (at most 0.2 s; once more to end at once)\nthe terminal is free\n"
    assert err == LAST
    assert process.returncode == code


def test_a_second_signal_ends_at_once_with_the_last_line() -> None:
    process = started(60, "await asyncio.sleep(60)")
    process.send_signal(SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("closing")
    process.send_signal(SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (err, process.returncode) == (LAST, 143)


def test_nohup_means_it() -> None:
    process = started(60, "return", "nohup")
    process.send_signal(SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out.startswith("closing")
