"""The built-in tiny models: a Qwen3 of 603,456 parameters over single characters, warm-started on one task each (see `warm_start`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
PAD, EOS, BOS, UNK = range(len(SPECIAL))
CHARACTERS = "\n" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1) if chr(code) not in "\\`")
"""94 of them, so that the vocabulary has 98 entries."""


TINY_MODELS = {"tiny": "tiny_qwen3", "tiny_calculator": "tiny_calculator"}
"""What `model.path` calls them → folder of the checkpoint."""


def tiny_path(name: str = "tiny") -> Path:
    """Directory of a checkpoint that ships with the package (bfloat16, Hugging Face format)."""
    return Path(__file__).resolve().parent.parent / "assets" / TINY_MODELS[name]


def build_tokenizer() -> Any:
    """A fast Hugging Face tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: id for id, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        bos_token=SPECIAL[BOS],
        unk_token=SPECIAL[UNK],
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Any:
    """A float32 Qwen3ForCausalLM with random weights: 3 layers of width 128, 4 heads over 2 key-value heads, tied embeddings."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True)
    return model
