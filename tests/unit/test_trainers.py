"""What becomes of those who deal with trainers that are lost and start again; they are no processes here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl import trainers as module
from monarch_rl.config import Config
from monarch_rl.loop import TrainerRestarted
from monarch_rl.pool import for_ever
from monarch_rl.running import Running
from monarch_rl.trainers import Trainers
from tests.replies import Reply

DIED = "trainer was killed"


class Meshes:
    """Of trainers that are asked nothing."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str]

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(spawn=lambda *_: SimpleNamespace())

    def heed(self, name: str) -> asyncio.Future[str]:
        self.died = asyncio.get_running_loop().create_future()
        return self.died

    async def renew(self, name: str) -> None:
        pass


async def lost(folder: Path) -> tuple[Trainers, Meshes]:
    """Trainers of which one has died, and that were started again."""
    config, meshes = Config(output_dir=str(folder)), Meshes()
    config.checkpoint.every = 1
    trainers = Trainers(config, meshes, None, 0)  # type: ignore[arg-type]
    trainers.watch()
    trainers._until_stuck = for_ever  # type: ignore[method-assign]
    meshes.died.set_result(DIED)
    assert await trainers.lost() == DIED
    await trainers.renew(DIED)
    return trainers, meshes


async def test_what_goes_wrong_with_those_that_start_again_is_no_death(tmp_path: Path) -> None:
    """A checkpoint that cannot be read would have the run wait for news of a death for ever."""
    trainers, meshes = await lost(tmp_path)
    damaged = OSError("the checkpoint is damaged")
    assert await trainers.are_lost(damaged), "others wait until they are started again"
    assert not await trainers.one_died(damaged)
    meshes.died.set_result(DIED)
    assert await trainers.one_died(damaged)


async def test_a_process_that_ends_before_it_is_there_is_a_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of which nobody hears but those who ask."""
    monkeypatch.setattr(module, "REASON_S", 0.01)
    trainers, _ = await lost(tmp_path)
    status = '{"Failed":"proc \'trainer-0<7E>@…\' failed to configure process: Ready(Terminal(Killed { signal: 9, core_dumped: false }))"}'
    agent = "host_agent.service@ipc://@Wb<hyperactor_mesh::host_mesh::host_agent::HostAgent>"
    error = f'error creating proc (host rank 0) on host mesh agent {agent}, state: {{"id":"trainer-0<7E>","status":{status},"state":null}}'
    assert await trainers.one_died(ValueError(error))
    assert await trainers.lost() == "trainer was killed by signal 9 (SIGKILL) while it started"


async def test_nothing_is_asked_of_trainers_before_they_know_where_to_go_on(tmp_path: Path) -> None:
    """A step would have them wait for a batch that the replay buffer does not give to their lineage yet, and hold up their own restart."""
    trainers, _ = await lost(tmp_path)
    asked: list[str | int] = []
    heard = asyncio.Event()

    def call(what: str | int) -> Any:
        asked.append(what)
        heard.set()
        return Reply()

    trainers.ranks = SimpleNamespace(step=SimpleNamespace(call=call))
    running = Running(trainers._config)
    running._trainers, running._keeper = trainers, asyncio.create_task(for_ever())  # type: ignore[assignment]
    stepping = asyncio.create_task(running._step(1))
    asking = asyncio.create_task(running._ask_trainers(lambda ranks: call("a question"), "a question"))
    await asyncio.wait({stepping, asking}, timeout=0.1)
    assert asked == []
    trainers.are_renewed()
    with pytest.raises(TrainerRestarted):
        await asyncio.wait_for(stepping, 10)
    await asyncio.wait_for(heard.wait(), 10)
    assert asked == ["a question"]
    asking.cancel()
    running._keeper.cancel()
