"""Everything that refuses a run, or warns about it before it starts, and knows about both TRL and this package."""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig, RLOOConfig

from ..correction.functional import expected_share_outside
from ..dumps.writing import files_of, read_logs
from ..messages import nearest, warn, warn_idle
from ..settings.config import LOSS_TYPES, RolloutCorrectionConfig
from ..settings.presets import PRESETS, Preset
from .versions import INSTALLED, PASSES_BY, RENORMALIZED, RENORMALIZED_SINCE, before


_OF_TRL = "vllm_importance_sampling_"  # how the fields of TRL's own correction begin


def replace_trl_correction(config: GRPOConfig | RLOOConfig):
    """
    Switch TRL's own correction off, and say so if it was configured, or if TRL has one that is not known here.

    Args:
        config ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]):
            Configuration, changed in place before TRL validates it.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.name.startswith(_OF_TRL)}
    switch = f"{_OF_TRL}correction"
    if switch in defaults:
        del defaults[switch]
        setattr(config, switch, False)
    acting = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    acting |= {name: True for name in defaults if getattr(config, name) is True}
    for name in acting:
        if acting[name] is True:
            setattr(config, name, False)
    if acting:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in acting.items())
        warn(
            f"{settings} has no effect: rollout correction replaces TRL's. `RolloutCorrectionConfig.from_trl` translates "
            "the settings of TRL that it knows."
        )


def check_passes_by(config: GRPOConfig):
    """
    Refuse options of older releases of TRL with which its loss is another one.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration of a trainer.

    Raises:
        `ValueError`: if such an option is on.
    """
    for name, since in PASSES_BY.items():
        if before(since) and getattr(config, name, False):
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r}, and trl {INSTALLED} then computes its loss in one kernel, where "
                f"rollout correction cannot enter. Set `{name}` to False, or install trl {since} or newer."
            )


def check_corrected_once(batch: dict[str, Any]):
    """
    Check that TRL has not corrected a batch itself.

    Args:
        batch (`dict`):
            A batch that TRL has generated and scored.

    Raises:
        `RuntimeError`: if TRL put weights of its own into it.
    """
    found = [f"`{key}`" for key in batch if key.startswith("importance_sampling")]
    if found:
        raise RuntimeError(
            f"trl {INSTALLED} put {', '.join(found)} into the batch: a correction of its own, although "
            f"`{_OF_TRL}correction` is switched off. Completions would be corrected twice. Switch it off in your "
            "configuration, or install a version of trl that this release of trl-rollout-corr was tested with."
        )


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
    warn_about_distortion(settings)


def distorting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of sampling that change the distribution."""
    return {name: value for name, value in settings.items() if value and value not in _NEUTRAL.get(name, ())}


def neutral(name: str) -> float:
    """A value of an option of sampling, a number, that changes nothing."""
    return _NEUTRAL.get(name, (0.0,))[0]


def warn_about_distortion(settings: Mapping[str, Any]):
    """
    Warn about options of vLLM under which it draws from another distribution than the trainer computes.

    Args:
        settings (`Mapping[str, Any]`):
            Options of sampling by name.
    """
    if changed := distorting(settings):
        listed = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        warn(
            f"{listed} changes the distribution vLLM samples from, but not the one the trainer computes, so that every "
            "ratio is off by the probability mass that was cut or moved. Leave it at its default, or read ratios, weights "
            f"and rejections with that in mind.{_renormalized(changed)}"
        )


def _renormalized(distorting: dict[str, Any]) -> str:
    """What to add about options that TRL itself makes up for in newer releases."""
    named = [f"`{name}`" for name in RENORMALIZED if name in distorting]
    if not named or before(RENORMALIZED_SINCE):
        return ""
    return (
        f" TRL says that from {RENORMALIZED_SINCE} on it makes up for {', '.join(named)} itself: then "
        "`rollout_corr/rollout_is_mean` is near 1, and nothing is off."
    )


