"""
How far apart sampler and trainer are on a pretrained model, and where. One file per sampler, and one per scoring.

A vLLM engine samples, and its log-probabilities are kept. Models of transformers score the same tokens as TRL's trainers do:
in padded batches, through TRL's fused head. Nothing is trained, and no weights are pushed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Record, write


TOKENS = 20_000  # that each sampler samples, at least
LONGEST, CONTEXT = 256, 512  # tokens of a completion and of the engine's context, at most
FIRST, MORE = 128, 32  # completions asked for at once, and where those are too short
PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
ROWS = 8  # sequences that a trainer scores at a time


BOTH = ("float32", "bfloat16")


@dataclass(frozen=True)
class Sampler:
    """A way to sample, by its name in files and tables."""

    name: str
    engine: Mapping[str, Any]  # arguments of vLLM's engine
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of its `SamplingParams`, besides temperature 1
    weights: str = "plain"  # a variant of the model; vLLM loads "adapter" beside the weights
    trainers: tuple[str, ...] = BOTH  # that score what it has sampled


@dataclass(frozen=True)
class Trainer:
    """A way to score, by its name in files and tables."""

    name: str
    dtype: str  # of the weights
    autocast: bool = False  # compute in bfloat16 nevertheless, as TRL does with `bf16=True`
    float32_head: bool = False  # as with TRL's `cast_lm_head_to_fp32`
    merged: bool = False  # with the adapter added to the weights, if the sampler has one


_BFLOAT16 = {"dtype": "bfloat16"}
_HEAD, _MERGED = "bfloat16, float32 head", "bfloat16, adapter merged"
SAMPLERS = [
    Sampler("bfloat16", _BFLOAT16, trainers=("float32", "float32 with autocast", "bfloat16")),
    Sampler("float32", {"dtype": "float32"}),
    Sampler("bfloat16, fp8 cache", {**_BFLOAT16, "kv_cache_dtype": "fp8"}, trainers=("bfloat16",)),
    Sampler(_HEAD, {**_BFLOAT16, "hf_overrides": {"head_dtype": "float32"}}, trainers=(_HEAD,)),
    Sampler("float16", {"dtype": "float16"}, trainers=("float16",)),
    Sampler("bfloat16, int8 weights", _BFLOAT16, weights="int8", trainers=("bfloat16",)),
    Sampler("top-p 0.95", _BFLOAT16, {"top_p": 0.95}, trainers=("float32",)),
    Sampler("top-k 20", _BFLOAT16, {"top_k": 20}, trainers=("float32",)),
    Sampler("min-p 0.05", _BFLOAT16, {"min_p": 0.05}, trainers=("float32",)),
    Sampler("repetition penalty 1.1", _BFLOAT16, {"repetition_penalty": 1.1}, trainers=("float32",)),
    Sampler(_MERGED, _BFLOAT16, weights="merged", trainers=(*BOTH, _MERGED)),
    Sampler(
        "bfloat16, adapter beside",
        {**_BFLOAT16, "enable_lora": True, "max_lora_rank": 16},
        weights="adapter",
        trainers=(*BOTH, _MERGED),
    ),
]
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer("float32", "float32"),
        Trainer("float32 with autocast", "float32", autocast=True),
        Trainer("bfloat16", "bfloat16"),
        Trainer(_HEAD, "bfloat16", float32_head=True),
        Trainer("float16", "float16"),
        Trainer(_MERGED, "bfloat16", merged=True),
    )
}


# Sampling -----------------------------------------------------------------------------------------------------------------


def sample(sampler: Sampler, model: str | None = None, tokens: int = TOKENS, longest: int = LONGEST) -> Record:
    """Sample so many tokens at least: a completion of each prompt, and of the first ones again until there are enough."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    beside = sampler.weights == "adapter"
    folder = model or folder_of("plain" if beside else sampler.weights)
    options = {
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_seqs": FIRST,
        "seed": 0,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "logprobs_mode": "processed_logprobs",
    }
    llm = LLM(str(folder), **{**options, **sampler.engine})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [tokenize(tokenizer, text) for text in PROMPTS]
    record: Record = {"prompts": [], "completions": [], "logps": []}
    adapter = LoRARequest("adapter", 1, str(folder_of("adapter"))) if beside else None
    while sum(map(len, record["completions"])) < tokens:
        done = len(record["prompts"])
        prompts = [chats[i % len(chats)] for i in range(done, done + (MORE if done else FIRST))]
        params = SamplingParams(
            temperature=1.0, max_tokens=longest, logprobs=0, detokenize=False,
            stop_token_ids=[tokenizer.eos_token_id], **sampler.sampling,
        )  # fmt: skip
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [o.outputs[0] for o in llm.generate(ids, params, use_tqdm=False, lora_request=adapter)]
        record["prompts"] += prompts
        record["completions"] += [list(out.token_ids) for out in outputs]
        record["logps"] += [
            [entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs, strict=True)] for out in outputs
        ]
    return record


