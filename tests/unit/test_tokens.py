"""What was sampled is what is trained, id by id, with its own logprob and version: text is made from ids, never ids from text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from monarch_rl.packing import collate
from monarch_rl.rendering import Renderer
from monarch_rl.trajectory import Trajectory
from monarch_rl.types import NOT_SAMPLED, Episode, Generation, Version

END, THINK = "<|end|>", "<|think|>"
TEXTS = [
    "hello",
    "héllo wörld",
    "👩‍👩‍👧‍👦🇺🇳",
    "日本語 и кириллица",
    "שלום\u200f ‮abc",
    "tab\tnew\r\nline  two",
    "e\u0301 \u0000 \ufffd",
    " ",
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Byte-level BPE with a few merges, so that most characters are several tokens. Its padding is its end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["hello hello he llo"] * 3, trainers.BpeTrainer(vocab_size=262, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(THINK, special=True)])
    folder: Path = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "pad_token": END}))
    return Renderer(str(folder))


def generation(ids: list[int], first: float = -1.0, step: int = 0, reason: str = "stop") -> Generation:
    """Each token with a logprob of its own."""
    logprobs_T = (first - np.arange(len(ids)) / 1000).astype(np.float32)
    return Generation(np.array(ids, np.int32), logprobs_T, np.full(len(ids), Version(0, step).pack()), reason)  # type: ignore[arg-type]


def rolled(renderer: Renderer, prompt: list[int], *turns: list[int], told: list[int] | None = None) -> Episode:
    """The episode that the rollout worker makes of these turns, with `told` between them."""
    trajectory = Trajectory(prompt)
    for n, ids in enumerate(turns):
        if n:
            trajectory.append_told(told or [], renderer.decode(told or []))
        trajectory.append_sampled(generation(ids, first=-1.0 - n, step=n), renderer.decode(ids))
    episode = trajectory.episode(renderer.decode(trajectory.new_ids), 1.0)
    episode.reward = 1.0
    return episode


def check(episode: Episode, prompt: list[int], sampled: list[int]) -> None:
    """Equal lengths, and in the trainer's batch exactly the sampled ids, each predicted from what precedes it."""
    length = len(episode.ids_T)
    assert {len(x) for x in (episode.ids_T, episode.loss_mask_T, episode.logprobs_T, episode.versions_T)} == {length}
    assert list(episode.ids_T[: len(prompt)]) == prompt
    assert list(episode.ids_T[episode.loss_mask_T]) == sampled
    assert (episode.logprobs_T[~episode.loss_mask_T] == 0).all()
    assert (episode.versions_T[~episode.loss_mask_T] == NOT_SAMPLED).all()
    longer = Episode(*(np.concatenate([x, x]) for x in (episode.ids_T, episode.loss_mask_T, episode.logprobs_T, episode.versions_T)))
    batch = collate([episode, longer])  # the other row has no reward: all padding, as far as the loss goes
    assert list(batch.targets_N) == sampled
    np.testing.assert_array_equal(batch.logprobs_N, episode.logprobs_T[episode.loss_mask_T])
    np.testing.assert_array_equal(batch.versions_N, episode.versions_T[episode.loss_mask_T])
    rows_N, columns_N = np.unravel_index(batch.positions_N, batch.inputs_BT.shape)
    assert not rows_N.any()
    np.testing.assert_array_equal(columns_N + 1, np.flatnonzero(episode.loss_mask_T))
    np.testing.assert_array_equal(batch.inputs_BT[0, : length - 1], episode.ids_T[:-1])


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_of_any_script_in_any_split(renderer: Renderer, text: str) -> None:
    """Case 56: sampled byte by byte, or cut within a character, the ids stay what they were."""
    prompt, canonical = renderer.render("go"), renderer.render(text)
    single = [renderer._tokenizer.token_to_id(_BYTES[byte]) for byte in text.encode()]
    assert renderer.decode(single) == renderer.decode(canonical) == text
    for sampled in (canonical, single, single[:-1], [*single, *renderer.render(END)]):
        check(rolled(renderer, prompt, sampled), prompt, sampled)
    check(rolled(renderer, prompt, single[:1], single[1:], told=renderer.render("é")), prompt, single)


def _byte_symbols() -> dict[int, str]:
    """GPT-2's names of bytes: those that print are themselves, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTES = _byte_symbols()


def test_what_decodes_alike_stays_apart(renderer: Renderer) -> None:
    """Case 56: `he` + `llo` is not turned into `hello`; half a character keeps its ids, though its text has lost them."""
    vocabulary = renderer._tokenizer.get_vocab()
    split = [vocabulary["he"], vocabulary["llo"]]
    assert renderer.render("hello") != split
    assert renderer.decode(split) == "hello"
    check(rolled(renderer, [5], split), [5], split)
    half = renderer.render("😀")[:2]
    assert renderer.render(renderer.decode(half)) != half
    check(rolled(renderer, [5], half, half, told=renderer.render("😀")), [5], half + half)


def test_special_tokens_in_the_middle_are_tokens_like_others(renderer: Renderer) -> None:
    """They are not in the text, so encoding that again would lose them."""
    (end,), (think,) = renderer.render(END), renderer.render(THINK)
    sampled = [think, *renderer.render("a"), end, *renderer.render("b"), think]
    episode = rolled(renderer, [5], sampled)
    assert episode.text == "ab"
    check(episode, [5], sampled)


def test_the_first_end_token_is_trained_and_padding_is_not_though_they_are_one_id(renderer: Renderer) -> None:
    """Case 59."""
    end = renderer.pad_id
    assert renderer.stop_ids == (end,)
    short, long = rolled(renderer, [5], [7, end]), rolled(renderer, [5, 6], [7, 8, 9, 10, end])
    batch = collate([short, long])
    assert list(batch.targets_N) == [7, end, 7, 8, 9, 10, end]
    assert list(batch.rows_N) == [0] * 2 + [1] * 5


@pytest.mark.parametrize("sampled", [[], [7], [7, 8]], ids=len)
def test_a_stop_without_an_end_token_adds_none(renderer: Renderer, sampled: list[int]) -> None:
    """Of an empty completion there is nothing to train, and its neighbour does not notice."""
    episode = rolled(renderer, [5, 6], sampled)
    assert list(episode.ids_T) == [5, 6, *sampled]
    check(episode, [5, 6], sampled)
    assert list(collate([episode, rolled(renderer, [5], [9])]).targets_N) == [*sampled, 9]


def test_a_long_prompt_is_whole(renderer: Renderer) -> None:
    """Case 61: nothing is cut from 2,000 tokens; the engine refuses them in a smaller context (tests/actors/test_engine.py)."""
    prompt = renderer.render("x" * 2000)
    assert len(prompt) == 2000
    check(rolled(renderer, prompt, [7, 8]), prompt, [7, 8])


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 263), min_size=1, max_size=5),
    turns=st.lists(st.lists(st.integers(0, 263), max_size=6), min_size=1, max_size=4),
    told=st.lists(st.integers(0, 263), max_size=3),
)
def test_any_ids_in_any_turns(renderer: Renderer, prompt: list[int], turns: list[list[int]], told: list[int]) -> None:
    episode = rolled(renderer, prompt, *turns, told=told)
    check(episode, prompt, [id for ids in turns for id in ids])
    assert len(episode.ids_T) == len(prompt) + sum(map(len, turns)) + len(told) * (len(turns) - 1)
    steps = [Version.unpack(int(v)).step for v in episode.versions_T[episode.loss_mask_T]]
    assert steps == [n for n, ids in enumerate(turns) for _ in ids]
