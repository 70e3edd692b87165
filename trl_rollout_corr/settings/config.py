"""The configuration: flat fields, which keep what the user gave. Neither TRL nor torch here."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..messages import SettingError, nearest, warn, warn_idle
from .criteria import CriterionName
from .fields import PARSERS, LossType, MonitorAction, NanPolicy, Replay, TrackedMetrics, WeightLevel
from .presets import settings_of
from .resolve import Settings, in_words, resolve


# On a command line: several values, and a truth value whose name alone means true
_SEVERAL, _FLAG = {"nargs": "+"}, {"nargs": "?", "const": True}


@dataclass
class RolloutCorrectionConfig:
    r"""
    Configuration of rollout correction.

    All fields are flat, so that they can be given in Python, in a YAML file, as JSON, or on a command line. Thresholds are
    numbers and lists of numbers; verl's text form (`"0.6_1.6,2.5"`) is parsed too. A field that the preset decides has a
    default that means "as the preset says". The fields keep what the user gave; `settings` has the values in effect.

    Args:
        rollout_correction (`str` or `None`, *optional*, defaults to `"default"`):
            Name of a preset (see `trl-rollout-corr docs presets`), or `None` for no correction. Fields that are given beside
            it override it. `"default"` is `"auto"`; but if `rollout_is` or `rollout_rs` is given, only what is given is done.

        > Importance sampling

        rollout_is (`str` or `None`, *optional*, defaults to `"preset"`):
            Level of the importance weights: `"token"` for `exp(d)`, `"turn"` and `"sequence"` for `exp(sum d)` over the turn
            of an agent and the completion, `"geometric"` for `exp(mean d)`, with `d = logp_train - logp_rollout`. `None` for
            no weights.
        rollout_is_threshold (`float` or `list`, *optional*):
            A number truncates the weights from above. A pair `[lower, upper]` sets weights outside it to 0 (IcePop).
            Two pairs are bounds for negative and for positive advantages. On a command line, a pair is `0.5 5.0` or `0.5_5.0`,
            and two pairs are `0_1,1_1`. Without a preset it is 2.0.
        rollout_is_clamp (`bool`, *optional*):
            With a pair of bounds, move a weight outside them to the nearest bound instead of setting it to 0. The two pairs
            `[[0, 1], [1, 1]]` give the weights of [TOPR](https://huggingface.co/papers/2503.14286): 1 if the advantage is
            positive, and otherwise the ratio, but at most 1.
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Divide the weights by their mean over the batch of all ranks (self-normalised importance sampling): over tokens at
            token level, over turns at turn level, over sequences otherwise. In decoupled mode the batch is the generation
            batch, and the old log-probabilities are computed when it is generated. In bypass mode it is the micro-batch of
            all ranks.

        > Rejection

        rollout_rs (`list[str]` or `None`, *optional*, defaults to `"preset"`):
            Rejection criteria, or `None` for no rejection. Each is `<scope>_<divergence>` with scope `token`, `turn_sum`,
            `turn_mean`, `turn_max`,
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

        bypass_mode (`bool`, *optional*):
            Use the sampler's log-probabilities in place of the old policy's, which are then not computed.
        rollout_loss_type (`str`, *optional*):
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

    rollout_correction: str | None = "default"
    rollout_is: WeightLevel | None = "preset"
    rollout_is_threshold: float | str | list[float | list[float]] | None = field(default=None, metadata=_SEVERAL)
    rollout_is_clamp: bool | None = field(default=None, metadata=_FLAG)
    rollout_is_batch_normalize: bool = False
    rollout_rs: list[CriterionName] | str | None = field(default="preset", metadata=_SEVERAL)
    rollout_rs_threshold: float | str | list[float | list[float]] | None = field(default=None, metadata=_SEVERAL)
    rollout_rs_renormalize: bool = False
    rollout_rs_exclude_from_baseline: bool = False
    bypass_mode: bool | None = field(default=None, metadata=_FLAG)
    rollout_loss_type: LossType | None = None
    rollout_clip_ratio_c: float | str | None = 3.0
    rollout_metrics_only: bool = False
    rollout_nan_policy: NanPolicy = "drop"
    rollout_support: Replay | None = None
    rollout_engine_kwargs: Mapping[str, object] | str | None = None
    rollout_routing: Replay | None = None
    rollout_monitor: MonitorAction | None = "warn"
    rollout_monitor_bounds: Mapping[str, float | None] | str | None = None
    rollout_tracked_metrics: TrackedMetrics = "essential"
    rollout_diagnose: bool = False
    rollout_dump_dir: str | None = None
    rollout_dump_steps: int = 1
    rollout_dump_sampled: int = 8
    rollout_dump_worst: int = 8
    rollout_dump_max_gb: float = 1.0

    _checks_of_trainer: ClassVar[Sequence[Callable[[Any], None]]] = ()  # which need TRL's fields

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Python's own error for an unknown argument does not suggest a name
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in kwargs.keys() - parameters:
                raise TypeError(f"`{name}` is not a field of {cls.__name__}.{nearest(name, parameters)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        settings, given = self.settings, self.given
        _refuse_conflicts(settings)
        for name, reason in _idle(settings).items():
            if name in given:
                warn_idle(name, getattr(self, name), reason)
        _warn_about_conflicts(settings, given)

    @property
    def _parsed(self) -> dict[str, Any]:
        return {name: parse(getattr(self, name)) for name, parse in PARSERS.items()}

    @property
    def settings(self) -> Settings:
        """Settings in effect, from the present values of the fields. A `ValueError` if a value is refused."""
        return resolve(self._parsed)

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that differ from their default."""
        return frozenset(name for name, value in self._parsed.items() if value != _DEFAULTS[name])

    @property
    def description(self) -> str:
        """One sentence about the settings in effect."""
        return in_words(self.settings)

    def check(self) -> None:
        """
        Check all fields, also those that were assigned since. A trainer does so when it is built, and reads the settings then.

        Raises:
            `ValueError`: if a value is refused, or if two settings exclude each other.
        """
        _refuse_conflicts(self.settings)
        for check in self._checks_of_trainer:
            check(self)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}


def _show_help() -> None:
    """Make the docstring the text of `--help`."""
    text = inspect.getdoc(RolloutCorrectionConfig) or ""
    for name, sentences in re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n)+)", f"{text}\n", re.MULTILINE):
        option: Any = RolloutCorrectionConfig.__dataclass_fields__[name]
        option.metadata = {**option.metadata, "help": " ".join(sentences.split()).replace("%", "%%")}


_show_help()


# Fields that do not go together ---------------------------------------------------------------------------------------


def _refuse_conflicts(settings: Settings) -> None:
    """Refuse a baseline without rejected completions where rejection is not known in time."""
    if not settings.rollout_rs_exclude_from_baseline:
        return
    reason, remedy = "", "Set one of the two to False."
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


def _idle(settings: Settings) -> dict[str, str]:
    """Reasons why fields have no effect, by name of the field."""
    no_weights = settings.rollout_is is None and "`rollout_is` is None"
    no_rejection = not settings.criteria and "`rollout_rs` is not set"
    reported = not settings.applies_weights and (
        "with `bypass_mode` and `rollout_loss_type='ppo_clip'` the weights are reported, not applied"
    )
    no_pair = not isinstance(settings.rollout_is_threshold, list) and "`rollout_is_threshold` is not a pair"
    no_bypass = not settings.bypass_mode and "`bypass_mode` is False, and the loss is TRL's `loss_type`"
    no_clipping = "it acts only in `bypass_mode` with `rollout_loss_type='ppo_clip'`"
    corrects = dataclasses.replace(settings, rollout_metrics_only=False).corrects
    no_dump = settings.rollout_dump_dir is None and "`rollout_dump_dir` is None"
    reasons: dict[str, Any] = {
        "rollout_is_threshold": no_weights,
        "rollout_is_clamp": settings.rollout_is_clamp and (no_weights or no_pair),
        "rollout_is_batch_normalize": no_weights or reported,
        **dict.fromkeys(
            ("rollout_rs_threshold", "rollout_rs_renormalize", "rollout_rs_exclude_from_baseline"), no_rejection
        ),
        "rollout_loss_type": no_bypass,
        "rollout_clip_ratio_c": settings.rollout_clip_ratio_c and not settings.clips_around_sampler and no_clipping,
        "rollout_metrics_only": not corrects and "there is no correction",
        "rollout_monitor_bounds": settings.rollout_monitor is None and "`rollout_monitor` is None",
        **{f"rollout_dump_{name}": no_dump for name in ("steps", "sampled", "worst", "max_gb")},
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _warn_about_conflicts(settings: Settings, given: frozenset[str]) -> None:
    """Warn about fields beside a preset that was not made for them."""
    name, preset = settings.rollout_correction, settings_of(settings.rollout_correction)
    if name == "disabled" and settings.corrects:
        acting = next(n for n in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(settings, n))
        warn(
            f"`rollout_correction` is 'disabled', but `{acting}` is {getattr(settings, acting)!r}, which acts. Set "
            f"`rollout_correction` to None if that is meant, or remove `{acting}`.",
            acting,
        )
    if settings.clips_around_sampler and preset["rollout_is"] and "rollout_is" not in given:
        warn(
            f"`bypass_mode` with `rollout_loss_type='ppo_clip'` does not go with {name!r}: its importance weights are only "
            "reported, because PPO clips around the sampler. Take a preset that starts with bypass_ instead.",
            "bypass_mode",
        )
    level = preset["rollout_is"]
    other_level = level is not None and settings.rollout_is not in (None, level)
    if other_level and "rollout_is_threshold" not in given and isinstance(preset["rollout_is_threshold"], list):
        warn(
            f"`rollout_is` is {settings.rollout_is!r}, but the bounds {preset['rollout_is_threshold']} of {name!r} are made "
            f"for weights of level {level!r}. Set `rollout_is_threshold`, too.",
            "rollout_is",
        )
