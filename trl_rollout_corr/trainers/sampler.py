"""
What is asked of vLLM: the log-probability of each sampled token, and new weights on a CPU.

Both are changes to one [`~trl.generation.vllm_generation.VLLMGeneration`] object, after TRL has built it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from .reload import push
from .scoring import Logprobs
from .versions import named_weights


def sampled_logprobs(
    completion_ids: list[list[int]], logprobs: list[list[list[float | None]]], token_ids: list[list[list[int]]]
) -> Logprobs:
    """
    Pick the log-probability of the sampled token out of the candidates vLLM returns for each position.

    vLLM sorts the candidates by probability and TRL takes the first, which is the sampled token only if there is a single
    candidate. With `generation_kwargs={"logprobs": 5}` it is the most likely token instead.

    Args:
        completion_ids (`list[list[int]]`):
            Sampled tokens, per sequence.
        logprobs (`list[list[list[float | None]]]`):
            Log-probabilities of the candidates, per sequence and token; `None` stands for NaN.
        token_ids (`list[list[list[int]]]`):
            Tokens of the candidates.

    Returns:
        `list[list[float | None]]`: one log-probability per sampled token, in nats.
    """
    if all(len(sequence[0]) == 1 for sequence in logprobs if sequence):  # as asked for, unless the user asks for more
        return [[candidates[0] for candidates in sequence] for sequence in logprobs]
    return [
        [
            candidates[ids.index(token)]
            for token, candidates, ids in zip(sequence, sequence_logprobs, sequence_ids, strict=True)
        ]
        for sequence, sequence_logprobs, sequence_ids in zip(completion_ids, logprobs, token_ids, strict=True)
    ]


def record_logprobs(generation: VLLMGeneration, keep: Callable[[Logprobs], Any]):
    """
    Ask vLLM for log-probabilities, and make `generate` return those of the sampled tokens and nothing else.

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            The generation backend, changed in place.
        keep (`Callable[[list[list[float | None]]], Any]`):
            Called with the log-probabilities at every generation, one list per completion.
    """
    if generation.logprobs is None:
        generation.logprobs = 0  # the sampled token alone
    generate = generation.generate

    @wraps(generate)
    def generate_and_record(*args, **kwargs):
        prompt_ids, completion_ids, logprobs, token_ids, *others = generate(*args, **kwargs)
        if logprobs is None:
            raise RuntimeError(
                "vLLM returned no log-probabilities, which rollout correction needs. Remove `logprobs` from "
                "`generation_kwargs`, or set it to 0."
            )
        sampled = sampled_logprobs(completion_ids, logprobs, token_ids)
        keep(sampled)
        if any(len(candidates) > 1 for sequence in logprobs for candidates in sequence[:1]):
            logprobs = [[[logprob] for logprob in sequence] for sequence in sampled]
            token_ids = [[[token] for token in sequence] for sequence in completion_ids]
        return prompt_ids, completion_ids, logprobs, token_ids, *others

    generation.generate = generate_and_record


def announce_sync(generation: VLLMGeneration, announce: Callable[[], Any]):
    """
    Call a function whenever weights are pushed to vLLM, right before.

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            The generation backend, changed in place.
        announce (`Callable[[], Any]`):
            Called without arguments.
    """
    sync_weights = generation.sync_weights

    @wraps(sync_weights)
    def announce_and_sync(*args, **kwargs):
        announce()
        return sync_weights(*args, **kwargs)

    generation.sync_weights = announce_and_sync


def sync_weights_on_cpu(generation: VLLMGeneration):
    """
    Push weights through vLLM's own reload on a CPU, see [`~trl_rollout_corr.trainers.reload.push`].

    TRL's push of single parameters finds other shapes there than the checkpoint's, and fails.

    Args:
        generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
            The generation backend in colocate mode, changed in place. Left alone on any other device.
    """
    if generation.mode != "colocate" or generation.accelerator.device.type != "cpu":
        return

    def sync_weights(*args, **kwargs):
        push(generation.llm, named_weights(generation))

    generation.sync_weights = sync_weights
