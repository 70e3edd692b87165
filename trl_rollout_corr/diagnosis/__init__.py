"""
What the matter is: `trl-rollout-corr diagnose`. Which cause, how sure, what it costs, and what to do. No TRL here.

`observed` has the tokens, `signatures` the tests, `causes` what each cause is and its remedy; `ranking` puts them in order,
`pictures` shows them, and `written` writes it down.
"""

from pathlib import Path

from ..dumps.reading import open_dump
from ..messages import warn
from .observed import Observed
from .ranking import Diagnosis, Finding, diagnose


__all__ = ["Diagnosis", "Finding", "Observed", "diagnose", "observe"]


def observe(path: str | Path) -> Observed:
    """
    Read what a diagnosis looks at.

    Args:
        path (`str` or `Path`):
            A dump (folder or file), or a run with one below it.

    Returns:
        [`~trl_rollout_corr.diagnosis.observed.Observed`].

    Raises:
        `ValueError`: in one line, if there is no dump that can be read.
    """
    dump = open_dump(path)
    for damage in dump.damage:
        warn(f"{path}: {damage}.")
    return Observed(dump.sequences, dump.settings, dump.about)
