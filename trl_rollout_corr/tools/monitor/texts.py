"""Sentences of rules: those that several rules share, and those that depend on how the gap arose."""

from ...settings.resolve import Settings
from .advice import Advice, advise, in_words
from .windows import Window


FRESHER = (
    "Push weights to the sampler more often (lower `steps_per_generation` or `num_iterations`, in asynchronous training "
    "`weight_sync_steps` or `max_staleness`)"
)
WIDEN = (
    "If as many tokens were rejected at the start of the run, widen `rollout_rs_threshold` (`trl-rollout-corr compare` names "
    "bounds that fit). If the share grew together with `k3_kl`, leave the bounds as they are."
)
MOMENTUM = "If it lasts, the run learns nothing: only momentum and weight decay still change the weights."

# What `k3_kl` was in the first steps of our runs, by what their engine rounds to fewer than 16 bits
ROUNDED = {"": 0.002, "cache": 0.05, "weights": 0.016}
_ROUNDED = {
    "": f"bfloat16 gave {ROUNDED['']:g}",
    "cache": f"an FP8 KV cache gave up to {ROUNDED['cache']:g}",
    "weights": f"FP8 or INT8 weights gave up to {ROUNDED['weights']:g}",
}
# A gap that rounding does not explain, and with which most uncorrected runs collapsed; and one with
# which most corrected runs lost accuracy (`benchmarks/arena/alarms.json`)
LARGE, HUGE = 0.1, 0.3
_HARMLESS = "Not every run is harmed by a gap of this size."
_COLLAPSED = f"Most of our runs without a correction and with a gap above {LARGE:g} collapsed."
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
_CORRECTED_HUGE = {
    "old": f"{_FEW} {_OLD}",
    "start": "{rounding}",
    "open": f"{_FEW} A single token that is far off can raise it for one step: `log_ratio_min` and `log_ratio_max` show it.",
}
# A gap of the first steps that rounding explains, and one that it does not
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
# Answers that are cut, where most are
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


# What to set about weights and bounds: with TRL's own correction, whose fields decide, with ours,
# and if that is not known
_TO_TOKENS = {
    "trl": "Set `vllm_importance_sampling_mode` to token_truncate{or_preset}.",
    "ours": "Set `rollout_is` to token.",
    "unknown": "If each completion gets a single weight, use token weights: set `rollout_is` to token, or with "
    "`rollout_correction: trl` set `vllm_importance_sampling_mode` to token_truncate.",
}
_LOWER_CAP = {
    "trl": "Lower `vllm_importance_sampling_clip_max` if it is above 1{or_set_preset}.",
    "ours": "Lower `rollout_is_threshold` if it is above 1; a higher cap never helps.",
    "unknown": "Otherwise lower the cap on the weights if it is above 1; a higher cap never helps.",
}
_DROPPED = {
    "trl": "If `rollout_is_oob_ratio` is high, set `vllm_importance_sampling_mode` to token_truncate.",
    "ours": "If `rollout_is_oob_ratio` is high, widen `rollout_is_threshold`.",
    "unknown": "If `rollout_is_oob_ratio` is high, widen the bounds of the weights.",
}


# A mean weight of completions at the start, above which length alone does not explain that it is
# low now
_NEAR_1 = 0.9
_PRODUCT = "each completion gets one weight, the product of its tokens' ratios."
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
    "trl": "They stay in TRL's loss.",
    "unknown": "By default, corrections of this package leave out such tokens.",
}


def _about_broken(settings: Settings | None) -> str:
    """What the loss of a run does with a token without a finite log-probability."""
    if settings is None:
        return _BROKEN["unknown"]
    return _BROKEN["trl" if settings.by_trl else settings.rollout_nan_policy]


def _about_weights(window: Window) -> dict[str, str]:
    """What to set about weights and bounds in the mode of a run; empty where it is set."""
    settings = window.settings
    if settings is None:
        unknown = {"token_level": _TO_TOKENS, "dropped": _DROPPED, "lower_cap": _LOWER_CAP}
        return {name: texts["unknown"] for name, texts in unknown.items()} | {"bounds": "widen them"}
    mode, bounding = "trl" if settings.by_trl else "ours", settings.bounding
    of_tokens, drops = bounding is not None and bounding.level == "token", bounding is not None and bounding.drops
    or_preset, or_set_preset = _or_preset(window)
    return {
        "token_level": "" if of_tokens else _TO_TOKENS[mode].format(or_preset=or_preset),
        "dropped": _DROPPED[mode] if drops and (of_tokens or mode == "ours") else "",
        "lower_cap": _LOWER_CAP[mode].format(or_set_preset=or_set_preset) if of_tokens else "",
        "bounds": _bounds(settings, or_preset),
    }


