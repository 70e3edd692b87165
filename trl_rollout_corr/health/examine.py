"""
Rules about metrics, and what they find. No torch, no TRL.

A rule looks at one number of a logging window. It fires when that is out of bounds in most of the latest windows, or in all
of them, so that a single noisy one does not alarm. The rules themselves are in `rules.py`.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..messages import PREFIX


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
        limit (`str`):
            Bound that it is beyond, with its side: `"> 0.03"`.
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
    limit: str

    @property
    def in_short(self) -> str:
        """What was seen, and the rule with its bound, in a line."""
        return f"{self.seen.replace('`', '')} [{self.rule} {self.limit}]"

    def __str__(self) -> str:
        return f"{self.seen} {self.why} {self.advice}"


def windows_of(steps: int, spacing: int, *, at_most: int) -> int:
    """How many windows of `spacing` steps make up so many steps, at least two."""
    return min(at_most, max(2, math.ceil(steps / spacing)))


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


class Course:
    """
    What a run looked like so far.

    Attributes:
        k3 ([`Growth`]):
            Its `k3_kl`.
        spacing (`int`):
            Optimizer steps of the latest window.
        settled (`bool`):
            Whether the sampler was as far behind as it gets when the latest window began: no completion of it is older than
            those before, and as many steps have passed as they are old.
    """

    BEGINNING = 3  # windows
    RECENT, RECENT_STEPS = 5, 15  # so many windows; fewer, and at least two, where they have more steps

    def __init__(self):
        self.k3 = Growth()
        self.spacing, self.settled = 1, False
        self._step, self._oldest = 0, 0.0
        self._first_kl: list[float] = []
        self._rewarded: deque[float] = deque(maxlen=self.RECENT)

    def add(self, window: "Window"):
        """Add a window."""
        began, staleness = self._step, window.get("staleness_max") or 0.0
        self.spacing, self._step = max(window.step - began, 1), window.step
        self.settled = staleness <= min(self._oldest, began)
        self._oldest = max(self._oldest, staleness)
        k3, kl = window.gap("k3_kl"), window.gap("kl")
        if k3 is not None:
            self.k3.add(k3, still_rising=not self.settled)
        if kl is not None and len(self._first_kl) < self.BEGINNING:
            self._first_kl.append(kl)
        if (rewarded := window.gap_of_rewarded()) is not None:
            self._rewarded.append(rewarded)

    @property
    def gap_at_start(self) -> float:
        """The smallest `kl` of the first windows: what the engines differ by, before any weights are old."""
        return max(min(self._first_kl, default=0.0), 0.0)

    def rewarded_above(self, bound: float) -> bool | None:
        """Whether what was rewarded became less likely since the start, in most of the latest windows; `None` if unknown."""
        number = windows_of(self.RECENT_STEPS, self.spacing, at_most=self.RECENT)
        latest = list(self._rewarded)[-number:]
        return 2 * sum(gap - self.gap_at_start > bound for gap in latest) > number if latest else None

    def began_below(self, bound: float) -> bool:
        """Whether `kl` was below a bound in most of the first windows."""
        return 2 * sum(kl < bound for kl in self._first_kl) > len(self._first_kl)


@dataclass
class Window:
    """
    A logging window, and what is known about the run.

    Args:
        metrics (`Mapping`):
            What was logged, with prefix.
        settings (`Any`):
            Fields of [`RolloutCorrectionConfig`], as attributes or items, as far as they are known.
        course ([`Course`], *optional*):
            The run so far.
    """

    metrics: Mapping[str, Any]
    settings: Any
    course: Course = field(default_factory=Course)

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

    def gap(self, key: str) -> float | None:
        """
        `kl` or `k3_kl` to the sampler. In bypass mode the policy's own updates since the batch was generated are left out;
        `None` if there are some and nobody knows how much they are.
        """
        if self.setting("bypass_mode") is not True:
            return self.get(key)
        of_the_sampler = self.get(f"engine_{key}")
        if of_the_sampler is None and self.fresh:
            return self.get(key)
        return of_the_sampler

    def gap_of_rewarded(self) -> float | None:
        """`kl` to the sampler where the advantage is positive; `None` where [`gap`] is, and if there is no such token."""
        return self.get("kl_advantage_positive") if self.fresh else None

    @property
    def fresh(self) -> bool:
        """Whether ratios are about samples that the policy has not been trained on. Those raise it where they did well."""
        return self.setting("bypass_mode") is not True or self.setting("num_iterations") in (..., 1)

    @property
    def clips(self) -> bool:
        """Whether the loss clips the ratio to the sampler, so that tokens that are far off have no gradient."""
        return self.setting("bypass_mode") is True and self.setting("rollout_loss_type") in (..., "ppo_clip")

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
        return not self.clips and self.get("rollout_is_mean") is not None

    def numbers(self) -> dict[str, str]:
        """
        What advice fills in: bounds that keep nearly all of this window. Of completions (`geometric`) three standard
        deviations of their mean log-ratio, which are 3.8 of its mean size; of tokens (`token`) the first to the 99th
        percentile.
        """
        size, low, high = (self.get(key) for key in ("log_ppl_abs_diff", "log_ratio_p1", "log_ratio_p99"))
        geometric = token = "bounds from its spread"
        if size is not None and 0 < size < 5:
            length = self.metrics.get("completions/mean_length")
            tokens = f" at {length:.0f} tokens" if isinstance(length, int | float) else ""
            words = f"nearly all of its completions, whose mean log-ratio is {size:.2g} in size{tokens}"
            geometric = f"{_bounds(-3.8 * size, 3.8 * size)} ({words})"
        if low is not None and high is not None and -3 < low <= high < 3:  # beyond that it is no spread
            token = f"{_bounds(min(low, 0.0), max(high, 0.0))} (98 percent of its tokens)"
        return {"geometric": geometric, "token": token}


def _bounds(low: float, high: float) -> str:
    """Bounds on a ratio from those of its logarithm, widened to two digits of their distance from 1."""
    digits = max(2, 1 - math.floor(math.log10(max(1 - math.exp(low), 1e-6))))
    step = 10.0**-digits
    lower, upper = math.floor(math.exp(low) / step) * step, math.ceil(math.exp(high) / step) * step
    return f"[{max(lower, 0.0):.{digits}f}, {upper:.{digits}f}]"


# Rules ----------------------------------------------------------------------------------------------------------------


# Metrics of what weights and rejection do, rather than of the two policies
_EFFECTS = ("rollout_is_", "rollout_rs_", "rejected/")


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
            What to set. `{geometric}` and `{token}` are filled in, see [`Window.numbers`].
        below (`bool`, *optional*, defaults to `False`):
            The metric is unhealthy below the bound instead.
        patience (`int`, *optional*, defaults to `3`):
            It fires if more than half of so many windows are unhealthy, the latest among them.
        lasting (`int`, *optional*, defaults to `0`):
            It fires if all of them are; where a window is several steps, if all of as many as are this number of steps are,
            and at least two. By default most are enough.
        applies (`Callable`, *optional*):
            Whether the rule applies to a [`Window`].
        measure (`Callable`, *optional*):
            The number of a [`Window`] in place of the metric.
        confirmed (`Callable`, *optional*):
            Whether it may fire at a [`Window`], of which it holds.
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
    lasting: int = 0
    applies: Callable[[Window], bool] = lambda window: True
    measure: Callable[[Window], float | None] | None = None
    confirmed: Callable[[Window], bool] = lambda window: True
    covers: tuple[str, ...] = ()

    def holds(self, streak: Sequence[bool], spacing: int) -> bool:
        """Whether it fires after so many healthy and unhealthy windows, each of `spacing` steps, the latest last."""
        if not self.lasting:
            return streak[-1] and sum(streak) > self.patience // 2
        needed = windows_of(self.lasting, spacing, at_most=self.patience)
        return len(streak) >= needed and all(streak[-needed:])

    def value(self, window: Window) -> float | None:
        """The number that is compared, or `None` if there is none."""
        if not self.applies(window):
            return None
        return self.measure(window) if self.measure else window.get(self.key)

    def unhealthy(self, value: float, bound: float) -> bool:
        return value < bound if self.below else value > bound


class Examiner:
    """
    Applies rules to one logging window after the other.

    Args:
        rules (`Mapping[str, Rule]`):
            The rules by name.
        settings (`Any`, *optional*):
            Settings of the run: a [`RolloutCorrectionConfig`], or a dictionary of fields. They are read at every window, so
            that they may change.
        bounds (`Mapping[str, float or None]`, *optional*):
            Other bounds, by name of the rule; `None` switches a rule off.
    """

    def __init__(
        self, rules: Mapping[str, Rule], settings: Any = None, bounds: Mapping[str, float | None] | None = None
    ):
        self.rules, self.settings = rules, settings
        chosen = {**{name: rule.bound for name, rule in rules.items()}, **(bounds or {})}
        self._bounds: dict[str, float] = {name: bound for name, bound in chosen.items() if bound is not None}
        self.restart()

    def restart(self):
        """Forget the run so far."""
        self._course = Course()
        self.forget_streaks()

    def forget_streaks(self):
        """Start counting unhealthy windows anew. What the run looked like early on stays known."""
        self._streaks: dict[str, deque[bool]] = {
            name: deque(maxlen=self.rules[name].patience) for name in self._bounds
        }

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
        window = Window(entry, self.settings, self._course)
        self._course.add(window)
        holding = [
            self._finding(self.rules[name], bound, value, window)
            for name, bound in self._bounds.items()
            if (value := self.rules[name].value(window)) is not None
            and self._holds(self.rules[name], value, bound)
            and self.rules[name].confirmed(window)
        ]
        covered = {name for finding in holding for name in self.rules[finding.rule].covers}
        return by_severity(finding for finding in holding if finding.rule not in covered)

    def _holds(self, rule: Rule, value: float, bound: float) -> bool:
        streak = self._streaks[rule.name]
        streak.append(rule.unhealthy(value, bound))
        return rule.holds(list(streak), self._course.spacing)

    @staticmethod
    def _finding(rule: Rule, bound: float, value: float, window: Window) -> Finding:
        seen, step = rule.seen.format(value=value, bound=bound), window.step
        advice = rule.advice.format(**window.numbers())
        if window.only_measured and rule.key.startswith(_EFFECTS):
            seen = f"If the correction were applied: {seen}"
        limit = f"{'<' if rule.below else '>'} {bound:g}"
        return Finding(rule.name, rule.severity, PREFIX + rule.key, step, step, value, seen, rule.why, advice, limit)


def is_training_window(entry: Mapping[str, Any]) -> bool:
    """Whether a log entry has metrics of rollout correction in training. Those of an evaluation have another prefix."""
    return any(key.startswith(PREFIX) and not key.startswith(f"{PREFIX}monitor/") for key in entry)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The most serious first; of the same severity, what was found first; then in the order of the rules."""
    return sorted(findings, key=lambda finding: (finding.severity != "critical", finding.step))
