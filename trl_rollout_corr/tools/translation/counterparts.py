"""Fields of TRL for the settings of verl outside rollout correction, as a table."""

from collections.abc import Mapping

from ...messages import warn
from ...settings.thresholds import parse_number, parse_truth
from .of_trl import read_value


TRAINERS = {"grpo": "RolloutCorrectedGRPOTrainer", "rloo": "RolloutCorrectedRLOOTrainer"}
_KL = "set `beta`, the coefficient of the divergence, which is in the loss of GRPO and in the reward of RLOO"
_PENALTY = "a penalty changes what vLLM samples but not what the trainer scores, so that every ratio would be off"
_PROMPTS = "multiplied by `rollout.n`, it is `per_device_train_batch_size` times `{}`, of all processes"
# Settings of verl outside its section, without `actor_rollout_ref`: TRL's field of the same meaning, or what there is instead
COUNTERPARTS: dict[str, tuple[str, str]] = {
    "algorithm.adv_estimator": ("", "TRL has neither this estimator nor a value model, but GRPO and RLOO"),
    "algorithm.use_kl_in_reward": ("", _KL),
    "algorithm.norm_adv_by_std_in_grpo": ("scale_rewards", "it acts in GRPO only"),
    "model.path": ("model_name_or_path", ""),
    "actor.optim.lr": ("learning_rate", ""),
    "actor.ppo_epochs": ("num_iterations", ""),
    "actor.ppo_mini_batch_size": ("", _PROMPTS.format("gradient_accumulation_steps")),
    "actor.clip_ratio_low": ("epsilon", ""),
    "actor.clip_ratio_high": ("epsilon_high", ""),
    "actor.clip_ratio_c": ("delta", "TRL's RLOO has no such bound"),
    "actor.loss_agg_mode": ("loss_type", "TRL has no such loss. For GRPO, `loss_type: dr_grpo` is the nearest"),
    "actor.use_kl_loss": ("", _KL),
    "actor.kl_loss_coef": ("", "it acts with `use_kl_loss`, and is TRL's `beta`"),
    "actor.grad_clip": ("max_grad_norm", ""),
    "actor.tis_imp_ratio_cap": ("", "write `rollout_is: token`, and the number as `rollout_is_threshold`"),
    "actor.router_replay": ("", "`rollout_routing: replay` is R3, and nothing here is R2"),
    "rollout.n": ("num_generations", ""),
    "rollout.temperature": ("temperature", ""),
    "rollout.top_p": ("top_p", ""),
    "rollout.top_k": ("top_k", ""),
    "rollout.repetition_penalty": ("repetition_penalty", ""),
    "rollout.presence_penalty": ("", _PENALTY),
    "rollout.frequency_penalty": ("", _PENALTY),
    "rollout.max_model_len": ("vllm_max_model_length", ""),
    "rollout.tensor_model_parallel_size": ("vllm_tensor_parallel_size", ""),
    "rollout.quantization": ("", "vLLM samples in the precision of the trained model, not quantised"),
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
_ONLY_GRPO = ("delta", "loss_type", "scale_rewards")
_NEUTRAL = {"top_p": 1, "top_k": 0, "repetition_penalty": 1}
_DISTORTS = "changes what vLLM samples but not what the trainer scores, so that every ratio is off. Neutral is {}"


def counterpart(name: str) -> str | None:
    """The setting of `COUNTERPARTS` with a dotted name, or with a name below it; its last part alone is enough."""
    name = name.removeprefix("actor_rollout_ref.")
    parts = _SHORT.get(name.lower(), name).split(".")
    above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((key for key in above if key in COUNTERPARTS), None)


def to_trl(settings: Mapping[str, object]) -> dict[str, object]:
    """TRL's fields for settings of verl outside rollout correction, with warnings about those without an exact counterpart."""
    known = {
        name: key for name, value in settings.items() if (key := counterpart(name)) and value not in (None, "null", {})
    }
    rloo = any(key == "algorithm.adv_estimator" and settings[name] == "rloo" for name, key in known.items())
    values = {key: settings[name] for name, key in known.items()}
    diverges = {key: parse_truth(read_value(values.get(key, False), key), key) for key in _DIVERGENCES}
    trl: dict[str, object] = {"beta": 0} if rloo and not any(diverges.values()) else {}  # TRL's default is above 0
    if diverges["actor.use_kl_loss"] and not rloo:
        trl["beta"] = _read("beta", values.get("actor.kl_loss_coef", 0.001), "kl_loss_coef")  # verl's default
    for name, key in known.items():
        value, (field, note) = settings[name], COUNTERPARTS[key]
        if key == "algorithm.adv_estimator" and value in TRAINERS:
            continue
        if not diverges.get(key, True) or (key in _IN_LOSS and "beta" in trl):
            continue
        exact = field and not (rloo and field in _ONLY_GRPO)
        if not exact or (read := _read(field, value, name)) is None:
            warn(f"`{name}` is left out: {note}.", name)
            continue
        if trl.get(field, read) != read:
            warn(f"`{name}` is {value}, while another key sets `{field}` to {trl[field]}. The last one is kept.", name)
        trl[field] = read
    if "epsilon" in trl:
        trl.setdefault("epsilon_high", 0.2)  # verl's default; TRL's is `epsilon`
    if unknown := [f"`{name}`" for name in settings if counterpart(name) is None]:
        warn(f"{', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} left out: not about rollout correction.")
    return trl


def comment(field: str, value: object) -> str:
    """A comment on a field of TRL that makes the sampler's distribution differ from the trainer's."""
    return _DISTORTS.format(_NEUTRAL[field]) if value != _NEUTRAL.get(field, value) else ""


def _read(field: str, value: object, name: str) -> object:
    """Value of a field of TRL for a value of verl, or `None` if the field has no such value."""
    value = read_value(value, name)
    if field == "model_name_or_path":
        return value
    if field == "scale_rewards":
        return "group" if parse_truth(value, name) else "none"
    if field == "loss_type":
        return _LOSSES.get(str(value))
    number = parse_number(value, name)
    if field == "top_k":
        number = max(number, 0.0)  # vLLM's -1 is TRL's 0
    return int(number) if number.is_integer() else number
