"""
The command `trl-rollout-corr diagnose`: the cause of the gap between trainer and sampler, its certainty and share, and
the remedy. It works on arrays of numpy and needs no TRL.

`loading` reads a dump and the log of its run into `observed`, which holds the tokens. `causes` lists one record per
cause, and `other_causes` those of harm without a gap. The tests of the causes are in `wrong_values`, `positions`,
`subsets`, `arrivals`, `changes`, `drift`, `sampling` and `precision`, and use the statistics in `measures` and
`trends`. `location` finds the completions, turns and prompts that cause the whole gap. `ranking` searches, and `text`
writes the answer. For a run without a dump, `trl_log` reads the log of its trainer. `command` chooses between the two.
"""

from .loading import read_tokens
from .observed import DumpedTokens
from .ranking import Diagnosis, Finding, diagnose


__all__ = ["Diagnosis", "DumpedTokens", "Finding", "diagnose", "read_tokens"]
