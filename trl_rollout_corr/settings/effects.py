"""
What a configuration does to the loss of a run, where its fields do not say so: settings without effect, a correction
that is off, a sampler of another distribution, and the length of completions.

The trainers say it when the configuration is built, and so does `trl-rollout-corr check`, which builds it.
`trl-rollout-corr convert` says it of the file that it translates. What to set in place of a correction that takes much
of the loss is no fact about the configuration: those who say it add the answer of
[`~trl_rollout_corr.tools.decision`]. No torch.
"""

from collections.abc import Callable, Iterator, Mapping
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

from ..messages import uncapitalized
from .criteria import Bounding, Criterion
from .resolve import Settings
from .trl_correction import DEFAULTS_OF_TRL, MODE, PREFIX_OF_TRL, SWITCH


# Options of vLLM that leave only some tokens to draw from
_TRUNCATION = ("top_p", "top_k", "min_p")
# Options of vLLM that change the distribution of the sampler, but not of the trainer
_DISTORTING = (
    *_TRUNCATION,
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "logits_processors",
    "thinking_token_budget",
)
_NEUTRAL = {"top_p": (1.0,), "top_k": (0, -1), "repetition_penalty": (1.0,)}  # the others are off at None, 0 and empty
# `k3_kl` with BF16 on both sides, in nats per token: a model of 8B parameters, and one of 135M (`docs/trl.md`)
_GAPS = (0.0008, 0.002)
# Worth a warning: a mean weight or an effective sample size below, or a share of rejected completions above. They are
# calculated for the longest completion, and most are shorter, so that these limits are wider than the healthy ones
_SMALL_WEIGHT, _FEW, _MANY_REJECTED = 0.75, 0.4, 0.32
_TRIAL = 128  # tokens; bounds of whole completions are not warned about below, where runs are trials
_MOST = 500.0  # variance from which the numbers no longer change


class Effect(NamedTuple):
    """A sentence about what a setting does to the loss, and the name of the setting."""

    field: str
    text: str
    is_harm: bool = False  # True if the correction does it, and another one would not


def effects(settings: Settings, fields: Mapping[str, Any]) -> list[Effect]:
    """
    What a configuration does to the loss.

    Args:
        settings ([`~trl_rollout_corr.settings.resolve.Settings`]):
            Settings in effect.
        fields (`Mapping[str, Any]`):
            Fields of TRL's configuration by name. A missing one has TRL's default, except that `use_vllm` counts as
            true, because a script may set it.

    Returns:
        `list[Effect]`: one for each thing that the user should know before the run.
    """
    parts = (_idle_trl_fields(settings, fields), _distorted(settings, fields), _length_effects(settings, fields))
    return [effect for part in parts for effect in part]


def shares_gradient(fields: Mapping[str, Any]) -> bool:
    """
    True if all tokens of a completion have one gradient in TRL's loss, as in GSPO. `cispo` multiplies the
    log-probability of each token by the ratio of its completion, so that each keeps its own.
    """
    return fields.get("importance_sampling_level") == "sequence" and fields.get("loss_type") != "cispo"


def rounds_cache(dtype: object) -> bool:
    """True if vLLM keeps keys and values of this `kv_cache_dtype` in 8 bits or fewer."""
    return str(dtype or "auto").startswith(("fp8", "int8", "nvfp4"))


# TRL's own correction ------------------------------------------------------------------------------------------------


def _idle_trl_fields(settings: Settings, fields: Mapping[str, Any]) -> Iterator[Effect]:
    """Fields of TRL's own correction that have no effect."""
    given = {
        name: x for name, x in fields.items() if name.startswith(PREFIX_OF_TRL) and x != DEFAULTS_OF_TRL.get(name, ...)
    }
    if settings.by_trl:
        off = fields.get(SWITCH, True) in (False, None)
        bounds = {name: x for name, x in given.items() if name != SWITCH}
        if off and bounds:
            yield Effect(
                next(iter(bounds)),
                f"{_listed(bounds)} {_have(bounds)} no effect: `{SWITCH}` is False, so that nothing corrects the "
                f"loss. Remove {_it(bounds)}, or set `{SWITCH}` to True.",
            )
        elif bounds and not fields.get("use_vllm", True):
            yield Effect(
                next(iter(bounds)),
                f"{_listed(bounds)} {_have(bounds)} no effect: `use_vllm` is False, and TRL corrects completions of "
                f"vLLM alone. Remove {_it(bounds)}, or set `use_vllm` to True.",
            )
        return
    if fields.get("rollout_correction", "default") != "default":  # then switching TRL's correction off repeats it
        given.pop(SWITCH, None)
    if given:
        acting = next((name for name in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(settings, name)), None)
        name = acting if acting and settings.rollout_correction is None else "rollout_correction"
        yield Effect(
            next(iter(given)),
            f"{_listed(given)} {_have(given)} no effect: `{name}` is {getattr(settings, name)!r}, which replaces "
            "TRL's own correction. To keep TRL's with these fields, set `rollout_correction: trl`; to train without "
            "any correction, set it to disabled.",
        )


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def _have(fields: Mapping[str, Any]) -> str:
    return "has" if len(fields) == 1 else "have"


