"""
The second proof of `auto`, as data: candidates, cells and stages. `PROTOCOL.md` says why. No torch here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cells
from cells import LONG_LANGUAGE, SEEDS, TAGGED_LANGUAGE, Arm, Cell, Run, Rung


FLOOR = 0.001  # of the ratio, as in `auto`
INF = float("inf")
POSITIVE = {"": [1.0, 1.0], "to1": [0.0, 1.0], "to2": [0.0, 2.0]}  # bounds of weights of positive advantages
TV = {"": [0.1, 0.1], "tv20": [0.2, 0.2], "tv30": [0.3, 0.3], "tv10_20": [0.1, 0.2], "tv20_10": [0.2, 0.1]}


# Arms that have other names than their parts: the preset of today, and the preset until this proof
NAMES = {"cap1_tv20": "auto", "cap1": "auto_tv10"}


def candidate(cap: float, positive: str = "", tv: str = "", floor: bool = True) -> Arm:
    """
    A rule like `auto`. Without `tv` in its name, it has the bounds of `auto_tv10`.

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
    name = "_".join(filter(None, (f"cap{cap:g}", positive, tv, "" if floor else "open")))
    return Arm(NAMES.get(name, name), options)


AUTO_TV10 = candidate(1)
CANDIDATES = [
    *(candidate(cap) for cap in (2, 3, 5, 10)),
    *(candidate(1, tv=tv) for tv in ("tv20", "tv30", "tv10_20", "tv20_10")),
    *(candidate(3, tv=tv) for tv in ("tv20", "tv30")),
    *(candidate(1, positive) for positive in ("to1", "to2")),
    candidate(1, floor=False),
]
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate")  # its default is `sequence_mask`
SECOND = {
    arm.name: arm
    for arm in (
        AUTO_TV10,
        *CANDIDATES,
        Arm("auto_tv10_bypass", {**AUTO_TV10.options, "bypass_mode": True}),
        *(Arm(f"trl_{mode}", {"vllm_importance_sampling_mode": mode}, trl=True) for mode in TRL_MODES),
        Arm("cppo", cells.ARMS["token_20"].options, rule="cppo"),
        Arm("cap3_cppo", cells.ARMS["token_20"].options, rule="cap3_cppo"),
        Arm("auto_tv10_pull", AUTO_TV10.options, rule="pull"),
        Arm("prime_rl", {"rollout_correction": "bypass_dppo_tv"}, rule="pull"),
    )
}
ARMS = {**cells.ARMS, **SECOND}

REFERENCES = ["on_policy", "none"]
SHORT_LIST = ["auto_tv10", "cap3", "cap3_tv20", "auto", "cap5", "token_2", "dppo_tv"]
JUDGED = ["trl", "token_2", "bypass", "dppo_tv", "auto_tv10", "auto"]  # the last one was the choice of tuning
JUDGED_ONCE = [*(f"trl_{mode}" for mode in TRL_MODES), "icepop", "cppo"]  # in three cells
JUDGED_WAYS = ["token_2", "dppo_tv", "auto_tv10", "auto"]  # with other ways to train

SLOW_8, FAST_3, FAST_4, FAST_8, FAST_16 = (
    Rung(8, "slow"),
    Rung(3, "fast"),
    Rung(4, "fast"),
    Rung(8, "fast"),
    Rung(16, "fast"),
)
FASTER_8, FASTER_32 = Rung(8, "faster"), Rung(32, "faster")

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


EXACT, DENSE = ["unpack", "mirror", "differences", "interleave"], ["records", "complement"]
FORMATS, GARBAGE = ["tag_even", "tag_swap"], ["records", "mirror"]


def judging_runs(seed: int) -> list[Run]:
    """All runs of a seed, with first what decides most."""
    full = [*REFERENCES, *JUDGED]
    return [
        *runs_of([Cell(task, rung) for task in FORMATS for rung in (FAST_8, FASTER_8)], full, [seed]),
        *runs_of([Cell(task, FASTER_32) for task in ("records", "unpack")], [*full, "auto_tv10_bypass"], [seed]),
        *runs_of([Cell(task, FAST_4, fault="garbage") for task in GARBAGE], full, [seed]),
        *runs_of([Cell(task, FASTER_32) for task in (*EXACT, *DENSE)], full, [seed]),
        *runs_of([Cell("differences", FAST_8, way="several"), Cell("tag_even", FAST_8, way="several")],
                 [*REFERENCES, *JUDGED_WAYS], [seed]),
        *runs_of([Cell("mirror", FAST_8, "rloo"), Cell("tag_swap", FAST_8, "rloo")], [*REFERENCES, *JUDGED_WAYS], [seed]),
        *runs_of([Cell("unpack", FASTER_32), Cell("complement", FASTER_32), Cell("tag_even", FASTER_8)],
                 JUDGED_ONCE, [seed]),
        *runs_of([Cell("triple", FAST_16)], full, [seed]),
    ]  # fmt: skip


def second_tuning() -> list[Run]:
    """The short list in every cell, and the other candidates in the one that tells most apart."""
    others = [*(arm.name for arm in CANDIDATES), "cppo", "cap3_cppo", "auto_tv10_pull", "prime_rl"]
    return [
        *runs_of(TUNING_CELLS, [*REFERENCES, *SHORT_LIST]),
        *runs_of([Cell("sort", FASTER_32)], [name for name in others if name not in SHORT_LIST]),
    ]


def second_judging() -> list[Run]:
    """All named arms. Seeds 1 and 2 are run where the protocol asks for them."""
    runs = [run for seed in SEEDS for run in judging_runs(seed)]
    return list({run.name: run for run in runs}.values())


def taught_language() -> list[Run]:
    """The pretrained language model, after imitation: words backwards between tags, and long sums."""
    main, *others = (
        Cell(TAGGED_LANGUAGE, FASTER_8),
        Cell(TAGGED_LANGUAGE, Rung(3, "faster")),
        Cell(LONG_LANGUAGE, FASTER_8),
    )
    found = [*runs_of([main], [*REFERENCES, *JUDGED], SEEDS), *runs_of(others, [*REFERENCES, "auto"])]
    return [replace(run, steps=40) for run in found]


def several_updates() -> list[Run]:
    """Several updates per generation, with a sampler that is at most one generation behind: at most 15 optimizer steps."""
    arms, found = ["token_2", "dppo_tv", "auto"], []
    for task, seeds in (("tag_even", SEEDS), ("tag_swap", SEEDS[:1])):
        behind, in_step = (Cell(task, Rung(lag, "fast"), way="several") for lag in (1, 0))
        found += [*runs_of([in_step], ["on_policy", *arms], seeds), *runs_of([behind], [*REFERENCES, *arms], seeds)]
    return found


SECOND_STAGES = {
    "second_tuning": second_tuning,
    "second_judging": second_judging,
    "several_updates": several_updates,
    "taught_language": taught_language,
}
STAGES = {**cells.STAGES, **SECOND_STAGES}
