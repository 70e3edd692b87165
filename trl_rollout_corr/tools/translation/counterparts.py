"""Fields of TRL for the settings of verl outside rollout correction, as a table."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ...messages import SettingError, warn
from ...settings.thresholds import parse_number, parse_truth
from .trl import read_value


TRAINERS = {"grpo": "RolloutCorrectedGRPOTrainer", "rloo": "RolloutCorrectedRLOOTrainer"}
_KL = "set `beta`, the coefficient of the divergence, which is in the loss of GRPO and in the reward of RLOO"
_KL_CONTROL = (
    "verl reads `kl_ctrl` with `use_kl_in_reward` alone, and its coefficient is TRL's `beta`. With `type: adaptive` "
    "it changes during training, while `beta` is constant"
)
_CLIP_RATIO = "verl reads `clip_ratio_low` and `clip_ratio_high`, whose default is 0.2"
_POLICY_LOSS = (
    "TRL chooses its loss by `loss_type` (cispo, sapo and others) and `importance_sampling_level` (sequence is GSPO). "
    "`rollout_correction: bypass_dppo_tv` and `bypass_dppo_kl` are DPPO around the sampler"
)
_LOGPROBS_MODE = (
    "it decides what every ratio means. TRL asks vLLM for `processed_logprobs`, those that tokens are sampled with. "
    "In another mode, ratios of verl are off wherever the temperature is not 1 or tokens are cut"
)
_QUANTISED = (
    "write `rollout_engine_kwargs: {quantization: fp8}` for a sampler of 8 bits (`trl-rollout-corr docs "
    "models#8-bit-samplers`). verl's fp8 has one scale for each block of weights, which vLLM calls `fp8_per_block`"
)
_ENGINE = "write arguments of vLLM's engine into `rollout_engine_kwargs`, such as `{kv_cache_dtype: fp8}`"
_OF_SAMPLER = "a setting of the sampler that changes what is sampled, or its log-probabilities, changes every ratio"
_PENALTY = "a penalty changes what vLLM samples but not what the trainer scores, so that every ratio would be off"
_PROMPTS = "multiplied by `rollout.n`, it is `per_device_train_batch_size` times `{}`, of all processes"
# Settings of verl outside its section, without `actor_rollout_ref`: TRL's field of the same meaning, or what to do
# instead
COUNTERPARTS: dict[str, tuple[str, str]] = {
    "algorithm.adv_estimator": ("", "TRL has neither this estimator nor a value model, but GRPO and RLOO"),
    "algorithm.use_kl_in_reward": ("", _KL),
    "algorithm.kl_ctrl": ("", _KL_CONTROL),
    "algorithm.norm_adv_by_std_in_grpo": ("scale_rewards", "it acts in GRPO only"),
    "model.path": ("model_name_or_path", ""),
    "actor.optim.lr": ("learning_rate", ""),
    "actor.ppo_epochs": ("num_iterations", ""),
    "actor.ppo_mini_batch_size": ("", _PROMPTS.format("gradient_accumulation_steps")),
    "actor.clip_ratio": ("", _CLIP_RATIO),
    "actor.clip_ratio_low": ("epsilon", ""),
    "actor.clip_ratio_high": ("epsilon_high", ""),
    "actor.clip_ratio_c": ("delta", "TRL's RLOO has no such bound"),
    "actor.policy_loss.loss_mode": ("", _POLICY_LOSS),
    "actor.loss_agg_mode": ("loss_type", "TRL has no such loss. For GRPO, `loss_type: dr_grpo` is the nearest"),
    "actor.use_kl_loss": ("", _KL),
    "actor.kl_loss_coef": ("", "it acts with `use_kl_loss`, and is TRL's `beta`"),
    "actor.grad_clip": ("max_grad_norm", ""),
    "actor.router_replay": ("", "`rollout_routing: replay` is R3, and nothing here is R2"),
    "rollout.n": ("num_generations", ""),
    "rollout.temperature": ("temperature", ""),
    "rollout.top_p": ("top_p", ""),
    "rollout.top_k": ("top_k", ""),
    "rollout.min_p": ("min_p", ""),
    "rollout.repetition_penalty": ("repetition_penalty", ""),
    "rollout.presence_penalty": ("", _PENALTY),
    "rollout.frequency_penalty": ("", _PENALTY),
    "rollout.max_model_len": ("vllm_max_model_length", ""),
    "rollout.tensor_model_parallel_size": ("vllm_tensor_parallel_size", ""),
    "rollout.calculate_log_probs": ("", "the trainers ask vLLM for log-probabilities in any case"),
    "rollout.logprobs_mode": ("", _LOGPROBS_MODE),
    "rollout.quantization": ("", _QUANTISED),
    "rollout.engine_kwargs": ("", _ENGINE),
    "rollout.enable_rollout_routing_replay": (
        "",
        "write `rollout_routing: replay` to replay the sampler's experts (R3)",
    ),
    "data.train_batch_size": ("", _PROMPTS.format("steps_per_generation")),
    "data.max_response_length": ("max_completion_length", ""),
    "trainer.total_epochs": ("num_train_epochs", ""),
}
_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
_SHORT = {name.rpartition(".")[2]: name for name in COUNTERPARTS} | {"learning_rate": "actor.optim.lr"}
_IN_LOSS = ("actor.use_kl_loss", "actor.kl_loss_coef")
_DIVERGENCES = ("actor.use_kl_loss", "algorithm.use_kl_in_reward")
_COEFFICIENT = 0.001  # verl's default
_ONLY_GRPO = ("delta", "loss_type", "scale_rewards")
# Fields in this table that the configuration of a trainer lacks, and so refuses
LACKS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": _ONLY_GRPO,
    "async_grpo": (*_ONLY_GRPO, "beta", "num_iterations", "vllm_max_model_length", "vllm_tensor_parallel_size"),
}
# Values at which a setting means what TRL does without it
_AS_TRL: dict[str, tuple[object, ...]] = {
    "rollout.logprobs_mode": ("processed_logprobs",),
    "actor.policy_loss.loss_mode": ("vanilla", "bypass_mode"),
}
_AS_TRL |= {"actor.router_replay": ("disabled",), "rollout.enable_rollout_routing_replay": (False, "False", "false")}
# Names that may belong to a correction, and names with the same words that do not
_OF_CORRECTION = re.compile(
    r"(?:^|[._])(?:ratio|tis|is|importance|imp)(?:[._]|$)|mask_(?:low|high)|off_policy|rollout_corr", re.IGNORECASE
)
_OTHER_RATIO = re.compile(
    r"(?:lr|warmup|steps|cov|replace|fresh|split|val|test|train|sample|clip)_ratio(?:_c|_low|_high)?\b"
)
_OPTION_OF_CORRECTION = re.compile(
    r"(?:^|_)(?:tis|mis|is|importance|icepop)(?:_|$)|off_policy|rollout_log_?probs", re.IGNORECASE
)
# Settings of verl's sampler that change neither what is sampled nor its log-probabilities
_OF_WORK = re.compile(
    r"rollout\.(?:name|mode|gpu_mem|free_cache|log_prob_|max_num_|disable_log|multi_turn|agent|trace|skip)"
)
_LISTED, _SHOWN = 8, 30  # most settings of one section, and of all, that are named one by one


def counterpart(name: str) -> str | None:
    """The setting of `COUNTERPARTS` with a dotted name or above it. Its last part alone is enough."""
    name = name.removeprefix("actor_rollout_ref.")
    name = _SHORT.get(name.lower(), name)
    return next((key for key in _above(name) if key in COUNTERPARTS), None)


def _above(name: str) -> list[str]:
    """A dotted name and the names of its sections, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def to_trl(settings: Mapping[str, object], trainer: str = "grpo") -> dict[str, object]:
    """
    TRL's fields for settings of verl outside rollout correction, which a trainer takes: GRPO's or RLOO's, as the
    estimator says, or another `trainer`. Warns where no counterpart is exact.
    """
    known = {
        name: key
        for name, value in settings.items()
        if (key := counterpart(name)) and value not in (None, "null", {}, *_AS_TRL.get(key, ()))
    }
    rloo = trainer == "rloo" or any(
        key == "algorithm.adv_estimator" and settings[name] == "rloo" for name, key in known.items()
    )
    trl, answered = _divergence(settings, known, rloo)
    left_out: dict[str, list[str]] = {}
    for name, key in known.items():
        value, (field, note) = settings[name], COUNTERPARTS[key]
        is_trainer = key == "algorithm.adv_estimator" and value in TRAINERS
        if name in answered or is_trainer or name.endswith("._target_"):
            continue
        exact = field and not (rloo and field in _ONLY_GRPO)
        read = _read(field, value, name) if exact else None
        if read is None:
            left_out.setdefault(note, []).append(name)
            continue
        if trl.get(field, read) != read:
            warn(f"`{name}` is {value}, while another key sets `{field}` to {trl[field]}. The last one is kept.", name)
        trl[field] = read
    if "epsilon" in trl:
        trl.setdefault("epsilon_high", 0.2)  # verl's default; TRL's is `epsilon`
    for field in [field for field in trl if field in LACKS[trainer]]:
        warn(f"`{field}: {trl.pop(field)}` is left out: the trainer of this file has no such field.", field)
    for note, names in left_out.items():
        _warn_about(names, note)
    _warn_about_unknown(settings)
    return trl


