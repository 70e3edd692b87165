"""Several ranks: metrics are those of the whole, nothing hangs, and nothing is sent that need not be."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from tests.dumps import read_dump
from tests.launching import ACCELERATE, ROOT, run
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.criteria import CRITERIA
from trl_rollout_corr.keys import PREFIX


EVERYTHING = {
    "rollout_rs": list(CRITERIA),
    "rollout_rs_threshold": [[0.5, 2.0] if name.endswith("k1") else 1.0 for name in CRITERIA],
}


def launch(cases: dict, folder: Path, ranks: int, config: str | None = None, timeout: int = 300, **environment: str):
    """Run the cases with `accelerate launch`, and return the process and the seconds it took."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    options = ["--multi_gpu" if ranks > 1 else "--cpu", "--dynamo_backend", "no"]
    options = ["--config_file", config] if config else options
    command = [
        ACCELERATE, "launch", *options, "--num_processes", str(ranks),
        "--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0",
        str(ROOT / "tests/distributed/worker.py"), str(folder / "cases.json"), str(folder),
    ]  # fmt: skip
    start = time.monotonic()
    process = run(*command, timeout=timeout, **environment)
    return process, time.monotonic() - start


def results(cases: dict, folder: Path, ranks: int, **options) -> dict[str, list[dict]]:
    """What each rank wrote, per case."""
    process, _ = launch(cases, folder, ranks, **options)
    assert process.returncode == 0, process.stderr[-8000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)] for name in cases
    }


def reports(result: dict, prefix: str) -> list[dict]:
    """Our metrics of each log entry that has some."""
    entries = [{key: value for key, value in entry.items() if key.startswith(prefix)} for entry in result["history"]]
    return [entry for entry in entries if entry]


def assert_reports_equal(found: list[dict], expected: list[dict]):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-5, abs=2e-6)


# Exactness ------------------------------------------------------------------------------------------------------------

# ranks: per-device batch, accumulation steps, batch in evaluation. Sixteen completions a step, thirty-two in evaluation.
SPLITS = {1: (16, 1, 16), 2: (4, 2, 8), 4: (4, 1, 4)}


def exactness_cases(model: str, ranks: int, folder: Path) -> dict:
    batch, accumulation, evaluation = SPLITS[ranks]
    common = {
        "model": model,
        "learning_rate": 0.0,
        "max_steps": 4,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": evaluation,
        "logging_steps": 2,
        **EVERYTHING,
    }
    return {
        "token": {
            **common,
            "rollout_is": "token",
            "rollout_is_threshold": [0.8, 1.3],
            "rollout_dump_dir": str(folder / "dump"),
            "rollout_dump_sampled": 4,
            "rollout_dump_worst": 5,
        },
        "sequence": {
            **common,
            "rollout_is": "sequence",
            "rollout_is_batch_normalize": True,
            "rollout_rs_renormalize": True,
        },
        "bypass": {**common, "rollout_is": "geometric", "bypass_mode": True, "rollout_loss_type": "reinforce"},
        "broken": {
            **common,
            "rollout_is": "token",
            "sampler": {"noise": 3.0, "break_on_rank": 0 if ranks == 1 else None},
        },
        "training": {
            **common,
            "learning_rate": 1e-4,
            "rollout_rs": ["seq_mean_k1"],
            "rollout_rs_threshold": [[0.8, 1.2]],
        },
    }


