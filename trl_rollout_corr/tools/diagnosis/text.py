"""A diagnosis as text and as JSON."""

import json
import math
import re
from collections.abc import Mapping

from ...messages import capitalized
from ...settings.resolve import Settings
from ..monitor.advice import (
    MODE,
    STALE_WEIGHTS,
    Advice,
    Correction,
    advise,
    clips_by_trl,
    preset_for_stale,
    to_leave,
    with_fresh,
)
from ..text import number, percent, yaml_lines
from .causes import Cause
from .effects import EFFECTS
from .evidence import FLOOR, LARGE
from .ranking import WITHOUT_RATIO, Diagnosis, Finding


FEW = 1000  # tokens below which a gap without a cause says little


def headline(diagnosis: Diagnosis) -> str:
    """The answer in one line."""
    if diagnosis.verdict == "nothing":
        return "Nothing to correct"
    if diagnosis.verdict == "small":
        few = " on too few tokens to say more" if diagnosis.n_tokens < FEW else ", and matches no known cause"
        return f"Healthy: the gap is as small as rounding{few}"
    if diagnosis.verdict == "unknown":
        return "Unknown: there is a gap that matches no known cause"
    first = diagnosis.findings[0]
    if diagnosis.expected:
        oldest = first.evidence.numbers.get("oldest")
        title = f"the sampler is up to {oldest:.0f} optimizer steps old" if oldest else first.cause.title
        return f"Expected: {title}, and the run corrects for it"
    kind = "Normal" if diagnosis.healthy else "Possible" if sure(first) == "possible" else "Found"
    return f"{kind}: {first.cause.title}"


def detail(diagnosis: Diagnosis) -> str:
    """The size of the gap, and the number of tokens that it was measured on."""
    parts = [
        f"The root mean square of d is {number(diagnosis.size)} nats, k3_kl {number(diagnosis.k3)}, "
        f"over {diagnosis.n_tokens:,} tokens of {diagnosis.n_sequences:,} completions."
    ]
    if diagnosis.floor is not None:
        parts.append(f"This is {number(diagnosis.floor)} times the trainer's difference from itself.")
    if diagnosis.coarser:
        parts.append(
            f"The trainer computes in float32 and the sampler in {diagnosis.coarser}: up to {LARGE:g} nats can be rounding."
        )
    parts += diagnosis.where
    if diagnosis.verdict == "nothing":
        parts.append(
            f"Below {FLOOR:g} nats, token weights change nothing. Weights of whole completions add up d over all tokens, and "
            "may still change the step: look at `effective_lr`."
        )
    if diagnosis.healthy:
        parts.append(_unseen(diagnosis))
    if diagnosis.verdict == "unknown":
        diagnoses = diagnosis.settings is not None and diagnosis.settings.rollout_diagnose
        more = "" if diagnoses else ", and set `rollout_diagnose: true` for more evidence"
        parts.append(f"See `trl-rollout-corr docs run#diagnose` for tests that need a model{more}.")
    return " ".join(parts)


def _unseen(diagnosis: Diagnosis) -> str:
    """A sentence on what a small gap does not prove, and on what was looked at beside it."""
    if diagnosis.surprise is None:
        return (
            "A small gap does not prove that the tokens were drawn from these values: the trainer's entropy, with which the "
            "mean of -log p could be compared, is not known here."
        )
    of_tokens, entropy, _ = diagnosis.surprise
    return (
        f"The mean of -log p of the tokens is {number(of_tokens)} nats, beside an entropy of {number(entropy)}, as for tokens "
        "that were drawn from these values."
    )


def evidence(finding: Finding) -> str:
    """The evidence in a sentence, with its numbers."""
    facts = finding.evidence
    return re.sub(r"\{(\w+)\}", lambda match: number(facts.numbers[match[1]]), facts.sentence) + facts.words


def sure(finding: Finding) -> str:
    """The certainty in one word."""
    return "certain" if finding.certainty > 0.9 else "likely" if finding.certainty > 0.7 else "possible"


def explains(finding: Finding) -> str:
    """The share that a cause explains, as the end of a sentence."""
    if finding.name in WITHOUT_RATIO:
        return "explains nothing of d^2, because these tokens have no d"
    if finding.name == "frozen_base":
        return "explains nothing of d^2, because trainer and sampler share it"
    if finding.name in EFFECTS:
        return "explains nothing of d^2, because it is what the run does with the gap"
    return f"explains {percent(round(finding.share, 2))} of d^2"


