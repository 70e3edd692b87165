"""The trainers. TRL is imported here only."""