def folder_of(variant: str) -> Path:
    """Folder of a variant of the language model, which is made if it is missing."""
    from variants import make_variant

    return make_variant(variant)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """A prompt as a chat, or as it is if the model is none for chats."""
    if tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


# Scoring ------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Some sequences, prompts padded on the left and completions on the right, as in TRL."""

    ids: Any  # (B, P + T)
    attention: Any
    width: int  # P

    @classmethod
    def of(cls, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> "Batch":
        import torch

        width, length = max(map(len, prompts)), max(map(len, completions))
        ids = torch.zeros(len(prompts), width + length, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids[row, width - len(prompt) : width + len(completion)] = torch.tensor(prompt + completion)
            attention[row, width - len(prompt) : width + len(completion)] = 1
        return cls(ids, attention, width)


def score(sampler: Sampler, trainer: Trainer, samples: Record, model: str | None = None) -> Record:
    """Score what was sampled."""
    import torch

    policy = load_trainer(sampler, trainer, model)
    device = policy.device
    record: Record = {"logps": []} | ({"processed": []} if sampler.sampling else {})
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=trainer.autocast):
        for first in range(0, len(samples["prompts"]), ROWS):
            prompts, completions = (samples[key][first : first + ROWS] for key in ("prompts", "completions"))
            batch = Batch.of(prompts, completions)
            labels = batch.ids.masked_fill(batch.attention == 0, -100)
            labels[:, : batch.width] = -100
            inputs = {"input_ids": batch.ids, "attention_mask": batch.attention, "labels": labels}
            out = policy(**{name: x.to(device) for name, x in inputs.items()}, fused_lm_head=True)
            logps = out.log_probs[:, batch.width - 1 :].float()
            record["logps"] += [logps[row, : len(ids)].tolist() for row, ids in enumerate(completions)]
            if sampler.sampling:
                for prompt, completion in zip(prompts, completions, strict=True):
                    record["processed"].append(process(policy, prompt, completion, sampler.sampling))
    return record


def load_trainer(sampler: Sampler, trainer: Trainer, model: str | None) -> Any:
    """The policy, on a GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    adapted = sampler.weights in ("merged", "adapter")
    folder = model or folder_of("merged" if adapted and trainer.merged else "plain")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, trainer.dtype)).eval()
    add_fused_lm_head(policy, cast_lm_head_to_fp32=trainer.float32_head)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    if not adapted or trainer.merged:
        return policy
    from peft import PeftModel

    return PeftModel.from_pretrained(policy, folder_of("adapter"))


def process(model: Any, prompt: list[int], completion: list[int], sampling: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of a completion after vLLM's rules for sampling, on the logits of a model. A sampled token is kept."""
    import torch

    ids = torch.tensor(completion)
    inputs = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=inputs).logits[0, len(prompt) - 1 : -1].float().cpu()
    if penalty := sampling.get("repetition_penalty"):
        seen = torch.zeros(logits.shape[1], dtype=torch.bool)
        seen[prompt] = True
        for row, token in zip(logits, completion, strict=True):
            row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            seen[token] = True
    probabilities = logits.softmax(-1)
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k := sampling.get("top_k"):
        kept &= probabilities >= probabilities.topk(top_k).values[:, -1:]
    if min_p := sampling.get("min_p"):
        kept &= probabilities >= min_p * probabilities.amax(-1, keepdim=True)
    if top_p := sampling.get("top_p"):  # as many of the likeliest as it takes
        values, order = probabilities.sort(-1, descending=True)
        kept &= torch.empty_like(kept).scatter(-1, order, values.cumsum(-1) - values < top_p)
    kept.scatter_(-1, ids[:, None], True)
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, ids[:, None])[:, 0].tolist()


# Files --------------------------------------------------------------------------------------------------------------------


def file_of(folder: Path, sampler: Sampler, trainer: Trainer | None = None) -> Path:
    """Where samples are kept, or a scoring of them."""
    name = sampler.name if trainer is None else f"{sampler.name}--{trainer.name}"
    return folder / ("samples" if trainer is None else "scores") / f"{name.replace(' ', '_').replace(',', '')}.json"


def missing(folder: Path, sampler: Sampler) -> list[Trainer]:
    """Trainers that have yet to score what a sampler has sampled."""
    chosen = [TRAINERS[name] for name in sampler.trainers]
    return [trainer for trainer in chosen if not file_of(folder, sampler, trainer).exists()]


def sample_and_keep(folder: Path, sampler: Sampler):
    path = file_of(folder, sampler)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, sample(sampler))


def score_and_keep(folder: Path, sampler: Sampler):
    samples = json.loads(file_of(folder, sampler).read_text())
    for trainer in missing(folder, sampler):
        path = file_of(folder, sampler, trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, score(sampler, trainer, samples))
        print(f"  {trainer.name}", flush=True)