def remedy_for(diagnosis: Diagnosis, finding: Finding) -> tuple[str, dict[str, object]]:
    """
    The remedy of a cause in its run: sentences, and the settings to paste, without the ones in
    effect. The settings remove the cause and correct for the rest of the gap.
    """
    cause, settings, advice = finding.cause, diagnosis.settings, _advice(diagnosis)
    rejecting = cause.correction == "rejecting"
    removal, missing = _removal(cause, settings, diagnosis.fields)
    if MODE in missing:
        removal, missing = _unless_stale(diagnosis, removal, missing)
    sentences = [removal, *([_UNMEASURED] if rejecting and _only_weighs(advice, diagnosis) else [])]
    corrected = bool(cause.correction) and (_corrects(diagnosis, rejecting=rejecting) or not advice.best.settings)
    if not corrected:
        rest, correction = _for_the_rest(advice if cause.correction else _NO_ADVICE, settings, missing)
        return " ".join([*sentences, *rest]), {**missing, **correction}
    if diagnosis.healthy and not cause.normal:
        smaller = " ".join(sentences)
        return (
            f"Nothing, because the run corrects for it already. To make the gap smaller: {smaller[:1].lower()}{smaller[1:]}",
            missing,
        )
    sentences += ["The run corrects for the rest already.", to_leave(advice, settings)]
    return " ".join(filter(None, sentences)), missing


