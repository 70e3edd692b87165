"""The command `probe`: a model and its sampler before any training."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from textwrap import dedent

import numpy as np
import pytest
import torch

from tests.dumps import make_dump
from tests.launching import ROOT, benchmarks, run
from tests.tiny import build_model_with_code
from tests.training import build_with_dropout
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.correction.functional import k3
from trl_rollout_corr.tools.diagnosis import read_tokens
from trl_rollout_corr.tools.diagnosis.observed import k3_of
from trl_rollout_corr.tools.probe.parts import (
    BODY,
    CACHE,
    DECODING,
    DROPOUT,
    FLOAT32,
    HEAD,
    HEADS,
    KERNELS,
    MICRO_BATCH,
    OPTIONS,
    PADDING,
    PLAIN,
    PUSH,
    QUANTISATION,
    WHOLE,
    Measured,
    Side,
    chain_of,
    changes_for,
    diagnose_parts,
    split_gap,
    write_parts,
)


with benchmarks(".") as load_module:
    shares = load_module("shares")

# Parts --------------------------------------------------------------------------------------------------------------------

LOW = {"trainer_dtype": "bfloat16", "sampler_dtype": "bfloat16"}
FACTS = {"engine_kwargs": {}, "options": [], "about": LOW}
# Sizes of the steps to each configuration: of the run, in float32, with heads in float32, without 8 bits
SIZES = {
    "as_it_is": 0.0, "no_dropout": 0.1, "one_row": 0.0, "alone": 0.02, "heads/alone": 0.05, "float32/alone": 0.03,
    "float32/sampler": 0.001, "heads/sampler": 0.03, "plain/sampler": 0.05, "sampler": 0.04, "pushed": 0.15, "sampled": 0.01,
}  # fmt: skip


def answers(n=40_000, seed=0, facts=FACTS, **sizes):
    """A run and what is tried, whose steps are noise of a known size: the square of each in half is its `k3`."""
    dice, here, logps = np.random.default_rng(seed), np.zeros(n), {}
    for name, size in {**SIZES, **sizes}.items():
        here = here - size * dice.standard_normal(n)
        logps[name] = here.astype(np.float32)

    def of(process):
        return {name.split("/")[-1]: x for name, x in logps.items() if name.startswith(process)}

    tried = {change: Measured(of(name), facts) for change, name in ((HEADS, "heads/"), (FLOAT32, "float32/"))}
    if facts["engine_kwargs"]:
        tried[PLAIN] = Measured({"alone": logps["alone"], **of("plain/")}, facts)
    return Measured({name: x for name, x in logps.items() if "/" not in name}, facts), tried


def parts_of(first, tried):
    return {part.name: part for part in split_gap(first.logps["as_it_is"], chain_of(first, tried))}


def test_parts_add_up_and_each_has_the_size_that_was_put_in():
    engine = {"kv_cache_dtype": "fp8"}
    first, tried = answers(facts={**FACTS, "engine_kwargs": engine})
    found = parts_of(first, tried)
    whole = found.pop(WHOLE)
    d = first.logps["as_it_is"].astype(float) - first.logps["sampled"]
    assert sum(part.k3 for part in found.values()) == pytest.approx(whole.k3, rel=1e-9)
    assert whole.k3 == pytest.approx(k3_of(d).mean(), rel=1e-9)
    put_in = {DROPOUT: 0.1**2, PADDING: 0.02**2, HEAD: 2 * 0.05**2, BODY: 2 * 0.03**2, CACHE: 0.04**2, PUSH: 0.15**2}
    for name, square in put_in.items():
        assert found[name].k3 == pytest.approx(square / 2, rel=0.1, abs=1e-5), name
    assert (found[MICRO_BATCH].equal, found[MICRO_BATCH].k3) == (1.0, 0.0)
    assert found.keys() == {*put_in, MICRO_BATCH, KERNELS, DECODING}


def test_a_token_that_is_impossible_leaves_the_whole_finite():
    d = np.array([0.0, 1e-4, -800.0, 800.0])
    whole = split_gap(d, [(PUSH, np.zeros(4))])[-1]
    assert whole.k3 == pytest.approx(k3(torch.from_numpy(d)).mean().item())
    assert whole.k3 < 1e27


def test_a_part_that_another_one_undoes_gets_nothing():
    """A rounding of both sides that is the same is no gap, although each side has it."""
    first, tried = answers(**{"heads/alone": 0.0, "heads/sampler": 0.0, "plain/sampler": 0.0, "sampler": 0.0})
    shift = first.logps["alone"] - tried[FLOAT32].logps["alone"]
    for logps in (tried[HEADS].logps, first.logps):
        for name in logps.keys() & {"sampler", "pushed", "sampled"}:
            logps[name] = logps[name] + shift
    body = parts_of(first, tried)[BODY]
    assert body.k3 == pytest.approx(0.0, abs=1e-8)
    assert body.equal > 0.4


def test_what_cannot_be_measured_is_a_part_together_with_the_next_one():
    first, tried = answers()
    parts = parts_of(first, {**tried, FLOAT32: "no memory"})
    assert f"{KERNELS} + {BODY}" in parts
    assert sum(part.k3 for part in parts.values()) == pytest.approx(2 * parts[WHOLE].k3)
    written = write_parts([*parts.values()], {FLOAT32: "no memory"})
    assert f"{KERNELS} + {BODY}" in written
    assert f"Left out: {FLOAT32}. no memory" in written
    parts = parts_of(first, {**tried, HEADS: "not a field"})  # on both sides
    assert [name for name in parts if HEAD in name or BODY in name] == [f"{BODY} + {HEAD}"]


def test_a_small_part_beside_a_large_one_is_in_doubt():
    near = 0
    for seed in range(20):
        large = answers(n=1000, seed=seed, no_dropout=0.5, pushed=0.0, alone=0.01)
        padding = parts_of(*large)[PADDING]
        near += abs(padding.k3 - 0.01**2 / 2) < padding.error
        assert padding.error > 0.01**2 / 2
    assert 17 <= near < 30
    (doubt,) = (x for x in write_parts([*parts_of(*large).values()], {}).splitlines() if x.startswith("In doubt"))
    assert PADDING in doubt
    assert DROPOUT not in doubt
    assert MICRO_BATCH not in doubt  # bit-equal


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"kv_cache_dtype": "fp8"}, CACHE),
        ({"quantization": "fp8"}, QUANTISATION),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, f"{QUANTISATION} and {CACHE}"),
    ],
)
def test_8_bits_are_a_part_of_their_own(kwargs, name):
    first, tried = answers(facts={**FACTS, "engine_kwargs": kwargs, "options": ["top_p"]})
    assert [*parts_of(first, tried)][-4:] == [name, PUSH, OPTIONS, WHOLE]
    # in float32 the run itself stands for what need not be tried
    parts = parts_of(first, {PLAIN: tried[PLAIN]})
    assert parts[name].k3 == pytest.approx(0.04**2 / 2, rel=0.1)


def test_the_diagnosis_follows_the_parts(tmp_path):
    make_dump(tmp_path)
    parts = parts_of(*answers(no_dropout=0.0, pushed=0.0))
    body, other = (
        [part._replace(k3=1e-3 * (part.name in (name, WHOLE))) for part in parts.values()] for name in (BODY, DECODING)
    )

    def found(parts, d=None):
        observed = read_tokens(tmp_path)
        observed.d[:] = observed.d if d is None else d
        return [finding.name for finding in diagnose_parts(observed, parts).findings]

    assert found(body) == ["rounding"]
    assert found(other) == []
    unsure = [part._replace(error=part.error + 1e-3 * (part.name == BODY)) for part in other]
    assert found(unsure) == ["rounding"]  # a part that may be large does not rule its cause out
    unknown = np.where(np.arange(len(read_tokens(tmp_path))) % 2, 0.05, -0.05)
    assert found(other, unknown) == []
    assert found(body, unknown) == ["rounding"]  # which the tokens do not show


def test_a_measured_quantisation_answers_for_the_quantised_sampler(tmp_path):
    """Also for an engine that reports quantised weights; of a checkpoint that is quantised, no part is measured."""
    make_dump(tmp_path)
    observed = read_tokens(tmp_path)
    observed.about = {**observed.about, "quantization": "fp8"}
    observed.d[:] = np.where(np.arange(len(observed)) % 2, 0.05, -0.05)

    def found(engine_kwargs, large):
        parts = parts_of(*answers(no_dropout=0.0, facts={**FACTS, "engine_kwargs": engine_kwargs})).values()
        parts = [part._replace(k3=1e-3 * (part.name in (large, WHOLE)), error=0.0) for part in parts]
        return [finding.name for finding in diagnose_parts(observed, parts).findings]

    assert found({"quantization": "fp8"}, BODY) == ["rounding"]
    assert found({"quantization": "fp8"}, QUANTISATION) == ["quantised"]
    assert found({}, KERNELS) == ["quantised"]


# Settings -----------------------------------------------------------------------------------------------------------------


def test_changes_are_those_that_differ_from_the_run():
    changes = changes_for(FACTS)
    assert changes[HEADS] == {
        "cast_lm_head_to_fp32": True, "rollout_engine_kwargs": {"hf_overrides": {"head_dtype": "float32"}},
    }  # fmt: skip
    assert changes[FLOAT32]["rollout_engine_kwargs"] == {"dtype": "float32"}
    whole = {"trainer_dtype": "float32", "sampler_dtype": "float32"}
    assert changes_for({**FACTS, "about": whole}) == {}
    cached = changes_for({**FACTS, "engine_kwargs": {"kv_cache_dtype": "fp8", "seed": 1}})
    assert cached[PLAIN] == {"rollout_engine_kwargs": {"seed": 1}}
    assert cached[FLOAT32]["rollout_engine_kwargs"] == {"seed": 1, "dtype": "float32"}
    of_sampler = changes_for({**FACTS, "about": {**whole, "sampler_dtype": "bfloat16"}})
    assert {*of_sampler[HEADS]} == {*of_sampler[FLOAT32]} == {"rollout_engine_kwargs"}


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe"], "the following arguments are required: model"),
        (["probe", "model", "--completions", "0"], "argument --completions: must be a whole number above 0, got '0'"),
        (["diagnose", "dump", "--temperature", "0.7"], "unrecognized arguments: --temperature 0.7"),
    ],
)
def test_options_of_a_run_are_for_a_probe_alone(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


ON_A_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]


def request(model, folder, *options, **fields):
    return {
        "model": str(model), "config": None, "options": [*ON_A_CPU, *options], "prompts": None, "completions": 64,
        "length": 128, "trainer": "grpo", "changes": {}, "output": str(folder), **fields,
    }  # fmt: skip


def test_a_run_that_a_probe_cannot_split_is_refused(tiny_model_path, tmp_path):
    from trl_rollout_corr.tools.probe.set_up import read_request

    with pytest.raises(ValueError, match="`use_vllm` is False"):
        read_request(request(tiny_model_path, tmp_path, "--use_vllm", "false"))
    with pytest.raises(ValueError, match=r"`vllm_mode` is 'server'.*`--vllm_mode colocate`, and the options of your"):
        read_request(request(tiny_model_path, tmp_path, "--vllm_mode", "server"))
    with pytest.raises(ValueError, match=r"`rollout_support` is 'replay'.* Remove it, and `top_p`"):
        read_request(request(tiny_model_path, tmp_path, "--rollout_support", "replay", "--top_k", "5"))
    with pytest.raises(ValueError, match=r"not used.*temperatura"):
        read_request(request(tiny_model_path, tmp_path, "--temperatura", "1"))
    with pytest.raises(ValueError, match=r"not used.*dump"):
        read_request(request(tiny_model_path, tmp_path, "--temperature", "1", "dump"))


@pytest.fixture
def begin_with(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Lines of Python that each process that begins from here runs first."""

    def begin(lines: str):
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    return begin


