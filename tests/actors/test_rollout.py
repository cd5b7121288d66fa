"""The rollout worker with a real scorer, a scripted generator and a stand-in for the buffer: turns, masks, budgets, failures."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, this_host

from actors.rollout import RolloutWorker
from actors.scorer import Scorer
from monarch_rl.config import Config
from monarch_rl.groups import make_shards
from monarch_rl.packing import collate, trained_mask
from monarch_rl.rendering import Renderer
from monarch_rl.tasks.tiny import BOS, EOS, tiny_path
from monarch_rl.types import NOT_SAMPLED, Episode, Group, Prompt, Version
from tests.actors.rollout_actors import Desk, ScriptedGenerator

RENDERER = Renderer("tiny")
USER_FILE = '''
import asyncio, os, time
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt

class Talk(Task):
    """Does what the turn says, else answers `<n>` to the nth turn until one ends in a full stop."""
    name = "talk"
    truncated_reward = 0.0

    def prompt(self, ordinal, split):
        return Prompt(ordinal, "go", answer="secret")

    def observe(self, prompt, turns):
        assert prompt.answer == "secret"
        word = turns[-1]
        if word == "raise": raise ValueError("no such tool")
        if word == "cancel": raise asyncio.CancelledError
        if word == "leave": os._exit(3)
        if word == "sleep": time.sleep(1e6)
        if word == "number": return 7
        return None if word.endswith(".") else f"<{len(turns)}>"

    def reward(self, prompt, completion):
        if "judge" in completion: raise ValueError("no verdict")
        if "pid" in completion: return os.getpid()
        if "slay" in completion: os.kill(os.getppid(), 9)
        if "kill" in completion and not os.path.exists(flag := __file__ + ".killed"):
            open(flag, "w").close()
            os.kill(os.getppid(), 9)
        return float(len(completion.turns)) + len(completion) / 100

class Chat(Talk):
    def observe(self, prompt, turns):
        told = super().observe(prompt, turns)
        return told and [{"role": "tool", "content": told}]
'''
CHAT_TEMPLATE = (
    "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}){% endfor %}{% if add_generation_prompt %}(a:{% endif %}"
)


def said(text: str) -> list[int]:
    return [*RENDERER.render(text), EOS]


class Rig:
    """One worker and what it talks to."""

    def __init__(
        self,
        mesh: Any,
        task: str,
        script: dict[str, Any],
        prompt: Prompt,
        max_new_tokens: int,
        scorers: list[Any],
        config: Config,
        deadline_s: float,
    ) -> None:
        config.task = task
        config.generator.max_new_tokens = max_new_tokens
        config.generator.group_size = len(next(iter(script.values())))
        self.generator = mesh.spawn("generator", ScriptedGenerator, script)
        self.desk = mesh.spawn("desk", Desk, [prompt])
        self.scorers = {at: on.spawn(f"scorer_{at}", Scorer, task, {}, 0, deadline_s) for at, on in enumerate(scorers)}
        self.worker = mesh.spawn("worker", RolloutWorker, config, 0, self.desk, {0: self.generator}, self.scorers)

    async def group(self) -> Group:
        (done,) = await self.work()
        assert isinstance(done, Group), done
        return done

    async def work(self) -> list[Group | str]:
        telling = [asyncio.create_task(self._tell_when_lost(at, scorer)) for at, scorer in self.scorers.items()]
        await asyncio.wait_for(self.worker.work.call_one().as_asyncio(), 100)
        for task in telling:
            task.cancel()
        done: list[Group | str] = await self.desk.done.call_one()
        return done

    async def _tell_when_lost(self, at: int, scorer: Any) -> None:
        """As the controller does."""
        with contextlib.suppress(SupervisionError):
            await scorer.until_lost.call_one()
        await self.worker.lose_scorer.call_one(at)

    async def asked(self) -> Any:
        return await self.generator.asked.call_one()


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Any]:
    (tmp_path / "talk.py").write_text(USER_FILE)
    meshes = []

    def build(script: dict[str, Any], max_new_tokens: int = 40, **changed: Any) -> Rig:
        meshes.append(mesh := this_host().spawn_procs({"workers": 1}))
        task, config = changed.get("task", f"{tmp_path}/talk.py:Talk"), Config()
        config.model.path, config.generator.truncated = changed.get("model", "tiny"), changed.get("truncated", "keep")
        config.rollout.max_attempts = changed.get("max_attempts", 3)
        prompt = Prompt(3, changed.get("content", next(iter(script))), answer=changed.get("answer", "secret"))
        scorers = [mesh] * changed.get("scorers", 1)
        if changed.get("apart"):
            scorers = [this_host().spawn_procs({"workers": 1}) for _ in scorers]
            meshes.extend(scorers)
        return Rig(mesh, task, script, prompt, max_new_tokens, scorers, config, changed.get("deadline_s", 60.0))

    yield build
    for mesh in meshes:
        await mesh.stop()


def sampled(episode: Episode) -> list[int]:
    return list(episode.ids_T[episode.loss_mask_T])


async def test_a_conversation_continues_the_sampled_ids(rig: Any) -> None:
    """Case 56: ids that do not survive decoding and encoding are what the next turn is given, and what is trained."""
    first = [*RENDERER.render("h"), BOS, *RENDERER.render("i"), EOS]  # BOS is not in the text
    talk = rig({"go": [first, said("no.")], "gohi<1>": [said("bye.")]})
    group = await talk.group()
    (_, prompts) = [ids for ids, *_ in await talk.asked()]
    assert prompts == [*RENDERER.render("go"), *first, *RENDERER.render("<1>")]
    long, short = group.episodes
    assert list(long.ids_T) == [*prompts, *said("bye.")]
    assert (long.text, short.text) == ("hi<1>bye.", "no.")
    assert (long.transcript, short.transcript) == ("hi⟨<1>⟩bye.", "")
    assert (long.reward, short.reward) == (2.09, 1.03)


async def test_only_what_the_model_wrote_is_trained_each_end_of_turn_included(rig: Any) -> None:
    """Cases 54 and 59: all three turns are trained, with their end tokens; prompt and observations are not."""
    talk = rig({"go": [said("a"), said("no.")], "goa<1>": [said("bc")], "goa<1>bc<2>": [said("d.")]})
    episode = (await talk.group()).episodes[0]
    assert sampled(episode) == [*said("a"), *said("bc"), *said("d.")]
    assert episode.turn_tokens == [2, 3, 3]
    told = ~episode.loss_mask_T
    assert RENDERER.decode(episode.ids_T[told]) == "go<1><2>"
    assert (episode.versions_T[told] == NOT_SAMPLED).all()
    assert (episode.logprobs_T[told] == 0).all()
    assert (episode.logprobs_T[~told] <= -1).all()
    assert [Version.unpack(int(v)).step for v in episode.versions_T[~told]] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert trained_mask(episode).sum() == 8
    batch = collate([episode])
    assert list(batch.targets_N) == sampled(episode)
    assert set(batch.rows_N) == {0}, "one advantage per episode reaches every turn"


async def test_the_token_budget_is_of_all_turns_together(rig: Any) -> None:
    """Case 32: what earlier turns have used up is gone; observations cost nothing."""
    talk = rig({"go": [said("abc"), said("no.")], "goabc<1>": [said("de")], "goabc<1>de<2>": [said("fghijk.")]}, max_new_tokens=10)
    episode = (await talk.group()).episodes[0]
    assert [sampling.max_new_tokens for _, sampling, *_ in await talk.asked()] == [10, 6, 3]
    assert episode.sampled_tokens == 10
    assert episode.truncated
    assert (episode.text, episode.reward) == ("abc<1>de<2>fgh", 0.0)


@pytest.mark.parametrize(
    ("rule", "reward", "trained", "tokens"), [("keep", 0.0, True, 8), ("mask", 0.0, False, 4), ("drop", None, True, 4)]
)
async def test_what_truncated_episodes_do_is_a_setting(rig: Any, rule: str, reward: float | None, trained: bool, tokens: int) -> None:
    """Case 49. mask: out of the loss and its denominators, in the baseline; drop: out of the baseline too."""
    talk = rig({"go": [said("ab."), said("abcdef."), said("b.")]}, max_new_tokens=4, truncated=rule)
    group = await talk.group()
    whole, cut, other = group.episodes
    assert (whole.truncated, whole.reward, whole.trained) == (False, 1.03, True)
    assert (cut.truncated, cut.reward, cut.trained) == (True, reward, trained)
    assert cut.error == ("truncated (generator.truncated=drop)" if rule == "drop" else None)
    (shard,) = make_shards([group], 9, 1, 64)
    assert (shard.total_tokens, shard.total_episodes) == (tokens + other.sampled_tokens, 3 if rule == "keep" else 2)
    assert len(shard.episodes) == shard.total_episodes
    assert np.isfinite(shard.rewards_PG).sum() == (2 if rule == "drop" else 3)


async def test_a_budget_that_ends_with_a_turn(rig: Any) -> None:
    """Over by itself: not truncated. With an environment that would go on: truncated, and its words are left out."""
    talk = rig({"go": [said("ab."), said("abc")]}, max_new_tokens=4)
    over, cut = (await talk.group()).episodes
    assert (over.truncated, over.reward) == (False, 1.03)
    assert (cut.truncated, cut.reward, cut.text) == (True, 0.0, "abc")


async def test_a_context_that_ends_truncates_the_episode(rig: Any) -> None:
    """Case 61: only of the first turn does it mean that the prompt is too long."""
    talk = rig({"go": [said("a"), said("b")], "goa<1>": "too long", "gob<1>": [said("c.")]})
    cut, whole = (await talk.group()).episodes
    assert (cut.truncated, cut.text, cut.reward) == (True, "a", 0.0)
    assert (whole.truncated, whole.text) == (False, "b<1>c.")
    assert await rig({"go": "too long"}).work() == ["dropped: no room"]


async def test_a_prompt_that_no_attempt_can_use_is_not_tried_again(rig: Any) -> None:
    assert await rig({"go": "unusable"}).work() == ["dropped: no token"]


async def test_held_out_prompts_that_are_none_are_named(rig: Any, tmp_path: Path) -> None:
    """The prompt of an evaluation is made by the worker."""
    (tmp_path / "talk.py").write_text(USER_FILE.replace('Prompt(ordinal, "go", answer="secret")', "None if ordinal else Prompt(0, 'go')"))
    talk = rig({"go": [said("no.")]})
    with pytest.raises(ActorError, match="task talk: prompt 1 is None, not a Prompt"):
        await talk.worker.evaluate.call_one(range(2), 0)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("raise", "ObserveError: ValueError: no such tool"),
        ("cancel", "ObserveError: CancelledError"),
        ("leave", "ObserveError: the reward's process died (exit code 3)"),
        ("sleep", "deadline of 3 s passed"),
        ("number", "ObserveError: the prompt is text, so an observation must be text: 7"),
        ("judge.", "RewardError: ValueError: no verdict"),
    ],
)
async def test_an_environment_that_fails_costs_only_its_episode(rig: Any, word: str, error: str) -> None:
    """Cases 20 and 21."""
    slow = {"deadline_s": 3.0} if word == "sleep" else {}
    talk = rig({"go": [said("a"), said(word), said("b.")], "goa<1>": [said("c.")]}, **slow)
    fine, failed, short = (await talk.group()).episodes
    assert (failed.reward, failed.error) == (None, error)
    assert not trained_mask(failed).any()
    assert (fine.reward, short.reward) == (2.06, 1.02)
    assert fine.error is short.error is None


async def test_each_turn_has_a_seed_of_its_own_and_the_same_one_again(rig: Any) -> None:
    """Case 63."""
    script = {"go": [said("a"), said("a")], "goa<1>": [said("b")], "goa<1>b<2>": [said("c.")]}
    runs = []
    for _ in range(2):
        talk = rig(script)
        await talk.group()
        runs.append(sorted(seed for _, _, seeds, _ in await talk.asked() for seed in seeds))
    assert len(set(runs[0])) == 6
    assert runs[0] == runs[1]


async def test_the_first_turns_of_a_group_are_one_message_and_all_turns_keep_the_gate(rig: Any) -> None:
    talk = rig({"go": [said("a"), said("b")], "goa<1>": [said("c.")], "gob<1>": [said("d.")]})
    await talk.group()
    asked = await talk.asked()
    assert [len(seeds) for _, _, seeds, _ in asked] == [2, 1, 1]
    assert {min_step for *_, min_step in asked} == {5}


async def test_the_calculator_is_asked(rig: Any) -> None:
    answered = "12*7+5=[12*7]84"
    script = {"12*7+5=": [said("[12*7]"), said("#88")], answered: [said("[84+5]")], f"{answered}[84+5]89": [said("#89")]}
    asked, direct = (await rig(script, task="calculator", answer=89).group()).episodes
    assert (asked.text, asked.reward) == ("[12*7]84[84+5]89#89", 1.0)
    assert RENDERER.decode(asked.ids_T[~asked.loss_mask_T]) == "12*7+5=8489"
    assert (direct.text, direct.reward) == ("#88", 0.0)


@pytest.mark.parametrize(("scorers", "used"), [(1, 1), (2, 2), (4, 3)])
async def test_the_episodes_of_a_group_are_judged_side_by_side(rig: Any, scorers: int, used: int) -> None:
    """Where rewards wait, a group takes as long as one of them, if there are scorers enough."""
    episodes = (await rig({"go": [said("pid."), said("pid."), said("pid.")]}, scorers=scorers).group()).episodes
    assert len({episode.reward for episode in episodes}) == used


@pytest.mark.parametrize("scorers", [1, 2])
async def test_what_a_scorer_was_asked_when_it_died_is_asked_of_another(rig: Any, scorers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 19: of one that is there, or of one that comes; here the reward itself kills it, once."""
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", lambda failure: None)
    talk = rig({"go": [said("kill."), said("no.")]}, scorers=scorers, apart=True)
    working = asyncio.create_task(talk.group())
    if scorers == 1:
        await asyncio.wait({working}, timeout=1)
        assert not working.done()
        await talk.worker.add_scorer.call_one(7, rig({"go": []}, apart=True).scorers[0])
    killer, other = (await working).episodes
    assert (killer.reward, other.reward) == (1.05, 1.03)
    assert killer.error is other.error is None


