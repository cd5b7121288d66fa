"""What vLLM is asked for with a request, and what is made of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from monarch_rl.generator_config import COLDEST
from monarch_rl.types import Generation, Sampling

if TYPE_CHECKING:
    from monarch_rl.engine_channels import Recorded


class UnusablePrompt(ValueError):
    """The model cannot go on from this prompt, however often it is tried; the engine is unharmed."""


class PromptTooLong(UnusablePrompt):
    """The prompt leaves no room for a single token."""


def room_for(ids: Sequence[int], sampling: Sampling, model: Any, context: int) -> int:
    """How many tokens may be sampled.

    Args:
        model: vLLM's ModelConfig.

    Raises:
        PromptTooLong, UnusablePrompt: see `Engine.generate`. ValueError: vLLM cannot sample like that.
    """
    vocabulary = int(model.get_vocab_size())
    if not ids:
        raise UnusablePrompt("a prompt without a token: the model has nothing to go on from")
    if min(ids) < 0 or max(ids) >= vocabulary:
        strange = next(id for id in ids if not 0 <= id < vocabulary)
        raise UnusablePrompt(f"token {strange} is unknown to the model, whose ids go from 0 to {vocabulary - 1}")
    if 0 < sampling.temperature < COLDEST:
        raise ValueError(f"temperature {sampling.temperature:g} is below {COLDEST:g}, the lowest that vLLM samples at")
    if sampling.temperature == 0 and model.return_sampling_mask:
        raise ValueError("temperature 0: vLLM decodes nothing greedily while it records sampling masks; see generator.keep_mask")
    if len(ids) >= context:
        raise PromptTooLong(f"a prompt of {len(ids)} tokens leaves no room in a context of {context} tokens")
    return min(sampling.max_new_tokens, context - len(ids))


def request_parameters(sampling: Sampling, seed: int, room: int, recorded: Recorded) -> Any:
    """vLLM's SamplingParams of one episode; `room` is how many tokens may be sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        # Where vLLM records masks on CUDA it wants a bound on their size; all ids are as good as off.
        top_k=sampling.top_k or (recorded.vocabulary if recorded.masks else 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=room,
        seed=seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        # Only text shows where a text ends; it is looked for in all that was sampled, special tokens included.
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        skip_reading_prefix_cache=recorded.experts is not None,  # what is not read has no experts to tell of
    )


def generation_of(output: Any, recorded: Recorded) -> Generation:
    """What became of a request, finished or aborted."""
    completion = output.outputs[0]
    versions_T = np.empty(len(completion.token_ids), np.int64)
    for span in completion.weight_versions:
        versions_T[span.start : span.end] = int(span.version)
    return Generation(
        ids_T=np.array(completion.token_ids, np.int32),
        logprobs_T=np.array(completion.logprobs.logprobs, np.float32),
        versions_T=versions_T,
        finish_reason=completion.finish_reason,
        channels=recorded.channels(
            len(output.prompt_token_ids),
            len(completion.token_ids),
            completion.sampling_mask.token_ids if completion.sampling_mask else [],
            completion.routed_experts,
        ),
    )


def go_on(llm: Any, state: Any, sampling: Sampling) -> None:
    """Let a text that ends the turn begin in what was sampled before this request: vLLM looks for it in the text so far."""
    if sampling.begun and sampling.stop:
        begun = state.prompt_token_ids[-sampling.begun :]
        state.detokenizer.output_text = llm.output_processor.tokenizer.decode(begun, skip_special_tokens=False)


def count_tokens(llm: Any, add: Callable[[int], None]) -> None:
    """Have `add` told how many tokens each step samples. Finished requests alone come out of vLLM's step; every token passes here."""
    core = llm.engine_core
    get_output = core.get_output

    def counted() -> Any:
        outputs = get_output()
        add(sum(len(output.new_token_ids) for output in outputs.outputs))
        return outputs

    core.get_output = counted
