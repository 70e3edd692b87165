"""The configuration: flat fields, which keep what the user gave. It needs neither TRL nor torch."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self

from ..messages import SettingError, warn, warn_idle
from .criteria import CriterionName
from .fields import LossType, MonitorAction, NanPolicy, ReplayMode, Truth, WeightLevel
from .names import instead_of
from .presets import UNSET, values_of_preset
from .resolve import Settings, resolve
from .trl_correction import given_to_trl
from .unlikely import warn_about_bounds
from .words import description_of


# On a command line: several values, and a flag that is true if only named
_SEVERAL, _FLAG = {"nargs": "+"}, {"nargs": "?", "const": True}


@dataclass
class RolloutCorrectionConfig:
    r"""
    Configuration of rollout correction. `trl-rollout-corr docs fields` explains each field, with an example.

    All fields are flat, so that they can be given in Python, in a YAML file, as JSON, or on a command line. Thresholds
    are numbers and lists of numbers; verl's text form (`"0.6_1.6,2.5"`) is parsed too. The default of a field that the
    preset decides means "as the preset says". The fields keep what the user gave; `settings` gives the values in
    effect.

    Args:
        rollout_correction (`str` or `None`, *optional*, defaults to `"default"`):
            Name of a preset, or `None`; fields given with it override what it sets. By default `auto`, but `trl` if
            you change a field `vllm_importance_sampling_*` or set `loss_type` to vespo, and no preset if you set
            `rollout_is`, `rollout_rs` or `bypass_mode`.
        rollout_is (`str` or `None`, *optional*, defaults to `"preset"`):
            Level of the importance weights: token, window (of a token, the product of its ratio and those of the 15
            before it), turn, sequence (product of ratios), geometric (their mean), or `None`.
        rollout_is_threshold (`float` or `list`, *optional*):
            A number truncates the weights from above; outside a pair they are 0 (IcePop). Two pairs, such as
            `0_1,1_1`, are for negative and for positive advantages.
        rollout_is_clamp (`bool`, *optional*):
            Move weights outside a pair to the nearest bound instead of setting them to 0.
        rollout_is_stale_only (`bool`, *optional*):
            Weight only completions that older weights sampled: with the newest ones, the ratio counts as 1. A sampler
            that announces no age counts as old.
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the batch of all ranks.
        rollout_rs (`list[str]` or `None`, *optional*, defaults to `"preset"`):
            Rejection criteria, or `None`: `{token,turn_sum,turn_mean,turn_max,seq_sum,seq_mean,seq_max}_{k1,k2,k3}`,
            `token_{tv,kl,binary_kl}` and `seq_mean_{tv,binary_kl}`.
        rollout_rs_threshold (`float` or `list`, *optional*):
            One entry per criterion, or one for all: for k1 bounds on the ratio; for tv and kl a bound for negative and
            one for positive advantages; else an upper bound.
        rollout_rs_renormalize (`bool`, *optional*, defaults to `False`):
            Multiply the loss by valid tokens over kept tokens of the batch of all ranks.
        rollout_rs_exclude_from_baseline (`bool`, *optional*, defaults to `False`):
            Leave completions that are rejected as a whole out of the baseline of their group.
        bypass_mode (`bool`, *optional*):
            Use the sampler's log-probabilities instead of the old policy's.
        rollout_loss_type (`str`, *optional*):
            Loss in bypass mode: ppo_clip clips the ratio and only reports weights; reinforce applies weights.
        rollout_clip_ratio_c (`float` or `None`, *optional*, defaults to `3.0`):
            With ppo_clip: largest ratio with a gradient where the advantage is negative.
        rollout_metrics_only (`bool`, *optional*, defaults to `False`):
            Compute and report the correction, and leave the loss alone.
        rollout_nan_policy (`str`, *optional*, defaults to `"drop"`):
            A token whose log-ratio is not finite leaves the loss (drop), stops the run (raise), or gets a ratio of 1
            (neutralize).
        rollout_support (`str`, *optional*):
            With `top_p`, `top_k` or `min_p`, replay scores over the tokens that a colocated vLLM kept.
        rollout_engine_kwargs (`dict[str, Any]`, *optional*):
            Arguments of a colocated vLLM that TRL has no field for, such as `{"dtype": "float16"}`.
        rollout_routing (`str`, *optional*):
            replay: the trainer takes the experts that a colocated vLLM chose.
        rollout_monitor (`str` or `None`, *optional*, defaults to `"warn"`):
            Reaction to unhealthy metrics: warn, or `None`, which also switches the checks of pushes off.
        rollout_monitor_bounds (`dict[str, float]`, *optional*):
            Other limits of the monitor, by name of a bound; `None` switches a bound off.
        rollout_diagnose (`bool`, *optional*, defaults to `False`):
            Print the cause of the gap at the first optimizer step.
        rollout_dump_dir (`str`, *optional*):
            Folder to write sampled and worst sequences to, as Parquet.
        rollout_dump_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps between two dumps.
        rollout_dump_sampled (`int`, *optional*, defaults to `8`):
            Sequences, drawn at random over all ranks, per dump.
        rollout_dump_worst (`int`, *optional*, defaults to `8`):
            Sequences with the largest log-ratio of a token, over all ranks, per dump.
        rollout_dump_max_gb (`float`, *optional*, defaults to `1.0`):
            Size of the folder in GB above which the oldest steps are deleted.

    Raises:
        `ValueError`: if the value of a field is refused. The message names the field, the value and a remedy.
    """

    rollout_correction: str | None = "default"
    rollout_is: WeightLevel | None = "preset"
    rollout_is_threshold: float | str | list[float | list[float]] | None = field(default=None, metadata=_SEVERAL)
    rollout_is_clamp: Truth | None = field(default=None, metadata=_FLAG)
    rollout_is_stale_only: Truth | None = field(default=None, metadata=_FLAG)
    rollout_is_batch_normalize: bool = False
    rollout_rs: list[CriterionName] | str | None = field(default="preset", metadata=_SEVERAL)
    rollout_rs_threshold: float | str | list[float | list[float]] | None = field(default=None, metadata=_SEVERAL)
    rollout_rs_renormalize: bool = False
    rollout_rs_exclude_from_baseline: bool = False
    bypass_mode: Truth | None = field(default=None, metadata=_FLAG)
    rollout_loss_type: LossType | None = None
    rollout_clip_ratio_c: float | str | None = 3.0
    rollout_metrics_only: bool = False
    rollout_nan_policy: NanPolicy = "drop"
    rollout_support: ReplayMode | None = None
    rollout_engine_kwargs: Mapping[str, object] | str | None = None
    rollout_routing: ReplayMode | None = None
    rollout_monitor: MonitorAction | None = "warn"
    rollout_monitor_bounds: Mapping[str, float | None] | str | None = None
    rollout_diagnose: bool = False
    rollout_dump_dir: str | None = None
    rollout_dump_steps: int = 1
    rollout_dump_sampled: int = 8
    rollout_dump_worst: int = 8
    rollout_dump_max_gb: float = 1.0

    _trainer: ClassVar[str] = "grpo"  # of TRL, whose own correction `rollout_correction: trl` keeps
    _checks_of_trainer: ClassVar[Sequence[Callable[[Any, Settings], None]]] = ()  # these need TRL's fields

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Python's own error for an unknown argument does not suggest a name
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in kwargs.keys() - parameters:
                instead = instead_of(name, parameters)
                raise TypeError(f"`{name}` is not a field of {cls.__name__}.{instead}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        settings = self.settings
        _refuse_conflicts(settings)
        _warn_about_idle(settings, vars(self))
        _warn_about_conflicts(settings)
        bounds_of_trl = settings.by_trl and given_to_trl(vars(self))
        if bounds_of_trl or settings.given & {"rollout_is_threshold", "rollout_rs_threshold", "rollout_clip_ratio_c"}:
            warn_about_bounds(settings)

    @property
    def settings(self) -> Settings:
        """Settings in effect, from the fields' present values. A `ValueError` if one is refused."""
        return settings_from(vars(self), self._trainer)

    @property
    def description(self) -> str:
        """At most three sentences about the settings in effect, and one more if the run has chosen none of them."""
        return description_of(self.settings, vars(self))

    def check(self) -> Settings:
        """
        Check all fields, also the ones assigned since. A trainer does so when it is built.

        Returns:
            [`~trl_rollout_corr.settings.resolve.Settings`]: the settings in effect.

        Raises:
            `ValueError`: if a value is refused, or if two settings exclude each other.
        """
        settings = self.settings
        _refuse_conflicts(settings)
        for check in self._checks_of_trainer:
            check(self, settings)
        return settings


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}


