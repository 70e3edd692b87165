"""
The process of a probe that has the model: one trainer and one sampler, which begin to train as in the run and stop before the
first step.

    python -m trl_rollout_corr.probe.process request.json

It writes a dump of the sampled tokens and one for each counter-experiment, and `answer.json`.
`trl_rollout_corr/probe/command.py` starts it and reads them.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import get_peft_config, get_quantization_config

from ..dumps.files import write_rows
from ..dumps.rows import make_row, on_host
from ..messages import SettingWarning, warn
from ..recording.keys import ROLLOUT_LOGPS
from ..recording.run_metadata import settings_in_effect
from ..trainers.forward_pass import Rescoring
from ..trainers.trl_checks import TRUNCATION, distorting, neutral
from .configuration import Config, Request, Trainer, check_prompts, on_cpu, prompts_of, read, shortened
from .model_changes import rescorings


Batch: TypeAlias = dict[str, torch.Tensor]
# Settings that an experiment removes, from the configuration and from `generation_kwargs`
_SAMPLING = {
    "whole_distribution": ("top_p", "top_k", "min_p"),
    "no_penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


class _Prepared(Exception):
    """Raised when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        raise _Prepared


@contextmanager
def _attached_without_weights(args: Config) -> Iterator[bool]:
    """
    Yield whether weights can be pushed. They go to a server through NCCL, which needs a GPU. Without one, keep TRL from
    refusing: the server samples with its own weights.
    """
    if args.vllm_mode != "server" or not on_cpu(args):
        yield True
        return
    from trl.generation.vllm_client import VLLMClient

    warn("Without a GPU no weights can be pushed to a server: the server samples with its first weights.")
    before = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda *args, **kwargs: None
    try:
        yield False
    finally:
        VLLMClient.init_communicator = before


