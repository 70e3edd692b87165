"""
A process of a probe: one trainer and one sampler, which begin to train as in the run and stop before the first step.

    python -m trl_rollout_corr.probe.process request.json

The process samples, unless it is given tokens, and both sides score the tokens. It writes log-probabilities of all tokens as
`scores.npz`, and `answer.json`. A request is the `run` of `probe` (`trl_rollout_corr/probe/command.py`) with `output` (a
folder), `settings` (fields that differ from the run), and perhaps `tokens` (a file of another process) and `engine` (arguments
of vLLM, for a sampler without a trainer).
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import get_peft_config, get_quantization_config
from trl.trainer.utils import split_tensor_dict

from ..arrival.server import without_dropout
from ..arrival.worker import reload
from ..dumps.files import write_rows
from ..dumps.rows import make_row, on_host
from ..messages import SettingWarning
from ..recording.keys import ROLLOUT_LOGPS
from ..recording.run_metadata import dropout_of, settings_in_effect
from ..trainers.trl_checks import distorting_options
from .configuration import Config, Trainer, prompts_of, read, shortened
from .parts import CHAIN


Batch: TypeAlias = dict[str, torch.Tensor]
Tokens: TypeAlias = Sequence[tuple[list[int], list[int]]]  # prompt and completion of each sequence, without padding
_LENGTH = 32  # tokens of a completion that are sampled to measure the time


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

    def sample(self) -> list[Batch]:
        """Push the weights and sample the first batch. Returns TRL's batches."""
        trainer = self.trainer
        trainer._last_loaded_step = -1
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        batches: list[Batch] = trainer._buffered_inputs
        return batches

    def score(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self.trainer._score_again(batch).float() for batch in batches]

    def score_rows(self, batches: list[Batch]) -> list[torch.Tensor]:
        """Score batches one sequence at a time, with the padding of the batch."""
        return [torch.cat(self.score(split_tensor_dict(batch, len(batch["prompt_ids"])))) for batch in batches]

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


# The sampler --------------------------------------------------------------------------------------------------------------


@contextmanager
def _divided(llm: Any, temperature: float) -> Iterator[None]:
    """Logits of given tokens divided by the temperature, as those of sampled tokens are; vLLM itself does not."""

    def divide(model: Any) -> None:
        plain = model.compute_logits
        model.compute_logits = lambda *args, **kwargs: plain(*args, **kwargs).float() / temperature

    def restore(model: Any) -> None:
        del model.compute_logits

    llm.apply_model(divide)
    try:
        yield
    finally:
        llm.apply_model(restore)


def prefill(llm: Any, tokens: Tokens, temperature: float) -> np.ndarray:
    """Log-probabilities of the tokens of all completions, `(N,)`, which the engine reads as a part of the prompt."""
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": [*prompt, *completion]} for prompt, completion in tokens]
    with nullcontext() if temperature == 1.0 else _divided(llm, temperature):
        outputs = llm.generate(inputs, SamplingParams(prompt_logprobs=0, max_tokens=1), use_tqdm=False)
    logps = [
        given[token].logprob
        for (prompt, completion), output in zip(tokens, outputs, strict=True)
        for token, given in zip(completion, output.prompt_logprobs[len(prompt) :], strict=True)
    ]
    return np.array(logps, np.float32)


def cost(llm: Any, tokens: Tokens) -> dict[str, float]:
    """Seconds to sample for all prompts, and tokens that the cache has room for."""
    from vllm import SamplingParams

    params, start = SamplingParams(max_tokens=_LENGTH, ignore_eos=True), time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt, _ in tokens], params, use_tqdm=False)
    seconds, cache = time.perf_counter() - start, llm.llm_engine.vllm_config.cache_config
    return {"seconds": seconds, "room": cache.num_gpu_blocks * cache.block_size}


# A request ----------------------------------------------------------------------------------------------------------------


