"""
The comparison, as data: ways to correct, and the situations they are tried in. No torch here.

A *cell* is a situation: task, sampler, learning rate and algorithm. An *arm* is a way to correct. The full grid of both is
some thousand runs; a *stage* is a fraction of it, balanced so that every task meets most samplers, each of them meets both
learning rates, and every arm is tried in the same cells. Runs are in the order in which they are done, cell by cell and seed
by seed, so that what an interrupted stage has done is balanced too.
"""

from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any


STEPS = 120

# The sampler's fault, by name. `engine` is the type of vLLM's cache; the rest is done to weights or log-probabilities.
SAMPLERS: dict[str, dict[str, Any]] = {
    "in step": {},
    "lag 4": {"lag": 4},
    "lag 8": {"lag": 8},
    "lag 16": {"lag": 16},
    "fp8 cache": {"engine": "fp8_e5m2"},
    "int8 weights": {"int8": True},
    # from step 40 on, for 20 steps, every tenth token is reported with the log-probability of another
    "burst": {"burst": (40, 60, 0.1)},
    "lag 8, burst": {"lag": 8, "burst": (40, 60, 0.1)},
}
SLOW, FAST = 5e-5, 1e-4


@dataclass(frozen=True)
class Arm:
    """
    A way to correct.

    Args:
        name (`str`):
            Name in files and tables.
        options (`dict`, *optional*):
            Fields of the trainer's configuration.
        trl (`bool`, *optional*, defaults to `False`):
            Whether to train with TRL's own trainer.
        in_step (`bool`, *optional*, defaults to `False`):
            Whether the sampler is the policy itself, whatever the cell says: the best there could be.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    trl: bool = False
    in_step: bool = False


@dataclass(frozen=True)
class Cell:
    """A situation."""

    task: str
    sampler: str
    learning_rate: float = SLOW
    algorithm: str = "grpo"

    @property
    def name(self) -> str:
        rate = "fast" if self.learning_rate == FAST else "slow"
        return f"{self.algorithm}-{self.task}-{self.sampler}-{rate}".replace(", ", "_").replace(" ", "_")


@dataclass(frozen=True)
class Run:
    """One arm in one cell, with one seed."""

    arm: Arm
    cell: Cell
    seed: int = 0
    steps: int = STEPS

    @property
    def name(self) -> str:
        cell = self.cell if not self.arm.in_step else Cell(self.cell.task, "in step", *self._rate_and_algorithm)
        return f"{cell.name}-{self.arm.name}-{self.seed}"

    @property
    def _rate_and_algorithm(self) -> tuple[float, str]:
        return self.cell.learning_rate, self.cell.algorithm

    @property
    def sampler(self) -> dict[str, Any]:
        return {} if self.arm.in_step else SAMPLERS[self.cell.sampler]

    @property
    def engine(self) -> str:
        # A model has its own engine. Cell and seed have no other use than to keep the order of the stage.
        return f"{self.cell.task} {self.sampler.get('engine', 'auto')} {self.cell.name} {self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """Inputs of the outcome, apart from the seed, as read back from JSON."""
        sampler = {key: list(value) if isinstance(value, tuple) else value for key, value in self.sampler.items()}
        return {
            "task": self.cell.task,
            "sampler": sampler,
            "learning_rate": self.cell.learning_rate,
            "algorithm": self.cell.algorithm,
            "options": self.arm.options,
            "trl": self.arm.trl,
            "steps": self.steps,
        }


GEOMETRIC = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.95, 1.05]}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("on_policy", {"rollout_correction": "disabled"}, in_step=True),
        Arm("none", {"rollout_correction": "disabled"}),
        Arm("trl", trl=True),
        Arm("token_is", {"rollout_correction": "decoupled_token_is"}),
        Arm("icepop", {"rollout_correction": "decoupled_token_icepop"}),
        Arm("geo", {"rollout_correction": "decoupled_geo_rs_token_tis"}),
        Arm("geo_wide", GEOMETRIC),
        Arm("bypass", {"rollout_correction": "bypass_ppo_clip"}),
        Arm("dppo", {"rollout_correction": "bypass_dppo_tv"}),
        Arm("kpop", {"rollout_correction": "decoupled_kpop"}),
        Arm("token_tv", {"rollout_rs": ["token_tv"], "rollout_rs_threshold": [[0.2, 0.2]]}),
        Arm("token_kpop", {"rollout_rs": ["token_binary_kl"], "rollout_rs_threshold": [0.1]}),
        Arm("tv_kl1", {"rollout_rs": ["token_tv", "token_binary_kl"], "rollout_rs_threshold": [[0.2, 0.2], 1.0]}),
        Arm("tv_kl05", {"rollout_rs": ["token_tv", "token_binary_kl"], "rollout_rs_threshold": [[0.2, 0.2], 0.5]}),
        Arm("tv_kl2", {"rollout_rs": ["token_tv", "token_binary_kl"], "rollout_rs_threshold": [[0.2, 0.2], 2.0]}),
        Arm("tv_up10", {"rollout_rs": ["token_tv", "token_k1"], "rollout_rs_threshold": [[0.2, 0.2], [0, 10.0]]}),
        Arm("tv_up5", {"rollout_rs": ["token_tv", "token_k1"], "rollout_rs_threshold": [[0.2, 0.2], [0, 5.0]]}),
        Arm("auto", {"rollout_correction": "auto"}),
    )
}  # fmt: skip
# What is tried on the tuning tasks: everything in six cells, and in the others what could still be chosen.
TUNED = [name for name in ARMS if name not in ("geo", "kpop", "auto")]
SHORTLIST = ["on_policy", "none", "trl", "icepop", "bypass", "tv_kl2", "tv_up10", "tv_up5"]
# What is judged: the rule, what TRL and the README had before, IcePop, and the two ends.
JUDGED = ["on_policy", "none", "trl", "icepop", "bypass", "geo", "auto"]

# By the hash of their names, see `tasks.py`, which imports torch.
TUNING, JUDGING = ["copy_noise", "sort", "walk", "add"], ["running_sum", "reverse", "shift_moe"]
SEEDS = [0, 1, 2]


def balanced(tasks: list[str], samplers: list[str], algorithm: str = "grpo") -> list[Cell]:
    """Every task with every sampler, the two learning rates in turns so that each task and sampler has both."""
    return [
        Cell(task, sampler, rate, algorithm)
        for row, task in enumerate(tasks)
        for sampler, rate in zip(samplers, cycle((SLOW, FAST) if row % 2 else (FAST, SLOW)), strict=False)
    ]


def in_rounds(tasks: list[str], samplers: list[str], algorithm: str = "grpo") -> list[Cell]:
    """The same in another order: all tasks in turns, each with its own order of the samplers."""
    return [
        Cell(task, samplers[(turn + 2 * row) % len(samplers)], SLOW if (turn + row) % 2 else FAST, algorithm)
        for turn in range(len(samplers))
        for row, task in enumerate(tasks)
    ]


def arms_of(cell: Cell, names: list[str]) -> list[Arm]:
    """Arms that differ in a cell: in step, no correction is on-policy; TRL has none of its own for RLOO."""
    same = {"none"} if cell.sampler == "in step" else set()
    same |= {"trl"} if cell.algorithm == "rloo" else set()
    return [ARMS[name] for name in names if name not in same]


def runs_of(cells: list[Cell], names: list[str], seeds: list[int]) -> list[Run]:
    return [Run(arm, cell, seed) for seed in seeds for cell in cells for arm in arms_of(cell, names)]


# In this order, so that the first cells are a stale, a rounding and a healthy one
JUDGED_SAMPLERS = ["lag 16", "burst", "in step", "lag 8", "fp8 cache", "lag 8, burst", "int8 weights"]
# What is published with three seeds
CORE = [Cell("running_sum", "lag 16", FAST), Cell("reverse", "lag 8", FAST), Cell("shift_moe", "lag 8, burst", SLOW)]


def tuning(smoke: bool = False) -> list[Run]:
    """Cells for the choice of settings: those with a stale and a broken sampler."""
    if smoke:
        return [Run(ARMS[name], Cell("sort", "lag 8"), steps=10) for name in ("on_policy", "none", "auto")]
    samplers = ["lag 8", "lag 16", "lag 8, burst"]
    return [
        *runs_of(balanced(["copy_noise", "sort"], samplers), TUNED, [0]),
        *runs_of(balanced(["walk", "add"], samplers), SHORTLIST, [0]),
        *runs_of(
            [Cell("sort", "lag 16", FAST), Cell("copy_noise", "lag 16"), Cell("add", "lag 16", FAST)], _LAST, [1, 2]
        ),
    ]


# What was left to choose from, with more seeds where the sampler is furthest behind
_LAST = ["tv_kl2", "tv_up10", "tv_up5"]


def judging(smoke: bool = False) -> list[Run]:
    """Cells for judging alone: every task with every sampler, some of them with RLOO, and a core with more seeds."""
    if smoke:
        return tuning(smoke)
    return [*runs_of(judged_cells(), JUDGED, SEEDS[:1]), *runs_of(CORE, JUDGED, SEEDS[1:])]


def judged_cells() -> list[Cell]:
    """Five of the seven samplers of each task with GRPO, and one of RLOO after five of them."""
    grpo = in_rounds(JUDGING, JUDGED_SAMPLERS)
    rloo = in_rounds(JUDGING, ["lag 8", "lag 16", "fp8 cache"], "rloo")
    return [cell for turn in range(3) for cell in (*grpo[5 * turn : 5 * turn + 5], rloo[turn])]


def full(smoke: bool = False) -> list[Run]:
    """Everything, for whoever has more cores."""
    if smoke:
        return tuning(smoke)
    rates = SLOW, FAST
    cells = [Cell(*parts) for parts in product(TUNING + JUDGING, SAMPLERS, rates, ("grpo", "rloo"))]
    return runs_of(cells, JUDGED, SEEDS)


STAGES = {"tuning": tuning, "judging": judging, "full": full}
