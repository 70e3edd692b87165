"""
The command `trl-rollout-corr compare`: presets computed again on a dump. This file imports nothing, so that a command
loads only the modules that it needs: `recompute` computes, which `report` reads too, and `compare` writes.
"""
