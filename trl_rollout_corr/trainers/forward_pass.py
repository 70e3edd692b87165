"""
Forward passes of TRL, by purpose.

TRL's trainers run every model through one method, `_get_per_token_logps_and_entropies`. Rollout correction overrides
it once ([`~trl_rollout_corr.trainers.mixin.RolloutCorrectionMixin`]), and asks the current pass what to do:

| pass | under way while | what it does |
| --- | --- | --- |
| [`Generation`] | the sampler generates a batch | nothing |
| [`Scoring`] | TRL scores the batch | answers TRL's old pass, or keeps its result |
| [`LossPass`] | TRL computes its loss | corrects the log-probabilities of the policy |
| [`Rescoring`] | a batch is scored once more, outside its loss | nothing |
| [`ForwardPass`] | code of the user runs: a reward function, a script | nothing |

The trainer keeps one pass at a time, in `_pass`. A pass begins and ends with a `with` statement, and passes nest. One
step of training goes like this:

1. TRL calls `_generate_and_score_completions`: [`Scoring`] begins.
2. Within it, TRL calls `_generate`: [`Generation`] begins, gets the log-probabilities and the prompts of the sampler,
   and ends. [`Scoring.take_generation`] takes it.
3. TRL runs the old policy ([`OldPass`]), and with `beta` the reference. Where nothing needs its result, [`OldPass`]
   answers without a forward pass.
4. TRL calls `_calculate_rewards`. A plain [`ForwardPass`] covers reward functions. Afterwards [`Scoring.take_rewards`]
   gets their rewards, and with `rollout_rs_exclude_from_baseline` the completions that [`Scoring.rejected`] names get
   a NaN.
5. TRL computes advantages and returns the batch: [`Scoring`] ends, and the trainer adds the columns of the correction.
6. For each micro-batch TRL calls `compute_loss`: [`LossPass`] begins. After the forward pass of the policy, the
   trainer puts the corrected advantages and the anchor into the batch, which TRL reads next. With `rollout_diagnose`,
   sequences of the first batch are scored again, which is a [`Rescoring`] within it. [`LossPass`] ends before the
   backward pass.
7. After the backward pass, `training_step` releases the replays. With `num_iterations`, step 6 visits the same samples
   again.

A push of weights, at the beginning of step 2, may score earlier completions once more, each in a plain
[`ForwardPass`].

Replays of the sampler's choices ([`~trl_rollout_corr.replay.seam.Replay`]) ask the pass for the choices of its
batch.

`B` completions, `P` and `T` tokens of prompts and completions with padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..correction.compute import keep_mask
from ..correction.sums import Sums
from ..settings.resolve import Settings
from .gradient_check import GradientCheck
from .keys import OLD_LOGPS


Forward = Callable[..., tuple]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Context with a model in evaluation mode, without dropout. It restores the mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class ForwardPass:
    """A forward pass that is not TRL's. It changes nothing."""

    loss_mask: torch.Tensor | None = None  # (B, T), tokens of the loss; set only in the loss
    policy: torch.nn.Module | None = None  # the model that the loss trains, without wrappers; set only in the loss

    def run(self, forward: Forward, model: Any, *args: Any, **kwargs: Any) -> tuple:
        """Run TRL's `forward`. Returns log-probabilities, `(B, T)`, and other outputs."""
        return forward(model, *args, **kwargs)

    def columns(self, generated: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
        """
        Columns of the batch, with the choices of the sampler that this pass makes again. `generated` returns the
        columns of a batch that was just generated.
        """
        return {}

    def take_generation(self, generation: "Generation") -> None:
        """Take what the sampler generated, if this pass scores it."""

    def count(self, sums: Sums) -> None:
        """Add sums to the metrics, if this pass is in the loss."""


class Rescoring(ForwardPass):
    """A forward pass outside TRL's loss, over a batch that TRL scored before."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def columns(self, generated: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
        return self.batch


# Scoring -------------------------------------------------------------------------------------------------------------


class OldPass:
    """
    TRL's first forward pass while it scores a batch, which computes the log-probabilities of the old policy.

    `answer` replaces the forward pass: it takes `input_ids` and `logits_to_keep`, and returns log-probabilities,
    `(B, T)`.
    """

    def __init__(self, answer: Callable[[torch.Tensor, int], torch.Tensor] | None = None) -> None:
        self.answer = answer
        self.calls = 0
        # known after the first call, each (B, T)
        self.logps: torch.Tensor
        self.completion_mask: torch.Tensor

    def __call__(
        self,
        forward: Forward,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        self.calls += 1
        if self.calls == 1 and self.answer is not None:
            outputs = (self.answer(input_ids, logits_to_keep), None, None)
        else:
            outputs = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self.calls == 1:
            self.logps, self.completion_mask = outputs[0], attention_mask[:, -logits_to_keep:]
        return outputs

    def settle(self, output: dict[str, Any], *, expected: int, anchor_key: str, trainer: type) -> None:
        """
        Put the old log-probabilities under `anchor_key` into the batch that TRL scored, or remove their placeholder.
        Raises a `RuntimeError` if the `trainer` made another number of forward passes than `expected`, or if the key
        is missing.
        """
        if self.calls != expected or anchor_key not in output:
            raise RuntimeError(
                f"`{trainer.__name__}` made {self.calls} forward passes while scoring where {expected} were expected, "
                f"or did not return `{anchor_key}`. If a class of yours makes one there, call the model itself for "
                "it, because the first is taken for that of the old policy. Otherwise this version of TRL is not "
                "supported: install a version of trl that this release was tested with."
            )
        if self.answer is None:
            output[OLD_LOGPS] = self.logps
        else:
            output.pop(OLD_LOGPS, None)


class Generation(ForwardPass):
    """
    The passes while the sampler generates a batch, all of which a `rollout_func` runs, and what TRL would discard of
    the completions.
    """

    logprobs: Sequence[Sequence[float | None]] | None = None  # of the sampled tokens, per completion
    prompts: list[list[int]] | None = None  # that vLLM read in the first turn, per completion
    tool_mask: list[list[int]] | None = None  # 0 on tokens of tools, per completion
    turn_ids: list[list[int]] | None = None  # turn of each token, per completion

    def other_prompt(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[int], list[int]] | None:
        """First prompt that vLLM and the trainer read differently, from both, or `None`."""
        for read, ids, mask in zip(self.prompts or [], batch["prompt_ids"], batch["prompt_mask"].bool(), strict=False):
            if list(read) != (own := ids[mask].tolist()):
                return list(read), own
        return None

    def rollout_logps(self, like: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the sampler, padded to the shape `(B, T)` of `like`."""
        return _padded(self.logprobs or [], like, 0.0)

    def padded_turn_ids(self, like: torch.Tensor) -> torch.Tensor | None:
        """Turn of each token, padded to the shape `(B, T)` of `like`; `None` without turns."""
        return None if self.turn_ids is None else _padded(self.turn_ids, like, 0)

    def mask_of_loss(self, completion_mask: torch.Tensor) -> torch.Tensor:
        """Mask of the tokens of the loss, `(B, T)`, from the mask of the completions."""
        if self.tool_mask is None:
            return completion_mask
        return completion_mask * _padded(self.tool_mask, completion_mask, 1)


class Scoring(ForwardPass):
    """The passes of a batch while TRL generates and scores it; TRL's own without an `old_pass`."""

    def __init__(self, old_pass: OldPass | None) -> None:
        self.old_pass = old_pass
        self.generation = Generation()
        self.rewards: torch.Tensor | None = None  # (B,)

    def run(self, forward: Forward, model: Any, *args: Any, **kwargs: Any) -> tuple:
        if self.old_pass is None:
            return forward(model, *args, **kwargs)
        return self.old_pass(forward, model, *args, **kwargs)

    def columns(self, generated: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
        return generated()

    def take_generation(self, generation: Generation) -> None:
        self.generation = generation  # a subclass may generate several times, and use the last result
        if self.old_pass is not None:
            self.old_pass.calls = 0

    def take_rewards(self, rewards: torch.Tensor, weights: torch.Tensor, own: slice) -> None:
        """
        Keep the rewards of this rank's completions, the rows `own` of `rewards`, `(N, F)`, which covers all ranks and
        `F` functions with `weights`, `(F,)`; NaN where a function gave none.
        """
        total = (rewards * weights.to(rewards.device)).nansum(1)
        self.rewards = total.masked_fill(rewards.isnan().all(1), torch.nan)[own]

    def rejected(self, settings: Settings) -> torch.Tensor:
        """Completions with all tokens rejected, boolean, `(B,)`. The old pass must have run."""
        assert self.old_pass is not None
        mask = self.generation.mask_of_loss(self.old_pass.completion_mask).bool()
        turn_ids = self.generation.padded_turn_ids(mask)
        keep = keep_mask(self.old_pass.logps, self.generation.rollout_logps(mask), mask, settings, turn_ids)
        return mask.any(1) & ~keep.any(1)

    def check_rows(self, n: int, owner: str) -> None:
        """
        Check that log-probabilities, rewards and turns belong to the `n` completions of the batch, which a method of
        the class `owner` returned.
        """
        lists = (self.generation.logprobs, self.rewards, self.generation.turn_ids)
        rows = [len(x) for x in lists if x is not None]
        others = [length for length in rows if length != n]
        if others:
            raise RuntimeError(
                f"`{owner}._generate_and_score_completions` returned {n} completions, but {others[0]} were generated "
                "and scored last: the log-probabilities of the others are unknown. Join batches in a subclass of the "
                "corrected trainer, where each part carries the log-probabilities of its sampler."
            )


def _padded(rows: Sequence[Sequence[Any]], like: torch.Tensor, padding: float) -> torch.Tensor:
    """Rows of numbers as a tensor of the shape `(B, T)` of `like`."""
    padded = [[*row, *[padding] * (like.shape[1] - len(row))] for row in rows]
    return torch.tensor(padded, device=like.device)


# The loss ------------------------------------------------------------------------------------------------------------


class LossInputs(dict):
    """
    Batch for TRL's loss. It lacks advantages until the correction adds them, after the forward pass of the policy.

    `read` collects the keys that were read since then. A loss that does not read the anchor still gives the right
    gradient at a ratio of 1, so a check of the gradient would miss it.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> None:
        if key != "advantages":
            raise KeyError(key)
        raise RuntimeError(
            "`advantages` are read before the forward pass of the policy, after which the batch contains the "
            "corrected ones. In `_compute_loss`, call `self._get_per_token_logps_and_entropies` with the policy "
            "first, and read `advantages`, `old_per_token_logps` and `old_logps` after it, as TRL does."
        )

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self or key == "advantages" else default


class LossPass(Rescoring):
    """
    The passes of one call of `compute_loss` on a micro-batch. Only the pass of the policy is corrected. The passes of
    a teacher or of the reference, and passes without gradient, stay unchanged.

    `policy` is the model that the loss trains, without wrappers, which `unwrap` removes; `loss_mask`, `(B, T)`, marks
    the tokens of the loss. `correct` takes this pass and the log-probabilities of the policy, `(B, T)` in nats with
    gradient, and returns the ones for TRL's loss. `count` adds sums to the metrics.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        batch: Mapping[str, Any],
        loss_mask: torch.Tensor,
        correct: Callable[["LossPass", torch.Tensor], torch.Tensor],
        unwrap: Callable[[Any], torch.nn.Module],
        count: Callable[[Sums], None],
    ) -> None:
        super().__init__(dict(batch))
        self.policy, self.loss_mask = policy, loss_mask
        self._correct, self._unwrap, self._count = correct, unwrap, count
        self.inputs = LossInputs({key: value for key, value in batch.items() if key != "advantages"})
        self.gradient_check: GradientCheck | None = None  # at the first step
        self.corrected = False
        self._with_gradient = torch.is_grad_enabled()

    def run(self, forward: Forward, model: Any, *args: Any, **kwargs: Any) -> tuple:
        logps, *others = forward(model, *args, **kwargs)
        if self._unwrap(model) is not self.policy or (self._with_gradient and not logps.requires_grad):
            return logps, *others
        if self.corrected:
            raise RuntimeError(
                "The loss ran the policy twice through `_get_per_token_logps_and_entropies`, and rollout correction "
                "cannot know which of the two forward passes to correct. Run the other one under `torch.no_grad()`, "
                "or call the model itself."
            )
        self.corrected = True
        logps = self._correct(self, logps)
        self.inputs.read.clear()  # only reads after the correction matter
        return logps, *others

    def count(self, sums: Sums) -> None:
        self._count(sums)

    def check_policy_ran(self, trainer: str) -> None:
        """Check, after the loss of a class `trainer`, that the policy ran and was corrected."""
        if not self.corrected:
            raise RuntimeError(
                f"The loss of `{trainer}` did not run the policy through `_get_per_token_logps_and_entropies`, which "
                "rollout correction overrides. If `_compute_loss` is your own, run it there; otherwise install the "
                "version of trl that this release was tested with."
            )
