"""Causes that act at some places of a completion: the first or last token, seams between turns, and later turns."""

import numpy as np

from .measures import ENOUGH_TOKENS, FLOOR, LARGE, MANY, POSSIBLE, Evidence, bounded, mean, rms, typical
from .observed import DumpedTokens


_FEW = 0.02  # smallest share of inside tokens as unlikely as the tokens at a place that allows a comparison


def _at(tokens: DumpedTokens, here: np.ndarray, sentence: str, rest: np.ndarray | None = None) -> Evidence | None:
    """
    Compare tokens of one kind with equally likely tokens inside, or of the `rest`, because unlikely tokens show a
    larger log-ratio anyway. A cause shows at many tokens of its kind, not at a few.
    """
    rest = tokens.core & ~here if rest is None else rest
    if here.sum() < 4 or rest.sum() < 20:
        return None
    usual = np.maximum(tokens.usual_size(rest), FLOOR)
    level = np.abs(tokens.d) / usual
    ratio = mean(np.square(level[here])) / max(mean(np.square(level[rest])), 1e-12)
    many = float(np.quantile(level[here], MANY)) / max(float(np.quantile(level[rest], MANY)), 0.1)
    share = bounded(float((np.square(tokens.d) - np.square(usual))[here].sum()) / max(tokens.total, 1e-300))
    numbers = {"here": rms(tokens.d[here]), "elsewhere": rms(tokens.d[rest])}
    # whatever is wrong inside may be wrong here, too, and a sure policy offers nothing inside to compare
    likely, weights = np.maximum(tokens.train, tokens.rollout), np.square(tokens.d[here]) + 1e-300
    alone = mean(likely[rest] <= np.average(likely[here], weights=weights)) < _FEW
    most = POSSIBLE if alone or numbers["elsewhere"] > LARGE else 0.99
    return Evidence(min(ratio, many**2) if share > 0.01 else 0.0, share, numbers, sentence, most=most)


def first_token(tokens: DumpedTokens) -> Evidence | None:
    return _at(tokens, tokens.first, "|d| is {here} at the first token of a completion and {elsewhere} inside")


def last_token(tokens: DumpedTokens) -> Evidence | None:
    return _at(tokens, tokens.last, "|d| is {here} at the last token of a completion and {elsewhere} inside")


# The start of a turn deviates above this many usual sizes of the log-ratio, which chance rarely reaches
_OFF = 3.0


def seams(tokens: DumpedTokens) -> Evidence | None:
    before = tokens.core & (tokens.turn_place == 0)  # where no seam can have an effect
    sound = before if before.sum() >= ENOUGH_TOKENS else None
    where = "inside" if sound is None else "in the first turns"
    evidence = _at(
        tokens, tokens.seam, f"|d| is {{here}} at the start of later turns and {{elsewhere}} {where}", sound
    )
    if evidence is None:
        return None
    off = tokens.seam & (np.abs(tokens.d) > _OFF * np.maximum(tokens.usual, FLOOR))
    if not off.any():
        return evidence
    turns = len(np.unique(tokens.turn[off])) / len(np.unique(tokens.turn[tokens.seam]))
    i = int(np.flatnonzero(off)[0])
    numbers = {"turns": turns, "step": float(tokens.step[tokens.row[i]]), "place": float(tokens.position[i] + 1)}
    sentence = (
        "; a share of {turns} of these turns is off, the first from token {place} of a completion of step {step} on"
    )
    return evidence._replace(
        numbers={**evidence.numbers, **numbers}, sentence=evidence.sentence + sentence, words=tokens.words(i)
    )


IN_LATER_TURNS = 0.9  # least share of d^2 in later turns, if the cause is in them
_OF_SEAMS = 0.5  # largest share of it at their first tokens


def later_turns(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether the turns after the first show the gap, from their edge on. The tokens before an edge must be sound,
    at places and lengths similar to the tokens behind it.
    """
    later = tokens.core & (tokens.turn_place > 0)
    first = tokens.core & (tokens.turn_place == 0)
    if later.sum() < ENOUGH_TOKENS or first.sum() < ENOUGH_TOKENS:
        return None
    level = np.abs(tokens.d) / np.maximum(tokens.usual, FLOOR)
    sizes = [
        _typical(level[x]) for x in (first, later, first & _near_edge(tokens, before=True), later & _near_edge(tokens))
    ]
    least = max(0.05, FLOOR / max(rms(tokens.d[later]), FLOOR))
    low, high, before, after = np.maximum(sizes, least)
    share = tokens.share_of(later | (tokens.seam & (tokens.turn_place > 0)))
    of_seams = tokens.share_of(tokens.seam)
    numbers = {
        "first": rms(tokens.d[first]),
        "later": rms(tokens.d[later]),
        "turns": float(len(np.unique(tokens.turn[later]))),
        "before": rms(tokens.d[first & _near_edge(tokens, before=True)]),
        "after": rms(tokens.d[later & _near_edge(tokens)]),
    }
    sentence = (
        "|d| is {first} in the first turns of completions and {later} in the {turns} turns after them; it is {before} "
        "in the last tokens before the second turn and {after} in the first ones of it"
    )
    found = share > IN_LATER_TURNS and of_seams < _OF_SEAMS
    return Evidence(float(min(high / low, after / before)) if found else 0.0, share, numbers, sentence)


_EDGE = 8  # places on each side of an edge between turns


def _near_edge(tokens: DumpedTokens, *, before: bool = False) -> np.ndarray:
    """Tokens of the first turn near its end, or of the second near its beginning, where there is a second."""
    edges = np.full(len(tokens.lengths), np.inf)
    second = tokens.turn_place == 1
    np.minimum.at(edges, tokens.row[second], tokens.position[second])
    distance = edges[tokens.row] - tokens.position if before else tokens.position - edges[tokens.row]
    turn = 0 if before else 1
    # a tool's answer is between the two turns
    ends = np.full(len(tokens.lengths), -np.inf)
    np.maximum.at(ends, tokens.row[tokens.turn_place == 0], tokens.position[tokens.turn_place == 0])
    if before:
        distance = np.where(np.isfinite(edges[tokens.row]), ends[tokens.row] - tokens.position, np.inf)
    return np.asarray((tokens.turn_place == turn) & (distance <= _EDGE))


def _typical(values: np.ndarray) -> float:
    return typical(values) if values.size else 0.0