def test_a_value_that_argparse_refuses_is_named(tiny_model_path, tmp_path, begin_with):
    from trl_rollout_corr.tools.probe.probe import in_process

    begin_with('import sys; sys.modules["vllm"] = None')  # which takes most of the time to import
    with pytest.raises(ValueError, match=r"^argument --temperature: invalid float value: 'warm'$"):
        in_process("a run", request(tiny_model_path, tmp_path, "--temperature", "warm"), tmp_path / "process")


@pytest.fixture
def short_model(tiny_model_path, tmp_path):
    """A model with a context of 64 tokens, whose tokenizer knows two characters and drops all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    shutil.copytree(tiny_model_path, folder)
    characters = Tokenizer(models.BPE({"#": 0, "+": 1, "<end>": 2}, []))
    characters.pre_tokenizer = pre_tokenizers.Whitespace()
    for path in folder.glob("*token*"):
        path.unlink()
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return folder


def prompts_of(tmp_path, text):
    (tmp_path / "prompts.txt").write_text(text)
    return str(tmp_path / "prompts.txt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            None,
            "turns a prompt into no tokens, so that vLLM has nothing to continue (the built-in prompts). Name a file",
        ),
        ("##\nmaybe\n", "turns a prompt into no tokens"),
        (" \n", "(`--prompts`) contains no line with text"),
        ("# " * 63, "A prompt has 63 tokens"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_named_with_the_option(short_model, tmp_path, text, said):
    from trl_rollout_corr.tools.probe.process import build

    prompts = None if text is None else prompts_of(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        build(request(short_model, tmp_path, "--use_vllm", "true", "--vllm_mode", "colocate", prompts=prompts))
    assert "--prompts" in str(raised.value)


@pytest.mark.vllm
def test_a_model_with_a_short_context_can_be_probed(short_model, tmp_path):
    from trl_rollout_corr.tools.probe.process import build, score_with_sampler

    fields = {"prompts": prompts_of(tmp_path, "#+#\n"), "completions": 4}
    options = ["--use_vllm", "true", "--vllm_mode", "colocate", "--rollout_engine_kwargs", '{"dtype": "float32"}']
    probe = build(request(short_model, tmp_path, *options, **fields))
    assert probe.trainer.args.vllm_max_model_length == 64
    batches = probe.sample()
    logps = score_with_sampler(probe.trainer.vllm_generation, batches, 1.0)
    assert len(logps) == sum(int(batch["completion_mask"].sum()) for batch in batches)


RECIPES = sorted(
    str(path.relative_to(ROOT / "recipes"))
    for kind in ("grpo", "rloo")
    for path in (ROOT / "recipes" / kind).glob("*.yaml")
)


@pytest.mark.filterwarnings("ignore:.*one weight, the product of its tokens")  # as two recipes of verl are long
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_probed(recipe, tiny_model_path, tmp_path):
    """As far as its first batch goes."""
    from trl_rollout_corr.tools.probe.set_up import read_request, shortened

    fields = {"config": str(ROOT / "recipes" / recipe), "trainer": recipe.split("/")[0]}
    colocate = ["--vllm_mode", "colocate"] if recipe == "grpo/server.yaml" else []
    _, args, settings, _ = read_request(request(tiny_model_path, tmp_path, *colocate, **fields))
    short = shortened(args, settings, 63, 128, {"rollout_engine_kwargs": {"kv_cache_dtype": "auto"}})
    assert short.per_device_train_batch_size == args.per_device_train_batch_size
    assert 63 <= short.generation_batch_size < 63 + 2 * args.per_device_train_batch_size
    assert (short.temperature, short.rollout_dump_dir, short.output_dir) == (args.temperature, None, str(tmp_path))
    assert short.max_completion_length <= 128
    assert short.rollout_engine_kwargs["kv_cache_dtype"] == "auto"


@pytest.mark.filterwarnings(
    "ignore:.rollout_engine_kwargs. changes"
)  # a setting of which nobody knows whether it matters
def test_settings_are_added_to_those_of_the_run(tiny_model_path, tmp_path):
    from trl_rollout_corr.tools.probe.set_up import read_request, shortened

    mine = '{"dtype": "float32", "hf_overrides": {"rope_theta": 1.0}}'
    _, args, settings, _ = read_request(request(tiny_model_path, tmp_path, "--rollout_engine_kwargs", mine))
    facts = {
        **FACTS,
        "engine_kwargs": settings.rollout_engine_kwargs,
        "about": {**LOW, "trainer_dtype": "float32"},
    }
    short = shortened(args, settings, 64, 128, changes_for(facts)[HEADS])
    assert short.rollout_engine_kwargs == {
        "enforce_eager": True, "dtype": "float32", "hf_overrides": {"rope_theta": 1.0, "head_dtype": "float32"},
    }  # fmt: skip
    assert settings.rollout_engine_kwargs["hf_overrides"] == {"rope_theta": 1.0}
    short = shortened(args, settings, 64, 128, {"model_init_kwargs": {"attn_implementation": "eager"}})
    assert short.model_init_kwargs["attn_implementation"] == "eager"


# A real sampler -----------------------------------------------------------------------------------------------------------


def probed(model, folder, *options, **fields):
    """A probe in this process. Returns the diagnosis, the parts, and the tokens."""
    from trl_rollout_corr.tools.probe import process

    folder.mkdir()
    first = process.run(process.build(request(model, folder, *options, **fields)), folder)
    parts, observed = parts_of(first, {}), first.facts["observed"]
    return diagnose_parts(observed, [*parts.values()]), parts, observed


def test_dropout_is_off_for_as_long_as_it_is_asked_to_be(tiny_model_path, tmp_path):
    from trl_rollout_corr.tools.probe.process import Probe
    from trl_rollout_corr.trainers.forward_pass import evaluating

    trainer = build_with_dropout(tiny_model_path, tmp_path)
    probe = Probe(trainer, trainer.args, trainer._settings)
    batches = probe.sample()
    with evaluating(trainer.model_wrapped):
        once, twice, alone = probe.score(batches), probe.score(batches), probe.score_alone(batches)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    for a, b, batch in zip(once, alone, batches, strict=True):
        mask = batch["completion_mask"].bool()
        torch.testing.assert_close(a[mask], b[mask], rtol=1e-4, atol=1e-4)
    once, twice = probe.score(batches), probe.score(batches)
    assert not any(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.vllm
def test_a_sampler_in_step_is_healthy_and_a_fault_is_named(tiny_model_path, tmp_path, shared_engine):
    found, parts, observed = probed(tiny_model_path, tmp_path / "a", "--vllm_max_model_length", "64")
    assert found.verdict == "nothing"
    assert [*parts] == [MICRO_BATCH, PADDING, HEAD, BODY, KERNELS, PUSH, DECODING, WHOLE]
    assert parts[PUSH].equal == parts[HEAD].equal == 1.0  # the weights that were pushed are those of the files
    assert len(observed) > 100
    with pytest.warns(UserWarning, match="top_p"):
        found, parts, observed = probed(tiny_model_path, tmp_path / "b", "--top_p", "0.7", "--temperature", "0.8")
    assert found.findings[0].name == "truncation"
    assert parts[OPTIONS].k3 == pytest.approx(found.k3, rel=1e-3)
    assert max(abs(part.k3) for name, part in parts.items() if name not in (OPTIONS, WHOLE)) < 1e-6 * found.k3
    found, parts, observed = probed(
        tiny_model_path, tmp_path / "c", "--use_peft", "true", "--lora_dropout", "0", trainer="rloo"
    )
    assert (found.verdict, observed.about["adapter"], observed.about["experts"]) == ("nothing", "LORA", "none")
    assert DROPOUT not in parts


@pytest.mark.vllm
def test_a_fault_of_known_size_is_found_alone_and_beside_another(tiny_model_path, tmp_path, shared_engine):
    from trl_rollout_corr.tools.probe.process import build as build_probe

    fields = {"output": str(tmp_path), "completions": 256, "length": 32}
    probe = build_probe({**request(tiny_model_path, tmp_path, "--vllm_max_model_length", "64"), **fields})
    whole, alone = shares.measured(probe, tmp_path, "push")
    assert alone["push"].k3 == pytest.approx(whole.k3, rel=0.01)
    assert abs(alone["padding"].k3) < 1e-3 * whole.k3
    _, both = shares.measured(probe, tmp_path, "push", "truncation")
    assert both["push"].k3 == pytest.approx(whole.k3, rel=0.3)
    assert both["truncation"].k3 > 0.1 * both["push"].k3
    assert "dropout" not in both
    assert abs(both["padding"].k3) < 1e-3 * whole.k3
    probe.trainer.vllm_generation.sync_weights()  # of all other tests


def command(model, *options) -> tuple[int, str, str]:
    short = ["--quick", "--vllm_max_model_length", "256"]  # all that the tiny model has
    process = run(sys.executable, "-m", "trl_rollout_corr", "probe", str(model), *short, *options)
    return process.returncode, process.stdout, process.stderr


@pytest.fixture
def port_taken_late(begin_with):
    """
    Another training of this machine holds port 29500, and took it just after TRL had seen that it is free: of a process
    that begins from here, a look from Python does not see it.
    """
    begin_with(
        dedent("""\
            import socket

            bind = socket.socket.bind
            socket.socket.bind = lambda self, address: None if address[1] == 29500 else bind(self, address)
        """)
    )
    with socket.socket() as other:
        with suppress(OSError):  # some other process has it, which is as well
            other.bind(("", 29500))
            other.listen()
        yield


@pytest.mark.vllm
def test_a_port_that_another_training_takes_does_not_end_a_probe(
    tiny_model_path, tmp_path, port_taken_late, monkeypatch
):
    from trl_rollout_corr.tools.probe.probe import in_process

    monkeypatch.delenv("MASTER_PORT", raising=False)  # tests before may have left one
    options = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "64"]
    run_of_a_probe = request(tiny_model_path, tmp_path, *options, completions=2, length=8)
    scored = in_process("a run", run_of_a_probe, tmp_path / "process")
    assert np.isfinite(scored.logps[Side.SAMPLER]).all()


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command(tiny_model_path, tmp_path):
    code, out, err = command(tiny_model_path)
    assert code == 0, err
    assert "Where the gap comes from" in out
    assert out.startswith("Healthy")
    assert "Probe: 1 of 2, float32 on both sides" in err
    recipe = tmp_path / "recipe.yaml"
    cache = "rollout_engine_kwargs: {dtype: float32, kv_cache_dtype: fp8}"
    recipe.write_text((ROOT / "recipes" / "grpo" / "cpu.yaml").read_text() + f"{cache}\n")
    code, out, err = command(tiny_model_path, "--json", "--config", str(recipe))
    assert code == 1, err
    document = json.loads(out)
    assert document["causes"][0]["cause"] == "kv_cache"
    parts = {part["name"]: part["k3"] for part in document["parts"]}
    assert parts[CACHE] > 0.9 * parts[WHOLE]
    assert document["left_out"] == {}
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
    from trl_rollout_corr.tools.probe.process import build as build_probe
    from trl_rollout_corr.tools.probe.set_up import read_request

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("use_vllm: true\ntrust_remote_code: false\n")
    for options in ({}, {"config": str(recipe)}):
        with pytest.raises(ValueError, match="`trust_remote_code=True`"):
            build_probe(request(model_with_code, tmp_path, **options))
    assert saying_yes.read_text() == ""
    recipe.write_text("use_vllm: true\ntrust_remote_code: true\n")
    for line, options in ((["--trust_remote_code", "true"], {}), ([], {"config": str(recipe)})):
        assert read_request(request(model_with_code, tmp_path, *line, **options))[1].trust_remote_code is True
    assert read_request(request(tiny_model_path, tmp_path))[1].trust_remote_code is False