def _it(fields: Mapping[str, Any]) -> str:
    return "it" if len(fields) == 1 else "them"


# The distribution of the sampler -------------------------------------------------------------------------------------


def distortions(fields: Mapping[str, Any]) -> dict[str, object]:
    """Options of sampling in effect that change the distribution of the sampler, by name."""
    options = {name: fields.get(name) for name in (*_TRUNCATION, "repetition_penalty")}
    options["structured_outputs"] = fields.get("vllm_structured_outputs_regex")
    overrides = fields.get("generation_kwargs")
    if isinstance(overrides, Mapping):
        options |= {name: value for name, value in overrides.items() if name in _DISTORTING}
    return {name: value for name, value in options.items() if value and value not in _NEUTRAL.get(name, ())}


def truncations(fields: Mapping[str, Any]) -> dict[str, object]:
    """Options of truncated sampling in effect, by name."""
    return {name: value for name, value in distortions(fields).items() if name in _TRUNCATION}


def distortions_of_sampler(settings: Settings, fields: Mapping[str, Any]) -> dict[str, object]:
    """Options of vLLM in effect that change the distribution of the sampler alone, by name."""
    changed = distortions(fields) if fields.get("use_vllm", True) else {}
    if settings.rollout_support is not None:
        changed = {name: value for name, value in changed.items() if name not in _TRUNCATION}
    return changed


def _distorted(settings: Settings, fields: Mapping[str, Any]) -> Iterator[Effect]:
    """Options of vLLM that change the distribution of the sampler alone."""
    changed = distortions_of_sampler(settings, fields)
    if not changed:
        return
    replay = ""
    if fields.get("vllm_mode") == "colocate" and not changed.keys().isdisjoint(_TRUNCATION):
        replay = " set `rollout_support` to 'replay' (`top_p`, `top_k` and `min_p`),"
    yield Effect(
        next(iter(changed)),
        f"{_listed(changed)} {'changes' if len(changed) == 1 else 'change'} the distribution vLLM samples from, but "
        "not the one the trainer computes, so that every ratio is off by the probability mass that was cut or moved. "
        f"Leave {_it(changed)} at the default,{replay} or expect biased ratios, weights and rejections.",
    )


# The length of completions -------------------------------------------------------------------------------------------


def _length_effects(settings: Settings, fields: Mapping[str, Any]) -> Iterator[Effect]:
    """What the longest completions lose to weights and bounds of whole completions."""
    length = fields.get("max_completion_length")
    if (
        isinstance(length, bool)
        or not isinstance(length, int | float)
        or not 0 < length < inf
        or not settings.corrects
    ):
        return
    if settings.by_trl and not fields.get("use_vllm", True):
        return
    bounding = settings.bounding
    if bounding is None or bounding.level not in _PARTS or not settings.applies_weights:
        lost = ""
    else:
        lost = _lost_weight(bounding, length)
    if bounding is not None and lost:
        yield Effect("max_completion_length", _about_weights(settings, _PARTS[bounding.level], lost), is_harm=True)
    for criterion in settings.criteria:
        rejected = [1 - kept_share(criterion, gap, length) for gap in _GAPS]
        if length >= _TRIAL and min(rejected) > _MANY_REJECTED:
            yield Effect("max_completion_length", _about_rejection(criterion, rejected, length))


def _longest(length: float) -> str:
    return f"of `max_completion_length` ({length:,.0f} tokens)"


# What gets one weight, or is rejected as a whole. A turn is at most as long as its completion, and without tools it is
# one
_PARTS = {"sequence": "completion", "seq": "completion", "turn": "turn"}


