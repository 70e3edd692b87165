"""The arms of the experiment, as data. No torch here: the process that hands out the runs does not need it."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any


# Bounds on the geometric mean of a completion's ratio. The first that were tried, not tuned.
WINDOW = [0.95, 1.05]

GEOMETRIC_AND_WEIGHTS = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": WINDOW}
DISABLED = {"rollout_correction": "disabled"}
AUTO = {"rollout_correction": "auto"}  # as in the quickstart


@dataclass(frozen=True)
class Arm:
    """
    One way to train.

    Args:
        name (`str`):
            Name in files and on the command line.
        label (`str`):
            Name in the table and the figure.
        trainer (`str`):
            Key of `TRAINERS` in `train.py`.
        options (`dict[str, Any]`, *optional*):
            Fields of the trainer's configuration.
        lag (`int`, *optional*, defaults to `8`):
            Optimizer steps that the sampler is behind the trainer.
        steps (`int`, *optional*, defaults to `120`):
            Optimizer steps.
        kv_cache_dtype (`str`, *optional*, defaults to `"auto"`):
            What vLLM stores keys and values in. `"auto"` is the type of the weights, bfloat16 by TRL's default.
    """

    name: str
    label: str
    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    lag: int = 8
    steps: int = 120
    kv_cache_dtype: str = "auto"

    @property
    def settings(self) -> dict[str, Any]:
        """Inputs of the outcome of a run, apart from the seed."""
        return {key: value for key, value in asdict(self).items() if key not in ("name", "label")}


@dataclass(frozen=True)
class Run:
    """One seed of one arm."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}_{self.seed}"

    @property
    def engine(self) -> str:
        return self.arm.kv_cache_dtype

    @property
    def settings(self) -> dict[str, Any]:
        return self.arm.settings

    @property
    def steps(self) -> int:
        return self.arm.steps


ARMS = [
    # A sampler eight steps behind
    Arm("none", "no correction", "grpo", DISABLED),
    Arm("geo_rs_tis", "geo RS + token TIS", "grpo", GEOMETRIC_AND_WEIGHTS),
    Arm("auto", "auto", "grpo", AUTO),
    Arm("on_policy", "on-policy (lag 0)", "grpo", DISABLED, lag=0),
    # The rule is that of geometric RS; which completions it rejects is left to chance
    Arm(
        "random_rs",
        "random rejection",
        "random",
        {"rollout_correction": "decoupled_geo_rs", "rollout_rs_threshold": WINDOW},
    ),
    Arm("token_tis", "token TIS", "grpo", {"rollout_correction": "decoupled_token_is"}),
    Arm("trl_default", "TRL's default", "trl"),
    Arm("bypass", "bypass", "grpo", {"rollout_correction": "bypass_ppo_clip"}),
    Arm("rloo_none", "RLOO, no correction", "rloo", DISABLED),
    Arm("rloo_auto", "RLOO, auto", "rloo", AUTO),
    Arm("rloo_geo_rs_tis", "RLOO, geo RS + token TIS", "rloo", GEOMETRIC_AND_WEIGHTS),
    # A sampler that is never behind, with keys and values in eight bits
    Arm("fp8_none", "fp8 cache, no correction", "grpo", DISABLED, lag=0, steps=160, kv_cache_dtype="fp8_e5m2"),
    Arm("fp8_auto", "fp8 cache, auto", "grpo", AUTO, lag=0, steps=160, kv_cache_dtype="fp8_e5m2"),
    Arm(
        "fp8_geo_rs_tis",
        "fp8 cache, geo RS + token TIS",
        "grpo",
        GEOMETRIC_AND_WEIGHTS,
        lag=0,
        steps=160,
        kv_cache_dtype="fp8_e5m2",
    ),
]
SEEDS = [0, 1, 2]

SMOKE_ARMS = ["none", "auto", "on_policy"]
SMOKE_STEPS = 60


def choose_runs(names: list[str], seeds: list[int], steps: int | None = None) -> list[Run]:
    """
    The runs of some arms, all arms of the first seed before the second.

    Args:
        names (`list[str]`):
            Names of arms.
        seeds (`list[int]`):
            Seeds.
        steps (`int`, *optional*):
            Optimizer steps in place of those of the arms.
    """
    arms = [arm for arm in ARMS if arm.name in names]
    return [Run(replace(arm, steps=steps or arm.steps), seed) for seed in seeds for arm in arms]
