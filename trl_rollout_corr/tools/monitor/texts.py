"""Sentences that several rules share, or that depend on how the gap arose."""

from collections.abc import Callable, Mapping
from string import Formatter

from ...messages import capitalized
from ...settings.effects import distortions_of_sampler
from ..bands import ROUNDED
from ..decision import decide, in_words
from ..formats import number, percent
from ..run_facts import done_about_gap
from .windows import Window


FRESHER = (
    "Push weights to the sampler more often (lower `steps_per_generation` or `num_iterations`, in asynchronous "
    "training `weight_sync_steps` or `max_staleness`)"
)
MOMENTUM = "If it lasts, only momentum and weight decay still change the weights."

_ROUNDED = {
    "": f"bfloat16 gave {ROUNDED['']:g}",
    "cache": f"an FP8 KV cache gave up to {ROUNDED['cache']:g}",
    "weights": f"FP8 or INT8 weights gave up to {ROUNDED['weights']:g}",
}
# Rounding does not explain a gap of `LARGE_K3`, at which most uncorrected runs collapsed. At `HUGE`, most corrected
# runs lost accuracy (`benchmarks/arena/alarms.json`)
LARGE_K3, HUGE = 0.1, 0.3
HARMED = "most of our uncorrected runs whose gap grew this far lost accuracy"
_COLLAPSED = f"Most of our runs without a correction and with a gap above {LARGE_K3:g} collapsed"
_FEW = f"Most of our corrected runs with a gap above {HUGE:g} lost accuracy for a while or for good"
_OLD = "a sampler that is {age:.0f} step{s} old seldom explains a gap this large"

# By the origin of the gap: why it matters without a correction, and with one
_UNCORRECTED = {
    "old": f"The sampler is {{age:.0f}} step{{s}} old, which explains the gap unless it came suddenly, but {HARMED}.",
    "start": "{rounding}",
    "open": f"Training on such completions is biased, and {HARMED}.",
}
_UNCORRECTED_LARGE = {
    "old": f"{_COLLAPSED}, and {_OLD}.",
    "start": "{rounding}",
    "open": f"{_COLLAPSED}.",
}
_CORRECTED = {
    "old": "This may be harmless: the sampler is {age:.0f} step{s} old, which explains it unless the gap came "
    "suddenly, and such a gap often shrinks later.",
    "start": "{rounding}",
    "open": "This may be harmless: with a stale sampler the gap grows at first and shrinks later.",
}
_CORRECTED_FRESH = "The weights that sample are announced as fresh, so no age explains it."
_CORRECTED_HUGE = {
    "old": f"{_FEW}, and {_OLD}.",
    "start": "{rounding}",
    "open": f"{_FEW}, although a single token that is far off can raise it for one step.",
}
# A gap in the first steps that rounding explains, and one that it does not
_ROUNDING = "This may be harmless, because {gave} in our measurements."
_SELDOM = "Rounding seldom explains it: {gave} in our measurements, so something else differs."
_NEVER = "Rounding does not explain it: {gave} in our measurements, so something else differs."
_FEW_BITS = "Weights with few bits may explain it: `trl-rollout-corr probe` measures how much."
_DIAGNOSE = {
    False: "Set `rollout_diagnose: true` and start again: it names the cause after the first step.",
    True: "Read what `rollout_diagnose` says about the first step, and start the run again without this cause.",
}
# Share of truncated completions that counts as most
CUT = 0.5
_CUT = (
    "A share of {cut:.2g} of the completions is cut off, so the answer may be missing: raise `max_completion_length`, "
    "and check that completions end."
)
_UNCUT = (
    "Look at some completions and their rewards: prompts may be too easy or too hard, or the reward function always "
    "returns the same."
)
_UNKNOWN = "it is not known whether the run corrects for it (without a correction, it biases the training)"
_NO_TOKENS = {
    "cut": "If `mask_truncated_completions` is set, it leaves out every completion without an EOS token, even one "
    "that a `stop` string has ended; otherwise check the `env_mask` of your `rollout_func`.",
    "ended": "Few completions were cut, so check the `env_mask` of your `rollout_func`: tokens with 0 there are not "
    "in the loss.",
}


