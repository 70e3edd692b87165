"""
Program of one rank. Started by `accelerate launch`; reads cases from a JSON file and writes what happened to a folder.

    accelerate launch ... tests/distributed/worker.py CASES.json FOLDER
"""

import faulthandler
import gc
import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import LoraConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer, RLOOTrainer

import tests.conftest  # noqa: F401 - environment of the tests
from tests.asynchronous import WorkerHere, build_ours, build_theirs
from tests.routes_on_a_cpu import returning_routes
from tests.tiny import StaleSampler, length_reward
from tests.training import TRAINERS, asking_vllm, config_fields, freeze_sampler, losing, sharing_engines


# What the launcher says, which is for the cases that shard
USE_FSDP = os.environ.pop("ACCELERATE_USE_FSDP", "false")


class SameOnAnyNumberOfRanks(StaleSampler):
    """Completions and log-probabilities depend on the prompt and its repetition, not on the rank or the batch."""

    def __init__(
        self,
        model_path: str,
        *,
        break_on_rank: int | None = None,
        reject_on_rank: int | None = None,
        lose_machine: dict | None = None,
        announce: bool = False,
        **kwargs,
    ):
        # with efficient loading, every rank but the first gets empty weights and waits for the trainer to fill them
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
            super().__init__(model_path, **kwargs)
        self.break_on_rank, self.reject_on_rank = break_on_rank, reject_on_rank
        self.lose_machine, self.announce = lose_machine, announce

    def __call__(self, prompts, trainer) -> dict:
        rank, step = trainer.accelerator.process_index, trainer.state.global_step
        if self.announce:  # the newest weights, whose log-probabilities are off by the noise alone
            trainer.rollout_step = step
        if self.lose_machine and (rank, step) == (self.lose_machine["rank"], self.lose_machine["step"]):
            lose_this_machine(self.lose_machine["how"])
        parts = [
            self.sample([prompt], trainer.processing_class, key=f"{step} {prompt} {prompts[:i].count(prompt)}")
            for i, prompt in enumerate(prompts)
        ]
        output = {key: [part[key][0] for part in parts] for key in parts[0]}
        if rank == self.break_on_rank:
            output["logprobs"] = [[None, *row[1:]] for row in output["logprobs"]]
        if rank == self.reject_on_rank:
            output["logprobs"] = [[x - 5.0 for x in row] for row in output["logprobs"]]
        return output


def asking_on_one_rank(prompts, trainer):
    """A `rollout_func` that samples for all ranks on the main process, which alone has a client of a server."""
    of_all_ranks = gather_object(prompts)
    answer = [asking_vllm(of_all_ranks, trainer) if trainer.accelerator.is_main_process else None]
    broadcast_object_list(answer)
    first = trainer.accelerator.process_index * len(prompts)
    return {key: rows[first : first + len(prompts)] for key, rows in answer[0].items()}


def lose_this_machine(how: str):
    """Kill or suspend the launcher of this process and all that it has started, as a machine that is gone or hangs."""
    launcher = psutil.Process().parent()
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid != os.getpid():
            getattr(process, how)()
    getattr(psutil.Process(), how)()


def fail_on_this_rank(trainer):
    """Two ranks, of which this one cannot score a text with the trainer, as when its memory is full."""

    def score(ids, n):
        raise torch.OutOfMemoryError("no memory for the logits")

    trainer._pushes.score = score


def speculate(trainer):
    """The configuration of a server that guesses tokens, which only this rank knows."""
    trainer._engine_config = {"speculative_config": {"method": "ngram"}}


def announce(trainer):
    """Say on this rank alone that the sampler has older weights."""
    trainer.rollout_step = 0


ONE_RANK = {"cannot score": fail_on_this_rank, "speculates": speculate, "announces": announce}


