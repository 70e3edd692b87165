"""
Causes that depend on when a completion was sampled: the age of its weights, the pushes that arrive, and what changed.

The scores after pushes, `fresh_k3_kl` and `age_k3_kl`, observe whether weights arrive. They are asked first. A dump
without them is judged by the course of its gap, and that inference is only *possible*.
"""

from typing import Literal, NamedTuple

import numpy as np

from ...correction.functional import LARGEST_POWER
from .evidence import FLOOR, POSSIBLE, Evidence, bounded, mean, pearson, ranks_of, rms, spearman
from .observed import DumpedTokens


_END = 0.1  # share of the sequences compared at each end
_ENOUGH = 8  # number of sequences of the lowest age or step that suffices to compare them alone
_GROWTH = 1.4  # smallest growth of the mean square that counts
_JUMP = 9.0  # growth of the mean square above which it need not be monotone
_CHANCE = 3.0  # a rank correlation counts above this many standard deviations of chance
_MOVED = 5.0  # the same for step and sampler's log-probabilities, because completions of a prompt are alike
# A sum of learning rates too small to cause a gap: a tenth of one step at the smallest rate in use
_STILL = 1e-7
_LIKELY = 0.85  # certainty of a cause that resembles a prompt that was trained on before
_SURELY = 0.6  # statistic from which a gap surely grows
_PROOF = 10.0  # statistic of an old cache that was seen
NONE, _HALF = 0.1, 0.5  # shares of the gap: a part below the first is none of it, above the second most of it
# Of scores after pushes: a `fresh_k3_kl` that counts, times that of the first pushes; what is rounding, in nats per token;
# and the largest move of a sampler that stands still, over that gap and over the noise of the kernels
_FURTHER, _SAME, _UNMOVED, _NOISE = 10.0, 1e-5, 0.05, 3.0
_FASTER = 1.5  # growth of `fresh_k3_kl` over `age_k3_kl` from one score to the next
_SIDES = 3  # fewest steps before and after a change
_LEVEL = 1.3  # ratio of the halves of a side, up to which the gap is level there


def growing(o: DumpedTokens, x: np.ndarray, sentence: str) -> Evidence | None:
    """
    Test whether the mean square of `d` grows with `x` (shape `(B,)`), an age, a step or a number of
    tokens of padding.
    """
    here = o.core
    squares = o.of_rows(np.square(o.d) * here)  # sequences hardly differ in tokens outside the core
    typical = o.level_of_rows
    finite = np.isfinite(x) & np.isfinite(squares)
    values, squares, lengths = x[finite], squares[finite], o.lengths[finite]
    if len(values) < 8 or values.min() == values.max():
        return None
    lowest, highest = values == values.min(), values >= np.quantile(values, 1 - _END)
    if lowest.sum() < _ENOUGH and (end := np.quantile(values, _END)) < values.max():
        lowest = values <= end
    low, high = (float(np.average(squares[here], weights=lengths[here])) for here in (lowest, highest))
    growth = high / max(low, (FLOOR / 4) ** 2)
    correlation, chance = spearman(values, typical[finite]), (len(values) - 1) ** -0.5
    numbers = {"low": low**0.5, "high": high**0.5, "correlation": correlation}
    share = bounded(1 - low / max(float(np.average(squares, weights=lengths)), 1e-300))
    if growth > _JUMP:  # a gap that appears at once and stays is not monotone in `x`
        correlation, chance = max((correlation, chance), _step_up(typical[finite], lowest))
    more = growth > _GROWTH and correlation > _CHANCE * chance
    return Evidence(correlation if more else 0.0, share, numbers, sentence)


def _step_up(values: np.ndarray, lowest: np.ndarray) -> tuple[float, float]:
    """
    Rank correlation of the values with not being among the lowest sequences, and its standard
    deviation under chance.
    """
    ranks = ranks_of(values)
    n, m = int((~lowest).sum()), int(lowest.sum())
    beyond = float(ranks[~lowest].sum() - n * (n - 1) / 2) / (n * m) if n else 0.5
    return 2 * beyond - 1, ((n + m + 1) / (3 * max(n, 1) * m)) ** 0.5


# What the scores after pushes show -----------------------------------------------------------------------------------------


class ScoredPushes(NamedTuple):
    """What the scores after pushes show of the weights: whether they `arrive`, are `lost`, or arrive in `part`."""

    arrival: Literal["arrive", "lost", "part", "unknown"]
    step: int = 0  # optimizer step of the latest score
    fresh: float = np.nan  # `fresh_k3_kl` there
    age: float = np.nan  # `age_k3_kl` there

    @property
    def numbers(self) -> dict[str, float]:
        return {"at": float(self.step), "fresh": self.fresh, "age": self.age}


