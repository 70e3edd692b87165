"""A colocated vLLM that scores texts, and that tells what it takes from its cache of prefixes."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def noting_cached(llm: Any, tell: Callable[[int], None]) -> None:
    """
    Let `tell` know, at the next generation of a colocated vLLM, how many tokens of the first prompt
    came from the cache of prefixes. After a push that has cleared the cache there are none: no
    request of the same generation was before the first.
    """
    llm = getattr(llm, "_llm", llm)  # without the recorder of routes
    generate = getattr(llm.generate, "once_noted", llm.generate)

    @wraps(generate)
    def noted(*args: Any, **kwargs: Any) -> Any:
        llm.generate = generate
        outputs = generate(*args, **kwargs)
        if outputs and outputs[0].num_cached_tokens:
            tell(int(outputs[0].num_cached_tokens))
        return outputs

    noted.once_noted = generate  # type: ignore[attr-defined]  # a second push before the next generation replaces it
    llm.generate = noted


def score_in_process(generation: Any, texts: list[list[int]]) -> list[list[float]]:
    """
    Log-probability of each token but the first of some texts, from the engine of a
    [`~trl.generation.vllm_generation.VLLMGeneration`]. It neither reads its prefix cache nor fills
    it for other requests.
    """
    from vllm import SamplingParams

    if generation.enable_sleep_mode:
        generation.llm.wake_up(tags=["kv_cache"])  # TRL woke the weights, and wakes the rest before it generates
    llm = getattr(generation.llm, "_llm", generation.llm)  # without the recorder of routes
    # vLLM computes a prompt again to return its log-probabilities. The salt keeps later requests
    # from reading this prompt
    prompts = [{"prompt_token_ids": text, "cache_salt": "scored once more"} for text in texts]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
    return [
        [places[token].logprob for token, places in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
        for text, output in zip(texts, outputs, strict=True)
    ]
