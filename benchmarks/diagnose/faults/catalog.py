"""The faults, as data: which cause each injects, and where."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from trl_rollout_corr.tools.dump.folder import files_of, write_rows

from . import models, rows
from .fault import Fault


FAULTS: dict[str, Fault] = {
    "none": Fault("nothing", "trainer and sampler agree up to the last digits of float32"),
    "bf16": Fault("rounding", "both compute in bfloat16, in different kernels", engine={"dtype": "bfloat16"}),
    "bf16_moe": Fault("routing", "a model with experts in bfloat16: routes flip", engine={"dtype": "bfloat16"}),
    "bf16_head": Fault(
        "head",
        "the trainer's head computes in bfloat16, the sampler's in float32",
        trainer=models.head_in(torch.bfloat16),
    ),
    "fp8_cache": Fault("kv_cache", "keys and values are cached in 8 bits", engine={"kv_cache_dtype": "fp8"}),
    "int8_weights": Fault("weights", "the sampler's weights have 8 bits", weights=models.int8),
    "fp8_weights": Fault("weights", "the sampler's weights are E4M3", weights=models.fp8),
    "int4_weights": Fault("weights", "the sampler's weights have 4 bits", weights=models.int4),
    "cold_sampler": Fault(
        "temperature", "the sampler's temperature is 0.8, and the trainer's is 1", sampling={"temperature": 0.8}
    ),
    "hot_sampler": Fault(
        "temperature", "the sampler's temperature is 1.25, and the trainer's is 1", sampling={"temperature": 1.25}
    ),
    "raw_logprobs": Fault(
        "temperature",
        "the sampler reports log-probabilities from before the temperature of 0.7",
        engine={"logprobs_mode": "raw_logprobs"},
        sampling={"temperature": 0.7},
    ),
    "top_p": Fault("truncation", "the sampler draws from 90 % of the probability", sampling={"top_p": 0.9}),
    "top_k": Fault("truncation", "the sampler draws from the ten likeliest tokens", sampling={"top_k": 10}),
    "min_p": Fault(
        "truncation",
        "the sampler leaves out tokens that are 20 times less likely than the likeliest",
        sampling={"min_p": 0.05},
    ),
    "repetition_penalty": Fault(
        "penalty", "the sampler has a repetition penalty of 1.1", sampling={"repetition_penalty": 1.1}
    ),
    "presence_penalty": Fault(
        "penalty", "the sampler has a presence penalty of 0.5", sampling={"presence_penalty": 0.5}
    ),
    "frequency_penalty": Fault(
        "penalty", "the sampler has a frequency penalty of 0.3", sampling={"frequency_penalty": 0.3}
    ),
    "stale": Fault("stale", "samples are some optimizer steps old", drifts="age"),
    "never_pushed": Fault("never_pushed", "the sampler still has its first weights", drifts="step"),
    "adapter_missing": Fault("adapter_missing", "the sampler never loads the adapter", drifts="step"),
    "stale_adapter": Fault("stale", "adapters are some optimizer steps old", drifts="age"),
    "collapse": Fault(
        "weights",
        "a policy collapses, and the sampler is four optimizer steps old and does not report it",
        drifts="run",
    ),
    "standing_still": Fault("standing_still", "the sampler changes, and the trainer does not", drifts="engine"),
    "some_prompts": Fault("some_prompts", "trainer and sampler differ in a few prompts", drifts="prompt"),
    "own_updates": Fault("own_updates", "a batch is trained on four times, in bypass mode", drifts="visit"),
    "lora_merge": Fault("lora_merge", "an adapter is merged in bfloat16 for the sampler", drifts="adapter"),
    "one_token_shift": Fault("shift", "log-probabilities are those of the neighbour", rows=rows.shift_by_one),
    "bos": Fault("first_token", "the sampler read another first token", rows=rows.another_first_token),
    "template": Fault("first_token", "the trainer's prompt lacks the end of the template", scoring={"drop_prompt": 1}),
    "eos": Fault("last_token", "the end is forced, and reported as certain", rows=rows.force_the_last_token),
    "seams": Fault("seams", "the text before a turn is made of other tokens", scoring={"retokenize": True}),
    "dropout": Fault("dropout", "the trainer scores with dropout", trainer=models.dropout(0.1)),
    "padding": Fault("padding", "the trainer attends to padding", scoring={"attend_padding": True}),
    "nan_rows": Fault("nan_rows", "whole rows of logits are NaN", rows=rows.nan_rows),
    "zeros": Fault("not_sampled", "all log-probabilities are 0", rows=rows.zeros),
    "some_zeros": Fault("not_sampled", "those of some completions are 0", rows=rows.some_zeros),
    "zeros_inside": Fault("not_sampled", "those of a tool's answer are 0, and it counts", rows=rows.zeros_inside),
    "zeros_at_the_end": Fault("not_sampled", "those of the last tokens are 0", rows=rows.zeros_at_the_end),
    "mean_of_all": Fault("not_sampled", "each is the mean of its completion", rows=rows.mean_of_all),
    "backwards": Fault("not_sampled", "they are in another order than the tokens", rows=rows.backwards),
    "first_candidate": Fault("not_sampled", "they are those of the likeliest token", sampling={"logprobs": 1}),
    "mean_of_some": Fault("not_sampled", "those of some completions are their mean", rows=rows.mean_of_some),
    "value_before": Fault("not_sampled", "one of six is that of the token before", rows=rows.value_before),
    "uniform_values": Fault(
        "not_sampled", "one of eight is minus the logarithm of the vocabulary", rows=rows.uniform_values
    ),
    "forced": Fault("not_sampled", "the engine ends the reasoning after a budget", drifts="budget"),
    "some_none": Fault("missing", "a rollout function has none for single tokens", rows=rows.some_none),
    "some_broken": Fault("some_completions", "an engine breaks one request in 4, or in 16", rows=rows.some_broken),
    "some_frozen": Fault("some_completions", "one of two replicas, or of four, gets no weights", drifts="replica"),
    "lost_reasoning": Fault(
        "later_turns", "the first turn is not in the context of the later ones", scoring={"lose": "first_turn"}
    ),
    "lost_tokens": Fault("seams", "special tokens between turns are lost", scoring={"lose": "answer"}),
    "old_cache": Fault(
        "prefix_cache",
        "the sampler has cached prefixes of old weights",
        drifts="cache",
        engine={"enable_prefix_caching": True, "block_size": 32},
    ),
    "fp8_engine": Fault(
        "quantised", "vLLM quantises the weights to 8 bits, and says so", engine={"quantization": "fp8_per_channel"}
    ),
    # Faults that no cause covers
    "growing_noise": Fault("unknown", "noise grows from step to step", rows=rows.growing_noise),
    "frozen_base": Fault("unknown", "each push quantises the frozen base of an adapter again", drifts="base"),
    "adapter_twice": Fault("unknown", "an adapter that grows counts twice in the sampler", drifts="twice"),
    "chat_template": Fault("unknown", "the trainer's prompt begins with another template", scoring={"prepend": 6}),
    "two_tokenizers": Fault(
        "unknown", "the trainer has other ids for a tenth of the tokens", scoring={"other_ids": 10}
    ),
    "noisy_weights": Fault("unknown", "the sampler's weights have noise of 2 %", weights=models.noisy),
    "some_temperatures": Fault("some_completions", "a request in four has a temperature of 0.7", drifts="request"),
    "float16_logprobs": Fault("unknown", "log-probabilities were sent as float16", rows=rows.in_float16),
    "positions": Fault(
        "unknown",
        "the sampler turns positions by other angles",
        engine={"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}},
    ),
    "logit_bias": Fault(
        "unknown", "the sampler prefers some tokens", sampling={"logit_bias": dict.fromkeys(range(2, 320, 16), 1.5)}
    ),
}


def rewrite(dump: str | Path, output: str | Path, fault: str) -> Path:
    """
    Write a dump anew, with a fault of `FAULTS` that changes rows. Returns the folder with the fault.

    Raises:
        `ValueError`: if the fault does not change rows, there is no dump, or the output has one already.
    """
    known = sorted(name for name, fault in FAULTS.items() if fault.rows is not None)
    if fault not in known:
        raise ValueError(f"`fault` is {fault!r}; a dump can be rewritten with one of {', '.join(known)}.")
    change: Any = FAULTS[fault].rows
    source, target = Path(dump), Path(output)
    if not files_of(source):
        raise ValueError(f"`dump` is {str(dump)!r}, where no file step-*.parquet is; name the folder of a dump.")
    if target.exists() and files_of(target):
        raise ValueError(f"`output` is {str(output)!r}, which holds a dump already; name another folder.")
    for file in files_of(source):
        table = pq.read_table(file)
        metadata = table.schema.metadata or {}
        rows = [change(row) for row in table.to_pylist()]
        settings, about = (json.loads(metadata.get(key, b"{}")) for key in (b"settings", b"about"))
        write_rows(target, rows[0]["step"], rows[0]["rank"], rows, settings, about)
    return target
