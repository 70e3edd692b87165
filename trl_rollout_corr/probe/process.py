"""
The process of a probe that has the model: one trainer and one sampler, which begin to train as in the run and stop before the
first step.

    python -m trl_rollout_corr.probe.process request.json

It writes a dump of the sampled tokens and one for each counter-experiment, and `answer.json`. A request is the `run` of
`probe` (`trl_rollout_corr/probe/command.py`), with `engine` (arguments besides those of the run), `experiments` (whether to
make any) and `output` (a folder).
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import get_peft_config, get_quantization_config

from ..arrival.server import without_dropout
from ..dumps.files import write_rows
from ..dumps.rows import make_row, on_host
from ..messages import SettingWarning
from ..recording.keys import ROLLOUT_LOGPS
from ..recording.run_metadata import dropout_of, settings_in_effect
from ..trainers.trl_checks import TRUNCATION, distorting_options, neutral
from .configuration import Config, Trainer, prompts_of, read, shortened


Batch: TypeAlias = dict[str, torch.Tensor]
# Settings that an experiment removes, from the configuration and from `generation_kwargs`
_SAMPLING = {
    "whole_distribution": TRUNCATION,
    "no_penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


class _Prepared(Exception):
    """Raised when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        raise _Prepared


class Probe:
    """
    A trainer before its first step, whose first batch can be sampled and scored several times. `run` is the configuration of
    the run that is probed, by default that of the trainer.
    """

    def __init__(self, trainer: Trainer, run: Config | None = None) -> None:
        self.trainer, self.run = trainer, run or trainer.args
        trainer.add_callback(_StopBeforeTraining())
        with suppress(_Prepared):
            trainer.train()
        trainer.model_wrapped.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        self.inputs = next(iter(trainer.get_train_dataloader()))
        self.about = {"trainer": type(trainer).__name__, **trainer._metadata()}

    def sample(self, *, push: bool = True) -> list[Batch]:
        """Sample the first batch, with the trainer's weights or (`push=False`) the sampler's. Returns TRL's batches."""
        trainer = self.trainer
        trainer._last_loaded_step = -1 if push else trainer.state.global_step
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        batches: list[Batch] = trainer._buffered_inputs
        return batches

    def score(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self.trainer._score_again(batch).float() for batch in batches]

    def score_alone(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches one sequence at a time, without padding."""
        with self.trainer.compute_loss_context_manager():
            return [self.trainer._score_alone(batch, most=len(batch["prompt_ids"])) for batch in batches]

    def write(self, folder: Path, batches: list[Batch], logps: list[torch.Tensor], again: Any = None) -> None:
        """Write a dump of batches with log-probabilities of the trainer, `(B, T)` each, and those of single sequences."""
        rows: list[dict[str, Any]] = []
        for i, batch in enumerate(batches):
            mask = self.trainer._loss_mask(batch).bool()
            none = torch.zeros(len(mask))
            columns = {
                **{name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
                **{"mask": mask, "keep": mask, "coefficients": mask.float()},
                **{"reward": none, "advantage": none, "staleness": none},
                "train_logps": logps[i],
                "rollout_logps": batch[ROLLOUT_LOGPS].float(),
                "again_logps": None if again is None else again[i],
            }
            rows += [make_row(sequence, step=1) for sequence in on_host(columns)]
        write_rows(folder, 1, 0, rows, settings_in_effect(self.run), self.about)

    def sampling_without(self, names: tuple[str, ...]) -> AbstractContextManager[None]:
        """The sampler without settings that distort its distribution."""
        generation = self.trainer.vllm_generation
        kwargs = {name: value for name, value in generation.generation_kwargs.items() if name not in names}
        fields = {name: neutral(name) for name in names if hasattr(generation, name)}
        return _replaced(generation, **fields, generation_kwargs=kwargs)


# Changes of a trainer -----------------------------------------------------------------------------------------------------


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes with other values, and afterwards as before."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def head_in_float32(trainer: Trainer) -> Iterator[None]:
    """The head in float32, outside autocast. An embedding with the same weight is not changed."""
    model = _causal_model(trainer)
    head = model.get_output_embeddings()

    def in_float32(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), head.weight, head.bias)

    tensors = {name: x for name in ("weight", "bias") if (x := getattr(head, name)) is not None}
    copies = {name: torch.nn.Parameter(x.detach().float(), requires_grad=False) for name, x in tensors.items()}
    with _replaced(head, **copies, forward=in_float32), _replaced(model, forward=model.forward):
        with suppress(ImportError):  # a release of TRL without a fused head
            from trl.trainer.utils import add_fused_lm_head

            outputs = ("log_probs", "entropy")
            add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=True, outputs=outputs)
        yield


@contextmanager
def all_in_float32(trainer: Trainer) -> Iterator[None]:
    """The whole model in float32, without autocast, which Accelerate puts around its forward pass, and TRL around its call."""
    model: Any = trainer._bare(trainer.model)
    forward = model.__dict__.get("_original_forward", model.forward)
    with ExitStack() as stack:
        stack.enter_context(_replaced(trainer.accelerator, autocast=nullcontext))
        stack.enter_context(_replaced(model, forward=forward))
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                stack.enter_context(_replaced(tensor, data=tensor.data.float()))
        yield


def _causal_model(trainer: Trainer) -> Any:
    """The model with the head, without its wrappers."""
    model: Any = trainer._bare(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def rescorings(trainer: Trainer, dtype: str) -> dict[str, Callable[[Trainer], AbstractContextManager[None]]]:
    """Experiments that the trainer, which computes in `dtype`, can make alone: a context manager by name."""
    model, low = _causal_model(trainer), dtype in ("bfloat16", "float16")
    changes: dict[str, Callable[[Trainer], AbstractContextManager[None]]] = {}
    if any(dropout_of(model)):
        changes["dropout_off"] = lambda trainer: without_dropout(trainer.model_wrapped)
    plain = type(model.get_output_embeddings()) is torch.nn.Linear  # neither quantized nor with an adapter
    if low and plain and not getattr(trainer.args, "cast_lm_head_to_fp32", False):
        changes["float32_head"] = head_in_float32
    if low and not getattr(model, "is_quantized", False):
        changes["float32_trainer"] = all_in_float32
    return changes


# A request ----------------------------------------------------------------------------------------------------------------


def run(probe: Probe, output: Path, *, experiments: bool = True) -> dict[str, str]:
    """
    Sample and score without a change, and with each change that needs no other engine. Dumps are written to the folder:
    `as_it_is`, and one for each experiment. Returns reasons why experiments were left out, by name.
    """
    left_out: dict[str, str] = {}
    if experiments and not getattr(probe.trainer.vllm_generation, "enable_sleep_mode", False):
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
    # with `rollout_support`, the trainer scores over the tokens that are left
    replayed = () if probe.run.settings.rollout_support is None else TRUNCATION
    acting = distorting_options(probe.run).keys() - {*replayed}
    for name, settings in _SAMPLING.items():
        if acting & {*settings}:
            with probe.sampling_without(settings):
                other = probe.sample()
                probe.write(output / name, other, probe.score(other))
    return left_out


def build(request: Mapping[str, Any]) -> Probe:
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
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    trainer = trainer_class(
        model=request["model"],
        reward_funcs=_no_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    return Probe(trainer, run)


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
            probe = build(request)
            left_out = run(probe, output, experiments=request["experiments"])
            answer |= {"about": probe.about, "left_out": left_out, "mode": probe.trainer.vllm_mode}
        except (ValueError, TypeError, ImportError, OSError, yaml.YAMLError) as error:
            file = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else ""
            answer["error"] = " ".join((file or str(error)).split())
    answer["warnings"] = [str(warning.message) for warning in caught if warning.category is SettingWarning]
    (output / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
