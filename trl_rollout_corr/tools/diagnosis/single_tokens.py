"""
Causes that act at some places: the first or last token, seams between turns, some prompts, and values that are not
log-probabilities of the sampled tokens.
"""

import numpy as np

from .evidence import FLOOR, LARGE, POSSIBLE, Evidence, alike, bounded, errors_from_1, mean, rms, spearman, typical
from .growth import CHANCE
from .location import Split, begun, completions, growth
from .observed import BINS, DumpedTokens, mean_of_equal
from .scored_pushes import scored_pushes


# Quantile at which tokens are compared, because most log-ratios of a confident model are near 0
_MANY = 0.9
# The start of a turn deviates above this many usual sizes of the log-ratio, which chance rarely reaches
_OFF = 3.0
# Tokens from before a push that are needed for comparing tokens of the same weights after it
_ENOUGH = 8
# A completion deviates if the mean size of its log-ratios, each capped and relative to the usual size, is `_FAR` times
# the median. The other numbers are the cap, the largest share of such completions, and their smallest share of the sum
# of squares
_FAR, _CUT, _MINORITY, _MOST = 2.5, 3.0, 0.5, 0.5
_FLAT = 0.3  # a log-ratio is the same at likely and unlikely tokens if its means differ by at most this share of it
_SURE = -1e-6  # log-probability that is 0 up to the precision of float32
_IMPLAUSIBLE = -3.0  # logarithm of a share of the distribution too small for any truncation
_FEW = 0.02  # smallest share of inside tokens as unlikely as the tokens at a place that allows a comparison
_EQUAL = 5  # tokens with one value beyond chance
_DIFFERENT = 0.3  # equal values are fillers if the trainer's differ by this many nats, and standard deviations of all
_TWICE, _NEARLY = 2, 0.8  # least number of zeros that an engine forced, and share of them at one token
_ALL, _OF_SEAMS = 0.9, 0.5  # least share of d^2 in later turns, and largest share of it at their first tokens
_OBSERVED = 10.0  # statistic of completions that were seen to have the gap
_ENOUGH_TOKENS, _EDGE = 30, 8  # tokens of a kind needed to compare turns, and places on each side of an edge
_BEGUN = 0.8  # share of the deviating completions that deviate from their beginning, as from another sampler
_CLEAN = 10.0  # how much smaller the gap of unaffected tokens is
_PADDED = 0.9  # padding explains the gap if it is larger in the deviating completion in this share of pairs
_GROWS = 0.3  # a gap grows from this rank correlation with the step on


def _at(o: DumpedTokens, here: np.ndarray, sentence: str, rest: np.ndarray | None = None) -> Evidence | None:
    """
    Compare tokens of one kind with equally likely tokens inside, or of the `rest`, because unlikely tokens show a
    larger log-ratio anyway. A cause shows at many tokens of its kind, not at a few.
    """
    rest = o.core & ~here if rest is None else rest
    if here.sum() < 4 or rest.sum() < 20:
        return None
    usual = np.maximum(o.usual_size(rest), FLOOR)
    level = np.abs(o.d) / usual
    ratio = mean(np.square(level[here])) / max(mean(np.square(level[rest])), 1e-12)
    many = float(np.quantile(level[here], _MANY)) / max(float(np.quantile(level[rest], _MANY)), 0.1)
    share = bounded(float((np.square(o.d) - np.square(usual))[here].sum()) / max(o.total, 1e-300))
    numbers = {"here": rms(o.d[here]), "elsewhere": rms(o.d[rest])}
    # whatever is wrong inside may be wrong here, too, and a sure policy offers nothing inside to compare
    likely, weights = np.maximum(o.train, o.rollout), np.square(o.d[here]) + 1e-300
    alone = mean(likely[rest] <= np.average(likely[here], weights=weights)) < _FEW
    most = POSSIBLE if alone or numbers["elsewhere"] > LARGE else 0.99
    return Evidence(min(ratio, many**2) if share > 0.01 else 0.0, share, numbers, sentence, most=most)


def first_token(o: DumpedTokens) -> Evidence | None:
    return _at(o, o.first, "|d| is {here} at the first token of a completion and {elsewhere} inside")


