"""Causes that depend on the age of the weights that sample, announced or not."""

import numpy as np

from ..run_facts import iterations_of
from .arrivals import HALF, arrival_of, drifts_apart, falls_behind, serves_adapters, with_equal_weights
from .measures import FLOOR, POSSIBLE, Evidence, bounded, mean, rms, spearman
from .observed import DumpedTokens
from .trends import (
    CHANCE,
    ENOUGH,
    GROWTH,
    age_explains,
    as_small_as_rounding,
    at_equal,
    complete_at_once,
    first_step,
    growing,
    keeps_growing,
    onset,
    stands_still,
    step_explains,
    with_advantage,
)


_LIKELY = 0.85  # certainty of a cause that resembles a prompt that was trained on before
_SURELY = 0.6  # statistic from which a gap surely grows
_PROOF = 10.0  # statistic of an old cache that was seen


def stale(tokens: DumpedTokens) -> Evidence | None:
    ages = np.unique(tokens.staleness[np.isfinite(tokens.staleness)])
    if (
        _visits(tokens)
        or stands_still(tokens)
        or with_equal_weights(tokens) > HALF
        or arrival_of(tokens).state == "lost"
    ):
        return None
    if len(ages) < 2:
        return _stale_at_one_age(tokens, float(ages.sum()))
    if serves_adapters(tokens) and step_explains(tokens):
        return None  # ages mean nothing if all samples come from the base model
    sentence = "|d| is {low} in the freshest samples and {high} in the oldest (rank correlation {correlation})"
    evidence = growing(tokens, tokens.staleness, sentence)
    # weights that never arrive may explain a gap that grows with the step at equal age, and not with the age
    doubtful = arrival_of(tokens).state != "arrive" and (
        step_explains(tokens) or (serves_adapters(tokens) and not age_explains(tokens))
    )
    numbers = {**evidence.numbers, "oldest": float(ages.max())} if evidence else {}
    return evidence and evidence._replace(numbers=numbers, most=POSSIBLE if doubtful else evidence.most)


def _stale_at_one_age(tokens: DumpedTokens, age: float) -> Evidence | None:
    """
    Test for stale samples of one age, known or not: the trainer moved toward rewarded completions since. The gap is
    near 0 in the first step and, unlike with weights that are never pushed, does not grow for ever.
    """
    if as_small_as_rounding(tokens) or complete_at_once(tokens):
        return None
    seen = arrival_of(tokens)
    began, rewarded = onset(tokens), with_advantage(tokens)
    begun = max(began.statistic, 0.0) if began is not None and tokens.step.min() <= 1 else 0.0
    if seen.state == "part" and falls_behind(tokens):
        return None
    if seen.state == "unknown" and not age:
        still = drifts_apart(tokens)
        if still is not None and still.statistic > 0 and (still.statistic > _SURELY or keeps_growing(tokens)):
            return None
    numbers = {"gap": rms(tokens.d[tokens.core]), "first": first_step(tokens), "rewarded": rewarded, "oldest": age}
    sentence = (
        "|d| is {first} in the first step of the dump and {gap} over all steps, and the gap correlates with the "
        "advantage (rank correlation {rewarded}); "
    )
    share = began.share if began is not None and begun else 1.0
    if seen.state == "arrive" and begun:
        numbers |= seen.numbers
        return Evidence(1.0, share, numbers, sentence + seen.sentence)
    if age > 0:
        sentence += "all samples are {oldest} optimizer steps old"
    else:
        sentence += (
            "the samples are announced as fresh, or their age is unknown: set `trainer.rollout_step`. A prefix cache "
            "that a push does not clear would look the same"
        )
    most = 0.99 if age > 0 and begun else POSSIBLE
    return Evidence(max(begun / 2 + rewarded, 2 * rewarded), share, numbers, sentence, most=most)


