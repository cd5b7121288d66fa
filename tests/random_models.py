"""Tiny random models of several architectures, written as the Hugging Face directories that a user would name in `model.path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from monarch_rl.tasks.tiny import BOS, EOS, PAD, tiny_path

VOCABULARY = 98
"""Of the built-in tiny model, whose tokenizer these share; vLLM pads it to 128."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},  # q, k and v have biases
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    "qwen3_untied": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 5,  # uneven over two ranks
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}

OWN_LOADER: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True, "n_positions": 256},  # transposed
    "mixtral": {  # experts by other names
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}
"""Of which vLLM's loader does more than copy."""


def write_model(path: Path, shape: str, seed: int = 0) -> Path:
    """Every weight random, biases and norms too, and large enough for a distribution that is far from uniform."""
    config = AutoConfig.for_model(
        **(SHAPES | OWN_LOADER)[shape],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_path()).save_pretrained(path)
    return path
