"""
The seams to TRL in a training step: off, it equals TRL's bit for bit; on, its gradient is that of the formula.

    python benchmarks/seams.py MODEL

Trainers of one process share a real vLLM engine, which answers prompts that it knows with the samples of before, so that all
train on the same. Equal means equal losses, gradient norms and weights. Of the gradient, three distances to the formula are
told, as shares of its size: that of the trainer, that of the formula itself when each completion is computed alone, without
padding, and that of the formula without weights.
"""

import functools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import step
import torch
from datasets import Dataset
from trl.generation import vllm_generation

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


WEIGHTED = {"rollout_correction": "decoupled_token_is", "rollout_is_threshold": 2.0, "loss_type": "grpo"}
RUNS = {"trl": "grpo, no correction", "trl again": "grpo, no correction", "off": "grpo, measured"}


def remember_samples(
    noise: float = 0.0, seconds: Callable[[], float] = time.perf_counter, **engine: Any
) -> list[float]:
    """
    Make the trainers of this process share an engine that samples only for prompts that it does not know.

    Args:
        noise (`float`, *optional*, defaults to 0.0):
            Standard deviation of an error of the log-probabilities that it reports, in nats, so that weights are not 1.
        seconds (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`):
            A clock.
        engine:
            Arguments of the engine.

    Returns:
        `list[float]`: seconds of each sampling, filled as trainers sample.
    """
    step.share_one_engine(**engine)
    build, took, dice = vllm_generation.LLM, [], random.Random(0)

    @functools.cache
    def remembering(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():  # the first trainer draws what the others draw
            llm = build(*args, **kwargs)
        generate, known = llm.generate, {}

        def answer(prompts: list, **options: Any) -> Any:
            key = tuple(tuple(prompt["prompt_token_ids"]) for prompt in prompts)
            if key not in known:
                start = seconds()
                with torch.random.fork_rng():
                    known[key] = generate(prompts, **options)
                took.append(seconds() - start)
                for token in (x for request in known[key] for out in request.outputs for x in out.logprobs if noise):
                    for entry in token.values():
                        entry.logprob = min(entry.logprob + dice.gauss(0, noise), 0.0)
            return known[key]

        llm.generate = answer
        return llm

    vllm_generation.LLM = remembering
    return took


class ComparingTrainer(RolloutCorrectedGRPOTrainer):
    """Compares the gradient of its first micro-batch with the formula."""

    distances: dict[str, float] | None = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.distances is None:
            rows = range(len(inputs["completion_ids"]))
            true = gradient(model, formula(model, inputs))
            others = {
                "of_trainer": gradient(model, loss),
                "of_formula_alone": sum(gradient(model, formula(model, only(inputs, i))) for i in rows) / len(rows),
                "without_weights": gradient(model, formula(model, inputs, weighted=False)),
            }
            self.distances = {name: float((x - true).norm() / true.norm()) for name, x in others.items()}
        return loss


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([x.flatten().float() for x in torch.autograd.grad(loss, parameters, retain_graph=True)])


def formula(model: Any, batch: dict[str, Any], weighted: bool = True) -> torch.Tensor:
    """The loss of `WEIGHTED`: the mean over completions of the mean over tokens of `-w A logp`, with `w` at most 2."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask, width = batch["completion_mask"], batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1].float()
    logps = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    weights = (logps.detach() - batch["sampling_per_token_logps"]).exp().clamp(max=2.0) if weighted else 1.0
    return (-weights * batch["advantages"][:, None] * logps * mask).sum(1).div(mask.sum(1)).mean()


def only(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """One completion of a batch, without padding."""
    start, end = (batch[f"{side}_mask"][row].sum() for side in ("prompt", "completion"))
    prompt = {key: batch[key][row : row + 1, batch[key].shape[1] - start :] for key in ("prompt_ids", "prompt_mask")}
    rest = ("completion_ids", "completion_mask", "sampling_per_token_logps")
    completion = {key: batch[key][row : row + 1, :end] for key in rest}
    return {**prompt, **completion, "advantages": batch["advantages"][row : row + 1]}


def compare(model: str, prompts: Dataset, steps: int, length: int, engine: dict[str, Any], **fields: Any) -> dict:
    """
    Both comparisons.

    Args:
        model (`str`):
            Folder of the model.
        prompts (`Dataset`):
            Prompts.
        steps (`int`):
            Optimizer steps of the comparison with TRL.
        length (`int`):
            Tokens of a completion.
        engine (`dict`):
            Arguments of the engine.
        fields:
            Fields of the trainers, such as `use_cpu` and `bf16`.

    Returns:
        `dict`: `off_equals_trl`, `trl_equals_itself`, and the three distances.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    remember_samples(noise=0.3, **engine)
    step.CONTESTANTS["weighted"] = (ComparingTrainer, RolloutCorrectedGRPOConfig, WEIGHTED)
    fields = {"learning_rate": 1e-5, "gradient_checkpointing": False, "dataset": prompts, **fields}
    runs = {}
    for run, name in RUNS.items():
        trainer, _ = step.build(name, model, length, 8, steps, **fields)
        trainer.train()
        logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        runs[run] = logged, {key: x.detach().cpu() for key, x in trainer.model.state_dict().items()}

    def equal(one: str, other: str) -> bool:
        (logged, weights), (expected, others) = runs[one], runs[other]
        return logged == expected and all(weights[name].equal(x) for name, x in others.items())

    trainer, _ = step.build("weighted", model, length, 8, 1, **fields, rollout_monitor=None)
    trainer.train()
    found = {"off_equals_trl": equal("off", "trl"), "trl_equals_itself": equal("trl again", "trl")}
    return {"steps": steps, **found, **trainer.distances}


if __name__ == "__main__":
    texts = Dataset.from_dict({"prompt": [f"What is {i} + {i}?" for i in range(64)]})
    print(compare(sys.argv[1], texts, 3, 16, {}, use_cpu=True, bf16=False))
