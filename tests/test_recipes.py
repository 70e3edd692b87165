"""Every recipe is what it says, parses without a warning, and trains."""

import dataclasses
import json
import re
import shlex
import sys
import tomllib
import warnings
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from tests.launching import ACCELERATE, ROOT, UNCOMPILED, free_port, run
from tests.tiny import with_tools
from tests.training import TRAINERS, assert_in_step
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.tools.diagnosis.causes import CAUSES


RECIPES = sorted(str(path.relative_to(ROOT / "recipes")) for path in ROOT.glob("recipes/*/*.yaml"))
ENGINES = [name for name in RECIPES if name.startswith("accelerate/")]
RECIPES = [name for name in RECIPES if name not in ENGINES]
ASYNCHRONOUS = [name for name in RECIPES if name.startswith("async_grpo/")]
AGENT = "grpo/agent.yaml"  # of an example of its own
OWN = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
# There to be seen and changed, whatever their defaults.
ALWAYS_WRITTEN = {"rollout_correction", "output_dir", "model_name_or_path", "use_vllm", "logging_steps"}


# They keep TRL's loss, or correct nothing
MEASURES = {
    "grpo/cpu.yaml",
    "grpo/trl.yaml",
    "grpo/trl_token_truncate.yaml",
    "grpo/fp16.yaml",
    "rloo/trl.yaml",
    "async_grpo/trl.yaml",
}


def text(recipe: str) -> str:
    return (ROOT / "recipes" / recipe).read_text()


def settings(recipe: str) -> dict:
    return yaml.safe_load(text(recipe))


def on_a_cpu(folder: Path) -> list[str]:
    return ["--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--output_dir", str(folder)]


def parse(recipe: str, *options: str) -> tuple:
    config_class = TRAINERS[recipe.split("/")[0]][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import async_grpo
    model_config = async_grpo.ModelArguments if recipe in ASYNCHRONOUS else ModelConfig
    parser = TrlParser((ScriptArguments, config_class, model_config))
    return parser.parse_args_and_config(["--config", str(ROOT / "recipes" / recipe), *options])


def correction(config: RolloutCorrectionConfig) -> dict:
    """The fields of rollout correction, with the preset resolved."""
    return {name: getattr(config.settings, name) for name in OWN - {"rollout_correction"}}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_parse_without_a_warning(recipe, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, args, model_args = parse(recipe, *on_a_cpu(tmp_path))
    said = [str(w.message) for w in caught if "rollout" in str(w.message) or "vllm" in str(w.message)]
    few = re.search(
        r"effective sample size is \d+ %", text(recipe)
    )  # of the recipes of verl, with completions as long as there
    size = few[0].split("is ")[1] if few else ""
    assert [f"tokens) is {size}, because" in message for message in said] == [True] if few else said == []
    assert args.settings.corrects == (recipe not in MEASURES) or args.settings.by_trl
    assert "/" in model_args.model_name_or_path
    assert recipe in ASYNCHRONOUS or args.use_vllm  # the former have no other sampler
    assert args.output_dir == str(tmp_path)
    assert settings(recipe)["output_dir"] == f"outputs/{recipe.replace('/', '_').removesuffix('.yaml')}"


# Recipes of verl with thousands of tokens and weights of completions, which the configuration warns of
ABOUT_LENGTH = pytest.mark.filterwarnings("ignore:.*one weight, the product of its tokens")


@ABOUT_LENGTH
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_for_stale_weights_says_so(recipe, tmp_path):
    """What compares with vLLM at each step, however new its weights are, is for stale weights."""
    _, args, _ = parse(recipe, *on_a_cpu(tmp_path))
    header = text(recipe).split("output_dir:")[0]
    assert ("# Only for a vLLM that is behind" in header) == (args.settings.bypass_mode and args.settings.changes_loss)


def test_no_two_recipes_are_the_same():
    seen = {}
    for recipe in RECIPES:
        found = {name: value for name, value in settings(recipe).items() if name != "output_dir"}
        key = recipe.split("/")[0], json.dumps(found, sort_keys=True)
        assert key not in seen, f"{recipe} is {seen.get(key)} under another name"
        seen[key] = recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_hold_only_what_differs_from_the_defaults(recipe, tmp_path):
    config_class = TRAINERS[recipe.split("/")[0]][1]
    fields = {f.name: f for c in (ScriptArguments, config_class, ModelConfig) for f in dataclasses.fields(c)}
    for name, value in settings(recipe).items():
        field = fields[name]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert name in ALWAYS_WRITTEN or value != default, f"`{name}: {value}` is the default"


def test_recipes_with_an_adapter_name_the_extra_that_they_need():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["peft"] == [extras["vllm"][0].replace("vllm", "peft")]  # TRL says which releases it works with
    assert "peft" in metadata("trl").get_all("Provides-Extra")
    with_adapter = [recipe for recipe in RECIPES if settings(recipe).get("use_peft")]
    assert len(with_adapter) == 2
    for recipe in with_adapter:
        assert 'pip install "trl[peft]"' in text(recipe).split("output_dir:")[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_headers_give_hardware_command_and_expectation(recipe):
    header = text(recipe).split("output_dir:")[0]
    for entry in ("Hardware:", "Command:", "Expect:"):
        assert f"\n# {entry}" in header
    assert f"--config recipes/{recipe}" in header
    assert f"examples/{'agent' if recipe == AGENT else recipe.split('/')[0]}.py" in header
    for path in re.findall(r"(?:recipes|examples)/[\w/.]+\w", header):
        assert (ROOT / path).exists(), path


def test_every_recipe_is_in_the_table():
    table = (ROOT / "recipes/README.md").read_text()
    linked = re.findall(r"\]\((\w+/\w+\.yaml)\)", table)
    assert set(linked) == {*RECIPES, *ENGINES}


# The configurations and runs of verl's README on rollout correction, as its scripts write them.
SCRIPTS = {
    "rloo/self_normalized_seq_is.yaml": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
        "bypass_mode": True,
        "rollout_loss_type": "reinforce",
    },
    "grpo/multi_rs_token_is.yaml": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.6_1.6,2.5",
        "bypass_mode": True,
        "rollout_loss_type": "ppo_clip",
    },
    "grpo/seq_is_token_rs.yaml": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 3.0,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.5_2.0",
    },
    "grpo/multi_rs.yaml": {
        "rollout_is": "null",
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.7_1.4,2.0",
        "bypass_mode": True,
    },
    "grpo/debug_weights.yaml": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
}