@pytest.fixture(scope="module")
def by_ranks(tiny_model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {
        ranks: results(exactness_cases(tiny_model_path, ranks, folder / f"{ranks}_"), folder / str(ranks), ranks)
        for ranks in SPLITS
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_worst_sequences_of_several_ranks_are_those_of_one(by_ranks, tmp_path_factory, ranks):
    folder = next(path for path in tmp_path_factory.getbasetemp().glob("ranks*"))

    def worst(n: int) -> list[tuple]:
        rows = read_dump(folder / f"{n}_" / "dump").rows
        assert [sum(row["sampled"] for row in rows if row["step"] == step) for step in (1, 2, 3, 4)] == [4] * 4
        return sorted((row["step"], row["token_ids"], row["reward"]) for row in rows if row["worst"])

    assert len(worst(1)) == 20
    assert worst(ranks) == worst(1)
    assert len({row["rank"] for row in read_dump(folder / f"{ranks}_" / "dump").rows}) == ranks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["token", "sequence", "bypass"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_metrics_of_several_ranks_are_those_of_one(by_ranks, ranks, case, mode):
    prefix = PREFIX if mode == "train" else f"eval_{PREFIX}"
    expected = reports(by_ranks[1][case][0], prefix)
    assert len(expected[0]) > 200
    assert expected[0][f"{prefix}k3_kl"] > 0.001
    for rank in range(ranks):
        assert_reports_equal(reports(by_ranks[ranks][case][rank], prefix), expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_of_several_ranks_are_those_of_one(by_ranks, ranks):
    for case in ("token", "training"):
        losses = [[e["loss"] for e in by_ranks[n][case][0]["history"] if "loss" in e] for n in (1, ranks)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_end_with_the_same_parameters(by_ranks, ranks):
    for case in by_ranks[ranks].values():
        assert len({result["parameters"] for result in case}) == 1


def test_logged_metrics_are_those_of_what_the_ranks_saw(by_ranks, tiny_model_path, tmp_path_factory):
    """Recomputed in this process from the log-probabilities that each rank wrote down."""
    folder = tmp_path_factory.getbasetemp() / "ranks0" / "4"
    per_rank = [torch.load(folder / f"token.{rank}.pt") for rank in range(4)]
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=[0.8, 1.3], **EVERYTHING)
    first_window = [entry for rank in per_rank for entry in rank[:2]]  # two steps of one micro-batch each
    length = max(train.shape[1] for train, _, _ in first_window)
    train, rollout, mask = (
        torch.cat([torch.nn.functional.pad(entry[i], (0, length - entry[i].shape[1])) for entry in first_window])
        for i in range(3)
    )
    expected = compute_rollout_correction(train, rollout, mask, config).metrics()
    (first, *_) = reports(by_ranks[4]["token"][0], PREFIX)
    assert_reports_equal([{key: first[key] for key in expected}], [expected])


# What is sent ---------------------------------------------------------------------------------------------------------


def test_collectives_are_one_per_log_and_those_of_normalisation(tiny_model_path, tmp_path):
    common = {"model": tiny_model_path, "max_steps": 4, "logging_steps": 2}
    cases = {
        "plain": {**common, "plain": True},
        "measured": {**common, "rollout_correction": "disabled"},
        "corrected": {**common, **EVERYTHING},
        "bypass": {**common, "rollout_correction": "bypass_pg_geo_rs_token_tis", "rollout_rs_threshold": 1.5},
        "normalised": {**common, "rollout_is_batch_normalize": True, "rollout_rs_renormalize": True, **EVERYTHING},
        "normalised in bypass": {**common, "rollout_correction": "bypass_pg_is", "rollout_is_batch_normalize": True},
    }
    found = results(cases, tmp_path / "run", 2)
    logs, generations, micro_batches = 2, 4, 8
    count = {name: result[0]["collectives"] - found["plain"][0]["collectives"] for name, result in found.items()}
    assert count == {
        "plain": 0,
        "measured": logs,
        "corrected": logs,
        "bypass": logs,
        "normalised": logs + generations,
        "normalised in bypass": logs + micro_batches,
    }


# Ranks that see different things --------------------------------------------------------------------------------------

MODES = {
    "decoupled": {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs_renormalize": True},
    "ppo_clip": {"bypass_mode": True, "rollout_rs_renormalize": True},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is_batch_normalize": True},
}


def test_ranks_may_disagree(tiny_model_path, tmp_path):
    rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}
    cases = {
        f"{mode} {what}": {"model": tiny_model_path, "sampler": sampler, **rejection, **fields}
        for mode, fields in MODES.items()
        for what, sampler in {
            "rejected on one": {"reject_on_rank": 0},
            "broken on one": {"break_on_rank": 1},
            "rejected on one, broken on the other": {"reject_on_rank": 0, "break_on_rank": 1},
            "cut short on one": {"break_on_rank": 0, "max_length": 1},
        }.items()
    }
    cases["rejected before the baseline"] = {
        "model": tiny_model_path, "sampler": {"reject_on_rank": 0}, "rollout_rs_exclude_from_baseline": True, **rejection
    }  # fmt: skip
    found = results(cases, tmp_path / "run", 2, timeout=400)
    for name, ranks in found.items():
        assert ranks[0]["parameters"] == ranks[1]["parameters"], name
        losses = [entry for entry in ranks[0]["history"] if "loss" in entry]
        assert len(losses) == 3
        assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in losses), name
        if "rejected" in name:
            assert 0.4 < losses[0][f"{PREFIX}rollout_rs_masked_fraction"] < 0.7


def test_a_rank_that_raises_ends_all_of_them(tiny_model_path, tmp_path):
    case = {"model": tiny_model_path, "sampler": {"break_on_rank": 1}, "rollout_nan_policy": "raise"}
    process, seconds = launch({"case": case}, tmp_path / "run", 2, timeout=200)
    assert process.returncode != 0
    assert "`rollout_nan_policy` is 'raise'" in process.stderr
    assert seconds < 120


# Engines --------------------------------------------------------------------------------------------------------------

DEEPSPEED = {"use_cpu": False, "ddp_backend": "gloo"}
ENGINES = {
    "ddp": ({}, {}),
    # accelerate shards on accelerators only, and is told that CPUs are some
    "fsdp2": ({"use_cpu": False, "fsdp_on_cpu": True}, {}),
    "zero2": (DEEPSPEED, {"DS_ACCELERATOR": "cpu"}),
    "zero3": (DEEPSPEED, {"DS_ACCELERATOR": "cpu"}),
}
CASES = {
    "full": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.7, 1.4]},
    "lora": {"lora": True, "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "lora with a reference": {"lora": True, "beta": 0.1, "rollout_correction": "bypass_pg_is", "num_iterations": 2},
    "reference": {"beta": 0.1, "rollout_correction": "bypass_ppo_clip", "steps_per_generation": 4},
}
EXPECTED_ENGINE = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}


def engine_config(engine: str, folder: Path) -> str | None:
    """The shipped configuration, for two processes; ZeRO-3 shards even the smallest parameter."""
    if engine == "ddp":
        return None
    import yaml

    config = yaml.safe_load((ROOT / f"recipes/accelerate/{engine}.yaml").read_text())
    if engine == "zero3":
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        auto = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        (folder / "zero3.json").write_text(json.dumps({**auto, "zero_optimization": zero}))
        config["deepspeed_config"] = {"deepspeed_config_file": str(folder / "zero3.json"), "zero3_init_flag": True}
        del config["mixed_precision"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "config.yaml")


@pytest.fixture(scope="module")
def by_engine(tiny_model_path, tmp_path_factory):
    """Results of the cases per engine, each engine launched when it is first asked for."""
    cache = {}

    def run(engine: str):
        if engine not in cache:
            fields, environment = ENGINES[engine]
            folder = tmp_path_factory.mktemp(engine)
            cases = {name: {"model": tiny_model_path, **case, **fields} for name, case in CASES.items()}
            cache[engine] = results(
                cases, folder / "run", 2, config=engine_config(engine, folder), timeout=500, **environment
            )
        return cache[engine]

    return run


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_engines_train_like_plain_data_parallelism(by_engine, engine, case):
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    expected, found = by_engine("ddp")[case], by_engine(engine)[case]
    for result in found:
        assert result["engine"].startswith(EXPECTED_ENGINE[engine])
    steps = [
        [
            (e["loss"], e[f"{PREFIX}k3_kl"], e[f"{PREFIX}effective_lr"])
            for e in r[0]["history"]
            if f"{PREFIX}k3_kl" in e
        ]
        for r in (expected, found)
    ]
    assert len(steps[0]) > 1
    assert steps[1] == [pytest.approx(step, rel=2e-3, abs=1e-4) for step in steps[0]]


def test_parameters_are_really_sharded(by_engine):
    whole = by_engine("ddp")["full"][0]["parameters"]
    shards = [result["parameters"] for result in by_engine("fsdp2")["full"]]
    assert sum(shards) == pytest.approx(whole, rel=1e-4)
    assert shards[0] != pytest.approx(whole, rel=0.1)
    pytest.importorskip("deepspeed")
    assert [result["parameters"] for result in by_engine("zero3")["full"]] == [0.0, 0.0]  # released after each use


# The sampler of two ranks, and what it trains ---------------------------------------------------------------------------

WITH_VLLM = {
    f"{trainer} {what}": {
        "trainer": trainer,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "learning_rate": 1e-3,
        **fields,
    }
    for trainer in ("grpo", "rloo")
    for what, fields in {
        "full": {"rollout_correction": "decoupled_token_is"},
        "lora": {"lora": True, "rollout_correction": "bypass_pg_is"},
        "exclude": {
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": 2.0,
            "rollout_rs_exclude_from_baseline": True,
        },
    }.items()
}


@pytest.mark.vllm
@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(engine, marks=pytest.mark.slow) for engine in ("fsdp2", "zero2", "zero3"))]
)
def test_every_engine_with_a_real_sampler_on_each_rank(tiny_model_path, tmp_path, engine):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    fields, environment = ENGINES[engine]
    cases = {name: {"model": tiny_model_path, **case, **fields} for name, case in WITH_VLLM.items()}
    config = engine_config(engine, tmp_path)
    found = results(cases, tmp_path / "run", 2, config=config, timeout=500, **environment)
    for name, ranks in found.items():
        entries = [entry for entry in ranks[0]["history"] if "loss" in entry]
        assert len(entries) == 3, name
        assert all(entry["grad_norm"] > 0 for entry in entries), name
        for entry in entries:  # weights were pushed after every step, or the two would part
            assert abs(entry[f"{PREFIX}log_ratio_max"]) < 1e-4, name
            assert abs(entry[f"{PREFIX}log_ratio_min"]) < 1e-4, name