def last_token(o: DumpedTokens) -> Evidence | None:
    return _at(o, o.last, "|d| is {here} at the last token of a completion and {elsewhere} inside")


def seams(o: DumpedTokens) -> Evidence | None:
    before = o.core & (o.turn_place == 0)  # where no seam can have an effect
    sound = before if before.sum() >= _ENOUGH_TOKENS else None
    where = "inside" if sound is None else "in the first turns"
    evidence = _at(o, o.seam, f"|d| is {{here}} at the start of later turns and {{elsewhere}} {where}", sound)
    if evidence is None:
        return None
    off = o.seam & (np.abs(o.d) > _OFF * np.maximum(o.usual, FLOOR))
    if not off.any():
        return evidence
    turns = len(np.unique(o.turn[off])) / len(np.unique(o.turn[o.seam]))
    i = int(np.flatnonzero(off)[0])
    numbers = {"turns": turns, "step": float(o.step[o.row[i]]), "place": float(o.position[i] + 1)}
    sentence = (
        "; a share of {turns} of these turns is off, the first from token {place} of a completion of step {step} on"
    )
    return evidence._replace(
        numbers={**evidence.numbers, **numbers}, sentence=evidence.sentence + sentence, words=o.words(i)
    )


def some_prompts(o: DumpedTokens) -> Evidence | None:
    """
    Test whether a minority of the completions deviates strongly, and always for the same prompts, more than
    completions of other prompts in the same step. If samples differ in age, only samples of different steps are
    compared, because the completions of a prompt in one step share their age.
    """
    # large values are capped, so that a few tokens, for example with other experts, cannot decide about a completion
    level = o.of_rows(np.minimum(np.abs(o.level), _CUT) * o.core)
    known = np.isfinite(level) & (o.prompt >= 0)
    if known.sum() < _ENOUGH:
        return None
    off = known & (level > _FAR * np.median(level[known]))
    part, prompts = mean(off[known]), np.unique(o.prompt[off])
    cells, where = np.unique(np.stack([o.prompt, o.step])[:, known], axis=1, return_inverse=True)
    keys, values = o.prompt[known], off[known] - mean_of_equal(o.step[known], off[known], np.ones(int(known.sum())))
    if len(np.unique(o.staleness[known])) > 1:
        keys, values = cells[0], np.bincount(where.ravel(), values) / np.bincount(where.ravel())
    same = alike(keys, values - values.mean()) if part < _MINORITY else 0.0
    here = off[o.row]
    share = bounded(float(np.square(o.d[here]).sum()) / max(o.total, 1e-300))
    numbers = {
        "completions": float(off.sum()), "part": part, "here": rms(o.d[here]), "elsewhere": rms(o.d[~here]),
        "prompts": float(len(prompts)), "of": float(len(np.unique(o.prompt[known]))), "same": same,
    }  # fmt: skip
    sentence = (
        "|d| is {here} in {completions} completions, a share of {part} of all, and {elsewhere} in the others; they "
        "are of {prompts} of the {of} prompts, and completions of one prompt are alike (correlation {same})"
    )
    words = o.prompt_words(int(np.flatnonzero(off)[0])) if off.any() else ""
    return Evidence(same if share > _MOST else 0.0, share, numbers, sentence, words, rows=off)


def nan_rows(o: DumpedTokens) -> Evidence | None:
    """
    Look for rows of NaN logits: the trainer's, or the sampler's from some token of a completion to its end, because a
    NaN in the key-value cache makes all later rows NaN. None is not NaN, but a number that was not returned.
    """
    of_trainer = np.isnan(o.broken.train)
    return _without_ratio(
        o, of_trainer | (_nan_of_sampler(o) & _in_a_run(o)), {"trainer": mean(of_trainer)},
        "{tokens} tokens in {rows} completions, a share of {share}, lack a log-ratio, because a log-probability is "
        "NaN: the trainer's at a share of {trainer} of them, and otherwise the sampler's up to the end of the "
        "completion",
    )  # fmt: skip


