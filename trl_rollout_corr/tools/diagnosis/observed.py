"""Tokens of a dump for a diagnosis: their log-ratio, and everything that it could depend on."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from ...settings.resolve import Settings
from ..dump.sequences import Sequences


SEAM = 2  # tokens after the edge of a turn that count as its beginning
_LARGEST_POWER = 60.0  # exponent of e, as in the metric


class DumpedTokens:
    """
    Tokens of the sequences that represent a batch: tokens of the loss with a log-probability of
    both policies. `settings` are the ones in effect, `None` if unknown. `fields` are what the run
    wrote of its configuration, with fields of TRL, and `about` are facts about it. `movement` is
    the sum of the learning rates of the optimizer steps between the first sequence and the last.
    `quiet` says that the log of the run shows no alarm and only small gaps. `age` is the age of the
    run's oldest completion, in optimizer steps. `scored_again` lists the step, `fresh_k3_kl` and
    `age_k3_kl` of each score after a push. There are `N` tokens and `B` sequences; unknown values
    are NaN or `None`.
    """

    def __init__(
        self,
        sequences: Sequences,
        settings: Settings | None,
        fields: Mapping[str, object],
        about: Mapping[str, str],
        movement: float = float("nan"),
        *,
        quiet: bool = False,
        age: float | None = None,
        scored_again: Sequence[tuple[int, float, float]] = (),
    ):
        self.settings, self.fields, self.about = settings, fields, about
        self.movement, self.quiet, self.age, self.scored_again = movement, quiet, age, scored_again
        counted = sequences.counted
        # Number of tokens of the loss, and the sequence of each of them without a finite log-ratio
        chosen = sequences.represents[sequences.row]
        self.n_tokens = int((sequences.mask & chosen).sum())
        broken = sequences.broken & chosen
        self.broken_row = sequences.row[broken]
        # For these tokens, `(M,)`: place in the completion, log-probabilities of both sides, whether
        # the sampler returned None, and whether no later token of the completion is finite, as
        # behind a row of NaN logits
        self.broken_place = (np.arange(len(sequences.row)) - sequences.starts[:-1][sequences.row])[broken]
        self.broken_train, self.broken_rollout = sequences.train_logps[broken], sequences.rollout_logps[broken]
        self.broken_missing = sequences.missing[broken]  # the sampler returned None
        self.broken_to_the_end = _none_later(sequences.valid & chosen, sequences.row)[broken]
        # For each token, `(N,)`: index of its sequence, log-probabilities of both sides, and the
        # log-ratio in nats
        self.row = sequences.row[counted]
        self.train, self.rollout = (
            x[counted].astype(np.float64) for x in (sequences.train_logps, sequences.rollout_logps)
        )
        self.d = self.train - self.rollout
        # For each sequence, `(B,)`
        self.step = sequences.step
        self.lengths = np.bincount(self.row, minlength=len(sequences))
        # For each token again: its place in the completion, and whether it is at an end or just
        # behind tokens outside the loss
        starts = sequences.starts[:-1][sequences.row]
        position = np.arange(len(sequences.row)) - starts
        self.position = position[counted]
        self.first = self.position == 0
        self.last = self.position == sequences.lengths[self.row] - 1
        self.seam = _after_gap(sequences.mask, position)[counted]
        self.turn = sequences.turn[counted]  # counted over all completions
        first_turn = np.full(len(sequences), np.inf)
        np.minimum.at(first_turn, sequences.row, sequences.turn)
        self.turn_place = self.turn - first_turn[self.row].astype(int)  # counted in the completion, 0 for the first
        self._sequences = sequences
        self.token = sequences.token_ids[counted]
        # whether it occurred before in prompt or completion, and how often in the completion
        self.repeated, self.times = (x[counted] for x in _repeats(sequences))
        self.staleness, self.padding = sequences.staleness, sequences.padding
        self.advantage = sequences.advantage.astype(np.float64)
        self.again = sequences.again_logps[counted].astype(np.float64)  # by the trainer, scoring the sequence alone

    def __len__(self) -> int:
        return len(self.d)

    @property
    def quantised(self) -> bool:
        """True if vLLM reports that its weights are quantised."""
        return self.about.get("quantization", "None") != "None"

    @property
    def coarser(self) -> str:
        """
        Type of a 16-bit sampler if the trainer computes in float32, whose noise is then no
        baseline; otherwise empty.
        """
        sampler = self.about.get("sampler_dtype", "")
        return sampler if self.about.get("trainer_dtype") == "float32" and sampler in ("bfloat16", "float16") else ""

    @cached_property
    def total(self) -> float:
        """Sum of the squared log-ratio. Causes explain shares of it."""
        return float(np.square(self.d).sum())

    @cached_property
    def size(self) -> float:
        """Root mean square of the log-ratio, in nats."""
        return float(np.sqrt(self.total / max(len(self), 1)))

    @cached_property
    def k3(self) -> float:
        """`rollout_corr/k3_kl` of these tokens, with the bound of the metric."""
        powers = np.expm1(np.minimum(self.d, _LARGEST_POWER))
        return float(np.mean(powers - self.d)) if len(self) else 0.0

    @cached_property
    def middle(self) -> np.ndarray:
        """
        Mean of the two log-probabilities of a token. Noise in either side prefers no sign relative
        to it.
        """
        return np.asarray((self.train + self.rollout) / 2)

    @cached_property
    def core(self) -> np.ndarray:
        """
        Tokens inside a completion, neither at its ends nor at a seam between turns. Those places
        get their own causes.
        """
        inside = ~(self.first | self.last | self.seam)
        return inside if inside.any() else np.ones(len(self), bool)

    @cached_property
    def prompt(self) -> np.ndarray:
        """
        Number of the prompt of each sequence, `(B,)`: equal for equal prompts, -1 where unknown.
        """
        numbers: dict[bytes, int] = {b"": -1}
        return np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in self._sequences.prompts])

    def prompt_words(self, row: int) -> str:
        """Beginning of a prompt, as the end of a sentence; empty if the text was not read."""
        text = self._sequences.prompt(row) if self._sequences.has_text else ""
        return f", the first with {text[:60]!r}" if text else ""

    def words(self, i: int) -> str:
        """
        Text of a token and of the tokens before it, as the end of a sentence; empty if the text was
        not read.
        """
        if not self._sequences.has_text:
            return ""
        row, place = int(self.row[i]), int(self.position[i])
        before = "".join(self._sequences.text(row, k) for k in range(max(place - 8, 0), place))
        return f", {self._sequences.text(row, place)!r} after {before!r}"

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Means over the tokens of each sequence, `(B,)`; NaN without tokens."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.bincount(self.row, weights=values, minlength=len(self.lengths)) / self.lengths


def _none_later(valid: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Boolean mask of the tokens without a later valid token in their row."""
    last = np.full(int(rows.max(initial=-1)) + 1, -1)
    last[rows[valid]] = np.flatnonzero(valid)  # the last of equal indices is kept
    return np.asarray(np.arange(len(rows)) > last[rows])


def _after_gap(mask: np.ndarray, position: np.ndarray) -> np.ndarray:
    """
    Tokens of the loss at most `SEAM` places after tokens outside the loss in the same completion.
    """
    near = np.zeros_like(mask)
    for back in range(1, SEAM + 1):
        outside = np.zeros_like(mask)
        outside[back:] = ~mask[:-back]
        near |= outside & (position >= back)
    near &= mask
    return near


def _repeats(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """
    For each token, whether it occurred before in completion or known prompt, and its count in the
    completion.
    """
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
