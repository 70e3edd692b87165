"""The mathematics: importance weights, rejection, and sums for metrics. Torch alone."""
