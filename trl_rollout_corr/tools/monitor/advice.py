"""The correction to set for a gap, given the mode of a run, its trainer and the age of its data."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from ...messages import capitalized
from ...settings.config import RolloutCorrectionConfig
from ...settings.resolve import Settings


# The preset to set for a gap, by mode. None needs bounds fitted to the run, and in bypass mode none
# needs the old policy. `bypass_ppo_clip` kept the gain of fresh weights in fewest settings (`docs/choosing.md`)
ADVISED = {"decoupled": "auto", "ppo_clip": "bypass_dppo_tv", "reinforce": "bypass_dppo_tv"}
# The preset for GRPO with weights of 8 bits, whatever the mode (`docs/models.md`)
_ADVISED_FOR_8_BITS = "bypass_dppo_tv"
# Age in optimizer steps from which weights count as stale. Younger ones count as fresh. Only an
# earlier comparison, whose runs are gone, had an age of 2
STALE = 3
STALE_WEIGHTS = f"stale weights ({STALE} steps old or more)"
# With fresh weights, token weights replace `auto` (`docs/choosing.md`): TRL's own if the trainer
# offers them
MODE, _SWITCH = "vllm_importance_sampling_mode", "vllm_importance_sampling_correction"
_OF_TRL = {"rollout_correction": "trl", MODE: "token_truncate"}
_OURS = {"rollout_correction": "decoupled_token_is"}
# Fields that `rollout_correction: trl` refuses, and that presets of this package leave alone
_REFUSED = ("rollout_is_batch_normalize", "rollout_rs_renormalize", "rollout_rs_exclude_from_baseline")


class Correction(NamedTuple):
    """
    Settings to set, and fields to remove with them. Both are empty if the run already corrects so.
    """

    settings: Mapping[str, object]
    remove: tuple[str, ...] = ()


class Advice(NamedTuple):
    """The correction to set for a gap."""

    best: Correction  # for stale weights if the age is unknown
    fresh: Correction | None = None  # for fresh weights if the age is unknown


def advise(settings: Settings | None, age: float | None, fields: Mapping[str, Any]) -> Advice:
    """
    The correction to set for a gap in a run with these `settings`. `age` is the age of its oldest
    completion in optimizer steps. Both are `None` if unknown. `fields` are the known fields of TRL,
    by name.
    """
    for_stale = _missing({"rollout_correction": preset_for_stale(settings, fields)}, settings, fields)
    for_fresh = _missing(_for_fresh(settings, fields), settings, fields)
    if is_stale(age, fields):
        return Advice(for_stale)
    # the user's own sampler counts as fresh unless it reports the step of its weights
    if age is None or fields.get("use_vllm") is False:
        return Advice(for_stale, for_fresh)
    return Advice(for_fresh)


def preset_for_stale(settings: Settings | None, fields: Mapping[str, Any]) -> str:
    """The preset to set with stale weights."""
    if not _takes_reinforce(fields):
        return ADVISED["decoupled"]
    here = trl_corrects(fields) and fields.get("vllm_mode") == "colocate"  # a server has arguments of its own
    return _ADVISED_FOR_8_BITS if here and samples_with_8_bits(settings) else ADVISED[mode_to_keep(settings)]


def samples_with_8_bits(settings: Settings | None) -> bool:
    """True if `rollout_engine_kwargs` makes vLLM round weights to 8 bits, and none to fewer."""
    engine = (settings.rollout_engine_kwargs if settings else None) or {}
    schemes = [engine.get("quantization")]
    if schemes == ["online"]:  # then `quantization_config` names a scheme for each kind of layers
        config = engine.get("quantization_config") or {}
        parts = [config.get("linear"), config.get("moe"), *(config.get("targets") or {}).values()]
        schemes = [part.get("weight") if isinstance(part, Mapping) else part for part in parts if part]
    return bool(schemes) and all("8" in str(scheme) for scheme in schemes)


def _takes_reinforce(fields: Mapping[str, Any]) -> bool:
    """True if no field of TRL excludes the presets with `rollout_loss_type: reinforce`."""
    cap = fields.get("epsilon_high") or fields.get("epsilon") or 0.0
    shrinks = fields.get("loss_type") == "cispo" and cap < 1.0
    return fields.get("importance_sampling_level", "token") == "token" and not shrinks


def mode_to_keep(settings: Settings | None) -> str:
    """The mode of a run's next correction: bypass mode if a correction of this package uses it now."""
    keeps = settings is not None and settings.bypass_mode and not settings.by_trl
    return settings.mode if settings is not None and keeps else "decoupled"


def is_stale(age: float | None, fields: Mapping[str, Any]) -> bool:
    """
    True if the weights that sampled the oldest completion are known to be stale. The optimizer
    steps that train on one generation (`steps_per_generation`, `num_iterations`) do not count: they
    are PPO's, and the correction compares the sampler with the trainer before them.
    """
    return age is not None and age - _reused(fields) >= STALE


def _reused(fields: Mapping[str, Any]) -> float:
    """Optimizer steps after the first one that train on the same generation."""
    micro_batches, accumulated = fields.get("steps_per_generation"), fields.get("gradient_accumulation_steps")
    if not micro_batches or not accumulated:
        return 0.0
    return float(max(micro_batches * (fields.get("num_iterations") or 1) / accumulated - 1, 0.0))