def _or_preset(window: Window) -> tuple[str, str]:
    """The preset that can take the place of TRL's weights, as the end of a sentence about what to set, and of another one."""
    best, fresh = _advice(window)
    preset = best.settings.get("rollout_correction", "trl")
    if preset == "trl":
        return "", ""
    where = "" if fresh is None else "for stale weights "
    return f", or {where}`rollout_correction` to {preset}", f", or {where}set `rollout_correction` to {preset}"


def _bounds(settings: Settings, or_preset: str) -> str:
    """What to set if the bounds reject too much."""
    if settings.by_trl:
        of_trl = "" if settings.bounding is None else ", or `vllm_importance_sampling_mode` to token_truncate"
        values = f"{of_trl}{or_preset}".removeprefix(", or ")
        return f"set {values}" if values else "widen them"
    drops = settings.bounding is not None and settings.bounding.drops
    own = {"rollout_rs_threshold": bool(settings.criteria), "rollout_is_threshold": drops}
    return f"widen {' or '.join(f'`{name}`' for name, acts in own.items() if acts) or 'them'}"


def _advice(window: Window) -> Advice:
    """The correction to set for the gap of a window."""
    return advise(window.settings, window.age, window.fields)


def origin(window: Window) -> str:
    """`"start"` if the gap was there from the first steps, `"old"` if the sampler says that it is stale, else `"open"`."""
    if window.course.off_at_start:
        return "start"
    return "old" if (window.get("staleness_max") or 0.0) >= 1.0 else "open"


def _rounding(window: Window, gap: float) -> str:
    """Whether rounding explains a gap of the first steps."""
    what = window.rounds_more
    if what == "few bits":
        return _FEW_BITS
    if what and gap <= ROUNDED[what]:
        return _ROUNDING
    return _SELDOM if what or gap <= LARGE else _NEVER


def fill(text: str, window: Window, **values: object) -> str:
    """A text of a rule with its numbers, and with the sentences for the state of the run in place of the names in braces."""
    came, age, gap = origin(window), window.get("staleness_max") or 0.0, window.get("k3_kl") or 0.0
    cut = window.cut
    few_cut = cut is not None and cut < CUT
    gave = _ROUNDED[window.rounds_more if window.rounds_more in _ROUNDED else ""]
    rounding = _rounding(window, gap).format(gave=gave)
    first = window.course.weight_at_start
    parts = {
        "correct": in_words(_advice(window), window.settings),
        "length": "" if window.length is None else f" of {window.length:.0f} tokens on average",
        "fell": _FELL.format(first=first) if first and first >= _NEAR_1 else _FALLS,
        "grown": _GROWN if first and first >= _NEAR_1 else "",
        **_about_weights(window),
        "broken": _about_broken(window.settings),
        "uncorrected": (_UNCORRECTED_LARGE if gap > LARGE else _UNCORRECTED)[came],
        "corrected": (_CORRECTED_HUGE if gap > HUGE else _CORRECTED)[came],
        "gave": gave,
        "diagnose": _DIAGNOSE[window.settings is not None and window.settings.rollout_diagnose],
        "cut": _CUT if cut is not None and cut >= CUT else _UNCUT,
        "corrects": _UNKNOWN if window.settings is None else "the run corrects for it",
        "close": _CLOSE[came],
        "closer": _FROM_THE_START if came == "start" else _CLOSER,
        "no_tokens": _NO_TOKENS["ended" if few_cut else "cut"],
    }
    numbers = {"age": age, "s": "" if age == 1.0 else "s", "cut": cut or 0.0, "gave": gave, "rounding": rounding}
    filled = text.format(**values, **{name: part.format(**numbers) for name, part in parts.items()})
    return " ".join(filled.split())  # a sentence that does not apply leaves a gap