def _removal(cause: Cause, settings: Settings | None, run: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Sentences on how a run removes a cause, and the settings that it lacks for that."""
    missing = {name: value for name, value in cause.settings.items() if not _in_effect(value, run.get(name, ...))}
    missing, elsewhere = _possible(missing, settings, run)
    names_it = any(f"`{name}: " in cause.remedy and f"no `{name}`" in " ".join(elsewhere) for name in cause.settings)
    text = " ".join([*elsewhere, cause.otherwise] if names_it else [cause.remedy, *elsewhere])
    if cause.otherwise and not missing and not elsewhere:
        done = ", ".join(f"`{line}`" for line in yaml_lines(cause.settings).splitlines())
        text = f"The run uses this already: {done}. {cause.otherwise}"
    return text, missing


def _unless_stale(diagnosis: Diagnosis, removal: str, missing: dict[str, object]) -> tuple[str, dict[str, object]]:
    """A remedy that sets a mode of TRL's correction. If the weights that sampled are stale, a preset is set instead."""
    advice = _advice(diagnosis)
    preset = preset_for_stale(diagnosis.settings, diagnosis.fields)
    if advice.best.settings.get("rollout_correction") != preset:
        return removal, missing
    removal = f"{removal} With {STALE_WEIGHTS}, set `rollout_correction` to {preset} instead."
    is_known = diagnosis.age is not None and advice.fresh is None
    return removal, {"rollout_correction": preset} if is_known else missing


def _for_the_rest(
    advice: Advice, settings: Settings | None, missing: Mapping[str, object]
) -> tuple[list[str], Mapping[str, object]]:
    """Sentences on the correction for the gap that is left, and its settings."""
    beside = advice.best.remove
    if "rollout_correction" in missing and settings is not None:
        beside = settings.beside
    sentences = []
    if beside:
        names = ", ".join(f"`{name}`" for name in beside)
        sentences.append(f"Remove {names}, which would keep acting on top of the preset.")
    if advice.fresh is not None:
        sentences.append(f"The preset is for {STALE_WEIGHTS}; {with_fresh(advice.fresh, settings)}.")
    return sentences, advice.best.settings


_NO_ADVICE = Advice(Correction({}))
_UNMEASURED = (
    "Weights of tokens limit such a token, and do not reject it. We have not trained with such tokens and fresh weights, so "
    "it is open which of the two is better."
)


def _only_weighs(advice: Advice, diagnosis: Diagnosis) -> bool:
    """True if the correction for fresh weights, advised or in effect, rejects no token."""
    if _corrects(diagnosis, rejecting=True):
        return False
    advised = advice.best.settings.get("rollout_correction", "trl")
    return advice.fresh is not None or advised in ("trl", "decoupled_token_is")


# Settings that `rollout_correction: trl` refuses, and the setting of TRL with the same effect
OF_TRL = {"rollout_is": {"vllm_importance_sampling_mode": "token_truncate"}}
_OF_ENGINE = ("rollout_engine_kwargs", "rollout_routing")


def _possible(
    settings: Mapping[str, object], in_effect: Settings | None, run: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Settings that are possible in a run and its mode, and sentences about the others."""
    if in_effect is not None and in_effect.by_trl:
        settings = {name: x for ours in settings for name, x in OF_TRL.get(ours, {ours: settings[ours]}).items()}
    written = "given" in run  # by a trainer, with its fields of TRL
    lacking = [name for name in settings if written and not name.startswith("rollout_") and name not in run]
    if lacking:
        return {}, [f"This trainer has no `{name}`." for name in lacking]
    remote = written and (run.get("use_vllm") is False or run.get("vllm_mode") != "colocate")
    elsewhere = {name: value for name, value in settings.items() if remote and name in _OF_ENGINE}
    return {name: x for name, x in settings.items() if name not in elsewhere}, [*map(_elsewhere, elsewhere.items())]


def _elsewhere(setting: tuple[str, object]) -> str:
    """Advice instead of a setting that acts only on a vLLM in the training process."""
    name, value = setting
    if not isinstance(value, Mapping):
        return f"For `{name}`, vLLM must run in the training process."
    options = (
        f"--{key.replace('_', '-')} {json.dumps(x) if isinstance(x, Mapping) else x}" for key, x in value.items()
    )
    return f"vLLM does not run in the training process, so start it with {', '.join(f'`{x}`' for x in options)}."


def _advice(diagnosis: Diagnosis) -> Advice:
    """
    The correction for the rest of the gap. If old weights were found, the announced age is wrong.
    """
    stale = any(finding.name == "stale" for finding in diagnosis.findings)
    return advise(diagnosis.settings, math.inf if stale else diagnosis.age, diagnosis.fields)


# Values of settings that a mapping omits
_DEFAULTS = {"frequency_penalty": 0.0, "kv_cache_dtype": "auto", "presence_penalty": 0.0}


def _in_effect(value: object, run: object) -> bool:
    """
    True if the run already uses the advised value. An unknown value (`...`) counts as another one.
    """
    if isinstance(value, Mapping):
        settings = run if isinstance(run, Mapping) else {}
        return run is not ... and all(_in_effect(x, settings.get(k, _DEFAULTS.get(k, ...))) for k, x in value.items())
    return run is not ... and (run == value or not (run or value))  # 0, None and False all mean off


def _corrects(diagnosis: Diagnosis, *, rejecting: bool) -> bool:
    """True if a run corrects, and with `rejecting` also removes single tokens from the gradient."""
    settings = diagnosis.settings
    if clips_by_trl(settings, diagnosis.fields):
        return True
    if settings is None or not settings.corrects:
        return False
    bounded = settings.bounding is not None and settings.bounding.lower is not None
    return bool(settings.criteria) or bounded or settings.clips_around_sampler or not rejecting


def write_text(diagnosis: Diagnosis, *, remedies: bool = True) -> str:
    """
    The diagnosis as text for a terminal. Without `remedies`, the caller gives the only answer.
    """
    lines = [f"{headline(diagnosis)}.", detail(diagnosis)]
    for place, finding in enumerate(diagnosis.findings, 1):
        cause, (remedy, settings) = finding.cause, remedy_for(diagnosis, finding)
        lines += [
            "",
            f"{place}. {capitalized(cause.title)} ({finding.name})",
            f"   {sure(finding)} ({percent(round(finding.certainty, 2))}), {explains(finding)}",
            f"   Evidence: {evidence(finding)}.",
        ]
        if remedies:
            to_paste = {} if diagnosis.healthy else settings  # what is normal needs no setting
            lines += [f"   What to do: {remedy}", *(f"     {line}" for line in yaml_lines(to_paste).splitlines())]
    return "\n".join(lines) + "\n"


def write_json(diagnosis: Diagnosis, more: Mapping[str, object] | None = None) -> str:
    """The diagnosis as JSON, with `more` keys."""
    document: Mapping[str, object] = {
        "verdict": diagnosis.verdict,
        "healthy": diagnosis.healthy,
        "rms_log_ratio": diagnosis.size,
        "k3_kl": diagnosis.k3,
        "multiple_of_noise_floor": diagnosis.floor,
        "tokens": diagnosis.n_tokens,
        "sequences": diagnosis.n_sequences,
        "where": list(diagnosis.where),
        "causes": [
            {
                "cause": finding.name,
                "title": finding.cause.title,
                "certainty": round(finding.certainty, 3),
                "share_of_squared_log_ratio": round(finding.share, 4),
                "evidence": dict(finding.evidence.numbers),
                "remedy": remedy,
                "settings": settings,
                "preset": _advice(diagnosis).best.settings.get("rollout_correction")
                if finding.cause.correction
                else None,
            }
            for finding in diagnosis.findings
            for remedy, settings in [remedy_for(diagnosis, finding)]
        ],
        **(more or {}),
    }
    return json.dumps(document, indent=2) + "\n"
