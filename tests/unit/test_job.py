"""How a run that is interrupted ends, in a process of its own; with whole systems in tests/e2e/test_closing.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

from monarch_rl import checkpoint
from monarch_rl.config import UserError
from monarch_rl.job import failed
from monarch_rl.lives import Progress
from monarch_rl.meshes import ActorDied

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
SAVING = """
import asyncio, sys
from pathlib import Path
from monarch_rl.config import Config
from monarch_rl.job import Interrupt

class Session:
    worth_saving = True
    class version: step = 3
    async def stop(self):
        BLOCK
        return Path("runs/x/checkpoints/step_3")

interrupt = Interrupt(Config(output_dir="runs/x", close_deadline_s=DEADLINE))

async def main():
    interrupt.watch(Session())
    async with interrupt.saves(Session()):
        print("ready", flush=True)
        await asyncio.sleep(60)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("closed", flush=True)
    sys.exit(interrupt.tell())
"""
LAST = "error: interrupted; what was written is in runs/x\n"
NOTHING = ", and nothing was saved: {}; what was written is in runs/x"


def started(deadline_s: float, block: str, *before: str, program: str = STUCK) -> subprocess.Popen[str]:
    program = program.replace("DEADLINE", str(deadline_s)).replace("BLOCK", block)
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


@pytest.mark.parametrize(
    ("deadline_s", "stop", "last"),
    [
        (60, "pass", " after step 3: resume=latest goes on from runs/x/checkpoints/step_3"),
        (60, "return None", "; what was written is in runs/x"),
        (1, "await asyncio.sleep(60)", NOTHING.format("step and checkpoint took more than 0.5 s (of close_deadline_s=1)")),
        (60, "raise OSError('/x: No space left')", NOTHING.format("/x: No space left")),
    ],
    ids=["saved", "no step", "too late", "cannot be saved"],
)
def test_the_last_line_tells_what_was_saved(deadline_s: float, stop: str, last: str) -> None:
    process = started(deadline_s, stop, program=SAVING)
    process.send_signal(SIGTERM)
    out, err = process.communicate(timeout=30)
    assert out == f"closing after the step in progress and a checkpoint (at most {deadline_s:g} s; once more to close without)\nclosed\n"
    assert (err, process.returncode) == (f"error: interrupted{last}\n", 143)


def test_a_second_signal_closes_without_a_checkpoint() -> None:
    process = started(60, "await asyncio.sleep(60)", program=SAVING)
    assert process.stdout is not None
    for said in ("closing after", "closing (at most 10 s; once more to end at once)"):
        process.send_signal(SIGINT)
        assert process.stdout.readline().startswith(said)
    # Not `communicate`: it would miss what the lines above have read ahead.
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(30)
    assert out == "closed\n"
    assert err == f"error: interrupted{NOTHING.format('it was interrupted again')}\n"
    assert process.returncode == 130


def test_a_failure_names_the_checkpoint_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a mistake of the user's does not: it would be made again."""
    log = f" (whole story in {tmp_path}/error.log)\n"
    died = ActorDied("replay buffer was killed")
    assert failed(died, tmp_path) == 1
    assert capsys.readouterr().err == f"error: replay buffer was killed{log}"
    folder = checkpoint.folder_of(tmp_path, 4)
    checkpoint.unfinished(folder).mkdir(parents=True)
    checkpoint.complete(folder, Progress(4, 32, {}), keep=1)
    assert failed(died, tmp_path) == 1
    said = f"error: replay buffer was killed; resume=latest goes on from {folder}, what came after it is lost{log}"
    assert capsys.readouterr().err == said
    assert failed(UserError("a wrong setting"), tmp_path) == 2
    assert capsys.readouterr().err == f"error: a wrong setting{log}"