_SCORES = (
    "right after the push of step {at}, trainer and sampler are {fresh} apart (`fresh_k3_kl`), and the sampler has moved by "
    "{age} since it drew the tokens (`age_k3_kl`)"
)


def scored_pushes(o: DumpedTokens) -> ScoredPushes:
    """
    Whether weights arrive, by the scores after the latest pushes. With equal weights the two sides are as far apart as
    after the first push; if they are further apart, the push was lost if the sampler stands still.
    """
    if len(o.scored_again) < 2 or not o.k3:
        return ScoredPushes("unknown")
    usual = max(min(fresh for _, fresh, _ in o.scored_again), _SAME)
    step, fresh, age = o.scored_again[-1]
    if max(fresh for _, fresh, _ in o.scored_again[1:]) < NONE * o.k3:
        # what happened after the latest score was not observed
        return ScoredPushes("arrive" if _k3_until(o, step) > _HALF * o.k3 else "unknown", step, fresh, age)
    if not np.isfinite(age) or fresh < _FURTHER * usual:
        return ScoredPushes("unknown")
    _, noise, other_noise = o.scored_again[0]  # of the kernels: right after the first push nothing has moved
    still = _NOISE * max(noise, np.nan_to_num(other_noise), _SAME)
    return ScoredPushes("lost" if age < min(still, _UNMOVED * fresh) else "part", step, fresh, age)


def _k3_until(o: DumpedTokens, step: int) -> float:
    """`k3_kl` of the tokens up to an optimizer step."""
    d = o.d[o.step[o.row] <= step]
    return mean(np.expm1(np.minimum(d, LARGEST_POWER)) - d)


def with_equal_weights(o: DumpedTokens) -> float:
    """
    Share of the gap (`k3_kl`) that existed after the first push of the run, before any update; NaN
    if no completions were scored again then.
    """
    first = next(iter(o.scored_again), None)
    return (first[1] + np.nan_to_num(first[2])) / o.k3 if first is not None and first[0] <= 1 and o.k3 else np.nan


# Weights that do not arrive ------------------------------------------------------------------------------------------------


def never_pushed(o: DumpedTokens) -> Evidence | None:
    return None if _serves_adapters(o) else _apart(o)


def adapter_missing(o: DumpedTokens) -> Evidence | None:
    """Test whether the weights do not arrive, in a run whose sampler should load adapters by itself."""
    return _apart(o) if _serves_adapters(o) else None


def _serves_adapters(o: DumpedTokens) -> bool:
    return o.about.get("pushed") == "adapter"


def _apart(o: DumpedTokens) -> Evidence | None:
    """Test whether pushes are lost: by the scores after them, and without scores by the course of the gap."""
    seen = scored_pushes(o)
    if seen.arrival == "lost":
        # updates that the sampler rounds away look the same
        most = POSSIBLE if o.quantised or o.coarser else 0.99
        return Evidence(1.0, 1.0, seen.numbers, _SCORES, most=most)
    return _drifts_apart(o) if seen.arrival == "unknown" else None


def _drifts_apart(o: DumpedTokens) -> Evidence | None:
    """
    Infer from the course of the gap that weights do not arrive: it keeps growing with the step, whatever the age, and the
    sampler's own log-probabilities stay as they are.
    """
    beyond = _MOVED if o.step.min() <= 1 else _CHANCE  # the start proves it best
    if _as_small_as_rounding(o) or stands_still(o) or _sampler_moves(o, beyond):
        return None
    if _serves_adapters(o) and not _step_explains(o):
        return None
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), whatever the age, while the "
        "sampler's own log-probabilities stay as they are. Noise that grows, updates that the sampler rounds away, or an "
        "adapter that counts twice would look the same; `fresh_k3_kl` and `age_k3_kl` would tell, but this log lacks them"
    )
    freshest = np.nanmin(o.staleness) if np.isfinite(o.staleness).any() else np.nan
    # the freshest samples only, so that age cannot be the cause, unless it was found to be none
    chosen = np.isnan(freshest) | (o.staleness == freshest) | _serves_adapters(o)
    evidence = growing(o, np.where(chosen, o.step, np.nan), sentence)
    before = float(o.step.min() - 1)
    if evidence is None or not before:
        return evidence and evidence._replace(most=POSSIBLE)
    growth = evidence.numbers["high"] / max(evidence.numbers["low"], FLOOR / 4)
    as_fast = (
        growth**2 < _GROWTH * ((o.step.max() - 1) / before) ** 2
    )  # faster than the number of steps, as in a collapse
    return evidence._replace(most=POSSIBLE) if as_fast else None


