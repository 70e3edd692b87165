"""
What is compared, as data: ways to correct, and the situations they are tried in. No torch here.

A *cell* is a situation: task, trainer, how far the sampler is behind, learning rate, and what else is wrong with the sampler.
An *arm* is a way to correct. How far behind, and at which rate, is the rung of a *ladder*: each task and trainer is judged at
the lowest rung at which a run without correction loses, one above it, and at the foot of the ladder, where nothing should be
lost. Those rungs are found by `ladder.py`, and kept in `ladder.json`.

A *stage* is what is run for a purpose. Runs are in the order in which they are done, cell by cell and seed by seed, so that
what an interrupted stage has done is balanced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


STEPS = 120
SEEDS = [0, 1, 2]
RATES = {"slow": 5e-5, "fast": 1e-4, "faster": 2e-4}
# What may be wrong with a sampler beside its age. `engine` is the type of vLLM's cache; the rest is done to weights or
# log-probabilities: rounded to eight bits, or from step 40 on, for 20 steps, every tenth token is reported with the
# log-probability of another. With `garbage`, every second completion has a token that no answer has: the sampler reports that
# it was sure of the token, and the reward forgives one.
FAULTS: dict[str, dict[str, Any]] = {
    "fp8": {"engine": "fp8_e5m2"},
    "int8": {"int8": True},
    "burst": {"burst": (40, 60, 0.1)},
    "garbage": {"garbage": 0.5},
}
BENEATH = ["fp8", "int8", "burst"]  # the staleness of judging
# Other ways to train than one update per generation
WAYS: dict[str, dict[str, Any]] = {"several": {"steps_per_generation": 4, "num_iterations": 2}}


@dataclass(frozen=True)
class Rung:
    """How many optimizer steps the sampler is behind, and the learning rate."""

    lag: int
    rate: str

    def __str__(self) -> str:
        return f"{self.lag} {self.rate}"


# From rung to rung, what the policy moves while the sampler stands still is about doubled
LADDER = [
    Rung(lag, rate)
    for lag, rate in (
        (2, "slow"), (4, "slow"), (8, "slow"), (8, "fast"), (16, "fast"), (32, "fast"), (32, "faster"), (64, "faster"),
    )
]  # fmt: skip

TOP = Rung(32, "faster")  # where all that has not broken is told apart


@dataclass(frozen=True)
class Arm:
    """
    A way to correct.

    Args:
        name (`str`):
            Name in files and tables.
        options (`dict`, *optional*):
            Fields of the trainer's configuration.
        rule (`str`, *optional*):
            One of `rules.RULES`, which are not in the package.
        trl (`bool`, *optional*, defaults to `False`):
            Whether to train with TRL's own trainer.
        in_step (`bool`, *optional*, defaults to `False`):
            Whether the sampler is the policy itself, whatever the cell says: the best there could be.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rule: str | None = None
    trl: bool = False
    in_step: bool = False


@dataclass(frozen=True)
class Cell:
    """A situation."""

    task: str
    rung: Rung
    algorithm: str = "grpo"
    fault: str | None = None
    way: str | None = None  # of training, one of `WAYS`

    @property
    def name(self) -> str:
        lag = f"lag_{self.rung.lag}" if self.rung.lag else "in_step"
        return "-".join(filter(None, (self.algorithm, self.task, lag, self.rung.rate, self.fault, self.way)))

    @property
    def in_step(self) -> "Cell":
        """The same with a sampler with which nothing is wrong."""
        return replace(self, rung=replace(self.rung, lag=0), fault=None)


