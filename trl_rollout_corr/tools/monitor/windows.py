"""Logging windows of a run, and its history as the rules see it."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...messages import PREFIX
from ...settings.criteria import Bounding
from ...settings.effects import rounds_cache
from ...settings.resolve import Settings
from ..bands import beyond_entropy
from ..run_facts import clips_by_trl, iterations_of, samples_with_8_bits
from .stock import value_of


_LARGEST = 1e100  # number of which means and deviations are taken
# Between the policy that sampled and the policy that trains
_GAPS = ("kl", "k3_kl", "kl_advantage_positive", "kl_advantage_negative", "surprise")


def windows_of(steps: int, spacing: int, *, at_most: int) -> int:
    """Number of windows of `spacing` optimizer steps that cover `steps`, between 2 and `at_most`."""
    return min(at_most, max(2, math.ceil(steps / spacing)))


def finite(value: float | None) -> float | None:
    """A number whose square is finite as well; `None` for another one."""
    return value if value is not None and abs(value) < _LARGEST else None


class Course:
    """
    The history of a run: its beginning, and the `spacing` of the latest window in optimizer steps. It is `settled` if
    the sampler was at its full staleness when the latest window began: no completion in it is older than earlier ones,
    and as many steps as their age went by.
    """

    BEGINNING = 3  # windows, or optimizer steps
    OFF = 0.01  # `k3_kl` that is not healthy
    RECENT, RECENT_STEPS = 7, 15  # windows, or fewer that cover these optimizer steps
    LATEST, STAYS = 11, 0.75  # windows, and the least share of the first half's value that the second half must keep
    SAME = 1e-5  # nats per token: a smaller `fresh_k3_kl` is rounding
    LASTING, ERRORS = 8, 5.0  # windows whose mean is compared with 0, and the least mean in standard errors
    EARLY = range(21, 41)  # optimizer steps whose median gap is compared with the limit of fresh weights
    CHANCE = 1e-3  # probability below which chance does not explain a mean ratio

    def __init__(self) -> None:
        self.spacing, self.settled = 1, False
        self._step, self._oldest = 0, 0.0
        self._first = list[tuple[int, float, float]]()  # step, `kl` and `k3_kl` of the first windows
        self._weights = list[float]()  # mean weights of the first windows
        self._fresh = list[float]()  # `k3_kl` of the first optimizer steps without weights known to be stale
        self._early = list[float]()  # `k3_kl` in the steps `EARLY`
        self._age_known = True  # in all windows
        self._cut = list[float]()  # share of truncated completions in the first windows
        self._scored_again = list[float]()  # `fresh_k3_kl` of the first windows that log it
        self.go_on(0)

    def go_on(self, step: int) -> None:
        """Forget the latest windows, because the next ones begin at this optimizer step. The beginning is kept."""
        self._step = step
        self._rewarded = deque[float](maxlen=self.LATEST)
        self._excess = deque[float](maxlen=self.LASTING)
        self._by_sign = deque[float](maxlen=self.LASTING)
        self._surprise = deque[float](maxlen=self.LASTING)

    def add(self, window: "Window") -> None:
        """Add a window."""
        # a window of later visits alone has the gap of updates, and no ratios that an age could explain
        visits = f"{PREFIX}update_k3_kl" in window.metrics and f"{PREFIX}k3_kl" not in window.metrics
        began, staleness = self._step, 0.0 if visits else finite(window.age) or 0.0
        self.spacing, self._step = max(window.step - began, 1), window.step
        self.settled = staleness <= min(self._oldest, began)
        self._oldest = max(self._oldest, staleness)
        kl, k3 = finite(window.get("kl")), finite(window.get("k3_kl"))
        if kl is not None and k3 is not None:
            if len(self._first) < self.BEGINNING:
                self._first.append((window.step, kl, k3))
                if window.step <= self.BEGINNING and staleness < 1.0:
                    self._fresh.append(k3)
            self._excess.append(k3 - kl)
        self._age_known &= window.get("staleness_max") is not None
        if k3 is not None and window.step in self.EARLY:
            self._early.append(k3)
        self._keep_first(self._cut, window.cut)
        self._keep_first(self._weights, finite(window.get("rollout_is_mean")))
        self._keep_first(self._scored_again, finite(window.get("fresh_k3_kl")))
        if (beyond := finite(window.beyond_entropy)) is not None:
            self._surprise.append(beyond)
        if (rewarded := finite(window.get("kl_advantage_positive"))) is not None:
            self._rewarded.append(rewarded)
            if (punished := finite(window.get("kl_advantage_negative"))) is not None:
                self._by_sign.append(punished - rewarded)

    def _keep_first(self, kept: list[float], value: float | None) -> None:
        if value is not None and len(kept) < self.BEGINNING:
            kept.append(value)

    @property
    def oldest(self) -> float:
        """The largest age of completions so far, in optimizer steps; 0 where unknown."""
        return self._oldest

    @property
    def gap_at_start(self) -> float:
        """The smallest `kl` of the first windows: the difference of the engines, before any weights are stale."""
        return max(min((kl for _, kl, _ in self._first), default=0.0), 0.0)

    @property
    def weight_at_start(self) -> float | None:
        """The largest mean weight of the first windows."""
        return max(self._weights, default=None)

    @property
    def off_at_start(self) -> bool:
        """True if the gap was already large in the first optimizer steps, when no sampler is stale."""
        first = [k3 for step, _, k3 in self._first if step <= self.BEGINNING]
        return bool(first) and min(first) > self.OFF

    @property
    def gap_of_fresh_weights(self) -> float | None:
        """The smallest `k3_kl` of the first steps, when weights are fresh; `None` if unknown."""
        return min(self._fresh, default=None)

    @property
    def gap_of_early_steps(self) -> float | None:
        """
        The median `k3_kl` of the steps `EARLY`, once they are over; `None` unless all weights so far were fresh. If
        their age is unknown, a gap that was half as large in the first steps is none of age.
        """
        if self._oldest >= 1.0 or self._step < self.EARLY[-1] or len(self._early) < 2:
            return None
        median = statistics.median(self._early)
        return median if self._age_known or median < 2 * (self.gap_of_fresh_weights or 0.0) else None

    @property
    def cut_at_start(self) -> float | None:
        """The smallest share of truncated completions in the first windows; `None` if unknown."""
        return min(self._cut, default=None)

    @property
    def lasting_by_sign(self) -> float:
        """How much the gaps of negative and positive advantages differ for good."""
        return self._lasting(self._by_sign)

    @property
    def lasting_surprise(self) -> float:
        """How much `surprise` and the entropy differ for good, in nats per token."""
        return self._lasting(self._surprise)

    def _lasting(self, differences: Sequence[float]) -> float:
        """Size of the mean of the latest differences, if all have its sign and it is not chance, else 0."""
        latest = [*differences]
        if len(latest) < self.LASTING or (min(latest) < 0) == (max(latest) > 0):
            return 0.0
        mean, error = statistics.fmean(latest), statistics.stdev(latest) / math.sqrt(len(latest))
        return abs(mean) if abs(mean) > self.ERRORS * error else 0.0

    def fresh_growth(self, fresh: float) -> float:
        """
        `fresh_k3_kl` of a window, divided by its smallest value after the first pushes. The first pushes may be lost
        as well, so a value above rounding does not count as usual.
        """
        return fresh / max(min(*self._scored_again, fresh, self.OFF), self.SAME)

    def unlearnt(self, gap: float) -> float:
        """
        Growth of `kl` since the start; 0 if it is at most half of the start. Training did not cause a gap that was
        there from the start, and a larger one varies more between windows.
        """
        more = gap - self.gap_at_start
        return more if more > self.gap_at_start / 2 else 0.0

    def rewarded_above(self, bound: float) -> bool | None:
        """True if rewarded tokens lost probability in most of the latest windows; `None` if unknown."""
        number = windows_of(self.RECENT_STEPS, self.spacing, at_most=self.RECENT)
        latest = [*self._rewarded][-number:]
        return 2 * sum(self.unlearnt(gap) > bound for gap in latest) > number if latest else None

    @property
    def rewarded_stay_unlikely(self) -> bool:
        """`False` if the gap of rewarded tokens shrinks, as after fast first steps of a policy."""
        latest = [
            *map(self.unlearnt, [*self._rewarded][-windows_of(self.LATEST, self.spacing, at_most=self.LATEST) :])
        ]
        half = len(latest) // 2
        return sum(latest[len(latest) - half :]) >= self.STAYS * sum(latest[:half])

    @property
    def lasting_excess(self) -> float:
        """Size of the mean of `k3_kl - kl` if it began in the first steps and is not chance, else 0."""
        if not self.off_at_start or len(self._excess) < self.LASTING:
            return 0.0
        mean, error = statistics.fmean(self._excess), statistics.stdev(self._excess) / math.sqrt(self.LASTING)
        same_sign = all((k3 - kl) * mean > 0 for _, kl, k3 in self._first)
        return abs(mean) if same_sign and abs(mean) > self.ERRORS * error else 0.0

    @property
    def too_likely(self) -> bool:
        """
        True if the mean ratio of the latest windows is too far above 1 for chance. Ratios to the policy that sampled
        are not negative, and their mean is 1. So the product of the means of several windows exceeds a number `x` with
        a probability of at most `1 / x` (Markov's inequality), whatever the policies are.
        """
        ratios = (max(1.0 + excess, 1e-9) for excess in self._excess)
        return sum(map(math.log, ratios)) > -math.log(self.CHANCE)


@dataclass
class Window:
    """
    A logging window: the log entry, with prefixed keys, and the settings of the run, `None` if unknown. `fields` are
    the known fields of TRL.
    """

    metrics: Mapping[str, Any]
    settings: Settings | None
    course: Course = field(default_factory=Course)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> float | None:
        """A metric of rollout correction; `None` if missing, NaN, or mixed with updates on the batch."""
        if key in _GAPS and not self.before_updates:
            return None
        value = self.metrics.get(PREFIX + key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return float(value)

    @property
    def step(self) -> int:
        """Optimizer step at which it was logged."""
        return int(self.metrics.get("step", 0))

    @property
    def age(self) -> float | None:
        """
        The largest age of completions, in optimizer steps; `None` if unknown. Without `lag_max`, as in older logs, it
        is `staleness_max`, which also counts the updates on a generation. They are not in the ratios of decoupled
        mode, and without stale completions the age is 0.
        """
        if self.get("stale_fraction") == 0.0:
            return 0.0
        lag = self.get("lag_max")
        return self.get("staleness_max") if lag is None else lag

    @property
    def is_fresh(self) -> bool:
        """
        True if all completions so far are known to be of the trainer's weights. The first step tells nothing, because
        all weights are fresh there, whatever follows.
        """
        age = self.age
        return age is not None and max(age, self.course.oldest) < 1 and self.step > 1

    @property
    def reuses(self) -> bool:
        """True if the run trains several times on a batch."""
        return iterations_of(self.fields) > 1

    @cached_property
    def before_updates(self) -> bool:
        """True if the policy did not train yet on the samples of the ratios."""
        return not self.reuses or self.settings is None or not self.settings.bypass_mode

    @property
    def corrects(self) -> bool | None:
        """True if the loss is corrected, here or in TRL; `None` if the settings are unknown."""
        return None if self.settings is None else self.settings.corrects or self.clips_by_trl

    @property
    def clips_by_trl(self) -> bool:
        """True if TRL's asynchronous loss acts."""
        return clips_by_trl(self.settings, self.fields)

    @property
    def only_measures(self) -> bool:
        """True if weights and rejection of the settings do not act."""
        return self.settings is not None and not self.settings.corrects

    @property
    def bounding(self) -> Bounding | None:
        """Level and bounds of the importance weights; `None` without weights or known settings."""
        return None if self.settings is None else self.settings.bounding

    @property
    def rounds_more(self) -> str:
        """What the engine rounds: `"cache"` or `"weights"` to 8 bits, weights to `"few bits"`, or `""`."""
        engine = (self.settings.rollout_engine_kwargs if self.settings else None) or {}
        if engine.get("quantization"):
            return "weights" if samples_with_8_bits(self.settings) else "few bits"
        return "cache" if rounds_cache(engine.get("kv_cache_dtype")) else ""

    @property
    def cut(self) -> float | None:
        """The share of truncated completions that TRL logged last; `None` if unknown."""
        return self.trl_metric("completions/clipped_ratio")

    def trl_metric(self, key: str) -> float | None:
        """A metric of TRL; `None` if missing or no finite number."""
        return value_of(self.metrics, key)

    @property
    def beyond_entropy(self) -> float | None:
        """
        `surprise` minus the entropy that TRL logs, in nats per token, as far as the gap does not explain it; `None` if
        one is unknown, or with `rollout_support`, where the probabilities are of the kept tokens.
        """
        surprise, entropy, k3 = self.get("surprise"), self.trl_metric("entropy"), self.get("k3_kl")
        replays = self.settings is not None and self.settings.rollout_support is not None
        if surprise is None or entropy is None or k3 is None or replays:
            return None
        return beyond_entropy(surprise, entropy, k3)

    @property
    def clips_at_once(self) -> bool:
        """True if the loss clips around the sampler, although the weights are fresh and the batch is new."""
        return self.clips and not self.reuses and self.is_fresh

    @property
    def clips(self) -> bool:
        """True if the loss clips the ratio to the sampler, so that far tokens get no gradient."""
        return self.settings is not None and (self.settings.clips_around_sampler or self.clips_by_trl)

    @property
    def weighs_completions(self) -> bool:
        """True if each completion gets one weight, the product of the ratios of its tokens."""
        return self.settings is not None and self.settings.rollout_is == "sequence" and self.weights_act

    @property
    def length(self) -> float | None:
        """Mean length of the completions in tokens, as TRL logs it."""
        length = self.metrics.get("completions/mean_length")
        return float(length) if isinstance(length, int | float) and length > 0 else None

    @property
    def weights_act(self) -> bool:
        """True if importance weights multiply the gradient, or would without `rollout_metrics_only`."""
        clips = self.settings is not None and self.settings.clips_around_sampler
        return not clips and self.get("rollout_is_mean") is not None


def is_training_window(entry: Mapping[str, object]) -> bool:
    """True if a log entry shows metrics of rollout correction in training, not of an evaluation."""
    return any(key.startswith(PREFIX) and not key.startswith(f"{PREFIX}monitor/") for key in entry)
