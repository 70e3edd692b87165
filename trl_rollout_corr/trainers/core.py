"""
Correction of one batch, its metrics and callbacks, for all trainers. It uses only attributes that every trainer of TRL has.

`B` completions, `T` completion tokens.
"""

import math
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput
from trl import GRPOConfig, RLOOConfig

from ..correction.compute import RolloutCorrection, compute_rollout_correction
from ..correction.functional import LOG_RATIO_BOUND, expected_share_outside, select_tokens
from ..dumps.writing import plain
from ..messages import warn
from .batch import ROLLOUT_LOGPS, ROLLOUT_STEP, TOKEN_STEPS, TURN_IDS
from .card import complete_card
from .console import add_console
from .dumping import SequenceDump, check_dump_folder, check_unused
from .first_step import FirstStepDiagnosis
from .lr_scaling import LearningRateScaling, check_scalable
from .monitor import MONITOR_FIELDS, settle_monitors
from .observer import Corrected, Moment, Observer
from .reporting import choose_metrics
from .run_metadata import check_dropout, check_types, engine_metadata, trainer_metadata
from .trl_interface import check_config_class


if TYPE_CHECKING:
    from transformers import Trainer as _Host  # the attributes in use are in `trl_interface.py`
else:
    _Host = object


# Fields of the sampler, which is built with the trainer
_READ_WHEN_BUILT = ("rollout_engine_kwargs", "rollout_support")
# Fields that are read when training begins. A later assignment is an error.
_READ_AT_START = (
    *MONITOR_FIELDS,
    "rollout_dump_dir",
    "rollout_diagnose",
    "rollout_lr_scaling",
    "rollout_routing",
    *_READ_WHEN_BUILT,
)


# Standard deviation of the log-ratio per token, in nats, between a trainer and a sampler in bfloat16 with the same weights. It
# corresponds to a k3_kl of 0.0008, measured for Qwen3-8B (https://github.com/AknA13/train-infer-mismatch). It is lower for
# small models.
ROUNDING = 0.04


def check_bounds_of_means(config: GRPOConfig | RLOOConfig) -> None:
    """
    Warn if bounds of `seq_mean_k1` are so narrow that rounding alone rejects most completions.

    The mean of `T` log-ratios has a standard deviation of `s / sqrt(T)`, so bounds for thousands of tokens are too narrow for
    a hundred. The prediction is for completions of the maximum length; shorter completions are rejected more often.
    """
    length = config.max_completion_length
    if not config.corrects or not length:
        return
    for criterion, bounds in zip(config.criteria, config.rollout_rs_threshold or [], strict=True):
        if criterion.name != "seq_mean_k1":
            continue
        share = expected_share_outside(ROUNDING, torch.tensor(float(length)), *bounds).item()
        if share > 0.5:
            width = 3 * ROUNDING / math.sqrt(length)
            lower = math.floor(1e4 * math.exp(-(ROUNDING**2) / 2 - width)) / 1e4
            upper = math.ceil(1e4 * math.exp(width)) / 1e4
            warn(
                f"`rollout_rs_threshold` of 'seq_mean_k1' is {bounds}, and `max_completion_length` is {length}: with a "
                f"sampler that differs by the rounding of bfloat16 alone ({ROUNDING} nats per token), {share:.0%} of "
                f"completions would be rejected, and more of shorter completions. Set [{lower:g}, {upper:g}] or wider, longer "
                "completions, or `rollout_correction: auto`, whose bounds do not depend on length. If the sampler is more "
                "precise, look at `rollout_corr/rollout_rs_masked_fraction`."
            )


def warn_about_one_process() -> None:
    """
    Warn if `accelerate launch` was asked for several processes on a CPU, of which it starts one.

    It then sets the address of the main process, which one process does not need, and no size of the world. A variable of the
    user's machine may look the same, so that this is no proof.
    """
    names = ("ACCELERATE_USE_CPU", "MASTER_ADDR", "WORLD_SIZE")
    if [os.environ.get(name) for name in names] == ["True", "127.0.0.1", None] and PartialState().num_processes == 1:
        warn(
            "This run has one process, although `accelerate launch` seems to have been asked for several: on a CPU it starts "
            "one. For several, use `torchrun --nproc_per_node 2 SCRIPT` with the options of the script."
        )


