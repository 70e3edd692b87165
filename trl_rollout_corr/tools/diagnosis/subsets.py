"""Causes that act on a part of the data: some prompts, some completions, or one sign of the advantage."""

import numpy as np

from .arrivals import arrival_of
from .location import Split, begun, completions, growth
from .measures import FLOOR, LARGE, MANY, POSSIBLE, Evidence, alike, errors_from_1, mean, rms
from .observed import DumpedTokens, mean_of_equal
from .positions import IN_LATER_TURNS
from .trends import CHANCE


_ENOUGH = 8  # completions, or parts of them with one sign of the advantage, that are needed for a comparison


# A completion deviates if the mean size of its log-ratios, each capped and relative to the usual size, is `_FAR` times
# the median. The other numbers are the cap, the largest share of such completions, and their smallest share of the sum
# of squares
_FAR, _CUT, _MINORITY, _MOST = 2.5, 3.0, 0.5, 0.5


def some_prompts(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether a minority of the completions deviates strongly, and always for the same prompts, more than
    completions of other prompts in the same step. If samples differ in age, only samples of different steps are
    compared, because the completions of a prompt in one step share their age.
    """
    # large values are capped, so that a few tokens, for example with other experts, cannot decide about a completion
    level = tokens.row_means(np.minimum(np.abs(tokens.level), _CUT) * tokens.core)
    known = np.isfinite(level) & (tokens.prompt >= 0)
    if known.sum() < _ENOUGH:
        return None
    off = known & (level > _FAR * np.median(level[known]))
    part, prompts = mean(off[known]), np.unique(tokens.prompt[off])
    cells, where = np.unique(np.stack([tokens.prompt, tokens.step])[:, known], axis=1, return_inverse=True)
    keys, values = (
        tokens.prompt[known],
        off[known] - mean_of_equal(tokens.step[known], off[known], np.ones(int(known.sum()))),
    )
    if len(np.unique(tokens.staleness[known])) > 1:
        keys, values = cells[0], np.bincount(where.ravel(), values) / np.bincount(where.ravel())
    same = alike(keys, values - values.mean()) if part < _MINORITY else 0.0
    here = off[tokens.row]
    share = tokens.share_of(here)
    numbers = {
        "completions": float(off.sum()), "part": part, "here": rms(tokens.d[here]), "elsewhere": rms(tokens.d[~here]),
        "prompts": float(len(prompts)), "of": float(len(np.unique(tokens.prompt[known]))), "same": same,
    }  # fmt: skip
    sentence = (
        "|d| is {here} in {completions} completions, a share of {part} of all, and {elsewhere} in the others; they "
        "are of {prompts} of the {of} prompts, and completions of one prompt are alike (correlation {same})"
    )
    words = tokens.prompt_words(int(np.flatnonzero(off)[0])) if off.any() else ""
    return Evidence(same if share > _MOST else 0.0, share, numbers, sentence, words, rows=off)


_GROWS = 0.3  # a gap grows from this rank correlation with the step on
_BEGUN = 0.8  # share of the deviating completions that deviate from their beginning, as from another sampler


def some_completions(tokens: DumpedTokens) -> Evidence | None:
    """Test whether some completions show the gap, and others of the same step and age do not."""
    split = completions(tokens)
    if split is None or _is_due_to_turns_or_padding(tokens, split):
        return _some_scored_again(tokens)
    rest = ~split.tokens
    grows = growth(tokens, split)
    numbers = {
        "completions": float(split.off.sum()), "of": float(split.n_units), "contrast": split.contrast, "grows": grows,
        "here": rms(tokens.d[split.tokens & tokens.core]), "elsewhere": rms(tokens.d[rest & tokens.core]),
        "begun": begun(tokens, split),
    }  # fmt: skip
    sentence = (
        "|d| is {here} in {completions} of {of} completions, and {elsewhere} in the others of the same steps; a share "
        "of {begun} of them is off from the first tokens on"
    )
    if grows > _GROWS:
        sentence += "; it grows with the step there (rank correlation {grows}), as in a replica that gets no weights"
    # a gap that begins inside a completion depends on its tokens
    most = 0.99 if numbers["begun"] > _BEGUN and numbers["elsewhere"] < LARGE else POSSIBLE
    rows = np.isin(np.arange(len(tokens.lengths)), tokens.row[split.tokens])
    return Evidence(split.apart, split.share, numbers, sentence, most=most, rows=rows)


_CLEAN = 10.0  # how much smaller the gap of unaffected tokens is
_PADDED = 0.9  # padding explains the gap if it is larger in the deviating completion in this share of pairs


def _is_due_to_turns_or_padding(tokens: DumpedTokens, split: Split) -> bool:
    """True if only completions with later turns deviate, and not in their first turns, or only padded ones."""
    first, several = tokens.core & (tokens.turn_place == 0), np.unique(tokens.row[tokens.turn_place > 0])
    off = split.tokens & first
    of_turns = rms(tokens.d[off]) < max(FLOOR, rms(tokens.d[split.tokens]) / _CLEAN) and bool(
        np.isin(tokens.row[off], several).all()
    )
    rows_off = np.unique(tokens.row[split.tokens])
    rows_sound = np.setdiff1d(np.unique(tokens.row), rows_off)
    padded, others = tokens.padding[rows_off], tokens.padding[rows_sound]
    more = mean((padded[:, None] > others).astype(float) + (padded[:, None] == others) / 2)
    return of_turns or more > _PADDED


_OBSERVED = 10.0  # statistic of completions that were seen to have the gap


def _some_scored_again(tokens: DumpedTokens) -> Evidence | None:
    """Evidence from the completions that were scored again after a push, if only some of them show the gap."""
    seen = arrival_of(tokens)
    if seen.state != "some" or tokens.log.texts_off is None:
        return None
    off, scored = tokens.log.texts_off
    sentence = (
        "{off} of the {scored} completions that were scored once more after the push of step {at} have all of the gap "
        "(`fresh_k3_kl` is {fresh}), so that the push arrived where the others were scored"
    )
    return Evidence(_OBSERVED, 1.0, {"off": off, "scored": scored, **seen.numbers}, sentence)


def by_advantage(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether nearly all completions with one sign of the advantage show a gap that the others of the same step do
    not. Where tokens have their own advantages, the tokens of one sign in a completion count as one.
    """
    parts, step = tokens.parts, tokens.step[tokens.parts.row]
    size, positive = parts.means(np.abs(tokens.level) * tokens.core), parts.advantage > 0
    known = np.isfinite(parts.advantage) & (parts.advantage != 0)
    later = tokens.turn_place > 0
    if tokens.share_of(later) > IN_LATER_TURNS:  # completions with one turn are no comparison then
        known &= np.isin(np.arange(len(known)), parts.of_token[later])
    if min((known & positive).sum(), (known & ~positive).sum()) < _ENOUGH:
        return None
    relative = size / np.maximum(mean_of_equal(step, np.where(known, size, 0.0), known.astype(float)), 1e-12)
    sides = {"positive": relative[known & positive], "negative": relative[known & ~positive]}
    off = max(sides, key=lambda side: float(np.median(sides[side])))
    others = sides["negative" if off == "positive" else "positive"]
    ratio = float(np.median(sides[off])) / max(float(np.median(others)), 1e-12)
    lowest = float(np.quantile(sides[off], 1 - MANY)) / max(float(np.quantile(others, MANY)), 1e-12)
    deviating = known & (positive if off == "positive" else ~positive)
    differing, compared = deviating[parts.of_token], (known & ~deviating)[parts.of_token]
    share = tokens.share_of(differing)
    numbers = {
        "off": rms(tokens.d[tokens.core & differing]),
        "others": rms(tokens.d[tokens.core & compared]),
        "ratio": ratio,
    }
    mixed = len(np.unique(parts.row)) < len(parts.row)
    if mixed and _moved(tokens, known & ~deviating):
        return None
    sentence = (
        f"|d| is {{off}} in {'tokens' if mixed else 'completions'} with a {off} advantage, and {{others}} in the "
        "others: {ratio} times as large at equally likely tokens of the same steps"
    )
    rows = np.isin(np.arange(len(tokens.lengths)), parts.row[deviating])
    statistic = ratio if lowest > 1 else 0.0
    return Evidence(statistic, share, numbers, sentence, rows=rows, tokens=differing if mixed else None)


def _moved(tokens: DumpedTokens, parts: np.ndarray) -> bool:
    """
    True if the mean ratio of some parts, `(P,)`, is not 1: the trainer has moved toward rewarded tokens and away from
    others, which alone makes their gaps differ.
    """
    ratios = tokens.parts.means(np.exp((tokens.d * tokens.core).clip(-5, 5)))[parts]
    return abs(errors_from_1(ratios)) > CHANCE