@dataclass(frozen=True)
class Run:
    """One arm in one cell, with one seed."""

    arm: Arm
    cell: Cell
    seed: int = 0
    steps: int = STEPS

    @property
    def at(self) -> Cell:
        """Where it is run. The reference is the same for all cells of a task, trainer and rate."""
        return self.cell.in_step if self.arm.in_step else self.cell

    @property
    def name(self) -> str:
        return f"{self.at.name}-{self.arm.name}-{self.seed}"

    @property
    def sampler(self) -> dict[str, Any]:
        """What is wrong with the sampler. Every other one does not say how old it is."""
        lag = {"lag": self.at.rung.lag, "announced": announces(self.cell.task)} if self.at.rung.lag else {}
        return {**lag, **FAULTS.get(self.at.fault, {})}

    @property
    def engine(self) -> str:
        # A model has its own engine. The seed has no other use than to keep the order of the stage.
        return f"{self.cell.task} {self.sampler.get('engine', 'auto')} {self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the outcome, apart from the seed. As it is read back from JSON."""
        sampler = {key: list(value) if isinstance(value, tuple) else value for key, value in self.sampler.items()}
        return {
            "task": self.cell.task,
            "sampler": sampler,
            "learning_rate": RATES[self.cell.rung.rate],
            "algorithm": self.cell.algorithm,
            "options": self.arm.options,
            "rule": self.arm.rule,
            "trl": self.arm.trl,
            "steps": self.steps,
            **({"way": WAYS[self.cell.way]} if self.cell.way else {}),
        }


# Arms ---------------------------------------------------------------------------------------------------------------------


def weights(upper: float, **others: Any) -> dict[str, Any]:
    """Token weights, truncated."""
    return {"rollout_is": "token", "rollout_is_threshold": upper, **others}


def within_tv(bound: float, upper: float) -> dict[str, Any]:
    """Token weights beneath a bound on how far the probability of a token may be pushed."""
    return weights(upper, rollout_rs=["token_tv"], rollout_rs_threshold=[[bound, bound]])


# `auto` before this arena: no token whose ratio is above 5
UNTIL_NOW = weights(2.0, rollout_rs=["token_tv", "token_k1"], rollout_rs_threshold=[[0.2, 0.2], [0.0, 5.0]])
# Rules of `rules.py`. `topr_tv10` is `auto` without its floor, as every published run of `auto` was
RULED = ["m2po", "topr", "topr_tv", "topr_tv10", "flipped", "clip_2", "clip_5"]
ARMS = {
    arm.name: arm
    for arm in (
        Arm("on_policy", {"rollout_correction": "disabled"}, in_step=True),
        Arm("none", {"rollout_correction": "disabled"}),
        Arm("trl", trl=True),
        Arm("token_2", weights(2.0)),
        Arm("token_20", weights(20.0)),
        Arm("icepop", {"rollout_correction": "decoupled_token_icepop"}),
        Arm("geo", {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.95, 1.05]}),
        Arm("kpop", {"rollout_correction": "decoupled_kpop"}),
        Arm("bypass", {"rollout_correction": "bypass_ppo_clip"}),
        Arm("bypass_10", {"rollout_correction": "bypass_ppo_clip", "rollout_clip_ratio_c": 10.0}),
        Arm("bypass_inf", {"rollout_correction": "bypass_ppo_clip", "rollout_clip_ratio_c": None}),
        Arm("dppo_tv", {"rollout_correction": "bypass_dppo_tv"}),
        Arm("dppo_kl", {"rollout_correction": "bypass_dppo_kl"}),
        Arm("tv_2", within_tv(0.2, 2.0)),
        Arm("tv_5", within_tv(0.2, 5.0)),
        Arm("tv10_2", within_tv(0.1, 2.0)),
        Arm("tv_1", within_tv(0.2, 1.0)),
        Arm("tv10_1", within_tv(0.1, 1.0)),
        Arm("tv10_5", within_tv(0.1, 5.0)),
        Arm("tv05_2", within_tv(0.05, 2.0)),
        Arm("tv_2_up5", UNTIL_NOW),
        Arm("auto", {"rollout_correction": "auto"}),
        *(Arm(name, weights(20.0), rule=name) for name in RULED),
    )
}  # fmt: skip
# Arms of published rows whose setting is gone. `tv_2_up5_ess`: `tv_2_up5`, each step scaled by `sqrt(ESS / B)`
FORMER = ["tv_2_up5_ess"]


