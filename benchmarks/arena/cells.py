"""
What is compared, as data: ways to correct, and the situations they are tried in. No torch here.

A *cell* is a situation: task, sampler, learning rate and algorithm. An *arm* is a way to correct. The full grid of both is
some thousand runs; `CELLS` is a fraction of it, balanced so that every task meets every kind of sampler class and each
learning rate, and every arm is tried in the same cells.
"""

from dataclasses import dataclass, field
from itertools import cycle
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
        return f"{self.cell.task} {self.sampler.get('engine', 'auto')}"  # a model has its own engine

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the outcome, apart from the seed. As it is read back from JSON."""
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
    )
}  # fmt: skip
# What is tried on the tuning tasks.
TUNED = ["on_policy", "none", "trl", "token_is", "icepop", "geo_wide", "bypass", "dppo", "token_tv", "token_kpop"]


def balanced(tasks: list[str], samplers: list[str], algorithm: str = "grpo") -> list[Cell]:
    """Every task with every sampler, the two learning rates in turns so that each task and sampler has both."""
    return [
        Cell(task, sampler, rate, algorithm)
        for row, task in enumerate(tasks)
        for sampler, rate in zip(samplers, cycle((SLOW, FAST) if row % 2 else (FAST, SLOW)), strict=False)
    ]


# By the hash of their names, see `tasks.py`, which imports torch.
TUNING, JUDGING = ["copy_noise", "sort", "walk", "add"], ["running_sum", "reverse", "shift_moe"]


def tuning(smoke: bool = False) -> list[Run]:
    """All arms, where settings may be chosen: the cells with a stale, a rounding and a broken sampler."""
    if smoke:
        return [Run(ARMS[name], Cell("sort", "lag 8"), steps=10) for name in ("on_policy", "none", "token_is")]
    cells = balanced(TUNING, ["lag 8", "lag 16", "lag 8, burst"])
    return [Run(ARMS[name], cell) for cell in cells for name in TUNED]


STAGES = {"tuning": tuning}