def missing(o: DumpedTokens) -> Evidence | None:
    """Look for tokens with a finite log-probability in the trainer but not in the sampler."""
    absent = ~np.isfinite(o.broken.rollout) & ~np.isnan(o.broken.train)
    here = absent & ~(_nan_of_sampler(o) & _in_a_run(o))
    counts = {"infinite": np.isinf(o.broken.rollout), "none": o.broken.missing, "nan": _nan_of_sampler(o)}
    return _without_ratio(
        o, here, {name: float((here & x).sum()) for name, x in counts.items()},
        "{tokens} tokens in {rows} completions, a share of {share}, lack a finite log-probability from the sampler "
        "({none} are None, {nan} NaN, and {infinite} infinite), while the trainer gives one",
    )  # fmt: skip


def _nan_of_sampler(o: DumpedTokens) -> np.ndarray:
    """Of each broken token, whether the sampler's log-probability is NaN, which was computed, and not None."""
    return np.asarray(np.isnan(o.broken.rollout) & ~o.broken.missing)


def _in_a_run(o: DumpedTokens) -> np.ndarray:
    """Boolean mask of the broken tokens that are one of several up to the end of their completion."""
    run = np.bincount(o.broken.row, o.broken.to_the_end, minlength=len(o.lengths))
    return np.asarray(o.broken.to_the_end & (run[o.broken.row] > 1))


def _without_ratio(o: DumpedTokens, here: np.ndarray, more: dict[str, float], sentence: str) -> Evidence | None:
    """Evidence from tokens without a log-ratio, which add nothing to `d^2`."""
    n = int(here.sum())
    if not n:
        return None
    share = n / o.n_tokens
    numbers = {"tokens": float(n), "rows": float(len(np.unique(o.broken.row[here]))), "share": share, **more}
    first = int(np.flatnonzero(here)[0])
    numbers |= {"step": float(o.step[o.broken.row[first]]), "place": float(o.broken.place[first] + 1)}
    sentence += "; the first is token {place} of a completion of step {step}"
    return Evidence(share, 0.0, numbers, sentence)


def shift(o: DumpedTokens) -> Evidence | None:
    """Test whether the two sides agree better if one of them is shifted by one or two tokens."""
    fits = {lag: misfit(o, lag) for lag in (-2, -1, 0, 1, 2)}
    if fits[0] is None or any(fit is None for fit in fits.values()):
        return None
    lag = min((lag for lag in fits if lag), key=lambda lag: fits[lag] or 0.0)
    here, there = fits[0] or 0.0, fits[lag] or 0.0
    share = bounded(1 - there / max(here, 1e-300))
    numbers = {"lag": float(lag), "here": here**0.5, "there": there**0.5}
    sentence = "the two sides fit if one is shifted by {lag} tokens: |d| is {there} then, and {here} without the shift"
    return Evidence(share, share, numbers, sentence)


def misfit(o: DumpedTokens, lag: int) -> float | None:
    """
    Mean square of `train` minus `rollout`, taken `lag` tokens later in the same completion; `None` if impossible.
    """
    i = np.arange(max(0, -lag), len(o) - max(0, lag))
    i = i[o.core[i] & (o.row[i] == o.row[i + lag]) & (o.position[i + lag] - o.position[i] == lag)]
    return mean(np.square(o.train[i] - o.rollout[i + lag])) if len(i) > 20 else None


def offset(o: DumpedTokens) -> Evidence | None:
    """
    Test whether the log-ratio is the same number at every token, likely or not. No two policies differ like this,
    because the probabilities of both add up to 1.
    """
    d = o.d[o.core]
    amount = mean(d)
    if len(d) < _ENOUGH_TOKENS or abs(amount) < FLOOR:
        return None
    constant = amount**2 / mean(np.square(d))
    means = mean_of_equal(np.searchsorted(_edges(o.middle[o.core]), o.middle[o.core]), d, np.ones(len(d)))
    apart = float(np.quantile(np.abs(means - amount), _MANY)) / abs(amount)
    impossible = mean(o.rollout > -_SURE)
    numbers = {"amount": amount, "constant": constant, "apart": float((d - amount).std()), "above": impossible}
    sentence = (
        "d is {amount} at every token, likely or not: that number alone explains a share of {constant} of d^2, and "
        "the rest is {apart}; a share of {above} of the sampler's values is above 0"
    )
    # truncation of a policy that is nowhere sure takes the same from every token, and leaves no value above 0
    proven = amount > 0 or impossible > 0
    return Evidence(constant if apart < _FLAT and proven else 0.0, constant, numbers, sentence)


