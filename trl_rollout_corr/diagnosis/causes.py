"""What each cause is, and what to do about it, as data. `docs/diagnose.md` has it at length."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..settings.presets import Preset


class Cause(NamedTuple):
    """
    A cause.

    Args:
        title (`str`):
            What it is, in a line.
        remedy (`str`):
            What to do, first at the source.
        settings (`Mapping[str, Any]`):
            Settings of a trainer that do it, to paste; empty where it takes other means.
        preset (`Preset` or `None`):
            What corrects for the rest of it; `None` where a correction would hide a mistake.
        normal (`bool`, *optional*, defaults to `False`):
            It is in every run, and unhealthy only where it is large.
        otherwise (`str`, *optional*, defaults to `""`):
            What to do where the run has these settings already.
    """

    title: str
    remedy: str
    settings: Mapping[str, Any]
    preset: Preset | None
    normal: bool = False
    otherwise: str = ""


_SAME = "A correction hides a mistake here: its weights are those of a policy that nobody samples from."
_ELSEWHERE = (
    "in a `rollout_func`, or by the server: it fills in what a request leaves out from the model's `generation_config.json`, "
    "unless it is started with `--generation-config vllm`."
)
_SMALLER = (
    "Normal: the rounding of the layers is left. float16 on both sides makes it much smaller (recipe grpo/fp16.yaml)."
)

CAUSES: dict[str, Cause] = {
    "nan_rows": Cause(
        "rows of logits that are NaN",
        "Stop at the first one and look at the weights of that step: `rollout_nan_policy: raise`. Then at a "
        "push of weights that "
        "failed, an overflow in float16, and kernels of the sampler.",
        {"rollout_nan_policy": "raise"},
        None,
        otherwise="Look at the weights of the step that raised, at a push of weights that failed, an overflow in float16, and "
        "kernels of the sampler.",
    ),
    "shift": Cause(
        "log-probabilities that are a token off",
        "A `rollout_func` or environment returns log-probabilities from the first token of the prompt on, or "
        "without the last one. "
        f"Each must stand beside its own token. {_SAME}",
        {},
        None,
    ),
    "first_token": Cause(
        "another start: BOS twice or never, or another chat template",
        "Compare the token ids that sampler and trainer begin with. Send ids, not text, to the sampler, and "
        "apply the chat template "
        f"once. {_SAME}",
        {},
        None,
    ),
    "last_token": Cause(
        "another end: EOS, a stop string, or a limit",
        "The last token was forced and not sampled, or the sampler may stop at tokens that the trainer does "
        "not know. Give both the "
        "same `eos_token_id`, leave out stop strings, or take completions that were cut out of the loss.",
        {"mask_truncated_completions": True},
        "decoupled_token_is",
        otherwise="The last token is not that of a truncated completion: give trainer and sampler the same `eos_token_id`, "
        "and leave out stop strings.",
    ),
    "seams": Cause(
        "seams of turns: text that was made into other tokens",
        "Between turns, text was decoded and made into tokens again, and came out as others. Keep the token "
        "ids that were sampled, "
        "and append those of the tool's answer.",
        {},
        "decoupled_token_icepop",
    ),
    "padding": Cause(
        "padding that the trainer attends to, or positions that count it",
        "Give the model the mask of attention and `position_ids` that count from the first token of the "
        "prompt. Try a batch of one, "
        f"which has no padding. {_SAME}",
        {"per_device_train_batch_size": 1},
        None,
        otherwise="Give the model `position_ids` that count from the first token of the prompt, and the mask of attention. "
        f"{_SAME}",
    ),
    "dropout": Cause(
        "dropout in the trainer",
        "Switch it off: `disable_dropout: true`, and `lora_dropout: 0` of an adapter. The policy that is "
        "trained is then the one "
        "that samples.",
        {"disable_dropout": True},
        "decoupled_token_is",
        otherwise="The dropout is that of an adapter, `lora_dropout: 0`, or one that the code of the model applies by itself.",
    ),
    "stale": Cause(
        "stale weights: samples of an older policy",
        "Sample with newer weights: fewer steps between pushes, a shorter queue. What remains is what the correction is for.",
        {},
        "decoupled_token_is",
    ),
    "never_pushed": Cause(
        "weights that are never pushed to the sampler",
        "From the first step on, trainer and sampler move apart, whatever the age says. Look at the push: "
        "names of parameters that "
        "the sampler does not know, an adapter that is not merged, a server that takes weights and keeps its cache. "
        f"{_SAME}",
        {},
        None,
    ),
    "own_updates": Cause(
        "the policy's own updates",
        "In bypass mode, and with a batch that is trained on several times, the log-ratio contains what was "
        "learned meanwhile. "
        "Nothing is wrong with the sampler: judge it by the first visit. A decoupled preset tells the two apart.",
        {"rollout_correction": "decoupled_token_is"},
        None,
    ),
    "lora_merge": Cause(
        "an adapter that is rounded when it is merged",
        "The adapter is added to weights in bfloat16 for the sampler and kept apart in the trainer. Keep the "
        "base weights in float32, "
        "or let vLLM load the adapter as it is. It stays as small as rounding.",
        {"model_init_kwargs": {"dtype": "float32"}},
        "decoupled_token_is",
        normal=True,
        otherwise="The sampler rounds: let vLLM load the adapter as it is, or compute in float32 (`rollout_engine_kwargs: "
        "{dtype: float32}`). It stays as small as rounding.",
    ),
    "truncation": Cause(
        "truncated sampling: top-p, top-k or min-p",
        "The sampler draws from a part of the distribution, and the trainer learns with all of it. Sample from all of it.",
        {"top_p": 1.0, "top_k": 0, "min_p": None},
        "decoupled_token_is",
        otherwise=f"The truncation is set elsewhere: in `generation_kwargs`, {_ELSEWHERE}",
    ),
    "penalty": Cause(
        "a penalty on what was said before",
        "The sampler's log-probabilities have a penalty in them that the trainer does not know. Leave it out, also where "
        "`generation_kwargs` or the model's `generation_config.json` set it.",
        {"repetition_penalty": 1.0, "generation_kwargs": {"presence_penalty": 0.0, "frequency_penalty": 0.0}},
        "decoupled_token_is",
        otherwise=f"The penalty is set elsewhere: {_ELSEWHERE}",
    ),
    "temperature": Cause(
        "another temperature, or log-probabilities from before it",
        "Both sides must divide logits by one temperature: `--logprobs-mode processed_logprobs` for a server, "
        "and the trainer's "
        f"`temperature` in what samples. {_SAME}",
        {"temperature": 1.0},
        None,
        otherwise="The sampler divides logits by another temperature: look for one in a `rollout_func`, in "
        f"`generation_kwargs` and in requests to the server. {_SAME}",
    ),
    "routing": Cause(
        "experts: tokens that take another route",
        "A few tokens are off by nats, the others hardly. Leave those out token by token; weights of whole "
        "completions would be "
        "made of them. float32 routers on both sides have fewer flips.",
        {},
        "decoupled_token_icepop",
    ),
    "kv_cache": Cause(
        "a cache of keys and values in low precision",
        "Cache in the type of the model.",
        {"rollout_engine_kwargs": {"kv_cache_dtype": "auto"}},
        "decoupled_token_is",
        otherwise="The checkpoint or the server asks for the low precision: name the type of the model, such as "
        "`kv_cache_dtype: bfloat16`, or start the server with `--kv-cache-dtype bfloat16`.",
    ),
    "weights": Cause(
        "other weights than the trainer's: low precision (int8, fp8, int4), or not the ones that were pushed",
        "Sample with weights of the trainer's precision, or quantise what the trainer computes with alike. If "
        "nothing is quantised, "
        "compare a weight of the engine with the trainer's.",
        {},
        "decoupled_token_is",
    ),
    "head": Cause(
        "precision of the head",
        "Let the head compute in float32 on both sides: recipe grpo/fp32_head.yaml.",
        {"cast_lm_head_to_fp32": True, "rollout_engine_kwargs": {"hf_overrides": {"head_dtype": "float32"}}},
        "decoupled_token_is",
        normal=True,
        otherwise=_SMALLER,
    ),
    "rounding": Cause(
        "rounding of bfloat16 or float16",
        "Normal: two kernels, one policy. A head in float32 on both sides makes it smaller (recipe grpo/fp32_head.yaml), "
        "float16 on both sides much smaller (recipe grpo/fp16.yaml).",
        {"cast_lm_head_to_fp32": True, "rollout_engine_kwargs": {"hf_overrides": {"head_dtype": "float32"}}},
        "decoupled_token_is",
        normal=True,
        otherwise=_SMALLER,
    ),
}
