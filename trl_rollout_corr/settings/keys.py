"""Start of every key that is logged."""

PREFIX = "rollout_corr/"
