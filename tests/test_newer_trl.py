"""A TRL that is newer than the tested ones: it starts, is refused by name, or corrects itself."""

import dataclasses
import json
import re
import shutil
import sys
from types import ModuleType

import pytest
import torch
import trl
from trl import GRPOTrainer, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from tests.editing import copy_trl
from tests.launching import ROOT, run
from tests.tiny import StaleSampler
from tests.training import TRAINERS, assert_same_steps, build, losses, micro_batches
from trl_rollout_corr import RolloutCorrectedGRPOConfig
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools import check
from trl_rollout_corr.trainers import trl_interface, versions
from trl_rollout_corr.trainers.versions import FIRST_UNSUPPORTED, OLDEST, Version, without_trl_correction


# Its version ----------------------------------------------------------------------------------------------------------


def pretend(monkeypatch, version: str):
    monkeypatch.setattr(trl_interface, "version", lambda name: version)
    monkeypatch.setattr(trl_interface, "release", lambda: Version(Version(version).base_version))
    monkeypatch.setattr(trl_interface, "_warned", set())


@pytest.mark.parametrize("version", ["1.9.2", "1.10.0", "0.29.1", "2.0.0", "2.0.0.dev0"])
def test_a_release_outside_the_window_is_refused(monkeypatch, version):
    pretend(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl {version}.*constraints\.txt"):
        trl_interface.check_trl(GRPOTrainer)


@pytest.mark.parametrize("version", ["0.29.1", "1.9.2", "1.10.0"])
def test_an_older_release_hears_which_one_to_take(monkeypatch, version):
    pretend(monkeypatch, version)
    with pytest.raises(ImportError, match=r'`pip install "trl==1\.11\.\*"`, which works with vLLM up to 0\.27\.1'):
        trl_interface.check_trl(GRPOTrainer)


def test_check_names_the_window_to_whoever_is_outside_it(monkeypatch, capsys):
    monkeypatch.setattr(versions, "release", lambda: Version("0.24.0"))  # which has no `VLLMGeneration`
    monkeypatch.setattr(check, "version", lambda name: "0.24.0")
    assert main(["check"]) == 1
    assert f"works with trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl 0.24.0" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["1.11.0", "1.14.2", "1.15.0.dev0", "1.16.3"])
def test_a_release_in_the_window_is_silent(monkeypatch, version):
    pretend(monkeypatch, version)
    trl_interface.check_trl(GRPOTrainer)


@pytest.mark.parametrize("version", ["1.17.0", "1.17.0.dev0", "1.99.1"])
def test_a_newer_release_is_warned_about_once(monkeypatch, version):
    pretend(monkeypatch, version)
    with pytest.warns(UserWarning, match=rf"trl {version} is newer.*constraints\.txt"):
        trl_interface.check_trl(GRPOTrainer)
    trl_interface.check_trl(RLOOTrainer)  # a second warning would be an error here
    trl_interface.check_trl(GRPOTrainer)


# What it has moved ----------------------------------------------------------------------------------------------------

TRAIN = """
import json, sys, warnings
sys.modules["vllm"] = None  # which takes a third of the time to import
import tests.conftest
from tests.training import TRAINERS, build, losses
from tests.tiny import StaleSampler
from trl_rollout_corr.__main__ import main

model, folder = sys.argv[1:]
code = main(["check"])
found, error = [], None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        for _ in range(2):
            found.append(losses(build(*TRAINERS["grpo"], model, folder, sampler=StaleSampler(model))))
    except ImportError as refused:
        error = str(refused)
told = [str(w.message) for w in caught if "trl-rollout-corr" in str(w.message)]
print(json.dumps({"code": code, "losses": found, "error": error, "told": told}))
"""


def train_on(trl: str, model: str, folder) -> tuple[str, dict]:
    """Check and train in a process with another TRL. Returns what `check` printed, and what happened."""
    process = run(sys.executable, "-c", TRAIN, model, str(folder), PYTHONPATH=f"{trl}:{ROOT}")
    assert process.returncode == 0, process.stderr[-5000:]
    report, _, last = process.stdout.rstrip().rpartition("\n")
    return report, json.loads(last[last.index('{"code"') :])


