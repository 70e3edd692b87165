"""
What happens after the run: the work of `trl-rollout-corr`. Nothing is imported here, so that every command loads
only what it needs.

`convert` translates settings of other tools, `compare` replays presets on a dump, `report` draws a run. Data flows one way:
`reading`, `run` and `settings` read; `replay`, `spread` and `report` compute; `text` writes numbers down.
"""
