"""Warnings about bounds that are probably mistakes. No torch."""

import math
from typing import Any

from ..messages import warn
from .thresholds import Bounds


_FIELD = "rollout_rs_threshold"
# A weight (published caps end at 20), nats per token, and factors per token
_LARGEST_WEIGHT, _LARGEST_MEAN, _MEAN_RATIOS = 100.0, 1.0, (0.1, 10.0)


def warn_about_bounds(settings: Any) -> None:
    """Warn about bounds in [`Settings`] that hardly any token or completion exceeds."""
    field = "vllm_importance_sampling_clip_max" if settings.by_trl else "rollout_is_threshold"
    if settings.bounding is not None:
        uppers = [settings.bounding.upper, *(settings.bounding.positive or ())[1:]]
        if large := [upper for upper in uppers if _LARGEST_WEIGHT < upper < math.inf]:
            warn(
                f"`{field}` allows weights up to {large[0]:g}, so that one token or completion may count as much as "
                f"{large[0]:g} others. Common bounds are 2 to 20. Infinity, in YAML `.inf`, means no bound.",
                field,
            )
    criteria = settings.rollout_rs or []
    for name, entry in zip(criteria, settings.rollout_rs_threshold if criteria else [], strict=True):
        if reason := _hardly_meant(name, entry):
            warn(f"`{_FIELD}` for `{name}` is {entry}: {reason}", _FIELD)
    cap = settings.rollout_clip_ratio_c
    if settings.clips_around_sampler and cap is not None and _LARGEST_WEIGHT < cap < math.inf:
        warn(f"`rollout_clip_ratio_c` is {cap:g}. Common bounds are 2 to 20. If no bound is meant, set it to None.")


def _hardly_meant(name: str, entry: Bounds) -> str:
    """A sentence on a bound of a criterion that hardly rejects anything; empty text for others."""
    bounds = entry if isinstance(entry, list) else [entry]
    if all(bound in (0, math.inf) for bound in bounds):
        return "no bound, so that nothing is rejected. Set a bound, or remove the criterion."
    whole = "turn" if name.startswith("turn") else "completion"
    if "_mean_" in name and name.endswith(("k2", "k3", "kl")) and bounds[0] > _LARGEST_MEAN:
        return (
            f"a mean over a {whole}, in nats per token, which is about 0.001 in healthy runs. So it rejects hardly "
            f"any {whole}. A common bound is 0.01; for single tokens take `token_{name.rpartition('_mean_')[2]}`."
        )
    lowest, largest = _MEAN_RATIOS
    if "_mean_k1" in name and (0 < bounds[0] < lowest or largest < bounds[1] < math.inf):
        return (
            f"a geometric mean of ratios of a {whole}, which is about 1 in healthy runs. So it rejects hardly any "
            f"{whole}. A common pair is [0.99, 1.01]; for the worst token of a {whole} take "
            f"`{name.replace('_mean_', '_max_')}`."
        )
    return ""
