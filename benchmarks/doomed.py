"""A generator that is killed between two decode steps, and leaves word of what is lost with it."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

from monarch.actor import concurrent_endpoint

from actors.generator import Generator
from monarch_rl.engine import Engine

LEAVE_S = 0.02
"""For what was told before to leave the process."""


class Doomed(Generator):
    @concurrent_endpoint
    async def die(self, word: Path) -> None:
        """Ends as by `kill -9`; no answer comes."""
        await self._engine._ask(partial(_die, word))


def _die(word: Path, engine: Engine) -> None:
    """Writes when, and of each episode that was not answered how many tokens were sampled, and how many of these no burst had told of."""
    requests = engine._requests.values()
    sampled = [len(request.state.detokenizer.output_token_ids) for request in requests]
    untold = [tokens - request.tokens for tokens, request in zip(sampled, requests, strict=True)]
    for call in {id(request.call): request.call for request in requests}.values():  # whose other episodes have ended
        for index, output in call.outputs.items():
            sampled.append(len(output.outputs[0].token_ids))
            untold.append(0 if index in call.told else sampled[-1] % engine._bursts._every)  # there is a burst every so many steps
    time.sleep(LEAVE_S)
    draft = word.with_suffix(".draft")
    draft.write_text(json.dumps({"at": time.time(), "sampled": sampled, "untold": untold}))
    draft.rename(word)
    os.kill(os.getpid(), signal.SIGKILL)
