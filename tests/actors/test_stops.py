"""Where a real engine ends a completion: stop texts, stop ids, budgets, contexts; ids, logprobs and versions keep equal lengths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from monarch_rl.engine import PromptTooLong
from monarch_rl.rendering import Renderer
from monarch_rl.tasks.tiny import BOS, EOS, PAD
from monarch_rl.types import Generation, Sampling
from tests.engines import System, started
from tests.random_models import write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

RENDERER = Renderer("tiny")
CONTEXT = 256
"""Of the random models."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """Its tokens are single characters."""
    system = await started(write_model(tmp_path_factory.mktemp("stops") / "model", "qwen3_tied"), stop_texts=True)
    await system.publish()
    yield system
    await system.engine.close()


def text_of(ids: list[int]) -> str:
    return str(RENDERER._tokenizer.decode(ids, skip_special_tokens=False))


def check(system: System, prompt: list[int], generation: Generation, temperature: float = 1.0) -> None:
    """Every id has a version and the logprob that transformers gives it."""
    ids = generation.ids_T.tolist()
    assert len(ids) == len(generation.logprobs_T) == len(generation.versions_T)
    with torch.no_grad():
        logits_TV = system.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    expected_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).numpy()
    gap_T = np.abs(generation.logprobs_T - expected_T)
    assert gap_T.max() <= 1e-4
    assert gap_T.mean() <= 5e-6


async def test_a_stop_text_keeps_the_ids_up_to_the_one_that_completes_it(system: System) -> None:
    """Texts of one and of several tokens, and special tokens among them; nothing is cut off and nothing is added."""
    prompt = [1, 2, 3]
    (free,) = await system.generate([prompt], Sampling(120), seed=7)
    ids = free.ids_T.tolist()
    for start, width in [(5, 1), (20, 2), (40, 3)]:
        wanted = text_of(ids[start : start + width])
        end = next(n for n in range(1, len(ids) + 1) if wanted in text_of(ids[:n]))
        (stopped,) = await system.generate([prompt], Sampling(120, stop=("never there", wanted)), seed=7)
        assert stopped.ids_T.tolist() == ids[:end]
        assert stopped.finish_reason == "stop"
        check(system, prompt, stopped)


async def test_a_stop_text_may_begin_in_what_was_sampled_before(system: System) -> None:
    """An episode that goes on after the loss of its replica: the text is cut in two by the joint."""
    prompt, width = [1, 2, 3], 3
    (free,) = await system.generate([prompt], Sampling(40, 0.0))
    ids = free.ids_T.tolist()
    text = text_of(ids)
    end = next(n for n in range(width, 40) if text.find(text_of(ids[n - width : n])) == len(text_of(ids[: n - width])) and n > 5)
    wanted, joint = text_of(ids[end - width : end]), end - 1
    rest = Sampling(40 - joint, 0.0, stop=(wanted,))
    (continued,) = await system.generate([[*prompt, *ids[:joint]]], replace(rest, begun=joint))
    assert (continued.ids_T.tolist(), continued.finish_reason) == ([ids[joint]], "stop")
    (anew,) = await system.generate([[*prompt, *ids[:joint]]], rest)
    assert len(anew.ids_T) > 1, "else the text would end all the same"


async def test_a_stop_text_that_ends_with_the_budget_is_a_stop(system: System) -> None:
    prompt = [1, 2, 3]
    (free,) = await system.generate([prompt], Sampling(30), seed=8)
    ids = free.ids_T.tolist()
    wanted = text_of(ids[9:12])
    end = next(n for n in range(1, 31) if wanted in text_of(ids[:n]))
    (stopped,), (cut,) = [await system.generate([prompt], Sampling(budget, stop=(wanted,)), seed=8) for budget in (end, end - 1)]
    assert (stopped.finish_reason, stopped.ids_T.tolist()) == ("stop", ids[:end])
    assert (cut.finish_reason, cut.ids_T.tolist()) == ("length", ids[: end - 1])


async def test_whatever_comes_first_ends_it(system: System) -> None:
    prompt = [4, 5]
    (free,) = await system.generate([prompt], Sampling(60), seed=9)
    ids = free.ids_T.tolist()
    wanted = text_of(ids[30:33])
    (by_id,) = await system.generate([prompt], Sampling(60, stop=(wanted,), stop_ids=(ids[3],)), seed=9)
    assert by_id.ids_T.tolist() == ids[: ids.index(ids[3]) + 1]
    assert by_id.finish_reason == "stop"


@pytest.mark.parametrize("budget", [1, 2, 50])
async def test_special_tokens_in_the_middle_of_a_prompt_are_tokens_like_others(system: System, budget: int) -> None:
    for temperature in (1.0, 0.7):
        for prompt in ([1, EOS, PAD, BOS, 5], [PAD], [EOS] * 3, [7] * (CONTEXT - budget)):
            (generation,) = await system.generate([prompt], Sampling(budget, temperature), seed=len(prompt))
            assert (len(generation.ids_T), generation.finish_reason) == (budget, "length")
            check(system, prompt, generation, temperature)


async def test_a_prompt_of_2000_tokens_is_refused_by_a_small_context_and_nobody_else_notices(system: System) -> None:
    """Case 61."""
    with pytest.raises(PromptTooLong, match=f"a prompt of 2000 tokens leaves no room in a context of {CONTEXT} tokens"):
        await system.engine.generate([1] * 2000, Sampling(8), 0)
    (generation,) = await system.generate([[1] * (CONTEXT - 1)], Sampling(8))
    assert (len(generation.ids_T), generation.finish_reason) == (1, "length")
    check(system, [1] * (CONTEXT - 1), generation)
