"""
A process of a probe: one trainer and one sampler, which begin to train as in the run and stop before the first step.
They answer one request (`tools/probe/set_up.py`). The trainer need not score the tokens of another process again if
all settings concern vLLM.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from transformers import TrainerCallback
from trl.trainer.utils import split_tensor_dict

from ...pushes.colocated_engine import score_in_process
from ...pushes.reloading import reload
from ...settings.effects import distortions
from ...settings.resolve import Settings
from ...trainers.forward_pass import evaluating
from ...trainers.keys import ROLLOUT_LOGPS
from ...trainers.model_checks import dropout_of
from ..diagnosis import DumpedTokens
from ..dump.in_effect import settings_in_effect
from ..dump.rows import make_row, on_host, tokens_of
from ..dump.sequences import Sequences
from .parts import Measured, ProcessFacts, Side
from .set_up import Config, Trainer, build_trainer


TrlBatch: TypeAlias = dict[str, torch.Tensor]
OF_VLLM = {"rollout_engine_kwargs"}  # fields that the trainer does not read


class _Prepared(Exception):
    """Raised when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        raise _Prepared


class Probe:
    """
    A trainer before its first step, which can sample and score its first batch repeatedly. `run` is the configuration
    before it was shortened for the probe, and `settings` are those in effect in it.
    """

    def __init__(self, trainer: Trainer, run: Config, settings: Settings) -> None:
        self.trainer, self.run, self.settings = trainer, run, settings
        trainer.add_callback(_StopBeforeTraining())
        with suppress(_Prepared):
            trainer.train()
        trainer.model_wrapped.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        self.inputs = next(iter(trainer.get_train_dataloader()))
        self.about = {"trainer": type(trainer).__name__, **trainer._metadata()}

    def sample(self) -> list[TrlBatch]:
        """Push the weights and sample the first batch. Returns TRL's batches."""
        trainer = self.trainer
        trainer._last_loaded_step = -1
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        return list(trainer._buffered_inputs)

    def score(self, batches: list[TrlBatch]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self.trainer._score_again(batch).float() for batch in batches]

    def score_alone(self, batches: list[TrlBatch]) -> list[torch.Tensor]:
        """Score batches one sequence at a time, without padding."""
        with self.trainer.compute_loss_context_manager():
            return [self.trainer._score_alone(batch, most=len(batch["prompt_ids"])) for batch in batches]

    def observe(self, batches: list[TrlBatch], logps: list[torch.Tensor], again: list[torch.Tensor]) -> DumpedTokens:
        """Batches for a diagnosis, with log-probabilities of the trainer, `(B, T)` each, and of single sequences."""
        rows: list[dict[str, Any]] = []
        for batch, ours, alone in zip(batches, logps, again, strict=True):
            mask = self.trainer._loss_mask(batch).bool()
            columns = {
                "mask": mask,
                "train_logps": ours,
                "rollout_logps": batch[ROLLOUT_LOGPS].float(),
                "again_logps": alone,
                "keep": mask,
                "coefficients": mask.float(),
                **dict.fromkeys(("reward", "advantage", "staleness"), torch.zeros(len(mask))),
            }
            rows += [make_row(sequence, step=1) for sequence in on_host({**tokens_of(batch), **columns})]
        written = settings_in_effect(self.run, self.settings)
        return DumpedTokens(Sequences.from_rows(rows), self.settings, written, self.about)


def run(probe: Probe, output: Path, batches: list[TrlBatch] | None = None, *, scoring: bool = True) -> Measured:
    """
    Sample unless batches are given, and score the tokens with both sides, or without `scoring` with vLLM alone. Writes
    sampled tokens.
    """
    first = batches is None
    batches = probe.sample() if batches is None else batches
    scored = {Side.SAMPLED: [batch[ROLLOUT_LOGPS] for batch in batches]}
    if scoring:
        scored |= score_with_trainer(probe, batches, first=first)
    logps = {side: flatten_tokens(batches, found) for side, found in scored.items()}
    generation, temperature = probe.trainer.vllm_generation, probe.trainer.args.temperature
    if first:
        torch.save(batches, output / "tokens.pt")
        logps[Side.PUSHED] = score_with_sampler(generation, batches, temperature)
        load_files(generation.llm)
    logps[Side.SAMPLER] = score_with_sampler(generation, batches, temperature)
    observed = probe.observe(batches, scored[Side.AS_IT_IS], scored[Side.ALONE]) if first else None
    facts: ProcessFacts = {
        "observed": observed,
        "about": probe.about,
        "options": [*distortions(vars(probe.run))],
        "engine_kwargs": probe.settings.rollout_engine_kwargs or {},
    }
    return Measured(logps, facts)


def score_with_trainer(probe: Probe, batches: list[TrlBatch], *, first: bool) -> dict[Side, list[torch.Tensor]]:
    """Log-probabilities of the trainer, `(B, T)` per batch. Only the `first` process scores in every way."""
    scored = {Side.AS_IT_IS: probe.score(batches)}
    model = probe.trainer.model_wrapped
    has_dropout = any(dropout_of(probe.trainer._bare(probe.trainer.model)))
    with evaluating(model) if has_dropout else nullcontext():
        if first and has_dropout:
            scored[Side.NO_DROPOUT] = probe.score(batches)
        if first:
            rows = [split_tensor_dict(batch, len(batch["prompt_ids"])) for batch in batches]
            scored[Side.ONE_ROW] = [torch.cat(probe.score(batch)) for batch in rows]
        scored[Side.ALONE] = probe.score_alone(batches)
    return scored


def flatten_tokens(batches: list[TrlBatch], values: list[torch.Tensor]) -> np.ndarray:
    """Values of the tokens of all completions, `(N,)`, from one tensor, `(B, T)`, per batch."""
    masks = [batch["completion_mask"].bool() for batch in batches]
    tokens = [x[mask].float() for x, mask in zip(values, masks, strict=True)]
    return np.asarray(torch.cat(tokens).cpu().numpy())


def load_files(llm: Any) -> None:
    """Load the weights of the files into vLLM again, replacing the pushed ones."""
    with torch.no_grad():
        reload(llm.llm_engine.model_executor.driver_worker)
    llm.reset_prefix_cache()


def score_with_sampler(generation: Any, batches: Sequence[TrlBatch], temperature: float) -> np.ndarray:
    """Log-probabilities, `(N,)`, of tokens that TRL's engine reads as prompt."""
    model = generation.llm.llm_engine.model_executor.driver_worker.get_model()
    plain = model.compute_logits
    texts: list[list[int]] = []
    lengths: list[int] = []
    for batch in batches:
        ids, masks = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        texts += [row[mask.bool()].tolist() for row, mask in zip(ids, masks, strict=True)]
        lengths += batch["completion_mask"].sum(1).tolist()
    # vLLM divides the logits of sampled tokens by the temperature, but not of given ones
    with patch.object(model, "compute_logits", lambda *args, **kwargs: plain(*args, **kwargs).float() / temperature):
        found = score_in_process(generation, texts)
    return np.array([x for logps, n in zip(found, lengths, strict=True) for x in logps[len(logps) - n :]], np.float32)


def build(request: Mapping[str, Any]) -> Probe:
    """Build the trainer and the sampler of a request."""
    return Probe(*build_trainer(request))


def carry_out(request: Mapping[str, Any]) -> Measured:
    """The answer to a request, which needs a separate process."""
    batches = torch.load(request["tokens"], weights_only=False) if "tokens" in request else None
    scoring = batches is None or not request["changes"].keys() <= OF_VLLM
    return run(build(request), Path(request["output"]), batches, scoring=scoring)
