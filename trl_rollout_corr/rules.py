"""
Health rules, as data, and what they find in metrics. No torch, no TRL, nothing else of the package.

A rule looks at one number of a logging window. It fires when that is out of bounds in most of the latest windows, so that
a single noisy one does not alarm. `docs/monitoring.md` lists the rules.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class Finding:
    """
    Something unhealthy.

    Args:
        rule (`str`):
            Name of the rule, which is also that of the cause.
        severity (`str`):
            `"warning"`, or `"critical"` for what ends or tightens a run if the monitor is told to.
        key (`str`):
            Metric that was looked at.
        step (`int`):
            Optimizer step at which it was found first.
        last_step (`int`):
            Optimizer step at which it was seen last.
        value (`float`):
            Value of the metric when it was found.
        seen (`str`):
            What was seen, in one sentence.
        why (`str`):
            Why it matters.
        advice (`str`):
            What to set or look at.
    """

    rule: str
    severity: str
    key: str
    step: int
    last_step: int
    value: float
    seen: str
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen} {self.why} {self.advice}"


# Healthy band of each metric, `(lower, upper)` with `None` for no bound, without the prefix. For charts and docs.
HEALTHY: dict[str, tuple[float | None, float | None]] = {
    "k3_kl": (None, 0.01),
    "kl": (-0.1, 0.1),
    "chi2_token": (None, 1.0),
    "chi2_seq": (None, 10.0),
    "effective_lr": (0.5, 1.5),
    "nonfinite_fraction": (None, 0.0),
    "rollout_is_mean": (0.8, 1.2),
    "rollout_is_std": (None, 1.0),
    "rollout_is_eff_sample_size": (0.5, None),
    "rollout_rs_masked_fraction": (None, 0.3),
    "rollout_is_veto_fraction": (None, 0.1),
}


# What a rule sees -----------------------------------------------------------------------------------------------------


class Growth:
    """
    How far a metric has grown: the median of the latest windows over that of the first ones. The very first windows are
    left out: a sampler that is some steps behind needs as many steps to get there.
    """

    SKIPPED, COMPARED = 10, 10

    def __init__(self):
        self.skipped = 0
        self.first: list[float] = []
        self.latest: deque[float] = deque(maxlen=self.COMPARED)

    def add(self, value: float, still_rising: bool):
        """Add a window. `still_rising` leaves it out as one of the very first."""
        if self.skipped < self.SKIPPED or (still_rising and not self.first):
            self.skipped += 1
        elif len(self.first) < self.COMPARED:
            self.first.append(value)
        else:
            self.latest.append(value)

    @property
    def level(self) -> float | None:
        """Median of the latest windows; `None` until there are enough."""
        return statistics.median(self.latest) if len(self.latest) == self.COMPARED else None

    @property
    def factor(self) -> float | None:
        """How many times the level early in the run it is."""
        return None if self.level is None else self.level / max(statistics.median(self.first), 1e-12)


@dataclass
class Window:
    """
    A logging window, and what is known about the run.

    Args:
        metrics (`Mapping`):
            What was logged, with prefix.
        settings (`Any`):
            Fields of [`RolloutCorrectionConfig`], as attributes or items, as far as they are known.
        k3 ([`Growth`]):
            The run's `k3_kl` so far.
    """

    metrics: Mapping[str, Any]
    settings: Any
    k3: Growth

    def get(self, key: str) -> float | None:
        """A metric, or `None` if it was not logged or is NaN."""
        value = self.metrics.get(PREFIX + key)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return None
        return float(value)

    def setting(self, name: str) -> Any:
        """A field of the configuration, or `Ellipsis` if it is not known."""
        if isinstance(self.settings, Mapping):
            return self.settings.get(name, ...)
        return getattr(self.settings, name, ...)

    @property
    def corrects(self) -> bool:
        """Whether the loss is corrected. Where settings are unknown, whether there are weights or rejection."""
        known = self.setting("corrects")
        if isinstance(known, bool):
            return known
        if self.only_measured:
            return False
        asked = [self.setting(name) for name in ("rollout_is", "rollout_rs", "bypass_mode")]
        if ... not in asked or any(value is not ... and value for value in asked):
            return any(asked)
        if isinstance(self.setting("rollout_correction"), str):
            return self.setting("rollout_correction") != "disabled"
        return any(key.startswith((f"{PREFIX}rollout_is_", f"{PREFIX}rollout_rs_")) for key in self.metrics)

    @property
    def step(self) -> int:
        """Optimizer step at which it was logged."""
        return self.metrics.get("step", 0)

    @property
    def only_measured(self) -> bool:
        """Whether weights and rejection are reported and do nothing."""
        return self.setting("rollout_metrics_only") is True

    @property
    def weights_act(self) -> bool:
        """Whether there are weights that multiply the gradient, or would without `rollout_metrics_only`."""
        clips = self.setting("bypass_mode") is True and self.setting("rollout_loss_type") in (..., "ppo_clip")
        return not clips and self.get("rollout_is_mean") is not None


# Metrics of what weights and rejection do, rather than of the two policies
_EFFECTS = ("rollout_is_", "rollout_rs_", "rejected/")


def _sequence_weights(window: Window) -> bool:
    return window.weights_act and window.setting("rollout_is") == "sequence"


def _truncates(window: Window) -> bool:
    return window.weights_act and window.get("rollout_is_oob_ratio") is None


def _vetoes(window: Window) -> bool:
    """Whether the lower bound of `seq_max_k1` is one for broken tokens. A tight one is ordinary rejection."""
    criteria, bounds = window.setting("rollout_rs"), window.setting("rollout_rs_threshold")
    if not isinstance(criteria, list) or not isinstance(bounds, list) or len(criteria) != len(bounds):
        return True
    bounds = dict(zip(criteria, bounds, strict=True)).get("seq_max_k1")
    return not isinstance(bounds, list) or bounds[0] <= 0.01


def _k3_growth(window: Window) -> float | None:
    """Growth of `k3_kl`. Below a few times the gap of bfloat16 it is of no consequence."""
    if window.get("k3_kl") is None or window.k3.factor is None:
        return None
    return window.k3.factor if window.k3.level > 0.003 else 0.0


def _bias(window: Window) -> float | None:
    """
    How far the mean of the unbounded ratio, `1 + k3_kl - kl`, is from 1, where the difference is not that of the noise in
    `kl`. It is 1 for samples of the sampler's policy, whatever the trainer's.
    """
    kl, k3 = window.get("kl"), window.get("k3_kl")
    if kl is None or k3 is None:
        return None
    return abs(k3 - kl) if abs(k3 - kl) > k3 else 0.0


def _fresh(window: Window) -> bool:
    """Whether ratios are about samples that the policy has not been trained on. Those raise it where they did well."""
    return window.setting("bypass_mode") is not True or window.setting("num_iterations") in (..., 1)


def _selection(window: Window) -> float | None:
    """Rejected share of long completions with a positive advantage, where it is over three times that of the others."""
    chosen, others = window.get("rejected/long_positive"), window.get("rejected/others")
    if chosen is None or others is None:
        return None
    return chosen if chosen > 3 * others else 0.0


# The rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """
    What is unhealthy, and what to say about it.

    Args:
        name (`str`):
            Name, which is that of the cause.
        key (`str`):
            Metric, without prefix.
        bound (`float`):
            The metric is unhealthy above it.
        severity (`str`):
            `"warning"` or `"critical"`.
        seen (`str`):
            What was seen; `{value}` and `{bound}` are filled in.
        why (`str`):
            Why it matters.
        advice (`str`):
            What to set.
        below (`bool`, *optional*, defaults to `False`):
            The metric is unhealthy below the bound instead.
        patience (`int`, *optional*, defaults to `3`):
            It fires if more than half of so many windows are unhealthy, the latest among them.
        applies (`Callable`, *optional*):
            Whether the rule applies to a [`Window`].
        measure (`Callable`, *optional*):
            The number of a [`Window`] in place of the metric.
        covers (`tuple[str]`, *optional*):
            Rules that say less about the same thing, and are silent while this one holds.
    """

    name: str
    key: str
    bound: float
    severity: str
    seen: str
    why: str
    advice: str
    below: bool = False
    patience: int = 3
    applies: Callable[[Window], bool] = lambda window: True
    measure: Callable[[Window], float | None] | None = None
    covers: tuple[str, ...] = ()

    def value(self, window: Window) -> float | None:
        """The number that is compared, or `None` if there is none."""
        if not self.applies(window):
            return None
        return self.measure(window) if self.measure else window.get(self.key)

    def unhealthy(self, value: float, bound: float) -> bool:
        return value < bound if self.below else value > bound


_RULES = [
    Rule(
        "nonfinite_many",
        "nonfinite_fraction",
        0.1,
        "critical",
        "A share of {value:.2g} of the tokens came without a finite log-probability.",
        "The sampler is broken: its completions are no samples of the policy.",
        "No correction helps. Look for NaN in the weights and for a push of weights that failed; with "
        "`rollout_nan_policy` set to raise the run stops at the first such token.",
        covers=("nonfinite", "everything_rejected"),
    ),
    Rule(
        "everything_rejected",
        "effective_lr",
        1e-6,
        "critical",
        "Every token of a logging window was rejected, or too far off to train on (`effective_lr` is {value:.2g}).",
        "Nothing was learned from it; only momentum and weight decay still move the weights.",
        "If `k3_kl` is as always, the bounds are wrong: widen `rollout_rs_threshold`, or IcePop's `rollout_is_threshold`. "
        "If it is not, find out why the sampler is so far from the trainer.",
        below=True,
        applies=lambda window: window.corrects,
        covers=("effective_lr_low", "rejected", "weight_mean_low", "sample_size", "icepop_dropped", "selection"),
    ),
    Rule(
        "k3_high",
        "k3_kl",
        0.03,
        "critical",
        "`k3_kl` is {value:.2g}, above {bound:g}.",
        "Rounding gives about 0.001 and a sampler in low precision up to 0.02: sampler and trainer are different policies, "
        "and updates on such data drive them further apart.",
        "Without correction, set `rollout_correction` to decoupled_geo_rs_token_tis. With one, synchronise the sampler more "
        "often or lower `learning_rate`, and do not widen `rollout_rs_threshold`. After a jump, look for weights that were "
        "not pushed.",
        covers=("k3_uncorrected", "k3_growth", "kl_high", "chi2_token"),
    ),
    Rule(
        "kl_negative",
        "kl",
        -0.1,
        "critical",
        "`kl` is {value:.2g}, and a divergence is never below 0.",
        "The log-probabilities are not those the tokens were sampled with, so that every ratio is wrong.",
        "No correction helps. Look for log-probabilities before temperature (a server needs `--logprobs-mode "
        "processed_logprobs`), shifted by a token, or of another completion.",
        below=True,
        covers=("biased_ratio",),
    ),
    Rule(
        "nonfinite",
        "nonfinite_fraction",
        0.0,
        "warning",
        "A fraction of {value:.2g} of the tokens came without a finite log-probability.",
        "A NaN from the sampler means that a whole row of its logits is broken, so that the token was not drawn from the "
        "policy.",
        "Set `rollout_nan_policy` to raise to stop at the first one and find the cause; drop leaves such tokens out of the "
        "loss.",
        patience=1,
    ),
    Rule(
        "k3_uncorrected",
        "k3_kl",
        0.015,
        "warning",
        "`k3_kl` is {value:.2g}, above {bound:g}, and nothing corrects for it.",
        "Rounding gives about 0.001. Training on the data of another policy is biased, and the gap tends to grow.",
        "Set `rollout_correction`, for instance to decoupled_geo_rs_token_tis with `rollout_rs_threshold` from the spread; or "
        "bring the policies together with fresher or preciser sampling.",
        patience=5,
        applies=lambda window: not window.corrects,
    ),
    Rule(
        "k3_growth",
        "k3_kl",
        3.0,
        "warning",
        "`k3_kl` is {value:.2g} times what it was early in the run.",
        "Updates on the data of another policy make the next data more foreign; a growing gap comes before a collapse.",
        "Without correction, set `rollout_correction` to decoupled_geo_rs_token_tis. With one, lower `learning_rate` or "
        "synchronise the sampler more often. To rule out the engine, run some steps with `learning_rate` 0: a gap that "
        "grows there is not due to updates.",
        measure=_k3_growth,
    ),
    Rule(
        "kl_high",
        "kl",
        0.1,
        "warning",
        "`kl` is {value:.2g}, above {bound:g}.",
        "The trainer finds the sampled tokens much less likely than the sampler did.",
        "If `k3_kl` is as large, the policies differ: fresher or preciser sampling, or a correction with rejection. If it is "
        "much smaller, sampling is truncated: leave `top_p`, `top_k` and `min_p` at their defaults.",
    ),
    Rule(
        "biased_ratio",
        "kl",
        0.01,
        "warning",
        "The mean ratio of trainer to sampler, `1 + k3_kl - kl`, is {value:.2g} away from 1.",
        "It is 1 for any two policies, so these are not the log-probabilities of the sampled tokens.",
        "Leave `top_p`, `top_k`, `min_p` and penalties at their defaults. If they are, look for another temperature and for "
        "tokens that were added or changed after sampling.",
        patience=5,
        applies=_fresh,
        measure=_bias,
    ),
    Rule(
        "staleness",
        "staleness_max",
        16.0,
        "warning",
        "Completions are up to {value:.0f} optimizer steps older than the policy they train.",
        "The gap to the sampler grows with every step it is behind.",
        "Push weights more often: lower `steps_per_generation`, `num_iterations` or the queue of an asynchronous sampler.",
    ),
    Rule(
        "weight_mean_low",
        "rollout_is_mean",
        0.5,
        "warning",
        "The mean importance weight is {value:.2g}, below {bound:g}.",
        "It should be near 1; the step shrinks with it.",
        "Set `rollout_is` to token if it is sequence, whose weights fall with length; widen IcePop's "
        "`rollout_is_threshold` if it drops too many tokens. A smaller upper bound makes it worse.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "weight_mean_high",
        "rollout_is_mean",
        2.0,
        "warning",
        "The mean importance weight is {value:.2g}, above {bound:g}.",
        "The mean ratio is 1 for any two policies, so log-probabilities may be wrong, or few tokens have a huge weight.",
        "Check that log-probabilities are those after temperature and not shifted by a token; then lower "
        "`rollout_is_threshold`.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_high",),
    ),
    Rule(
        "sample_size",
        "rollout_is_eff_sample_size",
        0.3,
        "warning",
        "The effective sample size of the weights is {value:.2g}, below {bound:g}.",
        "Few tokens carry the gradient.",
        "Set `rollout_is` to token if it is sequence; with token weights lower `rollout_is_threshold` and bring the policies "
        "together. A higher bound never helps.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("weight_std", "chi2_seq"),
    ),
    Rule(
        "weight_std",
        "rollout_is_std",
        1.0,
        "warning",
        "The importance weights have a standard deviation of {value:.2g}, above {bound:g}.",
        "They vary more than they average, so that the gradient is noisy.",
        "Lower `rollout_is_threshold`, or set `rollout_is` to token if it is sequence, with rejection by seq_mean_k1 in "
        "`rollout_rs`.",
        applies=lambda window: window.weights_act,
    ),
    Rule(
        "weights_at_bound",
        "rollout_is_ratio_fraction_high",
        0.1,
        "warning",
        "A share of {value:.2g} of the importance ratios is above the bound and was truncated.",
        "Truncation is meant for rare outliers; this much of it is bias.",
        "With sequence weights, set `rollout_is` to token. With token weights the policies are too far apart for weights "
        "alone: add `rollout_rs`, or sample fresher. Raise `rollout_is_threshold` only if the sample size is high.",
        applies=_truncates,
    ),
    Rule(
        "icepop_dropped",
        "rollout_is_oob_ratio",
        0.3,
        "warning",
        "IcePop dropped a share of {value:.2g} of the tokens, above {bound:g}.",
        "It is meant for rare outliers; this much of it starves training.",
        "Widen `rollout_is_threshold`; bounds such as [0.5, 5.0] are for tokens, and tighter ones for averages of a "
        "completion.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "chi2_token",
        "chi2_token",
        1.0,
        "warning",
        "`chi2_token` is {value:.2g}, above {bound:g}.",
        "A few tokens have a huge ratio, so that unbounded token weights would be mostly noise.",
        "Keep `rollout_is_threshold` at 2 or below, or drop the tail with IcePop (a pair); find out which tokens they are "
        "from `log_ratio_p99` and `log_ratio_max`.",
    ),
    Rule(
        "chi2_seq",
        "chi2_seq",
        10.0,
        "warning",
        "`chi2_seq` is {value:.2g}, above {bound:g}, with sequence weights.",
        "Sequence weights are of little use at this length: few completions carry the gradient.",
        "Set `rollout_is` to token or geometric.",
        applies=_sequence_weights,
    ),
    Rule(
        "rejected",
        "rollout_rs_masked_fraction",
        0.5,
        "warning",
        "A share of {value:.2g} of the tokens is rejected, above {bound:g}.",
        "Training starves, and what is kept is a narrow choice.",
        "If it was so from the start, widen `rollout_rs_threshold` to the spread of the sampler, or use seq_mean_k1 in place "
        "of a seq_sum criterion. If it grew, `k3_kl` did, and that is the problem.",
        covers=("effective_lr_low",),
    ),
    Rule(
        "vetoed",
        "rollout_is_veto_fraction",
        0.1,
        "warning",
        "A share of {value:.2g} of the completions has a token below the lower bound of seq_max_k1.",
        "Rounding does not do that: look for broken rows of logits, tokens seen at another position, and text that was added "
        "after sampling.",
        "Find the tokens from `log_ratio_min`. To veto less, lower the first number of the bounds in `rollout_rs_threshold`.",
        applies=_vetoes,
    ),
    Rule(
        "effective_lr_low",
        "effective_lr",
        0.5,
        "warning",
        "`effective_lr` is {value:.2g}: the correction shrinks the step that much.",
        "The run learns more slowly than `learning_rate` says.",
        "If weights are as small, set `rollout_is` to token; if it is rejection, widen `rollout_rs_threshold`. "
        "`rollout_rs_renormalize` and `rollout_is_batch_normalize` restore the size of the step, not the data.",
        below=True,
        applies=lambda window: window.corrects,
    ),
    Rule(
        "effective_lr_high",
        "effective_lr",
        1.5,
        "warning",
        "`effective_lr` is {value:.2g}: the correction enlarges the step that much.",
        "The run takes larger steps than `learning_rate` says.",
        "Lower `rollout_is_threshold`, or set `rollout_is` to token if it is sequence. With `rollout_rs_renormalize` it "
        "says how little is kept: widen `rollout_rs_threshold`.",
        applies=lambda window: window.corrects,
    ),
    Rule(
        "selection",
        "rejected/long_positive",
        0.2,
        "warning",
        "Of long completions with a positive advantage a share of {value:.2g} of the tokens is rejected, over three times "
        "that of all others.",
        "Training then sees mostly the short or bad answers, and may unlearn long ones.",
        "Use criteria that do not depend on length: in `rollout_rs` seq_mean_k1 or seq_mean_k3 in place of seq_sum or "
        "seq_max; or widen `rollout_rs_threshold`.",
        patience=5,
        measure=_selection,
    ),
]
RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}


def parse_thresholds(thresholds: Mapping[str, float | None] | str | None) -> dict[str, float | None]:
    """
    Check thresholds that a user has set.

    Args:
        thresholds (`Mapping[str, float or None]` or `str`, *optional*):
            Bounds by name of the rule, `None` for a rule that is off; or the same as JSON.

    Returns:
        `dict[str, float or None]`: the same, as a new dictionary.

    Raises:
        `ValueError`: if there is no rule of a name, or a bound is not a number.
    """
    field = "`rollout_monitor_thresholds`"
    if isinstance(thresholds, str):
        try:
            thresholds = json.loads(thresholds)
        except json.JSONDecodeError as error:
            raise ValueError(
                f'{field} is {thresholds!r}, which is not JSON. Write it as {{"k3_high": 0.1}}.'
            ) from error
    if thresholds is None:
        return {}
    if not isinstance(thresholds, Mapping):
        raise ValueError(
            f"{field} must have a number, or None, by name of a rule, such as {{'k3_high': 0.1}}; got {thresholds!r}."
        )
    for name, bound in thresholds.items():
        if name not in RULES:
            raise ValueError(f"{field} has {name!r}, which is no rule. Available rules: {', '.join(RULES)}.")
        number = isinstance(bound, int | float) and not isinstance(bound, bool) and not math.isnan(bound)
        if bound is not None and not number:
            raise ValueError(
                f"{field} sets {name!r} to {bound!r}, which must be a number, or None to switch the rule off."
            )
    return dict(thresholds)


# Applying them --------------------------------------------------------------------------------------------------------


class Examiner:
    """
    Applies the rules to one logging window after the other.

    Args:
        settings (`Any`, *optional*):
            Settings of the run: a [`RolloutCorrectionConfig`], or a dictionary of fields. They are read at every window, so
            that they may change.
        thresholds (`Mapping[str, float or None]`, *optional*):
            Other bounds, by name of the rule; `None` switches a rule off.
    """

    def __init__(self, settings: Any = None, thresholds: Mapping[str, float | None] | None = None):
        self.settings = settings
        bounds = {**{name: rule.bound for name, rule in RULES.items()}, **parse_thresholds(thresholds)}
        self._bounds: dict[str, float] = {name: bound for name, bound in bounds.items() if bound is not None}
        self.restart()

    def restart(self):
        """Forget the run so far."""
        self._k3 = Growth()
        self.forget_streaks()

    def forget_streaks(self):
        """Start counting unhealthy windows anew. What the run looked like early on stays known."""
        self._streaks: dict[str, deque[bool]] = {name: deque(maxlen=RULES[name].patience) for name in self._bounds}

    def observe(self, entry: Mapping[str, Any]) -> list[Finding]:
        """
        Look at a logging window.

        Args:
            entry (`Mapping`):
                What was logged. Without metrics of rollout correction it is passed over.

        Returns:
            `list[Finding]`: what is unhealthy now, the most serious first.
        """
        if not is_training_window(entry):
            return []
        window = Window(entry, self.settings, self._k3)
        k3, staleness = window.get("k3_kl"), window.get("staleness_max") or 0
        if k3 is not None:
            self._k3.add(k3, still_rising=window.step <= staleness)
        holding = [
            self._finding(RULES[name], bound, value, window)
            for name, bound in self._bounds.items()
            if (value := RULES[name].value(window)) is not None and self._holds(RULES[name], value, bound)
        ]
        covered = {name for finding in holding for name in RULES[finding.rule].covers}
        return _by_severity(finding for finding in holding if finding.rule not in covered)

    def _holds(self, rule: Rule, value: float, bound: float) -> bool:
        streak, unhealthy = self._streaks[rule.name], rule.unhealthy(value, bound)
        streak.append(unhealthy)
        return unhealthy and sum(streak) > rule.patience // 2

    @staticmethod
    def _finding(rule: Rule, bound: float, value: float, window: Window) -> Finding:
        seen, step = rule.seen.format(value=value, bound=bound), window.step
        if window.only_measured and rule.key.startswith(_EFFECTS):
            seen = f"If the correction were applied: {seen}"
        return Finding(rule.name, rule.severity, PREFIX + rule.key, step, step, value, seen, rule.why, rule.advice)


def is_training_window(entry: Mapping[str, Any]) -> bool:
    """Whether a log entry has metrics of rollout correction in training. Those of an evaluation have another prefix."""
    return any(key.startswith(PREFIX) and not key.startswith(f"{PREFIX}monitor/") for key in entry)


def examine(history: Iterable[Mapping[str, Any]], settings: Any = None) -> list[Finding]:
    """
    Apply the rules to the log of a run, as the monitor would have during the run.

    Args:
        history (`Iterable[Mapping]`):
            Entries of `trainer.state.log_history`, each with a `step`.
        settings ([`RolloutCorrectionConfig`] or `dict`, *optional*):
            Settings of the run, whose `rollout_monitor_thresholds` are used. Without them, a run whose log has neither
            weights nor rejection is taken as uncorrected.

    Returns:
        `list[Finding]`: one per cause, the most serious first.
    """
    thresholds = Window({}, settings, Growth()).setting("rollout_monitor_thresholds")
    examiner = Examiner(settings, None if thresholds is ... else thresholds)
    found: dict[str, Finding] = {}
    for entry in history:
        for finding in examiner.observe(entry):
            first = found.setdefault(finding.rule, finding)
            found[finding.rule] = replace(first, last_step=finding.step)
    return _by_severity(found.values())


def _by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The most serious first; of the same severity, what was found first; then in the order of the rules."""
    return sorted(findings, key=lambda finding: (finding.severity != "critical", finding.step))
