"""Several ranks: metrics are those of the whole, nothing hangs, and nothing is sent that need not be."""

import json
import math
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.dumps import read_dump
from tests.launching import ACCELERATE, HAS_ASYNCHRONOUS, ROOT, run
from tests.training import assert_same_metrics
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.criteria import CRITERIA


EVERYTHING = {
    "rollout_rs": list(CRITERIA),
    "rollout_rs_threshold": [[0.5, 2.0] if name.endswith("k1") else 0.9 for name in CRITERIA],
}


# Criteria of tokens and of completions. All criteria in every case would take half of the time of this file
FEW = {"rollout_rs": ["token_k1", "seq_mean_k3"], "rollout_rs_threshold": [[0.5, 2.0], 0.9]}


def launch(
    cases: dict[str, dict], folder: Path, ranks: int, config: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run the cases one after the other with `accelerate launch`."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    options = ["--config_file", config] if config else ["--multi_gpu", "--dynamo_backend", "no"]
    command = [
        ACCELERATE, "launch", *options, "--num_processes", str(ranks),
        "--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0",
        str(ROOT / "tests/distributed/worker.py"), str(folder / "cases.json"), str(folder),
    ]  # fmt: skip
    return run(*command, **environment)


def results(process: subprocess.CompletedProcess, cases: dict, folder: Path, ranks: int) -> dict[str, list[dict]]:
    """Results of each rank, per case."""
    files = {name: [folder / f"{name}.{rank}.json" for rank in range(ranks)] for name in cases}
    missing = [str(path) for paths in files.values() for path in paths if not path.exists()]
    assert not missing, f"{missing}\n{process.stderr[-8000:]}"
    return {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}


def launch_and_read(cases: dict, folder: Path, ranks: int, **options) -> dict[str, list[dict]]:
    process = launch(cases, folder, ranks, **options)
    assert process.returncode == 0, process.stderr[-8000:]
    return results(process, cases, folder, ranks)


def reports(result: dict, prefix: str) -> list[dict]:
    """Our metrics of each log entry that has some."""
    entries = [{key: value for key, value in entry.items() if key.startswith(prefix)} for entry in result["history"]]
    return [entry for entry in entries if entry]


def assert_reports_equal(found: list[dict], expected: list[dict]):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert_same_metrics(one, other, rel=2e-5, abs=2e-6)


# One launch of two ranks ----------------------------------------------------------------------------------------------


class TwoRanks(NamedTuple):
    """Results of plain data parallelism on two ranks."""

    process: subprocess.CompletedProcess
    results: dict[str, dict[str, list[dict]]]  # by group and case, of each rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(tiny_model_path, folder) -> TwoRanks:
    """
    All cases of all tests in one launch: to start a rank takes ten times as long as a case. It is that of FSDP2, which
    Accelerate turns into plain data parallelism on CPUs.
    """
    groups = {
        "exactness": exactness_cases(2, folder),
        "collectives": COLLECTIVES,
        "disagreement": DISAGREEMENTS,
        "engine": CASES,
        "vllm": WITH_VLLM if find_spec("vllm") else {},
        "rollout function": {"one rank asks": ONE_RANK_ASKS} if find_spec("vllm") else {},
        "delivery": {"grpo": LOSES_WEIGHTS} if find_spec("vllm") else {},
        "asynchronous": {
            name: {"asynchronous": True, **case}
            for name, case in {**ASYNCHRONOUS, **ASYNCHRONOUS_DISAGREEMENTS}.items()
            if HAS_ASYNCHRONOUS
        },
        # an older TRL is tested for its seam, without sharding
        "fsdp2": {name: {**case, **ENGINES["fsdp2"][0]} for name, case in CASES.items() if HAS_ASYNCHRONOUS},
    }
    cases = {
        f"{group} {name}": {"model": tiny_model_path, **case}
        for group, cases in groups.items()
        for name, case in cases.items()
    }
    last = {"raises": {"model": tiny_model_path, **RAISES_ON_ONE}}
    process = launch(cases | last, folder / "2", 2, config=engine_config("fsdp2", folder))
    found = results(process, cases, folder / "2", 2)
    return TwoRanks(
        process, {group: {name: found[f"{group} {name}"] for name in cases} for group, cases in groups.items()}
    )


RAISES_ON_ONE = {"sampler": {"break_on_rank": 1}, "rollout_nan_policy": "raise"}


def test_a_rank_that_raises_ends_all_of_them(two_ranks):
    assert two_ranks.process.returncode != 0
    assert "`rollout_nan_policy` is 'raise'" in two_ranks.process.stderr


# Exactness ------------------------------------------------------------------------------------------------------------

# ranks: per-device batch, accumulation steps, batch in evaluation. Sixteen completions a step, thirty-two in evaluation.
SPLITS = {1: (16, 1, 16), 2: (4, 2, 8), 4: (4, 1, 4)}


def exactness_cases(ranks: int, folder: Path) -> dict[str, dict]:
    batch, accumulation, evaluation = SPLITS[ranks]
    common = {
        "learning_rate": 0.0,
        "max_steps": 4,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": evaluation,
        "logging_steps": 2,
        **FEW,
    }
    return {
        "token": {
            **common,
            **EVERYTHING,
            "rollout_is": "token",
            "rollout_is_threshold": [0.8, 1.3],
            "rollout_dump_dir": str(folder / f"dump of {ranks}"),
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
        "auto": {
            **{name: value for name, value in common.items() if name not in FEW},
            "rollout_correction": "auto",
            "sampler": {"noise": 0.3, "announce": True},
        },
        "training": {
            **common,
            "learning_rate": 1e-4,
            "rollout_rs": ["seq_mean_k1"],
            "rollout_rs_threshold": [[0.8, 1.2]],
        },
    }


several_ranks = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def one_rank(tiny_model_path, folder) -> dict[str, list[dict]]:
    """Results of this process."""
    from tests.distributed import worker

    (folder / "1").mkdir()
    cases = exactness_cases(1, folder)
    for name, case in cases.items():
        worker.run(name, {"model": tiny_model_path, **case}, folder / "1")
    return {name: [json.loads((folder / "1" / f"{name}.0.json").read_text())] for name in cases}


@pytest.fixture(scope="module")
def four_ranks(tiny_model_path, folder) -> dict[str, list[dict]]:
    cases = {name: {"model": tiny_model_path, **case} for name, case in exactness_cases(4, folder).items()}
    return launch_and_read(cases, folder / "4", 4)


@pytest.fixture
def several(request, ranks) -> dict[str, list[dict]]:
    """Results of each of so many ranks, which are launched when they are first asked for."""
    if ranks == 2:
        return request.getfixturevalue("two_ranks").results["exactness"]
    return request.getfixturevalue("four_ranks")


@several_ranks
def test_the_worst_sequences_of_several_ranks_are_those_of_one(one_rank, several, folder, ranks):
    def worst(n: int) -> list[tuple]:
        rows = read_dump(folder / f"dump of {n}").rows
        assert [sum(row["sampled"] for row in rows if row["step"] == step) for step in (1, 2, 3, 4)] == [4] * 4
        return sorted((row["step"], row["token_ids"], row["reward"]) for row in rows if row["worst"])

    assert len(worst(1)) == 20
    assert worst(ranks) == worst(1)
    assert len({row["rank"] for row in read_dump(folder / f"dump of {ranks}").rows}) == ranks


@pytest.mark.seam
@several_ranks
@pytest.mark.parametrize("case", ["token", "sequence", "bypass"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_metrics_of_several_ranks_are_those_of_one(one_rank, several, case, mode):
    prefix = PREFIX if mode == "train" else f"eval_{PREFIX}"
    expected = reports(one_rank[case][0], prefix)
    assert len(expected[0]) > (60 if case == "token" else 30)
    assert expected[0][f"{prefix}k3_kl"] > 0.001
    for rank in several[case]:
        assert_reports_equal(reports(rank, prefix), expected)


@several_ranks
def test_fresh_completions_are_counted_over_all_ranks(one_rank, several):
    keys = [f"{PREFIX}{name}" for name in ("stale_fraction", "rollout_is_mean", "rollout_rs_masked_fraction")]

    def used(result: dict) -> list[float]:
        return [report[key] for report in reports(result, PREFIX) for key in keys]

    expected = used(one_rank["auto"][0])
    assert expected[:2] == [0.0, 1.0]
    for rank in several["auto"]:
        assert used(rank) == pytest.approx(expected, rel=2e-5)


@pytest.mark.seam
@several_ranks
def test_losses_of_several_ranks_are_those_of_one(one_rank, several):
    for case in ("token", "training"):
        losses = [[e["loss"] for e in found[case][0]["history"] if "loss" in e] for found in (one_rank, several)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)


@pytest.mark.seam
@several_ranks
def test_ranks_end_with_the_same_parameters(several):
    for case in several.values():
        assert len({result["parameters"] for result in case}) == 1


def metrics_of(seen: list[tuple]) -> dict[str, float]:
    """Metrics of the case `token`, in this process, of what ranks wrote down."""
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=[0.8, 1.3], **EVERYTHING)
    length = max(entry[0].shape[1] for entry in seen)
    train, rollout, mask = (
        torch.cat([torch.nn.functional.pad(entry[i], (0, length - entry[i].shape[1])) for entry in seen])
        for i in range(3)
    )
    advantages = torch.cat([entry[3] for entry in seen])
    return compute_rollout_correction(train, rollout, mask, config, advantages=advantages).metrics()


def test_logged_metrics_are_those_of_what_the_ranks_saw(two_ranks, folder):
    per_rank = [torch.load(folder / "2" / f"exactness token.{rank}.pt") for rank in range(2)]
    expected = metrics_of([entry for rank in per_rank for entry in rank[:4]])  # two steps of two micro-batches each
    (first, *_) = reports(two_ranks.results["exactness"]["token"][0], PREFIX)
    assert_reports_equal([{key: first[key] for key in expected}], [expected])


# What is sent ---------------------------------------------------------------------------------------------------------


_SHORT = {"max_steps": 4, "logging_steps": 2}
COLLECTIVES = {
    "plain": {**_SHORT, "plain": True},
    "measured": {**_SHORT, "rollout_correction": "disabled"},
    "watched": {**_SHORT, "rollout_correction": "disabled", "rollout_monitor": "warn"},
    "corrected": {**_SHORT, **FEW},
    "auto": {**_SHORT, "rollout_correction": "auto"},
    "bypass": {**_SHORT, "rollout_correction": "bypass_pg_geo_rs_token_tis", "rollout_rs_threshold": 1.5},
    "normalised": {**_SHORT, "rollout_is_batch_normalize": True, "rollout_rs_renormalize": True, **FEW},
    "normalised in bypass": {**_SHORT, "rollout_correction": "bypass_pg_is", "rollout_is_batch_normalize": True},
}


def test_collectives_are_one_per_log_or_watched_step_and_those_of_normalisation(two_ranks):
    found = {name: ranks[0]["collectives"] for name, ranks in two_ranks.results["collectives"].items()}
    steps, logs, generations, micro_batches = 4, 2, 4, 8
    logs += 1  # at the start the ranks agree whether each has a monitor
    assert {name: count - found["plain"] for name, count in found.items()} == {
        "plain": 0,
        "measured": logs,
        "watched": 1 + steps,
        "corrected": logs,
        "auto": logs,
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
SAMPLERS = {
    "rejected on one": {"reject_on_rank": 0},
    "broken on one": {"break_on_rank": 1},
    "rejected on one, broken on the other": {"reject_on_rank": 0, "break_on_rank": 1},
    "cut short on one": {"break_on_rank": 0, "max_length": 1},
}
REJECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}
DISAGREEMENTS = {
    f"{mode} {what}": {"sampler": sampler, **REJECTION, **fields}
    for mode, fields in MODES.items()
    for what, sampler in SAMPLERS.items()
}
DISAGREEMENTS["rejected before the baseline"] = {
    "sampler": {"reject_on_rank": 0}, "rollout_rs_exclude_from_baseline": True, **REJECTION
}  # fmt: skip


DISAGREEMENTS["one rank says that its sampler is older"] = {
    "bypass_mode": True,
    "steps_per_generation": 4,
    "on_one_rank": ["announces", 1],
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_may_disagree(two_ranks, case):
    ranks = two_ranks.results["disagreement"][case]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    losses = [entry for entry in ranks[0]["history"] if "loss" in entry]
    assert len(losses) == 3
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in losses)
    if "rejected" in case:
        assert 0.4 < losses[0][f"{PREFIX}rollout_rs_masked_fraction"] < 0.7


# Asynchronous ---------------------------------------------------------------------------------------------------------

_ASYNC = {"max_steps": 4, "logging_steps": 2, "worker": {"lags": [0, 1, 2, 5], "group": 2}, "max_staleness": 3}
_NORMALISED = {"rollout_is_batch_normalize": True, "rollout_rs_renormalize": True, "learning_rate": 0.0, **EVERYTHING}
ASYNCHRONOUS = {
    "plain": {**_ASYNC, "plain": True},
    "off": {**_ASYNC, "rollout_correction": "disabled"},
    "token": {**_ASYNC, "rollout_is": "token", **_NORMALISED},
    "reinforce": {
        **_ASYNC, **_NORMALISED, "rollout_is": "sequence", "bypass_mode": True, "rollout_loss_type": "reinforce"
    },
}  # fmt: skip


# What one rank knows, or cannot do, in the checks of a push. The sampler is in this process, so nothing scores at its side
SCORES = {**_ASYNC, "rollout_monitor": "warn", "rollout_diagnose": True}
ASYNCHRONOUS_DISAGREEMENTS = {
    "the trainer cannot score on one": {**SCORES, "on_one_rank": ["cannot score", 1]},
    "one has a server that guesses tokens": {**SCORES, "on_one_rank": ["speculates", 0]},
    "all score": SCORES,
}


asynchronous = pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="the asynchronous trainer is that of TRL 1.16")


@asynchronous
@pytest.mark.parametrize("case", ["token", "reinforce"])
def test_asynchronous_metrics_of_two_ranks_are_those_of_one(two_ranks, tiny_model_path, folder, case):
    from tests.distributed import worker

    fields = {**ASYNCHRONOUS[case], "per_device_train_batch_size": 8}
    worker.run(f"asynchronous {case}", {"model": tiny_model_path, "asynchronous": True, **fields}, folder)
    alone = json.loads((folder / f"asynchronous {case}.0.json").read_text())
    expected = reports(alone, PREFIX)
    assert expected[-1][f"{PREFIX}stale_dropped/fraction"] > 0.1
    assert expected[-1][f"{PREFIX}staleness_max"] > 1
    ranks = two_ranks.results["asynchronous"][case]
    assert ranks[0]["parameters"] == ranks[1]["parameters"] == pytest.approx(alone["parameters"], abs=1e-2)
    assert_reports_equal(reports(ranks[0], PREFIX), expected)
    assert reports(ranks[0], PREFIX) == reports(ranks[1], PREFIX)


@asynchronous
def test_asynchronous_off_on_two_ranks_is_trl(two_ranks):
    found = two_ranks.results["asynchronous"]
    assert found["off"][0]["parameters"] == found["plain"][0]["parameters"]
    # one at the start, one when the main process has read its server, one at each of two logs, and with each of eight
    # micro-batches that TRL sends, four tensors more
    # Samples come from this process: there is no server, whose weights could be looked at
    assert found["off"][0]["collectives"] - found["plain"][0]["collectives"] == 4 + 4 * 8


@asynchronous
@pytest.mark.parametrize("case", ASYNCHRONOUS_DISAGREEMENTS)
def test_no_rank_leaves_the_scores_after_a_push_alone(two_ranks, case):
    ranks = two_ranks.results["asynchronous"][case]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert ranks[0]["steps"] == ranks[1]["steps"] == SCORES["max_steps"]
    assert ranks[0]["collectives"] == ranks[1]["collectives"]


# Engines --------------------------------------------------------------------------------------------------------------

DEEPSPEED = {"use_cpu": False, "ddp_backend": "gloo"}
ENGINES = {  # fields of the configuration, environment
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
    "fsdp2": "FSDP",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}


def engine_config(engine: str, folder: Path) -> str:
    """The shipped configuration, for two processes; ZeRO-3 shards even the smallest parameter."""
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


def launch_engine(engine: str, cases: dict[str, dict], model: str, folder: Path) -> dict[str, list[dict]]:
    fields, environment = ENGINES[engine]
    cases = {name: {"model": model, **case, **fields} for name, case in cases.items()}
    return launch_and_read(cases, folder / "run", 2, config=engine_config(engine, folder), **environment)


@pytest.fixture(scope="module")
def by_engine(two_ranks, tiny_model_path, tmp_path_factory):
    """Results of the cases per engine, those of DeepSpeed launched when they are first asked for."""
    cache = {"ddp": two_ranks.results["engine"], "fsdp2": two_ranks.results["fsdp2"]}

    def results_of(engine: str):
        if not cache.get(engine):
            cache[engine] = launch_engine(engine, CASES, tiny_model_path, tmp_path_factory.mktemp(engine))
        return cache[engine]

    return results_of


@pytest.mark.parametrize(
    "engine", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3"))]
)
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


@pytest.mark.slow
def test_parameters_are_really_sharded_by_deepspeed(by_engine):
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


ONE_RANK_ASKS = {
    **WITH_VLLM["grpo full"],
    "one_rank_asks": True,
    "rollout_correction": "auto",
}


LOSES_WEIGHTS = {
    **WITH_VLLM["grpo full"],
    "learning_rate": 1e-2,
    "max_steps": 8,
    "rollout_monitor": "warn",
    "loses_weights": True,
}


@pytest.mark.vllm
def test_weights_that_do_not_arrive_are_one_error_on_all_ranks(two_ranks):
    assert_one_error(two_ranks.results["delivery"]["grpo"])


def assert_one_error(ranks: list[dict]):
    (error,) = {rank["error"] for rank in ranks}
    assert "The sampler does not have the weights of the trainer" in error


def assert_in_step(found: dict[str, list[dict]]):
    """Weights were pushed to the sampler after every step, or it and the trainer would part."""
    assert found
    for name, ranks in found.items():
        entries = [entry for entry in ranks[0]["history"] if "loss" in entry]
        assert len(entries) == 3, name
        assert all(entry["grad_norm"] > 0 for entry in entries), name
        for entry in entries:
            assert abs(entry[f"{PREFIX}log_ratio_max"]) < 1e-4, name
            assert abs(entry[f"{PREFIX}log_ratio_min"]) < 1e-4, name


@pytest.mark.seam
@pytest.mark.vllm
def test_a_real_sampler_on_each_rank(two_ranks):
    assert_in_step(two_ranks.results["vllm"])


@pytest.mark.vllm
def test_all_ranks_know_the_age_of_what_one_of_them_sampled(two_ranks):
    ranks = two_ranks.results["rollout function"]["one rank asks"]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    entries = [entry for entry in ranks[0]["history"] if "loss" in entry]
    assert [entry[f"{PREFIX}stale_fraction"] for entry in entries] == [0.0] * 3
    assert [entry[f"{PREFIX}rollout_is_mean"] for entry in entries] == [1.0] * 3


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_with_a_real_sampler_on_each_rank(tiny_model_path, tmp_path, engine):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    found = launch_engine(engine, {**WITH_VLLM, "loses weights": LOSES_WEIGHTS}, tiny_model_path, tmp_path)
    assert_one_error(found.pop("loses weights"))
    assert_in_step(found)
