"""
Faults of a pipeline, at least one for each cause that `diagnose` knows. They go into the real engine and the real model where
that is possible, and into the rows of a dump where it is not. vLLM is only an object that is passed in.

    import faults  # with benchmarks/diagnose on the path

    fault = faults.FAULTS["int8_weights"]
    llm = LLM(model, **fault.engine)
    params = SamplingParams(**fault.sampling)
    with faults.sampling_from(llm, weights, fault), faults.training_on(model, fault):
        ...                                              # sample and score
    faults.rewrite("outputs/dump", "broken", "one_token_shift")

`catalog` has the faults as data, `rows` the changes of a dump's rows, `models` those of weights and forward passes.
"""

from .catalog import FAULTS, rewrite
from .fault import Fault
from .models import sampling_from, training_on


__all__ = ["FAULTS", "Fault", "rewrite", "sampling_from", "training_on"]
