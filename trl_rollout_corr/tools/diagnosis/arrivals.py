"""
Whether pushed weights arrive. The scores after pushes, `fresh_k3_kl` and `age_k3_kl`, observe it and are asked first.
A dump without them is judged by the course of its gap, and that inference is only *possible*.
"""

from typing import Literal, NamedTuple

import numpy as np

from .measures import POSSIBLE, Evidence, spearman
from .observed import DumpedTokens, mean_k3
from .trends import as_small_as_rounding, growing, keeps_growing, stands_still, step_explains


NONE, HALF = 0.1, 0.5  # shares of the gap: a part below the first is none of it, above the second most of it
# Of scores after pushes: a `fresh_k3_kl` that counts, times that of the first pushes; what is rounding, in nats per
# token; and the largest move of a sampler that stands still, over that gap and over the noise of the kernels
_FURTHER, _SAME, _UNMOVED, _NOISE = 10.0, 1e-5, 0.05, 3.0
_LIKELY = 0.85  # certainty that no weights arrive, where the move of one step is below the noise of the kernels
_FASTER = 1.5  # growth of `fresh_k3_kl` over `age_k3_kl` from one score to the next
_MOVED = 5.0  # standard deviations under chance, because completions of a prompt are alike
_NEAR = 0.25  # share of a gap that eight completions show, where all of them show it
_SCORES = (
    "right after the push of step {at}, trainer and sampler are {fresh} apart (`fresh_k3_kl`), and the sampler has "
    "moved by {age} since it drew the tokens (`age_k3_kl`)"
)


# What the scores show ------------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """
    What the scores after pushes show of the weights: whether they `arrive`, are `lost`, arrive in `part`, or arrive
    where all but `some` completions were scored.
    """

    state: Literal["arrive", "lost", "part", "some", "unknown"]
    step: int = 0  # optimizer step of the latest score
    fresh: float = np.nan  # `fresh_k3_kl` there
    age: float = np.nan  # `age_k3_kl` there

    @property
    def numbers(self) -> dict[str, float]:
        return {"at": float(self.step), "fresh": self.fresh, "age": self.age}

    @property
    def sentence(self) -> str:
        return _SCORES


def arrival_of(tokens: DumpedTokens) -> Arrival:
    """
    Whether weights arrive, by the scores after the latest pushes. With equal weights the two sides are as far apart as
    after the first push; if they are further apart, the push was lost if the sampler stands still.
    """
    if len(tokens.log.scored_again) < 2 or not tokens.k3:
        return Arrival("unknown")
    usual = max(min(fresh for _, fresh, _ in tokens.log.scored_again), _SAME)
    step, fresh, age = tokens.log.scored_again[-1]
    if max(fresh for _, fresh, _ in tokens.log.scored_again[1:]) < NONE * tokens.k3:
        # what happened after the latest score was not observed
        arrived = k3_of_rows(tokens, tokens.step <= step) > HALF * tokens.k3
        return Arrival("arrive" if arrived else "unknown", step, fresh, age)
    if not np.isfinite(age) or fresh < _FURTHER * usual:
        return Arrival("unknown")
    if only_some_texts(tokens):
        return Arrival("some", step, fresh, age)
    _, noise, other_noise = tokens.log.scored_again[0]  # of the kernels: right after the first push nothing has moved
    still = _NOISE * max(noise, np.nan_to_num(other_noise), _SAME)
    return Arrival("lost" if age < min(still, _UNMOVED * fresh) else "part", step, fresh, age)


_FEWEST = 4  # completions that were scored, of which some may have the gap and others not


def only_some_texts(tokens: DumpedTokens) -> bool:
    """True if at most half of the completions that were scored after the latest push have all of the gap."""
    return (
        tokens.log.texts_off is not None
        and tokens.log.texts_off[1] >= _FEWEST
        and 2 * tokens.log.texts_off[0] <= tokens.log.texts_off[1]
    )


def k3_of_rows(tokens: DumpedTokens, rows: np.ndarray) -> float:
    """`k3_kl` of the tokens of some sequences, `(B,)`."""
    return mean_k3(tokens.d[rows[tokens.row]])


def with_equal_weights(tokens: DumpedTokens) -> float:
    """
    Share of the gap (`k3_kl`) that existed after the first push of the run, before any update; NaN if no completions
    were scored again then.
    """
    first = next(iter(tokens.log.scored_again), None)
    return (
        (first[1] + np.nan_to_num(first[2])) / tokens.k3
        if first is not None and first[0] <= 1 and tokens.k3
        else np.nan
    )


def falls_behind(tokens: DumpedTokens) -> bool:
    """
    True if `fresh_k3_kl` grows faster than the sampler moves (`age_k3_kl`), as it does without end if weights do not
    arrive. With samples that are older than announced, both follow the pace of training.
    """
    paces = [fresh / age for _, fresh, age in tokens.log.scored_again[1:] if age > _SAME / 10]
    return len(paces) > 1 and paces[-1] > _FASTER * paces[-2] and keeps_growing(tokens)


def exists_at_equal_weights(
    tokens: DumpedTokens, large: np.ndarray, step: int, *, paced: bool
) -> Literal["yes", "no", "unknown"]:
    """
    Whether a gap that is large on one side of an optimizer step, in the sequences `large` (`(B,)`), exists there with
    equal weights as well: then neither the age of the samples nor the learning rate is its reason. If the learning
    rate changes there (`paced`), a sampler that lags would show the same, but it would have moved as well.
    """
    size, after = k3_of_rows(tokens, large), bool(large[tokens.step >= step].any())
    here = [(fresh, age) for at, fresh, age in tokens.log.scored_again if (at >= step) == after]
    there = [fresh for at, fresh, _ in tokens.log.scored_again if (at >= step) != after]
    if not here:
        return "unknown"
    if max(fresh for fresh, _ in here) < NONE * size:
        return "no"
    all_of_it = min(fresh for fresh, _ in here) > _NEAR * size and max(there, default=0.0) < NONE * size
    by_itself = not paced or any(age < HALF * fresh for fresh, age in here)
    return "yes" if there and all_of_it and by_itself else "unknown"


# Weights that do not arrive ------------------------------------------------------------------------------------------


def never_pushed(tokens: DumpedTokens) -> Evidence | None:
    return None if serves_adapters(tokens) else _apart(tokens)


def adapter_missing(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the weights do not arrive, in a run whose sampler should load adapters by itself."""
    return _apart(tokens) if serves_adapters(tokens) else None


