"""Rendering: the same ids as transformers' own tokenizer, end-of-turn ids from every file that may hold them, clear refusals."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import UserError
from monarch_rl.model_config import ModelConfig
from monarch_rl.rendering import Renderer, model_directory
from monarch_rl.tasks.tiny import EOS, PAD, tiny_path
from monarch_rl.types import Message

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "<|im_end|>"
MESSAGES: list[Message] = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "#4"}, {"role": "user", "content": "why"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model's directory, to change."""
    shutil.copytree(tiny_path(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single characters with Qwen3's special tokens and chat template, and both its end-of-turn ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    tokenizer = Tokenizer(models.WordLevel({c: id for id, c in enumerate(["<unk>", *characters])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = qwen3_template()
    fast.save_pretrained(folder := tmp_path_factory.mktemp("qwen3"))
    ends = fast.convert_tokens_to_ids([END, "<|endoftext|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def qwen3_template() -> str:
    """Of MiniCPM-V 4.5, a Qwen3, as vLLM carries it; less its first line and its last `if`, which are its differences to Qwen3's own."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("needs vllm's copy of the template")
    text = (Path(vllm.origin).parent / "transformers_utils/chat_templates/template_minicpmv45.jinja").read_text()
    first, text = text.split("\n", 1)
    text, own, end = text.partition("    {%- if enable_thinking is defined and enable_thinking is true %}")
    assert "default(false)" in first
    assert own
    return text + end.partition("{%- endif %}\n")[2]


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


# ---------------------------------------------------------------- Qwen3's template

QUESTION: list[Message] = [{"role": "user", "content": "2+2=?"}]
ASKED = "<|im_start|>user\n2+2=?<|im_end|>\n<|im_start|>assistant\n"


def text_of(renderer: Renderer, ids: list[int]) -> str:
    """With special tokens."""
    return renderer._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("thinking", "tail"), [(None, ""), (True, ""), (False, "<think>\n\n</think>\n\n")])
def test_the_thinking_switch_of_qwen3(qwen3: Path, thinking: bool | None, tail: str) -> None:
    """https://huggingface.co/Qwen/Qwen3-0.6B: `enable_thinking=False` puts an empty thought before the answer."""
    renderer = Renderer(str(qwen3), template_arguments={} if thinking is None else {"enable_thinking": thinking})
    assert text_of(renderer, renderer.render(QUESTION)) == ASKED + tail
    assert len(renderer.stop_ids) == 2


def test_a_system_prompt_comes_first_unless_there_is_one(qwen3: Path) -> None:
    renderer = Renderer.of(ModelConfig(path=str(qwen3), system_prompt="Be brief."))
    assert text_of(renderer, renderer.render(QUESTION)) == f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}"
    own: list[Message] = [{"role": "system", "content": "Be long."}, *QUESTION]
    assert text_of(renderer, renderer.render(own)) == f"<|im_start|>system\nBe long.<|im_end|>\n{ASKED}"


def test_what_raw_text_and_the_template_cannot_use_is_refused(qwen3: Path) -> None:
    """Case 68: an argument that the template does not look at would change nothing in silence."""
    with pytest.raises(UserError, match=r"model.chat_template.enable_thinkin: the chat template in .*qwen3.* has no such argument"):
        Renderer(str(qwen3), template_arguments={"enable_thinkin": False}).render(QUESTION)
    for settings in ({"system_prompt": "Be brief."}, {"template_arguments": {"enable_thinking": False}}):
        with pytest.raises(UserError, match="the task asks in raw text"):
            Renderer(str(qwen3), **settings).render("2+2=")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "middle"),
    [
        ([{"role": "user", "content": "sure?"}], "<|im_start|>user\nsure?<|im_end|>\n"),
        ([{"role": "tool", "content": "4"}], "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"),
        (
            [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}],
            "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n",
        ),
    ],
)
def test_what_follows_a_sampled_turn_is_rendered_alone(qwen3: Path, told: list[Message], middle: str) -> None:
    """Case 56. The turn's end token was sampled and stays; the template's own is not added to it."""
    renderer = Renderer(str(qwen3), template_arguments={"enable_thinking": False})
    (end,) = renderer._encode(END)
    ids = renderer.continuation(told, after=end)
    assert text_of(renderer, ids) == f"\n{middle}<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_turn_that_ended_otherwise_is_ended_as_the_template_does(qwen3: Path) -> None:
    renderer = Renderer(str(qwen3))
    other = max(renderer.stop_ids, key=lambda id: text_of(renderer, [id]) == "<|endoftext|>")
    ids = renderer.continuation([{"role": "user", "content": "?"}], after=other)
    assert text_of(renderer, ids) == f"{END}\n<|im_start|>user\n?{END}\n<|im_start|>assistant\n"


def test_a_continued_conversation_is_what_the_template_makes_of_the_whole(qwen3: Path) -> None:
    renderer = Renderer(str(qwen3))
    turn, told = "#4", [{"role": "user", "content": "sure?"}]
    (end,) = renderer._encode(END)
    step_by_step = renderer.render(QUESTION) + renderer._encode(turn) + [end] + renderer.continuation(told, after=end)
    assert step_by_step == renderer.render([*QUESTION, {"role": "assistant", "content": turn}, *told])


def test_text_follows_text_as_it_is() -> None:
    renderer = Renderer("tiny")
    assert renderer.continuation("84", after=EOS) == renderer.render("84")


def test_a_template_that_hides_the_assistant_cannot_be_continued(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="leaves out what the assistant said"):
        Renderer(str(model)).continuation([{"role": "user", "content": "?"}], after=EOS)
