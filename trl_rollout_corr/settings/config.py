"""[`RolloutCorrectionConfig`]: what to correct and how, in flat fields. Neither TRL nor torch here."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..messages import SettingError, nearest, warn_idle
from .criteria import Criterion
from .fields import DEFAULTS, PARSERS, CorrectionFields, DumpFields, EngineFields, MonitorFields, none_if_null
from .migrate import from_legacy, from_trl, from_verl
from .presets import DECIDED, FIRST_METHODS, PRESETS, Preset, settings_of
from .resolve import Correction, fill, is_default, read_given, rejection_thresholds, resolve, weight_bounds
from .unset import Unset


@dataclass
class RolloutCorrectionConfig(
    DumpFields, MonitorFields, EngineFields, CorrectionFields
):  # the last has the first fields
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
            `python -m trl_rollout_corr diagnose` says of a dump (`docs/diagnose.md`). The trainer scores a few sequences a
            second time, one by one, so that its own noise is known; nothing of it touches the loss.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Python names the argument that it does not know, and not the one that was meant
        known = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            for name in kwargs.keys() - known:
                raise TypeError(f"`{name}` is no field of {cls.__name__}.{nearest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self):
        explicit = self._fill()
        self._parse()
        RolloutCorrectionConfig.check(self)  # of a subclass not all fields are settled yet
        self._warn_about_idle_fields(explicit)
        if self.rollout_rs is None:
            self.rollout_rs_threshold = None  # it has warned
        self.__dict__["_built"] = True  # what is assigned from now on is parsed, see `__setattr__`

    def __setattr__(self, name: str, value: Any):
        if "_built" not in self.__dict__:
            super().__setattr__(name, value)
            return
        before = self.__dict__.get(name)
        if name in self.__dict__.get("_fixed", ()) and value != before:
            read = f"but the run read {before!r} at its start"
            raise SettingError(name, value, read, remedy="Set it before `train()`.")
        super().__setattr__(name, PARSERS[name](value) if name in PARSERS else value)
        if name == "rollout_correction":
            self._fill()
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
    def correction(self) -> Correction:
        """The fields as the mathematics reads them. Parsed once after each change."""
        given = {name: self.__dict__[name] for name in _OF_CORRECTION}
        state = repr(given)  # lists may be changed in place
        found, correction = self.__dict__.get("_correction", (None, None))
        if found != state:
            correction = resolve(given)
            self.__dict__["_correction"] = state, correction
        return correction

    @property
    def corrects(self) -> bool:
        """`True` if the loss differs from TRL's."""
        return self.correction.corrects

    @property
    def applies_weights(self) -> bool:
        """`True` if the importance weights multiply the policy gradient."""
        return self.correction.applies_weights

    @property
    def needs_whole_batch(self) -> bool:
        """`True` if a factor of the loss depends on the batch of all ranks."""
        return self.correction.needs_whole_batch

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the importance weights; the lower one is `None` for truncation."""
        return weight_bounds(self.rollout_is_threshold)

    @property
    def clips_around_sampler(self) -> bool:
        """`True` if PPO's ratio is the ratio to the sampler, which then is the correction."""
        return self.correction.clips_around_sampler

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """Rejection criteria, with bounds in units of their statistic."""
        return self.correction.criteria

    @property
    def description(self) -> str:
        """The settings in a line."""
        parts = self._preset_in_effect()
        weights = (
            f"{self.rollout_is} weights {_in_words(self.rollout_is_threshold)}" if self.rollout_is else "no weights"
        )
        parts.append(f"{weights} (reported only)" if self.rollout_is and not self.applies_weights else weights)
        thresholds = rejection_thresholds(self.rollout_rs, self.rollout_rs_threshold)
        criteria = zip(self.criteria, thresholds, strict=True)
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

    def _fill(self) -> set[str]:
        """Fill in the fields that the preset decides and the user has not set. Returns the names of the others."""
        name, given = read_given(self.rollout_correction)
        explicit = {**{key: value for key, value in given.items() if key in DECIDED}, **self._set_by_user()}
        further = {key: value for key, value in given.items() if key not in DECIDED and is_default(self, key)}
        names = {"rollout_correction": name, "rollout_correction_resolved": name or "disabled"}
        self.__dict__.update({**fill(name, explicit), **further, **names})
        return set(DEFAULTS) - set(DECIDED) | set(explicit)

    def _set_by_user(self) -> dict[str, Any]:
        """Fields that a preset decides, as far as the user has set them."""
        values = {key: getattr(self, key) for key in DECIDED}
        base = none_if_null(self.rollout_correction_resolved)
        if base is not None and base not in PRESETS:
            raise SettingError(
                "rollout_correction_resolved", base, "which the configuration sets itself", remedy="Remove it."
            )
        before = {} if base is None else settings_of(base)
        found = {
            key: value
            for key, value in values.items()
            if not isinstance(value, Unset) and (base is None or value != before[key])
        }
        if found.get("rollout_rs_threshold") is None:
            found.pop("rollout_rs_threshold", None)
        return found

    def _parse(self):
        for name, parse in PARSERS.items():
            self.__dict__[name] = parse(self.__dict__[name])
        thresholds = rejection_thresholds(self.rollout_rs, self.rollout_rs_threshold)
        self.__dict__["rollout_rs_threshold"] = (
            thresholds if self.rollout_rs else none_if_null(self.rollout_rs_threshold)
        )

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
            reason = (
                f"but {directed[0]!r} in `rollout_rs` looks at the advantages, which are computed from the baseline"
            )
            remedy = "Set it to False, or use criteria that do not."
            raise SettingError("rollout_rs_exclude_from_baseline", True, reason, remedy=remedy)
        if self.rollout_rs_exclude_from_baseline and self.bypass_mode:
            reason = (
                "but `bypass_mode` computes no log-probabilities before the rewards are scored, so nothing is known to be "
                "rejected by then"
            )
            raise SettingError("rollout_rs_exclude_from_baseline", True, reason, remedy="Set one of the two to False.")
        if self.rollout_dump_dir is not None and not self.rollout_dump_sampled + self.rollout_dump_worst:
            reason = "but `rollout_dump_sampled` and `rollout_dump_worst` are both 0, so nothing would be written"
            remedy = "Set one of them, or `rollout_dump_dir` to None."
            raise SettingError("rollout_dump_dir", self.rollout_dump_dir, reason, remedy=remedy)

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