@dataclass(frozen=True)
class Setup:
    """
    What a run trains on.

    Args:
        parts (`dict`):
            Arguments of the trainer: model, reward, data, tokenizer, adapter.
        settings (`dict`):
            Fields of its configuration.
        measure (`Callable`):
            Returns the held-out accuracy of a model.
        tied (`bool`):
            Whether the model has tied embeddings.
        every (`int`, *optional*, defaults to `10`):
            Steps between two looks at held-out accuracy.
        tags (`list[int]`, *optional*):
            Tokens of the tags, where answers have some.
    """

    parts: dict[str, Any]
    settings: dict[str, Any]
    measure: Callable[[Any], float]
    tied: bool
    every: int = 10
    tags: list[int] = field(default_factory=list)


# Cells --------------------------------------------------------------------------------------------------------------------

# By the hash of their names, see `tasks.py`, which imports torch.
TUNING = ["sort", "copy_noise", "add", "brackets", "count", "stack", "cellular", "walk"]
JUDGING = [
    "reverse", "running_sum", "shift_moe", "modulo", "sets", "sort_letters", "merge_sorted", "drop_vowels", "unique",
    "every_second",
]  # fmt: skip
# Of the second proof, see `PROTOCOL.md`
SECOND_TUNING = ["rotate", "neighbours", "tag_reverse", "tag_shift"]
SECOND_JUDGING = [
    "interleave", "differences", "unpack", "mirror", "records", "complement", "tag_even", "tag_swap", "triple",
]  # fmt: skip
LANGUAGE = "sums"  # of the pretrained language model
TAGGED_LANGUAGE, LONG_LANGUAGE = "tagged_words", "long_sums"  # of the same, see `language_taught.py`
# Tasks that RLOO is tried on as well
RLOO = ["sort_letters", "merge_sorted", "sets"]
CLIMBS = [*((task, "grpo") for task in (*TUNING, *JUDGING)), *((task, "rloo") for task in RLOO)]

_LADDER_FILE = Path(__file__).parent / "ladder.json"
RUNGS: dict[str, dict[str, int | None]] = json.loads(_LADDER_FILE.read_text()) if _LADDER_FILE.exists() else {}


def announces(task: str) -> bool:
    """Whether the samplers of a task say how old they are: those of every other one, and not those of the language model."""
    tasks = next((tasks for tasks in (TUNING, JUDGING, SECOND_TUNING, SECOND_JUDGING) if task in tasks), None)
    return tasks is not None and tasks.index(task) % 2 == 0


def rung_of(task: str, algorithm: str) -> int | None:
    """The lowest rung at which a run without correction loses, or `None` if there is none, or it was not looked for."""
    return RUNGS.get(algorithm, {}).get(task)


def cell_at(task: str, algorithm: str, above: int = 0, fault: str | None = None) -> Cell | None:
    """The cell of a task some rungs above the one where a run without correction loses, if the ladder has it."""
    rung = rung_of(task, algorithm)
    if rung is None or not 0 <= rung + above < len(LADDER):
        return None
    return Cell(task, LADDER[rung + above], algorithm, fault)


def cells_at(
    tasks: Sequence[str], algorithm: str, above: int = 0, faults: Sequence[str | None] = (None,)
) -> list[Cell]:
    """The cells of several tasks, with the faults in turns."""
    found = (cell_at(task, algorithm, above, faults[i % len(faults)]) for i, task in enumerate(tasks))
    return [cell for cell in found if cell is not None]


def arms_of(cell: Cell, names: Sequence[str], arms: Mapping[str, Arm] = ARMS) -> list[Arm]:
    """Arms that there are in a cell: TRL has none of its own for RLOO."""
    return [arms[name] for name in names if cell.algorithm == "grpo" or name != "trl"]


