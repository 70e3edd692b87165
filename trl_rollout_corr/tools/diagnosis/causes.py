"""
The causes that a diagnosis knows, one record each: the test that finds the cause, and the remedy. `docs/causes.md`
explains them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import arrivals, changes, drift, positions, precision, sampling, subsets, wrong_values
from .measures import Evidence
from .observed import DumpedTokens


class Test(NamedTuple):
    """A test of the tokens of a dump."""

    look: Callable[[DumpedTokens], Evidence | None]  # returns `None` where the test is impossible
    weak: float  # statistic of the evidence from which the cause is possible
    strong: float  # statistic from which it is nearly certain


class Cause(NamedTuple):
    """A cause of the gap between trainer and sampler, or of other harm (`other_causes.py`)."""

    title: str  # in one line
    test: Test  # the test that finds it
    remedy: str  # at the source first
    advised: Mapping[str, object] = {}  # fields of a trainer, as the remedy; empty where none helps
    otherwise: str = ""  # the remedy for a run that already has these fields
    if_impossible: str = ""  # the remedy for a run that cannot have these fields, after the reason
    on_quantised: str = ""  # the remedy for a trainer whose weights are quantised, if it is another one
    may_correct: bool = False  # True if a correction of the gap that is left would not hide a mistake
    normal: bool = False  # True for a cause in every run, where only a large gap is unhealthy
    fallback: Test | None = None  # finds it where nothing else explains the gap
    without_ratio: bool = False  # True if it acts on tokens without a log-ratio, which come first
    of_some_tokens: bool = False  # True if it acts on some tokens only, and hides no cause that acts on all
    of_a_part: bool = False  # True if it is about a part of the completions, which is looked at again
    at_equal_weights: bool = False  # True if scores right after a push measure it
    announced: bool = False  # True if the run says so itself, so that the gap is expected
    harms: bool = False  # True if a correction is to be set however small the gap is
    no_share: str = ""  # why it explains nothing of d^2
    parts: tuple[str, ...] = ()  # of the gap, as a probe splits it, on which it acts; the first is its own


# Parts of the gap that a probe measures, and that a cause acts on
PADDING, DROPOUT, OPTIONS = "padding", "dropout", "sampling options and decoding"
HEAD, BODY = "precision of the head", "precision of the body"
QUANTISATION, CACHE, PUSH = "quantisation", "key-value cache", "weights that were pushed"

_NO_RATIO = "these tokens have no d"
_REFER = "importance weights would refer to a policy that no token was sampled from"
# Only for values that are not the log-probabilities with which the tokens were sampled
HIDES = f"Do not correct for it: the {_REFER}."
_RAW = f"Do not correct for log-probabilities taken before temperature: the {_REFER}."
_ELSEWHERE = (
    "in a `rollout_func`, or by the server, which fills missing values from the model's `generation_config.json` "
    "unless started with `--generation-config vllm`."
)
_TRUNCATED = f"The truncation is set elsewhere: in `generation_kwargs`, {_ELSEWHERE}"
_SMALLER = (
    "This is normal, because the layers still round. float16 on both sides makes the gap much smaller (recipe "
    "grpo/fp16.yaml)."
)
_IN_FLOAT16 = (
    "The gap is normal, because two kernels compute the same policy. float16 on both sides makes it much smaller "
    "(recipe grpo/fp16.yaml)."
)
_IN_FLOAT32 = (
    "let vLLM compute in float32 (`rollout_engine_kwargs: {dtype: float32}`, or `--dtype float32` of a server)"
)
_LOADED = ", or in asynchronous training let the server load the adapter itself"
_FLOAT32_HEAD = {"hf_overrides": {"head_dtype": "float32"}}
_FLOAT32_HEADS = {"cast_lm_head_to_fp32": True, "rollout_engine_kwargs": _FLOAT32_HEAD}

CAUSES: dict[str, Cause] = {
    "nan_rows": Cause(
        "rows of logits that are NaN",
        Test(wrong_values.nan_rows, 0.0, 0.001),
        "Stop at the first NaN with `rollout_nan_policy: raise`, and inspect the weights of that step. Look for a "
        "failed push, an overflow in float16, and faulty kernels in the sampler.",
        {"rollout_nan_policy": "raise"},
        "Inspect the weights of the step that raised the error. Look for a failed push, an overflow in float16, and "
        "faulty kernels in the sampler.",
        without_ratio=True,
        of_some_tokens=True,
        no_share=_NO_RATIO,
    ),
    "missing": Cause(
        "tokens without a log-probability from the sampler",
        Test(wrong_values.missing, 0.0, 0.001),
        "A `rollout_func` or server returns None, NaN or an infinite number for some tokens. Return the "
        "log-probability of each sampled token, and 0 in `env_mask` for tokens that nobody sampled.",
        may_correct=True,
        without_ratio=True,
        of_some_tokens=True,
        no_share=_NO_RATIO,
    ),
    "shift": Cause(
        "log-probabilities that are one token off",
        Test(wrong_values.shift, 0.6, 0.85),
        "A `rollout_func` or environment returns log-probabilities that begin at the prompt, or lack the last token. "
        f"Return one for each sampled token, in the same order. {HIDES}",
    ),
    "offset": Cause(
        "log-probabilities that are off by the same number at every token",
        Test(wrong_values.offset, 0.5, 0.8),
        "A `rollout_func`, environment or server returns values that are not normalised, such as logits. Return "
        f"`log_softmax` of all logits at the sampled token. {HIDES}",
    ),
    "not_sampled": Cause(
        "values that are not log-probabilities of the sampled tokens",
        Test(wrong_values.not_sampled, 0.3, 0.6),
        "A `rollout_func` or environment returns fillers, or values of the likeliest token or of another order. "
        "Return those of the sampled tokens, and leave out of the loss (`env_mask`) what nobody sampled: a tool's "
        f"answer, or what a grammar or a reasoning budget (`</think>`) forces. {HIDES}",
    ),
    "first_token": Cause(
        "another first token: BOS twice or missing, or another chat template",
        Test(positions.first_token, 6.0, 30.0),
        "Compare the first token ids of both prompts. Send ids, not text, to the sampler, and apply the chat template "
        "once. A correction is valid, but the completions answer another prompt.",
        of_some_tokens=True,
    ),
    "last_token": Cause(
        "another last token: EOS, a stop string, or a limit",
        Test(positions.last_token, 6.0, 30.0),
        "The last token was forced, or the sampler stops at tokens that the trainer does not know. Give both the same "
        "`eos_token_id`, use no stop strings, or leave truncated completions out of the loss.",
        {"mask_truncated_completions": True},
        "Truncated completions are left out of the loss already, so they are not the cause: give trainer and sampler "
        "the same `eos_token_id`, and use no stop strings.",
        may_correct=True,
        of_some_tokens=True,
    ),
    "seams": Cause(
        "seams between turns: text that was tokenized again",
        Test(positions.seams, 6.0, 30.0),
        "Decoding and tokenizing again gave other tokens. Keep the sampled token ids, and append those of the tool's "
        "answer.",
        may_correct=True,
        of_some_tokens=True,
    ),
    "later_turns": Cause(
        "another context in the second and later turns",
        Test(positions.later_turns, 3.0, 6.0),
        "Text was rendered again between turns, which lost or added reasoning or special tokens. Keep the token ids "
        "of all turns, and append those of the tool's answer. A correction is valid, but the model learns in a "
        "context that it never meets.",
    ),
    "by_advantage": Cause(
        "a gap in completions or tokens with one sign of the advantage, and a smaller one in the others of the same "
        "steps",
        Test(subsets.by_advantage, 1.5, 2.5),
        "Look at what comes after the rewards: values that are computed again or stored in another type, edited "
        "completions, or other sources, such as demonstrations. `k3_kl` may stay flat while the reward falls: watch "
        "`kl_advantage_positive` and `kl_advantage_negative`.",
        of_a_part=True,
    ),
    "prefix_cache": Cause(
        "a prefix cache that is older than the weights",
        Test(drift.prefix_cache, 2.0, 4.0),
        "The sampler reads what old weights computed for a prompt. Clear the cache after each push "
        "(`reset_prefix_cache()` of vLLM's engine, or of TRL's client of a server), or start the server with "
        "`--no-enable-prefix-caching`. A correction is valid, but the cache keeps getting older.",
    ),
    "some_completions": Cause(
        "a gap in some completions, and none in the others of the same steps",
        Test(subsets.some_completions, 3.0, 6.0),
        "Find out what these completions share: a replica, an engine, an adapter, sampling parameters, a retry. "
        "Log which replica wrote each completion, and compare the replicas on one request. A correction is valid "
        "if the weights differ, and hides a mistake if the log-probabilities are wrong.",
        of_a_part=True,
    ),
    "padding": Cause(
        "attention to padding in the trainer, or positions that count padding",
        Test(precision.padding, 0.7, 0.9),
        "Give the model the attention mask, and `position_ids` that count from the first token of the prompt. "
        "`trl-rollout-corr probe MODEL` scores without padding. Do not correct for it: the trainer scores another "
        "policy than it should.",
        parts=(PADDING,),
    ),
    "dropout": Cause(
        "dropout in the trainer",
        Test(precision.dropout, 0.4, 0.7),
        "Switch it off: `disable_dropout: true`, and `lora_dropout: 0` for an adapter.",
        {"disable_dropout": True},
        "The dropout comes from `lora_dropout` of an adapter, which should be 0, or from the code of the model.",
        may_correct=True,
        parts=(DROPOUT,),
    ),
    "some_prompts": Cause(
        "a gap in some prompts, always the same ones",
        Test(subsets.some_prompts, 0.4, 0.7),
        "Compare these prompts with the others, as both sides read them: length, special tokens, images, and the "
        "adapter that the request names. Leave them out until the cause is found. A correction is valid if the "
        "sampler reads them differently, and hides a mistake if the log-probabilities are wrong.",
        of_a_part=True,
    ),
    "stale": Cause(
        "stale weights: samples of an older policy",
        Test(drift.stale, 0.4, 0.6),
        "Sample with newer weights: push them after fewer steps, or make the queue shorter.",
        may_correct=True,
        fallback=Test(drift.old_throughout, 0.9, 0.99),
        announced=True,
    ),
    "own_updates": Cause(
        "the policy's own updates",
        Test(drift.own_updates, 0.4, 0.6),
        "In bypass mode, a batch that is trained on several times includes the updates since it was sampled. You "
        "need not change anything. Without `bypass_mode`, sampler and updates are measured separately.",
        may_correct=True,
    ),
    "recorded": Cause(
        "completions that were used before: a fixed pool, or a buffer that replays them",
        Test(drift.recorded, 0.2, 0.5),
        "The trainer has learned from them since: announce the step of the policy that sampled them "
        "(`trainer.rollout_step`), or sample anew. A correction is valid, but the mean ratio may exceed 1, because "
        "the trainer has made these very tokens likelier.",
        may_correct=True,
    ),
    "changed": Cause(
        "something that changed at one step",
        Test(changes.changed, 1.5, 2.0),
        "Find out what happened at this step: an engine restarted, quantised or on other kernels, a resumed "
        "training, a new replica, other prompts, or longer completions. `trl-rollout-corr diagnose` on the files "
        "of the steps before and after it tells them apart. Weights that do not arrive would make the gap grow "
        "further.",
        may_correct=True,
        of_a_part=True,
    ),
    "never_pushed": Cause(
        "weights that do not arrive in the sampler",
        Test(arrivals.never_pushed, 0.4, 0.6),
        "Trainer and sampler drift apart, whatever the age of the samples: a correction is valid, but the gap keeps "
        "growing. Repair the push: look for unknown names of parameters, an adapter that is not merged, or a server "
        "that keeps its cache. Updates that vLLM's coarser type, FP8 or INT8 rounds away look the same: then compute "
        "in one type, or correct for it.",
    ),
    "adapter_missing": Cause(
        "an adapter that never reaches the server",
        Test(arrivals.adapter_missing, 0.4, 0.6),
        "The sampler still uses the base model, whatever age is announced: a correction is valid, but the gap keeps "
        "growing. Ask the server for its adapters (`/v1/models`), and check that requests name the one that was "
        "pushed last. Start it with `--enable-lora`, `--max-loras` two above `max_staleness` and "
        "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.",
    ),
    "pushed_in_part": Cause(
        "weights that arrive in part, or with a wrong scale",
        Test(arrivals.pushed_in_part, 0.4, 0.6),
        "Look for what the engine leaves out: biases, `modules_to_save` and magnitudes (DoRA) of an adapter, a head, "
        "experts; for the scale of an adapter; and for one replica of several. Compare tensors in the engine with the "
        "trainer's after a push. A correction is valid, but the gap keeps growing: repair the push.",
    ),
    "standing_still": Cause(
        "a sampler that changes while the trainer's weights stand still",
        Test(arrivals.standing_still, 0.4, 0.6),
        "Start a new run with the folder of the checkpoint as its model, and `learning_rate: 0`. "
        "`resume_from_checkpoint` would not do, because it restores the rate. If the gap grows again, restart the "
        "engine, empty its caches, compare its version and kernels, and check whether completions get longer.",
        {"learning_rate": 0.0},
        "No update is the cause: restart the engine, empty its caches, and compare its version and kernels.",
    ),
    "lora_merge": Cause(
        "an adapter that is rounded when it is merged",
        Test(drift.lora_merge, 0.6, 0.9),
        "The sampler gets the adapter merged into bfloat16 weights. Keep the base in "
        f"float32{_LOADED}. The gap stays as small as rounding.",
        {"model_init_kwargs": {"dtype": "float32"}},
        f"The sampler rounds: {_IN_FLOAT32}{_LOADED}. The gap stays as small as rounding.",
        on_quantised="The sampler receives the adapter merged into the base, rounded to bfloat16, while the trainer "
        f"adds the adapter's output to a quantised base. To make the gap smaller, {_IN_FLOAT32}{_LOADED}. It stays "
        "as small as rounding.",
        may_correct=True,
        normal=True,
    ),
    "truncation": Cause(
        "truncated sampling: top-p, top-k or min-p",
        Test(sampling.truncation, 0.2, 0.4),
        "The trainer scores with the whole distribution: sample from it as well.",
        {"top_p": 1.0, "top_k": 0, "min_p": None},
        _TRUNCATED,
        _TRUNCATED,
        may_correct=True,
        parts=(OPTIONS,),
    ),
    "penalty": Cause(
        "a penalty on repeated tokens",
        Test(sampling.penalty, 0.3, 0.5),
        "The trainer does not know it: remove it, including from `generation_kwargs` and the model's "
        "`generation_config.json`.",
        {"repetition_penalty": 1.0, "generation_kwargs": {"presence_penalty": 0.0, "frequency_penalty": 0.0}},
        f"The penalty is set elsewhere: {_ELSEWHERE}",
        may_correct=True,
        parts=(OPTIONS,),
    ),
    "temperature": Cause(
        "another temperature, or log-probabilities before temperature",
        Test(sampling.temperature, 0.4, 0.6),
        "Start a server with `--logprobs-mode processed_logprobs`, and sample with the trainer's `temperature`: both "
        f"sides must divide logits by the same one. {_RAW}",
        {"temperature": 1.0},
        "The sampler divides logits by another temperature: look for one in a `rollout_func`, in `generation_kwargs` "
        f"and in requests to the server. {_RAW}",
    ),
    "other_draws": Cause(
        "tokens that were drawn from another distribution than their values",
        Test(sampling.other_draws, 0.1, 0.3),
        "The tokens were drawn with another temperature, with `top_p`, or in another way. Return the "
        "log-probabilities of the distribution that they are drawn from (`--logprobs-mode processed_logprobs`), or "
        f"draw from the whole one. {HIDES}",
    ),
    "routing": Cause(
        "mixture of experts: tokens that are routed to other experts",
        Test(precision.routing, 60.0, 120.0),
        "Correct single tokens: one token with other experts would decide the weight of its completion. With vLLM in "
        "the training process and without tensor parallelism, the trainer can also replay the sampler's experts.",
        {"rollout_routing": "replay", "rollout_engine_kwargs": {"enable_return_routed_experts": True}},
        "The trainer already uses the sampler's experts, so something else moves these tokens. Float32 routers on "
        "both sides make them fewer.",
        may_correct=True,
    ),
    "kv_cache": Cause(
        "key-value cache in low precision",
        Test(precision.kv_cache, 0.15, 0.4),
        "Keep the key-value cache in the type of the model.",
        {"rollout_engine_kwargs": {"kv_cache_dtype": "auto"}},
        "The checkpoint or the server asks for the low precision: name the type of the model, such as "
        "`kv_cache_dtype: bfloat16`, or start the server with `--kv-cache-dtype bfloat16`.",
        may_correct=True,
        parts=(CACHE,),
    ),
    "quantised": Cause(
        "a quantised sampler",
        Test(precision.quantised, 0.0, 1.0),
        "This gap is the price of faster sampling, and `trl-rollout-corr probe` measures it. Keep head, embeddings "
        "and the key-value cache in 16 bits.",
        may_correct=True,
        announced=True,
        parts=(QUANTISATION,),
    ),
    "weights": Cause(
        "weights that differ from the trainer's: low precision (int8, fp8, int4), an older policy, or not the pushed "
        "ones",
        Test(precision.weights, 0.12, 0.25),
        "Sample in the trainer's precision, or quantise the trainer in the same way. If nothing is quantised, "
        "compare a weight in the engine with the trainer's. If the sampler lags on purpose, set "
        "`trainer.rollout_step`.",
        may_correct=True,
        fallback=Test(precision.noisy_weights, 0.55, 0.65),
        parts=(QUANTISATION, PUSH),
    ),
    "head": Cause(
        "precision of the head",
        Test(precision.head, 0.8, 0.95),
        "Let the head compute in float32 on both sides: recipe grpo/fp32_head.yaml.",
        _FLOAT32_HEADS,
        _SMALLER,
        _IN_FLOAT16,
        may_correct=True,
        normal=True,
        at_equal_weights=True,
        parts=(HEAD,),
    ),
    "rounding": Cause(
        "rounding of bfloat16 or float16",
        Test(precision.rounding, 0.4, 0.8),
        "This is normal, because two kernels compute the same policy. On both sides, a head in float32 makes the gap "
        "smaller (recipe grpo/fp32_head.yaml), and float16 much smaller (recipe grpo/fp16.yaml).",
        _FLOAT32_HEADS,
        _SMALLER,
        _IN_FLOAT16,
        may_correct=True,
        normal=True,
        at_equal_weights=True,
        parts=(BODY,),
    ),
}
