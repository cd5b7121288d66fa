"""A program for `test_attach.py`: trains on two workers, is joined by a third, scales up onto it and down again.

Arguments: output folder, three addresses. Ends with a failed assertion where something is not as it should be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from monarch_rl.configure import load
from monarch_rl.output import make_output_dir
from monarch_rl.session import Session
from tests.e2e.jobs import SMALL

DEADLINE_S = 120.0


async def main(folder: Path, *addresses: str) -> None:
    hosts = f"cluster.hosts=[{','.join(addresses[:2])}]"
    config = load([*SMALL, "profile=cpu", "steps=2000", "eval.every=0", "cluster.kind=attach", hosts, f"output_dir={folder}"]).config
    make_output_dir(config)
    async with Session(config) as session:
        training = asyncio.create_task(session.train())

        async def until(reached: Callable[[], bool]) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not reached():
                    assert not training.done(), training.exception()
                    await asyncio.sleep(0.05)

        await until(lambda: session.version.step >= 2)
        assert await session.add_hosts(addresses[2]) == [2]
        await session.scale(generators=2)
        assert session._meshes._placed["generator_1"].hosts == (2,)
        joined = session.version.step

        def follows_and_samples() -> bool:
            (_, held, _, sampled, *_) = session.generators.rows[1]
            return held > joined and sampled > 0

        await until(follows_and_samples)
        await session.scale(generators=1)
        drained = session.version.step
        await until(lambda: session.version.step >= drained + 2)
        training.cancel()
        await asyncio.wait({training})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
