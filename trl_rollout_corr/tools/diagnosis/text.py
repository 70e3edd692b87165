"""A diagnosis as text and as JSON."""

import json
import re
from collections.abc import Mapping
from shlex import quote
from typing import Any

from ...messages import capitalized, uncapitalized
from ..decision import as_document, in_words
from ..formats import number, percent, yaml_lines
from ..run_facts import done_about_gap
from .causes import Cause
from .measures import FLOOR, LARGE
from .ranking import Diagnosis, Finding


FEW = 1000  # tokens below which a gap without a cause says little


def headline(diagnosis: Diagnosis) -> str:
    """The answer in one line."""
    if diagnosis.verdict == "nothing":
        if diagnosis.decision.set:
            return (
                "Unhealthy run: this dump has no gap to correct, but an alarm or a lost gradient asks for a correction"
            )
        return "Healthy: the gap is too small to correct"
    if diagnosis.verdict == "small":
        if diagnosis.decision.set:
            return (
                "Unhealthy run: the gap is as small as rounding, but an alarm or a lost gradient asks for a correction"
            )
        few = " on too few tokens to say more" if diagnosis.n_tokens < FEW else ", and matches no known cause"
        return f"Healthy: the gap is as small as rounding{few}"
    if diagnosis.verdict == "unknown":
        return "Unknown: there is a gap that matches no known cause"
    first = diagnosis.findings[0]
    if diagnosis.expected:
        oldest = first.evidence.numbers.get("oldest")
        title = f"the sampler is up to {oldest:.0f} optimizer steps old" if oldest else first.cause.title
        return f"Expected: {title}, and {_done_about_it(diagnosis)}"
    kind = "Healthy" if diagnosis.healthy else "Possible" if sure(first) == "possible" else "Found"
    return f"{kind}: {first.cause.title}"


def _as_k3(size: float) -> str:
    """A root mean square of the log-ratio as the `k3_kl` of a small gap: the only measure of a gap that texts name."""
    return number(size**2 / 2)


def _done_about_it(diagnosis: Diagnosis) -> str:
    if not diagnosis.corrects:
        return "the gap is small"
    return done_about_gap(diagnosis.settings, is_fresh=diagnosis.fresh)


def detail(diagnosis: Diagnosis) -> str:
    """The size of the gap, and the number of tokens that it was measured on."""
    parts = [
        f"k3_kl is {number(diagnosis.k3)} over {diagnosis.n_tokens:,} tokens of {diagnosis.n_sequences:,} "
        "completions.",
        "Here, d is the log-ratio of a token, trainer over sampler.",
    ]
    if diagnosis.floor is not None:
        parts.append(f"Typically, d is {number(diagnosis.floor)} times the trainer's difference from itself.")
    if diagnosis.coarser:
        parts.append(
            f"The trainer computes in float32 and the sampler in {diagnosis.coarser}: below a k3_kl "
            f"of {_as_k3(LARGE)}, rounding alone may explain the gap."
        )
    parts += diagnosis.where
    if diagnosis.verdict == "nothing":
        parts.append(
            f"Below a k3_kl of {_as_k3(FLOOR)}, token weights change nothing. Weights of whole completions add up d "
            "over all tokens, and may still change the step: look at `effective_lr`."
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
            "A small gap does not prove that the tokens were drawn from these values: the trainer's entropy, with "
            "which the mean of -log p could be compared, is not known here."
        )
    of_tokens, entropy, _ = diagnosis.surprise
    return (
        f"The mean of -log p of the tokens, {number(of_tokens)} nats, is close to the logged entropy, "
        f"{number(entropy)}, as it is if tokens are drawn with the reported probabilities."
    )


def evidence_in_words(finding: Finding) -> str:
    """The evidence in a sentence, with its numbers."""
    facts = finding.evidence
    return re.sub(r"\{(\w+)\}", lambda match: number(facts.numbers[match[1]]), facts.sentence) + facts.words


def sure(finding: Finding) -> str:
    """
    The certainty in one word, of which a benchmark counts how often it is right (`benchmarks/diagnose/README.md`).
    Nobody counted that for the number, so no text shows it.
    """
    return "certain" if finding.certainty > 0.9 else "likely" if finding.certainty > 0.7 else "possible"