def settings_from(fields: Mapping[str, Any], trainer: str) -> Settings:
    """
    Settings in effect of fields of this package and of TRL, by name, in the configuration of a `trainer`: a key of
    [`~trl_rollout_corr.settings.trl_correction.OF_TRAINER`]. Missing ones of this package have their default.
    """
    return resolve({**_DEFAULTS, **fields}, _DEFAULTS, trainer)


@cache
def settings_of_preset(name: str | None) -> Settings:
    """Settings in effect of a preset alone; of no correction for `None`. For `"trl"`, TRL's default in GRPO."""
    return settings_from({"rollout_correction": name}, "grpo")


def _show_help() -> None:
    """Make the docstring the text of `--help`."""
    text = inspect.getdoc(RolloutCorrectionConfig) or ""
    for name, sentences in re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n)+)", f"{text}\n", re.MULTILINE):
        option: Any = RolloutCorrectionConfig.__dataclass_fields__[name]
        option.metadata = {**option.metadata, "help": " ".join(sentences.split()).replace("%", "%%")}


_show_help()


# Fields that do not go together --------------------------------------------------------------------------------------


def _refuse_conflicts(settings: Settings) -> None:
    """Refuse fields next to TRL's own correction, and rejection too late for the baseline."""
    own = {*UNSET, "rollout_is_batch_normalize", "rollout_rs_renormalize", "rollout_rs_exclude_from_baseline"}
    given = settings.given
    is_named = given & {"rollout_correction", "rollout_is", "rollout_rs", "bypass_mode"}
    if not is_named and (alone := sorted(given & own)):
        reason = "but no correction is named that it belongs to"
        remedy = "Set `rollout_correction` to auto or to another preset, or set `rollout_is`."
        raise SettingError(alone[0], getattr(settings, alone[0]), reason, remedy=remedy)
    if settings.bounding is not None:  # TRL's weights would still act
        own.add("rollout_metrics_only")
    if settings.by_trl and (refused := sorted(given & own)):
        reason = (
            "but `rollout_correction: trl` keeps the loss of TRL, whose fields `vllm_importance_sampling_*` decide"
        )
        raise SettingError(refused[0], getattr(settings, refused[0]), reason, remedy="Remove one of the two.")
    if not settings.rollout_rs_exclude_from_baseline:
        return
    reason, remedy = "", "Set `rollout_rs_exclude_from_baseline` to False, or `bypass_mode` to False."
    if directed := [criterion.name for criterion in settings.criteria if criterion.directed]:
        reason = f"but {directed[0]!r} in `rollout_rs` depends on the advantages, which are computed from the baseline"
        remedy = "Set it to False, or use criteria that do not depend on them."
    elif settings.bypass_mode:
        reason = (
            "but `bypass_mode` computes no log-probabilities before the rewards are scored, so that no rejection is "
            "known at that time"
        )
    if reason:
        raise SettingError("rollout_rs_exclude_from_baseline", True, reason, remedy=remedy)


