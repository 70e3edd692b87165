"""
The checks of a push of weights, for all trainers. They compare what was sent with what the sampler holds, and check
that frozen weights of the trainer do not change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..correction.sums import Applied, SegmentedSums
from ..messages import notify
from ..trainers.ranks import largest, leaving_together
from .colocated_engine import noting_cached
from .fingerprints import read_weights
from .frozen_check import FrozenCheck
from .rescore import SEE, Rescore
from .scoring_sampler import ScoringSampler
from .server_api import AdapterCheck, has_extension, read_server
from .weight_check import WeightCheck


class Unmoved(SegmentedSums):
    """Sums of the shares of quantised tensors that did not change at a push."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"quantised": ("shares", "pushes")}

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"quantised_unmoved": s["shares"] / pushes} if (pushes := s["pushes"]) else {}


class PushChecks:
    """
    Checks of the `pushes` of a trainer ([`~trl_rollout_corr.pushes.pushes.Pushes`]). `model` is the trainer's, not
    wrapped.
    """

    def __init__(self, pushes: Any, model: torch.nn.Module) -> None:
        self.pushes, self.trainer = pushes, pushes.trainer
        self.weights = WeightCheck(self.read_sampler, model, lambda: pushes.sampler_dtype)
        self.frozen = FrozenCheck(model, pushes.trainer.accelerator)
        self.adapters = AdapterCheck()
        self.old_cache = False  # keys and values of older weights were read
        self._warned_replicas = False
        self._unmoved: list[Unmoved] = []  # since the latest batch
        self.sampler = ScoringSampler(pushes)
        self.rescore = Rescore(pushes, self.sampler)

    def noting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights on their way to the sampler, with fingerprints taken."""
        return self.weights.noting(weights)

    @contextmanager
    def pushing(self, folder_of_adapter: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
        """
        Context of a push of weights that is checked afterwards. `folder_of_adapter` returns, after the push, the
        folder of the adapter that was pushed instead of weights.
        """
        trainer = self.trainer
        step = trainer.state.global_step
        self.frozen.before()
        yield
        self.frozen.after(step)
        if self.frozen.changed:
            trainer._about["frozen_base"] = ", ".join(self.frozen.changed[:3])  # for the dump
        # a sampler may hold older weights on purpose, and perhaps only one rank says so
        announced = bool(largest(trainer.accelerator, int(trainer.rollout_step not in (None, step))))
        folder = folder_of_adapter()
        with leaving_together(trainer.accelerator):
            if folder is None:
                self.weights.judge(step, announced=announced, doubt=self.pushes.doubt)
                self._count_unmoved()
            elif self.pushes.server is not None:
                name = self.pushes.served_model
                self.adapters.pushed(self.pushes.server, name, folder, self.weights.trained(), step)
        self.rescore.pushed(announced=announced)
        if self.pushes.engine is not None and not self.old_cache:
            noting_cached(self.pushes.engine.llm, lambda tokens: self._tell_about_cache(tokens, step))

    def _tell_about_cache(self, tokens: int, step: int) -> None:
        """Report, once, that the first request after the push at optimizer step `step` read the cache of prefixes."""
        self.old_cache = True
        # diagnosis takes it for a proof, so it carries what it rests on
        self.trainer._about["old_prefixes"] = (
            f"{tokens} tokens of the prompt of the first request after the push at step {step}, which asked for one "
            "completion while no other request was under way"
        )
        notify(
            f"After the push at optimizer step {step}, vLLM took {tokens} tokens of its first prompt from its cache "
            "of prefixes, and nothing but requests from before the push can have put them there. Their keys and "
            "values are of older weights, and the gap grows. Call `reset_prefix_cache()` of the engine after each "
            "push, as TRL's `sync_weights` does, or set `rollout_engine_kwargs: {enable_prefix_caching: false}`."
        )

    def keep(self, batch: dict[str, Any], sampled: torch.Tensor) -> None:
        """
        Take completions of a batch that was just generated, to score them once more after a push. `sampled`, `(B, T)`,
        holds the log-probabilities of the sampler.
        """
        if "prompt_ids" in batch:
            self.rescore.keep(batch, self.trainer._loss_mask(batch), sampled)
        # A push between two steps counts for the second one: the alarm has read the first one before
        for counted in (self._unmoved, self.rescore.counted):
            for sums in counted:
                self.trainer._observer.add("train", sums)
            counted.clear()

    def read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        """
        [`~trl_rollout_corr.pushes.fingerprints.read_weights`] applied to the sampler; `None` if it cannot be
        read.
        """
        generation = self.pushes.engine
        if generation is not None:
            worker = generation.llm.llm_engine.model_executor.driver_worker
            return read_weights(worker.get_model(), names, getattr(generation, "tp_group", None))
        config = self.trainer._engine_config
        if self.pushes.server is None or not has_extension(config):
            return None
        if (n := self.sampler.replicas) > 1 and not self._warned_replicas:
            self._warned_replicas = True
            notify(
                f"The first of {n} replicas of the server is the only one whose weights are compared bit by bit, "
                f"because vLLM reads no other. `fresh_k3_kl` asks all of them in turns. {SEE}"
            )
        return read_server(self.pushes.server, names)

    def _count_unmoved(self) -> None:
        """Count the share of quantised tensors that did not change. Every rank adds, as sums are gathered."""
        share = self.weights.unmoved
        seen = [0.0, 0.0] if share is None else [share, 1.0]
        self._unmoved.append(Unmoved.of({"quantised": torch.tensor(seen, device=self.trainer.accelerator.device)}))
