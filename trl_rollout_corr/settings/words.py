"""Settings in effect in a few sentences. No torch."""

import math
from collections.abc import Mapping
from typing import Any

from ..messages import capitalized
from .criteria import WINDOW, Criterion
from .effects import shares_gradient
from .presets import DEFAULT, UNSET
from .resolve import Settings
from .thresholds import is_by_sign
from .trl_correction import PREFIX_OF_TRL, given_to_trl


_UNITS = {"token": "token", "turn": "turn", "seq": "completion"}
_RATIOS = {
    "": "their ratio",
    "sum": "the product of their ratios",
    "mean": "their mean ratio",
    "max": "one of their ratios",
}
_CLIPPING = {
    "decoupled": "PPO clips around the trainer's old policy",
    "ppo_clip": "PPO clips around the sampler",
    "reinforce": "the loss is REINFORCE, without clipping",
}

# TRL's ratio of completions gives the tokens of a completion one gradient
_GSPO = "with GSPO, a completion gets the mean of its tokens' factors, where a rejected token counts 0"


def description_of(settings: Settings, fields: Mapping[str, Any]) -> str:
    """
    At most three sentences about settings in effect, and one more if the run has chosen none of them. `fields` are
    those of TRL, by name.
    """
    is_chosen = settings.rollout_correction != DEFAULT or "rollout_correction" in settings.given
    is_default = settings.changes_loss and not is_chosen
    keeps = " This is the default; `rollout_correction: trl` keeps TRL's loss." if is_default else ""
    return f"{settings_in_words(settings, fields)}{keeps}"


def settings_in_words(settings: Settings, fields: Mapping[str, Any] | None = None) -> str:
    """
    At most three sentences about settings: the preset and its weights, rejected tokens, and the mode. With weights and
    rejection, none says that PPO clips as in TRL. `fields` are those of TRL, by name.
    """
    fields = fields or {}
    parts = [_weights_in_words(settings)] if settings.bounding is not None else []
    parts += [_rejection_in_words(settings)] if settings.criteria else []
    takes_mean = shares_gradient(fields) and bool(settings.acting_on_parts)
    is_short = len(parts) == 1 and not takes_mean
    mode = [_CLIPPING[settings.mode]] if settings.bypass_mode or is_short else []
    mode += [_GSPO] if takes_mean else []
    first, *rest = [*parts, *(["; ".join(mode)] if mode else [])] or ["no correction"]
    head = _head(settings, fields)
    sentences = [f"{head}: {first}" if head else first, *map(capitalized, rest)]
    return " ".join(f"{sentence}." for sentence in sentences)


def _head(settings: Settings, fields: Mapping[str, Any]) -> str:
    """Name of the preset, and in brackets if the loss is not its own; empty without both."""
    changes = " with changes" if UNSET.keys() & {*settings.overriding_fields} else ""
    name = f"{settings.rollout_correction}{changes}" if settings.rollout_correction else ""
    loss = (
        "measured only" if settings.rollout_metrics_only else _loss_of_trl(settings, fields) if settings.by_trl else ""
    )
    return f"{name} ({loss})" if name and loss else name or loss


def _loss_of_trl(settings: Settings, fields: Mapping[str, Any]) -> str:
    """TRL's loss is that of its default only with the fields of its default."""
    yours = given_to_trl(fields) if settings.bounding is not None else {}
    if yours.get(f"{PREFIX_OF_TRL}cap") == yours.get(f"{PREFIX_OF_TRL}clip_max"):  # TRL copies its old name to the new
        yours.pop(f"{PREFIX_OF_TRL}cap", None)
    listed = ", ".join(f"`{name}: {value}`" for name, value in yours.items())
    return f"TRL's loss with your {listed}" if yours else "TRL's loss, unchanged"


def _weights_in_words(settings: Settings) -> str:
    bounding = settings.bounding
    bounds: Any = settings.rollout_is_threshold
    assert bounding is not None
    unit = _UNITS[bounding.unit]
    where = "while vLLM is behind" if bounding.stale_only else ""
    if is_by_sign(bounds):
        negative, positive = (_span_in_words(pair, clamps=bounding.clamps) for pair in bounds)
        of = {"geometric": " (mean ratio)", "window": f" (products of {WINDOW} ratios)"}.get(bounding.level, "")
        signs = f"{negative} for negative advantages and {positive} for positive ones"
        weights = f"{unit} importance weights{of}{f' {where}' if where else ''}, {signs}"
        return weights if settings.applies_weights else f"{weights}, only reported"
    ratio = {"geometric": "mean ratio", "window": f"ratio and those of the {WINDOW - 1} before it"}.get(
        bounding.level, "ratio"
    )
    ratio = f"{ratio} (trainer to sampler)"
    weighted = f"each {unit} is weighted by its {ratio}{_bounds_in_words(bounds, clamps=bounding.clamps)}"
    weights = f"{where}, {weighted}" if where else weighted
    return weights if settings.applies_weights else f"{weights}, which is only reported"


def _span_in_words(pair: list[float], *, clamps: bool) -> str:
    lower, upper = pair
    if not clamps:
        return f"0 outside {_interval(pair)}"
    if lower == upper:
        return f"exactly {lower:g}"
    return f"within {_interval(pair)}" if lower > 0 else f"at most {upper:g}"


def _bounds_in_words(bounds: float | list[float], *, clamps: bool) -> str:
    lower, upper = bounds if isinstance(bounds, list) else (0.0, bounds)
    if isinstance(bounds, list) and not clamps:
        return f", or by 0 outside {_interval(bounds)}"
    if lower > 0:
        return f", kept within {_interval([lower, upper])}"
    return "" if math.isinf(upper) else f", at most {upper:g}"


def _rejection_in_words(settings: Settings) -> str:
    reasons: dict[str, list[str]] = {}  # by unit
    for criterion, bounds in zip(settings.criteria, settings.rollout_rs_threshold, strict=True):
        reason = f"{_fact_in_words(criterion, bounds)} ({criterion.name})"
        reasons.setdefault(_UNITS[criterion.unit], []).append(f"if {reason}")
    (unit, first), *others = reasons.items()
    more = [f"{other}s {', or '.join(ifs)}" for other, ifs in others]
    return ", and ".join([f"{unit}s are rejected {', or '.join(first)}", *more])


def _fact_in_words(criterion: Criterion, bounds: Any) -> str:
    if criterion.directed:
        size = " or ".join(f"{bound:g}" for bound in dict.fromkeys(bounds))
        measure = "" if criterion.divergence == "tv" else "KL divergence "
        return f"the update would push them further out of a region of {measure}{size} around vLLM's probability"
    statistic = criterion.scope.partition("_")[2]
    if criterion.divergence == "k1":
        lower, upper = bounds
        side = f"below {lower:g}" if math.isinf(upper) else f"above {upper:g}" if lower == 0 else ""
        return f"{_RATIOS[statistic]} is {side or f'outside {_interval(bounds)}'}"
    number = f"{statistic} {criterion.divergence}".strip()
    return f"their {number} is above {bounds:g}"


def _interval(bounds: list[float]) -> str:
    return f"[{bounds[0]:g}, {bounds[1]:g}]"
