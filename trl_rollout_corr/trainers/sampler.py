"""
vLLM as the sampler: checks of its options, the log-probability of each sampled token, and new weights on a CPU.

The last two change one [`~trl.generation.vllm_generation.VLLMGeneration`] object after TRL has built it.
"""

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from trl import GRPOConfig, RLOOConfig
from trl.generation.vllm_generation import VLLMGeneration

from ..messages import warn, warn_idle
from ._cpu_reload import push
from .scoring import Scoring
from .support import Candidates
from .versions import keep_support, makes_up_for_truncation, named_weights


# Options of vLLM that leave only some tokens to draw from
TRUNCATION = ("top_p", "top_k", "min_p")
# Options of vLLM that change the distribution tokens are drawn from, but not the one the trainer computes.
_DISTORTING = (
    *TRUNCATION,
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
)
_NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,)}  # for the others: None, 0 and empty


def check_sampling(config: GRPOConfig | RLOOConfig, trainer: type) -> None:
    """
    Refuse or warn about settings of vLLM under which its log-probabilities are not comparable to those of a `trainer` of TRL.
    """
    if not config.use_vllm:
        return
    overrides = config.generation_kwargs or {}
    if overrides.get("temperature", config.temperature) != config.temperature:
        raise ValueError(
            f"`generation_kwargs` sets a temperature of {overrides['temperature']} while `temperature` is "
            f"{config.temperature}: tokens would be sampled with the first and scored with the second. Set "
            "`temperature` alone."
        )
    for name, needed in (("logprobs", 0), ("n", 1)):
        value = overrides.get(name, needed)
        if type(value) is not int or value != needed:
            raise ValueError(
                f"`generation_kwargs` sets `{name}` to {value!r}, which must be {needed}: rollout correction needs one "
                "log-probability of every sampled token. Remove it."
            )
    _check_routing(config)
    settings = {name: getattr(config, name) for name in (*TRUNCATION, "repetition_penalty")}
    settings["structured_outputs"] = config.vllm_structured_outputs_regex
    settings |= {name: value for name, value in overrides.items() if name in _DISTORTING}
    replays = config.rollout_support is not None
    if replays:
        check_support(config, trainer)
    if truncation(config) and makes_up_for_truncation(trainer):
        keep_support(config)
    if replays or makes_up_for_truncation(trainer):
        settings = {name: value for name, value in settings.items() if name not in TRUNCATION}
    warn_about_distortion(settings, colocated=config.vllm_mode == "colocate")


def check_support(config: GRPOConfig | RLOOConfig, trainer: type) -> None:
    """Refuse `rollout_support` where the sampler returns no kept tokens or TRL uses them itself; warn if none are cut."""
    reason = None
    if makes_up_for_truncation(trainer):
        reason = "the installed TRL makes up for truncated sampling itself"
    elif config.vllm_mode != "colocate":
        reason = (
            f"`vllm_mode` is {config.vllm_mode!r}, and only a colocated vLLM returns the tokens that sampling kept"
        )
    if reason:
        raise ValueError(
            f"`rollout_support` is {config.rollout_support!r}, but {reason}. Set `rollout_support` to None."
        )
    if not truncation(config):
        warn_idle("rollout_support", config.rollout_support, "`top_p`, `top_k` and `min_p` cut no token")


def truncation(config: GRPOConfig | RLOOConfig) -> dict[str, object]:
    """Options of truncated sampling that are in effect, by name."""
    overrides = config.generation_kwargs or {}
    return distorting({name: overrides.get(name, getattr(config, name)) for name in TRUNCATION})


def _check_routing(config: GRPOConfig | RLOOConfig) -> None:
    """Refuse samplers whose routes do not reach the trainer."""
    if config.rollout_routing is None:
        return
    reason = None
    if config.vllm_mode != "colocate":
        reason = "`vllm_mode` is 'server', and TRL's client drops the routes of the answers. Set it to 'colocate'"
    elif config.vllm_tensor_parallel_size > 1:
        reason = "`vllm_tensor_parallel_size` is above 1, where replay was never run. Set it to 1"
    if reason:
        raise ValueError(f"`rollout_routing` is 'replay', but {reason}, or `rollout_routing` to None.")


