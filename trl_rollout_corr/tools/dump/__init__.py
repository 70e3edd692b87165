"""Sampled sequences on disk: how they are written and read."""
