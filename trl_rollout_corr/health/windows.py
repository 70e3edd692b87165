"""Logging windows of a run, and its history as the rules see it."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..messages import PREFIX
from .advice import in_effect


def windows_of(steps: int, spacing: int, *, at_most: int) -> int:
    """Number of windows of `spacing` optimizer steps that cover `steps` of them, between 2 and `at_most`."""
    return min(at_most, max(2, math.ceil(steps / spacing)))


class Growth:
    """
    Growth of a metric: the median of the latest windows over the median of the first ones. The very first windows are left
    out: the sampler has not reached its full staleness in them.
    """

    SKIPPED, COMPARED = 10, 10

    def __init__(self) -> None:
        self.skipped, self.values = 0, list[float]()

    def add(self, value: float, still_rising: bool) -> None:
        """Add a window. It is left out as one of the very first while the age of the samples is `still_rising`."""
        if self.skipped < self.SKIPPED or (still_rising and not self.values):
            self.skipped += 1
        else:
            self.values.append(value)

    @property
    def level(self) -> float | None:
        """Median of the latest windows; `None` until there are enough."""
        return statistics.median(self.values[-self.COMPARED :]) if len(self.values) >= 2 * self.COMPARED else None

    @property
    def factor(self) -> float | None:
        """The level over that early in the run."""
        early = self.values[: self.COMPARED]
        return None if self.level is None else self.level / max(statistics.median(early), 1e-12)


class Reward:
    """
    Whether the mean reward of the latest windows is below the best one so far. A difference counts if it is larger than four
    standard errors, taken from the scatter between windows, and larger than a quarter of what the run had gained.
    """

    WINDOWS, ERRORS, OF_GAIN = 20, 4.0, 0.25

    def __init__(self) -> None:
        self.latest = deque[float](maxlen=self.WINDOWS)
        self.first: float | None = None  # mean of the first windows
        self.best, self._variance_of_best = -math.inf, 0.0  # of the best windows in a row

    def add(self, value: float) -> None:
        """Add the mean reward of a window."""
        self.latest.append(value)
        if len(self.latest) < self.WINDOWS:
            return
        if self.first is None:
            self.first = self.mean
        if self.mean > self.best:
            self.best, self._variance_of_best = self.mean, statistics.variance(self.latest)

    @property
    def mean(self) -> float:
        """Mean of the latest windows."""
        return statistics.fmean(self.latest)

    @property
    def fell(self) -> bool:
        """True if the latest windows are below the best ones; `False` until there are enough of them."""
        if self.first is None:
            return False
        error = math.sqrt((statistics.variance(self.latest) + self._variance_of_best) / self.WINDOWS)
        return self.best - self.mean > max(self.ERRORS * error, self.OF_GAIN * (self.best - self.first))


class Course:
    """
    The history of a run: the growth of `k3_kl`, the reward, completions that no longer end, and the `spacing` of the latest
    window in optimizer steps. It is `settled` if the sampler had reached its full staleness when the latest window began: no
    completion in it is older than earlier ones, and as many steps as their age have passed.
    """

    BEGINNING = 3  # windows
    RECENT, RECENT_STEPS = 7, 15  # windows, or fewer that cover these optimizer steps
    COMPARED = 10  # windows at the start, and the latest ones, whose means are compared

    def __init__(self) -> None:
        self.k3, self.reward = Growth(), Reward()
        self.spacing, self.settled = 1, False
        self._step, self._oldest = 0, 0.0
        self._kl, self._rewarded = list[float](), list[float]()
        self._unfinished, self._rewards = list[float](), list[float]()

    def add(self, window: "Window") -> None:
        """Add a window."""
        began, staleness = self._step, window.get("staleness_max") or 0.0
        self.spacing, self._step = max(window.step - began, 1), window.step
        self.settled = staleness <= min(self._oldest, began)
        self._oldest = max(self._oldest, staleness)
        k3, kl = window.gap("k3_kl"), window.gap("kl")
        if k3 is not None:
            self.k3.add(k3, still_rising=not self.settled)
        if kl is not None:
            self._kl.append(kl)
        if (rewarded := window.gap_of_rewarded()) is not None:
            self._rewarded.append(rewarded)
        if (mean_reward := window.get("reward_mean")) is not None:
            self.reward.add(mean_reward)
        unfinished, reward = (window.number(key) for key in ("completions/clipped_ratio", "reward"))
        if unfinished is not None and reward is not None:
            self._unfinished.append(unfinished)
            self._rewards.append(reward)

    @property
    def gap_at_start(self) -> float:
        """The smallest `kl` of the first windows: the difference of the engines, before any weights are stale."""
        return max(min(self._kl[: self.BEGINNING], default=0.0), 0.0)

    def unlearnt(self, gap: float) -> float:
        """
        How much more `kl` is than at the start; 0 if that is at most half of the start. A gap that was there from the start is
        not learned, and the larger it is, the more it varies between windows.
        """
        more = gap - self.gap_at_start
        return more if more > self.gap_at_start / 2 else 0.0

    def rewarded_above(self, bound: float) -> bool | None:
        """True if rewarded tokens became less likely since the start in most of the latest windows; `None` if unknown."""
        number = windows_of(self.RECENT_STEPS, self.spacing, at_most=self.RECENT)
        latest = self._rewarded[-number:]
        return 2 * sum(self.unlearnt(gap) > bound for gap in latest) > number if latest else None

    @property
    def more_unfinished(self) -> float | None:
        """
        Share of completions without an end in the latest windows minus that in the first ones; 0 if the reward fell, `None`
        until there are enough windows.
        """
        if len(self._rewards) < 2 * self.COMPARED:
            return None
        of_unfinished, of_reward = (
            statistics.mean(values[-self.COMPARED :]) - statistics.mean(values[: self.COMPARED])
            for values in (self._unfinished, self._rewards)
        )
        return of_unfinished if of_reward >= 0 else 0.0

    def began_below(self, bound: float) -> bool:
        """True if `kl` was below a bound in most of the first windows."""
        first = self._kl[: self.BEGINNING]
        return 2 * sum(kl < bound for kl in first) > len(first)


@dataclass
class Window:
    """
    A logging window: the log entry, keys with prefix, and the settings and the history of the run. Settings are fields of
    [`RolloutCorrectionConfig`], as attributes or items, as far as they are known.
    """

    metrics: Mapping[str, Any]
    settings: object
    course: Course = field(default_factory=Course)

    def __post_init__(self) -> None:
        self.known = in_effect(self.settings)

    def get(self, key: str) -> float | None:
        """A metric of rollout correction, or `None` if it was not logged or is NaN."""
        return self.number(PREFIX + key)

    def number(self, key: str) -> float | None:
        """An entry of the log, or `None` if it is missing or NaN."""
        value = self.metrics.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return None
        return float(value)

    def setting(self, name: str) -> Any:
        """A field of the configuration, or `Ellipsis` if it is not known."""
        return self.known.get(name, ...)

    def gap(self, key: str) -> float | None:
        """
        `kl` or `k3_kl` to the sampler, in bypass mode without the policy's own updates since the batch was generated; `None`
        if there are such updates and their size is unknown.
        """
        if self.setting("bypass_mode") is not True:
            return self.get(key)
        of_the_sampler = self.get(f"engine_{key}")
        if of_the_sampler is None and self.fresh:
            return self.get(key)
        return of_the_sampler

    def compared(self, key: str) -> float | None:
        """The number that a rule compares: for `kl` and `k3_kl` the [`gap`], otherwise the metric."""
        return self.gap(key) if key in ("kl", "k3_kl") else self.get(key)

    def gap_of_rewarded(self) -> float | None:
        """`kl` to the sampler where the advantage is positive; `None` as for [`gap`], or if there is no such token."""
        return self.get("kl_advantage_positive") if self.fresh else None

    @property
    def fresh(self) -> bool:
        """True if ratios are of samples that the policy has not been trained on yet."""
        return self.setting("bypass_mode") is not True or self.setting("num_iterations") in (..., 1)

    @property
    def clips(self) -> bool:
        """True if the loss clips the ratio to the sampler, so that tokens with a large log-ratio have no gradient."""
        return self.setting("bypass_mode") is True and self.setting("rollout_loss_type") in (..., "ppo_clip")

    @property
    def corrects(self) -> bool:
        """True if the loss is corrected. If the settings are unknown: if weights or rejection are logged."""
        known = self.setting("corrects")
        if isinstance(known, bool):
            return known
        if self.only_measured:
            return False
        asked = [self.setting(name) for name in ("rollout_is", "rollout_rs", "bypass_mode")]
        if ... not in asked or any(value is not ... and value for value in asked):
            return any(asked)
        if isinstance(self.setting("rollout_correction"), str):
            return bool(self.setting("rollout_correction") != "disabled")
        return any(key.startswith((f"{PREFIX}rollout_is_", f"{PREFIX}rollout_rs_")) for key in self.metrics)

    @property
    def step(self) -> int:
        """Optimizer step at which it was logged."""
        return int(self.metrics.get("step", 0))

    @property
    def only_measured(self) -> bool:
        """True if weights and rejection are only reported."""
        return self.setting("rollout_metrics_only") is True

    @property
    def weights_act(self) -> bool:
        """True if importance weights multiply the gradient, or would without `rollout_metrics_only`."""
        return not self.clips and self.get("rollout_is_mean") is not None

    @property
    def weight_bound(self) -> float:
        """Largest importance weight that the run allows. If the settings are unknown: the largest that was logged, or 2."""
        bound: Any = self.setting("rollout_is_threshold")
        while isinstance(bound, list) and bound:  # the largest bound is the upper one of positive advantages
            bound = bound[-1]
        return float(bound) if isinstance(bound, int | float) else self.get("rollout_is_seq_max") or 2.0


def is_training_window(entry: Mapping[str, object]) -> bool:
    """True if a log entry has metrics of rollout correction in training. Those of an evaluation have another prefix."""
    return any(key.startswith(PREFIX) and not key.startswith(f"{PREFIX}monitor/") for key in entry)