def explains(finding: Finding) -> str:
    """The share that a cause explains, as the end of a sentence."""
    if finding.cause.no_share:
        return f"explains nothing of the gap (d^2), because {finding.cause.no_share}"
    return f"explains {percent(round(finding.share, 2))} of the gap (d^2)"


def remedy_for(diagnosis: Diagnosis, finding: Finding) -> tuple[str, dict[str, object]]:
    """
    What removes a cause in its run: sentences, and the settings to paste, without the ones in effect. A healthy run
    has none to paste.
    """
    cause, run, about = finding.cause, diagnosis.fields, diagnosis.about
    if cause.on_quantised and about.get("trainer_quantization", "none") != "none":
        return cause.on_quantised, {}
    if (base := about.get("base_dtype")) and "model_init_kwargs" in run:  # TRL's default may be float32
        of_model: Any = run["model_init_kwargs"] or {}
        run = {**run, "model_init_kwargs": {**of_model, "dtype": base}}
    lacking = {name: value for name, value in cause.advised.items() if not _in_effect(value, run.get(name, ...))}
    refused, reasons = _refused(lacking, run, about)
    accepted = {name: value for name, value in lacking.items() if name not in refused}
    if refused and not accepted and cause.if_impossible:
        return " ".join([*reasons, cause.if_impossible]), {}
    possible, others = _possible(accepted, run, about)
    to_paste = {name: _merged_with_run(value, run.get(name)) for name, value in possible.items()}
    text = _remedy(cause, [*reasons, *others], has_all=not to_paste)
    if diagnosis.expected and not cause.normal:
        text = f"Nothing has to be done. To make the gap smaller: {uncapitalized(text)}"
    return text, {} if diagnosis.healthy else to_paste


def _remedy(cause: Cause, reasons: list[str], *, has_all: bool) -> str:
    """
    The remedy of a cause, with the reasons why some of its settings are impossible in a run. A run that `has_all`
    others gets the other remedy.
    """
    if cause.otherwise and has_all and not reasons:
        done = ", ".join(f"`{line}`" for line in yaml_lines(cause.advised).splitlines())
        return f"The run uses this already: {done}. {cause.otherwise}"
    refuted = any(f"`{name}: " in cause.remedy and f"no `{name}`" in " ".join(reasons) for name in cause.advised)
    return " ".join([*reasons, cause.otherwise] if refuted else [cause.remedy, *reasons])


def _merged_with_run(value: object, run: object) -> object:
    """An advised value to paste: a mapping keeps what the run has in its own."""
    if not isinstance(value, Mapping) or not isinstance(run, Mapping):
        return value
    return {**run, **{name: _merged_with_run(x, run.get(name)) for name, x in value.items()}}


_OF_ENGINE = ("rollout_engine_kwargs", "rollout_routing")


_OF_HEAD = "cast_lm_head_to_fp32"
# By what TRL finds of a head: why it cannot compute in float32
_HEADS = {
    "adapted": "TRL refuses `cast_lm_head_to_fp32` with an adapter on the head.",
    "tied": "TRL fails with `cast_lm_head_to_fp32` here, because it does not find the embedding that the head is tied "
    "to.",
    "unknown": "TRL fails with `cast_lm_head_to_fp32` here, because the model has no `lm_head`.",
}
_GIVEN = "The trainer got this model and not its name, so load it with {options}: `model_init_kwargs` has no effect."


