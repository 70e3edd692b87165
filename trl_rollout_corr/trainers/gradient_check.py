"""
Test at the first step that the coefficients of the correction reach TRL's loss.

A correction multiplies the policy gradient of each token by a coefficient. For the test, the coefficients `c` of a
micro-batch are multiplied by a tensor of ones, `f`, with gradient. With `g = d loss / d logps`, the derivative
`d sum_t(g_t) / d f_t` must equal `g_t`: the coefficient of a token scales the gradient of that token and of no other.
The derivatives are taken through the loss alone, from `(B, T)` to `(B, T)`, never through the model, and without a
collective.

`B` completions, `T` completion tokens.
"""

from importlib.metadata import version

import torch


TOLERANCE = 0.05  # relative to the largest gradient; the rounding error of bfloat16 is below 0.01


class GradientCheck:
    """
    Test of one micro-batch. The loss takes `logps`, and the caller multiplies the coefficients by `factor`, ones with
    gradient; both are `(B, T)`.
    """

    def __init__(self, logps: torch.Tensor) -> None:
        self.logps = logps.view_as(logps)  # a new tensor, without hooks of FSDP or DeepSpeed
        self.factor = torch.ones_like(logps, requires_grad=True)

    def passes(self, loss: torch.Tensor, *, own: bool, per_token: bool, alone: bool) -> bool:
        """
        Raise a `RuntimeError` if the coefficients do not act on a loss, and return `False` if all gradients of the
        micro-batch are 0, which proves nothing.

        A loss of the user's `own` need only depend on the coefficients. `per_token` asks that the gradient of a token
        follows its own coefficient, and not only its completion's; `alone` says that no other term of the loss, such
        as a KL penalty, depends on the log-probabilities.
        """
        gradient, first = self._gradients(loss)
        if gradient is None or first is None:
            lost = "log-probabilities" if gradient is None else "coefficients"
            raise not_in_loss(f"its gradient does not depend on the {lost} that it was given")
        if own:
            return True
        # Alternating signs, so that effects of neighbouring tokens on one token do not cancel
        rows, columns = (torch.arange(n, device=gradient.device) for n in gradient.shape)
        place = rows[:, None] + (columns if per_token else 0)
        signs = (1.0 - 2.0 * (place % 2)).to(gradient.dtype)
        once, signed = self._derivative_by_factor(gradient), self._derivative_by_factor(gradient * signs)
        if once is None or signed is None:
            return True
        parts = torch.stack([gradient.detach(), once, signed * signs])
        if not per_token:
            parts = parts.sum(2)
        whole, once, signed = parts
        numbers = [once.abs().max(), whole.abs().max(), (signed - once).abs().max(), (whole - once).abs().max()]
        size, total, misplaced, unweighted = torch.stack(numbers).tolist()  # waits for the device, once
        if misplaced > TOLERANCE * size:
            raise not_in_loss("the coefficient of one token acts on the gradient of others")
        if alone and unweighted > TOLERANCE * total:
            raise not_in_loss(
                f"{unweighted / total:.0%} of the gradient of some token does not follow its coefficient"
            )
        return bool(size > 0)

    def _gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of a loss by log-probabilities and factor; `None` where it depends on neither."""
        if not loss.requires_grad:
            return None, None
        logps, factor = torch.autograd.grad(loss, [self.logps, self.factor], create_graph=True, allow_unused=True)
        return logps, factor

    def _derivative_by_factor(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Derivative of a gradient by the factor, `(B, T)`; `None` without a second derivative."""
        try:
            return torch.autograd.grad(gradient.sum(), self.factor, retain_graph=True, allow_unused=True)[0]
        except RuntimeError:
            return None


def not_in_loss(why: str) -> RuntimeError:
    """Error about a correction that does not act on the loss."""
    return RuntimeError(
        f"Rollout correction does not reach the loss of trl {version('trl')}: {why}. Training would go on without it, "
        "or with a part of it. If `_compute_loss` is your own, use the result of `_get_per_token_logps_and_entropies` "
        "and `inputs['advantages']` as they are, without detaching them; otherwise install a version of trl that this "
        "release was tested with, or a newer trl-rollout-corr."
    )
