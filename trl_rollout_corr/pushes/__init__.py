"""Pushes of weights to the sampler, and the checks that they arrive."""
