"""Sentences that several rules share, or that depend on how the gap arose."""

from collections.abc import Callable, Mapping
from string import Formatter

from ..decision import decide, in_words
from .windows import Window


FRESHER = (
    "Push weights to the sampler more often (lower `steps_per_generation` or `num_iterations`, in asynchronous training "
    "`weight_sync_steps` or `max_staleness`)"
)
MOMENTUM = "If it lasts, the run learns nothing: only momentum and weight decay still change the weights."

# `k3_kl` in the first steps of our runs, by what their engine rounds to fewer than 16 bits
ROUNDED = {"": 0.002, "cache": 0.05, "weights": 0.02}
_ROUNDED = {
    "": f"bfloat16 gave {ROUNDED['']:g}",
    "cache": f"an FP8 KV cache gave up to {ROUNDED['cache']:g}",
    "weights": f"FP8 or INT8 weights gave up to {ROUNDED['weights']:g}",
}
# Rounding does not explain a gap of `LARGE_K3`, at which most uncorrected runs collapsed. At `HUGE`,
# most corrected runs lost accuracy (`benchmarks/arena/alarms.json`)
LARGE_K3, HUGE = 0.1, 0.3
_HARMLESS = "Not every run is harmed by a gap of this size."
_COLLAPSED = f"Most of our runs without a correction and with a gap above {LARGE_K3:g} collapsed."
_FEW = f"Most of our corrected runs with a gap above {HUGE:g} lost accuracy for a while or for good."
_EXPLAINED = "The sampler is {age:.0f} step{s} old, which explains it unless the gap came suddenly."
_OLD = "The sampler is {age:.0f} step{s} old, and such an age seldom explains a gap this large."
_BIASED = "Training on such completions is biased, and the gap tends to grow."
_CLOSER = f"To make the gap smaller, {FRESHER[:1].lower()}{FRESHER[1:]}, or lower `learning_rate`."
_FROM_THE_START = (
    "The gap was there from the first step, so look for what the two sides compute differently: dropout in the trainer (also "
    "`lora_dropout`), low precision in the sampler, or log-probabilities of other tokens than the sampled ones."
)

# By the origin of the gap: why it matters without a correction, and with one, and what to do about
# it
_UNCORRECTED = {
    "old": f"{_HARMLESS} {_EXPLAINED} {_BIASED}",
    "start": "{rounding}",
    "open": f"{_HARMLESS} {_BIASED}",
}
_UNCORRECTED_LARGE = {
    "old": f"{_COLLAPSED} {_OLD} {_BIASED}",
    "start": "{rounding}",
    "open": f"{_COLLAPSED} {_BIASED}",
}
_CORRECTED = {
    "old": f"This may be harmless, because such a gap often shrinks later. {_EXPLAINED} If it stays, another alarm follows.",
    "start": "{rounding}",
    "open": "This may be harmless: with a stale sampler the gap grows at first and shrinks later. If it stays, another alarm "
    "follows.",
}
_CORRECTED_FRESH = (
    "The weights that sample are announced as fresh, so no age explains it. If it stays, another alarm follows."
)
_CORRECTED_HUGE = {
    "old": f"{_FEW} {_OLD}",
    "start": "{rounding}",
    "open": f"{_FEW} A single token that is far off can raise it for one step: `log_ratio_min` and `log_ratio_max` show it.",
}
# A gap in the first steps that rounding explains, and one that it does not
_ROUNDING = (
    "This may be harmless, because {gave} in our measurements. `trl-rollout-corr probe` measures what it gives here."
)
_NO_ROUNDING = "{gave} in our measurements. Something else differs, and a correction only limits the damage."
_SELDOM = f"Rounding seldom explains it: {_NO_ROUNDING}"
_NEVER = f"Rounding does not explain it: {_NO_ROUNDING}"
_FEW_BITS = (
    "Weights with few bits may explain it: `trl-rollout-corr probe` measures how much. If it measures less, something else "
    "differs."
)
_DIAGNOSE = {
    False: "Set `rollout_diagnose: true`, which names the cause after the first step, and start the run again.",
    True: "Read what `rollout_diagnose` says about the first step, and start the run again without this cause.",
}
# Share of truncated completions that counts as most
CUT = 0.5
_CUT = (
    "A share of {cut:.2g} of the completions is cut off, so the answer may be missing: raise "
    "`max_completion_length`, and check that completions end."
)
_UNCUT = "Look at some completions and their rewards: prompts may be too easy or too hard."
_UNKNOWN = "it is not known whether the run corrects for it (without a correction, it biases the training)"
_CLOSE = {
    "old": _CLOSER,
    "start": _FROM_THE_START,
    "open": "If the gap came suddenly, look for weights that were not pushed. If it was there from the first step, look for "
    "dropout in the trainer (also `lora_dropout`) and for low precision in the sampler; if it grew, a sampler of your own may "
    "be stale without saying so (it has to report its weights in `trainer.rollout_step`).",
}
_MASK = "check the `env_mask` of your `rollout_func`: tokens with 0 there are not in the loss."
_NO_TOKENS = {
    "cut": "If `mask_truncated_completions` is set, it is the likely reason: it leaves out every completion without an EOS "
    "token, also one that a `stop` string has ended. Set it to False, or raise `max_completion_length` if completions are "
    f"cut. If it is not set, {_MASK}",
    "ended": f"Few completions were cut, so {_MASK}",
}


