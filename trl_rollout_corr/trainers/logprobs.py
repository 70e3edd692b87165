"""
vLLM as the sampler: the log-probability of each sampled token, and new weights on a CPU.

The last two change one [`~trl.generation.vllm_generation.VLLMGeneration`] object after TRL has built it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any
from unittest.mock import patch

from trl.generation.vllm_generation import VLLMGeneration

from ..arrival.worker import push
from ..messages import warn
from ..recording.run_metadata import quantises
from ..replay.kept_tokens import KeptTokens


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
        "prompt than the one that they are trained on, and answer the image less well. TRL expands the token of an image, and "
        "vLLM expands it once more. Install a release of trl that closes https://github.com/huggingface/trl/issues/6294, or "
        "in GRPO sample with a `rollout_func` that gives vLLM prompts with one token for each image."
    )


def watch_sampler(
    generation: VLLMGeneration,
    keep: Callable[[list[list[float | None]], list[list[int]]], object],
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
    Push weights through vLLM's own reload on a CPU, and to a colocated engine that quantises them: see
    [`~trl_rollout_corr.arrival.worker.push`].

    TRL's push of single parameters fails on a CPU, where vLLM stores weights in other shapes than the checkpoint, and would
    leave a quantised engine with old scales.
    """
    if generation.mode != "colocate":
        return
    if generation.accelerator.device.type != "cpu" and not quantises(generation.llm.llm_engine.vllm_config):
        return

    def sync_weights(*args: Any, **kwargs: Any) -> None:
        weights = generation._iter_named_params

        def push_all() -> Iterator[tuple]:
            push(generation.llm, weights())
            yield from ()  # nothing is left for TRL to push; it wakes the engine before, and clears the cache afterwards

        with patch.object(generation, "_iter_named_params", push_all):
            VLLMGeneration.sync_weights(generation, *args, **kwargs)

    generation.sync_weights = sync_weights
