"""Settings in effect: fields of a configuration, with the preset's values filled in. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, get_type_hints

from ..messages import SettingError
from .criteria import DIRECTED, LEVELS, SCOPES, Bounding, Criterion
from .fields import (
    LOSS_TYPES,
    MONITOR_ACTIONS,
    NAN_POLICIES,
    MonitorAction,
    Parser,
    at_least,
    one_of,
    or_none,
    parse_clip_ratio,
    parse_criteria_or_preset,
    parse_engine_kwargs,
    parse_folder,
    parse_gigabytes,
    parse_limits,
    parse_preset,
)
from .names import instead_of
from .presets import DEFAULT, UNSET, values_of_preset
from .thresholds import (
    WeightBounds,
    is_by_sign,
    parse_numbers,
    parse_rejection_thresholds,
    parse_truth,
    parse_weight_threshold,
)
from .trl_correction import OF_TRAINER, chooses_trl


@dataclass(frozen=True)
class Settings:
    """
    Settings in effect: all fields of [`RolloutCorrectionConfig`], each with the type of its value and the parser of
    what the user gives.
    """

    # Preset of the fields that the user did not give; None for no correction
    rollout_correction: Annotated[str | None, parse_preset] = field(compare=False)
    rollout_is: Annotated[str | None, one_of(*LEVELS, "preset", None)]
    rollout_is_threshold: Annotated[WeightBounds, or_none(parse_weight_threshold)]
    rollout_is_clamp: Annotated[bool, or_none(parse_truth)]
    rollout_is_stale_only: Annotated[bool, or_none(parse_truth)]
    rollout_is_batch_normalize: Annotated[bool, parse_truth]
    rollout_rs: Annotated[list[str] | None, parse_criteria_or_preset]
    # One entry for each criterion; without criteria, what was given
    rollout_rs_threshold: Annotated[Any, or_none(parse_numbers)]
    rollout_rs_renormalize: Annotated[bool, parse_truth]
    rollout_rs_exclude_from_baseline: Annotated[bool, parse_truth]
    bypass_mode: Annotated[bool, or_none(parse_truth)]
    rollout_loss_type: Annotated[str, one_of(*LOSS_TYPES, None)]
    rollout_clip_ratio_c: Annotated[float | None, or_none(parse_clip_ratio)]
    rollout_metrics_only: Annotated[bool, parse_truth]
    rollout_nan_policy: Annotated[str, one_of(*NAN_POLICIES)]
    rollout_support: Annotated[str | None, one_of("replay", None)]
    rollout_engine_kwargs: Annotated[dict[str, Any] | None, or_none(parse_engine_kwargs)]
    rollout_routing: Annotated[str | None, one_of("replay", None)]
    rollout_monitor: Annotated[MonitorAction | None, one_of(*MONITOR_ACTIONS, None)]
    rollout_monitor_bounds: Annotated[dict[str, float | None] | None, parse_limits]
    rollout_diagnose: Annotated[bool, parse_truth]
    rollout_dump_dir: Annotated[str | None, or_none(parse_folder)]
    rollout_dump_steps: Annotated[int, at_least(1)]
    rollout_dump_sampled: Annotated[int, at_least(0)]
    rollout_dump_worst: Annotated[int, at_least(0)]
    rollout_dump_max_gb: Annotated[float, parse_gigabytes]
    # No field: names of the fields that differ from their default
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Settings":
        """
        Settings that a run wrote, by name of their field. They are in effect already, so no preset decides any of them
        again. A `ValueError` if no run writes such a value, or such a field.
        """
        for name in written.keys() - FIELDS:
            raise ValueError(f"`{name}` is not a field of the configuration.{instead_of(name, FIELDS)}")
        if written["rollout_monitor"] == "stop":  # which earlier releases took, with the same alarms
            written = {**written, "rollout_monitor": "warn"}
        values = parse_fields(written)
        if values["rollout_rs"]:
            values["rollout_rs_threshold"] = parse_rejection_thresholds(
                values["rollout_rs_threshold"], values["rollout_rs"]
            )
        return cls(**values)

    @property
    def fields(self) -> dict[str, Any]:
        """The value in effect of each field, by its name."""
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def mode(self) -> str:
        """`"decoupled"`, or the loss of bypass mode: `"ppo_clip"` or `"reinforce"`."""
        return self.rollout_loss_type if self.bypass_mode else "decoupled"

    @cached_property
    def bounding(self) -> Bounding | None:
        """Level and bounds of the importance weights; `None` for no weights."""
        if self.rollout_is is None:
            return None
        threshold: Any = self.rollout_is_threshold
        normalized = self.rollout_is_batch_normalize
        by_sign = lower = None
        upper = threshold
        if isinstance(threshold, list):
            (lower, upper), *positive = threshold if is_by_sign(threshold) else [threshold]
            by_sign = (positive[0][0], positive[0][1]) if positive else None
        clamps, stale_only = self.rollout_is_clamp, self.rollout_is_stale_only
        return Bounding(self.rollout_is, lower, upper, clamps, normalized, by_sign, stale_only)

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """Rejection criteria, with bounds in units of their statistic."""
        if not self.rollout_rs:
            return ()
        return tuple(map(_criterion, self.rollout_rs, self.rollout_rs_threshold))

    @property
    def overriding_fields(self) -> tuple[str, ...]:
        """Names of the fields by which the user overrides the preset, and would any other one."""
        of_preset = {} if self.by_trl else values_of_preset(self.rollout_correction)
        changed = [name for name, value in of_preset.items() if getattr(self, name) != value]
        of_none = [name for name in ("rollout_is_batch_normalize", "rollout_metrics_only") if getattr(self, name)]
        return (*changed, *of_none)

    @property
    def has_correction(self) -> bool:
        """`True` if there is a correction, in effect or only measured."""
        return self.bounding is not None or bool(self.criteria) or self.bypass_mode

    @property
    def corrects(self) -> bool:
        """`True` if the loss corrects for the gap, here or in TRL."""
        return self.has_correction and not self.rollout_metrics_only

    @property
    def by_trl(self) -> bool:
        """`True` if TRL's own correction acts, and this package only measures."""
        return self.rollout_correction == "trl"

    @property
    def changes_loss(self) -> bool:
        """`True` if this package changes the loss."""
        return self.corrects and not self.by_trl

    @property
    def clips_around_sampler(self) -> bool:
        """`True` if PPO's ratio is the ratio to the sampler, which then is the correction."""
        return self.mode == "ppo_clip"

    @property
    def applies_weights(self) -> bool:
        """`True` if importance weights multiply the gradient, which they do not with `"ppo_clip"`."""
        return self.bounding is not None and not self.clips_around_sampler

    @property
    def acting_on_parts(self) -> tuple[str, ...]:
        """What acts on single tokens or turns: criteria, and the field of the weights."""
        criteria = tuple(c.name for c in self.criteria if c.unit in ("token", "turn"))
        weights = self.bounding is not None and self.bounding.unit != "seq" and self.applies_weights
        return (*criteria, *(["rollout_is"] if weights else []))

    @property
    def uses_turns(self) -> bool:
        """`True` if weights or criteria act on turns."""
        return self.rollout_is == "turn" or any(criterion.unit == "turn" for criterion in self.criteria)

    @property
    def weighs_stale_only(self) -> bool:
        """`True` if importance weights act on completions of older model weights only."""
        return self.bounding is not None and self.bounding.stale_only and self.applies_weights

    @property
    def normalizes(self) -> bool:
        """`True` if the applied weights are divided by their mean over the batch of all ranks."""
        return self.applies_weights and self.rollout_is_batch_normalize

    @property
    def needs_whole_batch(self) -> bool:
        """`True` if a factor of the loss depends on the batch of all ranks."""
        return self.normalizes or (bool(self.criteria) and self.rollout_rs_renormalize)


