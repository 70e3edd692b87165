"""
Whether the correction arrives in TRL's loss, seen by its effect at the first step.

A correction multiplies the policy gradient of each token by a coefficient. So the coefficients of a micro-batch are given a
factor of one that autograd follows. In the gradient of the loss with respect to the log-probabilities, the factor of a token
must then appear at that token, and at no other. This takes derivatives through the loss alone, from `(B, T)` to `(B, T)`:
never through the model, and without a collective.

`B` completions, `T` completion tokens.
"""

from importlib.metadata import version

import torch


TOLERANCE = 0.05  # relative to the largest gradient; bfloat16 rounds by less than a hundredth


class GradientCheck:
    """
    The factor of one on the coefficients of a micro-batch.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the current policy, with gradient.

    Attributes:
        logps (`torch.Tensor` of shape `(B, T)`):
            The same, for the loss.
        factor (`torch.Tensor` of shape `(B, T)`):
            Ones, with gradient, to multiply the coefficients by.
    """

    def __init__(self, logps: torch.Tensor):
        self.logps = logps.view_as(logps)  # a tensor of its own, on which no hook of FSDP or DeepSpeed waits
        self.factor = torch.ones_like(logps, requires_grad=True)

    def passes(self, loss: torch.Tensor, *, own: bool, per_token: bool, alone: bool) -> bool:
        """
        Say whether the coefficients have arrived in a loss.

        Args:
            loss (`torch.Tensor`):
                The loss, a scalar with gradient.
            own (`bool`):
                Whether it is a loss of the user's own, which may do with the coefficients as it likes.
            per_token (`bool`):
                Whether the gradient of a token must follow its own coefficient, and not only those of its completion.
            alone (`bool`):
                Whether nothing but the policy gradient depends on the log-probabilities.

        Returns:
            `bool`: `False` if this micro-batch cannot tell, because nothing in it has a gradient.

        Raises:
            `RuntimeError`: if the loss has its log-probabilities or its coefficients from elsewhere.
        """
        gradient, first = self._gradients(loss)
        if gradient is None or first is None:
            lost = "log-probabilities" if gradient is None else "coefficients"
            raise not_in_loss(f"its gradient does not depend on the {lost} that it was handed")
        if own:
            return True
        # Positive and negative by turns, so that what one token takes from its neighbours does not cancel
        place = _numbers(gradient, 0) + (_numbers(gradient, 1) if per_token else 0)
        signs = (1.0 - 2.0 * (place % 2)).to(gradient.dtype)
        once, signed = self._of_factor(gradient), self._of_factor(gradient * signs)
        if once is None or signed is None:
            return True
        parts = torch.stack([gradient.detach(), once, signed * signs])
        if not per_token:
            parts = parts.sum(2)
        whole, once, signed = parts
        numbers = [once.abs().max(), whole.abs().max(), (signed - once).abs().max(), (whole - once).abs().max()]
        size, total, misplaced, unweighted = torch.stack(numbers).tolist()  # waits for the device, at the first step
        if misplaced > TOLERANCE * size:
            raise not_in_loss("the coefficient of one token acts on the gradient of others")
        if alone and unweighted > TOLERANCE * total:
            raise not_in_loss(
                f"{unweighted / total:.0%} of the gradient of some token does not follow its coefficient"
            )
        return size > 0

    def _gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradient of a loss with respect to log-probabilities and factor, `None` where it does not depend on them."""
        if not loss.requires_grad:
            return None, None
        logps, factor = torch.autograd.grad(loss, [self.logps, self.factor], create_graph=True, allow_unused=True)
        return logps, factor

    def _of_factor(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What of a gradient follows the factor, `(B, T)`. `None`: the loss has an operator without second derivatives."""
        try:
            return torch.autograd.grad(gradient.sum(), self.factor, retain_graph=True, allow_unused=True)[0]
        except RuntimeError:
            return None


def _numbers(like: torch.Tensor, dim: int) -> torch.Tensor:
    """The number of each row or column, to broadcast."""
    numbers = torch.arange(like.shape[dim], device=like.device)
    return numbers[:, None] if dim == 0 else numbers[None, :]


def not_in_loss(why: str) -> RuntimeError:
    """The error about a correction that does not act, for a reason."""
    return RuntimeError(
        f"Rollout correction does not arrive in the loss of trl {version('trl')}: {why}. Training would go on without it, or "
        "with a part of it. If `_compute_loss` is your own, use the result of `_get_per_token_logps_and_entropies` and "
        "`inputs['advantages']` as they are, without detaching them; otherwise install a version of trl that this release "
        "was tested with, or a newer trl-rollout-corr."
    )
