"""Fields of a configuration, resolved to a [`Settings`], which the mathematics reads. No torch here."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..messages import SettingError
from .criteria import DIRECTED, SCOPES, Bounding, Criterion
from .fields import DEFAULTS, CorrectionFields, DumpFields, preset_name
from .legacy import first_preset
from .migrate import from_verl
from .presets import settings_of
from .thresholds import is_by_sign, parse_criteria, parse_rejection_thresholds


@dataclass(frozen=True)
class Settings:
    """Resolved settings of the correction: no preset is left to look up, and every threshold is a number."""

    mode: str  # "decoupled"; or the loss of bypass mode, "ppo_clip" or "reinforce"
    bounding: Bounding | None  # None for no weights
    criteria: tuple[Criterion, ...]  # with bounds in units of their statistic
    renormalizes: bool  # whether the loss is multiplied by valid tokens over kept tokens
    metrics_only: bool  # whether the loss is left alone
    nan_policy: str  # "drop", "raise" or "neutralize": treatment of a token whose log-ratio is not finite
    clip_ratio_c: float | None  # largest ratio to the sampler with gradient, for negative advantages; in "ppo_clip"
    excludes_from_baseline: bool  # whether completions that are rejected as a whole leave the baseline of their group

    @property
    def bypasses(self) -> bool:
        """`True` if the sampler's log-probabilities replace the old policy's."""
        return self.mode != "decoupled"

    @property
    def corrects(self) -> bool:
        """`True` if the loss differs from TRL's."""
        return (self.bounding is not None or bool(self.criteria) or self.bypasses) and not self.metrics_only

    @property
    def clips_around_sampler(self) -> bool:
        """`True` if PPO's ratio is the ratio to the sampler, which then is the correction."""
        return self.mode == "ppo_clip"

    @property
    def applies_weights(self) -> bool:
        """`True` if the importance weights multiply the policy gradient. PPO around the sampler has no place for them."""
        return self.bounding is not None and not self.clips_around_sampler

    @property
    def uses_turns(self) -> bool:
        """`True` if weights or criteria are of turns."""
        units = {criterion.unit for criterion in self.criteria}
        return "turn" in units or (self.bounding is not None and self.bounding.level == "turn")

    @property
    def normalizes(self) -> bool:
        """`True` if the applied weights are divided by their mean over the batch of all ranks."""
        return self.applies_weights and self.bounding is not None and self.bounding.normalized

    @property
    def needs_whole_batch(self) -> bool:
        """`True` if a factor of the loss depends on the batch of all ranks."""
        return self.normalizes or (bool(self.criteria) and self.renormalizes)


def resolve(fields: Mapping[str, Any]) -> Settings:
    """Resolve parsed fields of a configuration. Raises a `ValueError` if a threshold does not fit its criterion."""
    bounding = None
    if fields["rollout_is"] is not None:
        bounding = _bounding(fields)
    names = fields["rollout_rs"]
    thresholds = parse_rejection_thresholds(fields["rollout_rs_threshold"], names)
    return Settings(
        mode=fields["rollout_loss_type"] if fields["bypass_mode"] else "decoupled",
        bounding=bounding,
        criteria=tuple(_criterion(name, bounds) for name, bounds in zip(names or [], thresholds, strict=True)),
        renormalizes=fields["rollout_rs_renormalize"],
        metrics_only=fields["rollout_metrics_only"],
        nan_policy=fields["rollout_nan_policy"],
        clip_ratio_c=fields["rollout_clip_ratio_c"],
        excludes_from_baseline=fields["rollout_rs_exclude_from_baseline"],
    )