def distorting(settings: Mapping[str, object]) -> dict[str, object]:
    """Options of sampling that change the distribution, by name."""
    return {name: value for name, value in settings.items() if value and value not in _NEUTRAL.get(name, ())}


def neutral(name: str) -> float:
    """Value of an option of sampling with which the distribution does not change."""
    return _NEUTRAL.get(name, (0.0,))[0]


def warn_about_distortion(settings: Mapping[str, object], *, colocated: bool = False) -> None:
    """Warn about options of vLLM that change the distribution of the sampler but not that of the trainer."""
    if changed := distorting(settings):
        listed = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        replay = " set `rollout_support` to 'replay' (`top_p`, `top_k` and `min_p`)," if colocated else ""
        replay *= not changed.keys().isdisjoint(TRUNCATION)
        warn(
            f"{listed} changes the distribution vLLM samples from, but not the one the trainer computes, so that every "
            "ratio is off by the probability mass that was cut or moved. Leave it at its "
            f"default,{replay} or expect biased ratios, weights and rejections."
        )


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


def warn_about_images(scoring: Scoring, batch: Mapping[str, Any], told: bool) -> bool:
    """
    Warn once about prompts with images that vLLM has read otherwise than the trainer. Returns `True` if there was one.

    vLLM puts the tokens of an image in place of one token. TRL 1.16 gives it prompts in which they are already there, so that
    they are there twice: https://github.com/huggingface/trl/issues/6294
    """
    if told or not any(key in batch for key in IMAGES) or (other := scoring.other_prompt(batch)) is None:
        return told
    read, own = other
    warn(
        f"vLLM has read {len(read)} tokens of a prompt with an image, and the trainer {len(own)}: completions follow another "
        "prompt than the one that they are trained on. vLLM expands the token of an image, and TRL had expanded it before "
        "(https://github.com/huggingface/trl/issues/6294). The correction treats the difference as any other gap, but "
        "completions are worse answers to the image. Install a release of trl that closes the issue; or, in GRPO, sample with "
        "a `rollout_func` that gives vLLM prompts with one token for each image."
    )
    return True


def observe_sampler(
    generation: VLLMGeneration,
    keep: Callable[..., object],
    pushing: Callable[[], AbstractContextManager],
    *,
    replays: bool = False,
) -> None:
    """
    Call `keep` with the log-probabilities of each generation, by completion, with the prompts that vLLM has read, and, if it
    `replays`, with the tokens that sampling kept; and push weights in a context of `pushing`.
    """
    generation.logprobs = 0  # of the sampled token alone
    candidates = Candidates(generation) if replays else None
    generate, sync_weights = generation.generate, generation.sync_weights

    @wraps(generate)
    def generate_and_keep(*args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, logprobs, *others = generate(*args, **kwargs)
        if logprobs is None:
            raise RuntimeError(
                "vLLM returned no log-probabilities, which rollout correction needs. Remove `logprobs` from "
                "`generation_kwargs`, or set it to 0."
            )
        if candidates is not None:
            sampled, kept = candidates.read(completion_ids, logprobs, others[0])
            keep(sampled, prompt_ids, kept)
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
    Push weights through vLLM's own reload on a CPU, see [`~trl_rollout_corr.trainers._cpu_reload.push`].

    TRL's push of single parameters fails on a CPU, where vLLM stores weights in other shapes than the checkpoint.
    """
    if generation.mode != "colocate" or generation.accelerator.device.type != "cpu":
        return

    def sync_weights(*args: Any, **kwargs: Any) -> None:
        push(generation.llm, named_weights(generation))

    generation.sync_weights = sync_weights
