"""
The parts of a rule's advice that depend on the run: its numbers, and options that it has and can change.

The advice of a rule names a part in braces, such as `{fresher}`. A part is one or more sentences, or a piece of one. It is
empty if the run gives no reason for it.
"""

import math

from ..messages import capitalized
from .advice import Situation, advise, mode_of
from .windows import Window


_IN_STEP = (
    "The sampler reports no staleness (`staleness_max` is 0). A sampler of your own can be stale all the same: it has to "
    "report its weights in `trainer.rollout_step`."
)
# Options that change the distribution of the sampler, and their values without effect. The replay of `rollout_support` makes
# up for the first three.
_DISTORTING = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0, None)}
_TRUNCATING = ("top_p", "top_k", "min_p")


def placeholders(window: Window) -> dict[str, str]:
    """
    Texts for the advice of rules, by placeholder.

    Returns:
        `dict[str, str]`, with the keys

        - `correct`, `instead`: the correction to set for a gap, and for one that grows although the run corrects for it;
        - `in_step`: a cause of a gap if the sampler reports no staleness;
        - `fresher`: part of a sentence, how to sample with newer weights; `Fresher` begins a sentence;
        - `level`: another level of the importance weights;
        - `dropped`: the bounds of IcePop;
        - `lower_cap`: a lower bound of truncated weights;
        - `add_rejection`: rejection, for a run without;
        - `widen`, `do_not_widen`: when to widen the bounds of rejection, and not to;
        - `renormalize`, `renormalized`: the field that restores the size of the step, if it is not set and if it is;
        - `bounds`: names of the fields with bounds beyond which a token has no gradient;
        - `by_length`: criteria that do not depend on the length of a completion;
        - `distortion`: options that change the distribution of the sampler;
        - `server`: the option of a vLLM server that decides about its log-probabilities.
    """
    fresher = _fresher(window)
    return {
        "correct": _advised(window, "gap"),
        "instead": _advised(window, "growing gap"),
        "in_step": _IN_STEP if window.get("staleness_max") == 0 else "",
        "fresher": fresher,
        "Fresher": capitalized(fresher),
        "level": _level(window),
        "dropped": _dropped(window),
        "lower_cap": _lower_cap(window),
        "add_rejection": "Add rejection with `rollout_rs`, too."
        if window.setting("rollout_rs") in (None, ...)
        else "",
        "widen": _widen(window),
        "do_not_widen": _do_not_widen(window),
        "renormalize": _renormalize(window),
        "renormalized": _renormalized(window),
        "bounds": _bounds_in_use(window),
        "by_length": _by_length(window),
        "distortion": _distortion(window),
        "server": _server(window),
    }


def _advised(window: Window, situation: Situation) -> str:
    """The correction to set, in a sentence; empty if the run has it already."""
    if window.only_measured:
        return "Set `rollout_metrics_only` to False, so that the correction has an effect."
    advice = advise(mode_of(window.settings), situation, corrects=window.corrects)
    return advice.sentence if any(window.setting(k) != value for k, value in advice.settings.items()) else ""


def _fresher(window: Window) -> str:
    if window.setting("max_staleness") is not ...:  # the asynchronous trainer
        return "lower `weight_sync_steps` or `max_staleness`"
    per_generation, accumulated = window.setting("steps_per_generation"), window.setting("gradient_accumulation_steps")
    too_many = ["`steps_per_generation`"] if _is_above(per_generation, accumulated) else []
    too_many += ["`num_iterations`"] if _is_above(window.setting("num_iterations"), 1) else []
    return f"lower {' or '.join(too_many)}" if too_many else "push weights to the sampler more often"


def _is_above(number: object, other: object) -> bool:
    """True if both are numbers, and the first is the larger one."""
    return isinstance(number, int) and isinstance(other, int) and number > other


def _level(window: Window) -> str:
    level = window.setting("rollout_is")
    if level is ...:
        return "If `rollout_is` is sequence, set it to token."
    return "Set `rollout_is` to token." if level in ("turn", "sequence") else ""


def _drops(window: Window) -> bool:
    """True if the weights are IcePop's, which are 0 outside their bounds."""
    return window.get("rollout_is_oob_ratio") is not None


def _dropped(window: Window) -> str:
    share = window.get("rollout_is_oob_ratio")
    if share is None:
        return ""
    return f"A share of {share:.2g} of the tokens has a ratio outside of `rollout_is_threshold`. If that is many, widen it."


