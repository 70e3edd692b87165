"""The skill for coding agents: it is where tools look for it, and every command, field and metric in it exists."""

import re

import pytest
import yaml

import trl_rollout_corr
from tests.launching import ROOT
from tests.test_docs import documented_keys, healthy_claims
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import make_parser
from trl_rollout_corr.health.bands import HEALTHY, in_words
from trl_rollout_corr.settings.documents import document


NAME = "trl-rollout-corr"
FILE = ROOT / f"trl_rollout_corr/.agents/skills/{NAME}/SKILL.md"
TEXT = FILE.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition(" #")[0].split()[1:] for kind, code in BLOCKS if kind == "bash" for line in code.splitlines()
]


def test_the_front_matter_is_that_of_the_standard():
    """https://agentskills.io: the name is that of the folder, and the description says when to use the skill."""
    head = yaml.safe_load(TEXT.split("---\n")[1])
    assert head["name"] == NAME == FILE.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert 0 < len(head["description"]) <= 1024
    assert "Use when" in head["description"]


def test_there_is_a_command_for_each_step():
    assert {command[0] for command in COMMANDS} == {
        "check", "probe", "diagnose", "compare", "report", "convert", "docs", "recipes",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_is_understood(command):
    make_parser().parse_args(command)  # leaves with an error if it is not
    if command[0] == "docs" and len(command) > 1:
        assert document(command[1])


def test_options_that_are_named_in_the_text_exist():
    for name in ("diagnose", "probe", "compare"):
        arguments = {"probe": ["MODEL"]}.get(name, ["DUMP"])
        assert make_parser().parse_args([name, *arguments, "--json"]).json


def test_fields_and_values_are_those_of_the_configuration():
    settings = re.findall(r"`?(\w+)=(\"\w+\"|True)", TEXT)
    named = set(re.findall(r"\b(rollout_\w+)=", TEXT)) | {"bypass_mode"}
    assert named <= set(RolloutCorrectionConfig.__dataclass_fields__)
    tried = [{name: value.strip('"')} for name, value in settings if name in named and value != "True"]
    tried += [{name: True} for name, value in settings if name in named and value == "True"]
    assert len(tried) > 8
    for fields in tried:
        RolloutCorrectionConfig(**fields)


def test_metrics_are_those_of_the_documents():
    table = TEXT.split("| metric |")[1].split("\n\n")[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert keys <= documented_keys()
    claims = healthy_claims(str(FILE.relative_to(ROOT)))
    for key in keys & set(HEALTHY):
        assert any(re.search(rf"(^|\W){re.escape(in_words(key))}(\W|$)", claim) for claim in claims[key]), claims[key]


def test_python_names_what_exists():
    (code,) = [code for kind, code in BLOCKS if kind == "python"]
    compile(code, str(FILE), "exec")
    for name in set(re.findall(r"RolloutCorrected\w+", TEXT)):
        assert hasattr(trl_rollout_corr, name)
