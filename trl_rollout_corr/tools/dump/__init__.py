"""Sampled sequences on disk: their format, their writer and their reader."""