def check_batch_normalization(config: GRPOConfig | RLOOConfig):
    """
    Refuse batch normalisation over a single sequence, which would set its weight to 1.

    Args:
        config ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]):
            Configuration of a trainer, after TRL has resolved batch sizes.

    Raises:
        `ValueError`: if the micro-batch of all ranks is one sequence where it is the scope of a sequence-level mean.
    """
    if not (_normalizes_sequences(config) and config.bypass_mode):
        return
    if config.per_device_train_batch_size * config.world_size == 1:
        raise ValueError(
            "`rollout_is_batch_normalize` is True with `bypass_mode`, where it spans the micro-batch of all ranks, and that "
            "is one sequence: its weight would always be 1. Set `per_device_train_batch_size` to 2 or more (and divide "
            "`gradient_accumulation_steps` accordingly), or use `bypass_mode=False`, which normalises over the generation "
            "batch."
        )


def _normalizes_sequences(config: Any) -> bool:
    """Whether each weight is divided by a mean over sequences."""
    normalizes = config.corrects and config.applies_weights and config.rollout_is_batch_normalize
    return normalizes and config.rollout_is in ("sequence", "geometric")


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


# Spread of the log-ratio per token, in nats, between a trainer and a sampler in bfloat16 with the same weights: that of a
# k3_kl of 0.0008, measured for Qwen3-8B (https://github.com/AknA13/train-infer-mismatch). Small models are nearer.
ROUNDING = 0.04


def check_bounds_of_means(config: GRPOConfig | RLOOConfig):
    """
    Warn if bounds of `seq_mean_k1` are so narrow that rounding alone makes them reject most completions.

    The mean of `T` log-ratios has a spread of `s / sqrt(T)`, so bounds that suit thousands of tokens do not suit a hundred.
    The prediction takes all completions to be as long as they may get: shorter ones are rejected more often.

    Args:
        config ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]):
            Configuration of a trainer.
    """
    length = config.max_completion_length
    if not config.corrects or not length:
        return
    for criterion, bounds in zip(config.criteria, config.rollout_rs_threshold or [], strict=True):
        if criterion.name != "seq_mean_k1":
            continue
        share = expected_share_outside(ROUNDING, torch.tensor(float(length)), *bounds).item()
        if share > 0.5:
            width = 3 * ROUNDING / math.sqrt(length)
            lower = math.floor(1e4 * math.exp(-(ROUNDING**2) / 2 - width)) / 1e4
            upper = math.ceil(1e4 * math.exp(width)) / 1e4
            warn(
                f"`rollout_rs_threshold` of 'seq_mean_k1' is {bounds}, and `max_completion_length` is {length}: where trainer "
                f"and sampler differ by the rounding of bfloat16 alone ({ROUNDING} nats per token), {share:.0%} of "
                f"completions would be rejected, and more of shorter ones. Set [{lower:g}, {upper:g}] or wider, longer "
                "completions, or `rollout_correction: auto`, whose bounds do not depend on length. If the sampler is more "
                "precise than that, look at `rollout_corr/rollout_rs_masked_fraction`."
            )


