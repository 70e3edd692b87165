"""A sentence on the age of the sampler's weights and what the correction does about it, once for each age."""

from collections.abc import Mapping

from ..messages import PREFIX
from ..settings.resolve import Settings


class AgeNotice:
    """
    Memory of what was said about a run whose weights depend on the age of the sampler. Ages may take turns at every
    step, so nothing is said twice; `stale_fraction` in the log tells the rest.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._said: set[str] = set()

    def news(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The line about the metrics of a logging window; `None` if it was said before."""
        if not self.settings.weighs_stale_only or f"{PREFIX}k3_kl" not in metrics:
            return None
        share = metrics.get(f"{PREFIX}stale_fraction")
        age = "unknown" if share is None else "fresh" if share == 0 else "stale" if share == 1 else "mixed"
        if age in self._said:
            return None
        self._said.add(age)
        return f"Rollout correction at step {step}: {_AGES[age].format(share=share)}"


_AGES = {
    "fresh": "the weights of the sampler are the newest, so tokens have the weight 1.",
    "mixed": "the weights of the sampler were the newest for some completions, whose tokens have the weight 1, and older "
    "than the trainer's for others, whose tokens are weighted (`stale_fraction` is {share:.2g}).",
    "stale": "the weights of the sampler are older than the trainer's, so tokens are weighted.",
    "unknown": "the sampler does not say how old its weights are, so they count as old, and tokens are weighted.",
}
