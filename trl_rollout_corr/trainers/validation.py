"""Checks of a trainer configuration that involve both TRL's fields and ours."""

import dataclasses

from trl import GRPOConfig, RLOOConfig

from ..config import RolloutCorrectionConfig, warn


_TRL_FIELDS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)


def replace_trl_correction(config: GRPOConfig):
    """
    Switch TRL's own correction off, and say so if it was configured.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration, changed in place before TRL validates it.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.name in _TRL_FIELDS}
    changed = {name: getattr(config, name) for name in _TRL_FIELDS if getattr(config, name) != defaults[name]}
    if changed:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        warn(
            f"{settings} has no effect: rollout correction replaces TRL's. `RolloutCorrectionConfig.from_trl` translates "
            "these settings."
        )
    config.vllm_importance_sampling_correction = False


# Options of vLLM that change the distribution tokens are drawn from, but not the one the trainer computes.
_DISTORTING = (
    "top_p",
    "top_k",
    "min_p",
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


def check_sampling(config: GRPOConfig | RLOOConfig):
    """
    Refuse or warn about settings of vLLM under which its log-probabilities are not comparable to the trainer's.

    Args:
        config ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]):
            Configuration of a trainer.

    Raises:
        `ValueError`: if the temperature of the sampler is not that of the trainer, or vLLM is told to return no
            log-probabilities or several completions per request.
    """
    if not config.use_vllm:
        return
    overrides = config.generation_kwargs or {}
    if overrides.get("temperature", config.temperature) != config.temperature:
        raise ValueError(
            f"`generation_kwargs` sets a temperature of {overrides['temperature']} while `temperature` is "
            f"{config.temperature}: tokens would be sampled at one and trained on at the other. Set `temperature` alone."
        )
    for name, allowed in (("logprobs", "an integer of 0 or more"), ("n", "1")):
        value = overrides.get(name, 1)
        if value is None or value is False or (name == "n" and value != 1):
            raise ValueError(
                f"`generation_kwargs` sets `{name}` to {value!r}, which must be {allowed}: rollout correction needs the "
                "log-probability of every sampled token. Remove it."
            )
    settings = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    settings["structured_outputs"] = config.vllm_structured_outputs_regex
    settings |= {name: value for name, value in overrides.items() if name in _DISTORTING}
    distorting = {name: value for name, value in settings.items() if value and value not in _NEUTRAL.get(name, ())}
    if distorting:
        listed = ", ".join(f"`{name}={value!r}`" for name, value in distorting.items())
        warn(
            f"{listed} changes the distribution vLLM samples from, but not the one the trainer computes, so that every "
            "ratio is off by the probability mass that was cut or moved. Leave it at its default, or read ratios, weights "
            "and rejections with that in mind."
        )


def check_batch_normalization(config: RolloutCorrectionConfig):
    """
    Refuse batch normalisation over a single sequence, which would set its weight to 1.

    Args:
        config ([`RolloutCorrectionConfig`]):
            Configuration of a trainer, after TRL has resolved batch sizes.

    Raises:
        `ValueError`: if the micro-batch of all ranks is one sequence where it is the scope of a sequence-level mean.
    """
    sequence_level = config.rollout_is in ("sequence", "geometric")
    normalizes = config.corrects and config.applies_weights and config.rollout_is_batch_normalize
    if not (normalizes and sequence_level and config.bypass_mode):
        return
    if config.per_device_train_batch_size * config.world_size == 1:
        raise ValueError(
            "`rollout_is_batch_normalize` is True with `bypass_mode`, where it spans the micro-batch of all ranks, and that "
            "is one sequence: its weight would always be 1. Set `per_device_train_batch_size` to 2 or more (and divide "
            "`gradient_accumulation_steps` accordingly), or use `bypass_mode=False`, which normalises over the generation "
            "batch."
        )


def check_sequence_level_ratio(config: GRPOConfig):
    """
    Warn if single tokens are to be weighted or rejected in a loss whose ratio is that of the completion.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration of a trainer.
    """
    if not config.corrects or config.importance_sampling_level != "sequence":
        return
    settings = [f"`{name}`" for name in config.rollout_rs or [] if name.startswith("token_")]
    if config.rollout_is == "token" and config.applies_weights:
        settings.append("`rollout_is='token'`")
    if settings:
        warn(
            f"{', '.join(settings)} act on single tokens, but with `importance_sampling_level='sequence'` every token of a "
            "completion has the same gradient: the mean over its tokens is what acts, as with TRL's own correction. To weight "
            "or reject completions, use `rollout_is='sequence'` or 'geometric', and criteria that start with `seq_`."
        )


def check_server_logprobs(mode: str, temperature: float):
    """
    Check which log-probabilities a vLLM server returns.

    Args:
        mode (`str`):
            `logprobs_mode` of the server.
        temperature (`float`):
            Sampling temperature.

    Raises:
        `ValueError`: if they are not those after temperature, and the temperature is not 1.
    """
    if mode == "processed_logprobs":
        return
    message = (
        f"The vLLM server runs with `--logprobs-mode {mode}`, so it does not return the log-probabilities that tokens are "
        "sampled with. Restart it with `--logprobs-mode processed_logprobs`"
    )
    if temperature != 1.0 or not mode.endswith("logprobs"):
        raise ValueError(f"{message}: at `temperature={temperature}` every ratio would be wrong.")
    warn(f"{message}: at `temperature=1.0` they agree only without penalties and truncation.")