def fill(preset: str | None, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """
    Settings of a preset, with the fields of the user in their place. Overriding `rollout_rs` drops the preset's threshold, and
    overriding `rollout_is_threshold` resets `rollout_is_clamp`.
    """
    settings = settings_of(preset)
    if (
        "rollout_rs" in explicit
        and "rollout_rs_threshold" not in explicit
        and parse_criteria(explicit["rollout_rs"]) != settings["rollout_rs"]
    ):
        settings["rollout_rs_threshold"] = None
    if "rollout_is_threshold" in explicit:
        settings["rollout_is_clamp"] = False
    return {**settings, **explicit}


def _bounding(fields: Mapping[str, Any]) -> Bounding:
    """Bounds of the weights: a number truncates, a pair are bounds, two pairs are bounds by sign of the advantage."""
    threshold, clamps = fields["rollout_is_threshold"], fields["rollout_is_clamp"]
    pairs = threshold if is_by_sign(threshold) else [threshold] if isinstance(threshold, list) else []
    if not clamps and any(lower == upper for lower, upper in pairs):
        reason = "and weights outside the bounds are set to 0, so that no weight would be left"
        remedy = "Set `rollout_is_clamp` to True, or wider bounds."
        raise SettingError("rollout_is_threshold", threshold, reason, remedy=remedy)
    lower, upper = pairs[0] if pairs else (None, threshold)
    positive = tuple(pairs[1]) if len(pairs) > 1 else None
    return Bounding(fields["rollout_is"], lower, upper, clamps, fields["rollout_is_batch_normalize"], positive)


def _criterion(name: str, bounds: Any) -> Criterion:
    """Criterion of a name. Bounds on the ratio become bounds on `k1 = -log ratio`."""
    scope = next(scope for scope in SCOPES if name.startswith(f"{scope}_"))
    divergence = name.removeprefix(f"{scope}_")
    if divergence in DIRECTED:
        return Criterion(scope, divergence, -bounds[0], bounds[1])
    if divergence != "k1":
        return Criterion(scope, divergence, -math.inf, bounds)
    lower, upper = bounds
    return Criterion(scope, divergence, -math.log(upper), math.inf if lower == 0 else -math.log(lower))


def idle_fields(fields: Mapping[str, Any], correction: Settings) -> dict[str, str]:
    """Reasons why fields have no effect, by name of the field. `correction` is what the parsed `fields` resolve to."""
    bounding = correction.bounding
    no_weights = bounding is None and "`rollout_is` is None"
    no_rejection = not correction.criteria and "`rollout_rs` is not set"
    no_bypass = not correction.bypasses and "`bypass_mode` is False, and the loss is TRL's `loss_type`"
    no_clipping = "it acts only in `bypass_mode` with `rollout_loss_type='ppo_clip'`"
    reported = "with `bypass_mode` and `rollout_loss_type='ppo_clip'` the weights are reported, not applied"
    no_pair = bounding is not None and bounding.lower is None and "`rollout_is_threshold` is not a pair"
    reasons: dict[str, Any] = {
        "rollout_is_threshold": fields["rollout_is_threshold"] != 2.0 and no_weights,  # 2.0 is in saved configurations
        "rollout_is_batch_normalize": no_weights or (not correction.applies_weights and reported),
        "rollout_is_clamp": fields["rollout_is_clamp"] and (no_weights or no_pair),
        "rollout_rs_threshold": no_rejection,
        "rollout_rs_renormalize": no_rejection,
        "rollout_rs_exclude_from_baseline": no_rejection,
        "rollout_loss_type": fields["rollout_loss_type"] != "ppo_clip" and no_bypass,
        "rollout_clip_ratio_c": fields["rollout_clip_ratio_c"] and not correction.clips_around_sampler and no_clipping,
        "rollout_monitor_bounds": fields["rollout_monitor"] is None and "`rollout_monitor` is None",
    }
    no_dump = fields["rollout_dump_dir"] is None and "`rollout_dump_dir` is None"
    reasons |= {f.name: no_dump for f in dataclasses.fields(DumpFields) if f.name != "rollout_dump_dir"}
    return {name: reason for name, reason in reasons.items() if reason and fields[name] != DEFAULTS[name]}


# Values of `rollout_correction` ---------------------------------------------------------------------------------------


_OFF = ("none", "null", "false", "off", "no", "")


def read_given(value: object) -> tuple[str | None, dict[str, Any]]:
    """Name of the preset and further fields in a value of `rollout_correction`."""
    value = getattr(value, "shown", value)  # of a default
    if isinstance(value, CorrectionFields):
        return _fields_of(value)
    if isinstance(value, Mapping):
        return None, {"rollout_is": None, **from_verl(value)}
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
        return None, {}
    if isinstance(value, str):
        fields = first_preset(value) or {"rollout_correction": preset_name(value)}
        return fields.pop("rollout_correction"), fields
    allowed = "the name of a preset, a section of verl, a RolloutCorrectionConfig, or None for no correction"
    raise SettingError("rollout_correction", value, allowed=allowed)


def _fields_of(config: CorrectionFields) -> tuple[str | None, dict[str, Any]]:
    """Preset of a configuration, and the fields that differ from it and from the defaults."""
    name = None if isinstance(config.rollout_correction, Mapping) else config.rollout_correction
    preset = settings_of(name)
    fields = {key: getattr(config, key) for key in DEFAULTS}
    del fields["rollout_correction"], fields["rollout_correction_resolved"]
    own = {key: value for key, value in fields.items() if key not in preset and not is_default(config, key)}
    return name, {**own, **{key: fields[key] for key in preset if fields[key] != preset[key]}}


def is_default(config: CorrectionFields, name: str) -> bool:
    """`True` if a field has the default of this package, which a subclass may have replaced."""
    return bool(getattr(config, name) == DEFAULTS[name])
