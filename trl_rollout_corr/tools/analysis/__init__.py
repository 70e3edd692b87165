"""
The commands after a run: `compare` computes presets again on a dump, and `report` draws a run. This file imports
nothing, so that every command loads only the modules that it needs.

Data flows one way: `run` reads, `recompute` computes, and `compare` and `report` write.
"""