def _refused(
    advised: Mapping[str, object], run: Mapping[str, object], about: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Settings that the trainer of a run cannot have, and sentences why."""
    written = "given" in run  # by a trainer, with its fields of TRL
    lacking = [name for name in advised if written and not name.startswith("rollout_") and name not in run]
    refused, reasons = {*lacking}, [f"This trainer has no `{name}`." for name in lacking]
    head, of_model = about.get("head", ""), advised.get("model_init_kwargs")
    if _OF_HEAD in advised and _OF_HEAD not in refused and head in _HEADS:
        refused.add(_OF_HEAD)
        reasons.append(_HEADS[head])
    if _OF_HEAD in refused:
        refused |= advised.keys()  # in the sampler alone, a head in float32 makes no gap smaller
    if isinstance(of_model, Mapping) and about.get("loaded_by") == "user":
        refused.add("model_init_kwargs")
        options = " and ".join(f"`{name}={value}`" for name, value in of_model.items())
        reasons.append(_GIVEN.format(options=options))
    if "top_p" in advised and run.get("rollout_support"):
        refused |= advised.keys()
        reasons.append("The trainer takes over the tokens that the run's own truncation keeps (`rollout_support`).")
    return refused, reasons


def _possible(
    advised: Mapping[str, object], run: Mapping[str, object], about: Mapping[str, str]
) -> tuple[dict[str, object], list[str]]:
    """Settings that are possible in a run, and sentences about the others."""
    written = "given" in run
    remote = written and (run.get("use_vllm") is False or run.get("vllm_mode") != "colocate")
    if "rollout_routing" in advised and (reason := _why_no_replay(run, about, remote=remote)):
        # without replay, nothing reads the experts that vLLM would return
        return {name: x for name, x in advised.items() if name not in _OF_ENGINE}, [reason]
    elsewhere = {name: value for name, value in advised.items() if remote and name in _OF_ENGINE}
    return {name: x for name, x in advised.items() if name not in elsewhere}, [*map(_elsewhere, elsewhere.items())]


def _why_no_replay(run: Mapping[str, object], about: Mapping[str, str], *, remote: bool) -> str:
    """Why a run cannot replay the sampler's experts; empty if it can."""
    parallel = run.get("vllm_tensor_parallel_size")
    if remote:
        return _elsewhere(("rollout_routing", "replay"))
    if isinstance(parallel, int) and parallel > 1:
        return "For `rollout_routing`, vLLM must run without tensor parallelism."
    if about.get("routers") == "unknown":
        return "For `rollout_routing`, the trainer must know how the model's routers work, which it does not."
    return ""


def _elsewhere(setting: tuple[str, object]) -> str:
    """Advice instead of a setting that acts only on a vLLM in the training process."""
    name, value = setting
    if not isinstance(value, Mapping):
        return f"For `{name}`, vLLM must run in the training process."
    options = (
        f"--{key.replace('_', '-')} {quote(json.dumps(x)) if isinstance(x, Mapping) else x}"
        for key, x in value.items()
    )
    return f"vLLM does not run in the training process, so start it with {', '.join(f'`{x}`' for x in options)}."


# Values of settings that a mapping omits
_DEFAULTS = {"frequency_penalty": 0.0, "kv_cache_dtype": "auto", "presence_penalty": 0.0}


def _in_effect(value: object, run: object) -> bool:
    """True if the run already uses the advised value. An unknown value (`...`) counts as another one."""
    if isinstance(value, Mapping):
        of_run = run if isinstance(run, Mapping) else {}
        return run is not ... and all(_in_effect(x, of_run.get(k, _DEFAULTS.get(k, ...))) for k, x in value.items())
    return run is not ... and (run == value or not (run or value))  # 0, None and False all mean off


def write_text(diagnosis: Diagnosis) -> str:
    """The diagnosis as text for a terminal."""
    lines = [f"{headline(diagnosis)}.", detail(diagnosis)]
    for place, finding in enumerate(diagnosis.findings, 1):
        cause, (remedy, advised) = finding.cause, remedy_for(diagnosis, finding)
        lines += [
            "",
            f"{place}. {capitalized(cause.title)} ({finding.name})",
            f"   {sure(finding)}, {explains(finding)}",
            f"   Evidence: {evidence_in_words(finding)}.",
            f"   What to do: {remedy}",
            *(f"     {line}" for line in yaml_lines(advised).splitlines()),
        ]
    decision = diagnosis.decision
    lines += ["", f"Correction: {in_words(decision)}"]
    return "\n".join([*lines, *(f"  {line}" for line in yaml_lines(decision.set).splitlines())]) + "\n"


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
                "certainty": sure(finding),
                "score": round(finding.certainty, 3),
                "share_of_squared_log_ratio": round(finding.share, 4),
                "evidence": dict(finding.evidence.numbers),
                "remedy": remedy,
                "settings": advised,
            }
            for finding in diagnosis.findings
            for remedy, advised in [remedy_for(diagnosis, finding)]
        ],
        "correction": as_document(diagnosis.decision),
        **(more or {}),
    }
    return json.dumps(document, indent=2) + "\n"
