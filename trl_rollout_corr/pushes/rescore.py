"""
Some completions scored once more after a push, by the sampler and by the trainer, which then hold the same weights.

Three log-probabilities of the same tokens split the gap: the sampler's when it drew them, the sampler's now, and the
trainer's now. `fresh_k3_kl` measures trainer against sampler with equal weights, and `age_k3_kl` the sampler now
against then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ..correction.functional import k3
from ..correction.sums import Applied, SegmentedSums
from ..messages import notify
from ..trainers.ranks import largest
from .scoring_sampler import ScoringSampler


MOST = 8  # completions
TOKENS = 4096  # in all of them together, with their prompts
FEWEST = 64  # tokens of a completion, however long its prompt is
SPARSE = 33  # pushes between looks, at most; odd, as a fault of every second push would hide from even ones
SURE = 3  # looks, after which a few completions are enough
FEW = 2  # of these completions, unless they are further apart than usual or there are more replicas
USUAL, SAME = 3.0, 1e-5  # times the smallest of the first gaps; nats per token: a gap below is rounding
ALL = 0.99  # share of the gap that counts as all of it
SEE_SCORES = "See `trl-rollout-corr docs metrics#two-numbers-of-each-push`."
T = TypeVar("T")


def is_due(push: int) -> bool:
    """True for the pushes 1, 2, 4, 8, 16, 33, and then every 33rd."""
    return push % SPARSE == 0 or (push < SPARSE - 1 and push & (push - 1) == 0)


class Text(NamedTuple):
    """A completion of a prompt, perhaps cut to `T` tokens."""

    prompt: list[int]
    completion: list[int]
    chosen: list[bool]  # tokens of the loss
    sampled: list[float]  # the sampler's log-probabilities when it drew them

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.completion]


class Rescored(SegmentedSums):
    """Sums of the gaps of tokens that were scored once more."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "fresh": ("fresh_k3", "fresh_tokens"),
        "age": ("age_k3", "age_tokens"),
        "texts": ("texts", "texts_off"),
    }

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        names = ("fresh", "age")
        metrics = {f"{name}_k3_kl": s[f"{name}_k3"] / n for name in names if (n := s[f"{name}_tokens"])}
        return metrics | ({"fresh_texts": s["texts"], "fresh_texts_off": s["texts_off"]} if s["texts"] else {})


