"""
A process of a probe: one trainer and one sampler, which begin to train as in the run and stop before the first step. A
request is the `run` of `probe` (`tools/probe/probe.py`) with `output` (a folder), `settings` (fields that differ from
the run), and perhaps `tokens` (a file of another process). The trainer need not score these again if all settings
concern vLLM.
"""

import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.trainer.utils import split_tensor_dict

from ...settings.effects import distortions
from ...trainers.forward_pass import evaluating
from ...trainers.grpo import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from ...trainers.keys import ROLLOUT_LOGPS
from ...trainers.model_checks import dropout_of
from ...trainers.reloading import reload
from ...trainers.rloo import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer
from ...trainers.trl_checks import Check, check_shared_process
from ..diagnosis import DumpedTokens
from ..dump.in_effect import settings_in_effect
from ..dump.rows import make_row, on_host, tokens_of
from ..dump.sequences import Sequences
from .parts import Costs, ProcessFacts, Scored, Side


TrlBatch: TypeAlias = dict[str, torch.Tensor]
Trainer: TypeAlias = RolloutCorrectedGRPOTrainer | RolloutCorrectedRLOOTrainer
Config: TypeAlias = RolloutCorrectedGRPOConfig | RolloutCorrectedRLOOConfig
_TRAINERS: dict[str, tuple[type[Trainer], type[Config]]] = {
    "grpo": (RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig),
    "rloo": (RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig),
}
PROMPTS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a sentence about rain.",
    "What is 12 times 7?",
    "Explain what a prime number is, in two sentences.",
    "Tell me a short story about a dog that is lost.",
    "Translate 'good morning' into Spanish.",
    "If I have 3 apples and eat one, how many are left? Think step by step.",
)
OF_VLLM = {"rollout_engine_kwargs", "vllm_mode", "vllm_model_impl"}  # fields that the trainer does not read
_CONTEXT = 1024  # longest text of the engine in tokens; the prompts take less
# A run without a recipe: TRL's defaults with a colocated engine, also where there is no accelerator
_DEFAULTS = ["--use_vllm", "true", "--vllm_mode", "colocate"]
_ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
_LENGTH = 8  # tokens to sample for measuring the time


def read_request(request: Mapping[str, Any]) -> tuple[type[Trainer], Config, ModelConfig]:
    """Trainer class and configurations of trainer and model of a request. A `ValueError` if unusable."""
    trainer_class, config_class = _TRAINERS[request["trainer"]]
    if "vllm_model_impl" in request.get("settings", {}):
        config_class = without_checks(config_class, check_shared_process)
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    line = [*request["options"], "--model_name_or_path", request["model"], "--output_dir", request["output"]]
    without_recipe = _DEFAULTS if torch.accelerator.is_available() else [*_DEFAULTS, *_ON_CPU]
    given = ["--config", request["config"]] if request["config"] else without_recipe
    _, args, model_args = parser.parse_args_and_config([*given, *line])
    if not args.use_vllm:
        raise ValueError("`use_vllm` is False, so there is no sampler to probe. Set it to true.")
    if args.vllm_mode != "colocate":
        raise ValueError(
            f"`vllm_mode` is {args.vllm_mode!r}, and a probe tries settings and sends weights, so it starts vLLM itself. Add "
            "`--vllm_mode colocate`, and the options of your server as `--rollout_engine_kwargs '{...}'`."
        )
    if args.settings.rollout_support is not None:
        raise ValueError(
            f"`rollout_support` is {args.settings.rollout_support!r}: the trainer then scores over the tokens that "
            "sampling kept, and vLLM over all. Remove it, and `top_p`, `top_k` and `min_p`, which it makes up for."
        )
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    return trainer_class, args, model_args


def without_checks(config_class: type[Config], *left_out: Check) -> type[Config]:
    """
    A configuration class with fewer checks, because a process that only samples may use settings that break the
    forward pass of a trainer.
    """
    checks = [check for check in config_class._checks_of_trainer if check not in left_out]
    return type(config_class.__name__, (config_class,), {"_checks_of_trainer": checks})


