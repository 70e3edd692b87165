"""Methods in use of TRL's asynchronous trainer: [`~trl_rollout_corr.trainers.trl_interface`]."""

from ..trainers.trl_interface import SHARED


METHODS = {
    "compute_loss": SHARED["compute_loss"],
    "get_train_dataloader": ["self"],
    "_sync_weight": ["self"],
    **{name: SHARED[name] for name in ("log", "train")},
}
