"""A model and its sampler, measured before training: `diagnose --probe`."""