def runs_of(
    cells: Sequence[Cell], names: Sequence[str], seeds: Sequence[int] = SEEDS[:1], arms: Mapping[str, Arm] = ARMS
) -> list[Run]:
    return [Run(arm, cell, seed) for seed in seeds for cell in cells for arm in arms_of(cell, names, arms)]


# Stages -------------------------------------------------------------------------------------------------------------------

# Every candidate is tried three rungs above the one where no correction loses, and those that do well on all tuning tasks
SCREENED = [
    "trl", "icepop", "geo", "bypass", "bypass_inf", "dppo_tv", "dppo_kl", "tv_2_up5", "tv_1", "tv_2", "tv_5",
    "tv05_2", "tv10_1", "tv10_2", "tv10_5", "m2po", "topr", "topr_tv", "topr_tv10", "flipped", "clip_2", "clip_5",
]  # fmt: skip
SHORT_LIST = ["trl", "icepop", "bypass", "dppo_tv", "tv_2_up5", "tv10_1", "tv10_2", "topr_tv", "topr_tv10"]
JUDGED = ["trl", "icepop", "bypass", "dppo_tv", "auto"]
REFERENCES = ["on_policy", "none"]


def smoke() -> list[Run]:
    """Four arms in one cell, few steps."""
    return [Run(ARMS[name], Cell("sort", Rung(4, "slow")), steps=10) for name in ("on_policy", "none", "trl", "auto")]


def tuning() -> list[Run]:
    """Where settings may be chosen."""
    return [
        *runs_of(cells_at(TUNING[:4], "grpo", above=3), [*REFERENCES, *SCREENED]),
        *runs_of([Cell(task, TOP) for task in TUNING[:4]], [*REFERENCES, *SHORT_LIST]),
        *runs_of(cells_at(TUNING[:4], "grpo", above=1, faults=["burst"]), [*REFERENCES, *SHORT_LIST]),
        *runs_of(cells_at(TUNING, "grpo", above=1), [*REFERENCES, *SHORT_LIST]),
    ]


def judging() -> list[Run]:
    """
    What nothing is set by: the rung where no correction loses, with a fault beneath the staleness; the one above; near the top
    of the ladder; and at its foot.
    """
    return [
        *runs_of(cells_at(JUDGING, "grpo", above=1), [*REFERENCES, *JUDGED]),
        *runs_of(cells_at(RLOO, "rloo", above=1), [*REFERENCES, *JUDGED]),
        *runs_of(cells_at(JUDGING, "grpo", faults=BENEATH), [*REFERENCES, *JUDGED]),
        *runs_of([Cell(task, TOP) for task in JUDGING], [*REFERENCES, *JUDGED]),
        *runs_of([Cell(task, LADDER[0]) for task in JUDGING], [*REFERENCES, "auto"]),
    ]


def language_model() -> list[Run]:
    """A pretrained language model: up to the lag where no correction loses; there all arms with two seeds, and RLOO."""
    at, steps = Cell(LANGUAGE, Rung(8, "faster")), 50
    found = [
        *runs_of([Cell(LANGUAGE, Rung(lag, "faster")) for lag in (2, 4)], [*REFERENCES, "auto"]),
        *runs_of([at], [*REFERENCES, "trl", "bypass", "dppo_tv", "auto"], SEEDS[:2]),
        *runs_of([replace(at, algorithm="rloo")], [*REFERENCES, "auto"]),
    ]
    return [replace(run, steps=steps) for run in found]


def garbage() -> list[Run]:
    """Garbage that the sampler is sure of, in step with the trainer and behind it; with `auto` also without its floor."""
    in_step = [Cell(task, Rung(0, "fast"), fault="garbage") for task in JUDGING]
    behind = cells_at(JUDGING, "grpo", faults=["garbage"])
    return runs_of([*in_step, *behind], [*REFERENCES, *JUDGED, "token_2", "topr_tv10"])


STAGES = {"tuning": tuning, "judging": judging, "language_model": language_model, "garbage": garbage}
