"""The page about papers: settings that a run takes, and presets that mean what the page says."""

import math
import re
import warnings

import pytest
import yaml

from tests.launching import ROOT
from tests.training import PLAIN
from trl_rollout_corr import RolloutCorrectedGRPOConfig
from trl_rollout_corr.settings.presets import PRESETS


PAGE = (ROOT / "docs/papers.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SNIPPETS = {
    f"{name} {number}": yaml.safe_load(text)
    for name, section in SECTIONS.items()
    for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
}


def config_of(settings: dict, folder) -> RolloutCorrectedGRPOConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a snippet that needs a warning is not one to paste
        return RolloutCorrectedGRPOConfig(str(folder), **{**PLAIN, "use_vllm": True, **settings})


def test_every_paper_has_a_link_and_all_but_the_last_have_settings():
    words, index, *papers, covered, without = SECTIONS
    assert (words, index) == ("Words on this page", "All papers")
    assert (covered, without) == ("Papers that TRL covers", "Papers without settings here")
    assert len(papers) > 10
    for name in papers:
        assert re.search(r"\]\(https://", SECTIONS[name]), name
        assert f"{name} 0" in SNIPPETS


def test_the_table_of_papers_has_every_section_with_its_settings():
    rows = re.findall(r"^\| \[.+?\]\(#([\w-]+)\) \| (.+?) \|", SECTIONS["All papers"], re.MULTILINE)
    _, _, *names = SECTIONS
    assert [anchor for anchor, _ in rows] == [re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in names]
    for name, (_, settings) in zip(names, rows, strict=True):
        for field in re.findall(r"`(\w+)`", settings):
            snippets = [snippet for key, snippet in SNIPPETS.items() if key.rsplit(" ", 1)[0] == name]
            assert any(field in snippet or field == snippet.get("rollout_correction") for snippet in snippets), field


def test_rules_of_the_arena_from_papers_are_on_the_page():
    rules = (ROOT / "benchmarks/arena/rules.py").read_text()
    assert len(papers := set(re.findall(r"https://huggingface.co/papers/[\d.]+\d", rules))) > 3
    assert [paper for paper in papers if paper not in PAGE] == []


def test_ratios_of_the_example_of_trust_region_masking():
    bound = SNIPPETS["Trust-region masking 0"]["rollout_rs_threshold"][0]
    ratios = re.search(r"all of its ratios are\s+between\s+([\d.]+) and ([\d.]+)\.", SECTIONS["Trust-region masking"])
    for ratio in ratios.groups():
        assert float(ratio) - 1 - math.log(float(ratio)) == pytest.approx(bound, rel=0.05)


@pytest.mark.parametrize("name", SNIPPETS)
def test_settings_are_taken(name, tmp_path):
    assert SNIPPETS[name].keys() <= RolloutCorrectedGRPOConfig.__dataclass_fields__.keys()
    config = config_of(SNIPPETS[name], tmp_path)
    for field, value in SNIPPETS[name].items():
        assert getattr(config, field) == value, field


def test_presets_of_papers_are_on_the_page():
    """Those with the bounds of a publication. Others are combinations of the same parts."""
    named = {settings.get("rollout_correction") for settings in SNIPPETS.values()} - {None}
    assert named <= set(PRESETS)
    assert {"bypass_dppo_tv", "bypass_dppo_kl", "decoupled_kpop", "decoupled_intellect3"} <= named


@pytest.mark.parametrize("name", ["IcePop 0", "DPPO 0", "DPPO 1", "KPop 0", "Truncated importance sampling (TIS) 0"])
def test_bounds_that_are_written_out_are_those_of_the_preset(name, tmp_path):
    preset = {"rollout_correction": SNIPPETS[name]["rollout_correction"]}
    assert config_of(SNIPPETS[name], tmp_path).settings == config_of(preset, tmp_path).settings
    assert SNIPPETS[name] != preset


def test_weights_of_topr_look_at_the_sign_and_are_of_completions(tmp_path):
    bounding = config_of(SNIPPETS["TOPR 0"], tmp_path).settings.bounding
    assert (bounding.level, bounding.lower, bounding.upper, bounding.positive) == ("sequence", 0, 1, (1, 1))
    assert bounding.clamps
