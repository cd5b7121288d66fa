"""Who waits for whom, in all processes of a run: shown when a deadline passes and when a user asks, and acted upon when one is silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from monarch_rl.clocks import lane
from monarch_rl.supervise import Wait, waits
from monarch_rl.tables import Table

if TYPE_CHECKING:
    from actors.process import Process

LOOK_S = 5.0
"""Between two looks, and as long each process has to answer, which takes it milliseconds."""
LOOKS = 4
"""So many in a row, at least, find a hung process silent."""
LATE = 0.9
"""Of its deadline: a wait for so long is shown with all others, as long as there is something to be seen."""
SHOWN = 4
"""Of what a waiter holds."""


class Look(NamedTuple):
    """At all processes of a run, by the names that the timeline has for them."""

    waits: list[tuple[str, Wait]]
    passed: list[tuple[str, Wait]]
    """Whose deadline has passed since the look before."""
    silent: list[str]
    """Meshes of which a process has given no answer."""


async def look(processes: Mapping[str, Process], answer_s: float = LOOK_S) -> Look:
    """Ask them all, and the controller, which is this process."""

    async def ask(name: str, process: Process) -> list[tuple[str, tuple[list[Wait], list[Wait]]]] | None:
        try:
            async with asyncio.timeout(answer_s):
                replies = await process.waits.call().as_asyncio()
        except Exception:  # silent, or dead: whoever watches over it sees to that
            return None
        return [(lane(name, rank), told) for rank, told in enumerate(replies.values())]

    own = [("controller", waits())]
    answers = await asyncio.gather(*[ask(name, process) for name, process in processes.items()])
    told = own + [each for found in answers for each in found or []]
    return Look(
        waits=[(name, wait) for name, (open_now, _) in told for wait in open_now],
        passed=[(name, wait) for name, (_, passed) in told for wait in passed],
        silent=[name for name, found in zip(processes, answers, strict=True) if found is None],
    )


def table(seen: Look) -> Table:
    """Waits for the same thing are one row; the longest are first."""
    together: dict[tuple[str, str], list[Wait]] = {}
    for name, wait in seen.waits:
        together.setdefault((name, wait.who), []).append(wait)
    rows = sorted(((name, who, alike) for (name, who), alike in together.items()), key=lambda row: -max(w.for_s for w in row[2]))
    return Table(
        "who waits for whom",
        ("who", "waits for", "times", "for", "at most", "holding"),
        [
            (name, who, len(alike), f"{max(w.for_s for w in alike):.1f} s", _deadline(alike[0]), _listed(w.holding for w in alike))
            for name, who, alike in rows
        ],
        ", ".join(f"{name} gives no sign of life" for name in seen.silent),
    )


def line(name: str, wait: Wait) -> str:
    """A wait whose deadline has passed, or soon will."""
    return f"{name} has waited {wait.for_s:.0f} s (at most {wait.deadline_s:g} s) for {wait.who}" + (
        f", holding {wait.holding}" if wait.holding else ""
    )


class Watchdog:
    """Looks again and again.

    Args:
        processes: of the run, by mesh.
        say: what to show.
        hung: told of a mesh of which a process has been silent for `silent_s`, so that no wait for it would end.
    """

    def __init__(
        self,
        processes: Callable[[], Mapping[str, Process]],
        say: Callable[[str], None],
        hung: Callable[[str], None],
        silent_s: float,
    ) -> None:
        self._processes, self._say, self._hung = processes, say, hung
        self._every_s = min(LOOK_S, silent_s / LOOKS)
        self._looks = round(silent_s / self._every_s)
        self._silent = Counter[str]()
        self._late: set[tuple[str, str, str]] = set()

    async def watch(self) -> None:
        """For ever. Looks are counted, not seconds: the controller may have been stopped itself."""
        while True:
            pause = asyncio.create_task(asyncio.sleep(self._every_s))
            self.judge(await look(self._processes(), self._every_s))
            await pause

    def judge(self, seen: Look) -> None:
        """Show what is late, and tell of those that have been silent for too long."""
        self._silent = Counter({name: self._silent[name] + 1 for name in seen.silent})
        hung = [name for name, looks in self._silent.items() if looks == self._looks]
        late = {(name, w.who, w.holding): w for name, w in seen.waits if w.deadline_s is not None and w.for_s >= LATE * w.deadline_s}
        new = [(key[0], wait) for key, wait in late.items() if key not in self._late]
        self._late = set(late)
        for each in [*seen.passed, *new]:
            self._say(line(*each))
        if new or hung:
            self._say(repr(table(seen)))
        for name in hung:
            self._hung(name)


def _deadline(wait: Wait) -> str:
    return "–" if wait.deadline_s is None else f"{wait.deadline_s:g} s"


def _listed(held: Iterable[str]) -> str:
    names = sorted({name for name in held if name})
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
