"""A colocated vLLM that scores texts."""

from typing import Any


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
