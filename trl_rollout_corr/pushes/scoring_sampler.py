"""The sampler of a trainer as one that scores texts: an engine in the process, or a server."""

from typing import Any

from ..trainers.metadata import part_of
from .colocated_engine import in_slices, score_in_process
from .server_api import replicas_of, score_on_server


OF_SERVER = 256  # tokens


class ScoringSampler:
    """The sampler that gets the `pushes` ([`~trl_rollout_corr.pushes.pushes.Pushes`]) of a trainer."""

    def __init__(self, pushes: Any) -> None:
        self.pushes = pushes

    def score(self, texts: list[list[int]], look: int) -> list[list[float]]:
        """
        Log-probability, in nats, of each token but the first of some texts, without options of sampling. Only the main
        process asks a server. The number of the `look` decides which replica begins.
        """
        if not texts:
            return []
        if self.pushes.engine is not None:
            return score_in_process(self.pushes.engine, texts)
        if self.pushes.server is None:
            return []
        # one request per text, to reach all replicas behind an address, in turns if they are known
        server, model, n = self.pushes.server, self.pushes.served_model, self.replicas
        numbered = enumerate(texts, look * len(texts))
        return [score_on_server(server, model, text, i % n if n > 1 else None) for i, text in numbered]

    @property
    def replicas(self) -> int:
        """Number of engines that sample, and have weights of their own, for this rank."""
        return 1 if self.pushes.server is None else replicas_of(self.pushes.engine_config)

    @property
    def longest(self) -> int | None:
        """Most tokens that the sampler can read; `None` if unknown."""
        length: int | None = part_of(self.pushes.engine_config, "model_config", "max_model_len")
        return length

    @property
    def at_once(self) -> int | None:
        """
        Most tokens of a text that a server should read, because it computes the logits of all of them: 256, or as many
        as it has reserved memory for, one for each request that it serves at the same time. `None` for an engine in
        the process, which computes them in slices.
        """
        if self.pushes.engine is not None:
            return None
        return max(part_of(self.pushes.engine_config, "scheduler_config", "max_num_seqs") or 0, OF_SERVER)

    @property
    def doubt(self) -> str:
        """A reason why log-probabilities of a text are missing or wrong, or an empty text."""
        if self.pushes.reads_images:
            return "a text that is scored once more cannot have images"
        if part_of(self.pushes.engine_config, "speculative_config") is not None:
            return "vLLM's log-probabilities of a prompt are wrong with `speculative_config`"
        if self.pushes.engine is not None and in_slices(self.pushes.engine.llm) is None:
            return "vLLM would compute the logits of a whole text at once, which may need more memory than training"
        return ""
