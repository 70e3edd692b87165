"""The configuration, flat fields. Neither TRL nor torch here."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..messages import SettingError, nearest, warn, warn_idle
from .checks import CHECKS
from .fields import DEFAULTS, PARSERS, CorrectionFields, DumpFields, EngineFields, MonitorFields, Unset
from .legacy import FirstPresets, from_legacy
from .migrate import from_trl, from_verl
from .presets import BASE, DECIDED, DEFAULT, MODE, PRESETS, settings_of
from .resolve import Settings, fill, idle_fields, is_default, read_given, resolve
from .thresholds import is_by_sign, none_if_null, parse_criteria, parse_rejection_thresholds


# Dataclasses take the fields of the last base first: `rollout_correction` is the first argument
@dataclass
class RolloutCorrectionConfig(FirstPresets, DumpFields, MonitorFields, EngineFields, CorrectionFields):
    r"""
    Configuration of rollout correction.

    All fields are flat, so that they can be given in Python, in a YAML file, as JSON, or on a command line. Thresholds are
    numbers and lists of numbers; verl's text form (`"0.6_1.6,2.5"`) is parsed too.

    Args:
        rollout_correction (`str`, `dict` or `None`, *optional*, defaults to `"auto"`):
            Name of a preset (see `trl-rollout-corr docs presets`); `None` for no correction. Fields that are set beside it
            override it. If weights or rejection are set without a preset, all other fields come from `"decoupled_token_is"`;
            unless `rollout_is` is set, a warning says so. The mode (`bypass_mode`, `rollout_loss_type`) alone leaves the
            preset at its default.
            Also the `rollout_correction` section of a verl configuration, or a [`RolloutCorrectionConfig`].
        rollout_correction_resolved (`str`, *optional*):
            Set by the configuration itself: the preset that has filled in fields. If `rollout_correction` of a saved or copied
            configuration is changed, the fields that the user has not set follow the new preset.

        > Importance sampling

        rollout_is (`str` or `None`, *optional*, defaults to `"token"`):
            Level of the importance weights: `"token"` for `exp(d)`, `"turn"` and `"sequence"` for `exp(sum d)` over the turn
            of an agent and the completion, `"geometric"` for `exp(mean d)`, with `d = logp_train - logp_rollout`. `None` for
            no weights.
        rollout_is_threshold (`float` or `list`, *optional*, defaults to `2.0`):
            A number truncates the weights from above. A pair `[lower, upper]` sets weights outside it to 0 (IcePop).
            Two pairs are bounds for negative and for positive advantages.
        rollout_is_clamp (`bool`, *optional*, defaults to `False`):
            With a pair of bounds, move a weight outside them to the nearest bound instead of setting it to 0. The two pairs
            `[[0, 1], [1, 1]]` give the weights of [TOPR](https://huggingface.co/papers/2503.14286): 1 if the advantage is
            positive, and otherwise the ratio, but at most 1.
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the batch of all ranks (self-normalised importance sampling): over tokens at
            token level, over turns at turn level, over sequences otherwise. In decoupled mode the batch is the generation
            batch, and the old log-probabilities are computed when it is generated. In bypass mode it is the micro-batch of
            all ranks.

        > Rejection

        rollout_rs (`list[str]`, *optional*):
            Rejection criteria, each `<scope>_<divergence>` with scope `token`, `turn_sum`, `turn_mean`, `turn_max`,
            `seq_sum`, `seq_mean` or `seq_max` and divergence `k1 = -d`, `k2 = d^2/2` or `k3 = exp(d)-1-d`; or of the
            probabilities of a token: `token_tv` and `token_kl` (DPPO, depend on the sign of the advantage), `token_binary_kl`
            (KPop). A token is kept if every criterion keeps it.
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
            Use the sampler's log-probabilities in place of the old policy's, which are then not computed.
        rollout_loss_type (`str`, *optional*, defaults to `"ppo_clip"`):
            Loss in bypass mode: `"ppo_clip"` clips the ratio to the rollout policy, which is the correction, so that
            weights are only reported; `"reinforce"` weights the log-likelihood and does not clip.
        rollout_clip_ratio_c (`float` or `None`, *optional*, defaults to `3.0`):
            Largest ratio to the sampler with a gradient where the advantage is negative, in bypass mode with `"ppo_clip"`
            ([dual clip](https://huggingface.co/papers/1912.09729), and verl's default). PPO's own clipping has no bound there.
            GRPO gets it as TRL's `delta`, unless `delta` is set. `None` for no bound.
        rollout_metrics_only (`bool`, *optional*, defaults to `False`):
            Compute and report the correction, and leave the loss alone.

        > Failures of the sampler

        rollout_nan_policy (`str`, *optional*, defaults to `"drop"`):
            Treatment of a token whose log-ratio is not finite: `"drop"` takes it out of the policy loss and of all
            statistics, `"raise"` stops the run, `"neutralize"` takes its ratio as 1.

        > The engine

        rollout_support (`str`, *optional*):
            With `top_p`, `top_k` or `min_p`, `"replay"` normalises the log-probabilities of the trainer and of the reference
            over the tokens that the sampler kept, so that ratios are unbiased. Only a colocated vLLM returns these tokens.
            If `top_k` is not set, it becomes 512. From TRL 1.17 on, TRL does this itself, and `"replay"` is refused. `None`
            keeps the log-probabilities over the whole vocabulary.
        rollout_engine_kwargs (`dict[str, Any]`, *optional*):
            Arguments of vLLM's engine that TRL has no field for, such as `{"dtype": "float16"}`,
            `{"kv_cache_dtype": "auto"}` or `{"hf_overrides": {"head_dtype": "float32"}}`: fields of `vllm.EngineArgs`. For
            `vllm_mode="colocate"`; a server gets them from its own command line, `vllm serve`.
        rollout_routing (`str`, *optional*):
            `"replay"`: in a mixture of experts, every forward pass of the trainer takes the experts that vLLM chose
            ([routing replay](https://huggingface.co/papers/2510.11370)); the trainer's router gives their weights. For
            GRPO and RLOO with `vllm_mode="colocate"`. `None` for the trainer's own choice.

        > Monitor

        rollout_monitor (`str` or `None`, *optional*, defaults to `"warn"`):
            Reaction to unhealthy metrics (see `trl-rollout-corr docs monitoring`): `"warn"` reports the finding, its reason
            and a remedy; `"stop"` also saves a checkpoint and ends training, if the finding is critical and the reward has
            fallen. `None` for no monitor.
        rollout_monitor_bounds (`dict[str, float]`, *optional*):
            Other limits, by name of a bound (see `docs/monitoring.md`); `None` switches a bound off.

        > Trackers

        rollout_tracked_metrics (`str`, *optional*, defaults to `"essential"`):
            Metrics of rollout correction that the trackers of `report_to` get: `"essential"` for those that fit on one page
            (see `docs/metrics.md`), `"all"` for all. `trainer.state.log_history`, `trainer_state.json`, the dump and other
            callbacks always get all.

        > Diagnosis

        rollout_diagnose (`bool`, *optional*, defaults to `False`):
            Whether to print the cause of the gap at the first optimizer step, as `trl-rollout-corr diagnose` does
            for a dump (`trl-rollout-corr docs diagnose`). The trainer scores a few sequences a second time, one by one, to
            measure its own noise. The loss does not change.

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
        `ValueError`: if the value of a field is refused. The message names the field, the value and a remedy.
    """

    _checks_of_trainer: ClassVar[Sequence[Callable[[Any], None]]] = ()  # which need TRL's fields

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Python's own error for an unknown argument does not suggest a name
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in kwargs.keys() - parameters:
                raise TypeError(f"`{name}` is not a field of {cls.__name__}.{nearest(name, parameters)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        names_none = isinstance(self.rollout_correction, Unset)
        explicit = self._settle()
        for name, reason in idle_fields(self.__dict__, self.settings).items():
            if name in explicit:
                warn_idle(name, getattr(self, name), reason)
        if names_none and self.rollout_correction == BASE and "rollout_is" not in explicit:
            name = next(name for name in DECIDED if name in explicit)
            rest = f"so all other fields come from {BASE!r}, not from the default {DEFAULT!r}"
            remedy = f"Set `rollout_correction` to the one of the two that is meant: {BASE} or {DEFAULT}."
            warn(f"`{name}` is set without a preset, {rest}. {remedy}", name)
        if self.rollout_rs is None:
            self.rollout_rs_threshold = None

    @classmethod
    def from_preset(cls, name: str | None, **overrides: object) -> Self:
        """Build a configuration from a preset, `None` for no correction. Fields among `overrides` override the preset."""
        return cls._of(rollout_correction=name, **overrides)

    @classmethod
    def from_verl(cls, settings: Mapping[str, object] | None, **overrides: object) -> Self:
        """
        Build a configuration from the `rollout_correction` section of a verl configuration and further fields, `overrides`.
        See [`~trl_rollout_corr.settings.migrate.from_verl`].
        """
        return cls._of(**{**from_verl(settings), **overrides})

    @classmethod
    def from_legacy(cls, settings: Mapping[str, object], **overrides: object) -> Self:
        """
        Build a configuration from the flat `rollout_is*` keys of verl's first releases and further fields, `overrides`.
        See [`~trl_rollout_corr.settings.legacy.from_legacy`].
        """
        return cls._of(**{**from_legacy(settings), **overrides})

    @classmethod
    def from_trl(cls, settings: Mapping[str, object], **overrides: object) -> Self:
        """
        Build a configuration equivalent to TRL's `vllm_importance_sampling_*` settings, with further fields, `overrides`.
        See [`~trl_rollout_corr.settings.migrate.from_trl`].
        """
        return cls._of(**{**from_trl(settings), **overrides})

    @classmethod
    def _of(cls, **fields: Any) -> Self:
        return cls(**fields)

    # Resolved settings ------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """Resolved settings of the correction, from the present values of the fields."""
        return resolve({name: getattr(self, name) for name in CorrectionFields.__dataclass_fields__})

    @property
    def description(self) -> str:
        """One line about the settings."""
        parts = self._preset_in_effect()
        bounds = _in_words(self.rollout_is_threshold)
        bounds = f"clamped to {bounds.removeprefix('in ')}" if self.rollout_is_clamp and "[" in bounds else bounds
        weights = f"{self.rollout_is} weights {bounds}" if self.rollout_is else "no weights"
        parts.append(
            f"{weights} (reported only)" if self.rollout_is and not self.settings.applies_weights else weights
        )
        thresholds = parse_rejection_thresholds(self.rollout_rs_threshold, self.rollout_rs)
        criteria = zip(self.settings.criteria, thresholds, strict=True)
        parts += [f"{c.name} {_in_words(bound, c.directed)}" for c, bound in criteria] or ["no rejection"]
        parts.append(f"bypass, {self.rollout_loss_type}" if self.bypass_mode else "decoupled")
        parts += ["metrics only"] if self.rollout_metrics_only else []
        return "; ".join(parts)

    def _preset_in_effect(self) -> list[str]:
        """Name of the preset, if its mode is in effect, and its weights or its rejection."""
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
        """Fill in the fields that the user has not set and the preset decides. Returns the names of the other fields."""
        own, (name, given) = self._set_by_user(), read_given(self.rollout_correction)
        if isinstance(self.rollout_correction, Unset) and not own.keys() <= MODE:
            name = BASE
        if "rollout_rs" in own and parse_criteria(own["rollout_rs"]) != fill(name, given)["rollout_rs"]:
            given.pop("rollout_rs_threshold", None)  # no criterion gets the threshold of another
        explicit = {**{key: value for key, value in given.items() if key in DECIDED}, **own}
        further = {key: value for key, value in given.items() if key not in DECIDED and is_default(self, key)}
        names = {"rollout_correction": name, "rollout_correction_resolved": name or "disabled"}
        self.__dict__.update({**fill(name, explicit), **further, **names})
        return set(DEFAULTS) - set(DECIDED) | set(explicit)

    def _set_by_user(self) -> dict[str, Any]:
        """Fields set by the user among those that a preset decides."""
        values = {key: getattr(self, key) for key in DECIDED}
        base = none_if_null(self.rollout_correction_resolved)
        if base is not None and base not in PRESETS:
            raise SettingError(
                "rollout_correction_resolved", base, "which the configuration sets itself", remedy="Remove it."
            )
        before = {} if base is None else settings_of(base)
        fields = {
            key: value
            for key, value in values.items()
            if not isinstance(value, Unset) and (base is None or value != before[key])
        }
        if fields.get("rollout_rs_threshold") is None:
            fields.pop("rollout_rs_threshold", None)
        return fields

    def _parse(self) -> None:
        for name, parse in PARSERS.items():
            self.__dict__[name] = parse(self.__dict__[name])
        thresholds = none_if_null(self.rollout_rs_threshold)
        parsed = parse_rejection_thresholds(thresholds, self.rollout_rs)
        self.__dict__["rollout_rs_threshold"] = parsed if self.rollout_rs else thresholds

    def check(self) -> None:
        """
        Fill in the fields that a preset decides, parse all fields and check them, also those that were assigned since. A
        trainer does so when it is built, and reads the settings then.

        Raises:
            `ValueError`: if a value is refused, or if two settings exclude each other.
        """
        self._settle()
        for check in self._checks_of_trainer:
            check(self)

    def _settle(self) -> set[str]:
        """Do the same without the checks of a trainer. Returns the names of the fields that no preset has decided."""
        explicit = self._fill()
        self._parse()
        for check in CHECKS:
            check(self)
        return explicit


def _in_words(bound: Any, directed: bool = False) -> str:
    if not isinstance(bound, list):
        return f"up to {bound:g}"
    if is_by_sign(bound):
        return f"{_in_words(bound[0])}, for positive advantages {_in_words(bound[1]).removeprefix('in ')}"
    return f"within {-bound[0]:g}, {bound[1]:g}" if directed else f"in [{bound[0]:g}, {bound[1]:g}]"