_OF_CORRECTION = tuple(CorrectionFields.__dataclass_fields__)


def _in_words(bound: Any, directed: bool = False) -> str:
    if not isinstance(bound, list):
        return f"up to {bound:g}"
    return f"within {-bound[0]:g}, {bound[1]:g}" if directed else f"in [{bound[0]:g}, {bound[1]:g}]"


class _FirstMethod:
    """Class method of verl's first pull request, on [`RolloutCorrectionConfig`] alone: see [`presets.FIRST_METHODS`]."""

    def __init__(self, name: Preset, fields_of: Callable[..., dict[str, Any]]):
        self.name, self.fields_of = name, fields_of

    def __get__(self, instance: object, owner: type) -> Callable[..., RolloutCorrectionConfig]:
        if instance is not None or owner is not RolloutCorrectionConfig:
            raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")
        return self.build

    def build(self, *arguments: Any, **options: Any) -> RolloutCorrectionConfig:
        named = {key: options.pop(key) for key in inspect.signature(self.fields_of).parameters if key in options}
        return RolloutCorrectionConfig.from_preset(self.name, **{**self.fields_of(*arguments, **named), **options})


for _name, _fields_of in FIRST_METHODS.items():
    setattr(RolloutCorrectionConfig, _name, _FirstMethod(_name, _fields_of))
