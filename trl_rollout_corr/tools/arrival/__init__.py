"""Check that pushed weights arrive in the sampler."""
