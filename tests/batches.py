"""Small models and batches for tests of the learning side."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from monarch_rl.checkpoint import Saver
from monarch_rl.packing import pack, trained_mask
from monarch_rl.types import NOT_SAMPLED, Episode, Shard, Version

VOCABULARY = 50
FIRST = Version(0, 0)


def small_model(seed: int = 0, tied: bool = True) -> Qwen3ForCausalLM:
    """A random Qwen3 with 2 layers, float32, far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def plain_logprobs(model: PreTrainedModel, episode: Episode, temperature: float) -> torch.Tensor:
    """[T] log-probability of each token by a plain Hugging Face forward of this episode alone; 0 for the first."""
    ids_1T = torch.from_numpy(episode.ids_T.astype(np.int64))[None]
    logits_TV = model(input_ids=ids_1T).logits[0, :-1].float() / temperature
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1), logprobs_T])


def episode(prompt: int, completion: int, draw: random.Random, reward: float | None, version: Version = FIRST) -> Episode:
    """Random tokens; the logprobs are to be filled in."""
    length = prompt + completion
    sampled_T = np.arange(length) >= prompt
    return Episode(
        ids_T=np.array([draw.randrange(VOCABULARY) for _ in range(length)], np.int32),
        loss_mask_T=sampled_T,
        logprobs_T=np.zeros(length, np.float32),
        versions_T=np.where(sampled_T, version.pack(), NOT_SAMPLED).astype(np.int64),
        reward=reward,
    )


def sampled_by(model: PreTrainedModel, episodes: list[Episode], temperature: float, noise: Callable[[], float] = lambda: 0.0) -> None:
    """Fills in temperature and the sampler's logprobs: the model's, plus `noise()` for each token."""
    for e in episodes:
        with torch.no_grad():
            logprobs_T = plain_logprobs(model, e, temperature).numpy()
        e.temperature = temperature
        e.logprobs_T = np.where(e.loss_mask_T, logprobs_T + [noise() for _ in e.ids_T], 0).astype(np.float32)


def shards(
    groups: list[list[Episode]], ranks: int = 1, budget: int = 4096, step: int = 1, order: random.Random | None = None
) -> list[Shard]:
    """One shard per rank of a batch of equally large groups, as the replay buffer would cut it; `order` shuffles the rows."""
    places = [(p, g) for p, group in enumerate(groups) for g in range(len(group))]
    if order:
        order.shuffle(places)
    everything = [groups[p][g] for p, g in places]
    rewards_PG = np.array([[np.nan if e.reward is None else e.reward for e in group] for group in groups], np.float64)
    result = []
    for microbatches in pack([len(e.ids_T) for e in everything], ranks, budget):
        mine = sorted(i for microbatch in microbatches for i in microbatch)
        local = {i: n for n, i in enumerate(mine)}
        result.append(
            Shard(
                step=step,
                episodes=[everything[i] for i in mine],
                places=[places[i] for i in mine],
                microbatches=[[local[i] for i in microbatch] for microbatch in microbatches],
                rewards_PG=rewards_PG,
                total_tokens=sum(int(trained_mask(e).sum()) for e in everything),
                total_episodes=int(np.isfinite(rewards_PG).sum()),
            )
        )
    return result


def save(learner: Any, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Model and optimizer as a checkpoint; `meanwhile` is done while it is written."""
    told: SimpleQueue[Exception | None] = SimpleQueue()
    saver = Saver(None)
    saver.save(learner, folder, told.put)
    meanwhile()
    if (error := told.get(timeout=100)) is not None:
        raise error
    saver.close()