def known_age(oldest: float | None, step: int) -> float | None:
    """
    Age of the oldest completion up to a step; `None` if unknown. All weights are fresh in step 1.
    """
    return None if oldest is None or (oldest < 1 and step <= 1) else oldest


def _for_fresh(settings: Settings | None, fields: Mapping[str, Any]) -> dict[str, object]:
    """Settings for fresh weights."""
    weighs = settings is not None and settings.by_trl and settings.bounding is not None
    if not (weighs and not fields) and not trl_corrects(fields):
        return {**_OURS}
    return {**_OF_TRL, **({_SWITCH: True} if fields.get(_SWITCH) is False else {})}


def trl_corrects(fields: Mapping[str, Any]) -> bool:
    """
    True if `rollout_correction: trl` corrects: GRPO with vLLM. TRL corrects nothing in RLOO and with
    another sampler, and its asynchronous loss clips around the sampler.
    """
    return bool(fields.get("use_vllm")) and MODE in fields


def clips_by_trl(settings: Settings | None, fields: Mapping[str, Any]) -> bool:
    """
    True if TRL's asynchronous loss acts, which clips around the sampler whatever switches TRL's
    other corrections off.
    """
    asynchronous = "per_device_train_batch_size" in fields and "use_vllm" not in fields
    return asynchronous and settings is not None and not settings.changes_loss


def _missing(advised: Mapping[str, object], run: Settings | None, fields: Mapping[str, Any]) -> Correction:
    """The part of a correction that a run lacks, and the fields that would refuse it."""
    by_trl = advised["rollout_correction"] == "trl"
    # a loss with importance weights of its own, which goes with TRL's correction alone
    loss = ["loss_type"] if fields.get("loss_type") == "vespo" and not by_trl else []
    if run is None:
        return Correction(advised, (*loss,))
    if run.corrects and _has(advised, run):
        return Correction({})
    refused = [name for name in _REFUSED if getattr(run, name)] if by_trl else []
    return Correction(advised, (*dict.fromkeys([*run.beside, *refused, *loss]),))


def _has(advised: Mapping[str, object], run: Settings) -> bool:
    name = str(advised["rollout_correction"])
    if name in ADVISED.values():
        return has_preset(run, name)
    # each token gets a truncated weight, at whatever cap
    return not run.bypass_mode and not run.criteria and run.bounding is not None and run.bounding.grows


def has_preset(run: Settings, name: str) -> bool:
    """True if weights, rejection and mode of a run are as in a preset."""
    preset = _settings_of(name)
    return all(getattr(run, x) == getattr(preset, x) for x in ("mode", "bounding", "criteria"))


@cache
def _settings_of(preset: str) -> Settings:
    return RolloutCorrectionConfig(rollout_correction=preset).settings


# In words ---------------------------------------------------------------------------------------------------------------


def in_words(advice: Advice, run: Settings | None) -> str:
    """A sentence that says what to set; empty if there is nothing to set."""
    best, fresh = advice
    parts = []
    if best.settings:
        parts.append(f"{'' if fresh is None else f'with {STALE_WEIGHTS}, '}{to_set(best, run)}")
    if fresh is not None and (fresh.settings or parts):
        parts.append(with_fresh(fresh, run) if parts else f"with fresher weights, {to_set(fresh, run)}")
    return f"{capitalized('; '.join(parts))}{', unless the run has it' if run is None else ''}." if parts else ""


def with_fresh(correction: Correction, run: Settings | None) -> str:
    """Advice for weights that are not stale, to follow a clause about stale weights."""
    return f"with fresher ones, {to_set(correction, run) if correction.settings else 'the correction of the run is right'}"


def to_set(correction: Correction, run: Settings | None) -> str:
    """Settings to set, and fields to remove, as the end of a sentence."""
    of_run = None if run is None else run.rollout_correction
    pairs = [
        f"`{name}` to {str(value).lower()}"
        for name, value in correction.settings.items()
        if (name, value) != ("rollout_correction", of_run) or len(correction.settings) == 1
    ]
    *first, last = pairs
    remove = f" (and remove {', '.join(f'`{name}`' for name in correction.remove)})" if correction.remove else ""
    return f"set {' and '.join(filter(None, [', '.join(first), last]))}{remove}"


def to_leave(advice: Advice, run: Settings | None) -> str:
    """
    A sentence for a run with weights together with a trust region, as `auto` has them, whose
    completions are fresh or may be: what to set in their place. Empty for others.
    """
    in_place = advice.best if advice.fresh is None else advice.fresh
    if run is None or in_place.settings.get("rollout_correction") not in (
        _OF_TRL["rollout_correction"],
        _OURS["rollout_correction"],
    ):
        return ""
    region = any(criterion.directed for criterion in run.criteria)
    if run.bypass_mode or not run.corrects or run.bounding is None or not region:
        return ""
    doubt = "" if advice.fresh is None else "if the weights that sample are fresh: "
    return capitalized(
        f"{doubt}weights together with a trust region, as `auto` has them, did harm in our runs with fresh weights and such a "
        f"gap, and token weights did not, so {to_set(in_place, run)}."
    )