@ABOUT_LENGTH
@pytest.mark.parametrize("recipe", SCRIPTS)
def test_recipes_say_what_their_originals_said(recipe, tmp_path):
    expected = RolloutCorrectionConfig(**SCRIPTS[recipe])
    _, args, _ = parse(recipe, *on_a_cpu(tmp_path))
    assert correction(args) == correction(expected)


@pytest.fixture(scope="session")
def questions(tmp_path_factory) -> str:
    """A dataset in the form of GSM8K."""
    folder = tmp_path_factory.mktemp("questions")
    for split, size in (("train", 64), ("test", 4)):
        rows = [{"question": f"{i} + {i}", "answer": f"add: {i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(size)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def small(model: str, questions: str, folder: Path) -> list[str]:
    """Options of a run of seconds."""
    return [
        *on_a_cpu(folder), "--model_name_or_path", model, "--dtype", "float32", "--dataset_name", questions,
        "--max_steps", "2", "--num_generations", "4", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--max_completion_length", "8", "--disable_tqdm", "true",
    ]  # fmt: skip


@pytest.fixture
def train(tiny_model_path, questions, tmp_path, shared_engine, monkeypatch):
    """Runs an example on a recipe, with a small model, dataset and batch."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import run

    def train(recipe: str, *options: str):
        arguments = ["--config", str(ROOT / "recipes" / recipe), *small(tiny_model_path, questions, tmp_path)]
        return run.train(*TRAINERS[recipe.split("/")[0]], "", [*arguments, "--save_strategy", "no", *options])

    return train


# What `diagnose` points at, by cause
OF_PRECISION = {"rounding": ["grpo/fp32_head.yaml", "grpo/fp16.yaml"], "head": ["grpo/fp32_head.yaml"]}
# Launched by the commands of the README
LAUNCHED = ("grpo/cpu.yaml", "rloo/auto.yaml")
NOT_TRAINED = ("grpo/server.yaml",)  # the server takes weights through NCCL, which needs GPUs
OWN_ENGINES = ("grpo/fp16.yaml", "grpo/fp8.yaml")  # of other types
ELSEWHERE = (*ASYNCHRONOUS, *NOT_TRAINED, AGENT, *OWN_ENGINES)


@pytest.mark.parametrize("cause", OF_PRECISION)
def test_remedies_point_at_recipes_of_precision(cause):
    named = re.findall(r"recipe (\S+\.yaml)", CAUSES[cause].remedy)
    assert named == OF_PRECISION[cause]
    assert CAUSES[cause].advised.items() <= settings(named[0]).items()


@pytest.mark.slow
@pytest.mark.vllm
def test_float16_is_on_both_sides(train):
    trainer = train("grpo/fp16.yaml", "--log_completions", "false")
    assert trainer.accelerator.mixed_precision == "fp16"
    assert trainer.vllm_generation.llm.llm_engine.vllm_config.model_config.dtype == torch.float16
    rows = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(rows) == 2
    assert 0 < rows[0]["rollout_corr/k3_kl"] < 0.01


@pytest.mark.slow
@pytest.mark.vllm
def test_the_sampler_is_of_eight_bits(train):
    engine = "{quantization: fp8_per_channel, dtype: bfloat16}"  # vLLM has no other kernel for a CPU
    try:
        trainer = train("grpo/fp8.yaml", "--log_completions", "false", "--rollout_engine_kwargs", engine)
    except ValueError as error:
        if "has no kernel" not in str(error):
            raise
        pytest.skip(str(error))
    assert trainer._about["quantization"] == "fp8_per_channel"
    rows = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(rows) == 2
    assert 0 < rows[0]["rollout_corr/k3_kl"] < 0.1


@pytest.mark.vllm
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ELSEWHERE])
def test_recipes_train(train, recipe):
    trainer = train(recipe, "--log_completions", "false")
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 2
    assert_in_step(trainer)


@pytest.mark.vllm
def test_the_recipe_of_an_agent_trains(tiny_model_path, questions, tmp_path, shared_engine, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import agent
    import run

    load = run.load_tokenizer
    monkeypatch.setattr(run, "load_tokenizer", lambda *args: with_tools(load(*args), "guess", "number", "0-9"))
    monkeypatch.setattr(agent, "TASK", "12 ab")  # the tiny model has a short memory
    options = [*small(tiny_model_path, questions, tmp_path), "--save_strategy", "no", "--max_completion_length", "40"]
    trainer = agent.play(["--config", str(ROOT / "recipes" / AGENT), *options])
    rows = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(rows) == 2
    assert all(row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0 for row in rows)
    assert_in_step(trainer)


def test_the_agent_of_the_example_is_told_where_the_number_is(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import agent

    player = agent.Player()
    player.reset(number=7, prompt=[])
    assert [player.guess(number) for number in (3, 9, 7, 1)] == ["It is higher.", "It is lower.", "Right.", "Right."]
    assert player.get_reward() == pytest.approx(0.8)
    assert player._game.state.step_count == 3
    player.reset(number=0)
    assert player.get_reward() == 0.0


@pytest.mark.slow  # `test_examples.py` launches the quickstart
@pytest.mark.vllm
@pytest.mark.parametrize("recipe", LAUNCHED)
def test_examples_are_launched_and_end_well(recipe, tiny_model_path, questions, tmp_path):
    example = f"examples/{recipe.split('/')[0]}.py"
    process = run(
        ACCELERATE, "launch", "--config_file", "recipes/accelerate/cpu.yaml", example, "--config", f"recipes/{recipe}",
        *small(tiny_model_path, questions, tmp_path), "--vllm_max_model_length", "256", "--save_strategy", "steps",
        **UNCOMPILED,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    assert "Traceback" not in process.stderr
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    rows = [entry for entry in log if "loss" in entry]
    assert len(rows) == 2
    assert all(0 < row["rollout_corr/k3_kl"] < 0.01 and "rollout_corr/rollout_is_mean" in row for row in rows)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.vllm
def test_two_processes_on_a_cpu(tiny_model_path, questions, tmp_path):
    """Each process writes a dump of its own."""
    (command,) = re.findall(r"^(torchrun .*)$", (ROOT / "docs/processes.md").read_text(), re.MULTILINE)
    words = [str(Path(sys.executable).with_name("torchrun")), "--master_port", str(free_port()), *command.split()[1:]]
    options = [*small(tiny_model_path, questions, tmp_path), "--vllm_max_model_length", "256"]
    process = run(*words, *options, "--rollout_dump_dir", str(tmp_path / "dump"), **UNCOMPILED)
    assert process.returncode == 0, process.stderr[-4000:]
    dumps = list((tmp_path / "dump").glob("step-00000001*.parquet"))
    assert len(dumps) == 2, dumps


@pytest.mark.parametrize("recipe", ASYNCHRONOUS)
def test_asynchronous_recipes_train(recipe, tiny_model_path, tmp_path):
    """On samples that are there; `test_async_server.py` has a server."""
    from tests.asynchronous import WeightsStay, WorkerHere, parts_for_a_cpu
    from tests.tiny import prompts

    options = ["--model_name_or_path", tiny_model_path, "--max_steps", "3", "--per_device_train_batch_size", "4",
               "--gradient_accumulation_steps", "2", "--token_budget", "0", "--save_strategy", "no",
               "--disable_tqdm", "true"]  # fmt: skip
    _, args, model_args = parse(recipe, *on_a_cpu(tmp_path), *options)
    with parts_for_a_cpu().on_a_cpu():
        trainer = TRAINERS["async_grpo"][0](
            tiny_model_path, args=args, train_dataset=prompts(), peft_config=get_peft_config(model_args),
            rollout_worker=WorkerHere(tiny_model_path, noise=0.0), weight_transfer=WeightsStay(),
        )  # fmt: skip
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 3
    assert any("rollout_corr/staleness_max" in entry for entry in trainer.state.log_history)


@pytest.mark.vllm
def test_examples_evaluate_and_save(train, tmp_path):
    trainer = train("rloo/token_is.yaml", "--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps",
                    "--per_device_eval_batch_size", "4", "--save_steps", "2")  # fmt: skip
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert (tmp_path / "model.safetensors").exists()
    again = train("rloo/token_is.yaml", "--resume_from_checkpoint", str(tmp_path / "checkpoint-2"), "--max_steps", "3")
    assert again.state.global_step == 3


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import run

    with pytest.raises(ValueError, match="`model_name_or_path` is missing"):
        run.train(*TRAINERS["grpo"], "", ["--use_cpu", "true", "--bf16", "false"])


def test_an_unknown_option_of_a_script_names_the_command_that_finds_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import run

    (tmp_path / "misspelt.yaml").write_text("use_cpu: true\nbf16: false\nrollout_corection: auto\n")
    with pytest.raises(ValueError, match="rollout_corection") as refused:
        run.train(*TRAINERS["grpo"], "", ["--config", str(tmp_path / "misspelt.yaml")])
    assert any("trl-rollout-corr check FILE" in note for note in refused.value.__notes__)


@pytest.mark.parametrize(
    ("text", "number"),
    [("It is 3 + 4 = 7.\n#### 7", 7), ("#### 1,234 apples, not 5", 1234), ("so -2.5", -2.5), ("none", None)],
)
def test_the_reward_reads_the_answer(monkeypatch, text, number):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import run

    assert run.last_number(text) == number


def test_the_command_for_several_machines_can_be_read(monkeypatch):
    """The launcher and the script take each option of the command, also for a server."""
    monkeypatch.chdir(ROOT)
    section = (ROOT / "docs/processes.md").read_text().split("\n### Several machines\n")[1].split("\n## ")[0]
    (command,) = re.findall(r"```bash\n(accelerate launch .*?)```", section, re.DOTALL)
    (server,) = re.findall(r"`(--vllm_mode server .*?)`", section)
    launched = launch_command_parser().parse_args(shlex.split(command.replace("\\\n", " "))[2:])
    assert (launched.num_machines, launched.machine_rank) == (4, 0)
    assert (ROOT / launched.training_script).exists()
    for more in ([], server.split()):
        parser = TrlParser((ScriptArguments, TRAINERS["grpo"][1], ModelConfig))
        arguments = [*launched.training_script_args, *more, "--use_cpu", "true", "--bf16", "false"]
        _, config, model = parser.parse_args_and_config(arguments)
        assert config.rollout_correction == "auto"
        assert model.model_name_or_path in section
        each = config.per_device_train_batch_size * config.gradient_accumulation_steps
        assert f"so {each * launched.num_processes} completions" in section


@pytest.mark.parametrize(
    ("page", "section"), [("asynchronous", "### Many GPUs"), ("models", "## Adapters")], ids=["async", "lora"]
)
def test_the_command_of_a_page_can_be_read(monkeypatch, page, section):
    """The launcher and the script take each option of a command that no test runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from async_grpo import ModelArguments, ServerArguments

    text = (ROOT / f"docs/{page}.md").read_text().split(f"\n{section}\n")[1]
    command = re.search(r"```bash\n(?:CUDA_VISIBLE_DEVICES=\S+ )?(accelerate launch .*?)```", text, re.DOTALL)[1]
    launched = launch_command_parser().parse_args(shlex.split(command.replace("\\\n", " "))[2:])
    assert (ROOT / launched.config_file).exists()
    assert (ROOT / launched.training_script).exists()
    if page == "asynchronous":
        if "async_grpo" not in TRAINERS:
            pytest.skip("no asynchronous trainer")
        classes = (ScriptArguments, TRAINERS["async_grpo"][1], ModelArguments, ServerArguments)
    else:
        classes = (ScriptArguments, TRAINERS["grpo"][1], ModelConfig)
    arguments = [*launched.training_script_args, "--use_cpu", "true", "--bf16", "false"]
    _, config, model, *_ = TrlParser(classes).parse_args_and_config(arguments)
    assert config.rollout_correction == "auto"
    assert model.model_name_or_path == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_configurations_load(engine):
    config = load_config_from_file(str(ROOT / "recipes" / engine))
    expected = {"fsdp2": "FSDP", "multi_node": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "ddp": "MULTI_GPU"}
    assert config.distributed_type == expected.get(Path(engine).stem, "NO")
    assert config.num_processes == {"cpu": 1, "single_gpu": 1, "multi_node": 32}.get(Path(engine).stem, 8)
    assert config.mixed_precision == ("no" if "cpu" in engine else "bf16")
    assert config.use_cpu == ("cpu" in engine)
    if config.distributed_type == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
    if config.distributed_type == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(Path(engine).stem[-1])
