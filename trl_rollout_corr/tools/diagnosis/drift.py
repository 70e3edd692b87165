"""
Causes whose gap grows between sequences: with the age of the weights, with the step, or with
padding.
"""

import numpy as np

from .evidence import FLOOR, POSSIBLE, Evidence, bounded, by_token, mean, pearson, ranks_of, rms, spearman
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
_ALIKE = 0.05  # log-ratios of one token repeat from this correlation on
_SURELY = 0.6  # statistic from which a gap surely grows
_PROOF = 10.0  # statistic of an old cache that was seen
NONE, _HALF = 0.1, 0.5  # shares of the gap: a part below the first is none of it, above the second most of it
_EVERYWHERE = 0.3  # share of the usual gap that every completion shows if all come from old weights


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


def stale(o: DumpedTokens) -> Evidence | None:
    ages = np.unique(o.staleness[np.isfinite(o.staleness)])
    one_age = len(ages) < 2
    if _is_not_of_age(o, one_age=one_age):
        return None
    sentence = "|d| is {low} in the freshest samples and {high} in the oldest (rank correlation {correlation})"
    evidence = _of_one_age(o, float(ages.sum())) if one_age else growing(o, o.staleness, sentence)
    if evidence is None:
        return None
    numbers = {**evidence.numbers, "oldest": float(ages.max(initial=0.0))}
    doubtful = not one_age and _may_be_never_pushed(o)
    return evidence._replace(numbers=numbers, most=POSSIBLE if doubtful else evidence.most)


def _is_not_of_age(o: DumpedTokens, *, one_age: bool) -> bool:
    """True if something else explains a gap that grows with the age of the weights, or with one age."""
    if _visits(o) or stands_still(o) or with_equal_weights(o) > _HALF:
        return True
    missing = adapter_missing(o)
    if missing is not None and missing.statistic > 0:
        return True  # ages mean nothing if all samples come from the base model
    still = never_pushed(o) if one_age else None
    return still is not None and still.statistic > _SURELY and _moves_alone(o)  # it grows without end


def _may_be_never_pushed(o: DumpedTokens) -> bool:
    """
    True if weights that never arrive may explain a gap that grows with the age: it grows with the
    step at equal age, and not with the age.
    """
    may_stand_still = _step_explains(o) or (_serves_adapters(o) and not _age_explains(o))
    return may_stand_still and not pushes_arrive(o)


def with_equal_weights(o: DumpedTokens) -> float:
    """
    Share of the gap (`k3_kl`) that existed after the first push of the run, before any update; NaN
    if no completions were scored again then.
    """
    first = next(iter(o.scored_again), None)
    return (first[1] + first[2]) / o.k3 if first is not None and first[0] <= 1 and o.k3 else np.nan


def pushes_arrive(o: DumpedTokens) -> bool:
    """
    True if trainer and sampler hardly differ right after each push, on completions that were scored
    again.
    """
    later = [fresh for _, fresh, _ in o.scored_again[1:]]
    return bool(later) and max(later) < NONE * o.k3


def _of_one_age(o: DumpedTokens, age: float) -> Evidence | None:
    """
    Test for stale samples of one age, known or not: the trainer moved toward rewarded completions
    since. The gap is near 0 in the first step and, unlike with weights that are never pushed, does
    not grow for ever.
    """
    if _as_small_as_rounding(o) or complete_at_once(o):
        return None
    onset = _onset(o)
    if onset is not None:
        rest = growing(o, np.where(o.step > o.step.min(), o.step, np.nan), "")
        onset = onset._replace(statistic=onset.statistic - max(rest.statistic if rest else 0.0, 0.0))
    rewarded = with_advantage(o)
    begun = max(onset.statistic, 0.0) if onset is not None and o.step.min() <= 1 else 0.0
    numbers = {"gap": rms(o.d[o.core]), "first": first_step(o), "rewarded": rewarded}
    sentence = (
        "|d| is {first} in the first step of the dump and {gap} over all steps, and the gap correlates with the advantage "
        "(rank correlation {rewarded}); "
    )
    if age > 0:
        numbers["age"], sentence = age, sentence + "all samples are {age} optimizer steps old"
    else:
        sentence += (
            "the samples are announced as fresh, or their age is unknown: set `trainer.rollout_step`. A prefix cache that a "
            "push does not clear would look the same"
        )
    share = onset.share if onset is not None and begun else 1.0
    # without the first step, any fault looks the same if it depends on what the rewards depend on,
    # such as the length
    known = age > 0 or np.isnan(o.staleness).any()  # samples that are announced as fresh may have an old cache
    most = 0.99 if begun and known else POSSIBLE
    return Evidence(max(begun / 2 + rewarded, 2 * rewarded), share, numbers, sentence, most=most)


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


