"""A sentence on the age of the sampler's model weights and what the correction does about it, once for each age."""

from collections.abc import Mapping

from ..messages import PREFIX
from ..settings.resolve import Settings


class AgeNotice:
    """
    Memory of what was said about a run whose importance weights depend on the age of the sampler. Ages may take turns
    at every step, so nothing is said twice; `stale_fraction` in the log tells the rest.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._announced: set[str] = set()

    def news(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The line about the metrics of a logging window; `None` if it was said before."""
        acts = self.settings.changes_loss and self.settings.weighs_stale_only
        if not acts or f"{PREFIX}k3_kl" not in metrics:
            return None
        share = metrics.get(f"{PREFIX}stale_fraction")
        age = "unknown" if share is None else "fresh" if share == 0 else "stale" if share == 1 else "mixed"
        if age in self._announced:
            return None
        self._announced.add(age)
        parts = _what_acts(self.settings, age)
        return f"Rollout correction at step {step}: {_AGES[age].format(share=share)}: {parts}."


_AGES = {
    "fresh": "vLLM is up to date",
    "mixed": "vLLM counts as behind for some completions (`stale_fraction` is {share:.2g})",
    "stale": "vLLM is behind",
    "unknown": "the sampler does not announce its step, so it counts as behind",
}


def _what_acts(settings: Settings, age: str) -> str:
    """The two halves of a correction: importance weights, and rejection."""
    bounding = settings.bounding
    one_sided = bounding is not None and bounding.positive == (1.0, 1.0)
    on = f"on for {'their ' if age == 'mixed' else ''}tokens{' with negative advantage' if one_sided else ''}"
    parts = [f"importance weights are {'off' if age == 'fresh' else on}"]
    if settings.criteria:
        parts.append(f"{'the trust region' if any(x.directed for x in settings.criteria) else 'rejection'} is on")
    return ", ".join(parts)
