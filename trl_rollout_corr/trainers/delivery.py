"""
Check that pushed weights arrive in the sampler.

A push that does not arrive raises no error, and `staleness_max` stays 0: the sampler keeps its first weights, or a part of
them. The gap between sampler and trainer shows it: it grows with the movement of the policy.

`B` completions, `T` completion tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..messages import report


NOISE = 1e-4  # nats, smallest gap that counts
# Smallest movements, in gaps of the first batch, that show that no weights arrived, and that a part is missing
MOVED, FAR = 6.0, 100.0
# Smallest gaps, in movements, that show the same
ALL, PART = 1 / 3, 1 / 20
LAST = 256  # optimizer steps after the first look, until which there are more


class Delivery:
    """
    Compares the gap between sampler and trainer with the movement of the trainer's policy.

        gap       g(k) = mean |log pi_k - log pi_sampler|   of tokens that are sampled after k optimizer steps
        movement  m(k) = mean |log pi_k - log pi_0|         of the tokens of the first batch

    The first batch is sampled with the trainer's own weights: `g(0)` is the part of any gap that precision, dropout or
    truncation explain. A sampler with the new weights keeps `g(k) = g(0)`. A sampler with its first weights has `g(k) = m(k)`,
    or half of it while the first batch, on which the trainer has trained, moves more than others. For `m >= 6 g(0)` the two
    differ clearly: no weights arrived if `g >= m / 3`. A missing part, such as the head, makes a smaller gap, which precision
    alone can make as well for `m < 100 g(0)`; above, a part is missing if `g >= m / 20`. Both must hold in two looks in a row.

    `g` is about the first micro-batch of a generation, which the loss scores with the weights that generated it: it costs
    nothing. It is looked at after 1, 2, 4, 8, ... steps, and only if it is `2 g(0)` or more, `m` is needed: a forward pass
    without gradient over one micro-batch, at the next generation. A run whose weights arrive makes none.

    `doubt` returns the reason why a sampler with all weights may look like one without them, or without a part (`True`), or
    `None`. With a reason, the error becomes a warning.
    """

    def __init__(self, accelerator: Accelerator, doubt: Callable[[bool], str | None]) -> None:
        self.accelerator, self.doubt = accelerator, doubt
        self.done = False
        self._is_new = False  # whether no micro-batch of the last generation was seen
        self._is_due = False  # whether the movement is needed
        self._is_suspect = False
        self._moved: torch.Tensor | None = None  # sums over the movement of each token
        self._first: FirstBatch | None = None
        self._start: int | None = None  # optimizer steps made before the first look
        self._next = 0  # optimizer step of the next look

    def generated(self, step: int) -> None:
        """Count a generation after `step` optimizer steps, and score the first batch again if that is due."""
        if self._start is not None and step > self._start + LAST:
            self._end()
        self._is_new = not self.done
        if self._first is not None and self._is_due:
            self._is_due = False
            devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):  # dropout draws
                moved = self._first.score() - self._first.logps
            self._moved = _sums(moved[self._first.tokens])

    def visited(
        self,
        step: int,
        logps: torch.Tensor,
        rollout_logps: torch.Tensor,
        tokens: torch.Tensor,
        ages: torch.Tensor,
        score: Callable[[], torch.Tensor],
    ) -> None:
        """
        Look at a micro-batch, if it is the first of a generation. If weights did not arrive, all ranks raise a `RuntimeError`.

        Args:
            step (`int`):
                Optimizer steps made so far.
            logps, rollout_logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy and of the sampler, in nats.
            tokens (`torch.Tensor` of shape `(B, T)`):
                Non-zero on the tokens of the loss.
            ages (`torch.Tensor` of shape `(B,)`):
                Optimizer steps that the sampler is known to be behind; NaN if unknown.
            score (`Callable[[], torch.Tensor]`):
                Computes `logps` again, with the weights at the time of the call.
        """
        if not self._is_new or step < self._next:
            return
        self._is_new = False
        if self._start is None:
            self._start = step
        self._next = max(step + 1, 2 * step - self._start)
        # A sampler may be behind on purpose. Samples count if most of the movement happened before their weights
        in_step = 8 * ages <= (0 if self._first is None else step - self._first.step)
        log_ratio = logps - rollout_logps
        sums = _sums(log_ratio[tokens.bool() & log_ratio.isfinite() & in_step[:, None]])
        moved = torch.zeros_like(sums) if self._moved is None else self._moved
        late = (ages[in_step] > 0).any().to(sums).expand(3)
        of_gap, of_movement, late = self.accelerator.reduce(torch.stack([sums, moved, late])).tolist()
        if not of_gap[0]:  # all too far behind
            self._next = step + 1 + (step - self._start) // 8
            return
        self._moved = None
        gap, error = _mean_and_error(*of_gap)
        if self._first is None:
            self._first = FirstBatch(step, max(gap + 3 * error, NOISE), logps, tokens.bool(), score)
        elif of_movement[0]:
            self._judge(step, gap, _mean_and_error(*of_movement)[0], late[0] > 0)
        else:
            self._is_due = gap >= ALL * MOVED * self._first.noise
        if self._is_due:  # at the next generation
            self._next = step

    def _judge(self, step: int, gap: float, moved: float, late: bool) -> None:
        """Say that weights did not arrive, if that is so for the second time."""
        assert self._first is not None
        far = moved >= FAR * self._first.noise and not late
        missing = moved >= MOVED * self._first.noise and gap >= moved * (PART if far else ALL)
        if missing and self._is_suspect:
            first = self._first
            self._end()
            self._report(first, step, gap, moved, late)
        self._is_suspect = self._is_due = missing

    def _report(self, first: "FirstBatch", step: int, gap: float, moved: float, late: bool) -> None:
        """Raise an error, or a warning if there is another explanation."""
        # The main process may know more of the sampler
        reasons = broadcast_object_list([self.doubt(gap < ALL * moved)])
        if late:
            reasons.append(
                "Samples are some optimizer steps old, and the policy may have moved as far in these steps."
            )
        doubt = " ".join(reason for reason in reasons if reason)
        message = (
            f"The sampler {'may not have' if doubt else 'does not have'} the weights of the trainer, although every push "
            "succeeded and `rollout_corr/staleness_max` does not show the failure. The mean absolute difference of their "
            f"log-probabilities was {first.noise:.2g} nats at step {first.step}, error included, and is {gap:.2g} at step "
            f"{step}; between the two steps, the trainer's policy moved by {moved:.2g}. So the sampler has kept all or some "
            "of its first weights. Update vLLM, or change `vllm_mode`, the device or the type of weights; "
            "if the sampler is meant to have older weights, set `trainer.rollout_step` to their optimizer step "
            "whenever they are pushed. See `trl-rollout-corr docs troubleshooting#weights-do-not-arrive`."
        )
        if not doubt:
            raise RuntimeError(message)
        report(f"{message} {doubt}")

    def _end(self) -> None:
        """Look no more, and let go of the first batch."""
        self.done, self._first, self._moved = True, None, None


class FirstBatch(NamedTuple):
    """The first micro-batch of a run."""

    step: int  # optimizer steps made before
    noise: float  # gap between sampler and trainer with three standard errors, in nats per token
    logps: torch.Tensor  # (B, T), of the policy that it was sampled from, in nats
    tokens: torch.Tensor  # (B, T), boolean mask of the tokens of the loss
    score: Callable[[], torch.Tensor]  # computes (B, T) log-probabilities with the weights at the time of the call


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Number, sum of absolute values and sum of squares, `(3,)`."""
    x = x.float()
    return torch.stack([torch.ones_like(x).sum(), x.abs().sum(), x.square().sum()])


def _mean_and_error(n: float, total: float, squares: float) -> tuple[float, float]:
    """Mean absolute value and its standard error, from sums."""
    mean = total / n
    return mean, math.sqrt(max(squares / n - mean**2, 0.0) / n)