def serves_adapters(tokens: DumpedTokens) -> bool:
    return tokens.about.get("pushed") == "adapter"


def _apart(tokens: DumpedTokens) -> Evidence | None:
    """Test whether pushes are lost: by the scores after them, and without scores by the course of the gap."""
    if stands_still(tokens):
        return None  # there are no updates to miss
    seen = arrival_of(tokens)
    if seen.state == "lost":
        # updates that the sampler rounds away look the same
        most = (
            POSSIBLE if tokens.quantised or tokens.coarser else 0.99 if _would_show_a_step(tokens, seen) else _LIKELY
        )
        return Evidence(1.0, 1.0, seen.numbers, seen.sentence, most=most)
    return drifts_apart(tokens) if seen.state == "unknown" else None


def _would_show_a_step(tokens: DumpedTokens, seen: Arrival) -> bool:
    """
    True if `age_k3_kl` would show a sampler that takes a part of each update. The gap of `n` updates is up to `n^2`
    times as large as the one of a single update.
    """
    return seen.age < seen.fresh / max(seen.step - tokens.log.scored_again[0][0], 1) ** 2


def pushed_in_part(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the two sides move apart although the sampler moves: by the scores after pushes."""
    seen = arrival_of(tokens)
    if seen.state != "part" or not falls_behind(tokens) or stands_still(tokens):
        return None
    sentence = (
        f"{seen.sentence}; the gap keeps growing. Kernels that differ more for this policy than for the first, or "
        "samples that are older than announced, would look the same for a while"
    )
    return Evidence(1.0, 1.0, seen.numbers, sentence, most=POSSIBLE)


def drifts_apart(tokens: DumpedTokens) -> Evidence | None:
    """
    Infer from the course of the gap that weights do not arrive: it grows with the step in the freshest samples, and
    the sampler's own log-probabilities stay as they are.
    """
    if (
        as_small_as_rounding(tokens)
        or stands_still(tokens)
        or _sampler_moves(tokens)
        or (serves_adapters(tokens) and not step_explains(tokens))
    ):
        return None
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), whatever the age, "
        "while the sampler's own log-probabilities stay as they are. Noise that grows, updates that the sampler "
        "rounds away, or an adapter that counts twice would look the same; `fresh_k3_kl` and `age_k3_kl` would tell, "
        "but this log lacks them"
    )
    freshest = np.nanmin(tokens.staleness) if np.isfinite(tokens.staleness).any() else np.nan
    # the freshest samples only, so that age cannot be the cause, unless it was found to be none
    chosen = np.isnan(freshest) | (tokens.staleness == freshest) | serves_adapters(tokens)
    evidence = growing(tokens, np.where(chosen, tokens.step, np.nan), sentence)
    return evidence and evidence._replace(most=POSSIBLE)


def _sampler_moves(tokens: DumpedTokens) -> bool:
    """True if the sampler's own log-probabilities rise or fall with the step, which means that it gets weights."""
    own = tokens.row_means(tokens.rollout)
    finite = np.isfinite(own)
    return bool(abs(spearman(tokens.step[finite].astype(float), own[finite])) * finite.sum() ** 0.5 > _MOVED)


def standing_still(tokens: DumpedTokens) -> Evidence | None:
    if not stands_still(tokens):
        return None
    sentence = (
        "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), and the learning "
        "rates of these steps add up to {movement}, so that the trainer's weights stand still"
    )
    evidence = growing(tokens, tokens.step.astype(float), sentence)
    return evidence and evidence._replace(numbers={**evidence.numbers, "movement": tokens.log.movement})
