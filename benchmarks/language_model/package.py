"""All that the benchmarks of the language model take from inside the package, in one place."""

from trl_rollout_corr.analysis.diagnose import diagnose, observe
from trl_rollout_corr.analysis.diagnose.signatures import DIFFUSE, STAGES
from trl_rollout_corr.faults import FAULTS, training_on
from trl_rollout_corr.faults.models import merged


SIGNATURES = [signature for stage in (*STAGES, *DIFFUSE) for signature in stage.signatures]

__all__ = ["FAULTS", "SIGNATURES", "diagnose", "merged", "observe", "training_on"]