PARSERS: dict[str, Parser] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
    if name != "given"
}
FIELDS = PARSERS.keys()


def parse_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed values of all fields. `None` and `"preset"` may stand for a value that a preset decides."""
    return {name: parse(given[name], name) for name, parse in PARSERS.items()}


def resolve(fields: Mapping[str, Any], defaults: Mapping[str, Any], trainer: str) -> Settings:
    """
    Settings of what a user gives to a trainer: all fields of this package, and TRL's, by name. A field with its value
    of [`UNSET`] gets the value of the preset, which for `"trl"` depends on the `trainer` and TRL's fields. The preset
    `"default"` is none if weights, rejection or a mode are given.
    """
    parsed = parse_fields(fields)
    own = {name: parsed[name] for name in UNSET if parsed[name] != UNSET[name]}
    preset = parsed["rollout_correction"]
    if preset == "default":
        alone = own.keys() & {"rollout_is", "rollout_rs", "bypass_mode"}
        of_trl = chooses_trl(fields, only_measures=parsed["rollout_metrics_only"])
        preset = None if alone else "trl" if of_trl else DEFAULT
    of_preset = {**values_of_preset(preset), **(OF_TRAINER[trainer](fields) if preset == "trl" else {})}
    if own.get("rollout_rs", of_preset["rollout_rs"]) != of_preset["rollout_rs"]:
        of_preset["rollout_rs_threshold"] = None  # no criterion gets the threshold of another
    values: dict[str, Any] = {**parsed, **of_preset, **own, "rollout_correction": preset}
    if parsed["rollout_nan_policy"] != "drop":  # TRL sets the ratio of a token without a log-probability to 1
        values["rollout_nan_policy"] = parsed["rollout_nan_policy"]
    thresholds, names = values["rollout_rs_threshold"], values["rollout_rs"]
    values["rollout_rs_threshold"] = parse_rejection_thresholds(thresholds, names) if names else thresholds
    bounds, clamps = values["rollout_is_threshold"], values["rollout_is_clamp"]
    pairs = bounds if is_by_sign(bounds) else [bounds] if isinstance(bounds, list) else []
    if values["rollout_is"] and not clamps and any(lower == upper for lower, upper in pairs):
        reason = "and weights outside the bounds are set to 0, so that no weight would be left"
        remedy = "Set `rollout_is_clamp` to True, or wider bounds."
        raise SettingError("rollout_is_threshold", bounds, reason, remedy=remedy)
    return Settings(**values, given=frozenset(name for name, x in parsed.items() if x != defaults[name]))


def _criterion(name: str, bounds: Any) -> Criterion:
    """Criterion with this name. Bounds on the ratio become bounds on `k1 = -log ratio`."""
    scope = next(scope for scope in SCOPES if name.startswith(f"{scope}_"))
    divergence = name.removeprefix(f"{scope}_")
    if scope == "token" and divergence in DIRECTED:
        return Criterion(scope, divergence, -bounds[0], bounds[1])
    if divergence != "k1":
        return Criterion(scope, divergence, -math.inf, bounds)
    lower, upper = bounds
    return Criterion(scope, divergence, -math.log(upper), math.inf if lower == 0 else -math.log(lower))