class CorrectionCore(_Host):
    """
    Correction of one batch, and its metrics. Comes before a trainer of TRL among the bases.

    A trainer sets `_trl_class` (TRL's trainer) and `_config_class` (its configuration), and overrides `_loss_mask` if its
    batches have another mask of the loss.
    """

    _trl_class: type
    _config_class: type
    _engine_config: Any = None  # of vLLM, if known

    _of_monitor: list[Any] | None = None  # settings that the monitor was made from
    _lr_scaling: LearningRateScaling | None = None

    def _checked_args(self, model: str | PreTrainedModel, args: Any) -> Any:
        if args is None:
            model_name = model if isinstance(model, str) else model.config._name_or_path
            return self._config_class(f"{model_name.split('/')[-1]}-{self._name}")
        check_config_class(args, self._config_class)
        warn_about_one_process()
        args.check()  # again, as fields may have been assigned; before vLLM starts, which takes long
        check_scalable(args)
        if args.rollout_dump_dir is not None:
            check_dump_folder(Path(args.rollout_dump_dir), new_run=False)
        return args

    def _checked_before_loading(self, model: str | PreTrainedModel, args: Any) -> Any:
        """Checks before model and vLLM are loaded, which takes minutes. Returns the configuration."""
        args = self._checked_args(model, args)
        if args.rollout_dump_dir is not None:
            check_unused(args)
        return args

    def _set_up_observer(self) -> None:
        """Last step of building a trainer: warnings about the model, the observer, and the callbacks."""
        check_dropout(self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True))
        add_console(self.callback_handler)
        self._about = {"trainer": type(self).__name__, **self._metadata()}
        check_types(self._about)
        self._built_with = {name: plain(getattr(self.args, name)) for name in _READ_WHEN_BUILT}
        self._observer = Observer(self.args, self.accelerator, self.callback_handler)
        self._equip()

    def _equip(self) -> None:
        """Add the callbacks of the settings, and remove the others. Settings may change until training begins."""
        args, observer = self.args, self._observer
        of_monitor = deepcopy([getattr(args, name) for name in MONITOR_FIELDS])
        # with equal settings, a monitor that the user has removed stays removed
        settle_monitors(self.callback_handler, args, renew=of_monitor != self._of_monitor)
        self._of_monitor = of_monitor
        choose_metrics(self.callback_handler)
        observer.dump = self._equipped(observer.dump, args.rollout_dump_dir is not None, self._new_dump)
        observer.first_step = self._equipped(
            observer.first_step, args.rollout_diagnose, lambda: FirstStepDiagnosis(args, self._about)
        )
        self._lr_scaling = self._equipped(
            self._lr_scaling,
            args.rollout_lr_scaling is not None,
            lambda: LearningRateScaling(args, self.accelerator, partial(observer.add, "train")),
        )

    def _equipped(self, found: Any, wanted: bool, new: Callable[[], Any]) -> Any:
        """Callback that a setting asks for, the one found or a new one; `None` if the setting asks for none."""
        if not wanted and found is not None:
            self.remove_callback(found)
        if wanted and found is None:
            found = new()
            self.add_callback(found)
        return found if wanted else None

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        self._checked_args(self.model, self.args)
        for name, before in self._built_with.items():
            if plain(getattr(self.args, name)) != before:
                raise ValueError(
                    f"`{name}` is {getattr(self.args, name)!r}, but was {before!r} when the trainer was built, and the "
                    "sampler runs with that. Build the trainer with the new value."
                )
        self._equip()
        with self.args.fixed(*_READ_AT_START):
            return super().train(*args, **kwargs)

    def _metadata(self) -> dict[str, str]:
        """Types, adapter and quantization of trainer and sampler, for a diagnosis."""
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)
        return trainer_metadata(model, self.args) | engine_metadata(self._engine_config)

    def _new_dump(self) -> SequenceDump:
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        return SequenceDump(self.args, self.accelerator, tokenizer, self.args.seed, self._about)

    @property
    def _now(self) -> Moment:
        return Moment("train" if self.model.training else "eval", self.state.global_step)

    # The correction ---------------------------------------------------------------------------------------------------

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Tokens of the loss, `(B, T)`."""
        return batch["completion_mask"]

    def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
        return compute_rollout_correction(
            train_logps,
            batch[ROLLOUT_LOGPS],
            self._loss_mask(batch),
            self.args,
            advantages=batch["advantages"],
            turn_ids=batch.get(TURN_IDS),
            sum_over_ranks=lambda tensor: self.accelerator.reduce(tensor, reduction="sum"),
        )

    def _ages(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Age of each completion, `(B,)` in optimizer steps, NaN if unknown; `None` if the sampler tells none."""
        return self.state.global_step - batch[ROLLOUT_STEP] if ROLLOUT_STEP in batch else None

    def _weigh_step(self, current: torch.Tensor, batch: dict[str, Any], seen: Corrected | None) -> None:
        """Count a micro-batch for the factor of the learning rate, if `rollout_lr_scaling` is set."""
        if self._lr_scaling is None or not self.model.training:
            return
        if seen is not None and seen.train_logps is current and seen.correction.log_ratio is not None:
            self._lr_scaling.visited(seen.correction.log_ratio, seen.correction.valid)
            return
        neutralize = self.args.rollout_nan_policy == "neutralize"
        tokens = select_tokens(current, batch[ROLLOUT_LOGPS], self._loss_mask(batch), neutralize=neutralize)
        self._lr_scaling.visited(tokens.log_ratio, tokens.valid)

    def _correct_from(self, train_logps: torch.Tensor, batch: dict[str, Any], *, from_old: bool) -> Corrected:
        """Correct a batch for the gap between the sampler and a policy of the trainer: old (`from_old`) or current."""
        correction = self._compute_correction(train_logps, batch)
        mask, ages = self._loss_mask(batch), self._ages(batch)
        token_ages = self.state.global_step - batch[TOKEN_STEPS] if TOKEN_STEPS in batch else None
        return Corrected(batch, mask, train_logps, correction, correction.coefficients, from_old, ages, token_ages)

    def _bypass(self, seen: Corrected) -> tuple[torch.Tensor, Corrected]:
        """Anchor in bypass mode, `(B, T)`, and the correction without the tokens that have no gradient there."""
        anchor, coefficients = self._anchor_in_bypass(seen)
        statistics = seen.correction.statistics.with_sum("coefficients", coefficients.sum())
        correction = replace(seen.correction, statistics=statistics)
        return anchor, seen._replace(correction=correction, coefficients=coefficients)

    def _anchor_in_bypass(self, seen: Corrected) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and coefficients in bypass mode, each `(B, T)`."""
        current, correction = seen.train_logps, seen.correction
        if self.args.rollout_loss_type == "reinforce":
            return current, seen.coefficients  # ratio 1, with the gradient of the log-likelihood
        # PPO's gradient is 0 where the ratio saturates, and the ratio itself would overflow. A rejected token must not change
        # the ratio of its completion in a loss with ratios of completions. Both get the current policy as anchor: ratio 1.
        assert correction.log_ratio is not None
        usable = correction.keep & (correction.log_ratio.abs() <= LOG_RATIO_BOUND)
        return torch.where(usable, current - correction.log_ratio, current), seen.coefficients * usable

    # Logging ----------------------------------------------------------------------------------------------------------

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        super().create_model_card(*args, **kwargs)
        path = Path(self.args.output_dir, "README.md")
        if self.is_world_process_zero() and path.exists():
            model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True).config._name_or_path
            card = complete_card(path.read_text("utf-8"), model, self.args.output_dir, self.args.description)
            path.write_text(card, "utf-8")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer logs losses and runtimes on every rank. Other logs may come from user code on one rank, where the gather
        # below would wait forever.
        if "train_runtime" in logs:  # training since the last log, also if an evaluation came last
            logs.update(self._close_window(self._now._replace(mode="train")))
        elif "loss" in logs or any(key.endswith("_runtime") for key in logs):
            self._metrics[self._now.mode].update(
                {key: [value] for key, value in self._close_window(self._now).items()}
            )
        super().log(logs, start_time)

    def _close_window(self, now: Moment) -> dict[str, float]:
        """Metrics of the logging window that ends, over all ranks."""
        return self._observer.close_window(now)
