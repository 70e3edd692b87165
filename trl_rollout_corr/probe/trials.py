"""Settings that may make the gap smaller: trainer and sampler score the same tokens with each, and what it costs. No TRL."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..diagnosis.evidence import FLOOR
from ..messages import number, percent, yaml_lines
from .parts import FLOAT32, HEADS, PLAIN, Scored, eight_bits, k3, table


LOW = ("bfloat16", "float16")
_ALIKE = 1.2  # times the smallest gap, up to which the fastest setting is taken


class Trial(NamedTuple):
    """Settings that were tried."""

    change: str
    settings: Mapping[str, Any]  # of a run, besides its own
    k3: float = np.nan  # nats
    equal: float = np.nan  # share of tokens that are bit-equal
    trainer: float = np.nan  # time to score, times that of the run
    sampler: float = np.nan  # time to sample, times that of the run
    weights: float = np.nan  # bytes, of both sides
    reason: str = ""  # why it was left out


def candidates(facts: Mapping[str, Any], *, quick: bool) -> dict[str, dict[str, Any] | str]:
    """Settings to try, by what they change, or why they cannot be tried. All but the first are without 8 bits."""
    if facts["unsplit"]:
        return {"settings of the sampler": facts["unsplit"]}
    own, about, on_cpu = facts["engine_kwargs"], facts["about"], facts["device"] == "cpu"
    plain = {name: value for name, value in own.items() if name not in eight_bits(own)}

    def engine(**kwargs: Any) -> dict[str, Any]:
        return {"rollout_engine_kwargs": {**plain, **kwargs}}

    low = about["trainer_dtype"] in LOW
    tried: dict[str, dict[str, Any] | str] = {PLAIN: engine()} if plain != own else {}
    if low or about["sampler_dtype"] in LOW:
        whole = {"bf16": False, "fp16": False, "model_init_kwargs": {"dtype": "float32"}} if low else {}
        half = {**whole, "fp16": True} if low else {}
        cast = {"cast_lm_head_to_fp32": True} if low else {}
        tried[FLOAT32] = {**whole, **engine(dtype="float32")}
        tried["float16 on both sides" if low else "sampler in float16"] = {**half, **engine(dtype="float16")}
        tried[HEADS] = {**cast, **engine(hf_overrides={**own.get("hf_overrides", {}), "head_dtype": "float32"})}
        if cast and not facts["casts"]:
            tried[HEADS] = "The trainer has no `cast_lm_head_to_fp32`. One side alone makes the gap larger."
    if quick:
        return tried
    for name in ("eager", "sdpa"):
        if name != facts["attention"]:
            tried[f"attention of the trainer: {name}"] = {"model_init_kwargs": {"attn_implementation": name}}
    if not own.get("enforce_eager") and not on_cpu:
        tried["sampler without graphs"] = engine(enforce_eager=True)
    if plain == own:
        tried["cache in 8 bits"] = engine(kv_cache_dtype="fp8")
        tried["weights of the sampler in 8 bits"] = engine(quantization="fp8_per_channel" if on_cpu else "fp8")
    return tried


def judged(first: Scored, settings: Mapping[str, Any], tried: Mapping[str, Scored | str]) -> list[Trial]:
    """Trials from settings and answers (or the reason why there is none), those with the smallest gap first."""
    costs = {"sampler": np.nan, **first.facts["costs"]}

    def trial(change: str, fields: Mapping[str, Any], scored: Scored, node: str = "as_it_is") -> Trial:
        sampler = scored.logps.get("sampler", first.logps["sampled"])
        d = (scored.logps.get(node, first.logps[node]) - sampler).astype(np.float64)
        d, own = d[np.isfinite(d)], {**costs, **scored.facts["costs"]}
        times = own[node] / costs["as_it_is"], own["sampler"] / costs["sampler"]
        return Trial(change, fields, float(k3(d).mean()), float((d == 0).mean()), *times, own["weights"])

    trials = [trial("nothing", {}, first)]
    if "no_dropout" in first.logps:
        trials.append(trial("no dropout", {"disable_dropout": True}, first, "no_dropout"))
    for change, scored in tried.items():
        if isinstance(scored, str):
            trials.append(Trial(change, {}, reason=scored))
        else:
            trials.append(trial(change, settings[change], scored))
    return sorted(trials, key=lambda trial: (bool(trial.reason), trial.k3, trial.trainer))


def write_trials(trials: Sequence[Trial]) -> str:
    """The trials as text for a terminal, the last lines of which are YAML."""
    rows: list[tuple[str, ...]] = [("changed", "k3_kl", "bit-equal", "trainer, time", "sampler, time", "weights, MiB")]
    tried = [trial for trial in trials if not trial.reason]
    for t in tried:
        times = [f"{x:.2g} x" if np.isfinite(x) else "-" for x in (t.trainer, t.sampler)]
        rows.append((t.change, number(t.k3), percent(round(t.equal, 3)), *times, f"{t.weights / 2**20:,.0f}"))
    lines = ["", "What to set: one change each. vLLM reads the same tokens as it reads a prompt.", *table(rows)]
    lines += [f"Left out: {t.change}. {t.reason}" for t in trials if t.reason]
    enough = max(_ALIKE * tried[0].k3, FLOOR**2 / 2)
    small = [t for t in tried if t.k3 <= enough]
    if any(t.change == "nothing" for t in small):
        return "\n".join([*lines, "No setting makes the gap much smaller: leave them as they are."]) + "\n"
    best = min(small, key=lambda t: t.trainer * np.nan_to_num(t.sampler, nan=1.0))
    lines.append(f"The fastest of those with a k3_kl up to {number(enough)}: {best.change}. To paste:")
    return "\n".join([*lines, yaml_lines(best.settings)])
