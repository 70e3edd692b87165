"""Train TRL's trainers and ours on the same completions, and look at what came out."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.tiny import StaleSampler, length_reward, prompts


# (gradient_accumulation_steps, steps_per_generation, num_iterations)
SCHEDULES = {
    "aligned": (2, 2, 1),
    "several generations per step": (4, 2, 1),
    "several steps per generation": (2, 4, 1),
    "not a multiple": (3, 2, 1),
    "two iterations": (2, 2, 2),
    "two iterations within a step": (4, 2, 2),
}
# Schedules in which every sample is visited before the first update since its generation
VISITED_BEFORE_UPDATE = [name for name, (ga, spg, _) in SCHEDULES.items() if ga % spg == 0]


def config_fields(output_dir, schedule: str = "aligned", **fields) -> dict[str, Any]:
    accumulation, per_generation, iterations = SCHEDULES[schedule]
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
        **fields,
    }


def build(trainer_class, config_class, model, folder, *, sampler=None, schedule="aligned", extra=None, **fields):
    """A trainer on the tiny model. `extra` are arguments of the trainer, `fields` those of its configuration."""
    arguments = {"reward_funcs": length_reward, "train_dataset": prompts(64), **(extra or {})}
    if sampler is not None:
        arguments["rollout_func"] = sampler
    fields = config_fields(**{"output_dir": folder, "schedule": schedule, **fields})
    return trainer_class(model, args=config_class(**fields), **arguments)


def losses(trainer) -> list[tuple[float, float]]:
    """Train, and return loss and gradient norm of each step."""
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def logged(trainer, key: str) -> list[float]:
    return [entry[f"rollout_corr/{key}"] for entry in trainer.state.log_history if f"rollout_corr/{key}" in entry]


@contextmanager
def counting_forwards(trainer):
    """Counts forward passes of the policy, in chunks as TRL makes them."""
    count = {"forwards": 0}

    def hook(*_):
        count["forwards"] += 1

    handle = trainer.model.register_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


def gradients(trainer, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of TRL's loss on one micro-batch."""
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def micro_batches(trainer) -> list[dict[str, Any]]:
    """The first generation batch, split as in training."""
    torch.manual_seed(0)  # TRL shuffles
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    generation_batch = next(iter(trainer.get_train_dataloader()))
    trainer._prepare_inputs(generation_batch)
    return trainer._buffered_inputs


class BrokenSampler(StaleSampler):
    """A sampler whose log-probabilities are changed by a function before they are returned."""

    def __init__(self, model_path: str, change: Callable[[dict], None], **kwargs):
        super().__init__(model_path, **kwargs)
        self.change = change

    def sample(self, *args, **kwargs) -> dict:
        output = super().sample(*args, **kwargs)
        self.change(output)
        return output