def _criteria(window: Window) -> list[str] | None:
    """Names of the criteria; `None` if they are not known."""
    criteria = window.setting("rollout_rs")
    return None if criteria is ... else [*(criteria or [])] if not isinstance(criteria, str) else criteria.split(",")


def _lower_cap(window: Window) -> str:
    if _drops(window) or window.weight_bound <= 1.0:
        return ""
    return "You can also lower `rollout_is_threshold`. A higher bound never helps."


def _widen(window: Window) -> str:
    criteria = _criteria(window)
    if criteria == []:
        return ""
    how = "widen `rollout_rs_threshold`"
    if criteria is None or any(name.startswith("seq") for name in criteria):
        how = f"set the bounds of seq_mean_k1 in `rollout_rs_threshold` to {_geometric(window)}"
    return (
        f"If as many tokens were rejected at the start of the run, {how}. If the share grew together with `k3_kl`, do not "
        "widen the bounds, because the gap is the cause."
    )


def _do_not_widen(window: Window) -> str:
    return "" if _criteria(window) == [] else "Do not widen `rollout_rs_threshold`, which would let the gap through."


def _renormalize(window: Window) -> str:
    if _criteria(window) == [] or window.setting("rollout_rs_renormalize") is True:
        return ""
    return "`rollout_rs_renormalize` restores the size of the step, but not the rejected tokens."


def _renormalized(window: Window) -> str:
    if window.setting("rollout_rs_renormalize") is not True:
        return ""
    return "`rollout_rs_renormalize` divides by the share of tokens that are left: see `rollout_rs_masked_fraction`."


def _server(window: Window) -> str:
    if window.setting("vllm_mode") == "colocate":
        return ""
    return "A vLLM server must be started with `--logprobs-mode processed_logprobs`."


def _geometric(window: Window) -> str:
    """
    Bounds that keep nearly all completions of this window: three standard deviations of the mean log-ratio of a completion,
    which are 3.8 times the mean of its absolute value.
    """
    size = window.get("log_ppl_abs_diff")
    if size is None or not 0 < size < 5:
        return "bounds made from the spread of the sampler (`trl-rollout-corr docs choosing#bounds-from-the-spread`)"
    length = window.metrics.get("completions/mean_length")
    tokens = f" at {length:.0f} tokens" if isinstance(length, int | float) else ""
    words = f"they keep nearly all completions of this window, whose mean log-ratio is {size:.2g} in size{tokens}"
    return f"{_interval(-3.8 * size, 3.8 * size)} ({words})"


def _interval(low: float, high: float) -> str:
    """Bounds on a ratio from the bounds of its logarithm, widened to two digits of their distance from 1."""
    digits = max(2, 1 - math.floor(math.log10(max(1 - math.exp(low), 1e-6))))
    step = 10.0**-digits
    lower, upper = math.floor(math.exp(low) / step) * step, math.ceil(math.exp(high) / step) * step
    return f"[{max(lower, 0.0):.{digits}f}, {upper:.{digits}f}]"


def _bounds_in_use(window: Window) -> str:
    fields = ["`rollout_rs_threshold`"] if window.setting("rollout_rs") is not None else []
    fields += ["`rollout_is_threshold`"] if _drops(window) else []
    return " and ".join(fields) or "the bounds of the correction"


def _by_length(window: Window) -> str:
    criteria = _criteria(window)
    if criteria is None or any(name.startswith(("seq_sum", "seq_max")) for name in criteria):
        return (
            "Use criteria that do not depend on length: in `rollout_rs`, replace seq_sum and seq_max criteria by seq_mean_k1 "
            "or seq_mean_k3. You can also widen `rollout_rs_threshold`."
        )
    return "Widen `rollout_rs_threshold`."


def _distortion(window: Window) -> str:
    known = {name: window.setting(name) for name in _DISTORTING}
    changed = [name for name, value in known.items() if value is not ... and value not in _DISTORTING[name]]
    if ... not in known.values() and not changed:
        return ""
    names = changed or [*_DISTORTING]
    listed = ", ".join(f"`{name}`" for name in names)
    advice = f"Set {listed} to {'its default' if len(names) == 1 else 'their defaults'}."
    replayed = [name for name in names if name in _TRUNCATING]
    if (
        not replayed
        or window.setting("vllm_mode") not in (..., "colocate")
        or window.setting("max_staleness") is not ...
    ):
        return advice
    if window.setting("rollout_support") == "replay":
        return ""
    return f"{advice} You can also set `rollout_support` to replay, which makes up for `top_p`, `top_k` and `min_p`."