# Mean weight of completions at the start above which length alone does not explain a low one now
_NEAR_1 = 0.9
_PRODUCT = "each completion gets one weight, the product of its tokens' ratios."
_EXCEEDS = (
    "Otherwise the sampler finds the completions less likely than the trainer does: most weights exceed the upper bound, "
    "where the correction drops them."
)
_FALLS = f"Otherwise the weights shrink with length, even if nothing is wrong: {_PRODUCT}"
_FELL = (
    f"Otherwise the gap or the length has grown, because the mean weight was {{first:.2g}} at the start: {_PRODUCT}"
)

_GROWN = (
    "First find out why it fell: look for weights that do not arrive, and check whether completions became longer."
)

# What the loss does with a token without a finite log-probability
_BROKEN = {
    "drop": "The loss leaves out such tokens.",
    "neutralize": "The loss keeps such tokens and takes their ratio as 1 where the sampler's number is missing.",
    "raise": "",
    "trl": "They stay in TRL's loss: with a ratio of 1 if the number is missing, and with the cap or 0 if it is minus "
    "infinity.",
    "uncorrected": "They stay in the loss, which is not corrected.",
    "unknown": "By default, corrections of this package leave out such tokens.",
}


def _about_broken(window: Window) -> str:
    """A sentence on what the loss of a run does with a token without a finite log-probability."""
    settings = window.settings
    if settings is None:
        return _BROKEN["unknown"]
    if settings.by_trl or window.clips_by_trl:
        return _BROKEN["trl"]
    return _BROKEN[settings.rollout_nan_policy] if settings.corrects else _BROKEN["uncorrected"]


def origin(window: Window) -> str:
    """
    `"start"` if the gap was there from the first steps, `"old"` if the sampler is stale, else
    `"open"`.
    """
    if window.course.off_at_start:
        return "start"
    return "old" if (window.get("staleness_max") or 0.0) >= 1.0 else "open"


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
    """A sentence on why the mean weight of completions is low."""
    first, high = window.course.weight_at_start, window.get("rollout_is_ratio_fraction_high") or 0.0
    if high > (window.get("rollout_is_ratio_fraction_low") or 0.0) and window.bounding and window.bounding.drops:
        return _EXCEEDS
    return _FELL.format(first=first) if first and first >= _NEAR_1 else _FALLS


def _grown(window: Window) -> str:
    """Advice on where to look if the mean weight was near 1 at the start."""
    return _GROWN if (window.course.weight_at_start or 0.0) >= _NEAR_1 else ""


def _cut(window: Window) -> str:
    return _CUT.format(cut=window.cut) if window.cut is not None and window.cut >= CUT else _UNCUT


def _no_tokens(window: Window) -> str:
    """A sentence on why no token is left in the loss."""
    return _NO_TOKENS["ended" if window.cut is not None and window.cut < CUT else "cut"]


