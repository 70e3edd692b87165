"""Sentences of rules: those that several rules share, and those that depend on how the gap arose."""

from ...settings.resolve import Settings
from .windows import Window


# The preset to set for a gap, by mode: one without bounds that must be fitted to the run
ADVISED = {"decoupled": "auto", "ppo_clip": "bypass_ppo_clip", "reinforce": "bypass_pg_token_icepop"}

FRESHER = (
    "Push weights to the sampler more often (lower `steps_per_generation` or `num_iterations`, in asynchronous training "
    "`weight_sync_steps` or `max_staleness`)"
)
TOKEN_LEVEL = "If `rollout_is` is turn or sequence, set it to token."
LOWER_CAP = "Otherwise lower `rollout_is_threshold` if it is above 1; a higher bound never helps."
WIDEN = (
    "If as many tokens were rejected at the start of the run, widen `rollout_rs_threshold` (`trl-rollout-corr compare` names "
    "bounds that fit). If the share grew together with `k3_kl`, leave the bounds as they are."
)
MOMENTUM = "If it lasts, the run learns nothing: only momentum and weight decay still change the weights."

_LOW_PRECISION = "an 8-bit KV cache gave up to 0.05"
_PRECISION = f"Rounding gives about 0.001, and a sampler in low precision gives more: {_LOW_PRECISION}."
_HARMLESS = "Not every run is harmed by a gap of this size."
_EXPLAINED = "The sampler is {age:.0f} step{s} old, which explains it unless the gap came suddenly."
_CLOSER = f"To make the gap smaller, {FRESHER[:1].lower()}{FRESHER[1:]}, or lower `learning_rate`."
_FROM_THE_START = (
    "The gap was there from the first step, so look for what the two sides compute differently: dropout in the trainer (also "
    "`lora_dropout`), low precision in the sampler, or log-probabilities that are not those of the sampled tokens."
)

# By the origin of the gap: why it matters without a correction, and with one, and what to do about it
_UNCORRECTED = {
    "old": f"{_HARMLESS} {_EXPLAINED} Training on such completions is biased, and the gap tends to grow.",
    "start": f"{_HARMLESS} {_PRECISION} Otherwise something is broken, and training on such completions is biased.",
    "open": f"{_HARMLESS} {_PRECISION} Otherwise the weights differ or something is broken, training on such completions "
    "is biased, and the gap tends to grow.",
}
_CORRECTED = {
    "old": f"This may be harmless, because such a gap often shrinks later. {_EXPLAINED} If it stays, a critical alarm "
    "follows.",
    "start": f"This may be harmless if the sampler has a low precision: {_LOW_PRECISION}. Otherwise something is broken, and "
    "a correction only limits the damage.",
    "open": "This may be harmless: with a stale sampler the gap grows at first and shrinks later. If it stays, a critical "
    "alarm follows.",
}
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


def preset_for(settings: Settings | None) -> str:
    """Name of the preset to set for a gap, in the mode of the run."""
    return ADVISED["decoupled" if settings is None else settings.mode]


def origin(window: Window) -> str:
    """`"start"` if the gap was there from the first steps, `"old"` if the sampler says that it is stale, else `"open"`."""
    if window.course.off_at_start:
        return "start"
    return "old" if (window.get("staleness_max") or 0.0) >= 1.0 else "open"


def fill(text: str, window: Window, **values: object) -> str:
    """A text of a rule with its numbers, and with the sentences for the state of the run in place of the names in braces."""
    came, age = origin(window), window.get("staleness_max") or 0.0
    cut = window.metrics.get("completions/clipped_ratio")
    few_cut = isinstance(cut, int | float) and cut < 0.5
    parts = {
        "preset": preset_for(window.settings),
        "uncorrected": _UNCORRECTED[came],
        "corrected": _CORRECTED[came],
        "corrects": _UNKNOWN if window.settings is None else "the run corrects for it",
        "close": _CLOSE[came],
        "closer": _FROM_THE_START if came == "start" else _CLOSER,
        "no_tokens": _NO_TOKENS["ended" if few_cut else "cut"],
    }
    numbers = {"age": age, "s": "" if age == 1.0 else "s"}
    return text.format(**values, **{name: part.format(**numbers) for name, part in parts.items()})
