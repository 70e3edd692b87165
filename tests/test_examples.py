"""Examples and commands, run as users run them."""

import doctest
import json
import os
import shutil
import sys

import pytest

from tests.launching import ACCELERATE, ROOT, free_port, output_of, run
from trl_rollout_corr import compute_rollout_correction


LAUNCH = [
    ACCELERATE, "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--cpu",
]  # fmt: skip


# A compiled engine takes half a minute to start; the slow test below has one
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}


@pytest.fixture(scope="module")
def sorting_model(tmp_path_factory) -> str:
    """The model of the quickstart, hardly warmed up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import sorting

        return str(sorting.warm_start(tmp_path_factory.mktemp("sorting"), steps=4))


@pytest.mark.vllm
@pytest.mark.parametrize(("trainer", "arm"), [("grpo", None), ("rloo", "disabled")])
def test_quickstart(sorting_model, tmp_path, trainer, arm):
    options = ["--trainer", trainer] if trainer != "grpo" else []
    options += ["--rollout_correction", arm] if arm else []
    # such a model never earns a reward, so that it is the decay of its weights which moves it away from the sampler
    options += ["--weight_decay", "1", "--learning_rate", "0.05"]
    output = output_of(
        *LAUNCH, "examples/quickstart.py", "--model_folder", sorting_model, "--output_dir", str(tmp_path),
        "--max_steps", "4", "--eval_every", "2", "--lag", "2", *options, MASTER_PORT=str(free_port()), **UNCOMPILED,
    )  # fmt: skip
    for row in (
        "held-out accuracy before",
        "held-out accuracy after",
        "KL from sampler",
        "sample size",
        "tokens kept",
    ):
        assert row in output
    result = json.loads((tmp_path / f"{trainer}_{arm or 'decoupled_geo_rs_token_tis'}.json").read_text())
    assert len(result["accuracy"]) == 3
    assert [window["rollout_corr/sampler_lag"] for window in result["history"]] == [0, 1, 2, 2]
    in_step, *_, behind = (window["rollout_corr/k3_kl"] for window in result["history"])
    assert behind > 20 * in_step  # which is rounding
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.vllm
def test_quickstart_with_a_server(sorting_model, tmp_path):
    options = ["--trainer", "async_grpo", "--model_folder", sorting_model, "--output_dir", str(tmp_path)]
    # as above, it is decay that moves the weights; and that it does so is seen by samples that are some steps old
    options += ["--max_steps", "6", "--eval_every", "3", "--weight_decay", "1", "--learning_rate", "0.05"]
    output = output_of(*LAUNCH, "examples/quickstart.py", *options, **UNCOMPILED)
    for row in ("mean age", "held-out accuracy after", "KL from sampler"):
        assert row in output
    (path,) = tmp_path.glob("async_grpo_*.json")
    result = json.loads(path.read_text())
    assert result["steps"] == [0, 3, 6]
    assert len(result["accuracy"]) == 3
    assert max(window["rollout_corr/staleness_max"] for window in result["history"]) >= 1
    assert result["history"][-1]["rollout_corr/k3_kl"] > 20 * result["history"][0]["rollout_corr/k3_kl"]
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_quickstart_rescues_a_run_that_collapses(tmp_path, trainer):
    final = {}
    for arm in (None, "disabled"):
        options = ["--trainer", trainer]
        options += ["--rollout_correction", arm] if arm else []
        output_of(
            *LAUNCH, "examples/quickstart.py", "--output_dir", str(tmp_path), "--model_folder", str(tmp_path / "model"),
            *options, MASTER_PORT=str(free_port()),
        )  # fmt: skip
        result = json.loads((tmp_path / f"{trainer}_{arm or 'decoupled_geo_rs_token_tis'}.json").read_text())
        final[arm] = sum(result["accuracy"][-3:]) / 3
        before = result["accuracy"][0]
    assert final[None] > before + 0.1
    assert final["disabled"] < before - 0.1


def test_the_example_in_the_docstring_of_the_correction():
    docstring = compute_rollout_correction.__doc__.replace("```python", "").replace("```", "")
    example = doctest.DocTestParser().get_doctest(docstring, {}, "example", None, None)
    assert len(example.examples) > 3
    assert doctest.DocTestRunner().run(example).failed == 0


def test_setup_does_nothing_the_second_time():
    if not list((ROOT / ".venv").glob(".installed-*")):
        pytest.skip("not set up by `make setup`")
    output = output_of("make", "setup")
    assert "Installing" not in output


def test_setup_says_what_to_do_without_a_cpu_build_of_torch(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    result = run(
        "make", "--directory", str(tmp_path), "setup", f"PYTHON={sys.executable}",
        PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull,
    )  # fmt: skip
    assert result.returncode != 0
    assert "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" in result.stderr