class _Idle(NamedTuple):
    """Fields that have no effect."""

    when: Callable[[Settings], Any]
    reason: str
    names: tuple[str, ...]


# Of two reasons for a field, the first is given
_IDLE = (
    _Idle(
        lambda settings: settings.rollout_is is None,
        "`rollout_is` is None",
        ("rollout_is_batch_normalize",),
    ),
    _Idle(
        # verl's files write 2.0 next to null
        lambda settings: settings.rollout_is is None and settings.rollout_is_threshold != 2.0,
        "`rollout_is` is None",
        ("rollout_is_threshold",),
    ),
    _Idle(
        lambda settings: settings.rollout_is is None and settings.rollout_is_clamp,
        "`rollout_is` is None",
        ("rollout_is_clamp",),
    ),
    _Idle(
        lambda settings: settings.rollout_is is None and settings.rollout_is_stale_only,
        "`rollout_is` is None",
        ("rollout_is_stale_only",),
    ),
    _Idle(
        lambda settings: settings.rollout_is_clamp and not isinstance(settings.rollout_is_threshold, list),
        "`rollout_is_threshold` is not a pair",
        ("rollout_is_clamp",),
    ),
    _Idle(
        lambda settings: not settings.applies_weights,
        "with `bypass_mode` and `rollout_loss_type='ppo_clip'` the weights are reported, not applied",
        ("rollout_is_batch_normalize",),
    ),
    _Idle(
        lambda settings: not settings.criteria,
        "`rollout_rs` is not set",
        ("rollout_rs_threshold", "rollout_rs_renormalize", "rollout_rs_exclude_from_baseline"),
    ),
    _Idle(
        lambda settings: not settings.bypass_mode,
        "`bypass_mode` is False, and the loss is TRL's `loss_type`",
        ("rollout_loss_type",),
    ),
    _Idle(
        lambda settings: settings.rollout_clip_ratio_c and not settings.clips_around_sampler,
        "it acts only in `bypass_mode` with `rollout_loss_type='ppo_clip'`",
        ("rollout_clip_ratio_c",),
    ),
    _Idle(
        lambda settings: not settings.has_correction,
        "there is no correction",
        ("rollout_metrics_only",),
    ),
    _Idle(
        lambda settings: settings.rollout_monitor is None,
        "`rollout_monitor` is None",
        ("rollout_monitor_bounds",),
    ),
    _Idle(
        lambda settings: settings.rollout_dump_dir is None,
        "`rollout_dump_dir` is None",
        ("rollout_dump_steps", "rollout_dump_sampled", "rollout_dump_worst", "rollout_dump_max_gb"),
    ),
)


