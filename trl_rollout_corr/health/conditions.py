"""Conditions of rules, and numbers that rules compare in place of a metric."""

from .windows import Window


def vetoes(window: Window) -> bool:
    """True if the lower bound of `seq_max_k1` is so low that it rejects broken tokens only."""
    criteria, bounds = window.setting("rollout_rs"), window.setting("rollout_rs_threshold")
    if not isinstance(criteria, list) or not isinstance(bounds, list) or len(criteria) != len(bounds):
        return True
    bounds = dict(zip(criteria, bounds, strict=True)).get("seq_max_k1")
    return not isinstance(bounds, list) or bounds[0] <= 0.01


def truncates_outliers(window: Window) -> bool:
    """True if weights are truncated at a bound above 1, which rounding does not reach."""
    return window.weights_act and window.get("rollout_is_oob_ratio") is None and window.weight_bound > 1.0


def k3_growth(window: Window) -> float | None:
    """Growth of `k3_kl`; 0 below a few times the gap of bfloat16, where growth has no consequence."""
    level, factor = window.course.k3.level, window.course.k3.factor
    if window.gap("k3_kl") is None or level is None or factor is None:
        return None
    return factor if level > 0.003 else 0.0


# Most that is subtracted for the gap at the start, in nats per token. The gap of low precision stays the same during a run.
_LOW_PRECISION = 0.03
NEGATIVE_KL = -0.1


def lasting_gap(window: Window) -> float | None:
    """
    `kl` minus the gap of the engines at the start, once the sampler has reached its full staleness. Most of it comes from
    tokens that became unlikely for the trainer; weights bound the others. If `k3_kl` is much smaller than `kl`, the mean ratio
    is not 1, which is another problem.
    """
    kl, k3 = window.gap("kl"), window.gap("k3_kl")
    if kl is None or k3 is None or not window.course.settled:
        return None
    return kl - min(window.course.gap_at_start, _LOW_PRECISION) if k3 > kl / 2 else 0.0


def grown_gap(window: Window) -> float | None:
    """[`lasting_gap`], or 0 if `kl` is at most half as large again as at the start. A sampler may be broken from the start."""
    gap, kl = lasting_gap(window), window.gap("kl")
    return gap if gap is None or kl is None or window.course.unlearnt(kl) else 0.0


# In nats per token: more than the noise of a window where nothing is unlearnt
_UNLEARNT = 0.015


def unlearns(window: Window) -> bool:
    """
    True if rewarded tokens became less likely, or if that is unknown. If a policy learns from a stale sampler, tokens with a
    negative advantage become unlikely, which is most of the gap; before a collapse rewarded tokens do too.
    """
    return window.course.rewarded_above(_UNLEARNT) is not False


def gap_of_rewarded(window: Window) -> float | None:
    """
    `kl` where the advantage is positive minus the gap at the start. All of that gap is subtracted: dropout or truncated
    sampling are not learned. Unlike the gap of all tokens, it is small while the sampler grows old in a run that goes well.
    """
    gap = window.gap_of_rewarded()
    return None if gap is None else window.course.unlearnt(gap)


def negative_all_along(window: Window) -> bool:
    """True if the run is not corrected, or `kl` was negative from the first step."""
    return not window.corrects or window.course.began_below(NEGATIVE_KL)


def bias(window: Window) -> float | None:
    """
    Difference of the mean ratio without bounds, `1 + k3_kl - kl`, from 1; 0 where noise in `kl` explains it. The mean ratio is
    1 for samples of the sampler's policy, for any policy of the trainer.
    """
    kl, k3 = window.get("kl"), window.get("k3_kl")
    if kl is None or k3 is None:
        return None
    return abs(k3 - kl) if abs(k3 - kl) > k3 else 0.0


def selection(window: Window) -> float | None:
    """Rejected share of long completions with a positive advantage; 0 unless it is over three times that of the others."""
    chosen, others = window.get("rejected/long_positive"), window.get("rejected/others")
    if chosen is None or others is None:
        return None
    return chosen if chosen > 3 * others else 0.0
