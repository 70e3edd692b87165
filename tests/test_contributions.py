"""Texts for TRL's documentation: their code runs, and their form is TRL's."""

import re

import pytest
from trl import GRPOConfig

from tests.launching import ROOT
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectionConfig


FOLDER = ROOT / "contributions"
INDEX = (FOLDER / "trl/paper_index.md").read_text()
PAGE = (FOLDER / "trl/rollout_correction_integration.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", INDEX, re.MULTILINE | re.DOTALL))
# Presets that the entries spell out, or adapt
PRESETS = {
    "Rethinking the Trust Region in LLM Reinforcement Learning": "bypass_dppo_tv",
    "KPop": "decoupled_kpop",
    "INTELLECT-3: Technical Report": "decoupled_intellect3",
}


def python_of(text: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return code


def on_a_cpu(monkeypatch, folder):
    """Let configurations be built as on a user's machine, but for a CPU, and with a folder."""
    init = RolloutCorrectedGRPOConfig.__init__

    def of_test(self, *args, **fields):
        init(self, *args, **{"use_cpu": True, "bf16": False, "report_to": [], "output_dir": str(folder), **fields})

    monkeypatch.setattr(RolloutCorrectedGRPOConfig, "__init__", of_test)


@pytest.mark.parametrize("title", ENTRIES)
def test_an_entry_has_the_form_of_the_index_and_its_code_runs(title, monkeypatch, tmp_path):
    lines = [line for line in ENTRIES[title].splitlines() if line]
    assert re.fullmatch(r"\*\*(📜 Paper|📰 Blog)\*\*: https://\S+", lines[0])
    on_a_cpu(monkeypatch, tmp_path)
    found = {}
    exec(python_of(ENTRIES[title]), found)
    config = found["training_args"]
    assert isinstance(config, GRPOConfig)
    assert config.settings.corrects
    if title in PRESETS:
        assert config.settings == RolloutCorrectionConfig(rollout_correction=PRESETS[title]).settings
    for name, preset in re.findall(r"`(rollout_correction)=\"(\w+)\"`", ENTRIES[title]):
        assert RolloutCorrectionConfig(**{name: preset}).settings.corrects


def test_the_page_has_the_sections_of_an_integration():
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == [
        "When to use it", "Installation", "Quick start", "Limitations",
    ]  # fmt: skip
    assert PAGE.startswith("# Rollout Correction Integration\n")


def test_the_code_of_the_page_names_what_exists():
    code = python_of(PAGE)
    compile(code, "the page", "exec")
    fields = set(re.findall(r"^    (\w+)=", code, re.MULTILINE)) - {"model", "reward_funcs", "args", "train_dataset"}
    assert fields <= set(RolloutCorrectedGRPOConfig.__dataclass_fields__)
    assert "rollout_correction" in fields


@pytest.mark.slow  # it starts a vLLM engine
@pytest.mark.vllm
def test_the_quick_start_of_the_page_trains(tiny_model_path, shared_engine, monkeypatch, tmp_path):
    on_a_cpu(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = python_of(PAGE).replace("Qwen/Qwen2.5-0.5B-Instruct", tiny_model_path)
    code = code.replace("use_vllm=True,", "use_vllm=True, vllm_max_model_length=64, max_steps=1,")
    code = code.replace("trainer.train()", "prepare(trainer)\ntrainer.train()")
    from trl_rollout_corr.trainers.logprobs import sync_weights_on_cpu

    found = {"prepare": lambda trainer: sync_weights_on_cpu(trainer.vllm_generation)}
    exec(code, found)
    assert "rollout_corr/k3_kl" in found["trainer"].state.log_history[0]
    assert list((tmp_path / "Qwen2.5-0.5B-GRPO/dump").glob("*.parquet"))


def test_every_place_without_an_address_is_one_that_the_instructions_name():
    """Nobody has the address of a home yet. `contributions/README.md` says where to write it."""
    folders = ("benchmarks", "contributions", "docs", "examples", "recipes", "trl_rollout_corr")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    texts = {".md", ".ipynb", ".py", ".yaml", ".yml", ".toml", ".cff"}
    found = {path for path in paths if path.suffix in texts and "OWNER/trl-rollout-corr" in path.read_text()}
    assert {path.relative_to(ROOT).parts[0] for path in found} == {"contributions", "examples"}
    assert {path.parent for path in found if "examples" in path.parts} == {ROOT / "examples/notebooks"}
