"""
Correction of one batch, its metrics and callbacks, for all trainers. It uses only attributes that all trainers of TRL
share.

`B` completions, `T` completion tokens.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from ..correction.compute import RolloutCorrection, compute_rollout_correction
from ..correction.functional import LOG_RATIO_BOUND
from ..door import watchers_for
from ..messages import SettingWarning, __version__, plain, tell
from ..replay.on_demand import knows_routers
from ..settings.config import RolloutCorrectionConfig
from ..settings.resolve import FIELDS, Settings
from ..settings.words import description_of
from .age_notice import AgeNotice
from .keys import FRESH, ROLLOUT_LOGPS, ROLLOUT_STEP, TURN_IDS
from .metadata import engine_metadata, trainer_metadata
from .model_checks import check_dropout, check_types
from .observer import CorrectedBatch, Moment, Observer
from .ranks import largest, leaving_together
from .trl_interface import check_config_class
from .vllm_engine import check_server_logprobs, read_configuration
from .watcher import Watcher, watchers_among


if TYPE_CHECKING:
    from transformers import Trainer as _Host  # the attributes in use are in `trl_interface.py`
else:
    _Host = object


# Tags of models on the Hub: the subject, and the name of this package
TAGS = ["rollout-correction", "trl-rollout-corr"]


def _fields_of(args: RolloutCorrectionConfig) -> dict[str, Any]:
    """Fields of the correction in a configuration, copied."""
    return {name: plain(getattr(args, name)) for name in FIELDS}


class BatchCorrectionMixin(_Host):
    """
    Correction of one batch, and its metrics. List it before TRL's trainer among the bases.

    A trainer sets `_trl_class` (TRL's trainer) and `_config_class` (its configuration), and overrides `_loss_mask` if
    its batches use another mask of the loss. Differences from TRL: `train` (it refuses settings changed since the
    trainer was built, and starts the watchers) and `log` (metrics).
    """

    _trl_class: type
    _config_class: type
    _engine_config: Any = None  # of vLLM, if known

    def _read_settings(self, model: str | PreTrainedModel, args: Any) -> Any:
        """
        Check the configuration, and read the settings of the correction. This happens once, before vLLM starts, which
        takes long; `train` refuses fields that were changed later.
        """
        self._loaded_by = "trl" if isinstance(model, str) else "user"
        if args is None:
            model_name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{model_name.split('/')[-1]}-{self._name}")
        else:
            check_config_class(args, self._config_class)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SettingWarning)  # the configuration warned when it was built
            self._settings: Settings = args.check()
        args._is_read = True
        for watcher_class in watchers_for(self._settings):
            watcher_class.check(self._settings)
        self._fields = _fields_of(args)
        return args

    def _set_up_observer(self) -> None:
        """Complete a trainer: warn about the model, build the observer, and add the watchers."""
        check_dropout(self._bare(self.model), loaded_by_trl=self._loaded_by == "trl")
        self._about = {"trainer": type(self).__name__, **self._metadata()}
        check_types(self._about)
        self._observer = Observer(self._settings, self.accelerator)
        self._age_notice = AgeNotice(self._settings)
        for watcher_class in watchers_for(self._settings):
            watcher = watcher_class.of(self)
            if watcher is not None:
                self.add_callback(watcher)

    @property
    def _watchers(self) -> list[Watcher]:
        """Watchers of the configuration and of the user."""
        return watchers_among(self.callback_handler.callbacks)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        for name, value in _fields_of(self.args).items():
            if value != self._fields[name]:
                raise ValueError(
                    f"`{name}` is {value!r}, but was {self._fields[name]!r} when the trainer was built, which is when "
                    "the settings are read. Build the trainer with the new value."
                )
        self._observer.restart()  # a run that was interrupted within a step leaves sums
        checkpoint = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        reads_steps = any(watcher.reads_steps for watcher in self._watchers)
        everywhere = not largest(self.accelerator, int(not reads_steps))
        for watcher in self._watchers:
            watcher.begins(self, checkpoint, everywhere=everywhere)
        if self.is_world_process_zero():
            tell(f"Rollout correction {__version__}: {description_of(self._settings, vars(self.args))}")
        return super().train(*args, **kwargs)

    def _read_server(self, url: str | None) -> None:
        """Read and check the configuration of a server, which the main process knows, on every rank."""
        with leaving_together(self.accelerator):
            answer = [read_configuration(url) if url is not None else None]
        broadcast_object_list(answer, from_process=0)
        if answer[0] is not None:
            self._engine_config = answer[0]
            check_server_logprobs(answer[0]["model_config"]["logprobs_mode"], self.temperature)

    def _record(self, corrected: CorrectedBatch) -> None:
        """Add a corrected batch to the metrics, and show it to the watchers."""
        self._observer.add_correction(self._now, corrected)
        seen = corrected._replace(batch=dict(corrected.batch))  # a watcher may add a column for the next one
        for watcher in self._watchers:
            watcher.on_batch_corrected(self._now, seen)

    def _bare(self, model: Any) -> torch.nn.Module:
        """A model without its wrappers."""
        bare: torch.nn.Module = self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)
        return bare

    def _metadata(self) -> dict[str, str]:
        """Types, adapter and quantization of trainer and sampler, which `diagnose` reads."""
        model = self._bare(self.model)
        of_trainer = {**trainer_metadata(model, self.args), "loaded_by": self._loaded_by}
        if of_trainer["experts"] == "routed":
            of_trainer["routers"] = "known" if knows_routers(model) else "unknown"
        return of_trainer | engine_metadata(self._engine_config)

    @property
    def _now(self) -> Moment:
        return Moment("train" if self.model.training else "eval", self.state.global_step)

    # The correction --------------------------------------------------------------------------------------------------

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Tokens of the loss, `(B, T)`."""
        return batch["completion_mask"]

    def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
        """
        Correct a batch. Override this method for your own criterion or weights: `trl-rollout-corr docs custom`.

        Args:
            train_logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the sampled tokens in the trainer, in nats: under the old policy in decoupled
                mode, under the current one in bypass mode.
            batch (`dict`):
                TRL's batch, with `sampling_per_token_logps`, the log-probabilities of the sampler, `(B, T)` in nats,
                `advantages`, `(B,)` or `(B, T)`, and if the age is known `rollout_corr_fresh`, `(B,)`, which is true
                for completions of the newest weights.

        Returns:
            [`~trl_rollout_corr.correction.compute.RolloutCorrection`]: weights and rejected tokens.
        """
        return compute_rollout_correction(
            train_logps,
            batch[ROLLOUT_LOGPS],
            self._loss_mask(batch),
            self._settings,
            advantages=batch["advantages"],
            turn_ids=batch.get(TURN_IDS),
            fresh=batch.get(FRESH),
            sum_over_ranks=self._sum_over_ranks,
        )

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.accelerator.reduce(tensor, reduction="sum")
        return summed

    def _lags(self, batch: dict[str, Any], from_old: bool) -> torch.Tensor | None:
        """
        Optimizer steps, `(B,)` or NaN, by which the weights that sampled are behind those of the policy that is
        corrected for, which is the old policy if `from_old`; `None` if nothing is known.
        """
        return self._ages(batch)

    def _ages(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Age of each completion, `(B,)` in optimizer steps or NaN; `None` if nothing is known."""
        return self.state.global_step - batch[ROLLOUT_STEP] if ROLLOUT_STEP in batch else None

    def _correct_from(self, train_logps: torch.Tensor, batch: dict[str, Any], *, from_old: bool) -> CorrectedBatch:
        """Correct a batch for the gap between the sampler and the old or current policy."""
        lags = self._lags(batch, from_old)
        correction = self._compute_correction(train_logps, batch if lags is None else {**batch, FRESH: lags == 0})
        mask, ages = self._loss_mask(batch), self._ages(batch)
        return CorrectedBatch(batch, mask, train_logps, correction, correction.coefficients, from_old, ages, lags)

    def _bypass(self, corrected: CorrectedBatch) -> tuple[torch.Tensor, CorrectedBatch]:
        """Anchor in bypass mode, `(B, T)`, and the correction of tokens with a gradient there."""
        anchor, coefficients = self._anchor_in_bypass(corrected)
        statistics = corrected.correction.statistics.with_sum("coefficients", coefficients.sum())
        correction = replace(corrected.correction, statistics=statistics)
        return anchor, corrected._replace(correction=correction, coefficients=coefficients)

    def _anchor_in_bypass(self, corrected: CorrectedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and coefficients in bypass mode, each `(B, T)`."""
        current, correction = corrected.train_logps, corrected.correction
        if self._settings.mode == "reinforce":
            return current, corrected.coefficients  # ratio 1, with the gradient of the log-likelihood
        # PPO's gradient is 0 where the ratio saturates, and the ratio itself would overflow. A rejected token must not
        # change the ratio of its completion in a loss with ratios per completion. For both tokens the current policy
        # is the anchor, which makes the ratio 1.
        assert correction.log_ratio is not None
        usable = correction.keep & (correction.log_ratio.abs() <= LOG_RATIO_BOUND)
        return torch.where(usable, current - correction.log_ratio, current), corrected.coefficients * usable

    # Logging ---------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer logs losses and runtimes on every rank. Other logs may come from user code on one rank, where the
        # gather below would wait forever.
        if "train_runtime" in logs:  # closes the training window, even if an evaluation came last
            logs.update(self._close_window(self._now._replace(mode="train")))
        elif "loss" in logs or any(key.endswith("_runtime") for key in logs):
            metrics = self._close_window(self._now)
            if "loss" in logs and self.is_world_process_zero():
                news = self._age_notice.news(self.state.global_step, metrics)
                if news is not None:
                    tell(news)
            self._metrics[self._now.mode].update({key: [value] for key, value in metrics.items()})
        super().log(logs, start_time)

    def _close_window(self, now: Moment) -> dict[str, float]:
        """Close the logging window, and return its metrics over all ranks."""
        return self._observer.close_window(now)
