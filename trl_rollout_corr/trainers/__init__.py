"""The trainers. TRL is imported here and in `sampler.py` only."""
