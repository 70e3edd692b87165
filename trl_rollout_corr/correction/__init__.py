"""The mathematics: importance weights, rejection, and sums for metrics. It needs only torch."""