def _about_weights(settings: Settings, part: str, lost: str) -> str:
    which = "`rollout_is` gives"
    if settings.by_trl:
        which = "`sequence_mask`, the default of TRL's GRPO, gives" if _is_default(settings) else f"`{MODE}` gives"
    return f"{which} a {part} one weight, the product of its tokens' ratios: {uncapitalized(_BY_CALCULATION)}, {lost}"


def _is_default(settings: Settings) -> bool:
    return (
        settings.rollout_is_threshold == [0.0, DEFAULTS_OF_TRL[f"{PREFIX_OF_TRL}clip_max"]]
        and not settings.rollout_is_clamp
    )


_BY_CALCULATION = "By calculation, with BF16 (a `k3_kl` of {:g} to {:g})".format(*_GAPS)


def _lost_weight(bounding: Bounding, length: float) -> str:
    """The end of a sentence about the weights of the longest completions; empty if they are near 1."""
    means, sizes = zip(*(mean_and_sample_size(bounding, gap, length) for gap in _GAPS), strict=True)
    if not bounding.normalized and bounding.upper < inf and means[0] < _SMALL_WEIGHT:
        return f"one {_longest(length)} keeps {_percent(means[0])} to {_percent(means[1])} of its loss on average."
    if sizes[0] < _FEW:
        return (
            f"the effective sample size of completions {_longest(length)} is {_percent(sizes[0])}, because a few "
            "large weights outweigh the others."
        )
    return ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share >= 0.001 else "less than 0.1 %"


def mean_and_sample_size(bounding: Bounding, k3: float, length: float) -> tuple[float, float]:
    """
    Mean weight and effective sample size, as a share, of completions of `length` tokens whose log-ratios are
    independent and normal, for a gap of `k3` nats per token (`docs/trl.md`).
    """
    # The logarithm of the product is normal, with variance v and mean -v / 2. The means of w and of w^2 over an
    # interval are those of a normal distribution whose mean is larger by v, or by 2 v, times 1 and exp(v)
    v = min(2 * k3 * length, _MOST)
    lower, upper = bounding.lower or 0.0, bounding.upper
    inside = [_between(lower, upper, (2 * power - 1) * v / 2, v) for power in (1, 2)]
    mean, square = inside[0], exp(v) * inside[1]
    if bounding.clamps or bounding.lower is None:  # weights outside are moved to the nearer bound
        below = _between(0.0, lower, -v / 2, v)
        above = _between(upper, inf, -v / 2, v) if upper < inf else 0.0
        mean += lower * below + (upper * above if above else 0.0)
        square += lower**2 * below + (upper**2 * above if above else 0.0)
    return mean, mean**2 / square if square > 0 else 0.0


def _between(lower: float, upper: float, mean: float, v: float) -> float:
    """Probability that a number lies between two bounds if its logarithm is normal."""
    if upper <= lower:
        return 0.0
    low = NormalDist().cdf((log(lower) - mean) / sqrt(v)) if lower > 0 else 0.0
    high = NormalDist().cdf((log(upper) - mean) / sqrt(v)) if upper < inf else 1.0
    return max(high - low, 0.0)


# Statistics of completions or turns that depend on length: their mean and variance for a gap and a number of tokens
_PASSES: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "sum": lambda k3, length: (k3 * length, 2 * k3 * length),
    "mean": lambda k3, length: (k3, 2 * k3 / length),
}


def kept_share(criterion: Criterion, k3: float, length: float) -> float:
    """
    Share of completions or turns of `length` tokens that a criterion on the product or the mean of their ratios keeps;
    1 for other criteria. As in [`mean_and_sample_size`].
    """
    how = criterion.scope.rpartition("_")[2]
    if criterion.divergence != "k1" or how not in _PASSES:
        return 1.0
    mean, variance = _PASSES[how](k3, length)  # of k1 = -log ratio
    distribution = NormalDist(mean, sqrt(variance))
    low = distribution.cdf(criterion.lower) if criterion.lower > -inf else 0.0
    high = distribution.cdf(criterion.upper) if criterion.upper < inf else 1.0
    return high - low


def _about_rejection(criterion: Criterion, rejected: list[float], length: float) -> str:
    low, high = sorted(round(100 * share) for share in rejected)
    span = f"{low} %" if low == high else f"{low} to {high} %"
    return (
        f"{_BY_CALCULATION}, `{criterion.name}` rejects {span} of the healthy {_PARTS[criterion.unit]}s "
        f"{_longest(length)}. Widen `rollout_rs_threshold` (`trl-rollout-corr docs presets#bounds-from-the-spread`), "
        "or remove the criterion."
    )
