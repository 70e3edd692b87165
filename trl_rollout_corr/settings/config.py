"""What to correct and how: flat fields, validated when the configuration is built. Neither TRL nor torch here."""

import contextlib
import dataclasses
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from ..health.examine import parse_bounds
from ..messages import nearest, warn_idle
from .criteria import DIRECTED, LEVELS, Criterion, CriterionName, Level
from .migrate import VERL_KEYS, from_legacy, from_trl, from_verl
from .original import OriginalPresets
from .presets import DEFAULT, PRESETS, Preset, settings_of
from .thresholds import parse_criteria, parse_number, parse_rejection_thresholds, parse_weight_threshold


if TYPE_CHECKING:  # see `criteria`
    LossType = Literal["ppo_clip", "reinforce"]
    NanPolicy = Literal["drop", "raise", "neutralize"]
    LrScaling = Literal["ess_sqrt"]
    MonitorAction = Literal["warn", "stop", "tighten"]
else:
    LossType = NanPolicy = LrScaling = MonitorAction = str

LOSS_TYPES = ("ppo_clip", "reinforce")
NAN_POLICIES = ("drop", "raise", "neutralize")
LR_SCALINGS = ("ess_sqrt",)
MONITOR_ACTIONS = ("warn", "stop", "tighten")


class _Unset:
    """Marks a default that a preset may fill in, unless the user sets the field, be it to the same value."""


class _UnsetStr(_Unset, str):
    def __str__(self):  # argparse converts string defaults with `str`, which must not lose the mark
        return self


def _unset(text: str) -> Any:
    return _UnsetStr(text)


class _UnsetFloat(_Unset, float):
    pass


class _UnsetFalse(_Unset, int):  # bool cannot be subclassed
    def __str__(self):
        return "False"


_UNSET_FALSE: Any = _UnsetFalse()


class _UnsetList(_Unset, list):
    pass