def _divergence(
    settings: Mapping[str, object], known: Mapping[str, str], rloo: bool
) -> tuple[dict[str, object], set[str]]:
    """TRL's `beta` for verl's divergences from a reference model, and the names of the translated settings."""
    values = {key: settings[name] for name, key in known.items()}
    in_loss, in_reward = (parse_truth(read_value(values.get(key, False), key), key) for key in _DIVERGENCES)
    of_control = {name.rpartition("kl_ctrl.")[2]: name for name in settings if "kl_ctrl." in name}
    adaptive = settings.get(of_control.get("type", "")) == "adaptive"
    trl: dict[str, object] = {}
    answered: set[str] = set()  # by key
    if rloo and not (in_loss or in_reward):
        trl["beta"] = 0  # TRL's default is above 0
    if in_loss and not rloo:
        trl["beta"] = _read("beta", values.get("actor.kl_loss_coef", _COEFFICIENT), "kl_loss_coef")
    if in_reward and rloo:
        coefficient = settings.get(of_control.get("kl_coef", ""), _COEFFICIENT)
        trl["beta"] = _read("beta", coefficient, "kl_coef")
        answered |= {"algorithm.use_kl_in_reward"} if adaptive else {"algorithm.use_kl_in_reward", "algorithm.kl_ctrl"}
    if "beta" in trl:
        answered |= {*_IN_LOSS}
    answered |= {key for key, acts in zip(_DIVERGENCES, (in_loss, in_reward), strict=True) if not acts}
    names = {name for name, key in known.items() if key in answered}
    if not adaptive:  # only the coefficient matters
        names |= {name for name, key in known.items() if key == "algorithm.kl_ctrl" and not name.endswith(".kl_coef")}
    return trl, names


