"""
Causes of harm in what a run does with its gap or its weights. They do not cause the gap, so they explain no share of
it.
"""

import numpy as np

from .causes import Cause, Test
from .measures import POSSIBLE, Evidence, mean
from .observed import DumpedTokens


_FEWEST = 8  # fewest completions with a meaningful mean weight
_ERRORS = 3.0  # standard errors of the mean weight beyond which chance does not explain it


def whole_completions(tokens: DumpedTokens) -> Evidence | None:
    """
    Look for a mean importance weight below 1 in a run with one weight per completion, although one weight per token
    would average almost 1.
    """
    settings = tokens.settings
    if settings is None or not settings.corrects or not settings.applies_weights or settings.rollout_is != "sequence":
        return None
    bounding, present = settings.bounding, tokens.lengths > 0
    if bounding is None or bounding.directed or bounding.normalized or present.sum() < _FEWEST:
        return None
    lengths = tokens.lengths[present]
    ratios = np.exp(np.bincount(tokens.row, weights=tokens.d, minlength=len(present))[present].clip(-20, 20))
    lower, upper = bounding.lower or 0.0, bounding.upper
    outside = (ratios < lower) | (ratios > upper)
    weights = np.where(outside & bounding.drops, 0.0, ratios.clip(lower, upper))
    weight, error = float(np.average(weights, weights=lengths)), float(weights.std()) / len(weights) ** 0.5
    of_tokens = mean(np.exp(tokens.d.clip(-20, 20)).clip(max=upper))
    lost, due_to_length = 1 - weight, of_tokens - weight
    numbers = {"weight": weight, "length": mean(lengths), "tokens": of_tokens, "outside": mean(outside)}
    sentence = (
        "the mean weight of completions of {length} tokens is {weight}, and with token weights it would be {tokens}; "
        "a share of {outside} of the completions is outside the bounds"
    )
    certain = lost > _ERRORS * error and due_to_length > lost / 2
    return Evidence(lost, 0.0, numbers, sentence, most=0.99 if certain else POSSIBLE)


def frozen_base(tokens: DumpedTokens) -> Evidence | None:
    """Look for frozen weights that a push changed, by the fingerprints that the run took of them."""
    changed = tokens.about.get("frozen_base", "")
    sentence = "fingerprints before and after a push differ"
    return Evidence(1.0, 0.0, {}, sentence, words=f" ({changed})") if changed else None


OTHER_CAUSES: dict[str, Cause] = {
    "whole_completions": Cause(
        "weights of whole completions, which shrink with length",
        Test(whole_completions, 0.2, 0.3),
        "Each weight is the product of a completion's ratios, so even a small gap adds up: every step is smaller than "
        "`learning_rate` says, and long completions count least.",
        may_correct=True,
        harms=True,
        no_share="it is what the run does with the gap",
    ),
    "frozen_base": Cause(
        "frozen weights that change with each push",
        Test(frozen_base, 0.4, 0.6),
        "Merging an adapter into the base and taking it away again leaves rounding behind. Trainer and sampler share "
        "it, but the saved adapter will be loaded on the unchanged base. Keep the base in float32, and look for other "
        "code that writes to it.",
        {"model_init_kwargs": {"dtype": "float32"}},
        "The base is in float32 already, so other code writes to it.",
        on_quantised="Merging an adapter into a quantised base and taking it away again leaves rounding behind. "
        "Trainer and sampler share it, but the saved adapter will be loaded on the unchanged base: measure its "
        "accuracy there, or train the adapter on the base without quantisation.",
        may_correct=True,
        no_share="trainer and sampler share it",
    ),
}
