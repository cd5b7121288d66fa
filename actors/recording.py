"""Recording: in the place of the replay buffer, gives the trainers the groups of a recorded run again.

Owns: nothing; reads `record/step_N.npz` as it is asked for them.
Promises: the shards of a step are those of the recorded run, where `trainer.ranks` and `trainer.tokens_per_microbatch` are.
Called by: trainer ranks (`take`, `trained`), the controller (the rest). May be blocked by: the file system.
"""

from __future__ import annotations

from pathlib import Path

from monarch.actor import Actor, endpoint

from monarch_rl.config import Config
from monarch_rl.groups import figures, make_shards
from monarch_rl.ledger import Ledger
from monarch_rl.lives import Holdings
from monarch_rl.recorded import read
from monarch_rl.trainer_config import trains_dead_groups
from monarch_rl.types import Group, Shard

FIGURES_KEPT = 256
"""Steps whose figures can still be asked for."""


class Recording(Actor):
    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = Path(config.replay)
        self._groups: list[Group] = []
        self._shards: dict[int, Shard] = {}
        self._figures: dict[int, dict[str, float]] = {}

    @endpoint
    async def take(self, step: int, rank: int, lineage: int = 0) -> Shard | None:
        """The shard of `rank` of step `step`; None: the recorded run did not go so far."""
        if rank not in self._shards:
            found = read(self._folder, step)
            if found is None:
                return None
            trainer = self._config.trainer
            groups, then = found
            self._groups, self._figures[step] = groups, figures(step, groups, [], then)
            self._figures.pop(step - FIGURES_KEPT, None)
            dead_too = trains_dead_groups(trainer)
            shards = make_shards(groups, step, trainer.ranks, trainer.tokens_per_microbatch, dead_too=dead_too, lineage=then)
            self._shards = dict(enumerate(shards))
        return self._shards.pop(rank)

    @endpoint
    async def trained(self, step: int, lineage: int = 0) -> None: ...

    @endpoint
    async def stats(self, step: int) -> dict[str, float]:
        """Of a step that was taken, not too long ago."""
        return self._figures[step]

    @endpoint
    async def samples(self, k: int) -> list[Group]:
        """Of the step that was taken last, at most `k` groups."""
        return self._groups[-k:] if k > 0 else []

    @endpoint
    async def holdings(self) -> Holdings:
        """Nothing is held here."""
        return Ledger(prompts_per_step=self._config.buffer.prompts_per_step, max_age=0).holdings()

    @endpoint
    async def close(self) -> None: ...
