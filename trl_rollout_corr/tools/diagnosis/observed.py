"""Tokens of a dump for a diagnosis: their log-ratio, and everything that it could depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...correction.functional import LARGEST_POWER
from ...settings.resolve import Settings
from ..dump.sequences import Sequences


SEAM = 2  # tokens after the edge of a turn that count as its beginning
BINS = 20  # of equally likely tokens, at most


class Broken(NamedTuple):
    """`M` tokens of the loss without a finite log-ratio."""

    row: np.ndarray  # (M,), index of its sequence
    place: np.ndarray  # in the completion
    train: np.ndarray  # log-probability of the trainer
    rollout: np.ndarray  # log-probability of the sampler
    missing: np.ndarray  # True where the sampler returned None
    to_the_end: np.ndarray  # True where no later token of the completion is finite, as behind a row of NaN logits


class Parts(NamedTuple):
    """`P` parts of sequences, in each of which the advantage has one sign."""

    of_token: np.ndarray  # (N,), the part of each token
    row: np.ndarray  # (P,), index of its sequence
    tokens: np.ndarray  # how many it has
    advantage: np.ndarray  # mean over its tokens

    def means(self, values: np.ndarray) -> np.ndarray:
        """Means over the tokens of each part, `(P,)`, of values of the tokens, `(N,)`."""
        return np.asarray(np.bincount(self.of_token, weights=values) / self.tokens)


@dataclass(frozen=True)
class LogFacts:
    """
    What the log of a run says about the tokens of its dump.

    Args:
        movement (`float`, *optional*, defaults to NaN):
            Sum of the learning rates of the optimizer steps between the first sequence and the last; NaN if unknown.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether the log shows no alarm and only small gaps.
        harmed (`bool`, *optional*, defaults to `False`):
            Whether it shows an alarm that a correction concerns, or the run lost much of its gradient.
        scored_again (`Sequence[tuple[int, float, float]]`, *optional*):
            Step, `fresh_k3_kl` and `age_k3_kl` of each score after a push.
        texts_off (`tuple[float, float]`, *optional*):
            Of the latest of them, how many completions have all of the gap, and how many were scored.
        entropy (`Mapping[int, float]`, *optional*):
            Entropy of the trainer by optimizer step, in nats per token.
        rates (`Sequence[tuple[int, float]]`, *optional*):
            Step and learning rate of each entry of the log, which covers the steps since the entry before it.
    """

    movement: float = float("nan")
    quiet: bool = False
    harmed: bool = False
    scored_again: Sequence[tuple[int, float, float]] = ()
    texts_off: tuple[float, float] | None = None
    entropy: Mapping[int, float] = field(default_factory=dict)
    rates: Sequence[tuple[int, float]] = ()

    @property
    def for_part(self) -> "LogFacts":
        """The same for a part of the tokens, without what was measured on all of them."""
        return LogFacts(movement=self.movement, quiet=self.quiet, rates=self.rates)

    def pace(self, step: int) -> float:
        """Learning rate of an optimizer step, before the first one that of the first; NaN if it is 0 or unknown."""
        return next((rate or np.nan for until, rate in self.rates if until >= step), np.nan)


class DumpedTokens:
    """
    Tokens of the sequences that represent a batch: tokens of the loss with a log-probability of both policies.
    `settings` are the ones in effect, `None` if unknown. `fields` are what the run wrote of its configuration, with
    fields of TRL, `about` are facts about it, and `log` is what its log says. There are `N` tokens and `B` sequences;
    unknown values are NaN or `None`.
    """

    def __init__(
        self,
        sequences: Sequences,
        settings: Settings | None,
        fields: Mapping[str, object],
        about: Mapping[str, str],
        log: LogFacts | None = None,
    ):
        self.settings, self.fields, self.about, self.log = settings, fields, about, log or LogFacts()
        self._sequences, counted = sequences, sequences.counted
        self.n_tokens = int((sequences.mask & sequences.represents[sequences.row]).sum())  # of the loss
        # For each token, `(N,)`: index of its sequence, log-probabilities of both sides, and the log-ratio in nats
        self.row = sequences.row[counted]
        self._place = np.flatnonzero(counted)  # of the token among all tokens of the dump
        self.train, self.rollout = (
            x[counted].astype(np.float64) for x in (sequences.train_logps, sequences.rollout_logps)
        )
        self.d = self.train - self.rollout
        # For each sequence, `(B,)`
        self.step = sequences.step
        self.lengths = np.bincount(self.row, minlength=len(sequences))
        self.is_fresh, self.padding = sequences.is_fresh, sequences.padding
        # Updates since the generation are no age here: in decoupled mode the log-ratio does not have them
        self.staleness = sequences.age
        # For each token again: its id, its place in the completion, and whether it is at an end or just behind tokens
        # outside the loss
        self.token = sequences.token_ids[counted]
        position = _places(sequences)
        self.position = position[counted]
        self.first = self.position == 0
        self.last = self.position == sequences.lengths[self.row] - 1
        self.seam = _after_gap(sequences.mask, position)[counted]
        self.turn = sequences.turn[counted]  # counted over all completions
        self.advantage = sequences.advantage_of_token[counted].astype(np.float64)

    def __len__(self) -> int:
        return len(self.d)

    def within(self, rows: np.ndarray, tokens: np.ndarray | None = None) -> "DumpedTokens":
        """
        Tokens of some of the sequences, `(B,)`, and of these only some `tokens`, `(N,)`, as if the others were not in
        the dump. What was measured on all of them, the scores after pushes and the entropy, is left out.
        """
        part = self._sequences.only(rows, None if tokens is None else self._place[tokens])
        return DumpedTokens(part, self.settings, self.fields, self.about, self.log.for_part)

    @property
    def quantised(self) -> bool:
        """True if vLLM reports that its weights are quantised."""
        return self.about.get("quantization", "None") != "None"

    @property
    def coarser(self) -> str:
        """
        Type of a 16-bit sampler if the trainer computes in float32, whose noise is then no baseline; otherwise empty.
        """
        sampler = self.about.get("sampler_dtype", "")
        return sampler if self.about.get("trainer_dtype") == "float32" and sampler in ("bfloat16", "float16") else ""

    @cached_property
    def total(self) -> float:
        """Sum of the squared log-ratio. Causes explain shares of it."""
        return float(np.square(self.d).sum())

    def share_of(self, here: np.ndarray) -> float:
        """Share of the gap, as a sum of squared log-ratios, that is in some tokens, `(N,)`."""
        return float(min(np.square(self.d[here]).sum() / max(self.total, 1e-300), 1.0))

    @cached_property
    def size(self) -> float:
        """Root mean square of the log-ratio, in nats."""
        return float(np.sqrt(self.total / max(len(self), 1)))

    @cached_property
    def k3(self) -> float:
        """`rollout_corr/k3_kl` of these tokens, with the bound of the metric."""
        return mean_k3(self.d)

    @cached_property
    def middle(self) -> np.ndarray:
        """Mean of the two log-probabilities of a token. Noise in either side prefers no sign relative to it."""
        return np.asarray((self.train + self.rollout) / 2)

    @cached_property
    def core(self) -> np.ndarray:
        """
        Tokens inside a completion, neither at its ends nor at a seam between turns. Those places get their own causes.
        """
        inside = ~(self.first | self.last | self.seam)
        return inside if inside.any() else np.ones(len(self), bool)

    @cached_property
    def usual(self) -> np.ndarray:
        """For each token, `(N,)`, the root mean square of the log-ratio at equally likely tokens of the core."""
        return self.usual_size(self.core)

    def usual_size(self, inside: np.ndarray) -> np.ndarray:
        """For each token, `(N,)`, the root mean square of the log-ratio at the equally likely tokens `inside`."""
        edges = edges_of_bins(self.middle[inside])
        squares = mean_of_equal(np.searchsorted(edges, self.middle), np.square(self.d), inside)
        return np.asarray(np.sqrt(squares))

    @cached_property
    def level(self) -> np.ndarray:
        """Log-ratio over its usual size, so that unlikely tokens do not dominate."""
        return np.asarray(self.d / np.maximum(self.usual, 1e-12))

    @cached_property
    def level_of_rows(self) -> np.ndarray:
        """Mean level of the core of each sequence, `(B,)`, without signs; NaN without tokens."""
        return self.row_means(np.abs(self.level) * self.core)

    @cached_property
    def parts(self) -> Parts:
        """
        Parts of the sequences in which the advantage has one sign: the whole sequence, unless each token has its own.
        """
        sign = np.nan_to_num(np.sign(self.advantage), nan=2.0).astype(np.int64) + 1
        keys, part = np.unique(4 * self.row.astype(np.int64) + sign, return_inverse=True)
        tokens = np.bincount(part)
        return Parts(part, keys // 4, tokens, np.bincount(part, self.advantage) / tokens)

    @cached_property
    def broken(self) -> Broken:
        """Tokens of the loss without a finite log-ratio."""
        sequences, chosen = self._sequences, self._sequences.represents[self._sequences.row]
        here = sequences.broken & chosen
        whole = (sequences.row, _places(sequences), sequences.train_logps, sequences.rollout_logps, sequences.missing)
        none_later = _none_later(sequences.valid & chosen, sequences.row)
        return Broken(*(column[here] for column in (*whole, none_later)))

    @cached_property
    def turn_place(self) -> np.ndarray:
        """Turn of each token, counted in its completion from 0."""
        first = np.full(len(self.lengths), np.inf)
        np.minimum.at(first, self._sequences.row, self._sequences.turn)
        return np.asarray(self.turn - first[self.row].astype(int))

    @cached_property
    def _earlier(self) -> tuple[np.ndarray, np.ndarray]:
        repeated, times = _repeats(self._sequences)
        return repeated[self._sequences.counted], times[self._sequences.counted]

    @property
    def repeated(self) -> np.ndarray:
        """Whether each token occurred before, in its prompt or its completion."""
        return self._earlier[0]

    @property
    def times(self) -> np.ndarray:
        """How often each token occurred before in its completion."""
        return self._earlier[1]

    @cached_property
    def again(self) -> np.ndarray:
        """Log-probability of each token by the trainer, when it scores the sequence alone."""
        return np.asarray(self._sequences.again_logps[self._sequences.counted], np.float64)

    @cached_property
    def once(self) -> np.ndarray:
        """
        Boolean mask, `(N,)`, of the first token after each beginning: the same token after the same prompt and the
        same tokens is no second sample, as in completions that are used again or that begin alike.
        """
        return _first_of_each(_beginnings(self._sequences)[self._sequences.counted])

    @cached_property
    def surprise(self) -> tuple[float, float, float] | None:
        """
        Mean of `-log p` of the trainer's tokens, its entropy in the same steps, and the standard error of their
        difference over completions; `None` if the entropy is unknown, or for a single completion. With
        `rollout_support`, the probabilities are of the tokens that the sampler kept, and the entropy of all.
        """
        if self.settings is not None and self.settings.rollout_support is not None:
            return None
        entropy = np.array([self.log.entropy.get(int(step), np.nan) for step in self.step])
        rows = np.isfinite(entropy) & (self.lengths > 0)
        if rows.sum() < 2:
            return None
        lengths, entropy = self.lengths[rows], entropy[rows]
        surprise = -self.row_means(self.train)[rows]
        means = [float(np.average(x, weights=lengths)) for x in (surprise, entropy)]
        apart = (surprise - entropy - means[0] + means[1]) * lengths / lengths.mean()
        return means[0], means[1], float(apart.std(ddof=1)) / len(apart) ** 0.5

    @cached_property
    def used_before(self) -> np.ndarray:
        """How often each completion came in earlier steps, `(B,)`, with the same log-probabilities of the sampler."""
        return _used_before(self._sequences)

    @cached_property
    def prompt(self) -> np.ndarray:
        """Number of the prompt of each sequence, `(B,)`: equal for equal prompts, -1 where unknown."""
        numbers: dict[bytes, int] = {b"": -1}
        return np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in self._sequences.prompts])

    def prompt_words(self, row: int) -> str:
        """Beginning of a prompt, as the end of a sentence; empty if the text was not read."""
        text = self._sequences.prompt(row) if self._sequences.has_text else ""
        return f", the first with {text[:60]!r}" if text else ""

    def words(self, i: int) -> str:
        """Text of a token and of the tokens before it, as the end of a sentence; empty if the text was not read."""
        if not self._sequences.has_text:
            return ""
        row, place = int(self.row[i]), int(self.position[i])
        before = "".join(self._sequences.text(row, k) for k in range(max(place - 8, 0), place))
        return f", {self._sequences.text(row, place)!r} after {before!r}"

    def row_means(self, values: np.ndarray) -> np.ndarray:
        """Means over the tokens of each sequence, `(B,)`; NaN without tokens."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.bincount(self.row, weights=values, minlength=len(self.lengths)) / self.lengths