async def test_a_prompt_that_ends_whoever_scores_it_is_given_up(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", lambda failure: None)
    talk = rig({"go": [said("slay."), said("no.")]}, scorers=2, apart=True, max_attempts=2)
    (done,) = await talk.work()
    assert done in [f"lost: scorer {n}, scorer {1 - n} were lost while working on it (rollout.max_attempts=2)" for n in (0, 1)]


async def test_a_conversation_in_chat_follows_the_template(rig: Any, tmp_path: Path) -> None:
    """Case 59: the end of the assistant's turn is the sampled one, once, and it is trained."""
    shutil.copytree(tiny_path(), model := tmp_path / "chat")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    asked, told = "(u:hi)(a:", "(u:hi)(a:x)(t:<1>)(a:"
    content = [{"role": "user", "content": "hi"}]
    talk = rig({asked: [said("x"), said("no.")], told: [said("y.")]}, task=f"{tmp_path}/talk.py:Chat", model=str(model), content=content)
    episode = (await talk.group()).episodes[0]
    whole = [*content, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "<1>"}]
    assert list(episode.ids_T) == [*Renderer(str(model)).render(whole), *said("y.")]
    assert sampled(episode) == [*said("x"), *said("y.")]
    assert (episode.text, episode.reward) == ("x)(t:<1>)(a:y.", 2.14)