def _warn_about_idle(settings: Settings, fields: Mapping[str, Any]) -> None:
    """Warn once about each of the given fields that has no effect."""
    left = set(settings.given)
    for row in _IDLE:
        idle = [name for name in row.names if name in left]
        if idle and row.when(settings):
            left.difference_update(idle)
            for name in idle:
                warn_idle(name, fields[name], row.reason)


def _warn_about_conflicts(settings: Settings) -> None:
    """Warn about fields on top of a preset that was not made for them."""
    name, preset = settings.rollout_correction, values_of_preset(settings.rollout_correction)
    if name == "disabled" and settings.corrects:
        acting = next(n for n in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(settings, n))
        warn(
            f"`rollout_correction` is 'disabled', but `{acting}` is {getattr(settings, acting)!r}, which acts. Set "
            f"`rollout_correction` to None if that is meant, or remove `{acting}`.",
            acting,
        )
    if settings.clips_around_sampler and preset["rollout_is"] and "rollout_is" not in settings.given:
        warn(
            f"`bypass_mode` with `rollout_loss_type='ppo_clip'` does not go with {name!r}: its importance weights are "
            "only reported, because PPO clips around the sampler. Take a preset that starts with bypass_ instead.",
            "bypass_mode",
        )
    level = preset["rollout_is"]
    other_level = level is not None and settings.rollout_is not in (None, level)
    has_bounds = "rollout_is_threshold" in settings.given
    if other_level and not has_bounds and isinstance(preset["rollout_is_threshold"], list):
        warn(
            f"`rollout_is` is {settings.rollout_is!r}, but the bounds {preset['rollout_is_threshold']} of {name!r} "
            f"are made for weights of level {level!r}. Set `rollout_is_threshold`, too.",
            "rollout_is",
        )
