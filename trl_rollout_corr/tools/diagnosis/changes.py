"""A gap that begins or ends at one optimizer step."""

from typing import NamedTuple

import numpy as np

from .arrivals import HALF, exists_at_equal_weights
from .drift import stale
from .measures import POSSIBLE, Evidence, pearson, rms
from .observed import DumpedTokens
from .trends import ENOUGH, with_advantage


_SIDES = 3  # fewest steps before and after a change
_LEVEL = 1.3  # ratio of the halves of a side, up to which the gap is level there
_BEYOND = 5.0  # standard errors of the rise
_BETTER = 0.85  # a step leaves less than this part of what a steady growth leaves
_INFERRED = 0.85  # certainty without scores after pushes on both sides
_OLD = 0.4  # statistic of `stale` from which old weights are possible


class Jump(NamedTuple):
    """A change of the size of the gap at one step, which is level before and after it."""

    step: int  # first optimizer step after it
    rise: float  # of the logarithm of the size
    age: float  # of the completions that were compared, -1 if unknown
    alike: np.ndarray  # (B,), the completions of this age
    ages: int  # number of different ages in the dump


def changed(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap begins or ends at one step. The scores after pushes tell whether it exists with equal weights:
    then neither the age of the samples nor the learning rate explains it. Without such scores, either may.
    """
    jump = _jump(tokens)
    if jump is None:
        return None
    after = tokens.step >= jump.step
    large = after if jump.rise > 0 else ~after
    pace = _pace(tokens, jump)
    observed = exists_at_equal_weights(tokens, large, jump.step, paced=bool(pace))
    if observed == "no" or (observed == "unknown" and _is_of_old_weights(tokens, jump, pace)):
        return None
    inside = {
        name: tokens.core & (jump.alike & side)[tokens.row] for name, side in (("before", ~after), ("after", after))
    }
    numbers = {"step": float(jump.step), **{name: rms(tokens.d[here]) for name, here in inside.items()}}
    sentence = "|d| is {before} in the steps before step {step} and {after} from it on, and level on both sides of it"
    if jump.ages > 1:
        numbers["age"] = jump.age
        sentence += ", in completions of age {age}" if jump.age >= 0 else ", in completions of unknown age"
    most = 0.99 if observed == "yes" else _INFERRED
    rewarded = with_advantage(tokens.within(large))
    if rewarded:
        numbers["rewarded"], most = rewarded, POSSIBLE
        sentence += (
            "; the gap correlates with the advantage (rank correlation {rewarded}), as the gap of old weights does"
        )
    if observed == "yes":
        sentence += "; completions that were scored again right after a push show it as well (`fresh_k3_kl`)"
    elif pace:
        numbers["pace"], most = pace, POSSIBLE
        sentence += "; the learning rate becomes {pace} times as large there, which explains it if the samples are old"
    share = tokens.share_of(large[tokens.row])
    return Evidence(float(np.exp(abs(jump.rise))), share, numbers, sentence, most=most, rows=large)


def _jump(tokens: DumpedTokens) -> Jump | None:
    """
    The step at which the gap changes most, if it is level on both sides of it. Completions of one age are compared,
    the most frequent one, because the gap of old weights moves with their age.
    """
    size, ages = np.log(np.maximum(tokens.level_of_rows, 1e-9)), np.nan_to_num(tokens.staleness, nan=-1.0)
    known, times = np.unique(ages[np.isfinite(size)], return_counts=True)
    age = float(known[times.argmax()]) if len(known) else -1.0
    alike = np.isfinite(size) & (ages == age)
    steps = np.unique(tokens.step[alike])
    if len(steps) < 2 * _SIDES:
        return None
    size, step = size[alike], tokens.step[alike]

    def rise(at: int) -> float:
        return float(size[step >= at].mean() - size[step < at].mean())

    at = int(max(steps[_SIDES : len(steps) - _SIDES + 1], key=lambda at: abs(rise(at))))
    sides = (step < at, step >= at)
    error = float(sum(size[side].var() / side.sum() for side in sides)) ** 0.5
    if abs(rise(at)) <= _BEYOND * error or not all(_level(size[side], step[side]) for side in sides):
        return None
    near = (_nearest(step[sides[0]], -1), _nearest(step[sides[1]], 1))
    at_once = float(size[(step >= at) & (step <= near[1])].mean() - size[(step < at) & (step >= near[0])].mean())
    if at_once / rise(at) < HALF or _left(size, step >= at) > _BETTER * min(
        _left(size, step), _left(size, np.log(step))
    ):
        return None
    return Jump(at, rise(at), age, alike, len(known))


def _left(size: np.ndarray, x: np.ndarray) -> float:
    """Share of the variance of the sizes that `x` leaves, which they depend on linearly."""
    return 1 - pearson(x.astype(float), size) ** 2


def _nearest(step: np.ndarray, way: int) -> int:
    """The step until which one goes from the last step (`way` -1) or the first (1), to meet enough sequences."""
    return int(np.sort(step)[::way][: min(ENOUGH, len(step))][-1])


def _level(size: np.ndarray, step: np.ndarray) -> bool:
    """True if logarithms of sizes do not change with the step: the halves are alike."""
    late = step > np.median(np.unique(step))
    if not late.any() or late.all():
        return True
    return bool(abs(float(size[late].mean() - size[~late].mean())) < np.log(_LEVEL))


def _pace(tokens: DumpedTokens, jump: Jump) -> float:
    """How much larger the learning rate is after a jump of the gap, if it changes in the same direction; else 0."""
    last = int(tokens.step[jump.alike & (tokens.step < jump.step)].max())
    ratio = tokens.log.pace(jump.step) / tokens.log.pace(last - int(max(jump.age, 0)) - 1)  # NaN if unknown
    return float(ratio) if ratio > 0 and np.log(ratio) * np.sign(jump.rise) > np.log(_LEVEL) else 0.0


def _is_of_old_weights(tokens: DumpedTokens, jump: Jump, pace: float) -> bool:
    """
    True if the age of the samples explains a jump of the gap: the learning rate jumps by as much, or all samples
    announce one age, whose gap begins and ends as the policy moves.
    """
    if pace and jump.age != 0 and abs(jump.rise) < abs(np.log(pace)) + np.log(_LEVEL):
        return True
    old = stale(tokens) if jump.ages < 2 else None
    return old is not None and old.statistic > _OLD