def _by_origin(texts: Mapping[str, str], window: Window) -> str:
    """The text for the origin of the gap."""
    age = window.get("staleness_max") or 0.0
    numbers = {"age": age, "s": "" if age == 1.0 else "s", "rounding": _rounding(window)}
    return texts[origin(window)].format(**numbers)


def _uncorrected(window: Window) -> str:
    return _by_origin(_UNCORRECTED_LARGE if _gap(window) > LARGE_K3 else _UNCORRECTED, window)


def _corrected(window: Window) -> str:
    """Why a gap matters although the run corrects for it, or why it may be harmless."""
    fresh = window.age is not None and window.age < 1  # its age explains nothing, and is no comfort
    if fresh and origin(window) == "open" and _gap(window) <= HUGE:
        return _CORRECTED_FRESH
    return _by_origin(_CORRECTED_HUGE if _gap(window) > HUGE else _CORRECTED, window)


_FRESH = "To make the gap smaller, lower `learning_rate`: the weights that sample are fresh already."
_FIND = (
    "Find the cause: set `rollout_dump_dir`, train a few steps, and run `trl-rollout-corr diagnose` on the dump. "
    "`trl-rollout-corr probe` measures what rounding gives here."
)


def _closer(window: Window) -> str:
    """How to make the gap smaller."""
    if origin(window) == "start":
        return _FROM_THE_START
    return _FRESH if window.age is not None and window.age < 1 else _CLOSER


def _began(window: Window) -> str:
    """The share of truncated completions at the start."""
    return f", and {window.course.cut_at_start or 0.0:.2g} at the start"


# Sentences for the state of a run, by their name in the texts of rules


OF_PUSH = (
    "The sampler may be older on purpose: then set `trainer.rollout_step` to the optimizer step of its weights whenever "
    "they are pushed. The gap of the kernels may also grow with the policy, over many pushes. A jump means that a push did "
    "not arrive, or only in part, with a wrong scale, or at one replica of several."
)
LOOK_AT_PUSH = (
    "If `age_k3_kl` was about as large before, look at the push: `trl-rollout-corr docs "
    "metrics#two-numbers-of-each-push`. Otherwise let sampler and trainer compute in the same type."
)
_OF_SOME = (
    "A push that did not arrive would show in all of the completions that were scored once more, and only some have the "
    "gap: the sampler scores these wrongly, or one replica of several has not got the push."
)


def _some_texts(window: Window) -> str:
    """How many of the completions that were scored after a push have all of the gap; empty if most of them have it."""
    n, off = (window.get(name) or 0.0 for name in ("fresh_texts", "fresh_texts_off"))
    if n < 4 or 2 * off > n:
        return ""
    has = "has" if off == 1 else "have"
    return (
        f"{off:.0f} of {n:.0f} texts {has} all of the gap. With one replica, update vLLM, and ask it for the "
        "log-probabilities of one of these texts twice; with several, ask each of them."
    )


_SENTENCES: dict[str, Callable[[Window], str]] = {
    "correct": lambda window: in_words(decide(window.settings, window.fields, is_harmed=True)),
    "length": _length,
    "fell": _fell,
    "grown": _grown,
    "broken": _about_broken,
    "uncorrected": _uncorrected,
    "corrected": _corrected,
    "gave": _gave,
    "diagnose": lambda window: _DIAGNOSE[window.settings is not None and window.settings.rollout_diagnose],
    "cut": _cut,
    "corrects": lambda window: _UNKNOWN if window.settings is None else "the run corrects for it",
    "close": lambda window: _CLOSE[origin(window)],
    "closer": _closer,
    "find": lambda window: _FIND,
    "began": _began,
    "no_tokens": _no_tokens,
    "of_push": lambda window: _OF_SOME if _some_texts(window) else OF_PUSH,
    "push_or_text": lambda window: _some_texts(window) or LOOK_AT_PUSH,
}


def fill(text: str, window: Window, **values: object) -> str:
    """
    A text of a rule with its numbers, and with sentences about the run for the names in braces.
    """
    named = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    sentences = {name: _SENTENCES[name](window) for name in named & _SENTENCES.keys()}
    filled = text.format(**values, **sentences)
    return " ".join(filled.split())  # a sentence that does not apply leaves a gap
