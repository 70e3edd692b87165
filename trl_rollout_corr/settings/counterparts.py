"""Fields of TRL for the settings of verl outside rollout correction, as a table."""

from collections.abc import Mapping

from ..messages import warn
from .migrate import read_truth, read_value
from .thresholds import parse_number


TRAINERS = {"grpo": "RolloutCorrectedGRPOTrainer", "rloo": "RolloutCorrectedRLOOTrainer"}
_KL = "RLOO has the divergence in the reward with the coefficient `beta`, GRPO in the loss"
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
    "actor.use_kl_loss": ("beta", _KL),
    "actor.kl_loss_coef": ("beta", "it acts with `use_kl_loss`, and RLOO has the divergence in the reward"),
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
_ONLY_GRPO = ("delta", "loss_type", "scale_rewards")
_NEUTRAL = {"top_p": 1, "top_k": 0, "repetition_penalty": 1}
_DISTORTS = "changes what vLLM samples but not what the trainer scores, so that every ratio is off. Neutral is {}"


def counterpart(name: str) -> str | None:
    """The setting of `COUNTERPARTS` with a dotted name, or with a name below it; its last part alone is enough."""
    name = name.removeprefix("actor_rollout_ref.")
    parts = _SHORT.get(name.lower(), name).split(".")
    above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((key for key in above if key in COUNTERPARTS), None)


def to_trl(settings: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """
    TRL's fields for settings of verl outside rollout correction, which is translated to `fields`. A warning names each
    setting without an exact counterpart, and another one names all settings about which nothing is known.
    """
    known = {counterpart(name): value for name, value in settings.items() if value not in (None, "null", {})}
    rloo = known.get("algorithm.adv_estimator") == "rloo"
    beta = _beta(known, rloo)
    trl = {} if beta is None else {"beta": beta}
    unknown = [f"`{name}`" for name in settings if counterpart(name) is None]
    for name, value in settings.items():
        key = counterpart(name)
        field, note = COUNTERPARTS.get(key or "", ("", ""))
        if key is None or key not in known or (field == "beta" and beta is not None):
            continue
        if key == "algorithm.adv_estimator" and value in TRAINERS:
            continue
        if field == "delta" and fields.get("bypass_mode") and fields.get("rollout_loss_type") == "ppo_clip":
            field = "rollout_clip_ratio_c"
        exact = field and field != "beta" and not (rloo and field in _ONLY_GRPO)
        if exact and (read := _read(field, value, name)) is not None:
            if trl.get(field, read) != read:
                warn(
                    f"`{name}` is {value}, while another key sets `{field}` to {trl[field]}. The last one is kept.",
                    name,
                )
            trl[field] = read
        else:
            warn(f"`{name}` is left out: {note}.", name)
    if "epsilon" in trl:
        trl.setdefault("epsilon_high", 0.2)  # verl's default; TRL's is `epsilon`
    if unknown:
        warn(f"{', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} left out: not about rollout correction.")
    return trl


def comment(field: str, value: object) -> str:
    """A comment on a field of TRL that makes the sampler's distribution differ from the trainer's."""
    return _DISTORTS.format(_NEUTRAL[field]) if value != _NEUTRAL.get(field, value) else ""


def _beta(known: Mapping[str | None, object], rloo: bool) -> object:
    """TRL's coefficient of the divergence, or `None` if it has no exact one. verl adds a divergence only on demand."""
    in_loss, in_reward = (
        read_truth(known.get(key, False), key) for key in ("actor.use_kl_loss", "algorithm.use_kl_in_reward")
    )
    if in_loss and not in_reward and not rloo:
        return _read("beta", known.get("actor.kl_loss_coef", 0.001), "kl_loss_coef")  # verl's default
    return None if in_loss or in_reward or not (rloo or "actor.use_kl_loss" in known) else 0


def _read(field: str, value: object, name: str) -> object:
    """Value of a field of TRL for a value of verl, or `None` if the field has no such value."""
    value = read_value(value, name)
    if field == "model_name_or_path":
        return value
    if field == "scale_rewards":
        return "group" if read_truth(value, name) else "none"
    if field == "loss_type":
        return _LOSSES.get(str(value))
    number = parse_number(value, name)
    if field == "top_k":
        number = max(number, 0.0)  # vLLM's -1 is TRL's 0
    return int(number) if number.is_integer() else number
