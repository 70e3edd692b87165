"""Rules about logged metrics, and their findings. No torch here."""