def _by_step(o: DumpedTokens) -> Evidence | None:
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), whatever the age"
    )
    freshest = np.nanmin(o.staleness) if np.isfinite(o.staleness).any() else np.nan
    # the freshest samples only, so that age cannot be the cause
    steps = np.where(np.isnan(freshest) | (o.staleness == freshest), o.step, np.nan)
    return growing(o, steps, sentence)


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


def _unless_faster_than_steps(o: DumpedTokens, evidence: Evidence | None) -> Evidence | None:
    """
    The evidence, or `None` if the gap grows faster than the number of steps, as in a collapse.
    """
    before = float(o.step.min() - 1)
    if evidence is None or before == 0:
        return evidence
    growth = evidence.numbers["high"] / max(evidence.numbers["low"], FLOOR / 4)
    return evidence if growth**2 < _GROWTH * ((o.step.max() - 1) / before) ** 2 else None


def never_pushed(o: DumpedTokens) -> Evidence | None:
    if _serves_adapters(o) or not _may_stand_still(o) or pushes_arrive(o):
        return None
    evidence = _unless_faster_than_steps(o, _by_step(o))
    if evidence is None:
        return None
    # a partly added adapter would grow in the same way, and updates that the sampler rounds away
    # add up
    known = o.about.get("adapter") == "none" and not (o.quantised or o.coarser)
    return _if_the_trainer_moves(o, evidence if known else evidence._replace(most=POSSIBLE))


def adapter_missing(o: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap grows with the step whatever the age, in a run whose sampler should load
    adapters by itself.
    """
    if not _serves_adapters(o) or not _may_stand_still(o) or not _step_explains(o):
        return None
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), also among samples of one "
        "age, while the sampler's own log-probabilities stay as they are"
    )
    evidence = _unless_faster_than_steps(o, growing(o, o.step.astype(float), sentence))
    return evidence and _if_the_trainer_moves(o, evidence)


def _if_the_trainer_moves(o: DumpedTokens, evidence: Evidence) -> Evidence:
    """
    Doubt a gap that grows, unless it shows the marks of a trainer that learns while the sampler
    stands still: it repeats at the same token, it correlates with the advantage, and it is in all
    completions of the latest steps.
    """
    numbers = {"alike": by_token(o), "rewarded": with_advantage(o), "least": _least_in_the_end(o)}
    sentence = (
        "; the same token has a similar log-ratio wherever it occurs (correlation {alike}), the gap correlates with the "
        "advantage (rank correlation {rewarded}), and completions of the last steps show at least {least} of the usual gap"
    )
    sure = _moves_alone(o)
    if not sure:
        sentence += ". Noise that grows, or an adapter that counts twice, would look the same"
    most = evidence.most if sure else POSSIBLE
    numbers, sentence = {**evidence.numbers, **numbers}, evidence.sentence + sentence
    return evidence._replace(numbers=numbers, sentence=sentence, most=most)


def _moves_alone(o: DumpedTokens) -> bool:
    """True if the gap shows the marks of a trainer that learns while the sampler stands still."""
    return by_token(o) > _ALIKE and with_advantage(o) > 0 and _least_in_the_end(o) > _EVERYWHERE


def _least_in_the_end(o: DumpedTokens) -> float:
    """
    Size of the log-ratio in the latest completions that show least of it, a twentieth of them, over
    the median of all latest completions, relative to equally likely tokens.
    """
    size = o.level_of_rows
    late = size[np.isfinite(size) & (o.step >= np.median(o.step))]
    return float(np.quantile(late, 0.05) / max(float(np.median(late)), 1e-12)) if late.size else 0.0


def _serves_adapters(o: DumpedTokens) -> bool:
    return o.about.get("pushed") == "adapter"


def _may_stand_still(o: DumpedTokens) -> bool:
    """
    True if the gap exceeds rounding and the trainer moves while the sampler may not. The start
    proves it best.
    """
    beyond = _MOVED if o.step.min() <= 1 else _CHANCE
    return not (_as_small_as_rounding(o) or stands_still(o) or _sampler_moves(o, beyond))


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


def _sampler_moves(o: DumpedTokens, beyond: float) -> bool:
    """
    True if the sampler's own log-probabilities rise or fall with the step by more than `beyond`
    standard deviations under chance, which means that it gets weights.
    """
    own = o.of_rows(o.rollout)
    finite = np.isfinite(own)
    return bool(abs(spearman(o.step[finite].astype(float), own[finite])) * finite.sum() ** 0.5 > beyond)


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
    evidence = _by_step(o)
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
