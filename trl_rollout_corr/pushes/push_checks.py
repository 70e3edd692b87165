"""
The checks of a push of weights, for all trainers. They compare what was sent with what the sampler holds, and check
that frozen weights of the trainer do not change. They change neither sampler nor trainer, and return what they found.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..correction.sums import Applied, SegmentedSums, Sums
from ..messages import notify
from ..trainers.ranks import leaving_together
from .colocated_engine import noting_cached
from .fingerprints import read_weights
from .frozen_check import FrozenCheck
from .rescore import SEE_SCORES, Rescore
from .scoring_sampler import ScoringSampler
from .server_api import AdapterCheck, has_extension, read_server
from .weight_check import WeightCheck


class Unmoved(SegmentedSums):
    """Sums of the shares of quantised tensors that did not change at a push."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"quantised": ("shares", "pushes")}

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"quantised_unmoved": s["shares"] / pushes} if (pushes := s["pushes"]) else {}


@dataclass
class Findings:
    """Findings of the checks, which [`~trl_rollout_corr.pushes.pushes.Pushes`] takes to the trainer."""

    sums: list[Sums] = field(default_factory=list)  # for the metrics
    facts: dict[str, str] = field(default_factory=dict)  # about the run, for its dump and `diagnose`
    error: Exception | None = None  # which ends the run on all ranks


class PushChecks:
    """
    Checks of the `pushes` of a trainer ([`~trl_rollout_corr.pushes.pushes.Pushes`]). `model` is the trainer's, not
    wrapped.
    """

    def __init__(self, pushes: Any, model: torch.nn.Module) -> None:
        self.pushes = pushes
        self.weights = WeightCheck(self.read_sampler, model, lambda: pushes.sampler_dtype)
        self.frozen = FrozenCheck(model, pushes.accelerator)
        self.adapters = AdapterCheck()
        self.old_cache = False  # keys and values of older weights were read
        self._warned_replicas = False
        self.sampler = ScoringSampler(pushes)
        self.rescore = Rescore(pushes, self.sampler)

    def noting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights on their way to the sampler, with fingerprints taken."""
        return self.weights.noting(weights)

    def before(self) -> None:
        """Prepare the checks of a push. A `RuntimeError` if the previous one changed a quantised base."""
        self.frozen.before()

    def after(self, step: int, *, announced: bool) -> Findings:
        """
        Check a push after optimizer step `step`. `announced` is true if the run announced that the sampler gets older
        weights than the trainer's. All ranks must call it.
        """
        found = Findings()
        self.frozen.after(step)
        if self.frozen.changed:
            found.facts["frozen_base"] = ", ".join(self.frozen.changed[:3])
        try:
            with leaving_together(self.pushes.accelerator):
                found.sums += self._judge(step, announced=announced)
        except Exception as error:
            found.error = error
            return found
        self.rescore.pushed(announced=announced)
        found.sums += self.rescore.take()
        return found

    def _judge(self, step: int, *, announced: bool) -> list[Sums]:
        """Sums of a push of weights; none of an adapter. An error if the sampler has other weights or another one."""
        folder = self.pushes.folder_of_adapter()
        if folder is None:
            self.weights.judge(step, announced=announced, doubt=self.pushes.doubt)
            return [self._count_unmoved()]
        if self.pushes.server is not None:
            name = self.pushes.served_model
            self.adapters.pushed(self.pushes.server, name, folder, self.weights.trained(), step)
        return []

    def watch_cache(self, step: int, take: Callable[[Findings], None]) -> None:
        """Let `take` have what the first request after the push at optimizer step `step` tells of old prefixes."""
        if self.pushes.engine is not None and not self.old_cache:
            noting_cached(self.pushes.engine.llm, lambda tokens: take(self._old_prefixes(tokens, step)))

    def _old_prefixes(self, tokens: int, step: int) -> Findings:
        """Report, once, that the first request after the push at optimizer step `step` read the cache of prefixes."""
        self.old_cache = True
        notify(
            f"After the push at optimizer step {step}, vLLM took {tokens} tokens of its first prompt from its cache "
            "of prefixes, and nothing but requests from before the push can have put them there. Their keys and "
            "values are of older weights, and the gap grows. Call `reset_prefix_cache()` of the engine after each "
            "push, as TRL's `sync_weights` does, or set `rollout_engine_kwargs: {enable_prefix_caching: false}`."
        )
        # diagnosis takes it for a proof, so it carries what it rests on
        evidence = (
            f"{tokens} tokens of the prompt of the first request after the push at step {step}, which asked for one "
            "completion while no other request was under way"
        )
        return Findings(facts={"old_prefixes": evidence})

    def keep(self, batch: dict[str, Any], mask: torch.Tensor, sampled: torch.Tensor) -> Findings:
        """
        Take completions of a batch that was just generated, to score them once more after a push. `mask` is non-zero
        on the tokens of the loss, and `sampled` holds the log-probabilities of the sampler, both `(B, T)`.
        """
        if "prompt_ids" in batch:
            self.rescore.keep(batch, mask, sampled)
        return Findings([*self.rescore.take()])

    def read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        """
        [`~trl_rollout_corr.pushes.fingerprints.read_weights`] applied to the sampler; `None` if it cannot be read.
        """
        generation = self.pushes.engine
        if generation is not None:
            worker = generation.llm.llm_engine.model_executor.driver_worker
            return read_weights(worker.get_model(), names, getattr(generation, "tp_group", None))
        config = self.pushes.engine_config
        if self.pushes.server is None or not has_extension(config):
            return None
        if (n := self.sampler.replicas) > 1 and not self._warned_replicas:
            self._warned_replicas = True
            notify(
                f"The first of {n} replicas of the server is the only one whose weights are compared bit by bit, "
                f"because vLLM reads no other. `fresh_k3_kl` asks all of them in turns. {SEE_SCORES}"
            )
        return read_server(self.pushes.server, names)

    def _count_unmoved(self) -> Unmoved:
        """Share of quantised tensors that did not change. Every rank counts, as sums are gathered."""
        share = self.weights.unmoved
        seen = [0.0, 0.0] if share is None else [share, 1.0]
        return Unmoved.of({"quantised": torch.tensor(seen, device=self.pushes.accelerator.device)})
