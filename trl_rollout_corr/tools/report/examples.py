"""Single completions, and what the correction did to each of their tokens."""

from typing import NamedTuple

import numpy as np

from ...settings.resolve import Settings
from ..analysis.recompute import rejected_by
from ..dump.sequences import Sequences


_LOST_MOST, _AT_RANDOM = 5, 5  # completions
_SHOWN = 300  # tokens; a longer completion shows its beginning, its end and the surroundings of the largest changes
_FIRST, _LAST, _AROUND = 40, 20, 8
_PROMPT = 600  # characters: the question is at the end of a prompt
# Factors of the gradient between these count as full
_FULL = (0.95, 1.05)
# Effect of the correction on a token, by the name of its style
EFFECTS = {
    "full": "full gradient",
    "reduced": "down-weighted",
    "raised": "up-weighted",
    "gone": "rejected",
    "idle": "no gradient: advantage 0",
    "outside": "not part of the loss",
}


class Piece(NamedTuple):
    """A token, a run of tokens outside the loss, or a run of omitted tokens."""

    text: str
    effect: str  # a key of `EFFECTS`; empty for omitted tokens
    position: int  # in the completion, from 1
    train: float  # probability under the trainer
    rollout: float  # and under the sampler
    factor: float  # of the policy gradient
    hidden: int = 0  # number of omitted tokens
    reason: str = ""  # why it gets no gradient, if known


class Completion(NamedTuple):
    """A completion, with its numbers."""

    prompt: str  # its end
    step: int
    reward: float
    advantage: float
    age: float  # in optimizer steps, from the weights that sampled to the weights that train; NaN if unknown
    sampled: bool  # True if it was drawn at random
    tokens: int  # of the loss
    counts: dict[str, int]  # tokens by effect
    pieces: list[Piece]


class Completions(NamedTuple):
    """Completions that lost most of their gradient, and some drawn at random."""

    lost_most: list[Completion]
    at_random: list[Completion]


def choose_completions(sequences: Sequences, settings: Settings | None = None) -> Completions:
    """
    Choose about ten completions with a token of the loss: the ones that lost the largest sum of
    `abs(advantage) * max(0, 1 - factor)` over their tokens, and some drawn at random, always the same ones from a
    dump. `settings` names the rules that rejected tokens.
    """
    factor = np.nan_to_num(sequences.coefficients)
    size = np.abs(np.nan_to_num(sequences.advantage_of_token))
    removed = sequences.sums(np.where(sequences.mask, size * np.clip(1.0 - factor, 0.0, None), 0.0))
    most = np.argsort(-removed, kind="stable")[:_LOST_MOST]
    most = most[removed[most] > 0]
    others = sequences.represents & (sequences.sums(sequences.mask) > 0)
    others[most] = False
    candidates = np.flatnonzero(others)
    drawn = np.random.default_rng(0).permutation(candidates)[:_AT_RANDOM]
    lost_most, at_random = (
        [_completion(sequences, int(row), settings) for row in rows] for rows in (most, np.sort(drawn))
    )
    return Completions(lost_most, at_random)


def effects_of(sequences: Sequences, row: int) -> np.ndarray:
    """The effect of the correction on each token of a sequence, keys of `EFFECTS`."""
    here = sequences.slice(row)
    factor, idle = sequences.coefficients[here], sequences.advantage_of_token[here] == 0
    effects = np.where(factor < _FULL[0], "reduced", np.where(factor > _FULL[1], "raised", "full"))
    effects = np.where(factor == 0, "gone", effects)
    return np.where(sequences.mask[here], np.where(idle, "idle", effects), "outside")


def reasons_of(sequences: Sequences, row: int, settings: Settings | None) -> list[str]:
    """
    Reason why each token of a sequence gets no gradient, such as the criteria that reject it; empty without a known
    reason.
    """
    here = sequences.slice(row)
    criteria = {} if settings is None or sequences.keep[here].all() else rejected_by(sequences, row, settings)
    finite = np.isfinite(sequences.train_logps[here] - sequences.rollout_logps[here])
    bounding = None if settings is None else settings.bounding
    dropped = sequences.keep[here] & (sequences.coefficients[here] == 0) & (bounding is not None and bounding.drops)
    reasons = []
    for i in range(len(finite)):
        names = [name for name, rejected in criteria.items() if rejected[i]]
        if not finite[i]:
            names = ["no finite log-probability"]
        elif dropped[i]:
            names = ["weight outside of `rollout_is_threshold`"]
        reasons.append(" and ".join(names))
    return reasons


def _completion(sequences: Sequences, row: int, settings: Settings | None) -> Completion:
    here, effects = sequences.slice(row), effects_of(sequences, row)
    prompt = sequences.prompt(row)
    names, counts = np.unique(effects, return_counts=True)
    return Completion(
        prompt if len(prompt) <= _PROMPT else f"\u2026{prompt[-_PROMPT:]}",
        int(sequences.step[row]),
        float(sequences.reward[row]),
        float(sequences.advantage[row]),
        float(sequences.staleness[row]),
        bool(sequences.sampled[row]),
        int(sequences.mask[here].sum()),
        dict(zip(names.tolist(), counts.tolist(), strict=True)),
        _pieces(sequences, row, effects, reasons_of(sequences, row, settings)),
    )


def _pieces(sequences: Sequences, row: int, effects: np.ndarray, reasons: list[str]) -> list[Piece]:
    """The tokens to show, and the runs between them."""
    here = sequences.slice(row)
    factor, ids = sequences.coefficients[here], sequences.token_ids[here]
    train, rollout = (
        np.exp(np.minimum(logps[here], 0.0)) for logps in (sequences.train_logps, sequences.rollout_logps)
    )
    pieces: list[Piece] = []
    end = 0  # end of the pieces so far
    for i in np.flatnonzero(_shown(effects, factor)).tolist():
        if i > end:
            pieces.append(Piece("", "", end + 1, np.nan, np.nan, np.nan, hidden=i - end))
        end, text = i + 1, sequences.text(row, i) or f"#{ids[i]} "
        if effects[i] == "outside" and pieces and pieces[-1].effect == "outside":
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + text)
        else:
            reason = reasons[i] if effects[i] == "gone" else ""
            numbers = i + 1, float(train[i]), float(rollout[i]), float(factor[i])
            pieces.append(Piece(text, str(effects[i]), *numbers, reason=reason))
    return pieces


def _shown(effects: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Boolean mask of the tokens of a completion to show."""
    n = len(effects)
    shown = np.ones(n, bool)
    if n <= _SHOWN:
        return shown
    shown[_FIRST:-_LAST] = False
    changed = np.flatnonzero(np.isin(effects, ("reduced", "raised", "gone")))
    for i in changed[np.argsort(-np.abs(1.0 - factor[changed]), kind="stable")].tolist():
        if shown.sum() >= _SHOWN - 2 * _AROUND:
            break
        shown[max(i - _AROUND, 0) : i + _AROUND + 1] = True
    return shown
