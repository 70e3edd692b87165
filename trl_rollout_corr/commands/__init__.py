"""The command `check`, and parts of training scripts."""
