"""All that the benchmarks of the language model take from inside the package, in one place."""

import sys
from pathlib import Path

from trl_rollout_corr.diagnosis import diagnose, read_tokens


sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))

from faults import FAULTS, sampling_from, training_on
from faults.models import merged


__all__ = ["FAULTS", "diagnose", "merged", "read_tokens", "sampling_from", "training_on"]
