"""
Faults of a pipeline, at least one for each cause that `diagnose` knows, as arguments of vLLM, changes of weights and forward
passes, or changes of the rows of a dump.

    fault = faults.FAULTS["int8_weights"]  # with benchmarks/diagnose on the path
    llm, params = LLM(model, **fault.engine), SamplingParams(**fault.sampling)
    with faults.sampling_from(llm, weights, fault), faults.training_on(model, fault):
        ...  # sample and score
    faults.rewrite("outputs/dump", "broken", "one_token_shift")
"""

from .catalog import FAULTS, rewrite
from .fault import Fault
from .models import sampling_from, training_on


__all__ = ["FAULTS", "Fault", "rewrite", "sampling_from", "training_on"]
