"""The mathematics: importance weights, rejection, and sums of what is reported. Torch alone."""
