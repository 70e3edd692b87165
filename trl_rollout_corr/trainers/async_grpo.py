"""
Asynchronous GRPO with rollout correction.

TRL's loss takes two tensors out of the batch, the advantages and the sampler's log-probabilities, runs the model once, and
combines the three. Here it gets placeholders ([`~trl_rollout_corr.trainers.packed.Awaited`]), which are filled after the
forward pass. So the correction knows the log-probabilities of the policy without a forward pass of its own.

`B` completions of this rank's row, `T` tokens from the first of the loss to the last of a completion.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import requests
import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from ..correction.compute import usable_rollout_logps
from ..correction.functional import LOG_RATIO_BOUND
from ..messages import nearest, warn_idle
from ..settings.config import RolloutCorrectionConfig
from ._cpu_attention import register_tree_attention
from .async_pushes import PushesToServer
from .batch import PADDING, REWARDS, ROLLOUT_LOGPS, ROLLOUT_STEP, TOKEN_STEPS
from .core import CorrectionCore, check_bounds_of_means
from .engine import announce_server, check_engine_kwargs
from .intake import ADVANTAGES, TERMS, TEXT, TEXT_PREFIX, TOOLS, Carrier, Layout, Tap
from .loss import normalizes_over
from .monitor import check_tightened
from .observer import Corrected
from .packed import Awaited, Policy, Terms
from .sampler import TRUNCATION, check_server_logprobs, warn_about_distortion
from .stopping import OrderlyEnd, drain_at_stop
from .token_versions import ask_for_versions
from .trl_interface import ASYNCHRONOUS, check_bases, check_trl, with_parameters_of
from .upstream import AsyncGRPOConfig, AsyncGRPOTrainer, AsyncRolloutWorker, WeightTransferClient, without_peak_flops


LOSS_MASK = "loss_mask"  # (B, T)


PROXIMAL = ("visit", "interpolated")


def check_proximal(value: object) -> str:
    """Check and return `rollout_proximal`, the choice of the old policy in an asynchronous run."""
    if value not in PROXIMAL:
        raise ValueError(
            f"`rollout_proximal` must be one of {', '.join(PROXIMAL)}, got {value!r}.{nearest(value, PROXIMAL)}"
        )
    return str(value)


def check_asynchronous(config: Any) -> None:
    """Refuse settings that an asynchronous run cannot follow."""
    if config.rollout_rs_exclude_from_baseline:
        raise ValueError(
            "`rollout_rs_exclude_from_baseline` is True, but in an asynchronous run the rollout worker computes rewards and "
            "baselines before the trainer gets a sample, when rejections are not known yet. Set it to False."
        )
    if config.rollout_support is not None:
        raise ValueError(
            f"`rollout_support` is {config.rollout_support!r}, which needs a colocated vLLM, and an asynchronous run has a "
            "server. Set it to None."
        )
    if config.rollout_routing is not None:
        raise ValueError(
            "`rollout_routing` is 'replay', but the rollout worker of an asynchronous run drops the routes of the sampler. "
            "Set it to None."
        )
    check_proximal(config.rollout_proximal)
    budget = getattr(config, "token_budget", None)  # gone in newer releases of TRL
    packs = budget is None or budget > 0  # rows hold as many completions as there is room for
    fewest = config.world_size * (1 if packs else config.per_device_train_batch_size)
    if normalizes_over(config, "sequence", "geometric") and fewest == 1:
        raise ValueError(
            "`rollout_is_batch_normalize` is True, and in an asynchronous run the mean is over the micro-batch of all ranks, "
            f"which {'with this `token_budget` may be' if packs else 'is'} one completion: its weight would be 1. Set "
            "`token_budget` to 0 and `per_device_train_batch_size` to 2 or more, or `rollout_is_batch_normalize` to False."
        )


def warn_about_proximal(config: Any) -> None:
    """Warn if the run has no old policy, so that `rollout_proximal` has no effect."""
    if config.rollout_proximal != "visit" and (config.bypass_mode or not config.corrects):
        reason = "it is the old policy of decoupled mode, with weights or rejection"
        warn_idle("rollout_proximal", config.rollout_proximal, reason)


@dataclass
class RolloutCorrectedAsyncGRPOConfig(RolloutCorrectionConfig, AsyncGRPOConfig):
    r"""
    Configuration class for the [`RolloutCorrectedAsyncGRPOTrainer`].

    It has the parameters of TRL's `AsyncGRPOConfig`, those of [`RolloutCorrectionConfig`], and one more.

    Args:
        rollout_proximal (`str`, *optional*, defaults to `"visit"`):
            Old policy in decoupled mode. A sample is visited once, so with `"visit"`, the policy of that visit, the ratio of
            PPO is always 1. `"interpolated"` is one optimizer step behind the current policy, on the line from the sampler to
            it: `log old = log rollout + (1 - 1 / age) (log current - log rollout)`. It needs no forward pass either
            ([A-3PO](https://huggingface.co/papers/2512.06547)). At age 1 or unknown age it is the sampler, at age 0 the
            current policy.

    Raises:
        `ValueError`: also if `rollout_rs_exclude_from_baseline` is set, as the rollout worker computes baselines; or if the
            mean of batch normalisation would be over a single sequence.
    """

    rollout_proximal: str = field(
        default="visit",
        metadata={"help": "Old policy in decoupled mode: visit (the current one), or interpolated by age (A-3PO)."},
    )

    def __post_init__(self) -> None:
        RolloutCorrectionConfig.__post_init__(self)
        AsyncGRPOConfig.__post_init__(self)
        warn_about_distortion({name: getattr(self, name, None) for name in (*TRUNCATION, "repetition_penalty")})
        self.check(warns=True)

    def check(self, *, warns: bool = False) -> None:
        super().check()
        check_asynchronous(self)
        if warns:
            check_bounds_of_means(self)
            warn_about_proximal(self)
        check_tightened(self, warns=warns)


class RolloutCorrectedAsyncGRPOTrainer(PushesToServer, CorrectionCore, AsyncGRPOTrainer):
    r"""
    TRL's `AsyncGRPOTrainer` that corrects for the age of its samples and for the mismatch between vLLM and the trainer.

    Takes the arguments of `AsyncGRPOTrainer`, with a [`RolloutCorrectedAsyncGRPOConfig`] as `args`. With
    `rollout_metrics_only=True`, or with neither weights nor rejection nor bypass, losses and gradients are TRL's, bit for
    bit: PPO clipped around the sampler, which is `bypass_ppo_clip` without the bound of `rollout_clip_ratio_c`.

    Differences from TRL, each as `super()` with changed arguments or results: `__init__` (checks, monitor, dump),
    `compute_loss` (the correction), `get_train_dataloader` (age and reward of each sample), `_sync_weight` (optimizer step of
    each version of the weights, and its label on a server that tells the version of each token), `train` (an error of the
    sampler ends the run with a checkpoint), `log` (metrics).

    On a CPU, packed rows need another attention (`trainers/_cpu_attention.py`), and weights need another way to the server:
    a `DiskWeightTransfer` (`trainers/_disk_weight_transfer.py`), or an adapter.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_rollout_corr import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedAsyncGRPOTrainer

    # VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen2.5-0.5B-Instruct --weight-transfer-config '{"backend":"nccl"}' \
    #     --logprobs-mode processed_logprobs
    trainer = RolloutCorrectedAsyncGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=RolloutCorrectedAsyncGRPOConfig("output", rollout_correction="auto"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _trl_class = AsyncGRPOTrainer
    _config_class = RolloutCorrectedAsyncGRPOConfig
    _tag_names = [*AsyncGRPOTrainer._tag_names, "rollout-correction"]

    @with_parameters_of(AsyncGRPOTrainer.__init__)
    def __init__(
        self,
        model: str,
        reward_funcs: object = None,
        args: RolloutCorrectedAsyncGRPOConfig | None = None,
        *further_args: object,
        **kwargs: object,
    ) -> None:
        check_trl(AsyncGRPOTrainer, {AsyncGRPOTrainer: ASYNCHRONOUS})
        check_bases(type(self), RolloutCorrectedAsyncGRPOTrainer, AsyncGRPOTrainer, method="compute_loss")
        config = self._checked_before_loading(model, args)
        if config.rollout_engine_kwargs:
            check_engine_kwargs(config.rollout_engine_kwargs)
            announce_server(config.rollout_engine_kwargs)
        with without_peak_flops(config.device):
            super().__init__(model, reward_funcs, config, *further_args, **kwargs)
        if config.device.type == "cpu":
            self._check_weights_reach_the_server()
            register_tree_attention()  # in place of TRL's, which it has just registered
        self._has_own_worker = kwargs.get("rollout_worker") is None
        self._tap: Tap | None = None  # on the main process
        self._step_of_version: dict[int, int] = {}
        if isinstance(self.rollout_worker, AsyncRolloutWorker):  # only on the main process
            drain_at_stop(self.rollout_worker)
        self._end = OrderlyEnd(self.accelerator)
        self.add_callback(self._end)
        self._set_up_observer()
        self._set_up_push_checks()

    def _check_weights_reach_the_server(self) -> None:
        if isinstance(self.weight_transfer, WeightTransferClient):
            raise ValueError(
                "`weight_transfer` is None, which is NCCL, and NCCL needs GPUs. Pass `weight_transfer=DiskWeightTransfer("
                "url, folder)` from `trl_rollout_corr.trainers._disk_weight_transfer`; or train an adapter, with a server "
                "that was started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."
            )

    # Samples ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        dataloader = super().get_train_dataloader()
        if self.accelerator.is_main_process:  # only the main process takes and packs samples
            self._tap_samples(dataloader)
        return cast(DataLoader, dataloader)

    def _tap_samples(self, dataloader: Any) -> None:
        """Keep age and reward of samples, and add the layout of their tokens to the batch."""
        samples, batcher = self._rollout_dataset, dataloader.dataset
        samples.queue = self._tap = Tap(samples.queue)
        samples.check_health_fn = self._check_health
        batcher.dataset = Carrier(samples, self._tap, self._step_of_version, self._samples_failed)
        with_text = any((self._observer.dump, self._observer.first_step, self._server))
        inner = dataloader.base_dataloader  # Accelerate's around torch's
        inner.collate_fn = Layout(inner.collate_fn, with_text, self.processing_class.pad_token_id)

    # Errors of sampler and server ----------------------------------------------------------------------------------------

    def _check_health(self, stale_after_s: float) -> None:
        """Health check that TRL calls when no sample comes for a while."""
        self.rollout_worker.check_health(stale_after_s)
        if (gone := self._missing_server()) is not None:
            raise gone

    def _missing_server(self) -> Exception | None:
        """Error if the server of TRL's rollout worker is gone. The worker itself would retry for minutes."""
        if not isinstance(self.rollout_worker, AsyncRolloutWorker):
            return None
        url = self.vllm_client.server_url
        for _ in range(3):
            try:
                requests.get(f"{url}/health", timeout=5)
            except requests.ConnectionError as error:
                refused = error
                time.sleep(1.0)
            except requests.RequestException:  # the server is there, and busy
                return None
            else:
                return None
        gone = RuntimeError(
            f"The vLLM server at {url} is gone: it refuses connections. Look for the reason in its log."
        )
        gone.__cause__ = refused
        return gone

    def _samples_failed(self, error: Exception) -> bool:
        if not self._end.running or self.state.global_step == self._end.saved_at:
            return False  # no step is lost
        self._end.error = error
        return True

    def _sync_weight(self) -> None:
        if not self._end.running:
            self._check_server()
            self._push()
            if self._has_own_worker:
                ask_for_versions(self)
        elif not self._sync_or_end():
            return
        self._step_of_version[self.model_version] = self.state.global_step

    def _sync_or_end(self) -> bool:
        """Push weights, or end the run if the server is gone. Returns `True` if they were pushed."""
        if self.accelerator.is_main_process:
            self._end.error = self._end.error or self._missing_server()
        if self._end.agree(self.control, self.state):
            return False
        try:
            self._push()
        except Exception as error:
            if self.accelerator.num_processes > 1:  # other ranks wait for this one, until they are stopped
                raise
            self._end.error = self._missing_server() or error  # the server may have stopped during the push
            return not self._end.agree(self.control, self.state)
        return True

    def _check_server(self) -> None:
        if isinstance(self.rollout_worker, AsyncRolloutWorker):  # only on the main process
            self._engine_config = self.vllm_client.get_server_info()
            check_server_logprobs(self._engine_config["model_config"]["logprobs_mode"], self.temperature)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        self._end.running = False
        output = super().train(*args, **kwargs)
        if self._end.message is not None:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            raise RuntimeError(
                f"Training ended after step {self.state.global_step}: {self._end.message} A checkpoint is in {folder}: "
                "remove the cause, and resume with `resume_from_checkpoint`."
            ) from self._end.error
        return output

    # The loss ---------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        awaited = {}
        if self.args.corrects:
            awaited = {key: Awaited(inputs[key]) for key in ("advantages", "old_log_probs")}
        policy = Policy(model, partial(self._correct, inputs=inputs, awaited=awaited))
        loss: torch.Tensor = super().compute_loss(policy, {**inputs, **awaited}, return_outputs, num_items_in_batch)
        if policy.forwards != 1 or not all(x.was_taken for x in awaited.values()):
            raise RuntimeError(
                f"The loss of `{type(self).__name__}` ran the policy {policy.forwards} times instead of once, or did not "
                "take `advantages` and `old_log_probs` out of the batch before. Install the version of "
                "trl that this release was tested with."
            )
        return loss

    @torch.no_grad()
    def _correct(
        self, output: Any, forward: Callable[[], Any], inputs: Mapping[str, Any], awaited: Mapping[str, Awaited]
    ) -> None:
        """Correct a micro-batch after its forward pass, and fill the placeholders in TRL's loss."""
        terms, selected = Terms(inputs[TERMS][0]), inputs["token_index"] >= 0
        index = inputs["token_index"][selected]
        logps = output.log_probs.detach().flatten()[index]
        batch = self._completions_of(inputs, terms, selected)
        self._keep_text(batch, lambda: terms.spread(forward().log_probs.flatten()[index]))
        anchor, seen = self._corrected(terms.spread(logps), batch)
        dropped = self._tap.take_dropped() if self._tap is not None else []
        self._observer.trained(self._now, terms.spread(logps), seen, dropped)
        if awaited:
            n = len(logps)
            coefficients = terms.collect(seen.coefficients, n)
            awaited["advantages"].fill(selected, inputs["advantages"][selected] * coefficients)
            awaited["old_log_probs"].fill(selected, terms.collect(anchor, n))

    @staticmethod
    def _completions_of(inputs: Mapping[str, Any], terms: Terms, selected: torch.Tensor) -> dict[str, Any]:
        """Row of this rank as completions, with the keys of the other trainers."""
        batch = {
            LOSS_MASK: terms.mask,
            ROLLOUT_LOGPS: terms.spread(inputs["old_log_probs"][selected]),
            "advantages": inputs[ADVANTAGES][0],
            REWARDS: inputs[REWARDS][0],
            ROLLOUT_STEP: inputs[ROLLOUT_STEP][0],
            PADDING: torch.zeros_like(inputs[ROLLOUT_STEP][0]),  # rows are packed
        }
        if TOKEN_STEPS in inputs:
            batch[TOKEN_STEPS] = inputs[TOKEN_STEPS][0]
        if TOOLS in inputs:
            batch["tool_mask"] = terms.mask
        return batch | {key: inputs[TEXT_PREFIX + key][0] for key in TEXT if TEXT_PREFIX + key in inputs}

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch[LOSS_MASK]

    def _corrected(self, current: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, Corrected]:
        """Anchor of the ratio, `(B, T)`, and the corrected batch."""
        old = self._old_logps(current, batch)
        self._observer.visited(self._now, self._ages(batch), batch[LOSS_MASK], current, old)
        seen = self._correct_from(old, batch, from_old=False)  # the old policy is newer than the sampler
        self._weigh_step(current, batch, seen)
        anchor = old
        if self.args.bypass_mode and self.args.corrects:
            anchor, seen = self._bypass(seen)
        self._observer.corrected(self._now, seen)
        return anchor, seen

    def _old_logps(self, current: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the old policy, `(B, T)`."""
        interpolates = check_proximal(self.args.rollout_proximal) == "interpolated"
        if self.args.bypass_mode or not interpolates or not self.args.corrects:
            return current
        rollout = usable_rollout_logps(current, batch[ROLLOUT_LOGPS], batch[LOSS_MASK], self.args)
        log_ratio = current - rollout
        steps = batch[TOKEN_STEPS] if TOKEN_STEPS in batch else batch[ROLLOUT_STEP].unsqueeze(1)
        # log old = log current - (log current - log rollout) / age; an unknown age counts as 1, and at age 0 old is current
        age = (self.state.global_step - steps).nan_to_num(1.0)
        share = torch.where(age > 0, 1.0 / age.clamp(min=1.0), 0.0)
        return current - torch.where(log_ratio.abs() <= LOG_RATIO_BOUND, share * log_ratio, 0.0)

    def _anchor_in_bypass(self, seen: Corrected) -> tuple[torch.Tensor, torch.Tensor]:
        anchor, coefficients = super()._anchor_in_bypass(seen)
        bound = self.args.rollout_clip_ratio_c
        if self.args.clips_around_sampler and bound is not None:
            negative = seen.batch["advantages"].unsqueeze(1) < 0
            coefficients = coefficients.masked_fill(negative & (seen.train_logps - anchor > math.log(bound)), 0.0)
        return anchor, coefficients
