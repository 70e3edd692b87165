"""Check that a push of weights leaves the frozen weights of the trainer as they are."""

from typing import Any

import torch

from ..messages import capitalized, notify
from ..trainers.ranks import largest
from .fingerprints import QUANTISED, READABLE, fingerprint


MOST = 8  # weights to fingerprint
SEE_FROZEN = "See `trl-rollout-corr docs pushes#frozen-weights-change`."


class FrozenCheck:
    """
    Compares fingerprints of some frozen weights before and after each push.

    Training does not change them, and a push should not. TRL merges an adapter into them and unmerges it, which rounds
    twice. In bfloat16 the base drifts, and a quantised base is quantised again from the result. Sampler and trainer
    share the drift, so no gap between them shows it.

    A change is reported once, with names. Where the base is quantised, [`FrozenCheck.before`] raises an error at the
    next push. `model` is the trainer's, not wrapped.
    """

    def __init__(self, model: torch.nn.Module, accelerator: Any) -> None:
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        # weights under an adapter first, because a merge changes them
        under = {name: p for name, p in frozen.items() if ".base_layer." in name} or frozen
        names = [*under]
        self._chosen = {name: under[name] for name in names[:: max(1, len(names) // MOST)][:MOST]}
        self._accelerator = accelerator
        self._quantised = any(p.dtype in QUANTISED or hasattr(p, "quant_state") for p in self._chosen.values())
        self._before: dict[str, torch.Tensor] = {}
        self.changed: list[str] = []
        self._ended = ""

    def before(self) -> None:
        """Take fingerprints before a push. A `RuntimeError` if the previous push changed a quantised base."""
        if self._ended:
            raise RuntimeError(self._ended)
        self._before = {} if self.changed else self._read()

    def after(self, step: int) -> None:
        """Report frozen weights that a push after optimizer step `step` changed."""
        if self.changed or not self._chosen:
            return
        now = self._read()
        names = [name for name, x in self._before.items() if name in now and not torch.equal(now[name], x)]
        if not largest(self._accelerator, len(names)):
            return
        self.changed = names or ["weights of another rank"]
        listed = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
        what = (
            f"the push after optimizer step {step} has changed {len(names)} of {len(self._chosen)} frozen weights of "
            f"the trainer that were compared ({listed})"
        )
        if self._quantised:
            self._ended = (
                f"{capitalized(what)}. The base is quantised, and the adapter was merged into it and taken away "
                "again, which quantises it twice: each push makes the model worse. Load the model without "
                "`quantization_config`, or train with `RolloutCorrectedAsyncGRPOTrainer` and a server that loads the "
                f"adapter itself. {SEE_FROZEN}"
            )
            notify(self._ended, error=True)
            return
        notify(
            f"Perhaps something else writes to the base, such as a callback or an offloaded model. Otherwise {what}, "
            "because an adapter that is merged and taken away again leaves the rounding of two additions behind: "
            "sampler and trainer share the drift, but the saved adapter will be loaded on the unchanged base. Load "
            f"the model in float32, or push less often. {SEE_FROZEN}"
        )

    def _read(self) -> dict[str, torch.Tensor]:
        """Fingerprints of the chosen weights, or of this rank's parts of them."""
        return {
            name: fingerprint(part)
            for name, p in self._chosen.items()
            if (part := _own_part(p)).numel() and part.dtype in READABLE | QUANTISED and not part.is_meta  # offloaded
        }


def _own_part(parameter: Any) -> torch.Tensor:
    """The part of a parameter that this rank holds, with or without FSDP or ZeRO."""
    if hasattr(parameter, "to_local"):
        parameter = parameter.to_local()
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.detach()
