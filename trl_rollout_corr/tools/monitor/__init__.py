"""Rules about logged metrics, and their findings. Only the callback imports torch."""
