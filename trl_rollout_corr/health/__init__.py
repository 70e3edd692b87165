"""Rules about logged metrics, and what they find. No torch here."""