def _edges(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.quantile(values, np.linspace(0, 1, min(BINS, max(len(values) // 20, 1)) + 1)[1:-1]))


def not_sampled(o: DumpedTokens) -> Evidence | None:
    """
    Test for fillers, for values as high as the likeliest tokens', and for a mean of `exp(d)` above 1, which is
    impossible for tokens sampled with the sampler's probabilities, whatever the trainer computes, unless it has
    trained on these tokens before.
    """
    d, train, rollout = o.d[o.core], o.train[o.core], o.rollout[o.core]
    zeros, forced = rollout > _SURE, _forced(o)
    if (zeros & (d < _IMPLAUSIBLE)).sum() < _EQUAL and forced is None:
        zeros[:] = False
    equal = _equal(o)[o.core]
    total, ratio = max(float(np.square(d).sum()), 1e-300), np.exp(d.clip(-20, 5))
    large, alike = np.abs(d) > 0.3, spearman(train, rollout)
    beyond = errors_from_1(ratio[o.once[o.core] & (o.used_before[o.row[o.core]] == 0)])
    fillers, deep = (float(np.square(d[x]).sum()) / total for x in (zeros | equal, d < _IMPLAUSIBLE))
    numbers = {"fillers": fillers, "zeros": mean(zeros), "deep": deep, "ratio": mean(ratio), "alike": alike}
    numbers["completions"] = float(len(np.unique(o.row[o.core][zeros | equal])))
    signs = [
        (fillers, fillers, "a share of {fillers} of d^2 comes from tokens of {completions} completions whose values are 0 (a "
         "share of {zeros}) or equal, while the trainer's differ from each other"),
        (deep if mean(d[large] < 0) > 0.98 else 0.0, 1.0, "no value is below the trainer's, and a share of {deep} of d^2 "
         "comes from tokens that the trainer finds 20 times less likely or more: no truncated sampling leaves so little"),
        (1 - alike if beyond > 6 else 0.0, 1.0, "the mean of exp(d) is {ratio}, where samples of any sampler give at most "
         "1, and the rank correlation of the two sides is {alike}"),
    ]  # fmt: skip
    statistic, share, sentence = max(signs)
    words = ""
    if forced is not None and statistic == fillers:
        times, token, words = forced
        numbers |= {"times": float(times), "token": float(token)}
        sentence += (
            "; the value is 0 at {times} tokens with the number {token}, as where an engine forces a token, such as "
        )
        sentence += "the end of the reasoning after a budget"
    return Evidence(statistic, bounded(share), numbers, sentence, words)


def _forced(o: DumpedTokens) -> tuple[int, int, str] | None:
    """
    A token that the engine forced, how often, and the text of the first; `None` without one. Nearly all implausible
    values of 0 are then at this token, and at most a few in a completion.
    """
    zeros = np.flatnonzero(o.core & (o.rollout > _SURE) & (o.d < _IMPLAUSIBLE))
    tokens, counts = np.unique(o.token[zeros], return_counts=True)
    if len(zeros) < _TWICE or counts.max() < _NEARLY * len(zeros):
        return None
    token = int(tokens[np.argmax(counts)])
    here = zeros[o.token[zeros] == token]
    return len(here), token, o.words(int(here[0]))


def _equal(o: DumpedTokens) -> np.ndarray:
    """
    Boolean mask of the tokens whose sampler value repeats in a completion or in the dump, or equals the value of the
    token before, while the trainer's values differ as much as at any tokens. A value that comes again with its text is
    no repetition.
    """
    spread = max(_DIFFERENT, _DIFFERENT * float(o.train.std()))
    surely = o.rollout < _SURE
    equal = np.zeros(len(o), bool)
    _, values = np.unique(o.rollout, return_inverse=True)
    for keys in (values * (int(o.row.max(initial=0)) + 1) + o.row, values):
        _, group = np.unique(keys, return_inverse=True)
        counts = np.bincount(group, o.once)
        means = np.bincount(group, o.train * o.once) / np.maximum(counts, 1)
        variance = np.bincount(group, np.square(o.train - means[group]) * o.once) / np.maximum(counts, 1)
        equal |= surely & ((counts >= _EQUAL) & (variance > spread**2))[group]
    before = np.flatnonzero((np.diff(o.row) == 0) & (np.diff(o.position) == 1) & (np.diff(o.rollout) == 0)) + 1
    before = before[surely[before] & (np.abs(o.train[before] - o.train[before - 1]) > spread)]
    if len(before) >= _EQUAL:
        equal[before] = True
    return equal


def later_turns(o: DumpedTokens) -> Evidence | None:
    """
    Test whether the turns after the first show the gap, from their edge on. The tokens before an edge must be sound,
    at places and lengths similar to the tokens behind it.
    """
    later = o.core & (o.turn_place > 0)
    first = o.core & (o.turn_place == 0)
    if later.sum() < _ENOUGH_TOKENS or first.sum() < _ENOUGH_TOKENS:
        return None
    level = np.abs(o.d) / np.maximum(o.usual, FLOOR)
    sizes = [_typical(level[x]) for x in (first, later, first & _near_edge(o, before=True), later & _near_edge(o))]
    least = max(0.05, FLOOR / max(rms(o.d[later]), FLOOR))
    low, high, before, after = np.maximum(sizes, least)
    share = bounded(float(np.square(o.d[later | (o.seam & (o.turn_place > 0))]).sum()) / max(o.total, 1e-300))
    of_seams = bounded(float(np.square(o.d[o.seam]).sum()) / max(o.total, 1e-300))
    numbers = {"first": rms(o.d[first]), "later": rms(o.d[later]), "turns": float(len(np.unique(o.turn[later]))),
               "before": rms(o.d[first & _near_edge(o, before=True)]), "after": rms(o.d[later & _near_edge(o)])}  # fmt: skip
    sentence = (
        "|d| is {first} in the first turns of completions and {later} in the {turns} turns after them; it is {before} "
        "in the last tokens before the second turn and {after} in the first ones of it"
    )
    found = share > _ALL and of_seams < _OF_SEAMS
    return Evidence(float(min(high / low, after / before)) if found else 0.0, share, numbers, sentence)


def _near_edge(o: DumpedTokens, *, before: bool = False) -> np.ndarray:
    """Tokens of the first turn near its end, or of the second near its beginning, where there is a second."""
    edges = np.full(len(o.lengths), np.inf)
    second = o.turn_place == 1
    np.minimum.at(edges, o.row[second], o.position[second])
    distance = edges[o.row] - o.position if before else o.position - edges[o.row]
    turn = 0 if before else 1
    # a tool's answer is between the two turns
    ends = np.full(len(o.lengths), -np.inf)
    np.maximum.at(ends, o.row[o.turn_place == 0], o.position[o.turn_place == 0])
    if before:
        distance = np.where(np.isfinite(edges[o.row]), ends[o.row] - o.position, np.inf)
    return np.asarray((o.turn_place == turn) & (distance <= _EDGE))


def _typical(values: np.ndarray) -> float:
    return typical(values) if values.size else 0.0


def some_completions(o: DumpedTokens) -> Evidence | None:
    """Test whether some completions show the gap, and others of the same step and age do not."""
    split = completions(o)
    if split is None or _of_turns_or_padding(o, split):
        return _some_scored_again(o)
    rest = ~split.tokens
    grows = growth(o, split)
    numbers = {
        "completions": float(split.off.sum()), "of": float(split.n_units), "contrast": split.contrast, "grows": grows,
        "here": rms(o.d[split.tokens & o.core]), "elsewhere": rms(o.d[rest & o.core]), "begun": begun(o, split),
    }  # fmt: skip
    sentence = (
        "|d| is {here} in {completions} of {of} completions, and {elsewhere} in the others of the same steps; a share "
        "of {begun} of them is off from the first tokens on"
    )
    if grows > _GROWS:
        sentence += "; it grows with the step there (rank correlation {grows}), as in a replica that gets no weights"
    # a gap that begins inside a completion depends on its tokens
    most = 0.99 if numbers["begun"] > _BEGUN and numbers["elsewhere"] < LARGE else POSSIBLE
    rows = np.isin(np.arange(len(o.lengths)), o.row[split.tokens])
    return Evidence(split.apart, bounded(split.share), numbers, sentence, most=most, rows=rows)


def _some_scored_again(o: DumpedTokens) -> Evidence | None:
    """Evidence from the completions that were scored again after a push, if only some of them show the gap."""
    seen = scored_pushes(o)
    if seen.arrival != "some" or o.texts_off is None:
        return None
    off, scored = o.texts_off
    sentence = (
        "{off} of the {scored} completions that were scored once more after the push of step {at} have all of the gap "
        "(`fresh_k3_kl` is {fresh}), so that the push arrived where the others were scored"
    )
    return Evidence(_OBSERVED, 1.0, {"off": off, "scored": scored, **seen.numbers}, sentence)


def by_advantage(o: DumpedTokens) -> Evidence | None:
    """
    Test whether nearly all completions with one sign of the advantage show a gap that the others of the same step do
    not. Where tokens have their own advantages, the tokens of one sign in a completion count as one.
    """
    parts, step = o.parts, o.step[o.parts.row]
    size, positive = parts.means(np.abs(o.level) * o.core), parts.advantage > 0
    known = np.isfinite(parts.advantage) & (parts.advantage != 0)
    later = o.turn_place > 0
    if np.square(o.d[later]).sum() > _ALL * o.total:  # completions with one turn are no comparison then
        known &= np.isin(np.arange(len(known)), parts.of_token[later])
    if min((known & positive).sum(), (known & ~positive).sum()) < _ENOUGH:
        return None
    relative = size / np.maximum(mean_of_equal(step, np.where(known, size, 0.0), known.astype(float)), 1e-12)
    sides = {"positive": relative[known & positive], "negative": relative[known & ~positive]}
    off = max(sides, key=lambda side: float(np.median(sides[side])))
    others = sides["negative" if off == "positive" else "positive"]
    ratio = float(np.median(sides[off])) / max(float(np.median(others)), 1e-12)
    lowest = float(np.quantile(sides[off], 1 - _MANY)) / max(float(np.quantile(others, _MANY)), 1e-12)
    deviating = known & (positive if off == "positive" else ~positive)
    tokens, compared = deviating[parts.of_token], (known & ~deviating)[parts.of_token]
    share = bounded(float(np.square(o.d[tokens]).sum()) / max(o.total, 1e-300))
    numbers = {"off": rms(o.d[o.core & tokens]), "others": rms(o.d[o.core & compared]), "ratio": ratio}
    mixed = len(np.unique(parts.row)) < len(parts.row)
    if mixed and _moved(o, known & ~deviating):
        return None
    sentence = (
        f"|d| is {{off}} in {'tokens' if mixed else 'completions'} with a {off} advantage, and {{others}} in the others: "
        "{ratio} times as large at equally likely tokens of the same steps"
    )
    rows = np.isin(np.arange(len(o.lengths)), parts.row[deviating])
    statistic = ratio if lowest > 1 else 0.0
    return Evidence(statistic, share, numbers, sentence, rows=rows, tokens=tokens if mixed else None)


def _moved(o: DumpedTokens, parts: np.ndarray) -> bool:
    """
    True if the mean ratio of some parts, `(P,)`, is not 1: the trainer has moved toward rewarded tokens and away from
    others, which alone makes their gaps differ.
    """
    ratios = o.parts.means(np.exp((o.d * o.core).clip(-5, 5)))[parts]
    return abs(errors_from_1(ratios)) > CHANCE


def _of_turns_or_padding(o: DumpedTokens, split: Split) -> bool:
    """True if only completions with later turns deviate, and not in their first turns, or only padded ones."""
    first, several = o.core & (o.turn_place == 0), np.unique(o.row[o.turn_place > 0])
    off = split.tokens & first
    of_turns = rms(o.d[off]) < max(FLOOR, rms(o.d[split.tokens]) / _CLEAN) and bool(np.isin(o.row[off], several).all())
    rows_off = np.unique(o.row[split.tokens])
    rows_sound = np.setdiff1d(np.unique(o.row), rows_off)
    padded, others = o.padding[rows_off], o.padding[rows_sound]
    more = mean((padded[:, None] > others).astype(float) + (padded[:, None] == others) / 2)
    return of_turns or more > _PADDED
