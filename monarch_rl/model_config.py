"""The model's part of the configuration: what is trained, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LARGEST_LORA = 512
"""Largest rank of adapters that vLLM serves."""


@dataclass
class LoraConfig:
    rank: int = 0
    """of the adapters, which alone are trained and sent to the generators (docs/lora.md); 0 means none: all weights are trained"""
    alpha: int = 32
    """adapters are scaled by alpha / rank"""
    targets: list[str] = field(default_factory=lambda: ["all"])
    """last names of the linear layers that get one, e.g. [q_proj, v_proj]; all: every linear layer but the output layer"""


@dataclass
class ModelConfig:
    path: str = "tiny"
    """Hugging Face directory or hub name of a causal LM; `tiny` is the built-in 0.6 M Qwen3"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the generator, and of the trainer's forward and backward; the optimizer's weights are float32"""
    system_prompt: str = ""
    """first message of every chat prompt that has no system message of its own"""
    chat_template: dict[str, Any] = field(default_factory=dict)
    """arguments of the model's chat template, e.g. model.chat_template.enable_thinking=false"""
    lora: LoraConfig = field(default_factory=LoraConfig)


def mistake(model: ModelConfig) -> str:
    """What is wrong with its values, in a line that begins with the key; empty when nothing is."""
    lora = model.lora
    if lora.rank > LARGEST_LORA:
        return f"model.lora.rank: must be at most {LARGEST_LORA}, the largest that vLLM serves, got {lora.rank}"
    if not lora.targets:
        return "model.lora.targets: must name at least one linear layer; for no adapters set model.lora.rank=0"
    return ""
