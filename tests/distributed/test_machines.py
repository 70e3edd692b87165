"""
Several machines: launchers that know of each other only an address, here all on the loopback.

Each starts the shipped configuration as it is, but for numbers, addresses and bfloat16.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.distributed.test_ranks import EVERYTHING, assert_in_step, metrics_of, reports
from tests.launching import ACCELERATE, ROOT, clean_environment, end, free_port
from tests.training import assert_same_metrics
from trl_rollout_corr.messages import PREFIX


MACHINES = 2
EACH = 2 if (os.cpu_count() or 1) >= 4 else 1  # processes of a machine
RANKS = MACHINES * EACH
FSDP2 = {"use_cpu": False, "fsdp_on_cpu": True}


class Cluster:
    """
    Launchers, one for each machine.

    Args:
        cases (`dict[str, dict]`):
            What to run, as of `worker.py`.
        folder (`Path`):
            The disk that the machines share.
    """

    def __init__(self, cases: dict[str, dict], folder: Path):
        folder.mkdir(parents=True)
        (folder / "cases.json").write_text(json.dumps(cases))
        self.cases, self.folder = cases, folder
        config, port = str(ROOT / "recipes/accelerate/multi_node.yaml"), str(free_port())
        self.machines = [
            subprocess.Popen(
                [
                    ACCELERATE, "launch", "--config_file", config, "--num_machines", str(MACHINES),
                    "--num_processes", str(RANKS), "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1",
                    "--main_process_port", port, "--mixed_precision", "no",
                    str(ROOT / "tests/distributed/worker.py"), str(folder / "cases.json"), str(folder),
                ],
                cwd=ROOT,
                env=clean_environment(),
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"stderr of machine {machine}").open("w"),
            )
            for machine in range(MACHINES)
        ]  # fmt: skip

    def errors(self) -> str:
        """Output of the machines."""
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("stderr of machine *")))

    def results(self) -> dict[str, list[dict]]:
        """Results of each rank, by case. Waits for the machines, which must succeed."""
        assert [machine.wait(timeout=900) for machine in self.machines] == [0] * MACHINES, self.errors()
        return {
            name: [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]
            for name in self.cases
        }


@contextmanager
def cluster(*args, **kwargs) -> Iterator[Cluster]:
    """A cluster of which nothing is left."""
    started = Cluster(*args, **kwargs)
    try:
        yield started
    finally:
        for machine in started.machines:
            end(machine)


def grpo(model: str, **fields) -> dict:
    """Sixteen completions a step, the same on any number of processes."""
    return {
        "model": model,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 16 // RANKS,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "rollout_is": "token",
        "rollout_is_threshold": [0.8, 1.3],
        **EVERYTHING,
        **fields,
    }


def alone(model: str, folder: Path) -> list[dict]:
    """Our metrics and losses of one process."""
    from tests.distributed import worker

    folder.mkdir()
    worker.run("alone", {**grpo(model), "per_device_train_batch_size": 16}, folder)
    return trained(json.loads((folder / "alone.0.json").read_text()))


def trained(result: dict) -> list[dict]:
    """Losses and our metrics of each step."""
    metrics = reports(result, PREFIX)
    return [{**m, "loss": e["loss"]} for m, e in zip(metrics, result["history"], strict=False) if m]


def assert_same_training(found: list[dict], expected: list[dict]):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert_same_metrics(one, other, rel=2e-4, abs=2e-5)


# They train as one ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_machines_train_as_one_process(tiny_model_path, tmp_path):
    with cluster({"sharded": grpo(tiny_model_path, **FSDP2)}, tmp_path / "machines") as machines:
        expected = alone(tiny_model_path, tmp_path / "alone")
        found = machines.results()["sharded"]
    assert {result["engine"] for result in found} == {"FSDPQwen2ForCausalLM"}
    assert len({result["parameters"] for result in found}) == RANKS  # each has a shard
    for result in found:
        assert_same_training(trained(result), expected)


RLOO = {"trainer": "rloo", "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
STALE = {  # another sampler than the trainer, by so much; Accelerate shards nothing on CPUs, unless it is told otherwise
    "spread": 0.05,
    "learning_rate": 0.0,
    "max_steps": 2,
    "logging_steps": 2,
    "rollout_is": "token",
    "rollout_is_threshold": [0.8, 1.3],
    **EVERYTHING,
}


@pytest.mark.slow
@pytest.mark.vllm
def test_rloo_on_two_machines(tiny_model_path, tmp_path):
    """Metrics are those of what all ranks saw, and sharded weights reach the sampler of each."""
    folder, cases = tmp_path / "machines", {"stale": STALE, "sharded": {"learning_rate": 1e-3, **FSDP2}}
    with cluster(
        {name: {"model": tiny_model_path, **RLOO, **case} for name, case in cases.items()}, folder
    ) as machines:
        found = machines.results()
    expected = metrics_of([entry for rank in range(RANKS) for entry in torch.load(folder / f"stale.{rank}.pt")])
    assert expected[f"{PREFIX}k3_kl"] > 1e-4
    for result in found["stale"]:
        (metrics,) = reports(result, PREFIX)
        assert_same_metrics({key: metrics[key] for key in expected}, expected, rel=2e-5, abs=2e-6)
    assert {result["engine"] for result in found["sharded"]} == {"FSDPQwen2ForCausalLM"}
    assert_in_step({"sharded": found["sharded"]})


# One is lost ----------------------------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 1, "ddp_timeout": 30}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_lost_machine_ends_the_others_and_the_run_resumes(tiny_model_path, tmp_path, how):
    lost = {"rank": RANKS - 1, "step": 2, "how": how}
    case = grpo(tiny_model_path, **SAVING, **FSDP2, sampler={"lose_machine": lost})
    with cluster({"lost": case}, tmp_path / "lost") as machines:
        before = time.monotonic()
        assert machines.machines[0].wait(timeout=600) != 0, f"after {time.monotonic() - before:.0f} seconds"
        assert "Error" in machines.errors()
    saved = tmp_path / "lost/lost"
    assert sorted(path.name for path in saved.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    case = grpo(tiny_model_path, **SAVING, **FSDP2, resume=str(saved / "checkpoint-2"))
    with cluster({"resumed": case}, tmp_path / "resumed") as machines:
        expected = alone(tiny_model_path, tmp_path / "alone")
        for result in machines.results()["resumed"]:
            steps = trained(result)[-2:]
            assert_same_training(steps, expected[2:])
