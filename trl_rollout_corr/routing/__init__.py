"""Routing replay: the trainer takes the experts that the sampler chose, in a mixture of experts. Torch only."""