@dataclass
class RolloutCorrectionConfig(OriginalPresets):
    r"""
    Configuration of rollout correction.

    All fields are flat, so that they can be given in Python, in a YAML file, as JSON, or on a command line. Thresholds are
    numbers and lists of numbers; verl's text form (`"0.6_1.6,2.5"`) is parsed too.

    Args:
        rollout_correction (`str`, `dict` or `None`, *optional*, defaults to `"decoupled_token_is"`):
            Name of a preset (see `docs/presets.md`); `None` for no correction. Fields that are set beside it override it.
            Also the `rollout_correction` section of a verl configuration, or a [`RolloutCorrectionConfig`].
        rollout_correction_resolved (`str`, *optional*):
            Set by the configuration itself: the preset that fields were filled in from. So a saved or copied configuration
            whose `rollout_correction` is changed follows the new preset, in all fields that the user has not set.

        > Importance sampling

        rollout_is (`str` or `None`, *optional*, defaults to `"token"`):
            Level of the importance weights: `"token"` for `exp(d)`, `"sequence"` for `exp(sum d)`, `"geometric"` for
            `exp(mean d)`, with `d = logp_train - logp_rollout`. `None` for no weights.
        rollout_is_threshold (`float` or `list[float]`, *optional*, defaults to `2.0`):
            A number truncates the weights from above. A pair `[lower, upper]` sets those outside it to 0 (IcePop).
        rollout_is_clamp (`bool`, *optional*, defaults to `False`):
            With a pair, raise and lower weights to its bounds instead of setting those outside it to 0.
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the batch of all ranks (self-normalised importance sampling): over tokens
            at token level, over sequences otherwise. In decoupled mode the batch is the generation batch, and the old
            log-probabilities are computed when it is generated. In bypass mode it is the micro-batch of all ranks.

        > Rejection

        rollout_rs (`list[str]`, *optional*):
            Rejection criteria, each `<scope>_<divergence>` with scope `token`, `seq_sum`, `seq_mean` or `seq_max` and
            divergence `k1 = -d`, `k2 = d^2/2` or `k3 = exp(d)-1-d`; or of the probabilities of a token: `token_tv` and
            `token_kl` (DPPO: they look at the sign of the advantage), `token_binary_kl` (KPop). A token is kept if every
            criterion keeps it.
        rollout_rs_threshold (`float` or `list`, *optional*):
            One entry per criterion, or one for all. For k1 a pair of bounds on the ratio, or `u` for `[1/u, u]`; for
            `token_tv` (below 1) and `token_kl` (in nats) a bound for negative and one for positive advantages, or one for
            both; else an upper bound in nats.
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
        rollout_clip_ratio_c (`float` or `None`, *optional*, defaults to `3.0`):
            In bypass mode with `"ppo_clip"`: with a negative advantage, a ratio to the sampler beyond it has no gradient
            ([dual clip](https://huggingface.co/papers/1912.09729), and verl's default). PPO's own clipping leaves that side
            open. In GRPO it is TRL's `delta`, unless that is set. `None` for no bound.
        rollout_metrics_only (`bool`, *optional*, defaults to `False`):
            Compute and report everything the other fields ask for, and leave the loss alone.

        > Size of the step

        rollout_lr_scaling (`str`, *optional*):
            `"ess_sqrt"` multiplies the learning rate of each optimizer step by `sqrt(ESS / B)`, the effective sample size of
            the `B` completions of the step on all ranks over their number, with `ESS = (sum w)^2 / sum w^2` of the ratios
            `w = exp(sum d)` of whole completions of the current policy to the sampler, before any bound
            ([VCPO](https://huggingface.co/papers/2602.17616)). The longer the completions, the smaller the step. Not with
            DeepSpeed. `None` leaves the step alone.

        > Failures of the sampler

        rollout_nan_policy (`str`, *optional*, defaults to `"drop"`):
            What to do with a token whose log-ratio is not finite: `"drop"` takes it out of the policy loss and of all
            statistics, `"raise"` stops the run, `"neutralize"` takes its ratio as 1.

        > The engine

        rollout_engine_kwargs (`dict[str, Any]`, *optional*):
            Arguments of vLLM's engine that TRL has no field for, such as `{"dtype": "float16"}`,
            `{"kv_cache_dtype": "auto"}` or `{"hf_overrides": {"head_dtype": "float32"}}`: fields of `vllm.EngineArgs`. For
            `vllm_mode="colocate"`; for a server, the matching `vllm serve` line is printed.

        > Monitor

        rollout_monitor (`str` or `None`, *optional*, defaults to `"warn"`):
            What happens when the metrics look unhealthy (see `docs/monitoring.md`): `"warn"` says what was seen, why it
            matters and what to set; `"stop"` also saves a checkpoint and ends training at a serious finding; `"tighten"`
            switches to the preset of `rollout_monitor_preset` instead. `None` for no monitor.
        rollout_monitor_preset (`str`, *optional*):
            Preset that `"tighten"` switches to. It must have the mode (`bypass_mode`, `rollout_loss_type`) of the run.
        rollout_monitor_bounds (`dict[str, float]`, *optional*):
            Other bounds of the rules, by name of the rule; `None` switches a rule off.

        > Diagnosis

        rollout_diagnose (`bool`, *optional*, defaults to `False`):
            Whether to look for the cause of the gap at the first optimizer step, and print it: what
            `trl-rollout-corr diagnose` says of a dump (`docs/diagnose.md`). The trainer scores a few sequences a
            second time, one by one, so that its own noise is known; nothing of it touches the loss.

        > Dump

        rollout_dump_dir (`str`, *optional*):
            Folder to write sampled and worst sequences to, as Parquet, for `trl-rollout-corr report` and
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

    rollout_correction: dict[str, Any] | Preset | None = field(
        default=_unset(DEFAULT),
        metadata={"help": "Name of a preset, or none. Fields that are set beside it override it."},
    )
    rollout_correction_resolved: str | None = field(
        default=None, metadata={"help": "Set by the configuration itself: the preset that fields were filled in from."}
    )
    rollout_is: Level | None = field(
        default=_unset("token"),
        metadata={"help": "Level of the importance weights: token, sequence, geometric, or none."},
    )
    rollout_is_threshold: float | str | list[float] | None = field(
        default=_UnsetFloat(2.0),
        metadata={
            "help": "Upper bound of the weights, or a pair: lower upper, outside which they are 0 (IcePop).",
            "nargs": "+",
        },
    )
    rollout_is_clamp: bool = field(
        default=False,
        metadata={"help": "With a pair of bounds, clamp weights to it instead of dropping those outside."},
    )
    rollout_is_batch_normalize: bool = field(
        default=False, metadata={"help": "Divide the weights by their mean over the batch of all ranks."}
    )
    rollout_rs: list[CriterionName] | None = field(
        default_factory=_UnsetList,
        metadata={
            "help": "Rejection criteria: {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, token_{tv,kl,binary_kl}, or none."
        },
    )
    rollout_rs_threshold: float | str | list[Any] | None = field(
        default=None,
        metadata={
            "help": "One entry per criterion: bounds on the ratio for k1 (0.9_1.1; for a single criterion also 0.9 1.1), an "
            "upper bound else.",
            "nargs": "+",
        },
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
    rollout_loss_type: LossType = field(
        default=_unset("ppo_clip"), metadata={"help": "Loss in bypass mode: ppo_clip or reinforce."}
    )
    rollout_clip_ratio_c: float | str | None = field(
        default=3.0,
        metadata={
            "help": "In bypass mode with ppo_clip: largest ratio with gradient for negative advantages, or none."
        },
    )
    rollout_metrics_only: bool = field(
        default=False, metadata={"help": "Compute and report everything, leave the loss alone."}
    )
    rollout_lr_scaling: LrScaling | None = field(
        default=None,
        metadata={"help": "Scale each step by the effective sample size of its completions: ess_sqrt, or none."},
    )
    rollout_nan_policy: NanPolicy = field(
        default="drop",
        metadata={"help": "Token with a log-probability that is not finite: drop, raise or neutralize."},
    )
    rollout_engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of vLLM's engine that TRL has no field for, as a mapping."}
    )
    rollout_monitor: MonitorAction | None = field(
        default="warn", metadata={"help": "When metrics look unhealthy: warn, stop, tighten, or none for no monitor."}
    )
    rollout_monitor_preset: Preset | None = field(
        default=None, metadata={"help": "Preset that `rollout_monitor: tighten` switches to."}
    )
    rollout_monitor_bounds: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Bounds of the monitor by name of the rule; null switches a rule off."}
    )
    rollout_diagnose: bool = field(
        default=False, metadata={"help": "Look for the cause of the gap at the first step, and print it."}
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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Python names the argument that it does not know, and not the one that was meant
        known = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            for name in kwargs.keys() - known:
                raise TypeError(f"`{name}` is no field of {cls.__name__}.{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self):
        explicit = self._resolve()
        self._parse()
        RolloutCorrectionConfig.check(self)  # of a subclass not all fields are settled yet
        self._warn_about_idle_fields(explicit)
        self.__dict__["_built"] = True  # what is assigned from now on is parsed, see `__setattr__`

    def __setattr__(self, name: str, value: Any):
        if "_built" not in self.__dict__:
            super().__setattr__(name, value)
            return
        before = self.__dict__.get(name)
        if name in self.__dict__.get("_fixed", ()) and value != before:
            raise ValueError(
                f"`{name}` is set to {value!r} while a run goes on, but was read when it began, as {before!r}. Set it before "
                "`train()`."
            )
        super().__setattr__(name, _PARSERS[name](value) if name in _PARSERS else value)
        if name == "rollout_correction":
            self._resolve()
            self._parse()
            RolloutCorrectionConfig.check(self)
        elif name in ("rollout_monitor", "rollout_monitor_preset") and self.rollout_monitor_preset is not None:
            try:
                self.check()
            except ValueError:
                super().__setattr__(name, before)
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fixed"}  # a copy may be changed

    @contextlib.contextmanager
    def fixed(self, *names: str) -> Iterator[None]:
        """Refuse to assign fields, for as long as a run goes on that has read them at its start."""
        self.__dict__["_fixed"] = names
        try:
            yield
        finally:
            self.__dict__.pop("_fixed", None)

    @classmethod
    def from_preset(cls, name: Preset | None, **overrides: Any) -> Self:
        """
        Build a configuration from a preset.

        Args:
            name (`str` or `None`):
                Name of the preset; `None` for no correction.
            overrides:
                Further fields of the class; those of rollout correction override the preset.

        Returns:
            An instance of the class this is called on.
        """
        return cls(rollout_correction=name, **overrides)

    @classmethod
    def from_verl(cls, settings: Mapping[str, Any] | None, **overrides: Any) -> Self:
        """
        Build a configuration from the `rollout_correction` section of a verl configuration.

        See [`~trl_rollout_corr.settings.migrate.from_verl`]. `overrides` are further fields of the class.
        """
        return cls(**{**from_verl(settings), **overrides})

    @classmethod
    def from_legacy(cls, settings: Mapping[str, Any], **overrides: Any) -> Self:
        """
        Build a configuration from the flat `rollout_is*` keys of verl's first releases.

        See [`~trl_rollout_corr.settings.migrate.from_legacy`]. `overrides` are further fields of the class.
        """
        return cls(**{**from_legacy(settings), **overrides})

    @classmethod
    def from_trl(cls, settings: Mapping[str, Any], **overrides: Any) -> Self:
        """
        Build a configuration that does what TRL's `vllm_importance_sampling_*` settings did.

        See [`~trl_rollout_corr.settings.migrate.from_trl`]. `overrides` are further fields of the class.
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
        return self.rollout_is is not None and not self.clips_around_sampler

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
    def clips_around_sampler(self) -> bool:
        """Whether the ratio of PPO is taken to the sampler, so that it is the correction."""
        return self.bypass_mode and self.rollout_loss_type == "ppo_clip"

    @property
    def criteria(self) -> list[Criterion]:
        """Rejection criteria, with bounds in units of their statistic."""
        return [_criterion(*pair) for pair in zip(self.rollout_rs or [], self._parsed_thresholds(), strict=True)]

    @property
    def description(self) -> str:
        """The settings in a line."""
        parts = self._preset_in_effect()
        weights = (
            f"{self.rollout_is} weights {_in_words(self.rollout_is_threshold)}" if self.rollout_is else "no weights"
        )
        parts.append(f"{weights} (reported only)" if self.rollout_is and not self.applies_weights else weights)
        criteria = zip(self.criteria, self._parsed_thresholds(), strict=True)
        parts += [f"{c.name} {_in_words(bound, c.directed)}" for c, bound in criteria] or ["no rejection"]
        parts.append(f"bypass, {self.rollout_loss_type}" if self.bypass_mode else "decoupled")
        parts += ["metrics only"] if self.rollout_metrics_only else []
        return "; ".join(parts)

    def _preset_in_effect(self) -> list[str]:
        """Name of the preset, as long as its mode and something of what it applies are in effect."""
        name = self.rollout_correction
        if not isinstance(name, str):
            return []
        preset = settings_of(name)
        same = {key for key, value in preset.items() if getattr(self, key) == value}
        if same == set(preset):
            return [name]
        applied = {key for key in ("rollout_is", "rollout_rs", "bypass_mode") if preset[key]}
        return [f"{name} with changes"] if same >= {"bypass_mode", "rollout_loss_type"} and same & applied else []

    # Construction -----------------------------------------------------------------------------------------------------

    def _resolve(self) -> set[str]:
        """Fill in what the preset decides where the user has set nothing. Returns the names of the fields that were set."""
        name, given = _read_given(self.rollout_correction)
        explicit = {**{key: value for key, value in given.items() if key in _DECIDED}, **self._set_by_user()}
        settings = settings_of(name)
        if (
            "rollout_rs" in explicit
            and "rollout_rs_threshold" not in explicit
            and parse_criteria(explicit["rollout_rs"]) != settings["rollout_rs"]
        ):
            settings["rollout_rs_threshold"] = None  # the preset's threshold goes with the preset's criteria
        further = {key: value for key, value in given.items() if key not in _DECIDED and self._is_default(key)}
        names = {"rollout_correction": name, "rollout_correction_resolved": name or "disabled"}
        self.__dict__.update({**settings, **explicit, **further, **names})
        return {f.name for f in dataclasses.fields(RolloutCorrectionConfig)} - set(_DECIDED) | set(explicit)

    def _set_by_user(self) -> dict[str, Any]:
        """Of what a preset decides, what the user has set."""
        values = {key: getattr(self, key) for key in _DECIDED}
        base = _none_if_null(self.rollout_correction_resolved)
        if base is not None and base not in PRESETS:
            raise ValueError(
                f"`rollout_correction_resolved` is {base!r}, and is set by the configuration itself: remove it."
            )
        before = {} if base is None else settings_of(base)
        found = {
            key: value
            for key, value in values.items()
            if not isinstance(value, _Unset) and (base is None or value != before[key])
        }
        if found.get("rollout_rs_threshold") is None:
            found.pop("rollout_rs_threshold", None)
        return found

    def _is_default(self, name: str) -> bool:
        return getattr(self, name) == RolloutCorrectionConfig.__dataclass_fields__[name].default

    def _parse(self):
        for name, parse in _PARSERS.items():
            self.__dict__[name] = parse(self.__dict__[name])
        if self.rollout_rs is None:
            self.rollout_rs_threshold = _none_if_null(self.rollout_rs_threshold)
        else:
            self.rollout_rs_threshold = self._parsed_thresholds()

    def check(self, *, warns: bool = False):
        """
        Refuse settings that exclude each other. Also asked when training begins, as they may have been assigned one by one.

        Args:
            warns (`bool`, *optional*, defaults to `False`):
                Whether to warn, too, about those that are unlikely to be meant.

        Raises:
            `ValueError`: if two settings exclude each other.
        """
        directed = [criterion.name for criterion in self.criteria if criterion.directed]
        if self.rollout_rs_exclude_from_baseline and directed:
            raise ValueError(
                f"`rollout_rs_exclude_from_baseline` is True, but {directed[0]!r} in `rollout_rs` looks at the advantages, "
                "which are computed from the baseline. Set it to False, or use criteria that do not."
            )
        if self.rollout_rs_exclude_from_baseline and self.bypass_mode:
            raise ValueError(
                "`rollout_rs_exclude_from_baseline` is True, but `bypass_mode` computes no log-probabilities before the "
                "rewards are scored, so nothing is known to be rejected by then. Set one of the two to False."
            )
        if self.rollout_dump_dir is not None and not self.rollout_dump_sampled + self.rollout_dump_worst:
            raise ValueError(
                "`rollout_dump_dir` is set, but `rollout_dump_sampled` and `rollout_dump_worst` are both 0, so nothing would "
                "be written. Set one of them, or `rollout_dump_dir` to None."
            )

    def _parsed_thresholds(self) -> list[Any]:
        """One entry per criterion. Parsed anew at each use, as it is assigned apart from the criteria."""
        if self.rollout_rs is None:
            return []
        thresholds = _none_if_null(self.rollout_rs_threshold)
        if thresholds is None:
            raise ValueError(
                f"`rollout_rs` is {self.rollout_rs}, but `rollout_rs_threshold` is not set. Give one entry per "
                "criterion: bounds on the ratio such as [0.5, 2.0] for k1, an upper bound such as 0.01 for k2 and k3."
            )
        return parse_rejection_thresholds(thresholds, self.rollout_rs)

    def _warn_about_idle_fields(self, explicit: set[str]):
        reasons = {
            "rollout_is_threshold": self.rollout_is is None
            and self.rollout_is_threshold != 2.0  # a saved configuration lists every field
            and "`rollout_is` is None",
            "rollout_is_batch_normalize": self.rollout_is_batch_normalize and self._idle_normalization(),
            "rollout_is_clamp": self.rollout_is_clamp and self._idle_clamp(),
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
            "rollout_clip_ratio_c": self.rollout_clip_ratio_c not in (None, 3.0)
            and not self.clips_around_sampler
            and "it bounds the ratio to the sampler in `bypass_mode` with `rollout_loss_type='ppo_clip'`",
            "rollout_lr_scaling": self.rollout_lr_scaling is not None
            and self.rollout_metrics_only
            and "`rollout_metrics_only` is True, so that `lr_scale` is reported and the step left alone",
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
                warn_idle(name, getattr(self, name), reason)
        if self.rollout_rs is None:
            self.rollout_rs_threshold = None

    def _idle_clamp(self) -> str | None:
        if self.rollout_is is None:
            return "`rollout_is` is None"
        return None if isinstance(self.rollout_is_threshold, list) else "`rollout_is_threshold` is not a pair"

    def _idle_normalization(self) -> str | None:
        if self.rollout_is is None:
            return "`rollout_is` is None"
        if not self.applies_weights:
            return "with `bypass_mode` and `rollout_loss_type='ppo_clip'` the weights are reported, not applied"
        return None


def _criterion(name: str, bounds: Any) -> Criterion:
    """Criterion from its name and the bounds the user wrote. Bounds on the ratio become bounds on `k1 = -log ratio`."""
    if name.startswith("token_"):
        scope, divergence = "token", name.removeprefix("token_")
    else:
        scope, divergence = name.rsplit("_", 1)
    if divergence in DIRECTED:
        return Criterion(scope, divergence, -bounds[0], bounds[1])
    if divergence != "k1":
        return Criterion(scope, divergence, -math.inf, bounds)
    lower, upper = bounds
    return Criterion(scope, divergence, -math.log(upper), math.inf if lower == 0 else -math.log(lower))


def _in_words(bound: Any, directed: bool = False) -> str:
    if not isinstance(bound, list):
        return f"up to {bound:g}"
    return f"within {-bound[0]:g}, {bound[1]:g}" if directed else f"in [{bound[0]:g}, {bound[1]:g}]"


def _none_if_null(value: Any) -> Any:
    """The command line has no way to say None, and text from other tools says "null"."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null") else value


def _choice(name: str, value: Any, allowed: tuple[str, ...], *, or_none: bool = False) -> Any:
    value = _none_if_null(value) if or_none else value
    if value in allowed or (or_none and value is None):
        return None if value is None else "".join(value)  # without the mark of a default
    raise ValueError(
        f"`{name}` must be one of {', '.join(allowed)}{' or None' if or_none else ''}, got {value!r}."
        f"{nearest(value, allowed)}"
    )


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be true or false, got {value!r}.")
    return value


def _monitor_preset(value: Any) -> str | None:
    name = _none_if_null(value)
    if name is None or name in PRESETS:
        return name
    raise ValueError(
        f"`rollout_monitor_preset` is {name!r}.{nearest(name, PRESETS)} Available presets: {', '.join(PRESETS)}."
    )


def _folder(value: Any) -> str | None:
    path = _none_if_null(value)
    return None if path is None else os.path.expanduser(os.fspath(path))


def _count(name: str, smallest: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"`{name}` must be an integer of {smallest} or more, got {value!r}.")
    return value


def _gigabytes(value: Any) -> float:
    if not value > 0:
        raise ValueError(f"`rollout_dump_max_gb` must be a number above 0, got {value!r}.")
    return value


def _clip_ratio(value: Any) -> float | None:
    if _none_if_null(value) is None:
        return None
    bound = parse_number(value, "rollout_clip_ratio_c")
    if bound <= 1:
        raise ValueError(
            f"`rollout_clip_ratio_c` must be above 1, got {bound:g}: a ratio of 1 is that of equal policies. verl's default "
            "is 3.0; None is no bound."
        )
    return bound


def _engine_kwargs(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and _none_if_null(value) is not None:  # of a command line
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    value = _none_if_null(value)
    if value is None or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        return None if value is None else dict(value)
    raise ValueError(
        "`rollout_engine_kwargs` must be a mapping from arguments of vLLM's engine to their values, such as "
        f"{{'dtype': 'float16'}}, got {value!r}."
    )


# Parsers of single fields, for when a configuration is built and for what is assigned later
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "rollout_is": lambda value: _choice("rollout_is", value, LEVELS, or_none=True),
    "rollout_is_threshold": parse_weight_threshold,
    "rollout_rs": parse_criteria,
    "rollout_loss_type": lambda value: _choice("rollout_loss_type", value, LOSS_TYPES),
    "rollout_lr_scaling": lambda value: _choice("rollout_lr_scaling", value, LR_SCALINGS, or_none=True),
    "rollout_nan_policy": lambda value: _choice("rollout_nan_policy", value, NAN_POLICIES),
    "rollout_clip_ratio_c": _clip_ratio,
    "rollout_engine_kwargs": _engine_kwargs,
    "rollout_monitor": lambda value: _choice("rollout_monitor", value, MONITOR_ACTIONS, or_none=True),
    "rollout_monitor_preset": _monitor_preset,
    "rollout_monitor_bounds": lambda value: parse_bounds(_none_if_null(value)) or None,
    "rollout_dump_dir": _folder,
    "rollout_dump_steps": partial(_count, "rollout_dump_steps", 1),
    "rollout_dump_sampled": partial(_count, "rollout_dump_sampled", 0),
    "rollout_dump_worst": partial(_count, "rollout_dump_worst", 0),
    "rollout_dump_max_gb": _gigabytes,
    **{
        name: partial(_boolean, name)
        for name in (
            "bypass_mode",
            "rollout_diagnose",
            "rollout_is_batch_normalize",
            "rollout_is_clamp",
            "rollout_rs_renormalize",
            "rollout_rs_exclude_from_baseline",
            "rollout_metrics_only",
        )
    },
}

# What a preset decides
_DECIDED = tuple(settings_of(None))


def _read_given(value: Any) -> tuple[Preset | None, dict[str, Any]]:
    """Name of a preset, and further fields, from what `rollout_correction` was set to."""
    if isinstance(value, RolloutCorrectionConfig):
        return _fields_of(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
        return None, {}
    if isinstance(value, str) and value in PRESETS:
        name: Any = "".join(value)  # without the mark of a default
        return name, {}
    if isinstance(value, str):
        raise ValueError(
            f"`rollout_correction` is {value!r}.{nearest(value, PRESETS)} Available presets: {', '.join(PRESETS)}."
        )
    raise ValueError(
        f"`rollout_correction` must be the name of a preset, a mapping of settings, a RolloutCorrectionConfig, or None for no "
        f"correction; got {value!r}."
    )


_OFF = ("none", "null", "false", "off", "no", "")


def _fields_of(config: RolloutCorrectionConfig) -> tuple[Preset | None, dict[str, Any]]:
    """Its preset, and what differs from it and from the defaults."""
    name = None if isinstance(config.rollout_correction, dict) else config.rollout_correction
    preset = settings_of(name)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(RolloutCorrectionConfig)}
    del fields["rollout_correction"], fields["rollout_correction_resolved"]
    own = {key: value for key, value in fields.items() if key not in preset and not config._is_default(key)}
    return name, {**own, **{key: fields[key] for key in preset if fields[key] != preset[key]}}


def _from_mapping(settings: Mapping[str, Any]) -> tuple[Preset | None, dict[str, Any]]:
    """A section of verl's, or fields of ours. Keys that both have mean what verl's section means."""
    ours = {f.name for f in dataclasses.fields(RolloutCorrectionConfig)}
    unknown = sorted(set(map(str, settings)) - ours - set(VERL_KEYS))
    if unknown:
        raise ValueError(
            f"`rollout_correction` is a mapping with {unknown[0]!r}, which is neither a field of rollout correction nor a key "
            f"of verl's `rollout_correction` section.{nearest(unknown[0], ours | set(VERL_KEYS))}"
        )
    if set(settings) <= set(VERL_KEYS):
        return None, {"rollout_is": None, **from_verl(settings)}
    foreign = sorted(set(settings) - ours)
    if foreign:
        raise ValueError(
            f"`rollout_correction` is a mapping with {foreign[0]!r}, a key of verl's section, beside fields of this package. "
            "Write the fields beside `rollout_correction` instead, and translate verl's section with `python -m "
            "trl_rollout_corr convert`."
        )
    fields = {key: value for key, value in settings.items() if key != "rollout_correction_resolved"}
    name, further = _read_given(fields.pop("rollout_correction", None))
    return name, {**further, **fields}