# Mean weight of completions at the start above which length alone does not explain a low one now
_NEAR_1 = 0.9
_SOME = 0.005  # share of the weights above the upper bound that is worth a word
_PRODUCT = "each completion gets one weight, the product of its tokens' ratios"
APART = "Sampler and trainer are far apart, or weights of whole completions shrink with length."
_DROPPED = "{high} of the weights exceed the upper bound, and are dropped"
_LIKELIER = f"The trainer finds the completions likelier than the sampler does (`kl` is {{kl}}): {_DROPPED}."
_FALLS = f"{capitalized(_PRODUCT)}, which shrinks with length even if nothing is wrong"
_FELL = f"The gap or the length has grown, because the mean weight was {{first:.2g}} at the start: {_PRODUCT}"


def origin(window: Window) -> str:
    """`"start"` if the gap was there from the first steps, `"old"` if the sampler is stale, else `"open"`."""
    if window.course.off_at_start:
        return "start"
    return "old" if (window.age or 0.0) >= 1.0 else "open"


def _gap(window: Window) -> float:
    return window.get("k3_kl") or 0.0


def _gave(window: Window) -> str:
    """The gap that we measured in the first steps with an engine that rounds like this one."""
    return _ROUNDED[window.rounds_more if window.rounds_more in _ROUNDED else ""]


def _rounding(window: Window) -> str:
    """A sentence on whether rounding explains a gap of the first steps."""
    what, gap = window.rounds_more, _gap(window)
    if what == "few bits":
        return _FEW_BITS
    as_measured = what != "" and gap <= ROUNDED[what]
    possible = what != "" or gap <= LARGE_K3
    explained = _ROUNDING if as_measured else _SELDOM if possible else _NEVER
    return explained.format(gave=_gave(window))


def _length(window: Window) -> str:
    return "" if window.length is None else f" of {window.length:.0f} tokens on average"


def _fell(window: Window) -> str:
    """A sentence on why the mean weight of completions is low, by the direction and the share above the bound."""
    first, kl = window.course.weight_at_start, window.get("kl") or 0.0
    drops = window.bounding is not None and window.bounding.drops
    high = (window.get("rollout_is_ratio_fraction_high") or 0.0) if drops else 0.0
    numbers = {"first": first, "kl": number(kl, 2), "high": percent(float(f"{high:.2g}"))}
    if high > 0 and kl < 0:
        return _LIKELIER.format(**numbers)
    text = _FELL if first and first >= _NEAR_1 else _FALLS
    return f"{text}; {_DROPPED}.".format(**numbers) if high >= _SOME else f"{text}.".format(**numbers)


def _apart(window: Window) -> str:
    """Why the mean weight is low; the weight of a single token does not depend on the length."""
    of_tokens = window.bounding is not None and window.bounding.unit == "token"
    return "Sampler and trainer are far apart." if of_tokens else APART


def _cut(window: Window) -> str:
    return _CUT.format(cut=window.cut) if window.cut is not None and window.cut >= CUT else _UNCUT


def _no_tokens(window: Window) -> str:
    """A sentence on why no token is left in the loss."""
    return _NO_TOKENS["ended" if window.cut is not None and window.cut < CUT else "cut"]


def _by_origin(texts: Mapping[str, str], window: Window) -> str:
    """The text for the origin of the gap."""
    age = window.age or 0.0
    numbers = {"age": age, "s": "" if age == 1.0 else "s", "rounding": _rounding(window)}
    return texts[origin(window)].format(**numbers)


def _corrects(window: Window) -> str:
    """What the run does about a gap."""
    return _UNKNOWN if window.settings is None else done_about_gap(window.settings, is_fresh=window.is_fresh)