class CountedCollectives:
    """Counts the collectives that are started, by wrapping the functions of `torch.distributed` that start them."""

    NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "all_gather_object", "barrier")

    def __enter__(self):
        self.count, self.originals = 0, {name: getattr(torch.distributed, name) for name in self.NAMES}
        for name, function in self.originals.items():
            setattr(torch.distributed, name, self.counting(function))
        return self

    def counting(self, function):
        def counted(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for name, function in self.originals.items():
            setattr(torch.distributed, name, function)


def numbered_prompts(n: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{'a' * (i % 5)} {i}=" for i in range(n)]})


def build(case: dict, folder: Path):
    case = dict(case)
    if case.pop("asynchronous", False):
        return build_asynchronous(case, folder)
    kind, plain, lora = case.pop("trainer", "grpo"), case.pop("plain", False), case.pop("lora", False)
    model, sampler, spread = case.pop("model"), case.pop("sampler", {}), case.pop("spread", None)
    trainer_class, config_class = TRAINERS[kind]
    unset_hf_deepspeed_config()  # of the case before: the sampler's own model must not be partitioned
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if case.pop("fsdp_on_cpu", False):
        os.environ["ACCELERATE_USE_FSDP"] = USE_FSDP
        pretend_cpus_are_accelerators(case.get("ddp_timeout", 1800))
        case["accelerator_config"] = {"use_configured_state": True}
    arguments = {"reward_funcs": length_reward, "train_dataset": numbered_prompts(64)}
    if case.pop("one_rank_asks", False):
        arguments["rollout_func"] = asking_on_one_rank
    elif kind == "grpo" and not case.get("use_vllm"):
        arguments["rollout_func"] = SameOnAnyNumberOfRanks(model, **sampler)
    if lora:
        arguments["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    if case.get("eval_strategy"):
        arguments["eval_dataset"] = numbered_prompts(8)
    if plain:
        trainer_class = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[kind]
    args = config_class(**config_fields(**{"output_dir": folder, **case}))
    with returning_routes() if case.get("rollout_routing") else nullcontext():
        trainer = trainer_class(model, args=args, **arguments)
    if spread is not None:
        freeze_sampler(trainer, spread)
    return trainer


def build_asynchronous(case: dict, folder: Path):
    model, worker, plain = case.pop("model"), case.pop("worker", {}), case.pop("plain", False)
    return (build_theirs if plain else build_ours)(model, folder, WorkerHere(model, **worker), **case)


def pretend_cpus_are_accelerators(timeout: int):
    """Accelerate turns an FSDP configuration into plain data parallelism on CPUs; torch can shard there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=False, backend="gloo", timeout=timedelta(seconds=timeout))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def record_inputs(trainer) -> list[tuple]:
    """Keep what every correction is computed from."""
    inputs = []
    compute = trainer._compute_correction

    def recorded(train_logps, batch):
        inputs.append(
            (
                train_logps.detach().clone(),
                batch["sampling_per_token_logps"].clone(),
                trainer._loss_mask(batch).clone(),
                batch["advantages"].clone(),
            )
        )
        return compute(train_logps, batch)

    trainer._compute_correction = recorded
    return inputs


def main():
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    gc.freeze()  # as in `conftest.py`
    with sharing_engines():
        for name, case in cases.items():
            faulthandler.dump_traceback_later(300, exit=True)  # a rank that hangs says where
            run(name, case, folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # everything is written, and the threads of gloo now and then abort an orderly shutdown


def run(name: str, case: dict, folder: Path):
    """Train one case, and write what happened."""
    resume, loses_weights = case.pop("resume", None), case.pop("loses_weights", False)
    what, where = case.pop("on_one_rank", (None, None))
    trainer = build(case, folder / name)
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    assert world == int(os.environ.get("WORLD_SIZE", "1")), "each process thinks that it is alone"
    if rank == where:
        ONE_RANK[what](trainer)
    inputs = [] if case.get("plain") or case.get("asynchronous") else record_inputs(trainer)
    error = None
    lost = losing("everything") if loses_weights else nullcontext()
    with CountedCollectives() as collectives, lost:
        try:
            trainer.train(resume_from_checkpoint=resume)
        except RuntimeError as raised:
            if not loses_weights and "end" not in case.get("worker", {}):  # then it is what the case is about
                raise
            error = str(raised)
    result = {
        "error": error,
        "history": trainer.state.log_history,
        "collectives": collectives.count,
        "steps": trainer.state.global_step,
        "engine": type(trainer.model_wrapped).__name__,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "parameters": sum(p.detach().double().sum().item() for p in trainer.model.parameters()),
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(result))
    torch.save(inputs, folder / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main()
