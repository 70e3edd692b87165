"""Examples and commands, run as users run them."""

import doctest
import json
import os
import shutil
import sys

import pytest

from tests.launching import ACCELERATE, ROOT, output_of, run
from trl_rollout_corr import compute_rollout_correction


LAUNCH = [
    ACCELERATE, "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--cpu",
]  # fmt: skip


@pytest.fixture(scope="session")
def sorting_model(tmp_path_factory) -> str:
    """The model of the quickstart, hardly warmed up."""
    folder = tmp_path_factory.mktemp("sorting")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'examples'); import sorting; "
        f"sorting.warm_start(Path({str(folder)!r}), steps=4)"
    )
    output_of(sys.executable, "-c", code)
    return str(folder)


@pytest.mark.vllm
@pytest.mark.parametrize(("trainer", "arm"), [("grpo", None), ("rloo", "disabled")])
def test_quickstart(sorting_model, tmp_path, trainer, arm):
    options = ["--trainer", trainer] if trainer != "grpo" else []
    options += ["--rollout_correction", arm] if arm else []
    output = output_of(
        *LAUNCH, "examples/quickstart.py", "--model_folder", sorting_model, "--output_dir", str(tmp_path),
        "--max_steps", "4", "--eval_every", "2", "--lag", "2", *options,
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
    assert len(result["history"]) == 4
    assert len(result["accuracy"]) == 3
    assert result["history"][-1]["rollout_corr/k3_kl"] > result["history"][0]["rollout_corr/k3_kl"]  # it fell behind
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


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
            *options, timeout=1200,
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
    output = output_of("make", "setup", timeout=20)
    assert "Installing" not in output


def test_setup_says_what_to_do_without_a_cpu_build_of_torch(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    result = run(
        "make", "--directory", str(tmp_path), "setup", f"PYTHON={sys.executable}", timeout=120,
        PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull,
    )  # fmt: skip
    assert result.returncode != 0
    assert "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" in result.stderr
