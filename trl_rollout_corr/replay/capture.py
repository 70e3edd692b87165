"""Experts that a colocated vLLM returns with its completions."""

from typing import Any

from .sampled_experts import SampledRoutes


class RecordingEngine:
    """vLLM's engine that keeps the routes of its completions. A `ValueError` if it returns none."""

    def __init__(self, llm: Any, routes: SampledRoutes) -> None:
        self._llm, self._routes = llm, routes
        config = llm.llm_engine.vllm_config
        places = (getattr(config, "aux_output_config", None), config.model_config)  # by release of vLLM
        if not any(getattr(place, "enable_return_routed_experts", False) for place in places):
            raise ValueError(
                "`rollout_routing` is 'replay', but vLLM does not return its routes. Set `rollout_engine_kwargs: "
                "{enable_return_routed_experts: true}`, or `rollout_routing` to None. On a CPU vLLM cannot return "
                "them."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._llm.generate(*args, **kwargs)
        for output in outputs:
            for completion in output.outputs:
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                self._routes.try_keep(tokens, completion.routed_experts)
        return outputs
