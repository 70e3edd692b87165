"""
A process of a probe: one trainer and one sampler, which begin to train as in the run and stop before the first step. A request
is the `run` of `probe` (`trl_rollout_corr/probe/command.py`) with `output` (a folder), `settings` (fields that differ from the
run), and perhaps `tokens` (a file of another process).
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import get_peft_config, get_quantization_config
from trl.trainer.utils import split_tensor_dict

from ..arrival.server import without_dropout
from ..arrival.worker import reload
from ..dumps.files import write_rows
from ..dumps.rows import make_row, on_host
from ..recording.keys import ROLLOUT_LOGPS
from ..recording.run_metadata import dropout_of, settings_in_effect
from ..trainers.trl_checks import distorting_options
from .configuration import Config, Trainer, prompts_of, read, shortened
from .parts import Scored


Batch: TypeAlias = dict[str, torch.Tensor]
_LENGTH = 16  # tokens that are sampled to measure the time


class _Prepared(Exception):
    """Raised when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        raise _Prepared


class Probe:
    """A trainer before its first step, whose first batch can be sampled and scored several times. `run`: without a probe."""

    def __init__(self, trainer: Trainer, run: Config | None = None) -> None:
        self.trainer, self.run = trainer, run or trainer.args
        trainer.add_callback(_StopBeforeTraining())
        with suppress(_Prepared):
            trainer.train()
        trainer.model_wrapped.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        self.inputs = next(iter(trainer.get_train_dataloader()))
        self.about = {"trainer": type(trainer).__name__, **trainer._metadata()}

    def sample(self) -> list[Batch]:
        """Push the weights and sample the first batch. Returns TRL's batches."""
        trainer = self.trainer
        trainer._last_loaded_step = -1
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        return list(trainer._buffered_inputs)

    def score(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self.trainer._score_again(batch).float() for batch in batches]

    def score_alone(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches one sequence at a time, without padding."""
        with self.trainer.compute_loss_context_manager():
            return [self.trainer._score_alone(batch, most=len(batch["prompt_ids"])) for batch in batches]

    def write(self, folder: Path, batches: list[Batch], logps: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        """Write a dump of batches with log-probabilities of the trainer, `(B, T)` each, and those of single sequences."""
        rows: list[dict[str, Any]] = []
        for batch, ours, alone in zip(batches, logps, again, strict=True):
            mask = self.trainer._loss_mask(batch).bool()
            none = torch.zeros(len(mask))
            columns = {
                **{name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
                **{"mask": mask, "keep": mask, "coefficients": mask.float()},
                **{"reward": none, "advantage": none, "staleness": none},
                **{"train_logps": ours, "rollout_logps": batch[ROLLOUT_LOGPS].float(), "again_logps": alone},
            }
            rows += [make_row(sequence, step=1) for sequence in on_host(columns)]
        write_rows(folder, 1, 0, rows, settings_in_effect(self.run), self.about)


def run(probe: Probe, output: Path, batches: list[Batch] | None = None) -> Scored:
    """Sample, unless there are batches, and score the tokens with both sides. Writes tokens that were sampled, and a dump."""
    trainer, first = probe.trainer, batches is None
    batches = probe.sample() if batches is None else batches
    scored, costs = {"sampled": [batch[ROLLOUT_LOGPS] for batch in batches]}, {}

    def add(name: str, score: Callable[[list[Batch]], list[torch.Tensor]]) -> None:
        start = time.perf_counter()
        scored[name] = score(batches)
        costs[name] = time.perf_counter() - start

    add("as_it_is", probe.score)
    off = any(dropout_of(trainer._bare(trainer.model)))
    if first and off:
        add("again", probe.score_alone)
    with without_dropout(trainer.model_wrapped) if off else nullcontext():
        if first and off:
            add("no_dropout", probe.score)
        if first:
            add(
                "one_row",
                lambda batches: [torch.cat(probe.score(split_tensor_dict(x, len(x["prompt_ids"])))) for x in batches],
            )
        add("alone", probe.score_alone)
    masks = [batch["completion_mask"].bool() for batch in batches]
    logps = {
        name: torch.cat([x[mask].float() for x, mask in zip(found, masks, strict=True)]).cpu().numpy()
        for name, found in scored.items()
    }
    if first:
        torch.save(batches, output / "tokens.pt")
        probe.write(output / "dump", batches, scored["as_it_is"], scored.get("again", scored["alone"]))
    args, unsplit = trainer.args, ""
    if args.vllm_mode == "server":
        unsplit = "The sampler is a server: with `--vllm_mode colocate`, other configurations can be tried."
    elif probe.run.settings.rollout_support is not None:
        unsplit = "With `rollout_support`, the trainer scores over the tokens that sampling kept, and vLLM over all."
    costs["weights"] = sum(x.nbytes for x in trainer.model.parameters())
    if not unsplit:
        llm = trainer.vllm_generation.llm
        if first:
            logps["pushed"], _ = of_sampler(llm, batches, args.temperature)
            with torch.no_grad():
                reload(llm.llm_engine.model_executor.driver_worker)  # the weights of the files
            llm.reset_prefix_cache()
        logps["sampler"], costs["sampler"] = of_sampler(llm, batches, args.temperature)
        model = llm.llm_engine.vllm_config.model_config
        # computed, because vLLM may keep packed weights elsewhere
        costs["weights"] += trainer.model.num_parameters() * (1 if model.quantization else model.dtype.itemsize)
    facts = {
        "unsplit": unsplit,
        "costs": costs,
        "about": probe.about,
        "device": args.device.type,
        "options": [*distorting_options(probe.run)],
        "engine_kwargs": probe.run.settings.rollout_engine_kwargs or {},
        "attention": trainer.model.config._attn_implementation,
        "casts": hasattr(args, "cast_lm_head_to_fp32"),
    }
    return Scored(logps, facts)


def of_sampler(llm: Any, batches: Sequence[Batch], temperature: float) -> tuple[np.ndarray, float]:
    """Log-probabilities of the tokens, `(N,)`, which the engine reads as a part of the prompt, and the seconds to go on."""
    from vllm import SamplingParams

    model = llm.llm_engine.model_executor.driver_worker.get_model()
    plain = model.compute_logits
    # vLLM divides the logits of sampled tokens by the temperature, but not those of given ones
    model.compute_logits = lambda *args, **kwargs: plain(*args, **kwargs).float() / temperature
    tokens = []
    for batch in batches:
        ids, masks = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        lengths = batch["completion_mask"].sum(1).tolist()
        tokens += [(row[mask.bool()].tolist(), n) for row, mask, n in zip(ids, masks, lengths, strict=True)]
    params, start = SamplingParams(prompt_logprobs=0, max_tokens=_LENGTH, ignore_eos=True), time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in tokens], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    del model.compute_logits
    logps = [
        given[token].logprob
        for (ids, n), output in zip(tokens, outputs, strict=True)
        for token, given in zip(ids[-n:], output.prompt_logprobs[-n:], strict=True)
    ]
    return np.array(logps, np.float32), seconds


def build(request: Mapping[str, Any]) -> Probe:
    """Build the trainer and the sampler of a request."""
    trainer_class, run, model_args = read(request)
    source = {"revision": model_args.model_revision, "trust_remote_code": run.trust_remote_code}
    config = AutoConfig.from_pretrained(request["model"], **source)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    run.vllm_max_model_length = run.vllm_max_model_length or positions
    tokenizer = AutoTokenizer.from_pretrained(request["model"], **source, padding_side="left")
    args = shortened(run, request["completions"], request["length"], request["settings"])
    n = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    prompts: list[Any] = list(islice(cycle(prompts_of(request["prompts"])), n))
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    trainer = trainer_class(
        model=request["model"],
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    return Probe(trainer, run)


def main(request: Mapping[str, Any]) -> None:
    """Carry out a request, and write `answer.json`, with log-probabilities and facts or an error, to its folder."""
    output = Path(request["output"])
    try:
        batches = torch.load(request["tokens"], weights_only=False) if "tokens" in request else None
        logps, facts = run(build(request), output, batches)
        answer: dict[str, Any] = {"logps": {name: x.tolist() for name, x in logps.items()}, "facts": facts}
    except Exception as error:  # of TRL, of vLLM or of the model
        answer = {"error": " ".join(str(error).split())}
    (output / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
