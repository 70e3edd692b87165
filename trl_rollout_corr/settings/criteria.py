"""Levels and bounds of the importance weights, and rejection criteria. It imports no torch."""

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args


Level = Literal["token", "window", "turn", "sequence", "geometric"]
CriterionName = Literal[
    "token_k1", "token_k2", "token_k3",
    "turn_sum_k1", "turn_sum_k2", "turn_sum_k3",
    "turn_mean_k1", "turn_mean_k2", "turn_mean_k3",
    "turn_max_k1", "turn_max_k2", "turn_max_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
    "token_tv", "token_kl", "token_binary_kl", "seq_mean_tv", "seq_mean_binary_kl",
]  # fmt: skip
LEVELS: tuple[str, ...] = get_args(Level)
CRITERIA: tuple[str, ...] = get_args(CriterionName)
if not TYPE_CHECKING:  # for editors and type checkers only: for a `Literal`, argparse would refuse "none"
    Level = CriterionName = str

# Tokens of a window. Rounding of BF16, with a `k3_kl` of 0.001, scatters the product of 16 ratios by 0.18 nats, and
# FP8, with 0.014, by 0.67, whatever the length of a completion.
WINDOW = 16

SCOPES = ("token", "turn_sum", "turn_mean", "turn_max", "seq_sum", "seq_mean", "seq_max")
# Divergences between the two probabilities of a token instead of their ratio. At token level, the first two depend on
# the sign of the advantage.
DIRECTED, OF_PROBABILITIES = ("tv", "kl"), ("tv", "kl", "binary_kl")
# Names of criteria in verl's first pull request about rejection, and today's names
FIRST_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


class Criterion(NamedTuple):
    """
    A rejection rule: tokens, turns or sequences with `lower <= statistic <= upper` are kept. The divergence is the
    statistic of a token, see [`~trl_rollout_corr.correction.functional.token_divergence`] and
    [`~trl_rollout_corr.correction.functional.probability_divergence`].
    """

    scope: str  # "token"; or sum, mean or maximum over the tokens of a turn or a sequence: "turn_sum", "seq_max", ...
    divergence: str
    lower: float  # in units of the statistic, -inf for none
    upper: float  # in units of the statistic

    @property
    def name(self) -> str:
        return f"{self.scope}_{self.divergence}"

    @property
    def directed(self) -> bool:
        """`True` if the rule rejects only tokens that an update would move further away."""
        return self.scope == "token" and self.divergence in DIRECTED

    @property
    def unit(self) -> str:
        """What the rule keeps or rejects as a whole: `"token"`, `"turn"` or `"seq"`."""
        return self.scope.partition("_")[0]


class Bounding(NamedTuple):
    """Level and bounds of the importance weights."""

    level: str  # one of `LEVELS`
    lower: float | None  # None for truncation
    upper: float
    clamps: bool  # whether weights outside the bounds are moved to the nearest bound, instead of being set to 0
    normalized: bool  # whether the weights are divided by their mean afterwards
    positive: tuple[float, float] | None = None  # bounds for positive advantages, if they differ
    stale_only: bool = False  # whether a completion of the newest weights has the weight 1

    @property
    def unit(self) -> str:
        """What gets one weight: `"token"`, `"turn"` or `"seq"`."""
        return {"token": "token", "window": "token", "turn": "turn"}.get(self.level, "seq")

    @property
    def drops(self) -> bool:
        """`True` if weights outside the bounds are set to 0 (IcePop)."""
        return self.lower is not None and not self.clamps

    @property
    def is_monotone(self) -> bool:
        """`True` if the weight of a token never decreases as its log-ratio grows."""
        return self.level == "token" and not self.drops and not self.directed and not self.stale_only

    @property
    def directed(self) -> bool:
        """`True` if the bounds depend on the sign of the advantage."""
        return self.positive is not None
