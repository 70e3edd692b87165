"""Asynchronous GRPO with rollout correction."""
