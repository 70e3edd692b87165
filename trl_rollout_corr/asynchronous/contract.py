"""Methods, attributes and batch keys in use of TRL's asynchronous trainer: [`~trl_rollout_corr.trainers.trl_interface`]."""

from ..trainers.trl_interface import SHARED


METHODS = {
    "compute_loss": SHARED["compute_loss"],
    "get_train_dataloader": ["self"],
    "_sync_weight": ["self"],
    **{name: SHARED[name] for name in ("log", "create_model_card", "train")},
}
NAMES = {
    "attribute": ["_metrics", "_rollout_dataset", "model_version", "rollout_worker", "vllm_client", "weight_transfer"],
    "key": ["advantages", "old_log_probs", "token_index"],
}
