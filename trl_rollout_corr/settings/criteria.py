"""What can be asked for: levels of the weights, and rejection criteria. No torch here."""

from typing import TYPE_CHECKING, Literal, NamedTuple


# Choices are spelt out for editors and type checkers. While a program runs they are text: argparse would take a `Literal`
# for all that a command line may say, and refuse "none" and what presets fill in. `tests/test_types.py` compares the two.
if TYPE_CHECKING:
    Level = Literal["token", "sequence", "geometric"]
    CriterionName = Literal[
        "token_k1", "token_k2", "token_k3",
        "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        "seq_max_k1", "seq_max_k2", "seq_max_k3",
        "token_tv", "token_kl", "token_binary_kl",
    ]  # fmt: skip
else:
    Level = CriterionName = str

LEVELS = ("token", "sequence", "geometric")
SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("k1", "k2", "k3")
# Of the probabilities of a token rather than of their ratio. The first two look at the sign of the advantage.
DIRECTED, TOKEN_ONLY = ("tv", "kl"), ("tv", "kl", "binary_kl")
CRITERIA = (
    *(f"{scope}_{divergence}" for scope in SCOPES for divergence in DIVERGENCES),
    *(f"token_{divergence}" for divergence in TOKEN_ONLY),
)
# Names of criteria in the pull request that brought rejection to verl, and today's
FIRST_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


class Criterion(NamedTuple):
    """
    A rejection rule: keep what has `lower <= statistic <= upper`.

    Args:
        scope (`str`):
            `"token"`, or how the tokens of a sequence are reduced to one statistic: `"seq_sum"`, `"seq_mean"`,
            `"seq_max"`.
        divergence (`str`):
            Per-token statistic, see [`~trl_rollout_corr.correction.functional.token_divergence`] and
            [`~trl_rollout_corr.correction.functional.probability_divergence`].
        lower (`float`):
            Lower bound, in units of the statistic; `-inf` for none.
        upper (`float`):
            Upper bound, in units of the statistic.
    """

    scope: str
    divergence: str
    lower: float
    upper: float

    @property
    def name(self) -> str:
        return f"{self.scope}_{self.divergence}"

    @property
    def signed(self) -> bool:
        """Whether the statistic may be negative, so that there is a lower bound."""
        return self.divergence == "k1" or self.directed

    @property
    def directed(self) -> bool:
        """Whether it rejects only where the advantage pushes further in the direction of the change."""
        return self.divergence in DIRECTED

    @property
    def by_token(self) -> bool:
        """Whether it rejects single tokens, and not whole sequences."""
        return self.scope == "token"