def _uncorrected(window: Window) -> str:
    return _by_origin(_UNCORRECTED_LARGE if _gap(window) > LARGE_K3 else _UNCORRECTED, window)


def _corrected(window: Window) -> str:
    """Why a gap matters although the run corrects for it, or why it may be harmless."""
    # an age of 0 explains nothing, and is no comfort
    if window.is_fresh and origin(window) == "open" and _gap(window) <= HUGE:
        return _CORRECTED_FRESH
    return _by_origin(_CORRECTED_HUGE if _gap(window) > HUGE else _CORRECTED, window)


_FIND = "Find the cause: set `rollout_dump_dir`, train a few steps, and run `trl-rollout-corr diagnose` on the dump."


def _began(window: Window) -> str:
    """The share of truncated completions at the start."""
    return f", and {window.course.cut_at_start or 0.0:.2g} at the start"


# Sentences for the state of a run, by their name in the texts of rules


OF_PUSH = (
    "A push did not arrive everywhere, or with a wrong scale; but the sampler may be older on purpose, and over many "
    "pushes the gap of the kernels may grow."
)
LOOK_AT_PUSH = (
    "Look at the push if `age_k3_kl` was about as large before; otherwise let sampler and trainer compute in the same "
    "type."
)
_OF_SOME = (
    "A push that did not arrive would show in all completions that were scored once more, and {off:.0f} of {n:.0f} "
    "texts {has} all of the gap."
)
_ASK = (
    "With one replica, update vLLM and ask it for the log-probabilities of one of these texts twice; with several, "
    "ask each of them."
)


def _some_texts(window: Window) -> str:
    """How many of the completions that were scored after a push have all of the gap; empty if most of them have it."""
    n, off = (window.get(name) or 0.0 for name in ("fresh_texts", "fresh_texts_off"))
    return "" if n < 4 or 2 * off > n else _OF_SOME.format(off=off, n=n, has="has" if off == 1 else "have")


TRUE_VALUES = (
    "check that log-probabilities are taken after temperature, belong to their tokens, and are no fillers, "
    "such as 0.0."
)
DEFAULTS = "Set `top_p`, `top_k`, `min_p` and `repetition_penalty` to their defaults; if they are, " + TRUE_VALUES


def _defaults(window: Window) -> str:
    """What makes the mean ratio 1: options of sampling to remove if the run is known to set some."""
    changed = {} if window.settings is None else distortions_of_sampler(window.settings, window.fields)
    if changed:
        options = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        return f"Leave {options} at the default: the trainer scores with the whole distribution."
    return capitalized(TRUE_VALUES) if window.fields else DEFAULTS


_SENTENCES: dict[str, Callable[[Window], str]] = {
    "correct": lambda window: in_words(decide(window.settings, window.fields, is_harmed=True)),
    "length": _length,
    "fell": _fell,
    "apart": _apart,
    "uncorrected": _uncorrected,
    "corrected": _corrected,
    "gave": _gave,
    "diagnose": lambda window: _DIAGNOSE[window.settings is not None and window.settings.rollout_diagnose],
    "cut": _cut,
    "corrects": _corrects,
    "find": lambda window: _FIND,
    "began": _began,
    "no_tokens": _no_tokens,
    "of_push": lambda window: _some_texts(window) or OF_PUSH,
    "defaults": _defaults,
    "push_or_text": lambda window: _ASK if _some_texts(window) else LOOK_AT_PUSH,
}


def fill(text: str, window: Window, **values: object) -> str:
    """A text of a rule with its numbers, and with sentences about the run for the names in braces."""
    named = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    sentences = {name: _SENTENCES[name](window) for name in named & _SENTENCES.keys()}
    filled = text.format(**values, **sentences)
    return " ".join(filled.split())  # a sentence that does not apply leaves a gap
