"""Between text and token ids: prompts by the model's chat template, completions back to text, and the ids that end a turn.

Works on `tokenizer.json` directly: the model class registry of transformers would bring torch (seconds and 300 MB) into
processes that never touch a tensor. Chat templates are rendered by transformers' own function, imported at the first chat prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from monarch_rl.config import UserError
from monarch_rl.model_config import ModelConfig
from monarch_rl.tasks.tiny import TINY_MODELS, tiny_path
from monarch_rl.types import Message

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
OTHER_TOKENIZERS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""What a directory may hold instead of tokenizer.json."""

TURN = "⁂turn⁂"
"""Stands for a sampled turn where only what follows it is rendered."""


class Renderer:
    """The tokenizer of one model. Raises UserError when there is no such model or it has no tokenizer.

    stop_ids – end-of-turn ids of the tokenizer, of generation_config.json and of config.json, in ascending order.
    pad_id – the tokenizer's padding id, or its first stop id where it has none.
    """

    def __init__(self, model_path: str, system_prompt: str = "", template_arguments: Mapping[str, Any] | None = None) -> None:
        """`system_prompt`, `template_arguments`: see `model.system_prompt` and `model.chat_template` in the configuration."""
        self.directory = model_directory(model_path)
        self._system_prompt = system_prompt
        self._template_arguments = dict(template_arguments or {})
        self._settings = _json(self.directory / "special_tokens_map.json") | _json(self.directory / "tokenizer_config.json")
        self._tokenizer = _load_tokenizer(self.directory)
        self._tokenizer.no_truncation()  # some files carry the settings of their last user
        self._tokenizer.no_padding()
        self.stop_ids = self._stop_ids()
        if not self.stop_ids:
            raise UserError(f"model.path: {self.directory} names no end token (eos_token in tokenizer_config.json)")
        pad = self._token_id("pad_token")
        self.pad_id = self.stop_ids[0] if pad is None else pad

    @classmethod
    def of(cls, model: ModelConfig) -> Renderer:
        return cls(model.path, model.system_prompt, model.chat_template)

    def render(self, content: str | list[Message]) -> list[int]:
        """Ids of raw text as it stands (no special tokens added), or of messages up to where the assistant's turn begins."""
        if not isinstance(content, str):
            return self._encode(self._chat(content))
        if self._system_prompt or self._template_arguments:
            raise UserError("model.system_prompt and model.chat_template are for chat messages, but the task asks in raw text")
        return self._encode(content)

    def continuation(self, content: str | list[Message], after: int) -> list[int]:
        """Ids of what an environment says, to follow a sampled turn that ended with the id `after`; the turn is not rendered again.

        Raw text stands as it is. Messages come with the template's markup, from the end of the assistant's turn (not doubled
        where `after` is that end) to where its next turn begins.

        Raises:
            UserError: the template does not show what the assistant said.
        """
        if isinstance(content, str):
            return self._encode(content)
        said = self._chat([{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}, *content])
        _, found, tail = said.partition(TURN)
        if not found:
            raise UserError(
                f"the chat template in {self.directory} leaves out what the assistant said: it cannot be continued turn by turn"
            )
        ids = self._encode(tail)
        return ids[1:] if ids[:1] == [after] else ids

    def knows(self, id: int) -> bool:
        return id >= 0 and self._tokenizer.id_to_token(id) is not None

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _chat(self, messages: list[Message]) -> str:
        if self._chat_template is None:
            raise UserError(f"the task asks in chat messages, but the tokenizer in {self.directory} has no chat template")
        for name in self._template_arguments:
            if not re.search(rf"\b{re.escape(name)}\b", self._chat_template):
                raise UserError(f"model.chat_template.{name}: the chat template in {self.directory} has no such argument")
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        specials: dict[str, Any] = {role: text for role in self._settings if role.endswith("_token") and (text := self._special(role))}
        arguments = specials | self._template_arguments
        rendered: Any = render_jinja_template([messages], chat_template=self._chat_template, add_generation_prompt=True, **arguments)
        return str(rendered[0][0])  # (texts, spans), of one conversation

    @cached_property
    def _chat_template(self) -> str | None:
        """Of chat_template.jinja, else of tokenizer_config.json, where several may be named."""
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            return next((t["template"] for t in template if t["name"] == "default"), None)
        return template

    def _stop_ids(self) -> tuple[int, ...]:
        ids = {self._token_id("eos_token")}
        for file in ("generation_config.json", "config.json"):
            named = _json(self.directory / file).get("eos_token_id")
            ids.update(named if isinstance(named, list) else [named])
        return tuple(sorted(id for id in ids if id is not None))

    def _token_id(self, role: str) -> int | None:
        token = self._special(role)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _special(self, role: str) -> str | None:
        """The text of a special token, which the file gives as a string or as an object."""
        token = self._settings.get(role)
        return token["content"] if isinstance(token, dict) else token


def local_directory(model_path: str) -> Path | None:
    """Directory behind `model.path`: of a built-in one (`tiny`) or a local one; None for what can only be a hub name.

    Raises:
        UserError: it is written like a path, and there is no such directory.
    """
    if model_path in TINY_MODELS:
        return tiny_path(model_path)
    directory = Path(model_path).expanduser()
    if directory.is_dir():
        return directory
    if model_path.startswith((".", "/", "~")) or model_path.count("/") > 1 or not model_path:
        raise UserError(f"model.path={model_path}: there is no such directory")
    return None


def model_directory(model_path: str, *, weights: bool = False) -> Path:
    """Local directory with the tokenizer and configuration of a model; those of a hub name are fetched to the hub's cache.

    Args:
        weights: fetch these too.

    Raises:
        UserError: neither here nor on the hub.
    """
    directory = local_directory(model_path)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, allow_patterns=[*TOKENIZER_FILES, *(["*.safetensors"] if weights else [])]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path={model_path}: no such directory, and the Hugging Face hub gave none: {reason}") from error


def _load_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if not any((directory / name).is_file() for name in OTHER_TOKENIZERS):
        raise UserError(f"model.path: {directory} holds no tokenizer (tokenizer.json)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory).backend_tokenizer


def _json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file: each of them is optional in a model directory."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
