"""Three sentences on the age of the sampler's weights and what the correction does about it, whenever it changes."""

from collections.abc import Mapping
from typing import NamedTuple

from ..messages import PREFIX
from ..settings.resolve import Settings


MOVED = 0.05  # change of the trust region that is told


class _Said(NamedTuple):
    age: str
    rounding: float


class RoundingNotice:
    """Memory of what was said last about a run whose bounds depend on what rounding alone does."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._said: _Said | None = None

    def news(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The line about the metrics of a logging window; `None` if it would say the same as before."""
        if not self.settings.measures_rounding or f"{PREFIX}k3_kl" not in metrics:
            return None
        rounding = metrics.get(f"{PREFIX}rounding_tv", 0.0)
        now, before = _Said(_age(metrics), rounding), self._said
        if before is not None and before.age == now.age and abs(before.rounding - rounding) < MOVED:
            return None
        self._said = now
        return f"Rollout correction at step {step}: {_AGES[now.age]} {self._effect(rounding, metrics)}"

    def _effect(self, rounding: float, metrics: Mapping[str, float]) -> str:
        effects = []
        bound = next((c.upper for c in self.settings.criteria if c.widens), None)
        if bound is not None:
            effects.append(f"the trust region begins at {bound + rounding:.3g}")
        if self.settings.bounding is not None and self.settings.bounding.directed:
            size = metrics.get(f"{PREFIX}rounding_log_ratio", 0.0)
            within = f" to within {100 * size:.2g} %" if size else ""
            effects.append(f"tokens with positive advantage are weighted by 1{within}")
        told = ", and ".join(effects)
        if not rounding:
            return f"No rounding was measured, so {told}."
        return f"Rounding alone moves a probability by up to {rounding:.2g} (99th percentile). So {told}."


_AGES = {
    "fresh": "the weights of the sampler are the newest.",
    "stale": "the weights of the sampler are older than those of the trainer.",
    "unknown": "the sampler does not say how old its weights are.",
}


def _age(metrics: Mapping[str, float]) -> str:
    age = metrics.get(f"{PREFIX}staleness_mean")
    return "unknown" if age is None else "fresh" if age < 0.5 else "stale"
