"""
The parts of a gap, which add up to the whole. Arrays of numpy in, no TRL.

Between the trainer as it is and the sampler as it is stands a chain of configurations. Each step of the chain changes one
thing, and all of them score the same tokens. So the log-ratio `d` of a token is the sum of its steps, `d = sum_i d_i`, and its
`k3 = exp(d) - 1 - d` is split in proportion, `k3 * d_i / d`: the Aumann-Shapley value of the step. These parts add up to
`k3_kl` by construction. Noise that is unrelated to the other steps gets the `k3` that it has alone; a step that others undo
gets less, and may get less than 0.
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
DECODING, OPTIONS = "decoding against prefill", "sampling options"
# The chain: nodes in order, and the part that the step to a node belongs to
CHAIN = {
    "as_it_is": "",
    "dropout_off": DROPOUT,
    "one_row": MICRO_BATCH,
    "alone": PADDING,
    "head": HEAD,
    "body": BODY,
    "sampler_float32": KERNELS,
    "sampler_body": BODY,
    "sampler_head": HEAD,
    "sampler_quantised": QUANTISATION,
    "sampler_loaded": CACHE,
    "sampler_pushed": PUSH,
    "sampler_decoding": DECODING,
    "sampled": OPTIONS,
}
# Causes of `diagnosis` that a part speaks for or against
CAUSES = {
    PADDING: ("padding",),
    DROPOUT: ("dropout",),
    HEAD: ("head",),
    BODY: ("rounding",),
    CACHE: ("kv_cache",),
    QUANTISATION: ("weights",),
    PUSH: ("weights",),
    OPTIONS: ("truncation", "penalty"),
}


# Share of the gap up to which a part rules its causes out, and from which on it is found
_SMALL, _LARGE = 0.2, 0.75


class Part(NamedTuple):
    """A part of the gap."""

    names: tuple[str, ...]  # several where they were not measured one by one
    k3: float  # its share of `k3_kl`, in nats: adds up over parts
    alone: float  # mean of `exp(d_i) - 1 - d_i`: the gap if it were the only one
    unequal: float  # share of tokens that are not bit-equal because of it: adds up over parts
    equal: float  # share of tokens that it does not change, bit by bit
    reason: str = ""  # why several were not measured one by one

    @property
    def name(self) -> str:
        return " + ".join(self.names) if len(self.names) < 3 else f"{self.names[0]} to {self.names[-1]}"


def k3(d: np.ndarray) -> np.ndarray:
    """`exp(d) - 1 - d`."""
    divergence: np.ndarray = np.expm1(d) - d
    return divergence


def chain_of(facts: Mapping[str, Any], *, low: bool) -> dict[str, str]:
    """The chain of a run, whose own engine stands for nodes that would have the same arguments. `low`: a side has 16 bits."""
    chain, own = dict(CHAIN), facts["engine_kwargs"]
    changed = [name for name in ("quantization", "kv_cache_dtype") if own.get(name, "auto") != "auto"]
    if facts["colocated"] and "kv_cache_dtype" not in changed:
        chain["sampler_loaded"] = QUANTISATION if changed else HEAD if low else KERNELS
    if not facts["options"]:
        del chain["sampler_decoding"]
        chain["sampled"] = DECODING
    return chain


def split(nodes: Mapping[str, np.ndarray], reasons: Mapping[str, str], chain: Mapping[str, str]) -> list[Part]:
    """
    Split the gap between the first and the last node of the chain. Without a node that has a reason, its step belongs to the
    next one; without any other, the run has no such step.
    """
    finite = np.isfinite(np.stack([nodes[node] for node in chain if node in nodes])).all(0)
    before, reason = nodes["as_it_is"][finite].astype(np.float64), ""
    names: list[str] = []
    steps: dict[tuple[str, ...], np.ndarray] = {}
    why: dict[tuple[str, ...], str] = {}
    for node, part in [*chain.items()][1:]:
        if node in reasons:
            names, reason = [*names, part], reasons[node]
        elif node in nodes:
            joint, now = tuple(dict.fromkeys([*names, part])), nodes[node][finite].astype(np.float64)
            steps[joint], why[joint] = steps.get(joint, 0.0) + before - now, reason
            before, names, reason = now, [], ""
    d = np.sum([*steps.values()], axis=0)
    ratio = np.divide(k3(d), d, out=np.zeros_like(d), where=d != 0)
    moved = np.sum([np.abs(step) for step in steps.values()], axis=0) + (d == 0)
    return [
        Part(
            joint,
            float(np.mean(ratio * step)),
            float(np.mean(k3(step))),
            float(np.mean((d != 0) * np.abs(step) / moved)),
            float(np.mean(step == 0)),
            why[joint],
        )
        for joint, step in steps.items()
    ]


def diagnose_parts(observed: DumpedTokens, parts: Sequence[Part]) -> Diagnosis:
    """The diagnosis of the tokens, without causes whose parts are too small, and with that of a part that is nearly all."""
    whole = sum(part.k3 for part in parts)
    large = {name for part in parts if abs(part.k3) > _SMALL * whole for name in part.names}
    spared = {cause for name in large for cause in CAUSES.get(name, ())}
    found = diagnose(observed, {cause for causes in CAUSES.values() for cause in causes} - spared)
    if found.size < FLOOR or found.findings:
        return found
    for part in parts:
        for cause in CAUSES.get(part.name, ()):
            if part.k3 >= _LARGE * whole:
                sentence = f"one change, {part.name}, makes a share of {{share}} of k3_kl"
                evidence = Evidence(1.0, part.k3 / whole, {"share": part.k3 / whole}, sentence)
                return found._replace(verdict="found", findings=[Finding(cause, 0.99, part.k3 / whole, evidence)])
    return found


def write_parts(parts: Sequence[Part]) -> str:
    """The parts as text for a terminal."""
    whole = sum(part.k3 for part in parts)
    rows = [("part", "k3_kl", "share", "unequal", "alone: k3_kl", "bit-equal")]
    for part in parts:
        share = percent(round(part.k3 / whole, 3)) if whole else "-"
        rows.append(
            (part.name, number(part.k3), share, percent(part.unequal), number(part.alone), percent(part.equal))
        )
    unequal = sum(part.unequal for part in parts)
    rows.append(
        ("the whole", number(whole), percent(1.0), percent(unequal), number(whole), percent(round(1 - unequal, 6)))
    )
    lines = ["", "Where the gap comes from: one change each on the way from the trainer to the sampler.", *table(rows)]
    lines += [
        f"Not measured one by one: {', '.join(part.names)}. {part.reason}" for part in parts if len(part.names) > 1
    ]
    missing = dict.fromkeys(name for name in CHAIN.values() if name and not any(name in part.names for part in parts))
    lines += [f"Not in this run: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "Not measured: an adapter (a new one adds 0), older weights, and several ranks."]) + "\n"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
