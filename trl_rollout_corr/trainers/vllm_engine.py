"""
vLLM as the sampler: the log-probability of each sampled token.

[`watch_sampler`] changes one [`~trl.generation.vllm_generation.VLLMGeneration`] object after TRL built it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import requests
from trl.generation.vllm_generation import VLLMGeneration

from ..messages import warn


def read_configuration(url: str) -> dict[str, Any]:
    """Resolved configuration of a vLLM server, which it shows under `VLLM_SERVER_DEV_MODE=1`."""
    response = requests.get(f"{url}/server_info", params={"config_format": "json"}, timeout=60)
    if response.status_code == 404:
        raise RuntimeError(
            f"The vLLM server at {url} does not report its configuration, and so accepts no new weights. Start it "
            "with `VLLM_SERVER_DEV_MODE=1` in its environment."
        )
    response.raise_for_status()
    configuration: dict[str, Any] = response.json()["vllm_config"]
    return configuration


def check_server_logprobs(mode: str, temperature: float) -> None:
    """Refuse a server whose log-probabilities ignore the temperature. At 1, only warn."""
    if mode == "processed_logprobs":
        return
    message = (
        f"The vLLM server runs with `--logprobs-mode {mode}`, so it does not return the log-probabilities that tokens "
        "are sampled with. Restart it with `--logprobs-mode processed_logprobs`"
    )
    if temperature != 1.0 or not mode.endswith("logprobs"):
        raise ValueError(f"{message}: at `temperature={temperature}` every ratio would be wrong.")
    warn(
        f"{message}: at `temperature=1.0` raw and processed log-probabilities agree only without penalties and "
        "truncation."
    )


# Keys of a batch with images
IMAGES = ("pixel_values", "num_images", "image_grid_thw")


def warn_about_images(read: list[int], own: list[int]) -> None:
    """
    Warn about a prompt with an image that vLLM and the trainer read as different tokens.

    vLLM replaces one token by the tokens of an image. TRL until 1.16 passes prompts that already contain them, so that
    vLLM reads them twice: https://github.com/huggingface/trl/issues/6294
    """
    warn(
        f"vLLM has read {len(read)} tokens of a prompt with an image, and the trainer {len(own)}: the model trains on "
        "another prompt than the one that its completions answer, and they answer the image less well. TRL expands "
        "the token of an image, and vLLM expands it once more. Install a release of trl that closes "
        "https://github.com/huggingface/trl/issues/6294, or in GRPO sample with a `rollout_func` that gives vLLM "
        "prompts with one token for each image."
    )


def watch_sampler(
    generation: VLLMGeneration,
    keep: Callable[[list[list[float | None]], list[list[int]]], object],
    kept_tokens: Any,
) -> None:
    """
    Call `keep` with the log-probabilities of each generation and the prompts that vLLM read, by completion. With
    `kept_tokens`, vLLM returns candidates that contain the log-probabilities.
    """
    if kept_tokens is None:
        generation.logprobs = 0  # only of the sampled token
    generate = generation.generate

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

    generation.generate = generate_and_keep