def pushed_in_part(o: DumpedTokens) -> Evidence | None:
    """Test whether the two sides move apart although the sampler moves: by the scores after pushes."""
    seen = scored_pushes(o)
    if seen.arrival != "part" or not _falls_behind(o):
        return None
    sentence = (
        f"{_SCORES}; the gap keeps growing. Kernels that differ more for this policy than for the first, or samples that are "
        "older than announced, would look the same for a while"
    )
    return Evidence(1.0, 1.0, seen.numbers, sentence, most=POSSIBLE)


def _falls_behind(o: DumpedTokens) -> bool:
    """
    True if `fresh_k3_kl` grows faster than the sampler moves (`age_k3_kl`), as it does without end if weights do not
    arrive. With samples that are older than announced, both follow the pace of training.
    """
    paces = [fresh / age for _, fresh, age in o.scored_again[1:] if age > _SAME / 10]
    return len(paces) > 1 and paces[-1] > _FASTER * paces[-2]


def _keeps_growing(o: DumpedTokens) -> bool:
    """True if the gap still grows in the second half of the steps, as it does without end if weights do not arrive."""
    later = growing(o, np.where(o.step > np.median(np.unique(o.step)), o.step, np.nan), "")
    return later is not None and later.statistic > 0


def _sampler_moves(o: DumpedTokens, beyond: float) -> bool:
    """
    True if the sampler's own log-probabilities rise or fall with the step by more than `beyond`
    standard deviations under chance, which means that it gets weights.
    """
    own = o.of_rows(o.rollout)
    finite = np.isfinite(own)
    return bool(abs(spearman(o.step[finite].astype(float), own[finite])) * finite.sum() ** 0.5 > beyond)


def stands_still(o: DumpedTokens) -> bool:
    """
    True if the learning rates in the log are too small for any change of the trainer's weights.
    """
    return o.movement <= _STILL  # False for NaN


def standing_still(o: DumpedTokens) -> Evidence | None:
    if not stands_still(o):
        return None
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), and the learning rates of "
        "these steps add up to {movement}, so that the trainer's weights stand still"
    )
    evidence = growing(o, o.step.astype(float), sentence)
    return evidence and evidence._replace(numbers={**evidence.numbers, "movement": o.movement})


# A change ------------------------------------------------------------------------------------------------------------------


