"""What to correct and how: flat fields, validated when the configuration is built. Neither TRL nor torch here."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .criteria import LEVELS, Criterion
from .messages import warn
from .migrate import from_legacy, from_trl, from_verl
from .presets import PRESETS
from .rules import parse_bounds
from .thresholds import parse_criteria, parse_rejection_thresholds, parse_weight_threshold


LOSS_TYPES = ("ppo_clip", "reinforce")
NAN_POLICIES = ("drop", "raise", "neutralize")
MONITOR_ACTIONS = ("warn", "stop", "tighten")


class _Unset:
    """Marks a default that a preset may fill in, unless the user sets the field, be it to the same value."""


class _UnsetStr(_Unset, str):
    def __str__(self):  # argparse converts string defaults with `str`, which must not lose the mark
        return self


class _UnsetFloat(_Unset, float):
    pass


class _UnsetFalse(_Unset, int):  # bool cannot be subclassed
    def __str__(self):
        return "False"


_UNSET_FALSE: Any = _UnsetFalse()


class _UnsetList(_Unset, list):
    pass


@dataclass
class RolloutCorrectionConfig:
    r"""
    Configuration of rollout correction.

    All fields are flat, so that they can be given in Python, in a YAML file, as JSON, or on a command line. Thresholds are
    numbers and lists of numbers; verl's text form (`"0.6_1.6,2.5"`) is parsed too.

    Args:
        rollout_correction (`str`, *optional*):
            Name of a preset (see `docs/presets.md`). Fields that are set beside it override it.

        > Importance sampling

        rollout_is (`str` or `None`, *optional*, defaults to `"token"`):
            Level of the importance weights: `"token"` for `exp(d)`, `"sequence"` for `exp(sum d)`, `"geometric"` for
            `exp(mean d)`, with `d = logp_train - logp_rollout`. `None` for no weights.
        rollout_is_threshold (`float` or `list[float]`, *optional*, defaults to `2.0`):
            A number truncates the weights from above. A pair `[lower, upper]` sets those outside it to 0 (IcePop).
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the batch of all ranks (self-normalised importance sampling): over tokens
            at token level, over sequences otherwise. In decoupled mode the batch is the generation batch, and the old
            log-probabilities are computed when it is generated. In bypass mode it is the micro-batch of all ranks.

        > Rejection

        rollout_rs (`list[str]`, *optional*):
            Rejection criteria, each `<scope>_<divergence>` with scope `token`, `seq_sum`, `seq_mean` or `seq_max` and
            divergence `k1 = -d`, `k2 = d^2/2` or `k3 = exp(d)-1-d`. A token is kept if every criterion keeps it.
        rollout_rs_threshold (`float` or `list`, *optional*):
            One entry per criterion, or one for all. For k1 a pair of bounds on the ratio, or `u` for `[1/u, u]`; for k2 and
            k3 an upper bound in nats.
        rollout_rs_renormalize (`bool`, *optional*, defaults to `False`):
            Multiply the loss by valid tokens over kept tokens of the batch of all ranks (same batch as for
            `rollout_is_batch_normalize`). By default a rejected token adds zero to the loss and stays in TRL's
            denominators.
        rollout_rs_exclude_from_baseline (`bool`, *optional*, defaults to `False`):
            Leave sequences that are rejected as a whole out of the baseline of their group. Costs a forward pass at
            generation; not available in bypass mode.

        > Mode

        bypass_mode (`bool`, *optional*, defaults to `False`):
            Use the sampler's log-probabilities in place of the old policy's, which are then never computed.
        rollout_loss_type (`str`, *optional*, defaults to `"ppo_clip"`):
            Loss in bypass mode: `"ppo_clip"` clips the ratio to the rollout policy, which is the correction, so that
            weights are only reported; `"reinforce"` weights the log-likelihood and does not clip.
        rollout_metrics_only (`bool`, *optional*, defaults to `False`):
            Compute and report everything the other fields ask for, and leave the loss alone.

        > Failures of the sampler

        rollout_nan_policy (`str`, *optional*, defaults to `"drop"`):
            What to do with a token whose log-ratio is not finite: `"drop"` takes it out of the policy loss and of all
            statistics, `"raise"` stops the run, `"neutralize"` takes its ratio as 1.

        > Monitor

        rollout_monitor (`str` or `None`, *optional*, defaults to `"warn"`):
            What happens when the metrics look unhealthy (see `docs/monitoring.md`): `"warn"` says what was seen, why it
            matters and what to set; `"stop"` also saves a checkpoint and ends training at a serious finding; `"tighten"`
            switches to the preset of `rollout_monitor_preset` instead. `None` for no monitor.
        rollout_monitor_preset (`str`, *optional*):
            Preset that `"tighten"` switches to. It must have the mode (`bypass_mode`, `rollout_loss_type`) of the run.
        rollout_monitor_bounds (`dict[str, float]`, *optional*):
            Other bounds of the rules, by name of the rule; `None` switches a rule off.

        > Dump

        rollout_dump_dir (`str`, *optional*):
            Folder to write sampled and worst sequences to, as Parquet, for `python -m trl_rollout_corr report` and
            `compare`. Nothing is written by default.
        rollout_dump_steps (`int`, *optional*, defaults to `1`):
            Number of optimizer steps between two dumps.
        rollout_dump_sampled (`int`, *optional*, defaults to `8`):
            Number of sequences, drawn at random over all ranks, per dump.
        rollout_dump_worst (`int`, *optional*, defaults to `8`):
            Number of sequences with the largest log-ratio of a token, over all ranks, per dump.
        rollout_dump_max_gb (`float`, *optional*, defaults to `1.0`):
            Size of the folder in GB above which the oldest steps are deleted.

    Raises:
        `ValueError`: if a field has a value that cannot be meant; the message names the field, the value and the way out.
    """

    rollout_correction: str | None = field(
        default=None, metadata={"help": "Name of a preset. Fields that are set beside it override it."}
    )
    rollout_is: str | None = field(
        default=_UnsetStr("token"),
        metadata={"help": "Level of the importance weights: token, sequence, geometric, or none."},
    )
    rollout_is_threshold: float | str | list[float] | None = field(
        default=_UnsetFloat(2.0),
        metadata={"help": "Upper bound of the weights, or a pair [lower, upper] outside which they are 0 (IcePop)."},
    )
    rollout_is_batch_normalize: bool = field(
        default=False, metadata={"help": "Divide the weights by their mean over the batch of all ranks."}
    )
    rollout_rs: list[str] | None = field(
        default_factory=_UnsetList,
        metadata={"help": "Rejection criteria: {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, or none."},
    )
    rollout_rs_threshold: float | str | list[Any] | None = field(
        default=None,
        metadata={"help": "One entry per criterion: bounds [lower, upper] on the ratio for k1, an upper bound else."},
    )
    rollout_rs_renormalize: bool = field(
        default=False, metadata={"help": "Multiply the loss by valid tokens over kept tokens."}
    )
    rollout_rs_exclude_from_baseline: bool = field(
        default=False, metadata={"help": "Leave sequences rejected as a whole out of their group's baseline."}
    )
    bypass_mode: bool = field(
        default=_UNSET_FALSE, metadata={"help": "Use the sampler's log-probabilities as the old policy's."}
    )
    rollout_loss_type: str = field(
        default=_UnsetStr("ppo_clip"), metadata={"help": "Loss in bypass mode: ppo_clip or reinforce."}
    )
    rollout_metrics_only: bool = field(
        default=False, metadata={"help": "Compute and report everything, leave the loss alone."}
    )
    rollout_nan_policy: str = field(
        default="drop",
        metadata={"help": "Token with a log-probability that is not finite: drop, raise or neutralize."},
    )
    rollout_monitor: str | None = field(
        default="warn", metadata={"help": "When metrics look unhealthy: warn, stop, tighten, or none for no monitor."}
    )
    rollout_monitor_preset: str | None = field(
        default=None, metadata={"help": "Preset that `rollout_monitor: tighten` switches to."}
    )
    rollout_monitor_bounds: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Bounds of the monitor by name of the rule; null switches a rule off."}
    )
    rollout_dump_dir: str | None = field(
        default=None, metadata={"help": "Folder for sampled and worst sequences, as Parquet."}
    )
    rollout_dump_steps: int = field(default=1, metadata={"help": "Optimizer steps between two dumps."})
    rollout_dump_sampled: int = field(default=8, metadata={"help": "Sequences drawn at random per dump."})
    rollout_dump_worst: int = field(default=8, metadata={"help": "Sequences with the largest log-ratio per dump."})
    rollout_dump_max_gb: float = field(
        default=1.0, metadata={"help": "Size of the dump in GB above which its oldest steps are deleted."}
    )

    def __post_init__(self):
        explicit = self._resolve_preset()
        self._parse()
        self._parse_monitor_and_dump()
        self._warn_about_idle_fields(explicit)

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """
        Build a configuration from a preset.

        Args:
            name (`str`):
                Name of the preset.
            overrides:
                Further fields of the class; those of rollout correction override the preset.

        Returns:
            An instance of the class this is called on.
        """
        return cls(rollout_correction=name, **overrides)

    @classmethod
    def from_verl(cls, settings: Mapping[str, Any] | None, **overrides):
        """
        Build a configuration from the `rollout_correction` section of a verl configuration.

        See [`~trl_rollout_corr.migrate.from_verl`] for what is translated. `overrides` are further fields of the class.
        """
        return cls(**{**from_verl(settings), **overrides})

    @classmethod
    def from_legacy(cls, settings: Mapping[str, Any], **overrides):
        """
        Build a configuration from the flat `rollout_is*` keys of verl's first releases.

        See [`~trl_rollout_corr.migrate.from_legacy`] for what is translated. `overrides` are further fields of the class.
        """
        return cls(**{**from_legacy(settings), **overrides})

    @classmethod
    def from_trl(cls, settings: Mapping[str, Any], **overrides):
        """
        Build a configuration that does what TRL's `vllm_importance_sampling_*` settings did.

        See [`~trl_rollout_corr.migrate.from_trl`] for what is translated. `overrides` are further fields of the class.
        """
        return cls(**{**from_trl(settings), **overrides})

    # What the fields amount to ----------------------------------------------------------------------------------------

    @property
    def corrects(self) -> bool:
        """Whether the loss differs from TRL's."""
        asked = self.rollout_is is not None or self.rollout_rs is not None or self.bypass_mode
        return asked and not self.rollout_metrics_only

    @property
    def applies_weights(self) -> bool:
        """Whether the importance weights multiply the policy gradient. With PPO around the sampler, they must not."""
        return self.rollout_is is not None and not (self.bypass_mode and self.rollout_loss_type == "ppo_clip")

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a factor has to be computed over the batch of all ranks."""
        return (self.applies_weights and self.rollout_is_batch_normalize) or (
            self.rollout_rs is not None and self.rollout_rs_renormalize
        )

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the importance weights; the lower one is `None` for truncation."""
        threshold: Any = self.rollout_is_threshold  # parsed when the configuration was built
        return tuple(threshold) if isinstance(threshold, list) else (None, threshold)

    @property
    def criteria(self) -> list[Criterion]:
        """Rejection criteria, with bounds in units of their statistic."""
        thresholds: Any = self.rollout_rs_threshold or []
        return [_criterion(name, bounds) for name, bounds in zip(self.rollout_rs or [], thresholds, strict=True)]

    # Construction -----------------------------------------------------------------------------------------------------

    def _resolve_preset(self) -> set[str]:
        """Fill in the preset and strip the marks of the defaults. Returns the names of the fields that the user set."""
        name = _none_if_null(self.rollout_correction)
        if name is not None and name not in PRESETS:
            raise ValueError(f"`rollout_correction` is {name!r}. Available presets: {', '.join(PRESETS)}.")
        preset = PRESETS.get(name, {})
        own_fields = [f.name for f in dataclasses.fields(RolloutCorrectionConfig) if f.name != "rollout_correction"]
        explicit = {key for key in own_fields if not isinstance(getattr(self, key), _Unset)}
        if self.rollout_rs_threshold is None:
            explicit.discard("rollout_rs_threshold")
        self.rollout_correction = name
        for key in own_fields:
            value = getattr(self, key) if key in explicit else preset.get(key, getattr(self, key))
            setattr(self, key, _strip_mark(value))
        if (
            "rollout_rs" in explicit
            and "rollout_rs_threshold" not in explicit
            and parse_criteria(self.rollout_rs) != preset.get("rollout_rs")
        ):
            self.rollout_rs_threshold = None  # the preset's threshold goes with the preset's criteria
        return explicit

    def _parse(self):
        self.rollout_is = _choice("rollout_is", _none_if_null(self.rollout_is), LEVELS, or_none=True)
        self.rollout_loss_type = _choice("rollout_loss_type", self.rollout_loss_type, LOSS_TYPES)
        self.rollout_nan_policy = _choice("rollout_nan_policy", self.rollout_nan_policy, NAN_POLICIES)
        for name in (
            "bypass_mode",
            "rollout_is_batch_normalize",
            "rollout_rs_renormalize",
            "rollout_rs_exclude_from_baseline",
            "rollout_metrics_only",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be true or false, got {getattr(self, name)!r}.")
        if self.rollout_is_threshold is None:
            raise ValueError(
                "`rollout_is_threshold` must be a number or a pair [lower, upper], got None. For weights without a bound "
                "set it to inf; for no weights set `rollout_is` to None."
            )
        self.rollout_is_threshold = parse_weight_threshold(self.rollout_is_threshold)
        self.rollout_rs = parse_criteria(self.rollout_rs)
        self.rollout_rs_threshold = _none_if_null(self.rollout_rs_threshold)
        if self.rollout_rs is not None:
            if self.rollout_rs_threshold is None:
                raise ValueError(
                    f"`rollout_rs` is {self.rollout_rs}, but `rollout_rs_threshold` is not set. Give one entry per "
                    "criterion: bounds on the ratio such as [0.5, 2.0] for k1, an upper bound such as 0.01 for k2 and k3."
                )
            self.rollout_rs_threshold = parse_rejection_thresholds(self.rollout_rs_threshold, self.rollout_rs)
        if self.rollout_rs_exclude_from_baseline and self.bypass_mode:
            raise ValueError(
                "`rollout_rs_exclude_from_baseline` is True, but `bypass_mode` computes no log-probabilities before the "
                "rewards are scored, so nothing is known to be rejected by then. Set one of the two to False."
            )

    def _parse_monitor_and_dump(self):
        self.rollout_monitor = _choice(
            "rollout_monitor", _none_if_null(self.rollout_monitor), MONITOR_ACTIONS, or_none=True
        )
        self.rollout_monitor_preset = _none_if_null(self.rollout_monitor_preset)
        self.rollout_monitor_bounds = parse_bounds(_none_if_null(self.rollout_monitor_bounds)) or None
        self.rollout_dump_dir = _none_if_null(self.rollout_dump_dir)
        if self.rollout_dump_dir is not None:
            self.rollout_dump_dir = os.path.expanduser(os.fspath(self.rollout_dump_dir))
        for name, smallest in (("rollout_dump_steps", 1), ("rollout_dump_sampled", 0), ("rollout_dump_worst", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"`{name}` must be an integer of {smallest} or more, got {value!r}.")
        if not self.rollout_dump_max_gb > 0:
            raise ValueError(f"`rollout_dump_max_gb` must be a number above 0, got {self.rollout_dump_max_gb!r}.")
        if self.rollout_dump_dir is not None and not self.rollout_dump_sampled + self.rollout_dump_worst:
            raise ValueError(
                "`rollout_dump_dir` is set, but `rollout_dump_sampled` and `rollout_dump_worst` are both 0, so nothing would "
                "be written. Set one of them, or `rollout_dump_dir` to None."
            )

    def _warn_about_idle_fields(self, explicit: set[str]):
        reasons = {
            "rollout_is_threshold": self.rollout_is is None
            and self.rollout_is_threshold != 2.0  # a saved configuration lists every field
            and "`rollout_is` is None",
            "rollout_is_batch_normalize": self.rollout_is_batch_normalize and self._idle_normalization(),
            "rollout_rs_threshold": self.rollout_rs is None and "`rollout_rs` is not set",
            "rollout_rs_renormalize": self.rollout_rs_renormalize
            and not self.rollout_rs
            and "`rollout_rs` is not set",
            "rollout_rs_exclude_from_baseline": self.rollout_rs_exclude_from_baseline
            and not self.rollout_rs
            and "`rollout_rs` is not set",
            "rollout_loss_type": self.rollout_loss_type != "ppo_clip"
            and not self.bypass_mode
            and "`bypass_mode` is False, and the loss is TRL's `loss_type`",
            "rollout_monitor_preset": self.rollout_monitor_preset is not None
            and self.rollout_monitor != "tighten"
            and "`rollout_monitor` is not 'tighten'",
            "rollout_monitor_bounds": bool(self.rollout_monitor_bounds)
            and self.rollout_monitor is None
            and "`rollout_monitor` is None",
        }
        for name in ("rollout_dump_steps", "rollout_dump_sampled", "rollout_dump_worst", "rollout_dump_max_gb"):
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            reasons[name] = changed and self.rollout_dump_dir is None and "`rollout_dump_dir` is None"
        for name, reason in reasons.items():
            if name in explicit and reason:
                warn(f"`{name}` is set to {getattr(self, name)!r} but has no effect: {reason}.")
        if self.rollout_rs is None:
            self.rollout_rs_threshold = None

    def _idle_normalization(self) -> str | None:
        if self.rollout_is is None:
            return "`rollout_is` is None"
        if not self.applies_weights:
            return "with `bypass_mode` and `rollout_loss_type='ppo_clip'` the weights are reported, not applied"
        return None


def _criterion(name: str, bounds: Any) -> Criterion:
    """Criterion from its name and the bounds the user wrote. Bounds on the ratio become bounds on `k1 = -log ratio`."""
    scope, divergence = name.rsplit("_", 1)
    if divergence != "k1":
        return Criterion(scope, divergence, -math.inf, bounds)
    lower, upper = bounds
    return Criterion(scope, divergence, -math.log(upper), math.inf if lower == 0 else -math.log(lower))


def _strip_mark(value: Any) -> Any:
    if isinstance(value, _UnsetStr):
        return "".join(value)
    if isinstance(value, _UnsetFloat):
        return float(value)
    if isinstance(value, _UnsetFalse):
        return False
    if isinstance(value, _UnsetList):
        return None
    return value


def _none_if_null(value: Any) -> Any:
    """The command line has no way to say None, and text from other tools says "null"."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null") else value


def _choice(name: str, value: Any, allowed: tuple[str, ...], *, or_none: bool = False) -> Any:
    if value in allowed or (or_none and value is None):
        return value
    raise ValueError(f"`{name}` must be one of {', '.join(allowed)}{' or None' if or_none else ''}, got {value!r}.")