def shortened(args: Config, completions: int, length: int, settings: Mapping[str, Any]) -> Config:
    """The run with one batch of at least `completions`, of at most `length` tokens, and with other `settings`."""
    size = min(args.per_device_train_batch_size, completions)
    batches = -(-completions // size)
    batches += batches * size % 2  # two completions for each prompt
    wanted = {
        "per_device_train_batch_size": size,
        "generation_batch_size": None,
        "steps_per_generation": batches,
        "gradient_accumulation_steps": batches,
        "num_generations": 2,
        "num_iterations": 1,
        "max_completion_length": min(args.max_completion_length or length, length),
        # nothing else contributes to the gap
        "beta": 0.0,
        "sync_ref_model": False,
        "reward_weights": None,
        "mask_truncated_completions": False,
        "report_to": [],
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "vllm_enable_sleep_mode": False,
        "vllm_max_model_length": min(args.vllm_max_model_length or _CONTEXT, _CONTEXT),
        "rollout_dump_dir": None,
        "rollout_diagnose": False,
    }
    changed = {name: value for name, value in settings.items() if name != "vllm_mode"}  # a probe starts vLLM itself
    on_cpu = {"enforce_eager": True} if args.device.type == "cpu" else {}
    engine = settings.get("rollout_engine_kwargs", args.settings.rollout_engine_kwargs) or {}
    wanted |= changed
    wanted["rollout_engine_kwargs"] = {**on_cpu, **engine} or None
    wanted["model_init_kwargs"] = {**(args.model_init_kwargs or {}), **settings.get("model_init_kwargs", {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the run were shown when it was read
        return dataclasses.replace(args, **wanted)


class _Prepared(Exception):
    """Raised when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        raise _Prepared


class Probe:
    """
    A trainer before its first step, which can sample and score its first batch repeatedly. `run` is the configuration
    before it was shortened for the probe.
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
        settings = self.run.settings
        written = settings_in_effect(self.run, settings)
        return DumpedTokens(Sequences.from_rows(rows), settings, written, self.about)


def run(probe: Probe, output: Path, batches: list[TrlBatch] | None = None, *, scoring: bool = True) -> Scored:
    """
    Sample unless batches are given, and score the tokens with both sides, or without `scoring` with vLLM alone. Writes
    sampled tokens.
    """
    first = batches is None
    batches = probe.sample() if batches is None else batches
    costs: Costs = {}
    scored = {Side.SAMPLED: [batch[ROLLOUT_LOGPS] for batch in batches]}
    if scoring:
        of_trainer, costs["trainer"] = by_trainer(probe, batches, first=first)
        scored |= of_trainer
    logps = {side: of_tokens(batches, found) for side, found in scored.items()}
    llm, temperature = probe.trainer.vllm_generation.llm, probe.trainer.args.temperature
    if first:
        torch.save(batches, output / "tokens.pt")
        logps[Side.PUSHED], _ = of_sampler(llm, batches, temperature)
        load_files(llm)
    logps[Side.SAMPLER], costs["sampler"] = of_sampler(llm, batches, temperature)
    costs["weights"] = bytes_of_weights(probe.trainer.model, llm)
    observed = probe.observe(batches, scored[Side.AS_IT_IS], scored[Side.ALONE]) if first else None
    facts: ProcessFacts = {
        "costs": costs,
        "observed": observed,
        "about": probe.about,
        "device": probe.trainer.args.device.type,
        "options": [*distortions(vars(probe.run))],
        "engine_kwargs": probe.run.settings.rollout_engine_kwargs or {},
        "attention": probe.trainer.model.config._attn_implementation,
    }
    return Scored(logps, facts)


def by_trainer(probe: Probe, batches: list[TrlBatch], *, first: bool) -> tuple[dict[Side, list[torch.Tensor]], float]:
    """
    Log-probabilities of the trainer, `(B, T)` per batch, and seconds to score once. Only the `first` process scores in
    every way.
    """
    start = time.perf_counter()
    scored = {Side.AS_IT_IS: probe.score(batches)}
    seconds = time.perf_counter() - start
    model = probe.trainer.model_wrapped
    has_dropout = any(dropout_of(probe.trainer._bare(probe.trainer.model)))
    with evaluating(model) if has_dropout else nullcontext():
        if first and has_dropout:
            scored[Side.NO_DROPOUT] = probe.score(batches)
        if first:
            rows = [split_tensor_dict(batch, len(batch["prompt_ids"])) for batch in batches]
            scored[Side.ONE_ROW] = [torch.cat(probe.score(batch)) for batch in rows]
        scored[Side.ALONE] = probe.score_alone(batches)
    return scored, seconds


def of_tokens(batches: list[TrlBatch], values: list[torch.Tensor]) -> np.ndarray:
    """Values of the tokens of all completions, `(N,)`, from one tensor, `(B, T)`, per batch."""
    masks = [batch["completion_mask"].bool() for batch in batches]
    tokens = [x[mask].float() for x, mask in zip(values, masks, strict=True)]
    return np.asarray(torch.cat(tokens).cpu().numpy())


def load_files(llm: Any) -> None:
    """Load the weights of the files into vLLM again, replacing the pushed ones."""
    with torch.no_grad():
        reload(llm.llm_engine.model_executor.driver_worker)
    llm.reset_prefix_cache()


def bytes_of_weights(model: Any, llm: Any) -> int:
    """Bytes of the weights of both sides. vLLM's are computed, because it may keep packed weights elsewhere."""
    config = llm.llm_engine.vllm_config.model_config
    of_one = 1 if config.quantization else config.dtype.itemsize
    of_vllm = model.num_parameters() * of_one
    return int(of_vllm + sum(x.nbytes for x in model.parameters()))


def of_sampler(llm: Any, batches: Sequence[TrlBatch], temperature: float) -> tuple[np.ndarray, float]:
    """Log-probabilities, `(N,)`, of tokens that the engine reads as prompt, and the seconds to continue."""
    from vllm import SamplingParams

    model = llm.llm_engine.model_executor.driver_worker.get_model()
    plain = model.compute_logits
    # vLLM divides the logits of sampled tokens by the temperature, but not of given ones
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


def context_of(config: Any) -> int | None:
    """The longest text of a model in tokens; `None` if its configuration does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def tokens_in(tokenizer: Any, prompt: Any) -> int:
    """Number of tokens of a prompt, as TRL makes it."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))


def fit(args: Config, lengths: Sequence[int], context: int | None, source: str) -> None:
    """
    Shorten the engine's texts to the context of the model, and the completions to what the prompts of these `lengths`
    leave. Raises a `ValueError` about prompts that are empty or leave nothing.
    """
    if min(lengths) == 0:
        raise ValueError(
            "The tokenizer of this model turns a prompt into no tokens, so that vLLM has nothing to continue "
            f"({source}). Name a file with prompts that the model knows, one in each line: `--prompts FILE`."
        )
    if context is not None:
        args.vllm_max_model_length = min(args.vllm_max_model_length, context)
    left = args.vllm_max_model_length - max(lengths) - _LENGTH
    if left < 1:
        raise ValueError(
            f"A prompt has {max(lengths)} tokens ({source}), and the engine takes texts of "
            f"{args.vllm_max_model_length} tokens, of which a probe needs {_LENGTH + 1} after the prompt. Name a file "
            "with shorter prompts, one in each line: `--prompts FILE`, or set `--vllm_max_model_length` higher if the "
            "model has a longer context."
        )
    args.max_completion_length = min(args.max_completion_length, left)


def build(request: Mapping[str, Any]) -> Probe:
    """Build the trainer and the sampler of a request."""
    trainer_class, run, model_args = read_request(request)
    source = {"revision": model_args.model_revision, "trust_remote_code": run.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(request["model"], **source, padding_side="left")
    args = shortened(run, request["completions"], request["length"], request["settings"])
    n = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    lines = Path(file).read_text(encoding="utf-8").splitlines() if (file := request["prompts"]) else PROMPTS
    if not any(map(str.strip, lines)):
        raise ValueError(f"{file} (`--prompts`) contains no line with text. Write a prompt into each line.")
    prompts: list[Any] = list(islice(cycle(filter(str.strip, lines)), n))
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    context = context_of(AutoConfig.from_pretrained(request["model"], **source))
    fit(args, [tokens_in(tokenizer, prompt) for prompt in prompts], context, file or "the built-in prompts")
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


def carry_out(request: Mapping[str, Any]) -> Scored:
    """The answer to a request, which needs a separate process."""
    batches = torch.load(request["tokens"], weights_only=False) if "tokens" in request else None
    scoring = batches is None or not request["settings"].keys() <= OF_VLLM
    return run(build(request), Path(request["output"]), batches, scoring=scoring)
