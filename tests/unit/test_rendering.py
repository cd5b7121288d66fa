"""Rendering: the same ids as transformers' own tokenizer, end-of-turn ids from every file that may hold them, clear refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import UserError
from monarch_rl.rendering import Renderer, model_directory
from monarch_rl.tasks.tiny import EOS, PAD, tiny_path
from monarch_rl.types import Message

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES: list[Message] = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "#4"}, {"role": "user", "content": "why"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model's directory, to change."""
    shutil.copytree(tiny_path(), tmp_path / "model")
    return tmp_path / "model"


def update(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_text_goes_to_ids_and_back_without_special_tokens() -> None:
    renderer = Renderer("tiny")
    ids = renderer.render("4+7+2=")
    assert len(ids) == 6
    assert renderer.decode([*ids, EOS, PAD]) == "4+7+2="
    assert renderer.render("") == []
    assert renderer.decode([]) == ""


def test_ids_are_those_of_transformers(model: Path) -> None:
    from transformers import AutoTokenizer

    (model / "chat_template.jinja").write_text(TEMPLATE)
    renderer, reference = Renderer(str(model)), AutoTokenizer.from_pretrained(model)
    text = "#13; a\nb é"
    assert renderer.render(text) == reference.encode(text, add_special_tokens=False)
    chat = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert renderer.render(MESSAGES) == list(chat)
    assert renderer.decode(chat) == reference.decode(chat, skip_special_tokens=True)


def test_a_template_in_the_settings_is_found(model: Path) -> None:
    update(model / "tokenizer_config.json", chat_template=TEMPLATE)
    single = Renderer(str(model)).render(MESSAGES)
    update(model / "tokenizer_config.json", chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}])
    assert Renderer(str(model)).render(MESSAGES) == single
    assert len(single) > 10


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(UserError, match=r"tiny_qwen3 has no chat template"):
        Renderer("tiny").render(MESSAGES)


def test_every_named_end_token_stops(model: Path) -> None:
    assert Renderer("tiny").stop_ids == (EOS,)
    update(model / "generation_config.json", eos_token_id=[EOS, 7])
    update(model / "config.json", eos_token_id=9)
    update(model / "tokenizer_config.json", eos_token={"content": "a"})
    renderer = Renderer(str(model))
    assert renderer.stop_ids == tuple(sorted({EOS, 7, 9, *renderer.render("a")}))


def test_padding_falls_back_to_an_end_token(model: Path) -> None:
    assert Renderer("tiny").pad_id == PAD
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Renderer(str(model)).pad_id == EOS


def test_truncation_left_in_the_file_is_not_applied(model: Path) -> None:
    """Case 61: an overlong prompt must be seen in its full length, and counted, not cut in silence."""
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    update(model / "tokenizer.json", truncation=cut)
    assert len(Renderer(str(model)).render("1+1+1+1+1=")) == 10


def test_a_directory_without_a_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"model holds no tokenizer"):
        Renderer(str(model))


def test_an_older_tokenizer_format_is_read(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    alphabet = {token: id for id, token in enumerate(["a", "b", "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(alphabet))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": GPT2Tokenizer.__name__, "eos_token": "<|endoftext|>"}))
    renderer = Renderer(str(tmp_path))
    assert renderer.render("aba") == [2, 0]
    assert renderer.stop_ids == (3,)


def test_a_model_without_an_end_token_is_refused(model: Path) -> None:
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (model / file).write_text("{}")
    with pytest.raises(UserError, match="names no end token"):
        Renderer(str(model))


@pytest.mark.parametrize("path", ["./none", "/none/at/all", "~/none", "a/b/c"])
def test_a_missing_directory_is_named(path: str) -> None:
    with pytest.raises(UserError, match=f"model.path={path}: there is no such directory"):
        model_directory(path)


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "not a name!"])
def test_a_hub_name_that_cannot_be_had_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"model.path={name}: no such directory, and the Hugging Face hub gave none") as caught:
        model_directory(name)
    assert "\n" not in str(caught.value)


def test_rendering_text_imports_neither_torch_nor_transformers() -> None:
    use = "from monarch_rl.rendering import Renderer; Renderer('tiny').render('1+1=')"
    program = f"import sys; {use}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
