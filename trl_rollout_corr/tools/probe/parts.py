"""
The parts of a gap, which add up to the whole. It takes arrays of numpy and needs no TRL.

A chain of configurations, each of which scores the same tokens, leads from trainer to sampler, and each step changes
one thing. So the log-ratio `d` of a token is the sum of its steps, `d = sum_i d_i`, and its `k3 = exp(d) - 1 - d` is
split in proportion, `k3 * d_i / d`: the Aumann-Shapley value of the step. Noise that is unrelated to the other steps
gets the `k3` that it would cause alone; a step that others undo gets less, perhaps less than 0.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict

import numpy as np

from ..diagnosis import DumpedTokens, diagnose
from ..diagnosis.causes import BODY, CACHE, CAUSES, DROPOUT, HEAD, OPTIONS, PADDING, PUSH, QUANTISATION
from ..diagnosis.measures import FLOOR, Evidence
from ..diagnosis.observed import k3_of
from ..diagnosis.ranking import Diagnosis, Finding
from ..formats import number, percent


# Parts on which no cause acts
MICRO_BATCH, KERNELS = "micro-batch of the trainer", "other modules and kernels of vLLM"
DECODING, WHOLE = "decoding against prefill", "the whole"
# Configurations of other processes that form a step of the chain
FLOAT32, HEADS, PLAIN = "float32 on both sides", "float32 head on both sides", "no quantisation in the sampler"
EIGHT_BITS = {"quantization": QUANTISATION, "kv_cache_dtype": CACHE}  # parts by the engine's argument
_PARTS = {name: cause.parts for name, cause in CAUSES.items() if cause.parts}
# Causes that no part rules out if no argument of the engine quantises: a checkpoint may, and no other one is measured
_OF_CHECKPOINT = {name for name, parts in _PARTS.items() if parts == (QUANTISATION,)}
# A part with at most the first share of the gap is in doubt and rules its causes out. A part with the second share is
# found
SMALL, _LARGE = 0.2, 0.75
LOW = ("bfloat16", "float16")


class Side(StrEnum):
    """Model and way of scoring the tokens."""

    AS_IT_IS = "as_it_is"  # the trainer, as in the loss
    NO_DROPOUT = "no_dropout"  # the trainer without dropout, in the batches of the run
    ONE_ROW = "one_row"  # the trainer, one sequence at a time with its padding
    ALONE = "alone"  # the trainer, one sequence at a time without padding
    SAMPLER = "sampler"  # vLLM with the weights of the files, which reads the tokens as a prompt
    PUSHED = "pushed"  # vLLM with the weights that the trainer pushed
    SAMPLED = "sampled"  # vLLM, when it sampled the tokens


class ProcessFacts(TypedDict):
    """Facts that a process knows about its run."""

    observed: DumpedTokens | None  # by the process that sampled
    about: Mapping[str, str]
    options: Sequence[str]  # options of sampling that distort the log-probabilities
    engine_kwargs: Mapping[str, Any]


class Measured(NamedTuple):
    """The answer of a process."""

    logps: Mapping[Side, np.ndarray]  # of all tokens
    facts: ProcessFacts


class Part(NamedTuple):
    """A part of the gap."""

    name: str  # several parts where they were not measured one by one
    k3: float  # its share of `k3_kl`, in nats: adds up over parts
    error: float  # two standard errors of `k3`, for independent tokens
    equal: float  # share of tokens that it leaves equal bit for bit


def eight_bits(engine: Mapping[str, Any]) -> list[str]:
    """Names of the arguments of an engine that set 8 bits."""
    return [name for name in EIGHT_BITS if engine.get(name) not in (None, "auto")]


def chain_of(first: Measured, others: Mapping[str, Measured | str]) -> list[tuple[str, np.ndarray | str]]:
    """The part of each step of the chain, with the log-probabilities after it, or why there are none."""
    logps, facts = first

    def of(change: str, side: Side) -> np.ndarray | str:
        scored = others.get(change, others.get(PLAIN, first))  # a change that is missing here changes nothing
        return scored if isinstance(scored, str) else scored.logps.get(side, logps[side])

    steps: list[tuple[str, np.ndarray | str]] = [(DROPOUT, logps[Side.NO_DROPOUT])] if Side.NO_DROPOUT in logps else []
    steps += [(MICRO_BATCH, logps[Side.ONE_ROW]), (PADDING, logps[Side.ALONE])]
    steps += [(HEAD, of(HEADS, Side.ALONE)), (BODY, of(FLOAT32, Side.ALONE))]
    steps += [(KERNELS, of(FLOAT32, Side.SAMPLER)), (BODY, of(HEADS, Side.SAMPLER)), (HEAD, of(PLAIN, Side.SAMPLER))]
    if bits := [EIGHT_BITS[name] for name in eight_bits(facts["engine_kwargs"])]:
        steps.append((" and ".join(bits), logps[Side.SAMPLER]))
    return [*steps, (PUSH, logps[Side.PUSHED]), (OPTIONS if facts["options"] else DECODING, logps[Side.SAMPLED])]


def split_gap(before: np.ndarray, chain: Sequence[tuple[str, np.ndarray | str]]) -> list[Part]:
    """
    Split the gap from `before` to the end of the chain. A step without log-probabilities belongs to the next one.
    """
    known = [before, *(logps for _, logps in chain if not isinstance(logps, str))]
    finite = np.isfinite(known).all(0)
    here = before[finite].astype(np.float64)
    d = here - known[-1][finite]
    ratio = np.divide(k3_of(d), d, out=np.zeros_like(d), where=d != 0)
    steps: dict[str, np.ndarray] = {}
    names: list[str] = []
    for name, logps in chain:
        names.append(name)
        if not isinstance(logps, str):
            joint, after = " + ".join(sorted({*names})), logps[finite].astype(np.float64)
            steps[joint] = steps.get(joint, 0.0) + here - after
            here, names = after, []

    def part(name: str, share: np.ndarray, x: np.ndarray) -> Part:
        return Part(name, np.mean(share).item(), 2 * np.std(share).item() / len(x) ** 0.5, np.mean(x == 0).item())

    return [*(part(name, ratio * x, x) for name, x in steps.items()), part(WHOLE, k3_of(d), d)]


def diagnose_parts(observed: DumpedTokens, parts: Sequence[Part]) -> Diagnosis:
    """
    The diagnosis of tokens, without causes of surely small parts, and with the cause of a part that is nearly all.
    """
    *parts, whole = parts
    large = [part.name for part in parts if abs(part.k3) + part.error > SMALL * whole.k3]
    acting = {cause: [name for name in large if any(x in name for x in names)] for cause, names in _PARTS.items()}
    absent = {cause for cause, names in acting.items() if not names}
    if not any(QUANTISATION in part.name for part in parts):
        absent -= _OF_CHECKPOINT
    found = diagnose(observed, absent)
    if found.size < FLOOR or found.findings:
        return found
    for part in parts:
        for cause, names in _PARTS.items():
            if part.name == names[0] and part.k3 >= _LARGE * whole.k3:
                share, sentence = part.k3 / whole.k3, f"one change, {part.name}, makes a share of {{share}} of k3_kl"
                finding = Finding(cause, 0.99, share, Evidence(1.0, share, {"share": share}, sentence))
                return found._replace(verdict="found", findings=[finding])
    return found


def write_parts(parts: Sequence[Part], left_out: Mapping[str, str]) -> str:
    """The parts, and why changes were left out, as text for a terminal."""
    rows = [("part", "k3_kl", "+-", "share", "bit-equal")]
    for part in parts:
        share = percent(round(part.k3 / parts[-1].k3, 3)) if parts[-1].k3 else "-"
        rows.append((part.name, number(part.k3), number(part.error), share, percent(round(part.equal, 3))))
    small = [part.name for part in parts[:-1] if 0 < abs(part.k3) < max(part.error, SMALL * parts[-1].k3)]
    lines = ["", "Where the gap comes from: one change each on the way from the trainer to the sampler.", *table(rows)]
    if small:
        lines.append(f"In doubt, because larger parts hide or change a small one: {', '.join(small)}.")
    lines += [f"Left out: {change}. {reason}" for change, reason in left_out.items()]
    return "\n".join([*lines, "Not measured: an adapter (a new one adds 0), older weights, and several ranks."]) + "\n"


def changes_for(facts: ProcessFacts) -> dict[str, dict[str, Any]]:
    """Settings of the other steps of the chain, by what they change. All of them drop the run's own 8 bits."""
    own, about = facts["engine_kwargs"], facts["about"]
    plain = {name: value for name, value in own.items() if name not in eight_bits(own)}
    changes: dict[str, dict[str, Any]] = {PLAIN: {"rollout_engine_kwargs": plain}} if plain != own else {}
    low = about["trainer_dtype"] in LOW
    if low or about["sampler_dtype"] in LOW:
        whole = {"bf16": False, "fp16": False, "model_init_kwargs": {"dtype": "float32"}} if low else {}
        cast = {"cast_lm_head_to_fp32": True} if low else {}
        heads = {"hf_overrides": {**own.get("hf_overrides", {}), "head_dtype": "float32"}}
        changes[FLOAT32] = {**whole, "rollout_engine_kwargs": {**plain, "dtype": "float32"}}
        changes[HEADS] = {**cast, "rollout_engine_kwargs": {**plain, **heads}}
    return changes


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
