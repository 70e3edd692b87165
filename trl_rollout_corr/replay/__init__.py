"""Choices of the sampler that the trainer makes again in its own forward passes."""
