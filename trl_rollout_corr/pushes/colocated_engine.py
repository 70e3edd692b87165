"""A colocated vLLM that scores texts, and that tells what it takes from its cache of prefixes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce, wraps
from typing import Any
from unittest.mock import patch


# Tokens whose logits vLLM computes at once while it scores a text, in float32 and twice. No training step has those of
# a long completion
AT_ONCE = 64
# Method of vLLM's first runner with the log-probabilities of prompts; its second one computes them otherwise
OF_PROMPTS = "_get_prompt_logprobs_dict"


def noting_cached(llm: Any, tell: Callable[[int], None]) -> None:
    """
    Let `tell` know how many tokens of its prompt the next request of a colocated vLLM reads from the cache of
    prefixes. After a push that has cleared the cache there are none, because nothing has filled it.

    `tell` hears nothing where something else may have filled the cache: if the request asks for several completions,
    which read the prompt that the first of them has computed; if other requests are under way; or if vLLM does not
    take requests in the order in which they come.
    """
    engine = llm.llm_engine
    # a second push before the next request replaces what watches for it
    add_request, step = (getattr(method, "when_noted", method) for method in (engine.add_request, engine.step))
    engine.add_request, engine.step = add_request, step
    if engine.has_unfinished_requests() or engine.vllm_config.scheduler_config.policy != "fcfs":
        return

    def noted(method: Any, watch: Callable[..., Any]) -> Any:
        watching: Any = wraps(method)(watch)
        watching.when_noted = method
        return watching

    def added(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        engine.add_request = add_request
        if getattr(params, "n", None) == 1:
            engine.step = noted(step, lambda: read(request_id))
        return add_request(request_id, prompt, params, *args, **kwargs)

    def read(request_id: str) -> Any:
        outputs = step()
        for output in outputs:
            if output.request_id == request_id:
                engine.step = step
                if output.num_cached_tokens:
                    tell(int(output.num_cached_tokens))
        return outputs

    engine.add_request = noted(add_request, added)


def score_in_process(generation: Any, texts: list[list[int]]) -> list[list[float]]:
    """
    Log-probability of each token but the first of some texts, from the engine of a
    [`~trl.generation.vllm_generation.VLLMGeneration`]. It neither reads its prefix cache nor fills it for other
    requests.
    """
    from vllm import SamplingParams

    if generation.enable_sleep_mode:
        generation.llm.wake_up(tags=["kv_cache"])  # TRL woke the weights, and wakes the rest before it generates
    llm = getattr(generation.llm, "_llm", generation.llm)  # without the recorder of routes
    # vLLM computes a prompt again to return its log-probabilities. The salt keeps later requests from reading this
    # prompt
    prompts = [{"prompt_token_ids": text, "cache_salt": "scored once more"} for text in texts]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with in_slices(llm) or nullcontext():
        outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
    return [
        [places[token].logprob for token, places in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
        for text, output in zip(texts, outputs, strict=True)
    ]


def in_slices(llm: Any) -> AbstractContextManager[Any] | None:
    """
    Context in which a colocated vLLM computes the logits of at most `AT_ONCE` tokens of a text at once; `None` if it
    cannot be made to. It then reads at most as many tokens in a step, if it may read a prompt in parts. Otherwise it
    reads a prompt as a whole, and computes logits in parts.
    """
    engine = llm.llm_engine
    scheduler = _part(engine, "engine_core", "engine_core", "scheduler")
    runner = _part(engine, "model_executor", "driver_worker", "model_runner")
    in_a_step = getattr(scheduler, "max_num_scheduled_tokens", None)
    if in_a_step is None:
        return None
    if in_a_step <= AT_ONCE:
        return nullcontext()
    if scheduler.scheduler_config.enable_chunked_prefill:
        return patch.object(scheduler, "max_num_scheduled_tokens", AT_ONCE)
    method = getattr(runner, OF_PROMPTS, None)
    return None if method is None else patch.object(runner, OF_PROMPTS, partial(_in_parts, runner, method))


def _part(whole: Any, *path: str) -> Any:
    return reduce(lambda part, name: getattr(part, name, None), path, whole)


def _in_parts(
    runner: Any, method: Callable[..., dict[str, Any]], hidden_states: Any, scheduled: Mapping[str, int]
) -> dict[str, Any]:
    """
    Log-probabilities of prompts from a runner of vLLM, a part of one prompt at a time. `scheduled` gives the number of
    tokens of each request in this step. A runner that is told of fewer tokens takes them for a part of the prompt.
    """
    found: dict[str, Any] = {}
    for name in [name for name in runner.num_prompt_logprobs if name in scheduled]:
        request, n = runner.requests[name], scheduled[name]
        before = request.num_computed_tokens
        try:
            for start in range(0, n, AT_ONCE):
                request.num_computed_tokens = before + start
                found |= method(hidden_states[start:], {name: min(AT_ONCE, n - start)})
        finally:
            request.num_computed_tokens = before
    return found
