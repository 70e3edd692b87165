"""The command `probe`: a model and its sampler before any training."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.dumps import make_dump
from tests.launching import ROOT, benchmarks, free_port, run
from tests.tiny import StaleSampler, build_model_with_code
from tests.training import build, build_with_dropout, plain_model, policy_logps
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.arrival.worker import push
from trl_rollout_corr.diagnosis import Diagnosis, Finding, diagnose, read_tokens
from trl_rollout_corr.diagnosis.evidence import FLOOR, Evidence
from trl_rollout_corr.probe.command import (
    EXPERIMENTS,
    Result,
    _speaking,
    _with_confirmed,
    _with_engine,
    as_text,
    engines_to_try,
    judge,
    own_noise,
    results_of,
)


with benchmarks("diagnose") as load_module:
    faults = load_module("faults")
    int4 = faults.models.int4

# What outcomes mean -------------------------------------------------------------------------------------------------------


def finding(name: str, certainty: float = 0.8, share: float = 1.0) -> Finding:
    return Finding(name, certainty, share, Evidence(1.0, share, {"gap": 0.05}, "|d| is {gap}"))


def diagnosis(*findings: Finding, size: float = 0.05) -> Diagnosis:
    verdict = "found" if findings else "unknown" if size >= FLOOR else "nothing"
    return Diagnosis(verdict, [*findings], size, size**2 / 2, 1.0, 3000, 64)


def names(found: Diagnosis) -> list[str]:
    return [finding.name for finding in found.findings]


@pytest.mark.parametrize(
    ("name", "after", "says"),
    [
        ("dropout_off", 0.01, "confirms"),
        ("dropout_off", 0.03, ""),
        ("dropout_off", 0.05, "rules out"),
        ("float32_trainer", 0.01, "confirms"),
        ("float32_trainer", 0.05, ""),  # the sampler may round as well
    ],
)
def test_what_becomes_of_the_gap_speaks_for_or_against(name, after, says):
    assert Result(name, 0.05, after).says == says


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [(0.05, 0.034, "confirms"), (0.05, 0.04, ""), (0.04, 0.03, ""), (0.04, 0.038, "rules out")],
)
def test_down_to_the_trainers_own_noise_is_all_there_is_to_go(before, after, says):
    assert Result("whole_distribution", before, after, noise=0.03).says == says


def test_without_a_gap_nothing_is_said():
    outcome = Result("dropout_off", FLOOR / 2, FLOOR / 200)
    assert (outcome.says, _speaking([outcome])) == ("", ({}, set()))


def told(marks: Diagnosis, *outcomes: Result) -> list[str]:
    confirming, _ = _speaking(outcomes)
    return names(_with_confirmed(marks, confirming))


def test_what_an_experiment_confirms_comes_first():
    marks = diagnosis(finding("weights"), finding("last_token", share=0.3))
    cache = Result("cache_of_the_model", 0.05, 0.005)
    assert told(marks, cache) == ["kv_cache"]  # beside which the others explain nothing
    assert told(marks, cache._replace(after=0.024)) == ["kv_cache", "weights"]
    found = _with_confirmed(marks, {"kv_cache": cache})
    assert (found.findings[0].share, found.findings[0].certainty) == (pytest.approx(0.99), 0.99)
    assert told(marks, Result("dropout_off", 0.05, 0.03)) == ["weights", "last_token"]


def test_the_narrower_of_two_changes_is_believed():
    outcomes = [Result("float32_head", 0.05, 0.004), Result("float32_trainer", 0.05, 0.001)]
    assert told(diagnosis(finding("rounding")), *outcomes) == ["head"]
    assert told(diagnosis(finding("rounding")), *outcomes[1:]) == ["rounding"]


def test_what_an_experiment_rules_out_is_not_looked_for(tmp_path):
    observed = read_tokens(faults.rewrite(make_dump(tmp_path / "dump"), tmp_path / "broken", "nan_rows"))
    assert "nan_rows" in names(diagnose(observed))
    assert "nan_rows" not in names(diagnose(observed, {"nan_rows"}))
    assert _speaking([Result("batch_of_one", 0.05, 0.049)]) == ({}, {"padding"})


def test_an_engine_is_started_only_for_what_is_open():
    facts = {"sampler_dtype": "bfloat16", "sampler_head_dtype": "bfloat16", "kv_cache_dtype": "auto"}
    both = ["float32_head_of_the_sampler", "float32_sampler"]
    assert engines_to_try(diagnosis(), facts, []) == both  # unknown
    assert engines_to_try(diagnosis(finding("weights")), facts, []) == both
    assert engines_to_try(diagnosis(finding("rounding", 0.7)), facts, []) == both
    assert engines_to_try(diagnosis(finding("rounding", 0.99)), facts, []) == []
    assert engines_to_try(diagnosis(finding("truncation")), facts, []) == []
    assert engines_to_try(diagnosis(size=FLOOR / 2), facts, []) == []
    assert engines_to_try(diagnosis(), facts, [Result("dropout_off", 0.05, 0.001)]) == []
    assert engines_to_try(diagnosis(), {**facts, "kv_cache_dtype": "fp8"}, []) == ["cache_of_the_model"]
    assert engines_to_try(diagnosis(), {"sampler_dtype": "float32", "kv_cache_dtype": "auto"}, []) == []


def test_a_server_is_not_started_again_for_an_experiment(tmp_path):
    after, reason = _with_engine("cache_of_the_model", {}, tmp_path, "server")
    assert after is None
    assert reason == "This experiment needs another server that is started with {'kv_cache_dtype': 'auto'}."


def test_the_table_has_the_gap_and_the_multiple():
    outcomes = [
        Result("dropout_off", 0.05, 0.02),
        Result("float32_head_of_the_sampler", 0.05, None, "It needs another server."),
        Result("float32_sampler", 0.05, 0.001),
    ]
    text = as_text(0.05, 0.01, outcomes, {"trainer_dtype": "float32", "sampler_dtype": "bfloat16"})
    row = next(line for line in text.splitlines() if "no dropout in the trainer" in line)
    assert row.split()[-6:] == ["0.02", "2", "16", "%", "for", "dropout"]
    assert "Types: the trainer float32, the sampler bfloat16." in text
    assert "Left out: a head of the sampler in float32. It needs another server." in text


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./nowhere"], "./nowhere: this folder does not exist"),
        (["m", "--config", "r.yaml"], "m: --config is 'r.yaml', which is not a file"),
        (["m", "--prompts", "p.txt"], "m: --prompts is 'p.txt', which is not a file"),
        (["m", "--completions", "1"], "m: --completions must be 2 or more, got 1"),
    ],
)
def test_what_cannot_be_probed_is_one_line(words, said, capsys):
    assert main(["probe", *words]) == 2
    found = capsys.readouterr()
    assert found.err.startswith(said)
    assert found.err.count("\n") == 1
    assert not found.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe"], "the following arguments are required: model"),
        (["diagnose", "dump", "--temperature", "0.7"], "unrecognized arguments: --temperature 0.7"),
    ],
)
def test_options_of_a_run_are_for_a_probe_alone(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


def test_a_probe_is_no_job_of_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["probe", "m"]) == 2
    assert "start it without a launcher" in capsys.readouterr().err


ON_A_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]


def request(model, folder, *options, **fields):
    return {
        "model": str(model), "config": None, "options": [*ON_A_CPU, *options], "prompts": None, "completions": 64,
        "trainer": "grpo", "engine": {}, "experiments": True, "output": str(folder), **fields,
    }  # fmt: skip


def test_a_run_without_a_sampler_or_a_model_is_refused(tiny_model_path, tmp_path):
    from trl_rollout_corr.probe.configuration import read

    with pytest.raises(ValueError, match="`use_vllm` is False"):
        read(request(tiny_model_path, tmp_path, "--use_vllm", "false"))
    with pytest.raises(ValueError, match=r"not used.*temperatura"):
        read(request(tiny_model_path, tmp_path, "--temperatura", "1"))
    with pytest.raises(ValueError, match=r"not used.*dump"):
        read(request(tiny_model_path, tmp_path, "--temperature", "1", "dump"))


def test_a_server_that_is_not_there_is_refused_at_once(tiny_model_path, tmp_path):
    from trl_rollout_corr.probe.process import build as build_probe

    url = f"http://localhost:{free_port()}"
    options = ("--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", url)
    with pytest.raises(OSError, match=f"can't be reached at {url} after 5.0 seconds"):
        build_probe(request(tiny_model_path, tmp_path, *options))


def test_prompts_come_from_a_file_or_are_built_in(tmp_path):
    from trl_rollout_corr.probe.configuration import PROMPTS, prompts_of

    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert prompts_of(str(file)) == ["one", "two"]
    assert prompts_of(None) == PROMPTS
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        prompts_of(str(file))


RECIPES = sorted(
    str(path.relative_to(ROOT / "recipes"))
    for kind in ("grpo", "rloo")
    for path in (ROOT / "recipes" / kind).glob("*.yaml")
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_probed(recipe, tiny_model_path, tmp_path):
    """As far as its first batch goes."""
    from trl_rollout_corr.probe.configuration import read, shortened

    fields = {"config": str(ROOT / "recipes" / recipe), "trainer": recipe.split("/")[0]}
    _, args, _ = read(request(tiny_model_path, tmp_path, **fields))
    short = shortened(args, 63, {"kv_cache_dtype": "auto"})
    assert short.per_device_train_batch_size == args.per_device_train_batch_size
    assert 63 <= short.generation_batch_size < 63 + 2 * args.per_device_train_batch_size
    assert (short.temperature, short.rollout_dump_dir, short.output_dir) == (args.temperature, None, str(tmp_path))
    assert short.max_completion_length <= 128
    if args.vllm_mode == "colocate":
        assert short.rollout_engine_kwargs["kv_cache_dtype"] == "auto"


def test_arguments_of_an_engine_are_added_to_those_of_the_run(tiny_model_path, tmp_path):
    from trl_rollout_corr.probe.configuration import read, shortened

    mine = '{"dtype": "float32", "hf_overrides": {"rope_theta": 1.0}}'
    _, args, _ = read(request(tiny_model_path, tmp_path, "--rollout_engine_kwargs", mine))
    short = shortened(args, 64, EXPERIMENTS["float32_head_of_the_sampler"][1].engine)
    assert short.rollout_engine_kwargs == {
        "enforce_eager": True, "dtype": "float32", "hf_overrides": {"rope_theta": 1.0, "head_dtype": "float32"},
    }  # fmt: skip
    assert args.settings.rollout_engine_kwargs["hf_overrides"] == {"rope_theta": 1.0}


# What is changed on a trainer ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["weights", "autocast"])
def half(request, tiny_model_path, tmp_path_factory):
    """A trainer in bfloat16, by the type of its weights or by autocast, before its first step; and its first batches."""
    from trl_rollout_corr.probe.process import Probe

    fields = {"weights": {"model_init_kwargs": {"dtype": "bfloat16"}}, "autocast": {"bf16": True}}[request.param]
    trainer = build(
        RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, tiny_model_path, tmp_path_factory.mktemp("half"),
        sampler=StaleSampler(tiny_model_path, noise=0.0, min_length=6), **fields,
    )  # fmt: skip
    trainer.vllm_generation = SimpleNamespace(generation_kwargs={})
    probe = Probe(trainer)
    return probe, probe.sample()


def test_the_trainer_computes_in_float32_for_as_long_as_it_is_asked_to(half, tiny_model_path):
    from trl_rollout_corr.probe.process import all_in_float32, head_in_float32

    probe, batches = half
    mask = [batch["completion_mask"].bool() for batch in batches]

    def off(logps):
        """From the model in float32, with the weights that the trainer has."""
        weights = {name: p.detach().float() for name, p in probe.trainer.model.named_parameters()}
        model = plain_model(tiny_model_path, weights)
        with torch.no_grad():
            right = [policy_logps(model, batch) for batch in batches]
        return max((a - b)[m].abs().max().item() for a, b, m in zip(logps, right, mask, strict=True))

    before = probe.score(batches)
    with head_in_float32(probe.trainer):
        head = probe.score(batches)
    with all_in_float32(probe.trainer):
        whole = probe.score(batches)
    assert off(whole) < 1e-4 < 0.8 * off(before)
    assert any((a != b)[m].any() for a, b, m in zip(head, before, mask, strict=True))
    assert off(head) > 1e-4  # the layers still round
    assert all(torch.equal(a, b) for a, b in zip(probe.score(batches), before, strict=True))


def test_dropout_is_off_for_as_long_as_it_is_asked_to_be(tiny_model_path, tmp_path):
    from trl_rollout_corr.probe.process import Probe, rescorings

    trainer = build_with_dropout(tiny_model_path, tmp_path)
    probe = Probe(trainer)
    batches = probe.sample()
    changes = rescorings(trainer, "float32")
    assert list(changes) == ["dropout_off"]
    with changes["dropout_off"](trainer):
        once, twice = probe.score(batches), probe.score(batches)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    once, twice = probe.score(batches), probe.score(batches)
    assert not any(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


# A real sampler -----------------------------------------------------------------------------------------------------------


def probed(model, folder, *options, **fields):
    """A probe in this process. Returns the diagnosis, the experiments, and the tokens."""
    from trl_rollout_corr.probe.process import build as build_probe
    from trl_rollout_corr.probe.process import run as run_probe

    folder.mkdir()
    probe = build_probe(request(model, folder, *options, **fields))
    left_out = run_probe(probe, folder)
    observed = read_tokens(folder / "as_it_is")
    outcomes = results_of(folder, observed, left_out)
    return judge(observed, outcomes), {outcome.name: outcome for outcome in outcomes}, observed


@pytest.mark.vllm
def test_a_sampler_in_step_is_healthy_and_a_fault_is_named(tiny_model_path, tmp_path, shared_engine):
    found, outcomes, observed = probed(tiny_model_path, tmp_path / "a", "--vllm_max_model_length", "64")
    assert found.verdict == "nothing"
    assert outcomes.keys() == {"batch_of_one", "before_the_push"}
    assert len(observed) > 100
    noise = own_noise(observed)
    assert noise is not None
    assert observed.size < 100 * noise
    assert observed.about["sampler_dtype"] == observed.about["trainer_dtype"] == "float32"
    with pytest.warns(UserWarning, match="top_p"):
        found, outcomes, _ = probed(tiny_model_path, tmp_path / "b", "--top_p", "0.7")
    assert names(found)[0] == "truncation"
    assert outcomes["whole_distribution"].says == "confirms"
    assert outcomes["batch_of_one"].says == "rules out"
    found, _, observed = probed(
        tiny_model_path, tmp_path / "c", "--use_peft", "true", "--lora_dropout", "0", trainer="rloo"
    )
    assert (found.verdict, observed.about["adapter"], observed.about["experts"]) == ("nothing", "LORA", "none")


@pytest.mark.vllm
def test_a_push_that_spoils_weights_is_found(tiny_model_path, tmp_path, shared_engine, monkeypatch):
    from trl_rollout_corr.probe.process import build as build_probe
    from trl_rollout_corr.probe.process import run as run_probe

    probe = build_probe(request(tiny_model_path, tmp_path, "--vllm_max_model_length", "64"))
    generation = probe.trainer.vllm_generation
    weights = [(name, int4(name, weight.detach())) for name, weight in probe.trainer.model.named_parameters()]
    generation.sync_weights()
    with monkeypatch.context() as patch:
        patch.setattr(generation, "sync_weights", lambda: push(generation.llm, weights))
        left_out = run_probe(probe, tmp_path)
    generation.sync_weights()  # of all other tests
    observed = read_tokens(tmp_path / "as_it_is")
    outcomes = results_of(tmp_path, observed, left_out)
    assert {outcome.name: outcome.says for outcome in outcomes}["before_the_push"] == "confirms"
    assert names(judge(observed, outcomes))[0] == "weights"


def command(model, *options) -> tuple[int, str, str]:
    process = run(sys.executable, "-m", "trl_rollout_corr", "probe", str(model), *options)
    return process.returncode, process.stdout, process.stderr


FLOAT32 = ("--rollout_engine_kwargs", '{"dtype": "float32"}')


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command(tiny_model_path, tmp_path):
    code, out, err = command(tiny_model_path, *FLOAT32)
    assert code == 0, err
    assert out.startswith("Nothing to correct.")
    assert "the trainer scores one by one, without padding" in out
    recipe = tmp_path / "recipe.yaml"
    cache = "rollout_engine_kwargs: {dtype: float32, kv_cache_dtype: fp8}"
    recipe.write_text((ROOT / "recipes" / "grpo" / "cpu.yaml").read_text() + f"{cache}\n")
    options = ("--json", "--config", str(recipe), "--vllm_max_model_length", "256")
    code, out, err = command(tiny_model_path, *options)
    assert code == 1, err
    document = json.loads(out)
    assert document["causes"][0]["cause"] == "kv_cache"
    experiments = {x["experiment"]: x for x in document["experiments"]}
    assert experiments["cache_of_the_model"]["says"] == "confirms"
    code, out, err = command("nobody/nothing")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("nobody/nothing: ")


@pytest.fixture(scope="module")
def model_with_code(imported_trl, tmp_path_factory) -> str:
    return build_model_with_code(tmp_path_factory.mktemp("own"))


@pytest.fixture
def saying_yes(tmp_path, monkeypatch):
    """To every question. The file has the code that was run."""
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    (tmp_path / "ran").touch()
    return tmp_path / "ran"


def test_code_of_a_model_is_trusted_as_the_recipe_says(model_with_code, tiny_model_path, tmp_path, saying_yes):
    from trl_rollout_corr.probe.configuration import read
    from trl_rollout_corr.probe.process import build as build_probe

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("use_vllm: true\ntrust_remote_code: false\n")
    for options in ({}, {"config": str(recipe)}):
        with pytest.raises(ValueError, match="`trust_remote_code=True`"):
            build_probe(request(model_with_code, tmp_path, **options))
    assert saying_yes.read_text() == ""
    recipe.write_text("use_vllm: true\ntrust_remote_code: true\n")
    for line, options in ((["--trust_remote_code", "true"], {}), ([], {"config": str(recipe)})):
        assert read(request(model_with_code, tmp_path, *line, **options))[1].trust_remote_code is True
    assert read(request(tiny_model_path, tmp_path))[1].trust_remote_code is False
