"""
The second proof of `auto`, as data: candidates, cells and stages. `PROTOCOL.md` says why. No torch here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cells
from cells import SEEDS, TAGGED_LANGUAGE, Arm, Cell, Run, Rung


FLOOR = 0.001  # of the ratio, as in `auto`
INF = float("inf")
POSITIVE = {"": [1.0, 1.0], "to1": [0.0, 1.0], "to2": [0.0, 2.0]}  # bounds of weights of positive advantages
TV = {"": [0.1, 0.1], "tv20": [0.2, 0.2], "tv30": [0.3, 0.3], "tv10_20": [0.1, 0.2], "tv20_10": [0.2, 0.1]}


def candidate(cap: float, positive: str = "", tv: str = "", floor: bool = True) -> Arm:
    """
    A rule like `auto`.

    Args:
        cap (`float`):
            Upper bound of the weights of negative advantages.
        positive (`str`, *optional*):
            Bounds of the weights of positive ones, one of `POSITIVE`.
        tv (`str`, *optional*):
            Bounds on the change of a probability, for negative and positive advantages, one of `TV`.
        floor (`bool`, *optional*, defaults to `True`):
            Whether a token whose ratio is below `FLOOR` is rejected.
    """
    bounds: dict[str, list[float]] = {"token_tv": TV[tv], **({"token_k1": [FLOOR, INF]} if floor else {})}
    options: dict[str, Any] = {
        "rollout_is": "token",
        "rollout_is_threshold": [[0.0, float(cap)], POSITIVE[positive]],
        "rollout_is_clamp": True,
        "rollout_rs": [*bounds],
        "rollout_rs_threshold": [*bounds.values()],
    }
    return Arm("_".join(filter(None, (f"cap{cap:g}", positive, tv, "" if floor else "open"))), options)


CANDIDATES = [
    *(candidate(cap) for cap in (2, 3, 5, 10)),
    *(candidate(cap, tv=tv) for cap in (1, 3) for tv in ("tv20", "tv30", "tv10_20", "tv20_10")),
    *(candidate(cap, positive) for cap in (1, 3) for positive in ("to1", "to2")),
    *(candidate(cap, positive, floor=False) for cap in (1, 3) for positive in POSITIVE),
]
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate")  # its default is `sequence_mask`
SECOND = {
    arm.name: arm
    for arm in (
        *CANDIDATES,
        Arm("auto_bypass", {"rollout_correction": "auto", "bypass_mode": True}),
        *(Arm(f"trl_{mode}", {"vllm_importance_sampling_mode": mode}, trl=True) for mode in TRL_MODES),
        Arm("cppo", cells.ARMS["token_20"].options, rule="cppo"),
        Arm("cap3_cppo", cells.ARMS["token_20"].options, rule="cap3_cppo"),
        Arm("auto_pull", {"rollout_correction": "auto"}, rule="pull"),
        Arm("prime_rl", {"rollout_correction": "bypass_dppo_tv"}, rule="pull"),
    )
}
ARMS = {**cells.ARMS, **SECOND}

REFERENCES = ["on_policy", "none"]
SHORT_LIST = ["auto", "cap3", "cap3_tv20", "cap1_tv20", "cap5", "token_2", "dppo_tv"]
JUDGED = ["trl", "token_2", "icepop", "bypass", "dppo_tv", "auto"]  # and the choice, which is not made yet
JUDGED_ONCE = [*(f"trl_{mode}" for mode in TRL_MODES), "cppo"]  # at one rung per kind

SLOW_8, FAST_3, FAST_4, FAST_8, FAST_16 = (
    Rung(8, "slow"),
    Rung(3, "fast"),
    Rung(4, "fast"),
    Rung(8, "fast"),
    Rung(16, "fast"),
)
FASTER_8, FASTER_32, IN_STEP = Rung(8, "faster"), Rung(32, "faster"), Rung(0, "fast")

TUNING_CELLS = [
    Cell("rotate", SLOW_8),
    Cell("tag_reverse", FAST_8),
    Cell("neighbours", FAST_4, fault="garbage"),
    Cell("neighbours", FAST_16),
    Cell("sort", FASTER_32),
    Cell("tag_shift", FASTER_8),
    Cell("sort", SLOW_8),
    Cell("tag_reverse", FAST_3),
    Cell("add", FAST_4, fault="garbage"),
    Cell("rotate", FAST_16),
    Cell("add", FASTER_32),
    Cell("tag_shift", FAST_8),
    Cell("tag_reverse", FASTER_8),
    Cell("tag_shift", FAST_3),
    Cell("sort", SLOW_8, fault="burst"),
]


def runs_of(found: Sequence[Cell], names: Sequence[str], seeds: Sequence[int] = SEEDS[:1]) -> list[Run]:
    return cells.runs_of(found, names, seeds, ARMS)


def judging_cells() -> list[Cell]:
    plain = ["interleave", "differences", "unpack", "mirror", "records", "complement"]
    return [
        *(Cell(task, rung) for rung in (FAST_16, SLOW_8, FASTER_32) for task in plain),
        Cell("triple", FAST_16),
        *(Cell(task, rung) for rung in (FAST_8, FAST_3, FASTER_8, IN_STEP) for task in ("tag_even", "tag_swap")),
        *(Cell(task, rung, fault="garbage") for rung in (FAST_4, IN_STEP) for task in ("mirror", "records")),
        Cell("interleave", FAST_16, fault="burst"),
        *(Cell(task, FAST_8, way="several") for task in ("differences", "tag_even")),
        *(Cell(task, FAST_8, "rloo") for task in ("mirror", "tag_swap")),
    ]


def judged_once(found: Sequence[Cell]) -> list[Cell]:
    """Cells in which all published modes are tried: those of a kind at one rung."""
    rungs = {"garbage": FAST_4, None: FAST_16}
    return [
        cell
        for cell in found
        if cell.algorithm == "grpo"
        and cell.way is None
        and cell.rung == (FAST_8 if cell.task.startswith("tag_") else rungs.get(cell.fault))
    ]


def second_tuning() -> list[Run]:
    """The short list in every cell with seed 0, the other candidates, then more seeds."""
    others = [
        name for name in SECOND if name not in SHORT_LIST and not name.startswith("trl_") and name != "auto_bypass"
    ]
    return [
        *runs_of(TUNING_CELLS, [*REFERENCES, *SHORT_LIST]),
        *runs_of(TUNING_CELLS, others),
        *runs_of(TUNING_CELLS, [*REFERENCES, *SHORT_LIST, *others], SEEDS[1:]),
    ]


def second_judging() -> list[Run]:
    """All named arms. Seeds 1 and 2 are run where the protocol asks for them."""
    found = judging_cells()
    bypassed = [Cell(task, FAST_8) for task in ("unpack", "records")]
    return [
        run
        for seed in SEEDS
        for run in (
            *runs_of(found, [*REFERENCES, *JUDGED], [seed]),
            *runs_of(judged_once(found), JUDGED_ONCE, [seed]),
            *runs_of(bypassed, [*REFERENCES, "token_2", "auto", "auto_bypass"], [seed]),
        )
    ]


def tagged_language() -> list[Run]:
    """The pretrained language model, which learns to write a word backwards between tags."""
    found = [Cell(TAGGED_LANGUAGE, Rung(lag, "faster")) for lag in (8, 3, 0)]
    return [replace(run, steps=40) for run in runs_of(found, [*REFERENCES, *SHORT_LIST], SEEDS)]


SECOND_STAGES = {"second_tuning": second_tuning, "second_judging": second_judging, "tagged_language": tagged_language}
STAGES = {**cells.STAGES, **SECOND_STAGES}
