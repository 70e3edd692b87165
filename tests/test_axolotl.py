"""The plugin for Axolotl, with a stand-in of Axolotl's interface: its plugins, its configuration and its trainer."""

import importlib
import inspect
import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from tests.launching import ROOT, run
from tests.tiny import StaleSampler, length_reward, prompts
from tests.training import VLLM, assert_trains, config_fields, freeze_sampler, logged, losses
from trl_rollout_corr import RolloutCorrectedGRPOConfig
from trl_rollout_corr.trainers.mixin import RolloutCorrectionMixin


RECIPE = ROOT / "examples/axolotl/grpo.yaml"
PLUGIN, TRAINER = "trl_rollout_corr.axolotl.plugin", "trl_rollout_corr.axolotl.trainer"


class BasePlugin:
    def register(self, cfg: dict):
        pass


class AxolotlGRPOTrainer(GRPOTrainer):
    _tag_names = ["trl", "grpo", "axolotl"]

    def __init__(self, *args, data_collator=None, **kwargs):
        super().__init__(*args, **kwargs)


@dataclass
class AxolotlTrainingMixinsBase:
    model_type: str | None = None


def test_the_example_of_the_module_is_a_file_of_axolotl(plugin):
    text = inspect.getdoc(sys.modules["trl_rollout_corr.axolotl"])
    example = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert example == {"plugins": ["trl_rollout_corr.axolotl.RolloutCorrectionPlugin"], "rollout_correction": "auto"}


