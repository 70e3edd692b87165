"""
Pushes of weights from a trainer to its sampler: one object for each trainer, and the only one that touches it.

A push leaves the base of an adapter as it is, and the checks of pushes
([`~trl_rollout_corr.pushes.push_checks.PushChecks`]) see it, unless `rollout_monitor` is null. The checks return what
they found. A run without adapters and checks does not import them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from ..correction.sums import Sums
from ..settings.effects import distortions
from ..trainers.forward_pass import evaluating
from ..trainers.keys import ROLLOUT_LOGPS
from ..trainers.metadata import engine_metadata
from ..trainers.ranks import largest


if TYPE_CHECKING:
    from .push_checks import Findings, PushChecks


NamedWeights = Iterable[tuple[str, torch.Tensor]]


@contextmanager
def sending(owner: Any, method: str, change: Callable[[NamedWeights], NamedWeights]) -> Iterator[None]:
    """Context in which a method of the owner, if it exists, returns other weights to push."""
    original = getattr(owner, method, None)
    if original is None:
        yield
        return
    with patch.object(owner, method, lambda *args, **kwargs: change(original(*args, **kwargs))):
        yield


def refuse_packed_base(model: Any, mode: str) -> None:
    """Refuse a server for an adapter on a packed base (QLoRA), whose weights it cannot take."""
    packed = [name for name, p in model.named_parameters() if not (p.is_floating_point() or p.requires_grad)]
    if mode == "server" and hasattr(model, "merge_adapter") and packed:
        raise ValueError(
            f"The base of the adapter is quantised (`{packed[0]}` and {len(packed) - 1} other weights are packed), "
            "and a server cannot read packed weights in a push: load the model without `quantization_config`."
        )


class Pushes:
    """
    Pushes of any trainer. Subclasses know the address of the server, and the name of the policy there.

    Attributes:
        checks (`PushChecks`, *optional*):
            Checks of pushes; `None` if `rollout_monitor` is null.
        doubt (`str`):
            A reason why the weights of the sampler may not matter, or an empty text.
    """

    doubt = ""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.checks = self._new_checks() if trainer._settings.rollout_monitor is not None else None
        self._found: list[Sums] = []  # since the latest batch

    def _new_checks(self) -> "PushChecks":
        from .push_checks import PushChecks

        return PushChecks(self, self.bare_model)

    # The sampler -----------------------------------------------------------------------------------------------------

    @property
    def server(self) -> str | None:
        """Address of the server, on the main process; `None` without a server."""
        raise NotImplementedError

    @property
    def served_model(self) -> str:
        """Name of the policy on the server."""
        raise NotImplementedError

    @property
    def engine(self) -> Any:
        """A colocated vLLM; `None` without one."""
        return None

    @property
    def engine_config(self) -> Any:
        """Configuration of vLLM, an object or a server's mapping; `None` if unknown."""
        return self.trainer._engine_config

    @property
    def sampler_dtype(self) -> str:
        """Type of the weights of the sampler."""
        return engine_metadata(self.engine_config).get("sampler_dtype", "bfloat16")

    @property
    def samples_unchanged(self) -> bool:
        """True if neither temperature nor options of sampling change the log-probabilities."""
        args = self.trainer.args
        return not self.doubt and self.trainer.temperature == 1.0 and not distortions(vars(args))

    # The trainer -----------------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Any:
        """Accelerator of the trainer."""
        return self.trainer.accelerator

    @property
    def bare_model(self) -> Any:
        """Model of the trainer, without its wrappers."""
        return self.trainer._bare(self.trainer.model)

    @property
    def reads_images(self) -> bool:
        """True if prompts may have images."""
        return hasattr(self.trainer.processing_class, "image_processor")

    # A push ----------------------------------------------------------------------------------------------------------

    def leaving_base_alone(self, model: Any) -> Any:
        """Context in which a push of an adapter changes no weight of its base."""
        if not hasattr(model, "merge_adapter"):
            return nullcontext()
        from .merged_adapters import leaving_base_alone

        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return leaving_base_alone(model, getattr(plugin, "fsdp_version", None))

    def noting(self, weights: NamedWeights) -> NamedWeights:
        """Weights on their way to the sampler, shown to the checks."""
        return weights if self.checks is None else self.checks.noting(weights)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Context of a push that is checked afterwards."""
        if self.checks is None:
            yield
            return
        step = self.trainer.state.global_step
        self.checks.before()
        yield
        # a sampler may hold older weights on purpose, and perhaps only one rank says so
        announced = bool(largest(self.accelerator, int(self.trainer.rollout_step not in (None, step))))
        self._take(self.checks.after(step, announced=announced))
        self.checks.watch_cache(step, self._take)

    def folder_of_adapter(self) -> Path | None:
        """Folder with the adapter that was pushed instead of weights; `None` if weights were."""
        return None

    def keep(self, batch: dict[str, Any], mask: torch.Tensor) -> None:
        """
        Let the checks score completions of a batch once more, and count what they found since the one before. `mask`,
        `(B, T)`, is non-zero on the tokens of the loss.
        """
        if self.checks is None or not self.trainer.model.training:
            return
        self._take(self.checks.keep(batch, mask, batch[ROLLOUT_LOGPS]))
        # A push between two steps counts for the second one: the alarm has read the first one before
        for sums in self._found:
            self.trainer._observer.add("train", sums)
        self._found.clear()

    def _take(self, found: "Findings") -> None:
        """Tell the trainer what the checks found. Its metrics have to wait for a batch."""
        self.trainer._about.update(found.facts)  # in place, for the dump
        self._found += found.sums
        if found.error is not None:
            raise found.error

    # Texts to score once more ----------------------------------------------------------------------------------------

    scores_at_once = True  # a batch that was just generated is scored with the weights of the latest push

    def score(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        """Log-probabilities, `(n,)`, of the last tokens of `ids`, `(1, S)`, at temperature 1."""
        raise NotImplementedError

    def score_in_evaluation(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        """The same, on the CPU, by a model in evaluation mode. All ranks call it equally often."""
        model = self.trainer.model_wrapped
        # a forward pass of DDP's wrapper sends buffers, for which the others would wait if it failed on one rank
        model = model.module if isinstance(model, DistributedDataParallel) else model
        with evaluating(self.bare_model), patch.object(self.trainer, "model_wrapped", model):
            return self.score(ids, n).float().cpu()