def check_dropout(model: PreTrainedModel):
    """
    Warn about dropout, which makes the policy that trains another one than the policy that sampled.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model that trains.
    """
    in_attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0
    layers = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0]
    remedies = ["`model_init_kwargs={'attention_dropout': 0.0}`"] if in_attention else []
    remedies += ["`disable_dropout=True`"] if layers else []
    if not remedies:
        return
    adapters = any("lora_dropout" in name for name in layers)
    where = [f"in attention ({in_attention:g})"] if in_attention else []
    where += [f"in {len(layers)} layers{', of the LoRA adapter among them' if adapters else ''}"] if layers else []
    warn(
        f"Dropout is on in the model that trains, {' and '.join(where)}, and off in the sampler. The two are then different "
        f"policies even with equal weights, and correction takes that for a mismatch. Set {' and '.join(remedies)}."
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


def check_loss(config: GRPOConfig):
    """
    Refuse losses of GRPO that rollout correction cannot be combined with.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration of a trainer.

    Raises:
        `ValueError`: if the loss is one of ours, if it weights sequences in its own way, or if the ratio of 1 that
            `rollout_loss_type="reinforce"` needs would be clipped or averaged.
    """
    if config.loss_type in LOSS_TYPES:
        raise ValueError(
            f"`loss_type` is {config.loss_type!r}, which is a loss of `bypass_mode`: set `rollout_loss_type` to it. "
            "`loss_type` is TRL's: grpo, dr_grpo, dapo, ..."
        )
    if not config.corrects:
        return
    if config.loss_type == "vespo":
        raise ValueError(
            "`loss_type` is 'vespo', which folds importance weights into its own sequence weight, so no other weight or "
            "rejection can be applied to it. Choose another `loss_type`, or only measure with "
            "`rollout_metrics_only=True`."
        )
    if not config.bypass_mode or config.rollout_loss_type != "reinforce":
        return
    cap = config.epsilon_high or config.epsilon
    if config.loss_type == "cispo" and cap < 1.0:
        raise ValueError(
            f"`epsilon_high` is {cap} with `loss_type='cispo'`, which caps the ratio by it, and "
            "with `rollout_loss_type='reinforce'`, whose ratio is 1: every gradient would be scaled by it. Set "
            "`epsilon_high` to 1 or more."
        )
    if config.importance_sampling_level != "token":
        raise ValueError(
            f"`importance_sampling_level` is {config.importance_sampling_level!r} with `rollout_loss_type='reinforce'`, "
            "whose loss is a sum over tokens. Set it to 'token'; for weights of sequences set `rollout_is` to "
            "'sequence' or 'geometric'."
        )


PROXIMAL = ("visit", "interpolated")


def check_proximal(value: Any) -> str:
    """Check what stands for the old policy in an asynchronous run, and return it."""
    if value not in PROXIMAL:
        raise ValueError(
            f"`rollout_proximal` must be one of {', '.join(PROXIMAL)}, got {value!r}.{nearest(value, PROXIMAL)}"
        )
    return value


def check_asynchronous(config: Any):
    """
    Refuse or warn about settings that an asynchronous run cannot follow.

    Args:
        config ([`RolloutCorrectedAsyncGRPOConfig`]):
            Configuration of a trainer.

    Raises:
        `ValueError`: if completions are to be rejected before their baseline, if the old policy is none that is known, or if
            batch normalisation may see a single sequence.
    """
    if config.rollout_rs_exclude_from_baseline:
        raise ValueError(
            "`rollout_rs_exclude_from_baseline` is True, but in an asynchronous run the rollout worker computes rewards and "
            "baselines before the trainer has seen a sample, so nothing is known to be rejected by then. Set it to False."
        )
    check_proximal(config.rollout_proximal)
    packs = (
        config.token_budget is None or config.token_budget > 0
    )  # as many completions into a row as there is room for
    fewest = config.world_size * (1 if packs else config.per_device_train_batch_size)
    if _normalizes_sequences(config) and fewest == 1:
        raise ValueError(
            "`rollout_is_batch_normalize` is True, and in an asynchronous run it spans the micro-batch of all ranks, which "
            f"{'with this `token_budget` may be' if packs else 'is'} one completion: its weight would be 1. Set "
            "`token_budget` to 0 and `per_device_train_batch_size` to 2 or more, or `rollout_is_batch_normalize` to False."
        )


def warn_about_proximal(config: Any):
    """Warn if there is no old policy for `rollout_proximal` to stand for."""
    if config.rollout_proximal != "visit" and (config.bypass_mode or not config.corrects):
        reason = "it is the old policy of decoupled mode, with weights or rejection"
        warn_idle("rollout_proximal", config.rollout_proximal, reason)


def warn_about_clip_ratio(config: GRPOConfig):
    """
    Warn if TRL's loss does not bound the ratio to the sampler by `rollout_clip_ratio_c`.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration of a trainer.
    """
    if not (config.corrects and config.clips_around_sampler) or config.rollout_clip_ratio_c in (None, 3.0):
        return
    if config.loss_type in ("cispo", "sapo"):
        reason = f"`loss_type` is {config.loss_type!r}, which bounds the ratio in its own way"
    elif config.delta is not None:
        reason = f"`delta` is {config.delta}, which is the same bound and goes first"
    else:
        return
    warn_idle("rollout_clip_ratio_c", config.rollout_clip_ratio_c, reason)


def warn_about_iterations(config: GRPOConfig | RLOOConfig):
    """
    Warn if completions are visited several times by a loss that bounds no step.

    Args:
        config ([`~trl.GRPOConfig`] or [`~trl.RLOOConfig`]):
            Configuration of a trainer.
    """
    clips = not config.bypass_mode or config.rollout_loss_type != "reinforce"
    if not config.corrects or clips or config.num_iterations == 1:
        return
    if not any(criterion.directed for criterion in config.criteria):  # a trust region
        warn(
            f"`num_iterations` is {config.num_iterations} with `rollout_loss_type='reinforce'`, which has no clipping: only "
            "the bound of the weights limits the steps, and each visit of a completion moves the policy further. Set "
            "`rollout_loss_type` to 'ppo_clip', `num_iterations` to 1, or add a trust region: 'token_tv' in `rollout_rs`."
        )


def definer(trainer: type, method: str, after: type | None = None) -> type:
    """The class that a method comes from, among those after a class in the order of method resolution."""
    order = trainer.__mro__
    return next(cls for cls in order[order.index(after) + 1 if after else 0 :] if method in vars(cls))


def check_bases(trainer: type, mixin: type, trl_class: type, method: str = "_compute_loss"):
    """
    Refuse trainers whose loss is not TRL's.

    Args:
        trainer (`type`):
            Class of the trainer.
        mixin (`type`):
            The mixin among its bases. What comes before it goes through it; what comes after is the loss that it corrects.
        trl_class (`type`):
            TRL's trainer whose loss is known.
        method (`str`, *optional*, defaults to `"_compute_loss"`):
            Where its loss is.

    Raises:
        `TypeError`: if another class brings the loss.
    """
    found = definer(trainer, method, after=mixin)
    if found is not trl_class:
        raise TypeError(
            f"`{trainer.__name__}` inherits `{method}` from `{found.__name__}`, and rollout correction knows how to "
            f"enter the loss of `{trl_class.__name__}` only. Derive from the corrected trainer "
            f"alone, or train with `{found.__name__}` as it is."
        )


def check_config_class(args: Any, config_class: type):
    """Refuse arguments of another trainer."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` must be a `{config_class.__name__}`, got a `{type(args).__name__}`. It takes the same "
            "arguments, and those of rollout correction."
        )


def check_has_sampler(use_vllm: bool, trl_class: type):
    """Refuse to train without a sampler that says log-probabilities."""
    if not use_vllm:
        raise ValueError(
            "`use_vllm` is False, so there are no log-probabilities of the sampler to correct with. Set `use_vllm=True`, "
            f"or use `{trl_class.__name__}`."
        )


def check_logprobs(completion_ids: list[list[int]], logprobs: Any):
    """
    Check that there is one log-probability for each sampled token.

    Args:
        completion_ids (`list[list[int]]`):
            Sampled tokens, per sequence.
        logprobs (`list[list[float | None]]` or `None`):
            Their log-probabilities.

    Raises:
        `ValueError`: if they are missing, of another length than the completions, or nested.
    """
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


def check_dump_folder(folder: Path, *, new_run: bool):
    """
    Refuse a folder that a dump cannot be written to. It is made if it is not there.

    Args:
        folder (`Path`):
            `rollout_dump_dir`.
        new_run (`bool`):
            Whether the run starts at its first step, so that a dump that is there already is that of another run.

    Raises:
        `ValueError`: if it is not a folder, cannot be written to, or holds the dump of another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise ValueError(f"`rollout_dump_dir` is {str(folder)!r}, which cannot be used: {error}.") from None
    if new_run and (files_of(folder) or read_logs(folder)):
        raise ValueError(
            f"`rollout_dump_dir` is {str(folder)!r}, which holds the dump of another run. Name another folder (for a second "
            "`train()`, in `trainer.args`), or remove it, for instance if that run ended before a checkpoint."
        )


# What `rollout_monitor: tighten` may switch to --------------------------------------------------------------------------


# What a preset decides while a run goes on. Its mode stays that of the run.
TIGHTENED_FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")


def tighten(args: RolloutCorrectionConfig, name: Preset | None):
    """Give a configuration the weights and the rejection of a preset. The trainer reads them at every micro-batch."""
    preset = RolloutCorrectionConfig.from_preset(check_name(name))
    for field in TIGHTENED_FIELDS:
        setattr(args, field, getattr(preset, field))


def check_name(preset: Preset | None) -> Preset:
    """Check that there is a preset of a name, and return the name."""
    if preset is None or preset not in PRESETS:
        raise ValueError(
            f"`rollout_monitor_preset` is {preset!r}, but `rollout_monitor='tighten'` switches to it."
            f"{nearest(preset, PRESETS)} Available presets: {', '.join(PRESETS)}."
        )
    return preset


def check_tightened(config: RolloutCorrectionConfig, *, warns: bool = False):
    """Check what the monitor of a configuration may switch the run to, see [`check_preset`]."""
    if config.rollout_monitor == "tighten":
        check_preset(config.rollout_monitor_preset, config, warns=warns)


def check_preset(name: Preset | None, args: RolloutCorrectionConfig, *, warns: bool = False):
    """
    Check that a run can be switched to a preset.

    Args:
        name (`str`):
            Name of the preset.
        args ([`RolloutCorrectionConfig`]):
            Configuration of the run.
        warns (`bool`, *optional*, defaults to `False`):
            Whether to warn about what the run would then be warned about.

    Raises:
        `ValueError`: if there is no such preset, or it has another mode, corrects nothing, or cannot act in this run.
    """
    name = check_name(name)
    preset = RolloutCorrectionConfig.from_preset(name)
    refused = f"`rollout_monitor_preset` is {name!r}, which `rollout_monitor='tighten'` cannot switch to: "
    if _mode(preset) != _mode(args):
        raise ValueError(
            f"{refused}its mode is {_mode(preset)}, that of the run is {_mode(args)}. Choose a preset of the same mode."
        )
    if preset.rollout_is is None and preset.rollout_rs is None:
        raise ValueError(f"{refused}it has neither weights nor rejection.")
    if args.rollout_metrics_only:
        raise ValueError(f"{refused}`rollout_metrics_only` is True. Set it to False, or `rollout_monitor` to 'warn'.")
    tightened = copy(args)
    tightened.rollout_monitor = None  # it switches once
    known = _warnings_of(tightened, warns)
    tighten(tightened, name)
    try:
        found = _warnings_of(tightened, warns)
    except ValueError as error:
        raise ValueError(f"{refused}{error} Or choose another preset.") from None
    for message in found:
        if message not in known:
            warn(
                f"Once `rollout_monitor='tighten'` has switched to {name!r}: {message} Or choose another "
                "`rollout_monitor_preset`, as the settings of a preset stay as they are."
            )


def _warnings_of(config: RolloutCorrectionConfig, warns: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.check(warns=warns)
    return [str(warning.message) for warning in caught]


def _mode(config: RolloutCorrectionConfig) -> str:
    return f"bypass ({config.rollout_loss_type})" if config.bypass_mode else "decoupled"
