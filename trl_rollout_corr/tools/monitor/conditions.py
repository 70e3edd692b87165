"""Conditions of rules, and numbers that rules compare instead of a metric."""

import math

from ...messages import PREFIX
from .windows import Window


def without_tokens(window: Window) -> float | None:
    """
    1 if no token was left in the loss, which makes its statistics NaN (perhaps null in JSON); else 0, also for a
    window of later visits, in which a table has no value of the first visit.
    """
    share = window.metrics.get(f"{PREFIX}nonfinite_fraction", 0.0)
    if window.get("update_k3_kl") is not None:
        return 0.0
    return float(share is None or (isinstance(share, float) and math.isnan(share)))


def vetoes(window: Window) -> bool:
    """True if the lower bound of `seq_max_k1` is so low that it rejects broken tokens only."""
    if window.settings is None:
        return True
    lowest = [math.exp(-c.upper) for c in window.settings.criteria if c.name == "seq_max_k1"]
    return max(lowest, default=0.0) <= 0.01


def lasting_gap(window: Window) -> float | None:
    """
    Growth of `kl` since the start, once the sampler is at its full staleness. Most of `kl` comes from tokens that
    became unlikely for the trainer; weights bound the others. If `k3_kl` is much smaller than `kl`, the mean ratio is
    not 1, which is another problem.
    """
    kl, k3 = window.get("kl"), window.get("k3_kl")
    if kl is None or k3 is None or not window.course.settled:
        return None
    return window.course.unlearnt(kl) if k3 > kl / 2 else 0.0


# In nats per token, and above the noise of a window where nothing is unlearnt
_UNLEARNT = 0.015


def unlearns(window: Window) -> bool:
    """True if rewarded tokens became less likely, as before a collapse, or if that is unknown."""
    return window.course.rewarded_above(_UNLEARNT) is not False


def gap_of_rewarded(window: Window) -> float | None:
    """`kl` where the advantage is positive, minus the gap at the start, which training did not cause."""
    gap = window.get("kl_advantage_positive")
    return None if gap is None else window.course.unlearnt(gap)


def fresh_growth(window: Window) -> float | None:
    """`fresh_k3_kl` relative to its smallest value after the first pushes; `None` without rescoring."""
    fresh = window.get("fresh_k3_kl")
    return None if fresh is None else window.course.fresh_growth(fresh)


_CLOSE = 0.005  # `k3_kl` up to which the tokens of the sampler are typical of the trainer as well
GROWN = 20.0  # times `fresh_k3_kl` after the first pushes; healthy runs of ours grew by up to 13


def stands_still_or_far_apart(window: Window) -> bool:
    """True if `fresh_k3_kl` exceeds the sampler's own move, or grew more than in any healthy run."""
    fresh, age, growth = window.get("fresh_k3_kl"), window.get("age_k3_kl"), fresh_growth(window)
    still = fresh is not None and age is not None and age < fresh
    return still or (growth is not None and growth > GROWN)


def bias(window: Window) -> float | None:
    """Distance of the unbounded mean ratio, `1 + k3_kl - kl`, from 1; 0 where noise in `kl` explains it."""
    kl, k3 = window.get("kl"), window.get("k3_kl")
    if kl is None or k3 is None:
        return None
    proven = abs(k3 - kl) > k3 or window.course.too_likely
    return abs(k3 - kl) if proven else window.course.lasting_excess


def gap_from_the_start(window: Window) -> float | None:
    """Smallest `k3_kl` of now and of the first steps, if these were fresh; `None` if unknown."""
    now, first = window.get("k3_kl"), window.course.gap_of_fresh_weights
    return None if now is None or first is None else min(now, first)


_MORE = 0.3  # growth of the share of truncated completions since the start


def cut_since_the_start(window: Window) -> float | None:
    """Share of truncated completions if it has grown since the first windows, else 0; `None` if unknown."""
    now, first = window.cut, window.course.cut_at_start
    return None if now is None or first is None else now if now > first + _MORE else 0.0


def gap_of_fresh_weights(window: Window) -> float | None:
    """
    Smaller one of `k3_kl` now and its median of early steps, if all weights so far were fresh; `None` if unknown.
    """
    now, early = window.get("k3_kl"), window.course.gap_of_early_steps
    return None if now is None or early is None else min(now, early)


def gap_by_sign(window: Window) -> float | None:
    """How much the gaps of negative and positive advantages differ for good; 0 where noise explains it."""
    return None if window.get("kl_advantage_negative") is None else window.course.lasting_by_sign


_SHARP = 0.02  # nats per token: a smaller entropy is no measure of a difference


def draws(window: Window) -> float | None:
    """
    How much `surprise` differs from the entropy for good, as a share of it; 0 where noise or the gap explains it.
    `None` if the entropy is unknown, or beside a large gap.
    """
    entropy, gap = window.trl_metric("entropy"), window.get("k3_kl")
    if window.beyond_entropy is None or entropy is None or gap is None or gap > _CLOSE:
        return None
    return window.course.lasting_surprise / max(entropy, _SHARP)


def without_advantages(window: Window) -> float | None:
    """
    1 if all advantages were 0, so that the rewards give no gradient; else 0. Rounding can leave advantages of equal
    rewards slightly off 0, so TRL's share of groups without a spread counts as well. `None` if neither is known.
    """
    shares = window.get("zero_advantage_fraction"), window.metrics.get("frac_reward_zero_std")
    known = [share for share in shares if share is not None]
    return float(1.0 in known) if known else None
