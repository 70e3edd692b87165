"""
vLLM as the sampler: the log-probability of each sampled token, and new weights on a CPU.

The last two change one [`~trl.generation.vllm_generation.VLLMGeneration`] object after TRL has built it.
"""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from ..messages import warn
from ..replay.kept_tokens import KeptTokens
from ..replay.protocol import Logprobs
from ..arrival.worker import push
from .versions import named_weights


def check_server_logprobs(mode: str, temperature: float) -> None:
    """Refuse a server that does not return log-probabilities after temperature; at a temperature of 1, warn."""
    if mode == "processed_logprobs":
        return
    message = (
        f"The vLLM server runs with `--logprobs-mode {mode}`, so it does not return the log-probabilities that tokens are "
        "sampled with. Restart it with `--logprobs-mode processed_logprobs`"
    )
    if temperature != 1.0 or not mode.endswith("logprobs"):
        raise ValueError(f"{message}: at `temperature={temperature}` every ratio would be wrong.")
    warn(
        f"{message}: at `temperature=1.0` raw and processed log-probabilities agree only without penalties and truncation."
    )


def check_logprobs(completion_ids: list[list[int]], logprobs: Any) -> None:
    """Check that there is one log-probability for each sampled token."""
    if logprobs is None:
        raise ValueError(
            "The completions came without log-probabilities, which rollout correction needs. Set `use_vllm=True`, or return "
            "them as `logprobs` from your `rollout_func`: one list per completion with the log-probability of each sampled "
            "token, after temperature."
        )
    if len(logprobs) != len(completion_ids):
        raise ValueError(
            f"`logprobs` must have one list per completion, got {len(logprobs)} lists for {len(completion_ids)} completions."
        )
    for i, (ids, sequence) in enumerate(zip(completion_ids, logprobs, strict=True)):
        if len(sequence) != len(ids):
            raise ValueError(
                f"`logprobs[{i}]` must have one entry per token of the completion, got {len(sequence)} for {len(ids)} tokens. "
                "Check that `rollout_func` neither drops nor appends tokens (an end-of-sequence token, for instance) after "
                "sampling."
            )
        if any(isinstance(logprob, (list, tuple)) for logprob in sequence):
            raise ValueError(
                f"`logprobs[{i}]` must be a flat list with one number per token, got nested lists. If vLLM returned several "
                "candidates per token, keep the log-probability of the sampled one."
            )


def checked_turn_ids(completion_ids: list[list[int]], turn_ids: Any) -> list[list[int]] | None:
    """`turn_ids` of a rollout function, with one number per token that never decreases along a completion; or `None`."""
    if turn_ids is None:
        return None
    if len(turn_ids) != len(completion_ids):
        raise ValueError(
            f"`turn_ids` must have one list per completion, got {len(turn_ids)} lists for {len(completion_ids)} completions."
        )
    for i, (ids, turns) in enumerate(zip(completion_ids, turn_ids, strict=True)):
        if len(turns) != len(ids):
            raise ValueError(
                f"`turn_ids[{i}]` must have one number per token of the completion, got {len(turns)} for {len(ids)} tokens. "
                "Give the tokens of a tool's answer the number of the turn before it."
            )
        for t, turn in enumerate(turns):
            before = turns[t - 1] if t else 0
            if not hasattr(turn, "__index__") or turn < before:
                raise ValueError(
                    f"`turn_ids[{i}][{t}]` is {turn!r} after {before!r}, but turns follow one another: use whole numbers from "
                    "0 that never decrease along a completion."
                )
    return [[operator.index(turn) for turn in turns] for turns in turn_ids]


# Keys of a batch with images
IMAGES = ("pixel_values", "num_images", "image_grid_thw")


def warn_about_images(read: list[int], own: list[int]) -> None:
    """
    Warn about a prompt with an image of which vLLM has read other tokens than the trainer has.

    vLLM puts the tokens of an image in place of one token. TRL until 1.16 gives it prompts in which they are already there, so
    that they are there twice: https://github.com/huggingface/trl/issues/6294
    """
    warn(
        f"vLLM has read {len(read)} tokens of a prompt with an image, and the trainer {len(own)}: completions follow another "
        "prompt than the one that they are trained on. TRL expands the token of an image, and vLLM expands it once more "
        "(https://github.com/huggingface/trl/issues/6294). The correction treats the difference as any other gap, but the "
        "completions answer the image less well. Install a release of trl that closes the issue. In GRPO you can also sample "
        "with a `rollout_func` that gives vLLM prompts with one token for each image."
    )


def watch_sampler(
    generation: VLLMGeneration,
    keep: Callable[[Logprobs, list[list[int]]], object],
    pushing: Callable[[], AbstractContextManager],
    kept_tokens: KeptTokens | None,
) -> None:
    """
    Call `keep` with the log-probabilities of each generation and the prompts that vLLM has read, by completion, and push
    weights in a context of `pushing`. With `kept_tokens`, vLLM returns candidates, and the log-probabilities are read from
    them.
    """
    if kept_tokens is None:
        generation.logprobs = 0  # of the sampled token alone
    generate, sync_weights = generation.generate, generation.sync_weights

    @wraps(generate)
    def generate_and_keep(*args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, logprobs, *others = generate(*args, **kwargs)
        if logprobs is None:
            raise RuntimeError(
                "vLLM returned no log-probabilities, which rollout correction needs. Remove `logprobs` from "
                "`generation_kwargs`, or set it to 0."
            )
        if kept_tokens is not None:
            sampled = kept_tokens.read(completion_ids, logprobs, others[0])
            keep(sampled, prompt_ids)
            return prompt_ids, completion_ids, [[[logp] for logp in sequence] for sequence in sampled], *others
        keep([[ranked[0] for ranked in sequence] for sequence in logprobs], prompt_ids)
        return prompt_ids, completion_ids, logprobs, *others

    @wraps(sync_weights)
    def sync_and_check(*args: Any, **kwargs: Any) -> Any:
        with pushing():
            sync_weights(*args, **kwargs)
            forget_images(generation)

    generation.generate, generation.sync_weights = generate_and_keep, sync_and_check


def forget_images(generation: VLLMGeneration) -> None:
    """
    Make a colocated vLLM compute the features of images again after new weights.

    vLLM keeps the features of an image for later requests. TRL clears the cache of prefixes alone, so that an image would keep
    its features from before the new weights; and vLLM's own reload clears the features, but not its list of them, so that the
    next request with the image would fail.
    """
    if generation.mode == "colocate" and hasattr(generation.llm.llm_engine, "reset_encoder_cache"):
        generation.llm.llm_engine.reset_encoder_cache()


def sync_weights_on_cpu(generation: VLLMGeneration) -> None:
    """
    Push weights through vLLM's own reload on a CPU, see [`~trl_rollout_corr.arrival.worker.push`].

    TRL's push of single parameters fails on a CPU, where vLLM stores weights in other shapes than the checkpoint.
    """
    if generation.mode != "colocate" or generation.accelerator.device.type != "cpu":
        return

    def sync_weights(*args: Any, **kwargs: Any) -> None:
        push(generation.llm, named_weights(generation))

    generation.sync_weights = sync_weights
