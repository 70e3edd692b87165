"""Settings in effect, as a dump keeps them. [`Settings.read`] reads them back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...messages import plain
from ...settings.resolve import Settings
from ..translation.trl import TRL_KEYS


# Fields of TRL that `diagnose` advises to set, or that rules and `compare` read. Mappings are cut
# down to these keys, because others may be secret, such as a Hub token
_OF_TRL: dict[str, tuple[str, ...]] = {
    "cast_lm_head_to_fp32": (),
    "disable_dropout": (),
    "epsilon": (),
    "epsilon_high": (),
    "gradient_accumulation_steps": (),
    "generation_kwargs": ("frequency_penalty", "presence_penalty"),
    "importance_sampling_level": (),
    "learning_rate": (),
    "loss_type": (),
    "mask_truncated_completions": (),
    "min_p": (),
    "model_init_kwargs": ("dtype",),
    "num_iterations": (),
    "per_device_train_batch_size": (),
    "repetition_penalty": (),
    "steps_per_generation": (),
    "temperature": (),
    "top_k": (),
    "top_p": (),
    "use_vllm": (),
    "vllm_mode": (),
    **dict.fromkeys(TRL_KEYS, ()),
}


def settings_in_effect(args: Any, settings: Settings) -> dict[str, Any]:
    """
    Settings in effect, the names of the `given` ones, and some fields of TRL, in types of JSON.
    `in_effect` says that no preset decides any of the settings again.
    """
    written = {**asdict(settings), "in_effect": True, "given": sorted(args.given)}
    for name, keys in _OF_TRL.items():
        if hasattr(args, name):
            value = getattr(args, name)
            written[name] = {key: value[key] for key in keys if key in value} if isinstance(value, Mapping) else value
    engine = settings.rollout_engine_kwargs or {}  # vLLM's only secret is the Hub token
    written["rollout_engine_kwargs"] = {name: value for name, value in engine.items() if name != "hf_token"} or None
    return {name: plain(value) for name, value in written.items()}