APPENDED = {
    "trainer/grpo_trainer.py": [
        ("def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None",
         "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, scale=1.0"),
        ("def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list",
         "def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list, extra=None"),
        ('"completion_mask": completion_mask,', '"completion_mask": completion_mask, "new_key": completion_mask,'),
    ],
}  # fmt: skip


def test_a_newer_trl_with_everything_in_its_place_trains_with_one_warning(tiny_model_path, tmp_path):
    report, found = train_on(copy_trl(tmp_path / "trl", "1.17.0", APPENDED), tiny_model_path, tmp_path)
    assert found["code"] == 0
    assert "trl 1.17.0 can be corrected. It is newer than the tested releases" in report
    assert found["error"] is None
    assert [message for message in found["told"] if "trl 1.17.0 is newer" in message] == found["told"] != []
    assert len(found["told"]) == 1
    sampler = StaleSampler(tiny_model_path)
    expected = losses(build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler))
    assert_same_steps([tuple(step) for step in found["losses"][0]], expected)


def assert_names_what_has_moved(error: str, report: str):
    for name in (
        "`GRPOTrainer._calculate_rewards` starts with",
        "`VLLMGeneration._iter_named_params` is gone",
    ):
        assert name in error, name
        assert name in report, name
    assert "`RLOOTrainer" not in error


def test_names_that_have_moved_are_refused(tiny_model_path, tmp_path, monkeypatch, capsys):
    """Classes of the installed TRL lose the names."""
    pretend(monkeypatch, "1.18.0")
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, prompts, inputs, *others: None)
    monkeypatch.delattr(VLLMGeneration, "_iter_named_params")
    with pytest.raises(ImportError) as refused:
        build(*TRAINERS["grpo"], tiny_model_path, tmp_path)
    assert main(["check"]) == 1
    assert_names_what_has_moved(str(refused.value), capsys.readouterr().out)


def test_unsloth_is_named(monkeypatch, capsys):
    """`import unsloth` puts generated classes in place of TRL's."""
    parent = type("_UnslothGRPOTrainer", (RLOOTrainer,), {"__module__": "UnslothGRPOTrainer"})
    generated = type("GRPOTrainer", (parent,), {"__module__": "UnslothGRPOTrainer"})
    with pytest.raises(
        ImportError, match=r"`GRPOTrainer` is Unsloth's: `import unsloth` replaces .* on dumps"
    ) as refused:
        trl_interface.check_trl(generated)
    assert "changed names" not in str(refused.value)
    monkeypatch.setattr(trl_interface, "GRPOTrainer", generated)
    assert main(["check"]) == 1
    assert "`GRPOTrainer` is Unsloth's" in capsys.readouterr().out


def test_the_installed_trl_passes_the_check(capsys):
    assert main(["check"]) == 0
    assert "can be corrected" in capsys.readouterr().out


# What it corrects itself ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class NewGRPOConfig(RolloutCorrectedGRPOConfig):
    """TRL of the future, with a correction that is on by default."""

    vllm_importance_sampling_twice: bool = True
    vllm_importance_sampling_level: str = "token"


def test_a_correction_that_is_not_known_is_switched_off_and_named(tmp_path):
    config = NewGRPOConfig(str(tmp_path), bf16=False, rollout_correction="auto")
    with without_trl_correction(config, config.settings):
        assert not config.vllm_importance_sampling_twice
        assert not config.vllm_importance_sampling_correction
    assert config.vllm_importance_sampling_twice  # for a trainer of TRL
    with pytest.warns(UserWarning, match=r"`vllm_importance_sampling_level='sequence'` has no effect"):
        NewGRPOConfig(str(tmp_path), bf16=False, rollout_correction="auto", vllm_importance_sampling_level="sequence")


def test_weights_of_trl_in_a_batch_are_an_error(tiny_model_path, tmp_path, monkeypatch):
    score = GRPOTrainer._generate_and_score_completions

    def weighted(self, inputs):
        output = score(self, inputs)
        return {**output, "importance_sampling_ratio": torch.ones_like(output["sampling_per_token_logps"])}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", weighted)
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path))
    with pytest.raises(RuntimeError, match=r"put `importance_sampling_ratio` into the batch.*corrected twice"):
        micro_batches(trainer)