def recorded(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether completions come again in later steps, with the same log-probabilities, and are announced as if they
    were new.
    """
    present = tokens.lengths > 0
    again = tokens.used_before > (iterations_of(tokens.fields) - 1)
    part = mean(again[present])
    ages = np.nan_to_num(tokens.staleness[present])
    announced = spearman(tokens.used_before[present].astype(float), ages) > HALF
    if not part or announced or _visits(tokens):
        return None
    first, later = (tokens.core & side[tokens.row] for side in (~again, again))
    numbers = {
        "part": part,
        "first": rms(tokens.d[first]),
        "later": rms(tokens.d[later]),
        "most": float(tokens.used_before.max()),
    }
    sentence = (
        "a share of {part} of the completions came in an earlier step, with the same tokens and values of the "
        "sampler, some of them {most} times; |d| is {first} when a completion comes first and {later} when it comes "
        "again"
    )
    grows = numbers["later"] > GROWTH**0.5 * numbers["first"]
    share = bounded(1 - (numbers["first"] / max(rms(tokens.d[tokens.core]), 1e-12)) ** 2)
    return Evidence(part, share if grows else 1.0, numbers, sentence, most=0.99 if grows else POSSIBLE)


def own_updates(tokens: DumpedTokens) -> Evidence | None:
    if not _visits(tokens) or stands_still(tokens):
        return None
    sentence = "|d| is {low} at the first visit of a batch and {high} at the last (rank correlation {correlation})"
    return growing(tokens, tokens.staleness, sentence)


def _visits(tokens: DumpedTokens) -> bool:
    """True if ages count the visits of a batch, in bypass mode. Ages of older weights rise to a lag and stay there."""
    if tokens.settings is None or not tokens.settings.bypass_mode:
        return False
    finite = np.isfinite(tokens.staleness)
    ages = [np.unique(tokens.staleness[finite & (tokens.step == step)]) for step in np.unique(tokens.step[finite])]
    if not ages or any(len(age) > 1 for age in ages) or min(ages)[0] > 0:
        return False
    course = np.concatenate(ages)
    return bool((np.diff(course) < 0).any() or len(np.unique(course)) == len(course) > 1)


def prefix_cache(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether only completions of prompts from an earlier step show the gap, although all samples are announced as
    fresh. Then keys and values of old weights are read again. A colocated vLLM that was seen to read its cache after a
    push is a proof, if the first step shows no gap.
    """
    evidence, noted = _compare_seen_prompts(tokens), tokens.about.get("old_prefixes", "")
    if not noted or complete_at_once(tokens) or as_small_as_rounding(tokens):
        return evidence
    if evidence is None or not evidence.statistic:
        numbers = {"first": first_step(tokens), "gap": rms(tokens.d[tokens.core])}
        evidence = Evidence(1.0, 1.0, numbers, "|d| is {first} in the first step of the dump and {gap} over all steps")
    words = f"; vLLM took {noted} from its cache of prefixes"
    return evidence._replace(statistic=max(evidence.statistic, _PROOF), words=words, most=0.99)


def _compare_seen_prompts(tokens: DumpedTokens) -> Evidence | None:
    """Compare completions of prompts that came in an earlier step with those of new ones."""
    seen = _seen_before(tokens)
    later = (tokens.step > tokens.step.min()) & (tokens.lengths > 0)
    announced = np.isfinite(tokens.staleness).all() and not tokens.staleness.any()
    if not announced or min((later & seen).sum(), (later & ~seen).sum()) < ENOUGH or stands_still(tokens):
        return None
    level = np.abs(tokens.d) / np.maximum(tokens.usual, FLOOR)
    again, new = (tokens.core & (later & x)[tokens.row] for x in (seen, ~seen))
    size = tokens.row_means(level * tokens.core)
    chance = at_equal(tokens.step[later], seen[later].astype(float), size[later])
    share = tokens.share_of(seen[tokens.row])
    ratio = mean(level[again]) / max(mean(level[new]), FLOOR)
    numbers = {
        "again": rms(tokens.d[again]),
        "new": rms(tokens.d[new]),
        "prompts": float(len(np.unique(tokens.prompt[later & seen]))),
    }
    sentence = (
        "|d| is {again} in completions of {prompts} prompts that came in an earlier step, and {new} in completions of "
        "new prompts, although all samples are announced as fresh"
    )
    return Evidence(ratio if chance > CHANCE else 0.0, share, numbers, sentence, most=_LIKELY)


def _seen_before(tokens: DumpedTokens) -> np.ndarray:
    """Boolean mask, `(B,)`, of the sequences whose prompt came in an earlier step of the dump."""
    known = tokens.prompt >= 0
    first = np.full(int(tokens.prompt.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, tokens.prompt[known], tokens.step[known])
    return np.asarray(known & (tokens.step > first[tokens.prompt]))


def lora_merge(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the gap is almost 0 in the first steps, where the adapter is 0, and as small as rounding later."""
    if (
        not as_small_as_rounding(tokens)
        or tokens.about.get("adapter") == "none"
        or _visits(tokens)
        or stands_still(tokens)
    ):
        return None
    evidence = growing(tokens, tokens.step.astype(float), "")
    if evidence is None or evidence.numbers["low"] > 0.3 * evidence.numbers["high"]:
        return None
    sentence = "|d| is {low} in the first steps and {high} in the last, which is as small as rounding"
    return evidence._replace(statistic=evidence.share, sentence=sentence)


def old_throughout(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether all samples are old and the gap is too large for rounding, if there are no fresh samples to compare.
    """
    gap = rms(tokens.d[tokens.core])
    ages = tokens.staleness[tokens.row]
    if as_small_as_rounding(tokens) or not np.isfinite(ages).any() or _visits(tokens) or complete_at_once(tokens):
        return None
    sentence = (
        "samples are at least {age} optimizer steps old, and |d| is {gap}; the dump contains no fresh samples to "
        "compare with, and low precision would look the same"
    )
    numbers = {"age": float(np.min(ages[ages >= 1], initial=np.inf)), "gap": gap}
    return Evidence(mean(ages >= 1), 1.0, numbers, sentence, most=POSSIBLE)