@pytest.fixture
def plugin(monkeypatch):
    for name, member in (
        ("axolotl.integrations.base", BasePlugin),
        ("axolotl.core.trainers.grpo.trainer", AxolotlGRPOTrainer),
    ):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
        setattr(sys.modules[name], member.__name__, member)
    for name in ("trl_rollout_corr.axolotl", PLUGIN, TRAINER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugin = importlib.import_module(PLUGIN)
    # Axolotl joins the fields of the plugins that it knows when its trainers are imported
    assert TRAINER not in sys.modules
    return plugin


def named(path: str):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def recipe() -> dict:
    return yaml.safe_load(RECIPE.read_text())


def build(cfg: dict, model: str, folder, **of_vllm):
    """A trainer, as Axolotl builds one from a YAML with a plugin. Without `of_vllm`, a function samples instead of vLLM."""
    plugin = named(cfg["plugins"][0])()
    plugin.register(cfg)
    keys = named(plugin.get_input_args())
    parsed = {key: value for key, value in keys(**cfg).model_dump().items() if value is not None}
    mixins = type("AxolotlTrainingMixins", (AxolotlTrainingMixinsBase, named(plugin.get_training_args_mixin())), {})
    config_class = dataclass(type("AxolotlGRPOConfig", (mixins, GRPOConfig), {"__annotations__": {}}))
    cfg_of_plugin = SimpleNamespace(**{**dict.fromkeys(keys.model_fields), **parsed})
    fields = {**config_fields(folder), "rollout_monitor": None, "max_steps": 2, "model_type": "qwen2", **of_vllm}
    args = config_class(**{**fields, **plugin.get_training_args(cfg_of_plugin)})
    trainer_class = named(cfg["trainer_cls"])
    assert "tokenizer" not in inspect.signature(trainer_class).parameters
    rollout_func = None if of_vllm else StaleSampler(model)
    return trainer_class(model, length_reward, args=args, train_dataset=prompts(64), rollout_func=rollout_func)


def test_a_run_of_axolotl_is_corrected(plugin, tiny_model_path, tmp_path):
    cfg = {
        **recipe(),
        "rollout_is_threshold": 3.0,
        "rollout_correction": "decoupled_token_is",
        "rollout_monitor": "none",
    }
    assert "trainer_cls" not in cfg  # the plugin names it
    trainer = build(cfg, tiny_model_path, tmp_path)
    assert isinstance(trainer, RolloutCorrectionMixin)
    assert isinstance(trainer, AxolotlGRPOTrainer)
    assert isinstance(trainer.args, RolloutCorrectedGRPOConfig)
    assert (trainer.args.rollout_correction, trainer.args.rollout_is_threshold) == ("decoupled_token_is", 3.0)
    assert trainer.args.settings.rollout_monitor is None
    assert not trainer.vllm_importance_sampling_correction
    assert_trains(trainer)
    assert "rollout_corr/rollout_is_mean" in trainer.state.log_history[0]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:A fraction of", "ignore:Every token")
@pytest.mark.parametrize("correction", ["auto", "trl"])
def test_a_missing_log_probability_stays_missing(
    plugin, tiny_model_path, tmp_path, shared_engine, monkeypatch, correction
):
    """Axolotl replaces TRL's `extract_logprobs` by one that reads NaN as 0.0, which is a probability of 1."""
    of_trl = vllm_generation.extract_logprobs

    def axolotl_logprobs(requests):
        logprobs, token_ids = of_trl(requests)
        return [[[0.0 if x is None else x for x in row] for row in rows] for rows in logprobs], token_ids

    monkeypatch.setattr(vllm_generation, "extract_logprobs", axolotl_logprobs)
    cfg = {**recipe(), "rollout_correction": correction, "rollout_monitor": "none"}
    trainer = build(cfg, tiny_model_path, tmp_path, **VLLM)
    freeze_sampler(trainer, math.nan)
    steps = losses(trainer)
    assert logged(trainer, "nonfinite_fraction") == [1.0, 1.0]
    assert (
        vllm_generation.extract_logprobs is axolotl_logprobs
    )  # what Axolotl set is replaced while our trainer samples only
    if correction == "auto":  # TRL takes a weight of 1 where none is known
        assert steps == [(0.0, 0.0)] * 2


def test_the_recipe_has_keys_of_the_plugin(plugin):
    cfg = recipe()
    assert {key for key in cfg if key.startswith("rollout_")} <= set(plugin.FIELDS)
    assert named(cfg["plugins"][0]) is plugin.RolloutCorrectionPlugin
    plugin.RolloutCorrectionPlugin().register(cfg)
    assert issubclass(named(cfg["trainer_cls"]), AxolotlGRPOTrainer)
    assert {"axolotl", "trl-rollout-corr"} <= set(named(cfg["trainer_cls"])._tag_names)


def test_the_recipe_names_a_data_set_and_a_reward_that_exist(plugin, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    cfg = recipe()
    prompt_of, mapping = named(cfg["datasets"][0]["type"])(cfg)
    row = prompt_of({"question": "How many?", "answer": "9 * 2 = 18\n#### 1,018"})
    assert row == {"prompt": "How many?", "answer": "1,018"}
    assert mapping == {"remove_columns": ["question"]}
    (reward,) = [named(name) for name in cfg["trl"]["reward_funcs"]]
    assert reward(["17, or 1,018.", "18", "none"], [row["answer"]] * 3) == [1.0, 0.0, 0.0]


def test_a_trainer_that_the_yaml_names_is_kept(plugin):
    cfg = {**recipe(), "trainer_cls": "mine.Trainer"}
    plugin.RolloutCorrectionPlugin().register(cfg)
    assert cfg["trainer_cls"] == "mine.Trainer"


def test_without_axolotl_the_error_names_it():
    process = run(sys.executable, "-c", "import trl_rollout_corr.axolotl")
    assert process.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'axolotl'")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rl": "dpo"}, "`rl` is 'dpo', but rollout correction supports only 'grpo'"),
        ({"trl": {"use_vllm": True, "async_prefetch": True}}, "`trl.async_prefetch` is True"),
        ({"trl": {"use_vllm": True, "use_data_producer": True}}, "`trl.use_data_producer` is True"),
        ({"context_parallel_size": 2}, "`context_parallel_size` is 2"),
        ({"trl": {}}, "`trl.use_vllm` is not true"),
    ],
)
def test_what_cannot_be_corrected_is_refused(plugin, changed, message):
    with pytest.raises(ValueError, match=message):
        plugin.RolloutCorrectionPlugin().register({**recipe(), **changed})
