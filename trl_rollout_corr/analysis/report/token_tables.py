"""Tables of tokens by text: the worst, those that the correction rejects, and those whose weight is at a bound."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...dumps.sequences import Sequences
from ...messages import number, percent
from ...settings.config import RolloutCorrectionConfig
from ...settings.criteria import Bounding


SIGNS = {1: "positive", -1: "negative"}
_ROWS = 12  # of a table of lost tokens
_WORST = 20  # rows of the table of the worst tokens
# Of the furthest tokens, those with the same text are one row: a percent of all, within these limits
_AMONG = (200, 2000)
_PER_COMPLETION = 3  # rows, so that one broken completion does not hide the others
_AROUND = 6  # tokens of context on either side
# The page begins with the texts that account for most rejections. There are at most so many of them, and together they have at
# least this share. The share of each is so many times its share of all tokens, which a frequent text cannot reach, and it is
# rejected in so many completions, so that one broken completion does not count. Fewer rejected tokens prove nothing.
# `tests/test_lost_tokens.py` draws such tables at random.
_FEW, _MOST, _TIMES, _COMPLETIONS, _TOKENS = 5, 0.5, 3.0, 5, 30


class Example(NamedTuple):
    """A token in its place: the tokens before, its text, and the tokens behind."""

    before: str
    text: str
    after: str


class Token(NamedTuple):
    """A token of the worst, and its numbers in the dump."""

    example: Example
    d: float  # NaN or infinite for a token without a log-probability
    times: int  # tokens among the furthest with the same text and sign of d
    train: float  # probability under the trainer
    rollout: float  # and under the sampler
    step: int
    position: int  # in the completion, from 1
    kept: bool
    reward: float
    sampled: bool  # whether its sequence was drawn at random


class Worst(NamedTuple):
    """The worst tokens of a dump."""

    tokens: list[Token]  # one of each text and sign of d: those without a finite log-ratio first, then the furthest
    among: int  # tokens among which they were looked for
    broken: int  # tokens of the loss without a finite log-ratio


class LostText(NamedTuple):
    """Tokens of one text and one sign of the advantage, all of which are rejected or at a bound."""

    example: Example
    times: int
    completions: int  # with such a token
    share: float  # of all such tokens of this sign
    of_own: float  # share of the occurrences of the text with this sign
    occurs: float  # the text's share of all tokens of this sign
    advantage: float  # mean
    train: float  # mean probability under the trainer
    rollout: float  # and under the sampler


class LostTable(NamedTuple):
    """A table of texts, the most frequent first, and the numbers that its shares refer to."""

    title: str
    positive: bool  # sign of the advantage
    chosen: int  # tokens that are rejected, or at a bound
    tokens: int  # of this sign
    completions: int  # with such a token
    rows: list[LostText]


class Lost(NamedTuple):
    """The tables of a dump. All of them count the sequences that represent the batch."""

    rejected: list[LostTable]
    at_bound: list[LostTable]
    text: str  # what the tables mean under the settings of the run
    completions: int  # sequences that were counted
    drawn: bool  # whether they were drawn at random


def _example(sequences: Sequences, index: int) -> Example:
    """The token at an index of all tokens, with those around it."""
    row = int(sequences.row[index])
    place = index - int(sequences.starts[row])
    first = max(place - _AROUND, 0)
    texts = sequences.texts(row, first, place + 1 + _AROUND)
    here = place - first
    return Example("".join(texts[:here]), texts[here], "".join(texts[here + 1 :]))


# The worst ----------------------------------------------------------------------------------------------------------------


def find_worst(sequences: Sequences) -> Worst:
    """The worst tokens of a dump."""
    size = np.where(sequences.mask, np.nan_to_num(np.abs(sequences.log_ratio), nan=np.inf), 0.0)
    among = min(int(np.clip(len(size) // 100, *_AMONG)), len(size))
    furthest = np.argsort(-size, kind="stable")[:among]
    furthest = furthest[size[furthest] > 0]
    signs = np.where(sequences.broken, 0.0, np.sign(sequences.log_ratio))
    chosen: dict[tuple[str, float], int] = {}
    times: Counter[tuple[str, float]] = Counter()
    of_row: Counter[int] = Counter()
    for i, row in zip(furthest.tolist(), sequences.row[furthest].tolist(), strict=True):
        key = sequences.text(row, i - int(sequences.starts[row])), float(signs[i])
        times[key] += 1
        if key not in chosen and len(chosen) < _WORST and of_row[row] < _PER_COMPLETION:
            of_row[row] += 1
            chosen[key] = i
    tokens = [_worst(sequences, i, times[key]) for key, i in chosen.items()]
    return Worst(tokens, len(furthest), int(sequences.broken.sum()))


def _worst(sequences: Sequences, i: int, times: int) -> Token:
    row = int(sequences.row[i])
    return Token(
        _example(sequences, i),
        float(sequences.log_ratio[i]),
        times,
        math.exp(min(sequences.train_logps[i], 60.0)),
        math.exp(min(sequences.rollout_logps[i], 60.0)),
        int(sequences.step[row]),
        i - int(sequences.starts[row]) + 1,
        bool(sequences.keep[i]),
        float(sequences.reward[row]),
        bool(sequences.sampled[row]),
    )


# Those that lose their gradient -------------------------------------------------------------------------------------------


def find_lost(sequences: Sequences, config: RolloutCorrectionConfig | None) -> Lost:
    """Find the tokens that lose their gradient under the settings of a run."""
    sign = np.sign(np.nan_to_num(sequences.advantage)).astype(np.int8)[sequences.row]
    without = sequences.counted & (sequences.coefficients == 0)
    bounding = _bounding(config)
    rejected: list[LostTable] = []
    at_bound: list[LostTable] = []
    notes = _notes(config, bounding)
    for of_sign, name in SIGNS.items():
        here = sequences.counted & (sign == of_sign)
        rejected += _tables(sequences, f"Rejected, {name} advantage", of_sign, here, here & without)
        for title, beyond in _beyond(sequences, bounding, of_sign):
            title = f"Importance weight at its {title}, {name} advantage"
            at_bound += _tables(sequences, title, of_sign, here, here & beyond & ~without)
    if not rejected:
        notes.insert(0, "No token with an advantage other than 0 is rejected in these completions.")
    if idle := int((without & (sign == 0)).sum()):
        notes.append(f"{idle:,} other rejected tokens have an advantage of 0, and so had no gradient to lose.")
    return Lost(rejected, at_bound, " ".join(notes), int(sequences.represents.sum()), bool(sequences.sampled.any()))


def _tables(sequences: Sequences, title: str, sign: int, here: np.ndarray, chosen: np.ndarray) -> Iterator[LostTable]:
    """The table of the chosen tokens among those of a sign, if there are any."""
    places = np.flatnonzero(chosen)
    if not places.size:
        return
    ids, counts = np.unique(sequences.token_ids[places], return_counts=True)
    all_ids = sequences.token_ids[here]
    rows = [
        _row(sequences, places[sequences.token_ids[places] == ids[i]], len(places), all_ids)
        for i in np.argsort(-counts, kind="stable")[:_ROWS].tolist()
    ]
    completions = len(np.unique(sequences.row[places]))
    yield LostTable(title, sign > 0, len(places), len(all_ids), completions, rows)


def _row(sequences: Sequences, places: np.ndarray, chosen: int, all_ids: np.ndarray) -> LostText:
    """The row of a text, from the places of its chosen tokens. The last of them, in order of steps, is the example."""
    last, token = int(places[-1]), int(sequences.token_ids[places[-1]])
    example = _example(sequences, last)
    occurrences = np.count_nonzero(all_ids == token)
    train, rollout = (
        float(np.exp(np.minimum(logps[places], 0.0)).mean())
        for logps in (sequences.train_logps, sequences.rollout_logps)
    )
    return LostText(
        example._replace(text=example.text or f"#{token}"),
        len(places),
        len(np.unique(sequences.row[places])),
        len(places) / chosen,
        len(places) / occurrences,
        occurrences / len(all_ids),
        float(sequences.advantage[sequences.row[places]].mean()),
        train,
        rollout,
    )


# Bounds of the weights ----------------------------------------------------------------------------------------------------


def _bounding(config: RolloutCorrectionConfig | None) -> Bounding | None:
    """Bounds of the weights of tokens, if weights are applied. A weight of a turn or a sequence says nothing of a token."""
    if config is None or not config.settings.applies_weights:
        return None
    bounding = config.settings.bounding
    return bounding if bounding is not None and bounding.level == "token" else None


def _beyond(sequences: Sequences, bounding: Bounding | None, sign: int) -> Iterator[tuple[str, np.ndarray]]:
    """
    Each bound that changes the gradient of a token, in words, and the tokens whose ratio is beyond it. A bound of 1 leaves the
    gradient of such a token whole, and a token outside the bounds of IcePop is rejected.
    """
    if bounding is None:
        return
    lower, upper = bounding.positive if sign > 0 and bounding.positive else (bounding.lower, bounding.upper)
    if 1 < upper < math.inf and not bounding.drops:
        yield f"upper bound of {number(upper)}", sequences.log_ratio > math.log(upper)
    if bounding.clamps and lower is not None and 0 < lower < 1:
        yield f"lower bound of {number(lower)}", sequences.log_ratio < math.log(lower)


def _notes(config: RolloutCorrectionConfig | None, bounding: Bounding | None) -> list[str]:
    """What the settings of a run make of the tables."""
    notes = []
    if config is not None and config.settings.rollout_metrics_only:
        notes.append("The run only measures (`rollout_metrics_only`): these tokens would have been rejected.")
    if (
        config is not None
        and config.settings.criteria
        and all(criterion.unit != "token" for criterion in config.settings.criteria)
    ):
        notes.append(
            "The criteria judge whole completions or turns, so a text is rejected together with the text around it."
        )
    if bounding is not None and bounding.drops:
        notes.append("A token whose ratio is outside the bounds has the importance weight 0, and counts as rejected.")
    pairs = [] if bounding is None else [(bounding.lower, bounding.upper), bounding.positive]
    if any(pair is not None and 1 in pair for pair in pairs):
        notes.append(
            "A token whose importance weight is at a bound of 1 keeps its whole gradient, so there is no table of these "
            "tokens."
        )
    return notes


# Texts that account for most ----------------------------------------------------------------------------------------------


def concentration(lost: Lost, config: RolloutCorrectionConfig | None) -> str:
    """Sentences about a few texts that account for most rejections, and a remedy; empty without such texts."""
    if not lost.drawn:
        return ""
    found = [(table, rows) for table in lost.rejected if (rows := few_texts(table))]
    return " ".join(_sentences(table, rows, config, lost.completions) for table, rows in found)


def few_texts(table: LostTable) -> list[LostText]:
    """The fewest texts with most of the rejections of a table, none of which is merely frequent; empty without such texts."""
    if table.chosen < _TOKENS:
        return []
    rows = [row for row in table.rows if row.share >= _TIMES * row.occurs and row.completions >= _COMPLETIONS][:_FEW]
    shares = np.cumsum([row.share for row in rows])
    enough = np.flatnonzero(shares >= _MOST)
    return rows[: int(enough[0]) + 1] if enough.size else []


def _sentences(
    table: LostTable, rows: list[LostText], config: RolloutCorrectionConfig | None, completions: int
) -> str:
    sign = "positive" if table.positive else "negative"
    of_all, occurs = sum(row.share for row in rows), sum(row.occurs for row in rows)
    times = [row.times for row in rows]
    train, rollout = (
        float(np.average(means, weights=times))
        for means in ([row.train for row in rows], [row.rollout for row in rows])
    )
    names = [f"`{in_line(row.example.text)}`" for row in rows]
    texts = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    parts = [
        f"{percent(round(of_all, 2))} of the {table.chosen:,} rejected tokens with a {sign} advantage are {texts}, but only "
        f"{percent(round(occurs, 3))} of all tokens with such an advantage ({completions:,} completions)."
    ]
    moved = f"from {number(rollout, 2)} under the sampler to {number(train, 2)}"
    if (train > rollout) == table.positive:
        parts.append(
            f"Their mean probability has already {'risen' if table.positive else 'fallen'} {moved}, and the correction does "
            "not push it further until the sampler has newer model weights. A dump cannot tell whether that slows learning."
        )
        learn = "belong to a format that has to be learned" if table.positive else "have to be unlearned faster"
        remedy = f"{_wider(config, table.positive)}push the model weights to the sampler more often"
        parts.append(f"If they {learn}, {remedy}.")
    else:
        parts.append(
            f"Their mean probability went {moved}, against the advantage: the trainer finds them "
            f"{'less' if table.positive else 'more'} likely than the sampler did, although their completions were "
            f"{'better' if table.positive else 'worse'} than average. Look for the cause with `trl-rollout-corr diagnose` "
            "before you change a bound."
        )
    return " ".join(parts)


def _wider(config: RolloutCorrectionConfig | None, positive: bool) -> str:
    """The remedy that widens the bound for a sign of the advantage, as the beginning of a sentence."""
    for criterion in config.settings.criteria if config else ():
        if criterion.directed:
            bound = criterion.upper if positive else -criterion.lower
            return f"raise the bound of `{criterion.name}` in `rollout_rs_threshold` (now {number(bound)}), or "
    return "widen `rollout_rs_threshold`, or " if config and config.settings.criteria else ""


def in_line(text: str) -> str:
    """The text of a token inside a sentence, where its spaces and line ends are seen, and backticks do not mean code."""
    return text.replace("`", "\u02cb").replace("\n", "\u21b5").replace(" ", "\u2423")


def percent_of(share: float) -> str:
    """A share in a table, in percent."""
    return percent(round(share, 3))
