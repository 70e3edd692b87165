"""The diagnosis of a model and its sampler before any training: the command `probe`."""
