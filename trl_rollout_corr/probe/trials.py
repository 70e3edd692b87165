"""Settings that may make the gap smaller: trainer and sampler score the same tokens with each, and what it costs. No TRL."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..messages import number, percent
from .parts import k3, table


LOW = ("bfloat16", "float16")
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HEADS, FLOAT32, PLAIN = (
    "float32 head on both sides",
    "float32 on both sides",
    "sampler without quantisation and cache in 8 bits",
)
SERVED = "server of its own, started with --model-impl transformers"
# A gap below the first times that of the run is smaller. Of gaps within the second times the smallest, the fastest is taken
_SMALLER, _ALIKE = 0.9, 1.2


class Scored(NamedTuple):
    """The answer of a process."""

    vectors: Mapping[str, np.ndarray]  # log-probabilities by node of the chain
    facts: Mapping[str, Any]


class Trial(NamedTuple):
    """Settings that were tried."""

    change: str
    settings: Mapping[str, Any]  # of a run, besides its own
    k3: float = np.nan  # nats
    equal: float = np.nan  # share of tokens that are bit-equal
    trainer: float = np.nan  # time to score, times that of the run
    sampler: float = np.nan  # time to sample, times that of the run
    weights: float = np.nan  # bytes, of both sides
    room: float = np.nan  # tokens that the cache has room for
    reason: str = ""  # why it was left out


def is_low(about: Mapping[str, str]) -> bool:
    """True if a side computes in 16 bits."""
    return about["trainer_dtype"] in LOW or about.get("sampler_dtype") in LOW


def candidates(facts: Mapping[str, Any], *, quick: bool) -> dict[str, dict[str, Any]]:
    """Settings to try, by what they change."""
    own, about = facts["engine_kwargs"], facts["about"]
    on_cpu = facts["device"] == "cpu"

    def engine(**kwargs: Any) -> dict[str, Any]:
        return {"rollout_engine_kwargs": {**own, **kwargs}} if facts["colocated"] else {}

    low = about["trainer_dtype"] in LOW
    cast = {"cast_lm_head_to_fp32": True} if low and facts["casts"] else {}
    tried: dict[str, dict[str, Any]] = {}
    changed = [name for name in ("quantization", "kv_cache_dtype") if own.get(name, "auto") != "auto"]
    if is_low(about):
        plain = {"bf16": False, "fp16": False, "model_init_kwargs": {"dtype": "float32"}} if low else {}
        tried[FLOAT32] = {**plain, **engine(dtype="float32")}
        if cast or not low:
            tried[HEADS] = {**cast, **engine(hf_overrides={**own.get("hf_overrides", {}), "head_dtype": "float32"})}
        half = {"bf16": False, "fp16": True, "model_init_kwargs": {"dtype": "float32"}} if low else {}
        tried["float16 on both sides" if low else "sampler in float16"] = {**half, **engine(dtype="float16")}
    if changed:
        tried[PLAIN] = {"rollout_engine_kwargs": {name: value for name, value in own.items() if name not in changed}}
    if quick:
        return tried
    for name in ("eager", "sdpa"):
        if name != facts["attention"]:
            tried[f"attention of the trainer: {name}"] = {"model_init_kwargs": {"attn_implementation": name}}
    if facts["colocated"]:
        if not own.get("enforce_eager") and not on_cpu:
            tried["sampler without graphs"] = engine(enforce_eager=True)
        if "kv_cache_dtype" not in changed:
            tried["cache in 8 bits"] = engine(kv_cache_dtype="fp8")
        if "quantization" not in changed:
            tried["weights of the sampler in 8 bits"] = engine(quantization="fp8_per_channel" if on_cpu else "fp8")
        tried[SERVED] = {"vllm_mode": "server"}
    return tried


def judged(first: Scored, tried: Mapping[str, tuple[dict[str, Any], Scored | str]]) -> list[Trial]:
    """Trials, those with the smallest gap first, from settings and answers (or the reason why there is none)."""
    before, costs, about = first.vectors, first.facts["costs"], first.facts["about"]
    loaded = before.get("sampler_loaded", before["sampled"])
    # of pushes and of sampling options, which no setting here changes
    offset = before.get("sampler_pushed", loaded) - loaded
    if first.facts["options"]:
        offset = before["sampled"] - loaded

    def trial(change: str, settings: Mapping[str, Any], scored: Scored, node: str = "as_it_is") -> Trial:
        d = (
            scored.vectors.get(node, before["as_it_is"]) - scored.vectors.get("sampler_loaded", loaded) - offset
        ).astype(float)
        d, own = d[np.isfinite(d)], scored.facts["costs"]
        trainer, sampler = own.get(node, costs["as_it_is"]), own.get("sampler", costs.get("sampler", {}))
        mine = own.get("as_it_is", costs["as_it_is"])
        # computed, because vLLM may keep packed weights elsewhere
        byte = (
            1
            if "quantization" in settings.get("rollout_engine_kwargs", {})
            else _BYTES.get(scored.facts.get("about", about).get("sampler_dtype", ""), 0)
        )
        weights = mine["weights"] + mine["size"] * byte
        return Trial(
            change,
            settings,
            float(k3(d).mean()),
            float((d == 0).mean()),
            trainer["seconds"] / costs["as_it_is"]["seconds"],
            sampler["seconds"] / costs["sampler"]["seconds"] if sampler else np.nan,
            weights,
            sampler.get("room", np.nan),
        )

    size = first.facts["micro_batch"]
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": size * first.facts["accumulation"]}
    trials = [trial("nothing", {}, first)]
    trials += [trial("micro-batches of one", one, first, "one_row")] if size > 1 else []
    trials += [trial("no dropout", {"disable_dropout": True}, first, "dropout_off")] if "dropout_off" in before else []
    for change, (settings, scored) in tried.items():
        if isinstance(scored, str):
            trials.append(Trial(change, settings, reason=scored))
        else:
            trials.append(trial(change, settings, scored))
    return sorted(trials, key=lambda trial: (bool(trial.reason), trial.k3, trial.trainer))


def write_trials(trials: Sequence[Trial]) -> str:
    """The trials as text for a terminal, the last lines of which are YAML."""
    rows: list[tuple[str, ...]] = [
        ("changed", "k3_kl", "bit-equal", "trainer, time", "sampler, time", "weights, MiB", "cache, tokens")
    ]
    tried = [trial for trial in trials if not trial.reason]
    for t in tried:
        times = [f"{x:.2g} x" if np.isfinite(x) else "-" for x in (t.trainer, t.sampler)]
        room = f"{t.room:,.0f}" if np.isfinite(t.room) else "-"
        rows.append((t.change, number(t.k3), percent(t.equal), *times, f"{t.weights / 2**20:,.0f}", room))
    lines = [
        "",
        "What to set: one change each, and the same tokens, which vLLM reads as it reads a prompt.",
        *table(rows),
    ]
    lines += [f"Left out: {t.change}. {t.reason}" for t in trials if t.reason]
    now = next(t for t in tried if t.change == "nothing")
    alike = [t for t in tried if t.k3 <= _ALIKE * tried[0].k3]
    best = min(alike, key=lambda t: t.trainer * (t.sampler if np.isfinite(t.sampler) else 1.0))
    if best.k3 > _SMALLER * now.k3 or not best.settings:
        return (
            "\n".join([*lines, "No setting makes the gap smaller by more than a tenth: leave them as they are."])
            + "\n"
        )
    lines.append(f"The smallest gap, and the fastest of those within a fifth of it: {best.change}. To paste:")
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in best.settings.items())]) + "\n"