# Its asynchronous trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def upstream():
    return pytest.importorskip("trl_rollout_corr.asynchronous.trl_parts", exc_type=ImportError)


def test_the_asynchronous_trainer_is_found_at_its_newest_place(upstream, monkeypatch):
    trainer = ModuleType("trl.trainer.async_grpo_trainer")
    vars(trainer).update(
        {name: type(name, (), {"__module__": trainer.__name__}) for name in ("AsyncGRPOTrainer", *upstream._PARTS)}
    )
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    monkeypatch.setattr(trl, "AsyncGRPOTrainer", trainer.AsyncGRPOTrainer, raising=False)
    found = upstream.find_parts()
    assert found["AsyncGRPOTrainer"] is trainer.AsyncGRPOTrainer
    assert found["TreeRow"] is trainer.TreeRow


def test_missing_parts_of_the_asynchronous_trainer_are_named(upstream, monkeypatch):
    module = sys.modules[upstream.AsyncGRPOTrainer.__module__]
    monkeypatch.delattr(module, "TreeRow")
    monkeypatch.delattr(module, "AsyncRolloutWorker")
    with pytest.raises(ImportError, match=r"lacks parts .*: `AsyncRolloutWorker`, `TreeRow` in .*constraints.txt"):
        upstream.find_parts()
    monkeypatch.setattr(upstream, "_PLACES", ("trl", "trl.moved_elsewhere"))
    with pytest.raises(
        ImportError, match=r"`AsyncGRPOTrainer`, which was not found in `trl` or `trl.moved_elsewhere`"
    ):
        upstream.find_parts()


def test_methods_that_the_asynchronous_trainer_has_moved_are_refused(upstream):
    from trl_rollout_corr.asynchronous.trl_parts import METHODS

    owner, methods = upstream.AsyncGRPOTrainer, {"_sync_weight": ["self"], "push": ["self"]}
    assert trl_interface.changes(owner, METHODS) == []
    assert trl_interface.changes(owner, methods) == ["`AsyncGRPOTrainer.push` is gone."]


ASYNCHRONOUS = """
import sys
import tests.conftest
from tests.asynchronous import build_ours, parts_for_a_cpu
from trl_rollout_corr.asynchronous import trl_parts as upstream

trainer = build_ours(*sys.argv[1:], max_steps=1)
trainer.train()
print(upstream.AsyncGRPOTrainer.__module__, parts_for_a_cpu()._CLIENT.__name__, trainer.state.global_step)
"""


def in_the_layout_announced(folder) -> str:
    """A copy of TRL with the announced layout of the asynchronous trainer."""
    names = '"AsyncGRPOTrainer", "GRPOTrainer",'
    structure = '"async_grpo_trainer": ["AsyncGRPOTrainer"], "grpo_trainer": ['
    edits = {
        "__init__.py": [('        "GRPOTrainer",', names)],
        "trainer/__init__.py": [('"grpo_trainer": [', structure)],
    }
    path = copy_trl(folder, "1.18.2", edits)
    package, before = folder / "trl", folder / "trl/experimental/async_grpo"
    for module in before.glob("*.py"):
        source = module.read_text().replace("from ...trainer", "from trl.trainer").replace("from ...", "from ..")
        source = source.replace("from .vllm_client", "from ..generation.async_vllm_client")
        source = re.sub(r"\bVLLMClient\b", "AsyncVLLMClient", source)
        if module.name == "vllm_client.py":
            (package / "generation/async_vllm_client.py").write_text(source)
        elif module.name != "__init__.py":
            (package / "trainer" / module.name).write_text(source)
    shutil.rmtree(before)
    return path


@pytest.mark.slow
def test_the_asynchronous_trainer_trains_in_the_layout_announced(upstream, tiny_model_path, tmp_path):
    path = in_the_layout_announced(tmp_path / "trl")
    process = run(sys.executable, "-c", ASYNCHRONOUS, tiny_model_path, str(tmp_path), PYTHONPATH=f"{path}:{ROOT}")
    assert process.returncode == 0, process.stderr[-5000:]
    assert "trl.trainer.async_grpo_trainer AsyncVLLMClient 1" in process.stdout
