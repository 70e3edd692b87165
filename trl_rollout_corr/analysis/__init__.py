"""
The commands after a run: `compare` replays presets on a dump, `report` draws a run. Nothing is imported here, so that every
command loads only the modules that it needs.

Data flows one way: `run` reads; `replay`, `spread` and `recommend` compute; `compare` and `report` write.
"""