class Scores:
    """Log-probabilities of the tokens of some batches, `(N,)` by name, seconds and bytes, and why some are missing."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.masks = batches, [batch["completion_mask"].bool() for batch in batches]
        self.vectors = {"sampled": self.flat([batch[ROLLOUT_LOGPS] for batch in batches])}
        self.facts: dict[str, Any] = {"costs": {}, "reasons": {}}

    def flat(self, logps: list[torch.Tensor]) -> np.ndarray:
        return torch.cat([x[mask].float() for x, mask in zip(logps, self.masks, strict=True)]).cpu().numpy()

    def add(self, name: str, score: Callable[[list[Batch]], list[torch.Tensor]]) -> list[torch.Tensor]:
        say(f"the trainer scores: {name.replace('_', ' ')}")
        start = time.perf_counter()
        logps = score(self.batches)
        self.vectors[name], seconds = self.flat(logps), time.perf_counter() - start
        self.facts["costs"][name] = {"seconds": seconds}
        return logps

    def tokens(self) -> Tokens:
        def of(batch: Batch, side: str) -> list[list[int]]:
            masks = batch[f"{side}_mask"].bool()
            return [ids[mask].tolist() for ids, mask in zip(batch[f"{side}_ids"], masks, strict=True)]

        sides = [zip(of(batch, "prompt"), of(batch, "completion"), strict=True) for batch in self.batches]
        return [pair for side in sides for pair in side]


def run(probe: Probe, output: Path, batches: list[Batch] | None = None) -> dict[str, Any]:
    """
    Sample, unless there are batches, and score the tokens with both sides. Writes a dump of samples, and log-probabilities by
    node of the chain. Returns facts for the answer.
    """
    trainer, sampled = probe.trainer, batches is None
    scores = Scores(probe.sample() if batches is None else batches)
    as_it_is = scores.add("as_it_is", probe.score)
    weights = {"weights": sum(x.nbytes for x in trainer.model.parameters()), "size": trainer.model.num_parameters()}
    scores.facts["costs"]["as_it_is"] |= weights
    if sampled:
        torch.save(scores.batches, output / "tokens.pt")
        again = scores.add("one_by_one", probe.score_alone)
        probe.write(output / "as_it_is", scores.batches, as_it_is, again)
    off = any(dropout_of(trainer._bare(trainer.model)))
    with without_dropout(trainer.model_wrapped) if off else nullcontext():
        if sampled and off:
            scores.add("dropout_off", probe.score)
        if sampled:
            scores.add("one_row", probe.score_rows)
        scores.add("alone", probe.score_alone)
    _of_sampler(probe, scores, sampled)
    np.savez(output / "scores.npz", allow_pickle=True, **scores.vectors)
    return scores.facts


def _of_sampler(probe: Probe, scores: Scores, sampled: bool) -> None:
    """Score the tokens with the sampler, with the weights that were pushed and with those of its files."""
    generation, reason = probe.trainer.vllm_generation, ""
    if probe.trainer.vllm_mode == "server":
        reason = "the sampler is a server, which no other configuration can be tried on"
    elif generation.enable_sleep_mode:
        reason = "`vllm_enable_sleep_mode` is true, so the engine has no weights between two samples"
    elif probe.run.settings.rollout_support is not None:
        reason = "with `rollout_support`, the trainer scores over the tokens that sampling kept, and vLLM over all"
    if reason:
        scores.facts["reasons"] |= dict.fromkeys((node for node in CHAIN if node.startswith("sampler_")), reason)
        return
    say("the sampler scores")
    llm, tokens, temperature = generation.llm, scores.tokens(), probe.trainer.temperature
    if sampled:
        scores.vectors["sampler_pushed"] = prefill(llm, tokens, temperature)
        scores.facts["reasons"]["sampler_decoding"] = "the tokens were drawn with the options"
        with torch.no_grad():
            reload(llm.llm_engine.model_executor.driver_worker)
        llm.reset_prefix_cache()
    scores.vectors["sampler_loaded"] = prefill(llm, tokens, temperature)
    scores.facts["costs"]["sampler"] = cost(llm, tokens)


def build(request: Mapping[str, Any]) -> Probe:
    """Build the trainer and the sampler of a request."""
    from datasets import Dataset

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


def facts_of(probe: Probe) -> dict[str, Any]:
    """Facts about a run that the choice of settings depends on."""
    args, generation = probe.trainer.args, probe.trainer.vllm_generation
    return {
        "about": probe.about,
        "device": args.device.type,
        "options": [*distorting_options(probe.run)],
        "temperature": args.temperature,
        "engine_kwargs": probe.run.settings.rollout_engine_kwargs or {},
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": probe.run.gradient_accumulation_steps,
        "attention": probe.trainer.model.config._attn_implementation,
        "casts": hasattr(args, "cast_lm_head_to_fp32"),
        "colocated": args.vllm_mode == "colocate",
        "engine": {
            "model": generation.model.name_or_path,
            "max_model_len": generation.max_model_length,
            "gpu_memory_utilization": generation.gpu_memory_utilization,
            "trust_remote_code": generation.trust_remote_code,
            **(args.settings.rollout_engine_kwargs or {}),
        },
    }


def say(action: str) -> None:
    print(f"Probe: {action}", file=sys.stderr, flush=True)  # noqa: T201  # the command reads it


def score_alone_of_sampler(request: Mapping[str, Any]) -> dict[str, Any]:
    """Score tokens with a sampler that has no trainer beside it."""
    from vllm import LLM

    llm, scores = LLM(**request["engine"]), Scores(torch.load(request["tokens"], weights_only=False))
    vectors = {"sampler_loaded": prefill(llm, scores.tokens(), request["temperature"])}
    np.savez(Path(request["output"], "scores.npz"), allow_pickle=True, **vectors)
    return {"costs": {"sampler": cost(llm, scores.tokens())}, "reasons": {}}


def main(path: str) -> None:
    """Carry out a request. Scores and `answer.json`, with facts and warnings or an error, are written to its folder."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    output, answer = Path(request["output"]), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if "engine" in request:
                answer = score_alone_of_sampler(request)
            else:
                probe = build(request)
                given = torch.load(request["tokens"], weights_only=False) if "tokens" in request else None
                answer = {**run(probe, output, given), **facts_of(probe)}
        except (ValueError, TypeError, ImportError, OSError, RuntimeError, yaml.YAMLError) as error:
            file = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else ""
            answer = {"error": " ".join((file or str(error)).split())}
    answer["warnings"] = [str(warning.message) for warning in caught if warning.category is SettingWarning]
    (output / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
