"""Content of the installed package: everything that is needed, nothing that is not, and links that lead somewhere."""

import ast
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import trl_rollout_corr
from tests.launching import ROOT, output_of
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.recipes import write_recipes


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FROM_TRL = {"accelerate", "datasets", "transformers"}  # TRL says which releases
NAMES = {"yaml": "pyyaml"}  # of distributions, where a module has another


def test_all_that_is_imported_is_declared():
    declared = {re.match(r"[\w-]+", entry)[0] for entry in PROJECT["dependencies"]}
    optional = {"matplotlib", "vllm", "peft", "wandb", "trackio", "tensorboard", "deepspeed", "axolotl"}
    imported = set()
    for path in Path(trl_rollout_corr.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names):
                if module == "pydantic" and path.parent.name == "axolotl":
                    continue  # Axolotl brings it
                name = NAMES.get(module, module)
                imported.add(name)
                assert name in declared | FROM_TRL | optional | {"trl_rollout_corr"}, f"{path.name} imports {module}"
    assert declared <= imported
    trl = {re.match(r"[\w-]+", entry)[0] for entry in importlib.metadata.requires("trl")}
    assert trl >= FROM_TRL


def test_the_version_is_the_same_everywhere(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    version = trl_rollout_corr.__version__
    assert capsys.readouterr().out == f"trl-rollout-corr {version}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert output_of(sys.executable, "-m", "hatchling", "version").strip() == version
    assert 'test "v$(hatchling version)" = "$GITHUB_REF_NAME"' in (ROOT / ".github/workflows/release.yml").read_text()


def test_recipes_are_written_out_once(tmp_path, capsys):
    assert main(["recipes", str(tmp_path / "new")]) == 0
    assert "accelerate launch" in capsys.readouterr().out
    for path in [*ROOT.glob("recipes/**/*.*"), *ROOT.glob("examples/*.py")]:
        assert (tmp_path / "new" / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert not list(tmp_path.rglob("__pycache__"))
    assert main(["recipes", str(tmp_path / "new")]) == 2
    assert "already contains recipes and examples" in capsys.readouterr().err


def test_what_it_says_next_exists(tmp_path):
    found = re.findall(r"(?:recipes|examples)/\S+\.\w+", write_recipes(tmp_path))
    assert found
    for path in found:
        assert (tmp_path / path).exists()


def wheel_of(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


def test_the_wheel_has_the_package_and_the_recipes(built):
    names = set(zipfile.ZipFile(wheel_of(built)).namelist())
    for path in Path(trl_rollout_corr.__file__).parent.rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    assert "trl_rollout_corr/py.typed" in names
    assert "trl_rollout_corr/.agents/skills/trl-rollout-corr/SKILL.md" in names  # where `library-skills` looks
    assert {f"trl_rollout_corr/tools/report/templates/page.{kind}" for kind in ("css", "html")} <= names
    for path in [*ROOT.glob("recipes/**/*.*"), *ROOT.glob("examples/*.py"), *ROOT.glob("docs/*.md")]:
        assert f"trl_rollout_corr/shipped/{path.relative_to(ROOT)}" in names
    assert not [name for name in names if name.endswith(".pyc")]
    assert {name.split("/")[0] for name in names} == {
        "trl_rollout_corr",
        f"trl_rollout_corr-{trl_rollout_corr.__version__}.dist-info",
    }


def test_the_metadata_has_the_readme_and_no_address(built):
    """Nobody has the address of a home yet."""
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()
    assert metadata.get_all("Project-URL") is None
    for document in ("README.md", "README.zh-CN.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml"):
        assert not re.search(
            r"//[\w.]*(github\.com/trl-rollout-corr|trl-rollout-corr\.)", (ROOT / document).read_text()
        )


def test_the_source_distribution_is_clean(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    for needed in (
        "recipes/grpo/cpu.yaml",
        "examples/quickstart.py",
        "tests/test_packaging.py",
        ".github/workflows/ci.yml",  # read by tests, as `AGENTS.md` is
        "LICENSE",
        "Makefile",
    ):
        assert needed in names
    allowed = {
        ".github", "trl_rollout_corr", "benchmarks", "contributions", "docs", "examples", "recipes", "tests",
    }  # fmt: skip
    files = {
        ".gitignore", "AGENTS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO",
        "README.md", "README.zh-CN.md", "constraints.txt", "mkdocs.yml", "pyproject.toml",
    }  # fmt: skip
    assert {name.split("/")[0] for name in names} == allowed | files
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".partial"))]


def test_the_pretrained_model_of_the_quickstart_names_a_command_that_works_without_a_clone(tmp_path):
    write_recipes(tmp_path)
    code = "import sys; sys.modules['gguf'] = None; import smollm2; smollm2.make_model()"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "examples", capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert process.stderr.endswith(": pip install gguf==0.19.0 peft\n")


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    run_in = tmp_path / "empty/bin"
    (tmp_path / "constraints.txt").write_text(f"torch=={torch.__version__}\n")  # the build for CPUs
    command = [str(run_in / "python"), "-m", "pip", "install", "--quiet", str(wheel_of(built))]
    command += ["--constraint", str(tmp_path / "constraints.txt")]
    command += ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command: str) -> str:
        process = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        return process.stdout

    call(*command)
    tool = str(run_in / "trl-rollout-corr")
    assert trl_rollout_corr.__version__ in call(tool, "--version")
    assert "can be corrected" in call(tool, "check")
    assert {"debugging", "fields", "verl"} <= {line.split(" ")[0] for line in call(tool, "docs").splitlines()}
    assert "Wrote" in call(tool, "recipes", "written")
    assert (tmp_path / "written/recipes/grpo/cpu.yaml").exists()
    (tmp_path / "old.yaml").write_text("algorithm:\n  rollout_correction:\n    rollout_is: token\n")
    assert "rollout_is" in call(tool, "convert", "old.yaml")
    call(str(run_in / "python"), "-c", "from trl_rollout_corr import *")
