"""
Faults of a pipeline, one for each cause that `diagnose` knows, to be injected on purpose: into the real engine and the real
model where that can be done, into what was sampled where not. No TRL here, and vLLM only as an object that is handed in.

    from trl_rollout_corr import faults

    fault = faults.FAULTS["int8_weights"]
    llm = LLM(model, **fault.engine)                     # what the sampler is started with
    params = SamplingParams(**fault.sampling)            # what it is asked for
    with faults.sampling_from(llm, weights, fault), faults.training_on(model, fault):
        ...                                              # sample and score
    faults.rewrite("outputs/dump", "broken", "one_token_shift")

`catalog` has the faults as data, `rows` those of sampled tokens, `models` those of weights and forward passes.
"""

from .catalog import FAULTS, Fault
from .models import sampling_from, training_on
from .rows import rewrite


__all__ = ["FAULTS", "Fault", "rewrite", "sampling_from", "training_on"]
