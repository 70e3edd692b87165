"""Facts about a run that follow from its settings and from fields of TRL. No torch."""

from collections.abc import Mapping
from typing import Any

from ..settings.resolve import Settings
from ..settings.trl_correction import MODE


def iterations_of(fields: Mapping[str, Any]) -> int:
    """How often a run trains on a batch: TRL's `num_iterations`, 1 if unknown."""
    number = fields.get("num_iterations")
    return number if isinstance(number, int) else 1


def samples_with_8_bits(settings: Settings | None) -> bool:
    """True if `rollout_engine_kwargs` makes vLLM round weights to 8 bits, and none to fewer."""
    engine = (settings.rollout_engine_kwargs if settings else None) or {}
    schemes = [engine.get("quantization")]
    if schemes == ["online"]:  # then `quantization_config` names a scheme for each kind of layers
        config = engine.get("quantization_config") or {}
        parts = [config.get("linear"), config.get("moe"), *(config.get("targets") or {}).values()]
        schemes = [part.get("weight") if isinstance(part, Mapping) else part for part in parts if part]
    return bool(schemes) and all("8" in str(scheme) for scheme in schemes)


def trl_corrects(fields: Mapping[str, Any]) -> bool:
    """
    True if `rollout_correction: trl` corrects: GRPO with vLLM. TRL corrects nothing in RLOO and with another sampler,
    and its asynchronous loss clips around the sampler.
    """
    return bool(fields.get("use_vllm")) and MODE in fields


def clips_by_trl(settings: Settings | None, fields: Mapping[str, Any]) -> bool:
    """
    True if TRL's asynchronous loss acts, which clips around the sampler whatever switches TRL's other corrections off.
    """
    asynchronous = "per_device_train_batch_size" in fields and "use_vllm" not in fields
    return asynchronous and settings is not None and not settings.changes_loss


def done_about_gap(settings: Settings | None, *, is_fresh: bool | None) -> str:
    """A clause on what a run that corrects does about a gap, also one whose weights act on older samples alone."""
    if settings is None or not settings.weighs_stale_only or not is_fresh:
        return "the run corrects for it"
    if settings.criteria:
        return "with fresh weights the run only leaves out what is beyond its bounds"
    return "with fresh weights nothing corrects for it"
