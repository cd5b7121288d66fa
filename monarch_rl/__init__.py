"""Asynchronous RL post-training of language models: vLLM generators, a replay buffer and an FSDP2 trainer as Monarch actor meshes."""

__version__ = "0.1.0"