def changed(o: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap begins or ends at one step, and is level before and after it. Completions of one age are compared,
    the most frequent one, because the gap of old weights moves with their age, and at a pace that the learning rate sets.
    """
    size, ages = np.log(np.maximum(o.level_of_rows, 1e-9)), np.nan_to_num(o.staleness, nan=-1.0)
    known, times = np.unique(ages[np.isfinite(size)], return_counts=True)
    age = float(known[times.argmax()]) if len(known) else -1.0
    alike = np.isfinite(size) & (ages == age)
    steps = np.unique(o.step[alike])
    if len(steps) < 2 * _SIDES:
        return None
    size, step = size[alike], o.step[alike]

    def rise(at: int) -> float:
        return float(size[step >= at].mean() - size[step < at].mean())

    at = int(max(steps[_SIDES : len(steps) - _SIDES + 1], key=lambda at: abs(rise(at))))
    sides = (step < at, step >= at)
    error = float(sum(size[side].var() / side.sum() for side in sides)) ** 0.5
    if abs(rise(at)) <= _MOVED * error or not all(_level(size[side], step[side]) for side in sides):
        return None
    near = (_nearest(step[sides[0]], -1), _nearest(step[sides[1]], 1))
    at_once = float(size[(step >= at) & (step <= near[1])].mean() - size[(step < at) & (step >= near[0])].mean())
    last = int(steps[steps < at][-1])
    pace = o.pace(at) / o.pace(last - int(max(age, 0)) - 1)  # of the updates after the change; NaN if unknown
    paced = pace > 0 and bool(np.log(pace) * np.sign(rise(at)) > np.log(_LEVEL))
    if at_once / rise(at) < _HALF or (paced and age != 0):
        return None
    if len(known) < 2 and stale(o) is not None:
        return None  # old weights that announce one age: their gap, too, begins and ends as the policy moves
    after = o.step >= at
    part = after if rise(at) > 0 else ~after
    inside = {name: o.core & (alike & side)[o.row] for name, side in (("before", ~after), ("after", after))}
    numbers = {"step": float(at), **{name: rms(o.d[here]) for name, here in inside.items()}}
    share = bounded(float(np.square(o.d[part[o.row]]).sum()) / max(o.total, 1e-300))
    sentence = "|d| is {before} in the steps before step {step} and {after} from it on, and level on both sides of it"
    if len(known) > 1:
        numbers["age"] = age
        sentence += ", in completions of age {age}" if age >= 0 else ", in completions of unknown age"
    if paced:
        numbers["pace"] = pace
        sentence += "; the learning rate becomes {pace} times as large there, which explains it if the samples are old"
    most = POSSIBLE if paced else 0.99
    return Evidence(float(np.exp(abs(rise(at)))), share, numbers, sentence, most=most, rows=part)


def _nearest(step: np.ndarray, way: int) -> int:
    """The step until which one goes from the last step (`way` -1) or the first (1), to meet enough sequences."""
    return int(np.sort(step)[::way][: min(_ENOUGH, len(step))][-1])


def _level(size: np.ndarray, step: np.ndarray) -> bool:
    """True if logarithms of sizes do not change with the step: the halves are alike."""
    late = step > np.median(np.unique(step))
    if not late.any() or late.all():
        return True
    return bool(abs(float(size[late].mean() - size[~late].mean())) < np.log(_LEVEL))


# Old weights ---------------------------------------------------------------------------------------------------------------


def stale(o: DumpedTokens) -> Evidence | None:
    ages = np.unique(o.staleness[np.isfinite(o.staleness)])
    if _visits(o) or stands_still(o) or with_equal_weights(o) > _HALF or scored_pushes(o).arrival == "lost":
        return None
    if len(ages) < 2:
        return _of_one_age(o, float(ages.sum()))
    if _serves_adapters(o) and _step_explains(o):
        return None  # ages mean nothing if all samples come from the base model
    sentence = "|d| is {low} in the freshest samples and {high} in the oldest (rank correlation {correlation})"
    evidence = growing(o, o.staleness, sentence)
    # weights that never arrive may explain a gap that grows with the step at equal age, and not with the age
    doubtful = scored_pushes(o).arrival != "arrive" and (
        _step_explains(o) or (_serves_adapters(o) and not _age_explains(o))
    )
    numbers = {**evidence.numbers, "oldest": float(ages.max())} if evidence else {}
    return evidence and evidence._replace(numbers=numbers, most=POSSIBLE if doubtful else evidence.most)


def _of_one_age(o: DumpedTokens, age: float) -> Evidence | None:
    """
    Test for stale samples of one age, known or not: the trainer moved toward rewarded completions
    since. The gap is near 0 in the first step and, unlike with weights that are never pushed, does
    not grow for ever.
    """
    if _as_small_as_rounding(o) or complete_at_once(o):
        return None
    seen = scored_pushes(o)
    onset, rewarded = _onset(o), with_advantage(o)
    begun = max(onset.statistic, 0.0) if onset is not None and o.step.min() <= 1 else 0.0
    if seen.arrival == "part" and _falls_behind(o):
        return None
    if seen.arrival == "unknown" and not age:
        still = _drifts_apart(o)
        if still is not None and still.statistic > 0 and (still.statistic > _SURELY or _keeps_growing(o)):
            return None
    numbers = {"gap": rms(o.d[o.core]), "first": first_step(o), "rewarded": rewarded, "oldest": age}
    sentence = (
        "|d| is {first} in the first step of the dump and {gap} over all steps, and the gap correlates with the advantage "
        "(rank correlation {rewarded}); "
    )
    share = onset.share if onset is not None and begun else 1.0
    if seen.arrival == "arrive" and begun:
        numbers |= seen.numbers
        return Evidence(1.0, share, numbers, sentence + _SCORES)
    if age > 0:
        sentence += "all samples are {oldest} optimizer steps old"
    else:
        sentence += (
            "the samples are announced as fresh, or their age is unknown: set `trainer.rollout_step`. A prefix cache that a "
            "push does not clear would look the same"
        )
    most = 0.99 if age > 0 and begun else POSSIBLE
    return Evidence(max(begun / 2 + rewarded, 2 * rewarded), share, numbers, sentence, most=most)


def recorded(o: DumpedTokens) -> Evidence | None:
    """
    Test whether completions come again in later steps, with the same log-probabilities, and are announced as if they were
    new.
    """
    present = o.lengths > 0
    again = o.used_before > (_iterations(o) - 1)
    part = mean(again[present])
    ages = np.nan_to_num(o.staleness[present])
    announced = spearman(o.used_before[present].astype(float), ages) > _HALF
    if not part or announced or _visits(o):
        return None
    first, later = (o.core & side[o.row] for side in (~again, again))
    numbers = {"part": part, "first": rms(o.d[first]), "later": rms(o.d[later]), "most": float(o.used_before.max())}
    sentence = (
        "a share of {part} of the completions came in an earlier step, with the same tokens and values of the sampler, some "
        "of them {most} times; |d| is {first} when a completion comes first and {later} when it comes again"
    )
    grows = numbers["later"] > _GROWTH**0.5 * numbers["first"]
    share = bounded(1 - (numbers["first"] / max(rms(o.d[o.core]), 1e-12)) ** 2)
    return Evidence(part, share if grows else 1.0, numbers, sentence, most=0.99 if grows else POSSIBLE)


def _iterations(o: DumpedTokens) -> int:
    """How often a run trains on a batch: TRL's `num_iterations`."""
    number = o.fields.get("num_iterations")
    return number if isinstance(number, int) else 1


def complete_at_once(o: DumpedTokens) -> bool:
    """
    True if the gap is at its full size in the first step of a run, when the sampler holds the
    trainer's weights.
    """
    fresh = not (o.staleness[o.step == o.step.min()] >= 1).all()  # includes unknown ages
    return fresh and o.step.min() <= 1 and not ((onset := _onset(o)) and onset.statistic > 0)


def _onset(o: DumpedTokens) -> Evidence | None:
    return growing(o, (o.step > o.step.min()).astype(float), "")


def first_step(o: DumpedTokens) -> float:
    """Root mean square of the log-ratio in the first step of the dump."""
    return rms(o.d[o.core & (o.step[o.row] == o.step.min())])


def with_advantage(o: DumpedTokens) -> float:
    """
    Rank correlation of the advantage with `sum(exp(d) - 1) / sqrt(sum(d^2))`, which averages 0 over
    samples of any sampler, however sure it is. Returns 0 where chance explains the correlation.
    """
    d = o.d * o.core
    excess = o.of_rows(np.expm1(d.clip(-5, 5))) / np.sqrt(np.maximum(o.of_rows(np.square(d)), 1e-12))
    finite = np.isfinite(excess) & np.isfinite(o.advantage)
    correlation = spearman(excess[finite], o.advantage[finite]) if finite.any() else 0.0
    return correlation if correlation * finite.sum() ** 0.5 > _CHANCE else 0.0


def own_updates(o: DumpedTokens) -> Evidence | None:
    if not _visits(o) or stands_still(o):
        return None
    sentence = "|d| is {low} at the first visit of a batch and {high} at the last (rank correlation {correlation})"
    return growing(o, o.staleness, sentence)


def _visits(o: DumpedTokens) -> bool:
    """
    True if ages count the visits of a batch, in bypass mode. Ages of older weights rise to a lag
    and stay there.
    """
    if o.settings is None or not o.settings.bypass_mode:
        return False
    finite = np.isfinite(o.staleness)
    ages = [np.unique(o.staleness[finite & (o.step == step)]) for step in np.unique(o.step[finite])]
    if not ages or any(len(age) > 1 for age in ages) or min(ages)[0] > 0:
        return False
    course = np.concatenate(ages)
    return bool((np.diff(course) < 0).any() or len(np.unique(course)) == len(course) > 1)


def _at_equal(strata: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """
    Rank correlation of `x` and `y` within strata, pooled, in standard deviations under chance.
    """
    ranks, free = np.zeros((2, len(strata))), -1
    for stratum in np.unique(strata):
        here = strata == stratum
        if len(np.unique(x[here])) > 1:
            ranks[:, here] = [values - values.mean() for values in (ranks_of(x[here]), ranks_of(y[here]))]
            free += int(here.sum()) - 1
    return float(pearson(*ranks) * max(free, 0) ** 0.5)


def _step_explains(o: DumpedTokens) -> bool:
    """
    True if the gap grows with the step at equal age, but not with the age at equal step. Both rise
    with a queue.
    """
    size = o.level_of_rows
    finite = np.isfinite(size)
    size, step, age = size[finite], o.step[finite], np.nan_to_num(o.staleness[finite], nan=-1.0)
    return _at_equal(age, step, size) > _CHANCE >= _at_equal(step, age, size)


def _age_explains(o: DumpedTokens) -> bool:
    """True if the gap grows with the age at equal step."""
    size = o.level_of_rows
    finite = np.isfinite(size) & np.isfinite(o.staleness)
    return _at_equal(o.step[finite], o.staleness[finite], size[finite]) > _CHANCE


def prefix_cache(o: DumpedTokens) -> Evidence | None:
    """
    Test whether only completions of prompts from an earlier step show the gap, although all samples
    are announced as fresh. Then keys and values of old weights are read again. A colocated vLLM
    that was seen to read its cache after a push is a proof, if the first step shows no gap.
    """
    evidence, noted = _of_prompts_seen_before(o), o.about.get("old_prefixes", "")
    if not noted or complete_at_once(o) or _as_small_as_rounding(o):
        return evidence
    if evidence is None or not evidence.statistic:
        numbers = {"first": first_step(o), "gap": rms(o.d[o.core])}
        evidence = Evidence(1.0, 1.0, numbers, "|d| is {first} in the first step of the dump and {gap} over all steps")
    words = f"; vLLM took {noted} from its cache of prefixes"
    return evidence._replace(statistic=max(evidence.statistic, _PROOF), words=words, most=0.99)


def _of_prompts_seen_before(o: DumpedTokens) -> Evidence | None:
    """Compare completions of prompts that came in an earlier step with those of new ones."""
    seen = _seen_before(o)
    later = (o.step > o.step.min()) & (o.lengths > 0)
    announced = np.isfinite(o.staleness).all() and not o.staleness.any()
    if not announced or min((later & seen).sum(), (later & ~seen).sum()) < _ENOUGH or stands_still(o):
        return None
    level = np.abs(o.d) / np.maximum(o.usual, FLOOR)
    again, new = (o.core & (later & x)[o.row] for x in (seen, ~seen))
    size = o.of_rows(level * o.core)
    chance = _at_equal(o.step[later], seen[later].astype(float), size[later])
    share = bounded(float(np.square(o.d[seen[o.row]]).sum()) / max(o.total, 1e-300))
    ratio = mean(level[again]) / max(mean(level[new]), FLOOR)
    numbers = {
        "again": rms(o.d[again]),
        "new": rms(o.d[new]),
        "prompts": float(len(np.unique(o.prompt[later & seen]))),
    }
    sentence = (
        "|d| is {again} in completions of {prompts} prompts that came in an earlier step, and {new} in completions of new "
        "prompts, although all samples are announced as fresh"
    )
    return Evidence(ratio if chance > _CHANCE else 0.0, share, numbers, sentence, most=_LIKELY)


def _seen_before(o: DumpedTokens) -> np.ndarray:
    """Boolean mask, `(B,)`, of the sequences whose prompt came in an earlier step of the dump."""
    known = o.prompt >= 0
    first = np.full(int(o.prompt.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, o.prompt[known], o.step[known])
    return np.asarray(known & (o.step > first[o.prompt]))


def lora_merge(o: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap is almost 0 in the first steps, where the adapter is 0, and as small as
    rounding later.
    """
    if not _as_small_as_rounding(o) or o.about.get("adapter") == "none" or _visits(o) or stands_still(o):
        return None
    evidence = growing(o, o.step.astype(float), "")
    if evidence is None or evidence.numbers["low"] > 0.3 * evidence.numbers["high"]:
        return None
    sentence = "|d| is {low} in the first steps and {high} in the last, which is as small as rounding"
    return evidence._replace(statistic=evidence.share, sentence=sentence)


def _as_small_as_rounding(o: DumpedTokens) -> bool:
    return rms(o.d[o.core]) < 0.03


def old_throughout(o: DumpedTokens) -> Evidence | None:
    """
    Test whether all samples are old and the gap is too large for rounding, if there are no fresh
    samples to compare.
    """
    gap = rms(o.d[o.core])
    ages = o.staleness[o.row]
    if _as_small_as_rounding(o) or not np.isfinite(ages).any() or _visits(o) or complete_at_once(o):
        return None
    sentence = (
        "samples are at least {age} optimizer steps old, and |d| is {gap}; the dump contains no fresh samples to compare "
        "with, and low precision would look the same"
    )
    numbers = {"age": float(np.min(ages[ages >= 1], initial=np.inf)), "gap": gap}
    return Evidence(mean(ages >= 1), 1.0, numbers, sentence, most=POSSIBLE)
