"""Settings in effect in a run, as its dump keeps them: written, and read back."""

import warnings
from collections.abc import Mapping
from typing import Any

from ...messages import plain
from ...settings.config import RolloutCorrectionConfig, settings_of_preset
from ...settings.presets import UNSET
from ...settings.resolve import Settings
from ..translation.own_settings import in_one_line, own_fields
from ..translation.trl import TRL_KEYS


# Fields of TRL that `diagnose` advises to set, or that rules and `compare` read. Mappings are cut down to these keys,
# because others may be secret, such as a Hub token
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
    "vllm_tensor_parallel_size": (),
    **dict.fromkeys(TRL_KEYS, ()),
}
# Arguments of vLLM's engine whose texts and mappings are written: how it computes. Others may be secret, as may any
# address: the Hub token, or the keys of a store in `model_loader_extra_config`. Of them only numbers and truths are
_OF_ENGINE = frozenset({
    "attention_backend",
    "attention_config",
    "compilation_config",
    "dtype",
    "hf_overrides",
    "kernel_config",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "linear_backend",
    "load_format",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "moe_backend",
    "quantization",
    "quantization_config",
    "spec_method",
})  # fmt: skip


def settings_in_effect(args: Any, settings: Settings) -> dict[str, Any]:
    """
    Settings in effect, the names of the `given` ones, and some fields of TRL, in types of JSON. `in_effect` says that
    no preset decides any of the settings again.
    """
    written = {**settings.fields, "in_effect": True, "given": sorted(settings.given)}
    for name, keys in _OF_TRL.items():
        if hasattr(args, name):
            value = getattr(args, name)
            if isinstance(value, Mapping):
                written[name] = {key: value[key] for key in keys if key in value}
            elif not keys or value is None:
                written[name] = value
    engine = plain(settings.rollout_engine_kwargs or {})
    public = {name: x for name, x in engine.items() if name in _OF_ENGINE or isinstance(x, bool | int | float)}
    written["rollout_engine_kwargs"] = public or None
    return {name: plain(value) for name, value in written.items()}


def read_settings(written: Mapping[str, Any]) -> Settings | None:
    """
    Settings in effect of the run that wrote a dump; `None` if it names none. Missing ones are off. A dump from
    elsewhere may name only a part of them, as a configuration does. Raises a `ValueError` of one line.
    """
    own = own_fields(written)
    if not own:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run warned already
        try:
            if written.get("in_effect") is True or _look_decided(own):
                return Settings.read({**settings_of_preset(None).fields, **own})
            if own.get("rollout_correction") == "trl":  # no configuration of ours can name its weights
                return Settings.read({**settings_of_preset("trl").fields, **own})
            return RolloutCorrectionConfig(**own).settings
        except (ValueError, TypeError) as error:
            raise ValueError(in_one_line(error)) from None


def _look_decided(own: Mapping[str, Any]) -> bool:
    """True if no preset has a field to decide, as in a dump that does not say what it names."""
    decided = UNSET.keys() - {"rollout_rs_threshold"}
    return "rollout_correction" in own and all(own.get(name, UNSET[name]) != UNSET[name] for name in decided)
