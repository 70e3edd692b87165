"""
The parts of a gap, which add up to the whole. Arrays of numpy in, no TRL.

Between trainer and sampler stands a chain of configurations that score the same tokens, and each step changes one thing. So
the log-ratio `d` of a token is the sum of its steps, `d = sum_i d_i`, and its `k3 = exp(d) - 1 - d` is split in proportion,
`k3 * d_i / d`: the Aumann-Shapley value of the step. Noise that is unrelated to the other steps gets the `k3` that it has
alone; a step that others undo gets less, and may get less than 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..diagnosis import DumpedTokens, diagnose
from ..diagnosis.evidence import FLOOR, Evidence
from ..diagnosis.ranking import Diagnosis, Finding
from ..messages import number, percent


MICRO_BATCH, PADDING, DROPOUT = "micro-batch of the trainer", "padding", "dropout"
HEAD, BODY, KERNELS = "precision of the head", "precision of the body", "other modules and kernels of vLLM"
QUANTISATION, CACHE, PUSH = "quantisation", "key-value cache", "weights that were pushed"
DECODING, OPTIONS = "decoding against prefill", "sampling options and decoding"
SAMPLER, WHOLE = "the sampler as a whole", "the whole"
# Configurations of other processes that are a step of the chain, and settings to try
FLOAT32, HEADS, PLAIN = "float32 on both sides", "float32 head on both sides", "no 8 bits in the sampler"
EIGHT_BITS = {"quantization": QUANTISATION, "kv_cache_dtype": CACHE}  # parts by arguments of the engine
# Parts that causes of `diagnosis` act on
_PARTS = {
    "padding": (PADDING,),
    "dropout": (DROPOUT,),
    "head": (HEAD, SAMPLER),
    "rounding": (BODY, SAMPLER),
    "kv_cache": (CACHE, SAMPLER),
    "weights": (QUANTISATION, PUSH, SAMPLER),
    "truncation": (OPTIONS, SAMPLER),
    "penalty": (OPTIONS, SAMPLER),
}
# Share of the gap up to which a part rules its causes out, and from which on it is found
_SMALL, _LARGE = 0.2, 0.75


class Scored(NamedTuple):
    """The answer of a process."""

    logps: Mapping[str, np.ndarray]  # of all tokens, by configuration of trainer or sampler
    facts: Mapping[str, Any]


class Part(NamedTuple):
    """A part of the gap."""

    name: str  # several where they were not measured one by one
    k3: float  # its share of `k3_kl`, in nats: adds up over parts
    equal: float  # share of tokens that it does not change in a bit


def k3(d: np.ndarray) -> np.ndarray:
    """`exp(d) - 1 - d`."""
    return np.asarray(np.expm1(d) - d)


def eight_bits(engine: Mapping[str, Any]) -> list[str]:
    """Arguments of an engine that give it 8 bits."""
    return [name for name in EIGHT_BITS if engine.get(name) not in (None, "auto")]


def chain_of(first: Scored, tried: Mapping[str, Scored | str]) -> list[tuple[str, np.ndarray | str]]:
    """The part that each step of the chain belongs to, and the log-probabilities after it, or why there are none."""
    logps, facts = first

    def of(change: str, side: str) -> np.ndarray | str:
        scored = tried.get(change, tried.get(PLAIN, first))  # what is not tried is the run's own
        return scored if isinstance(scored, str) else scored.logps[side]

    steps: list[tuple[str, np.ndarray | str]] = [(DROPOUT, logps["no_dropout"])] if "no_dropout" in logps else []
    steps += [(MICRO_BATCH, logps["one_row"]), (PADDING, logps["alone"])]
    if facts["unsplit"]:
        return [*steps, (SAMPLER, logps["sampled"])]
    steps += [(HEAD, of(HEADS, "alone")), (BODY, of(FLOAT32, "alone"))]
    steps += [(KERNELS, of(FLOAT32, "sampler")), (BODY, of(HEADS, "sampler")), (HEAD, of(PLAIN, "sampler"))]
    if bits := [EIGHT_BITS[name] for name in eight_bits(facts["engine_kwargs"])]:
        steps.append((" and ".join(bits), logps["sampler"]))
    return [*steps, (PUSH, logps["pushed"]), (OPTIONS if facts["options"] else DECODING, logps["sampled"])]


def split(before: np.ndarray, chain: Sequence[tuple[str, np.ndarray | str]]) -> list[Part]:
    """Split the gap from `before` to the end of the chain. A step without log-probabilities belongs to the next one."""
    known = [before, *(logps for _, logps in chain if not isinstance(logps, str))]
    finite = np.isfinite(known).all(0)
    here = before[finite].astype(np.float64)
    d = here - known[-1][finite]
    ratio = np.divide(k3(d), d, out=np.zeros_like(d), where=d != 0)
    steps: dict[str, np.ndarray] = {}
    names: list[str] = []
    for name, logps in chain:
        names.append(name)
        if not isinstance(logps, str):
            joint, after = " + ".join(dict.fromkeys(names)), logps[finite].astype(np.float64)
            steps[joint] = steps.get(joint, 0.0) + here - after
            here, names = after, []
    parts = [Part(name, np.mean(ratio * x).item(), np.mean(x == 0).item()) for name, x in steps.items()]
    return [*parts, Part(WHOLE, np.mean(k3(d)).item(), np.mean(d == 0).item())]


def diagnose_parts(observed: DumpedTokens, parts: Sequence[Part]) -> Diagnosis:
    """The diagnosis of the tokens, without causes whose parts are too small, and with that of a part that is nearly all."""
    *parts, whole = parts
    large = [part.name for part in parts if abs(part.k3) > _SMALL * whole.k3]
    acting = {cause: [name for name in large if any(x in name for x in names)] for cause, names in _PARTS.items()}
    found = diagnose(observed, {cause for cause, names in acting.items() if not names})
    if found.size < FLOOR or found.findings:
        return found
    for part in parts:
        for cause, names in _PARTS.items():
            if part.name == names[0] and part.k3 >= _LARGE * whole.k3:
                share, sentence = part.k3 / whole.k3, f"one change, {part.name}, makes a share of {{share}} of k3_kl"
                finding = Finding(cause, 0.99, share, Evidence(1.0, share, {"share": share}, sentence))
                return found._replace(verdict="found", findings=[finding])
    return found


def write_parts(parts: Sequence[Part]) -> str:
    """The parts as text for a terminal."""
    rows = [("part", "k3_kl", "share", "bit-equal")]
    for part in parts:
        share = percent(round(part.k3 / parts[-1].k3, 3)) if parts[-1].k3 else "-"
        rows.append((part.name, number(part.k3), share, percent(round(part.equal, 3))))
    lines = ["", "Where the gap comes from: one change each on the way from the trainer to the sampler.", *table(rows)]
    return "\n".join([*lines, "Not measured: an adapter (a new one adds 0), older weights, and several ranks."]) + "\n"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