class Probe:
    """
    A trainer before its first step, whose first batch can be sampled and scored several times.

    Args:
        trainer ([`RolloutCorrectedGRPOTrainer`] or [`RolloutCorrectedRLOOTrainer`]):
            The trainer, with a sampler. It begins to train here.
        pushes (`bool`, *optional*, defaults to `True`):
            Whether its weights are pushed to the sampler, as at the first step of a run.
        run ([`RolloutCorrectionConfig`], *optional*):
            Configuration of the run that is probed. By default, the configuration of the trainer.

    Attributes:
        about (`dict[str, str]`):
            Types in which trainer and sampler compute.
    """

    def __init__(self, trainer: Trainer, pushes: bool = True, run: Config | None = None) -> None:
        self.trainer, self.pushes, self.run = trainer, pushes, run or trainer.args
        trainer.add_callback(_StopBeforeTraining())
        with suppress(_Prepared):
            trainer.train()
        trainer.model_wrapped.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        self.inputs = next(iter(trainer.get_train_dataloader()))
        head = getattr(getattr(trainer._engine_config, "model_config", None), "head_dtype", None)
        self.about = {
            "trainer": type(trainer).__name__,
            **trainer._metadata(),
            **({} if head is None else {"sampler_head_dtype": str(head).removeprefix("torch.")}),
        }

    def sample(self, *, push: bool = True) -> list[Batch]:
        """Sample the first batch, with the trainer's weights or (`push=False`) the sampler's. Returns TRL's batches."""
        trainer = self.trainer
        trainer._last_loaded_step = -1 if push and self.pushes else trainer.state.global_step
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        batches: list[Batch] = trainer._buffered_inputs
        return batches

    def score(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self._forward(batch) for batch in batches]

    def _forward(self, batch: Batch) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        n = batch["completion_ids"].shape[1]
        with self.trainer._during(Rescoring(batch)):
            scored = self.trainer._get_per_token_logps_and_entropies(self.trainer.model_wrapped, ids, attention, n)
        logps: torch.Tensor = scored[0].float()
        return logps

    def score_alone(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches one sequence at a time, without padding."""
        with self.trainer.compute_loss_context_manager():
            return [self.trainer._score_alone(batch, most=len(batch["prompt_ids"])) for batch in batches]

    def write(
        self,
        folder: Path,
        batches: list[Batch],
        logps: list[torch.Tensor],
        again: list[torch.Tensor] | None = None,
    ) -> None:
        """Write a dump of scored batches."""
        rows = [
            row
            for i, batch in enumerate(batches)
            for row in self._rows(batch, logps[i], None if again is None else again[i])
        ]
        write_rows(folder, 1, 0, rows, settings_in_effect(self.run), self.about)

    def _rows(self, batch: Batch, logps: torch.Tensor, again: torch.Tensor | None) -> list[dict[str, Any]]:
        mask = self.trainer._loss_mask(batch).bool()
        columns = {
            **{name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
            "mask": mask,
            "train_logps": logps,
            "rollout_logps": batch[ROLLOUT_LOGPS].float(),
            "weights": None,
            "keep": mask,
            "coefficients": mask.float(),
            "reward": torch.zeros(len(mask)),
            "advantage": torch.zeros(len(mask)),
            "staleness": torch.zeros(len(mask)),
            "again_logps": again,
        }
        return [make_row(sequence, step=1) for sequence in on_host(columns)]

    @contextmanager
    def sampling_without(self, names: tuple[str, ...]) -> Iterator[None]:
        """The sampler without settings that distort its distribution."""
        generation = self.trainer.vllm_generation
        fields: dict[str, Any] = {name: neutral(name) for name in names if hasattr(generation, name)}
        fields["generation_kwargs"] = {k: v for k, v in generation.generation_kwargs.items() if k not in names}
        before = {name: getattr(generation, name) for name in fields}
        try:
            for name, value in fields.items():
                setattr(generation, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(generation, name, value)

    def distorts(self, names: tuple[str, ...]) -> bool:
        """True if any of these settings of the sampler distorts ratios."""
        if self.run.settings.rollout_support is not None:  # the trainer scores over the tokens that are left
            names = tuple(name for name in names if name not in TRUNCATION)
        generation = self.trainer.vllm_generation
        values = {name: getattr(generation, name, None) for name in names}
        values |= {name: value for name, value in generation.generation_kwargs.items() if name in names}
        return bool(distorting(values))


def run(probe: Probe, output: Path, *, experiments: bool = True) -> dict[str, str]:
    """
    Sample and score without a change, and with each change that needs no other engine.

    Args:
        probe ([`Probe`]):
            The trainer.
        output (`Path`):
            Folder for the dumps: `as_it_is`, and one for each experiment.
        experiments (`bool`, *optional*, defaults to `True`):
            Whether to run any.

    Returns:
        `dict[str, str]`: reasons why experiments were left out, by name.
    """
    left_out: dict[str, str] = {}
    generation = probe.trainer.vllm_generation
    if experiments and probe.pushes and not getattr(generation, "enable_sleep_mode", False):
        batches = probe.sample(push=False)
        probe.write(output / "before_the_push", batches, probe.score(batches))
    batches = probe.sample()
    again = probe.score_alone(batches)
    probe.write(output / "as_it_is", batches, probe.score(batches), again)
    if not experiments:
        return left_out
    probe.write(output / "batch_of_one", batches, again)
    for name, change in rescorings(probe.trainer, probe.about["trainer_dtype"]).items():
        try:
            with change(probe.trainer):
                probe.write(output / name, batches, probe.score(batches))
        except torch.OutOfMemoryError:
            left_out[name] = "Not enough memory."
    for name, settings in _SAMPLING.items():
        if probe.distorts(settings):
            with probe.sampling_without(settings):
                other = probe.sample()
                probe.write(output / name, other, probe.score(other))
    return left_out


def build(request: Request) -> Probe:
    """Build the trainer and the sampler of a request."""
    from datasets import Dataset

    trainer_class, run, model_args = read(request)
    source = {"revision": model_args.model_revision, "trust_remote_code": run.trust_remote_code}
    config = AutoConfig.from_pretrained(request["model"], **source)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    run.vllm_max_model_length = run.vllm_max_model_length or positions
    tokenizer = AutoTokenizer.from_pretrained(request["model"], **source, padding_side="left")
    args = shortened(run, request["completions"], request["engine"])
    n = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    prompts: list[Any] = list(islice(cycle(prompts_of(request["prompts"])), n))
    check_prompts(tokenizer, prompts, request["prompts"])
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with _attached_without_weights(args) as pushes:
        trainer = trainer_class(
            model=request["model"],
            reward_funcs=_no_reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    return Probe(trainer, pushes, run)


def _no_reward(completions: list[object], **kwargs: object) -> list[float]:
    return [0.0] * len(completions)


def main(path: str) -> None:
    """Carry out a request. Dumps and `answer.json`, with facts and warnings or an error, are written to its folder."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    output = Path(request["output"])
    answer: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer |= _answer(request, output)
        except (ValueError, TypeError, ImportError, OSError, yaml.YAMLError) as error:
            file = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else ""
            answer["error"] = " ".join((file or str(error)).split())
    answer["warnings"] = [str(warning.message) for warning in caught if warning.category is SettingWarning]
    (output / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _answer(request: Request, output: Path) -> dict[str, Any]:
    probe = build(request)
    left_out = run(probe, output, experiments=request["experiments"])
    return {"about": probe.about, "left_out": left_out, "mode": probe.trainer.vllm_mode}


if __name__ == "__main__":
    main(sys.argv[1])