class Rescore:
    """
    Scores completions of the latest batch once more, after the pushes 1, 2, 4, 8, 16, 33, and then every 33rd: at most
    eight, of at most 4,096 tokens together. From the fourth time on, two of them are enough if sampler and trainer are
    no further apart than usual.

    `pushes` ([`~trl_rollout_corr.pushes.pushes.Pushes`]) knows how the trainer scores a text, and `sampler` how the
    sampler does.
    """

    def __init__(self, pushes: Any, sampler: ScoringSampler) -> None:
        self.pushes, self.sampler = pushes, sampler
        self._counted: list[Rescored] = []  # and not taken yet
        self.done = False
        self.looks = 0
        self._first: list[float] = []  # gaps of the first looks, of this rank
        self._pushes = 0
        self._due = self._older = False
        self._texts: list[Text] | None = None  # of the latest batch; `None` before the first

    @property
    def wants_batch(self) -> bool:
        """True if completions of the next batch will be scored."""
        return not self.done and self._pushes > 0 and (self._due or is_due(self._pushes + 1))

    def keep(self, batch: Mapping[str, torch.Tensor], mask: torch.Tensor, sampled: torch.Tensor) -> None:
        """
        Take completions of a batch that was just generated. `mask` is non-zero on the tokens of the loss, and
        `sampled` holds the log-probabilities of the sampler, both `(B, T)`.
        """
        if not self.wants_batch:
            return
        self._texts = choose(batch, mask, sampled, self.sampler.longest, self.sampler.at_once)
        if self._due and not self._older and self.pushes.scores_at_once:
            self._look()  # the first push came before any batch

    def pushed(self, *, announced: bool = False) -> None:
        """
        Score right after a push, if that is due. `announced` is true if the run announced that the sampler holds older
        weights than the trainer. The two are then not compared.
        """
        if self.done:
            return
        self._pushes += 1
        self._older = announced
        self._due = not announced and (self._due or is_due(self._pushes))
        if self._due and self._texts is not None:
            self._look()

    def take(self) -> list[Rescored]:
        """Sums that were not taken yet."""
        counted, self._counted = self._counted, []
        return counted

    def _look(self) -> None:
        if self._gives_up(self.sampler.doubt, "another rank cannot score texts"):
            return
        texts = self._shared(self._texts or [])
        if not self._largest(len(texts)):
            return  # all completions are empty; later ones may not be
        self._due = False
        few = MOST if self.looks < SURE else max(FEW, self.sampler.replicas)
        spacing = max(1, len(texts) // few)
        sums = self._compare(texts[::spacing])
        if sums is not None and self._largest(int(self._is_off(sums))):
            others = self._compare([text for i, text in enumerate(texts) if i % spacing])
            sums = None if others is None else sums + others
        if sums is None:
            return
        self.looks += 1
        self._counted.append(sums)

    def _is_off(self, sums: Rescored) -> bool:
        """True if sampler and trainer are further apart than usual, on this rank."""
        s = sums.by_name()
        gap = s["fresh_k3"] / max(s["fresh_tokens"], 1.0)
        if self.looks < SURE:
            self._first.append(gap)
            return False
        return gap > USUAL * max(min(self._first), SAME)

    def _compare(self, texts: list[Text]) -> Rescored | None:
        """Sums of the gaps of some texts, which sampler and trainer score; `None` if one of them cannot."""
        most = self._largest(len(texts))  # every rank must make the same number of forward passes
        padded = [*texts, *[Text([0], [0], [False], [0.0])] * (most - len(texts))]
        scored = self._attempted("sampler", lambda: self.sampler.score([text.ids for text in texts], self.looks))
        if scored is None:
            return None
        asked = texts if len(scored) == len(texts) else []  # otherwise the main process counts
        trained: list[torch.Tensor] = []
        for text in padded:  # all ranks stop at the same one, because a forward pass may wait for them
            logps = self._attempted("trainer", partial(self._score, text))
            if logps is None:
                return None
            trained.append(logps)
        return self._attempted("trainer", lambda: self._sums(asked, scored, trained))

    def _attempted(self, who: str, score: Callable[[], T]) -> T | None:
        """The result of `score` on this rank; `None` on all ranks if it fails on one of them."""
        scored, problem = None, ""
        try:
            with torch.no_grad(), as_before(self.pushes.accelerator.device):
                scored = score()
        except Exception as error:  # a busy server, or memory that is short now, is no reason to end a run
            problem = f"the {who} did not score a text ({type(error).__name__}: {error})"
        return None if self._gives_up(problem, f"the {who} of another rank did not score a text") else scored

    def _sums(self, texts: Sequence[Text], scored: list[list[float]], trained: list[torch.Tensor]) -> Rescored:
        """Sums of the gaps of some texts."""
        then = [_chosen(text, text.sampled) for text in texts]
        now = [_chosen(text, x[len(text.prompt) - 1 :]) for text, x in zip(texts, scored, strict=True)]
        ours = [_chosen(text, x.tolist()) for text, x in zip(texts, trained, strict=False)]
        fresh = _gaps(ours, now)
        segments = {"fresh": fresh.sum(0), "texts": _concentration(fresh)}
        if self.pushes.samples_unchanged:
            segments["age"] = _gaps(now, then).sum(0)
        device = self.pushes.accelerator.device
        return Rescored.of({name: x.float().to(device) for name, x in segments.items()})

    def _shared(self, texts: list[Text]) -> list[Text]:
        """
        The texts that all ranks of a sampler score, from the first rank of an engine, or from the main process for a
        server.
        """
        generation = self.pushes.engine
        if generation is None:
            of_main = [texts]
            if self.pushes.accelerator.num_processes > 1:
                torch.distributed.broadcast_object_list(of_main, src=0)
            return of_main[0]
        if generation.tensor_parallel_size == 1:
            return texts
        together: list[Any] = [None] * generation.tensor_parallel_size
        torch.distributed.all_gather_object(together, texts, group=generation.tp_group)
        return list(together[0])

    def _largest(self, number: int) -> int:
        """The largest number over all ranks."""
        return largest(self.pushes.accelerator, number)

    def _score(self, text: Text) -> torch.Tensor:
        """Log-probabilities of a completion under the trainer in evaluation mode. All ranks call it equally often."""
        ids = torch.tensor([text.ids], device=self.pushes.accelerator.device)
        logps: torch.Tensor = self.pushes.score_in_evaluation(ids, len(text.completion))
        return logps

    def _gives_up(self, problem: str, elsewhere: str) -> bool:
        """
        End the scores on all ranks, and say so, if there is a problem on this rank or, as `elsewhere` puts it, on
        another one.
        """
        if not self._largest(int(bool(problem))):
            return False
        self.done = True
        notify(
            "From here on, no completions are scored once more after a push, so that `fresh_k3_kl` and `age_k3_kl` "
            f"are missing: {problem or elsewhere}. {SEE_SCORES}"
        )
        return True


def _chosen(text: Text, logps: Sequence[float]) -> torch.Tensor:
    """Log-probabilities of the tokens of the loss of a text."""
    return torch.tensor([x for x, chosen in zip(logps, text.chosen, strict=True) if chosen], dtype=torch.float64)


def _gaps(logps: Sequence[torch.Tensor], of_sampler: Sequence[torch.Tensor]) -> torch.Tensor:
    """`(N, 2)`, for each of `N` texts: sum of `k3` over tokens where both are finite, and their number."""
    gaps = [torch.zeros(0, 2, dtype=torch.float64)]
    for log_ratio in (a - b for a, b in zip(logps, of_sampler, strict=True)):
        finite = log_ratio.isfinite()
        total = k3(log_ratio[finite]).sum()
        gaps.append(torch.stack([total, finite.sum().double()])[None])
    return torch.cat(gaps)


def _concentration(gaps: torch.Tensor) -> torch.Tensor:
    """`(2,)`: number of texts, and the smallest number of them that have all of the gap, but for a hundredth."""
    of_texts = gaps[gaps[:, 1] > 0, 0].sort(descending=True).values
    off = (of_texts.cumsum(0) < ALL * of_texts.sum()).sum() + 1 if len(of_texts) else of_texts.sum()
    return torch.stack([torch.tensor(float(len(of_texts))), off.float()])


def choose(
    batch: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    sampled: torch.Tensor,
    longest: int | None,
    at_once: int | None = None,
) -> list[Text]:
    """
    Evenly spaced completions of a batch, each cut to its share of the tokens; a single one if prompts are long. A text
    has at most as many tokens as the sampler should read `at_once`, if its prompt allows that.
    """
    n = len(batch["completion_ids"])
    rows = sorted({round(i * (n - 1) / max(1, MOST - 1)) for i in range(MOST)})
    room = TOKENS if longest is None else min(TOKENS, longest - 1)  # the sampler adds a token
    texts = [_text(batch, mask, sampled, row, min(room, TOKENS // len(rows)), at_once) for row in rows]
    found = [text for text in texts if text is not None]
    if not found:
        alone = (_text(batch, mask, sampled, row, room, at_once) for row in rows)
        found = [text for text in alone if text is not None][:1]
    return found


def _text(
    batch: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    sampled: torch.Tensor,
    row: int,
    room: int,
    at_once: int | None,
) -> Text | None:
    """
    Completion in a row of a batch, cut so that it fits `room` with its prompt, and, down to `FEWEST` tokens,
    `at_once`; `None` without a token of the loss.
    """
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    kept = batch["completion_mask"][row].bool()
    n = room - len(prompt) if at_once is None else min(room - len(prompt), max(at_once - len(prompt), FEWEST))
    if n < 1 or not prompt:
        return None
    parts = (batch["completion_ids"][row], mask[row].bool(), sampled[row])
    completion, chosen, logps = (part[kept][:n].tolist() for part in parts)
    return Text(prompt, completion, chosen, logps) if any(chosen) else None


@contextmanager
def as_before(device: torch.device) -> Iterator[None]:
    """Context that leaves the random numbers of the process as they are."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
