"""
The sorting task of the quickstart, trained asynchronously: a vLLM server samples on one core while the trainer learns on
another.

    make quickstart ARGS="--trainer async_grpo"                                    # corrected
    make quickstart ARGS="--trainer async_grpo --rollout_correction disabled"      # TRL's loss, on the same kind of samples
    make quickstart ARGS="--trainer async_grpo --max_staleness 16"

Every option of `RolloutCorrectedAsyncGRPOConfig` can be given. The server is started and stopped here (`serving.py`); on a
GPU the weights would go to it through NCCL, here they go through files (`async_on_cpu.py`).
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from async_on_cpu import DiskWeightTransfer, on_a_cpu
from datasets import Dataset
from serving import vllm_server
from sorting import DIGITS, accuracy, exact_answer, make_prompts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)

from trl_rollout_corr import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedAsyncGRPOTrainer


# For a CPU. vLLM cannot rewind a seeded request there, as it does for a prompt that it takes in several parts
SERVER_OPTIONS = [
    "--max-model-len", "64", "--max-num-seqs", "64", "--dtype", "float32", "--enforce-eager",
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
]  # fmt: skip
SERVER_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # whichever core the trainer leaves
}

TRAINING = {
    "output_dir": "outputs/quickstart",
    "use_cpu": True,
    "bf16": False,
    "max_completion_length": DIGITS + 1,
    "per_device_train_batch_size": 64,  # 8 prompts, 8 completions each
    "token_budget": 0,  # as many completions in every step
    "num_generations": 8,
    "max_staleness": 8,
    "queue_maxsize": 64,  # samples that wait longer get older
    "gradient_checkpointing": False,
    "max_steps": 120,
    "learning_rate": 5e-5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def as_messages(n: int, seed: int) -> Dataset:
    """The prompts of the task as conversations, which is how the rollout worker takes them."""
    prompts = make_prompts(n, seed)["prompt"]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]})


def chat_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the task, with a chat template that adds nothing, and one to read the answer with."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {"content": {"close": tokenizer.eos_token, "content": "text"}},
    }
    return tokenizer


def exact_reply(prompts: list, completions: list, **kwargs) -> list[float]:
    """Reward: that of the task, for conversations. It runs in the process of the rollout worker."""
    return exact_answer(
        [prompt[-1]["content"] for prompt in prompts], [completion[-1]["content"] for completion in completions]
    )


@dataclass
class AsyncSortingArguments:
    """
    Arguments of this example.

    Args:
        trainer (`str`, *optional*, defaults to `"async_grpo"`):
            How the quickstart names it.
        model_folder (`str`, *optional*, defaults to `".cache/quickstart/model"`):
            Where the warmed-up model is kept for the next run.
        eval_every (`int`, *optional*, defaults to `20`):
            Optimizer steps between two copies of the model that are tried on held-out prompts.
        compare (`bool`, *optional*, defaults to `False`):
            Make the same run without correction first.
    """

    trainer: Literal["async_grpo"] = field(default="async_grpo", metadata={"help": "How the quickstart names it."})
    model_folder: str = field(
        default=".cache/quickstart/model", metadata={"help": "Where the warmed-up model is kept for the next run."}
    )
    eval_every: int = field(default=20, metadata={"help": "Optimizer steps between two copies of the model to try."})
    compare: bool = field(default=False, metadata={"help": "Make the same run without correction first."})


class Snapshots(TrainerCallback):
    """
    Prints a line now and then, and keeps copies of the model. They are tried when training is over: the server would go on
    sampling meanwhile.
    """

    COLUMNS = {
        "reward": "reward",
        "KL (k3)": "rollout_corr/k3_kl",
        "mean age": "rollout_corr/staleness_mean",
        "sample size": "rollout_corr/rollout_is_eff_sample_size",
        "too old": "rollout_corr/stale_dropped/fraction",
    }

    def __init__(self, every: int):
        self.every = every
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.accuracy: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.start = 0.0

    def keep(self, step: int, model: PreTrainedModel):
        self.steps.append(step)
        self.seconds.append(time.perf_counter() - self.start)
        self.weights.append({name: weight.detach().clone() for name, weight in model.state_dict().items()})

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        print(f"\n{'step':>6} {'seconds':>9} " + " ".join(f"{name:>12}" for name in self.COLUMNS))
        self.start = time.perf_counter()
        self.keep(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self.keep(state.global_step, model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step % self.every == 0 and "loss" in logs:
            values = [logs.get(key) for key in self.COLUMNS.values()]
            columns = " ".join(f"{'-':>12}" if value is None else f"{value:>12.3f}" for value in values)
            print(f"{state.global_step:>6} {self.seconds[-1]:>9.1f} {columns}", flush=True)

    def try_all(self, model_folder: Path, tokenizer: PreTrainedTokenizerBase):
        """Share of exact answers on held-out prompts, of each copy, in a model for single sequences."""
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        for weights in self.weights:
            model.load_state_dict(weights)
            self.accuracy.append(accuracy(model, tokenizer))


def serve(model_folder: Path, log: Path) -> AbstractContextManager[str]:
    """A server for the task's model, for as long as the context. Its address."""
    return vllm_server(str(model_folder), log, SERVER_OPTIONS, SERVER_ENVIRONMENT)


def train(
    model_folder: Path,
    args: RolloutCorrectedAsyncGRPOConfig,
    script_args: AsyncSortingArguments,
    server_url: str | None = None,
) -> tuple[Snapshots, list[dict]]:
    """
    Train.

    Args:
        model_folder (`Path`):
            The warmed-up model.
        args ([`RolloutCorrectedAsyncGRPOConfig`]):
            Configuration.
        script_args ([`AsyncSortingArguments`]):
            Arguments of the example.
        server_url (`str`, *optional*):
            Address of a server for the model; by default one is started, and stopped again.

    Returns:
        `tuple[Snapshots, list[dict]]`: the copies, with steps, seconds and held-out accuracies; and what was logged.
    """
    print("Starting vLLM's server and the rollout worker. This takes about a minute ...", flush=True)
    output, tokenizer, snapshots = (
        Path(args.output_dir),
        chat_tokenizer(model_folder),
        Snapshots(script_args.eval_every),
    )
    with nullcontext(server_url) if server_url else serve(model_folder, output / "server.log") as url:
        args.vllm_server_base_url = url
        with on_a_cpu():
            trainer = RolloutCorrectedAsyncGRPOTrainer(
                model=str(model_folder),
                reward_funcs=exact_reply,
                args=args,
                train_dataset=as_messages(4096, seed=args.seed),
                processing_class=tokenizer,
                weight_transfer=DiskWeightTransfer(url, output / "weights"),
            )
        trainer.add_callback(snapshots)  # after TRL's own, which waits until the rollout worker has started
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    print("\nMeasuring the accuracy of the copies on held-out prompts ...", flush=True)
    snapshots.try_all(model_folder, tokenizer)
    print(f"\n{'step':>6} {'seconds':>9} {'held-out':>10}")
    for step, seconds, found in zip(snapshots.steps, snapshots.seconds, snapshots.accuracy, strict=True):
        print(f"{step:>6} {seconds:>9.1f} {found:>10.2f}")
    return snapshots, trainer.state.log_history
