"""What `benchmarks/exact` counted over all completions of small spaces, as data."""

from bisect import bisect_right
from typing import NamedTuple


class GivenUp(NamedTuple):
    """
    Cosine with the true gradient that a batch of 256 completions gives up against the preset that has most of it, at the
    length where that is largest.

    Args:
        token_weights (`float`):
            Under `decoupled_token_is`.
        nothing (`float`):
            Without a correction.
    """

    token_weights: float
    nothing: float


# By the lower end of the gap `s`, in nats. Rounded up, from the alignments in `benchmarks/exact/results.json`.
_GIVEN_UP = {
    0.0: GivenUp(0.0001, 0.0002),
    0.01: GivenUp(0.0003, 0.0008),
    0.03: GivenUp(0.0007, 0.0031),
    0.1: GivenUp(0.0055, 0.0162),
    0.3: GivenUp(0.0064, 0.0492),
    1.0: GivenUp(0.0001, 0.0538),
}


def given_up(s: float) -> GivenUp:
    """
    What token weights and no correction give up at a gap.

    Args:
        s (`float`):
            Root mean square of the log-ratio of a token, in nats.

    Returns:
        [`GivenUp`].
    """
    lower_ends = list(_GIVEN_UP)
    return _GIVEN_UP[lower_ends[bisect_right(lower_ends, s) - 1]]