def k3_of(d: np.ndarray) -> np.ndarray:
    """`exp(d) - 1 - d`, with the bound of the metric `k3_kl`."""
    return np.asarray(np.expm1(np.minimum(d, LARGEST_POWER)) - d)


def mean_k3(d: np.ndarray) -> float:
    """Mean of [`k3_of`]; 0 without tokens."""
    return float(k3_of(d).mean()) if d.size else 0.0


def edges_of_bins(keys: np.ndarray) -> np.ndarray:
    """Edges between `BINS` quantiles of the keys, or fewer, so that about 20 keys or more are in each."""
    bins = min(BINS, max(len(keys) // 20, 1))
    return np.asarray(np.quantile(keys, np.linspace(0, 1, bins + 1)[1:-1]))


def mean_of_equal(keys: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean of the values over the tokens with the same key, for each token."""
    _, inverse = np.unique(keys, return_inverse=True)
    means: np.ndarray = np.bincount(inverse, values * weights) / np.maximum(np.bincount(inverse, weights), 1e-300)
    return means[inverse]


def _places(sequences: Sequences) -> np.ndarray:
    """Place of each token of the sequences in its completion, from 0."""
    return np.asarray(np.arange(len(sequences.row)) - sequences.starts[:-1][sequences.row])


def _none_later(valid: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Boolean mask of the tokens without a later valid token in their row."""
    last = np.full(int(rows.max(initial=-1)) + 1, -1)
    last[rows[valid]] = np.flatnonzero(valid)  # the last of equal indices is kept
    return np.asarray(np.arange(len(rows)) > last[rows])


def _after_gap(mask: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Tokens of the loss at most `SEAM` places after tokens outside the loss in the same completion."""
    near = np.zeros_like(mask)
    for back in range(1, SEAM + 1):
        outside = np.zeros_like(mask)
        outside[back:] = ~mask[:-back]
        near |= outside & (position >= back)
    near &= mask
    return near


def _repeats(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """For each token, whether it occurred before in completion or known prompt, and its count in the completion."""
    tokens = sequences.token_ids
    repeated, times = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.int64)
    for row, prompt in enumerate(sequences.prompts):
        where = sequences.slice(row)
        times[where] = _earlier(tokens[where])
        repeated[where] = (times[where] > 0) | np.isin(tokens[where], prompt)
    return repeated, times


def _earlier(tokens: np.ndarray) -> np.ndarray:
    """Number of earlier occurrences of each token."""
    order = np.argsort(tokens, kind="stable")
    new = np.concatenate([[True], np.diff(tokens[order]) != 0]) if len(tokens) else np.zeros(0, bool)
    starts = np.maximum.accumulate(np.where(new, np.arange(len(tokens)), 0)) if len(tokens) else np.zeros(0, int)
    times = np.zeros(len(tokens), np.int64)
    times[order] = np.arange(len(tokens)) - starts
    return times


def _beginnings(sequences: Sequences) -> np.ndarray:
    """For each token of the sequences, a number of its prompt, the tokens before it, and itself."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(sequences.lengths.max(initial=0)) + 1, factor, np.uint64))
        sums = np.cumsum((sequences.token_ids.astype(np.uint64) + np.uint64(1)) * powers[_places(sequences)])
        before = np.concatenate([np.zeros(1, np.uint64), sums])[sequences.starts[:-1]]
        prompts = np.array([hash(ids.tobytes()) % 2**63 for ids in sequences.prompts], np.uint64) * factor
        numbers: np.ndarray = sums - (before - prompts)[sequences.row]
    return numbers


def _first_of_each(numbers: np.ndarray) -> np.ndarray:
    """Boolean mask of the first of equal numbers."""
    first = np.zeros(len(numbers), bool)
    first[np.unique(numbers, return_index=True)[1]] = True
    return first


_SHORT = 4  # tokens of a completion up to which chance may repeat it


def _used_before(sequences: Sequences) -> np.ndarray:
    """In how many earlier steps each sequence came, `(B,)`: its prompt, its tokens, and its values of the sampler."""
    steps: dict[bytes, list[int]] = {}
    times = np.zeros(len(sequences.lengths), np.int64)
    for row, prompt in enumerate(sequences.prompts):
        here = sequences.slice(row)
        if sequences.lengths[row] <= _SHORT:
            continue
        parts = (prompt, sequences.token_ids[here], sequences.rollout_logps[here])
        seen = steps.setdefault(b"/".join(part.tobytes() for part in parts), [])
        times[row] = sum(step < sequences.step[row] for step in seen)
        if sequences.step[row] not in seen:
            seen.append(int(sequences.step[row]))
    return times