def _warn_about_unknown(settings: Mapping[str, object]) -> None:
    """Warn about unknown settings: settings of the sampler, which change ratios, and all others."""
    unknown = [name for name in settings if counterpart(name) is None and not name.endswith("._target_")]
    of_sampler = [name for name in unknown if _is_of_sampler(name)]
    _warn_about(of_sampler, _OF_SAMPLER)
    _warn_about([name for name in unknown if name not in of_sampler], "not about rollout correction")


def _is_of_sampler(name: str) -> bool:
    name = name.removeprefix("actor_rollout_ref.")
    return name.startswith("rollout.") and ".val_kwargs." not in name and not _OF_WORK.match(name)


def _warn_about(names: list[str], note: str) -> None:
    """Warn about settings that are left out for one reason. A large section is only counted."""
    sections = Counter(_section(name) for name in names)
    shown = [f"`{name}`" for name in names if sections[_section(name)] <= _LISTED]
    shown += [f"{n} settings of `{section}`" for section, n in sections.items() if n > _LISTED]
    if len(shown) > _SHOWN:
        shown[_SHOWN:] = [f"{len(shown) - _SHOWN} others"]
    if names:
        warn(f"{', '.join(shown)} {'are' if len(names) > 1 else 'is'} left out: {note}.", names[0])


def _section(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "actor_rollout_ref" else 1])


def suspects(settings: Mapping[str, Any]) -> list[str]:
    """Names of omitted settings that may correct for the sampler and are not switched off."""
    return [
        name
        for name, value in settings.items()
        if counterpart(name) is None
        and _OF_CORRECTION.search(name)
        and not _OTHER_RATIO.search(name)
        and not _is_off(value)
    ]


def suspicious_options(options: Iterable[str]) -> list[str]:
    """Options of a command, such as `--use-tis`, that may correct for the sampler."""
    names = dict.fromkeys(option.partition("=")[0] for option in options if option.startswith("-"))
    return [name for name in names if _OPTION_OF_CORRECTION.search(re.sub(r"[-.]", "_", name))]


def _is_off(value: object) -> bool:
    """`True` for null, false, nothing, and the numbers that mean no bound: verl's -1."""
    if value in (None, False, {}, []) or str(value).strip().lower() in ("null", "none", "false", "no", "off", ""):
        return True
    try:
        return float(str(value)) <= 0
    except ValueError:
        return False


def _read(field: str, value: object, name: str) -> object:
    """Value of a field of TRL for a value of verl, or `None` if the field cannot take it."""
    value = read_value(value, name)
    if field == "model_name_or_path":
        return value
    if field == "scale_rewards":
        return "group" if parse_truth(value, name) else "none"
    if field == "loss_type":
        return _LOSSES.get(str(value))
    number = parse_number(value, name)
    if math.isinf(number):
        raise SettingError(name, value, allowed="a finite number")
    if field == "top_k":
        number = max(number, 0.0)  # vLLM's -1 is TRL's 0
    return int(number) if number.is_integer() else number
