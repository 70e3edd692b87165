"""One table says which correction to set, and every voice prints its sentence."""

import dataclasses
import itertools
import json
import math
import re
import shlex
import warnings
from functools import partial

import pytest
import torch
import yaml
from peft import LoraConfig

import trl_rollout_corr
from tests.dumps import make_dump, read_table
from tests.launching import HAS_ASYNCHRONOUS, ROOT
from tests.tiny import StaleSampler, build_tiny_model, load_model
from tests.training import TRAINERS, build
from trl_rollout_corr import RolloutCorrectionConfig, examine
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.messages import PREFIX, SettingWarning
from trl_rollout_corr.settings.resolve import FIELDS
from trl_rollout_corr.tools.bands import NEGLIGIBLE
from trl_rollout_corr.tools.decision import (
    ADVISED,
    OTHER_OF_TRL,
    ROWS,
    SMALL,
    Situation,
    as_document,
    decide,
    gap_of,
    has_preset,
    in_words,
    row_of,
)
from trl_rollout_corr.tools.diagnosis.causes import CAUSES
from trl_rollout_corr.tools.diagnosis.measures import Evidence
from trl_rollout_corr.tools.diagnosis.other_causes import OTHER_CAUSES
from trl_rollout_corr.tools.diagnosis.ranking import Diagnosis, Finding
from trl_rollout_corr.tools.diagnosis.text import remedy_for
from trl_rollout_corr.tools.dump import folder as dump
from trl_rollout_corr.tools.dump.folder import files_of, read_logs
from trl_rollout_corr.tools.dump.in_effect import settings_in_effect
from trl_rollout_corr.tools.monitor.rules import BOUNDS
from trl_rollout_corr.tools.monitor.texts import fill
from trl_rollout_corr.tools.monitor.windows import Window
from trl_rollout_corr.tools.report import log_charts
from trl_rollout_corr.tools.report.compose import compose
from trl_rollout_corr.tools.report.facts import analyse
from trl_rollout_corr.tools.report.run import read_run


MACHINE = {"output_dir": "output", "use_cpu": True, "bf16": False, "report_to": []}
CLASSES = {
    name: getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")
    for name in ("GRPO", "RLOO", *(["AsyncGRPO"] if HAS_ASYNCHRONOUS else []))
}
MODE = "vllm_importance_sampling_mode"
SETTINGS = {
    "trl": {"rollout_correction": "trl"},
    "trl, token weights": {"rollout_correction": "trl", MODE: "token_truncate"},
    "disabled": {"rollout_correction": "disabled"},
    "auto": {"rollout_correction": "auto"},
    "auto, normalised": {"rollout_correction": "auto", "rollout_is_batch_normalize": True},
    "token weights": {"rollout_correction": "decoupled_token_is"},
    "PPO around the sampler": {"rollout_correction": "bypass_ppo_clip"},
    "DPPO": {"rollout_correction": "bypass_dppo_tv"},
    "weights of completions": {"rollout_is": "sequence"},
}
AGES = {"fresh": 0, "stale": 4, "unknown": None}
GAPS = {"small": 0.03, "large": 0.3}  # root mean square of the log-ratio, in nats


def config_of(trainer, fields):
    """A configuration of a trainer; fields that only GRPO has are left out elsewhere."""
    vllm = {} if trainer == "AsyncGRPO" else {"use_vllm": True, "vllm_mode": "colocate"}
    fields = {name: x for name, x in fields.items() if trainer == "GRPO" or name != MODE}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        return CLASSES[trainer](**MACHINE, **vllm, **fields)


# The table ------------------------------------------------------------------------------------------------------------

SITUATIONS = [
    Situation(gap, *flags)
    for gap in ("none", "small", "large")
    for flags in itertools.product((False, True), repeat=len(Situation._fields) - 1)
]


def test_every_situation_has_a_row_and_every_row_a_situation():
    assert {id(row_of(situation)) for situation in SITUATIONS} == {*map(id, ROWS)}


def test_the_evidence_of_every_row_is_a_heading():
    page = (ROOT / "benchmarks/arena/EVIDENCE.md").read_text()
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert {row.evidence for row in (*ROWS, OTHER_OF_TRL)} <= {*headings}


@pytest.mark.parametrize("trainer", CLASSES)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_decision_sets_is_in_effect_and_then_nothing_is_left_to_set(trainer, name):
    config = config_of(trainer, SETTINGS[name])
    for fields in (vars(config), settings_in_effect(config, config.settings)):
        decision = decide(config.settings, fields)
        assert (decision.set == {}) == (name == "auto")
        kept = {x: y for x, y in SETTINGS[name].items() if x not in decision.remove}
        after = config_of(trainer, {**kept, **decision.set})
        assert has_preset(after.settings, "auto")
        assert decide(after.settings, vars(after)).set == {}
        of_completions = trainer == "GRPO" and name == "trl"
        said = in_words(decision)
        assert ("another correction of TRL's own" in said) == of_completions
        assert len(re.findall(r"\.(?= |$)", said)) == 1 + of_completions  # an alarm adds what and why


def test_a_part_of_the_correction_is_not_the_correction():
    for changed in (
        {"rollout_rs": None},
        {"rollout_is": None},
        {"rollout_is_threshold": 2.0},
        {"rollout_is_stale_only": False},
        {"rollout_metrics_only": True},
        {"rollout_is_batch_normalize": True},
        {"bypass_mode": True, "rollout_loss_type": "reinforce"},
    ):
        settings = RolloutCorrectionConfig(rollout_correction="auto", **changed).settings
        decision = decide(settings, {})
        assert decision.set == ADVISED
        assert {*changed} <= {*decision.remove}
        assert f"remove `{decision.remove[0]}`" in in_words(decision)


OTHER_VALUES = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 3.0,
    "rollout_is_clamp": False,
    "rollout_is_stale_only": False,
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": [[0.1, 0.1], [0.001, 9.0]],
    "rollout_rs_renormalize": True,
    "bypass_mode": True,
    "rollout_loss_type": "reinforce",
    "rollout_clip_ratio_c": 9.0,
    "rollout_metrics_only": True,
    "rollout_nan_policy": "neutralize",
    "rollout_support": "replay",
    "rollout_engine_kwargs": {"dtype": "float32"},
    "rollout_routing": "replay",
    "rollout_monitor": None,
    "rollout_monitor_bounds": {"staleness": 9},
    "rollout_diagnose": True,
    "rollout_dump_dir": "dump",
    "rollout_dump_steps": 9,
    "rollout_dump_sampled": 9,
    "rollout_dump_worst": 9,
    "rollout_dump_max_gb": 9.0,
}


NEEDED = {
    "rollout_is_clamp": {"rollout_is_threshold": [0.5, 2.0]},
    "rollout_rs": {"rollout_rs_threshold": [[0.5, 2.0]]},
}


@pytest.mark.filterwarnings("ignore::trl_rollout_corr.messages.SettingWarning")
@pytest.mark.parametrize("name", sorted(FIELDS - {"rollout_correction", "rollout_rs_exclude_from_baseline"}))
def test_no_field_is_advised_against_without_its_name(name):
    """Else the advice would come again, and would find nothing to change. `auto` refuses the field that is left out."""
    fields = {**NEEDED.get(name, {}), name: OTHER_VALUES[name]}
    config = RolloutCorrectionConfig(rollout_correction="auto", **fields)
    decision = decide(config.settings, {})
    assert decision.set == {} or name in decision.remove


VESPO = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}


def test_a_loss_that_takes_no_correction_is_left():
    config = config_of("GRPO", VESPO)
    assert decide(config.settings, vars(config)).set == {}
    assert "`loss_type: vespo`" in in_words(decide(config.settings, vars(config)))


def test_a_run_that_is_left_removes_nothing():
    settings = RolloutCorrectionConfig(rollout_correction="auto", rollout_rs=None).settings
    left = as_document(decide(settings, {}, gap="none"))
    assert (left["settings"], left["remove"]) == ({}, [])


def test_an_unknown_run_is_told_unless_it_has_it():
    assert in_words(decide(None, {})).startswith("Set `rollout_correction` to auto, unless the run has it: ")


def test_gaps_are_small_from_where_weights_change_something_up_to_the_healthy_limit():
    assert [gap_of(x) for x in (0.001, 0.03, 0.099, 0.11, 1.0)] == ["none", "small", "small", "large", "large"]
    assert [gap_of(math.nextafter(NEGLIGIBLE, 0)), gap_of(NEGLIGIBLE)] == ["none", "small"]
    assert [gap_of(SMALL), gap_of(math.nextafter(SMALL, 1))] == ["small", "large"]


# Every voice ----------------------------------------------------------------------------------------------------------


def write(folder, trainer, name, age, spread):
    """A tiny dump of a run of this trainer, with these settings and this age."""
    config = config_of(trainer, SETTINGS[name])
    own = {field.name: getattr(config.settings, field.name) for field in dataclasses.fields(RolloutCorrectionConfig)}
    made = {**own, "rollout_correction": None} if config.settings.by_trl else SETTINGS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        make_dump(folder, steps=2, rows=24, length=24, spread=spread, tools=False, settings=made)
    for path in files_of(folder):
        table, *_ = read_table(path)
        rows = [{**row, "staleness": age} for row in table.to_pylist()]
        step = rows[0]["step"]
        dump.write_rows(folder, step, 0, rows, settings_in_effect(config, config.settings))
    if age is not None:
        logs = [{**entry, f"{PREFIX}staleness_max": float(age)} for entry in read_logs(folder)]
        (folder / "logs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in logs))
    return config


def said_by_all(folder, config, capsys):
    """What each voice says to set, and its sentences."""

    def printed(command):
        capsys.readouterr()
        code = main([command, str(folder), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, diagnosed = printed("diagnose")
    _, compared = printed("compare")
    facts = analyse(read_run(str(folder)), "run", "")
    (of_page,) = [section.cards[1] for section in compose([facts]).sections if section.name == "settings"]
    alarms = examine(read_logs(folder), config.settings, fields=vars(config))
    named = [alarm.advice for alarm in alarms if BOUNDS[alarm.bound].asks_for_correction]
    return code, diagnosed, compared["recommendation"], of_page, named


@pytest.fixture
def no_charts(monkeypatch):
    """Drawing charts takes longer than everything that is said."""
    monkeypatch.setattr(log_charts, "draw_trends", lambda *args: [])


@pytest.mark.parametrize("trainer", CLASSES)
@pytest.mark.parametrize("name", SETTINGS)
def test_all_voices_say_the_same(trainer, name, tmp_path, capsys, no_charts):
    """54 runs with nine settings, three ages and two gaps for each trainer: no voice contradicts another."""
    for (age, steps), (gap, spread) in itertools.product(AGES.items(), GAPS.items()):
        folder = tmp_path / f"{age}-{gap}"
        config = write(folder, trainer, name, steps, spread)
        code, diagnosed, compared, card, alarms = said_by_all(folder, config, capsys)
        where = f"{trainer}, {name}, {age}, {gap}"
        correction = diagnosed["correction"]
        assert {key: compared[key] for key in correction} == correction, where
        assert correction["why"] in card.text, where
        assert bool(card.yaml) == bool(correction["settings"]), where
        assert [advice for advice in alarms if correction["why"] not in advice] == [], where
        sets = correction["settings"] == ADVISED
        assert sets == (gap == "large" and name != "auto"), where
        assert not (sets and code == 0), where
        assert not (sets and diagnosed["healthy"]), where


def test_an_alarm_about_the_weights_of_a_run_with_a_small_gap_is_no_leave(tmp_path, capsys):
    """The dump looks healthy, and the log of the run does not: what the alarm says counts for all."""
    settings = {"rollout_correction": "decoupled_token_is"}
    folder = make_dump(tmp_path / "dump", steps=4, spread=0.03, settings=settings)
    main(["compare", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["recommendation"]["settings"] == {}
    entries = [{**entry, f"{PREFIX}rollout_is_mean": 0.3} for entry in read_logs(folder)]
    (folder / "logs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for command, key in (("compare", "recommendation"), ("diagnose", "correction")):
        main([command, str(folder), "--json"])
        assert json.loads(capsys.readouterr().out)[key]["settings"] == ADVISED


# What texts name exists ----------------------------------------------------------------------------------------------

KNOWN = {name for config_class in CLASSES.values() for name in config_class.__dataclass_fields__}
METRICS = {
    "kl": 0.05, "k3_kl": 0.05, "kl_advantage_positive": 0.05, "effective_lr": 0.5, "nonfinite_fraction": 0.2,
    "staleness_max": 0.0, "rollout_is_mean": 0.4, "rollout_is_eff_sample_size": 0.1, "rollout_rs_masked_fraction": 0.6,
    "rollout_is_veto_fraction": 0.2, "bit_equal": 0.1, "rollout_is_oob_ratio": 0.5,
}  # fmt: skip
STATES = {
    "open": {"staleness_max": math.nan},
    "old": {"staleness_max": 8.0},
    "fresh": {},
    "start": {"k3_kl": 0.3, "kl": 0.3},
}


def has_what_is_named(text, trainer):
    """Each field that a text names is one of the trainer, unless it says that the trainer lacks it."""
    asynchronous = trainer == "AsyncGRPO"
    text = re.sub(r"`steps_per_generation` or `num_i\w+`" if asynchronous else r", in asynchronous .*?\)", "", text)
    lacking = {
        *itertools.chain(*re.findall(r"This trainer has no `(\w+)`|If `(\w+)` is set", text)),
        "generation_kwargs",
    }
    named = {*re.findall(r"`(\w+)(?:`|: )", text)} & KNOWN - lacking
    assert named <= {*CLASSES[trainer].__dataclass_fields__}, text


@pytest.mark.parametrize("trainer", CLASSES)
@pytest.mark.parametrize("name", SETTINGS)
def test_alarms_and_causes_name_what_the_trainer_has(trainer, name):
    config = config_of(trainer, SETTINGS[name])
    for bound, state in itertools.product(BOUNDS.values(), STATES.values()):
        metrics = {f"{PREFIX}{key}": x for key, x in {**METRICS, **state}.items()}
        window = Window(
            {**metrics, "completions/clipped_ratio": 0.9, "step": 12}, config.settings, fields=vars(config)
        )
        window.course.add(window)
        if bound.applies(window):
            has_what_is_named(fill(bound.advice, window, value=0.4, limit=0.5, side="below"), trainer)
    absent = {"adapter_missing"} if trainer != "AsyncGRPO" else set()
    in_effect = settings_in_effect(config, config.settings)
    for cause in sorted({*CAUSES, *OTHER_CAUSES} - absent):
        finding = Finding(cause, 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
        diagnosis = Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, config.settings, in_effect)
        text, settings = remedy_for(diagnosis, finding)
        has_what_is_named(text, trainer)
        after = config_of(trainer, {**SETTINGS[name], **settings})
        assert {key: getattr(after, key) for key in settings} == settings


# How runs train that are refused, or that lack what others have
MODES = {
    "server": {"vllm_mode": "server"},
    "a rollout function": {"use_vllm": False},
    "tensor parallel": {"vllm_tensor_parallel_size": 2},
    "8 bits": {"rollout_engine_kwargs": {"quantization": "fp8_per_channel", "hf_overrides": {"rope_theta": 1e4}}},
    "GSPO": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "CISPO": {"loss_type": "cispo"},
    "Liger": {"use_liger_kernel": True},
    "penalties": {"generation_kwargs": {"presence_penalty": 0.5}},
    "bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "several steps": {"steps_per_generation": 4, "num_iterations": 2},
    "SAPO": {"loss_type": "sapo"},
    "VESPO": VESPO,
    "float16": {"model_init_kwargs": {"dtype": "float16"}},
    "kept tokens": {"rollout_support": "replay", "top_p": 0.9},
    "experts": {"rollout_routing": "replay"},
    "an engine that sleeps": {"vllm_enable_sleep_mode": True},
    "a head in float32": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("trainer", [name for name in CLASSES if name != "AsyncGRPO"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("quantised", [False, True])
def test_the_remedy_of_every_cause_is_possible_in_the_run_that_gets_it(trainer, mode, quantised):
    """
    Each configuration is built anew with what is to be pasted: none is refused, no setting is without effect that had
    one, nothing that the run has set is lost, and nobody is told to keep weights of 4 bits in float32.
    """
    fields = {"use_vllm": True, "vllm_mode": "colocate", **MODES[mode]}
    if not fields.keys() <= CLASSES[trainer].__dataclass_fields__.keys():
        pytest.skip("a field of GRPO alone")

    def built(**more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = CLASSES[trainer](**MACHINE, **{**fields, **more})
        return config, {str(x.message) for x in caught if issubclass(x.category, SettingWarning)}

    config, said = built()
    in_effect = settings_in_effect(config, config.settings)
    about = {"trainer_quantization": "bitsandbytes" if quantised else "none"}
    for cause in sorted({*CAUSES, *OTHER_CAUSES} - {"adapter_missing"}):
        finding = Finding(cause, 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
        diagnosis = Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, config.settings, in_effect, about=about)
        text, settings = remedy_for(diagnosis, finding)
        after, more = built(**settings)
        assert not [line for line in more - said if "has no effect" in line], cause
        for name in settings:
            before = getattr(config, name)
            if isinstance(before, dict):
                assert flat(before).keys() <= flat(getattr(after, name)).keys(), cause
        if quantised:
            assert "model_init_kwargs" not in settings
            assert not re.search(r"(base|base weights) in float32", text), cause
        if mode in ("server", "a rollout function"):
            assert "rollout_engine_kwargs" not in settings
            # a mapping stays one argument of a shell
            for option, value in re.findall(r"`--(\S+) (.*?)`", text):
                assert shlex.split(f"--{option} {value}")[1:] == [value.strip("'")], text
        if mode == "VESPO":
            assert not re.search(r"`auto` corrects", text), cause


# What a model is, and the adapters on it, by what TRL can do with its head
GIVEN = {"a name": str, "an object": partial(load_model, dtype=torch.bfloat16)}
ADAPTERS = {
    "none": {},
    "attention": {"target_modules": ["q_proj"]},
    "a saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("given", GIVEN)
def test_the_remedy_of_every_cause_is_possible_with_the_model_that_gets_it(
    given, adapter, tied, tiny_model_path, tied_model_path, tmp_path
):
    """A trainer is built anew with what is to be pasted, and TRL takes all of it; it fails with what is left out."""
    path = tied_model_path if tied else tiny_model_path

    def built(**fields):
        config = LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[adapter]) if ADAPTERS[adapter] else None
        named = {} if given == "an object" else {"model_init_kwargs": {"dtype": "bfloat16"}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = build(
                *TRAINERS["grpo"], GIVEN[given](path), tmp_path, sampler=StaleSampler(path, noise=0.0),
                extra={"peft_config": config}, **{"use_vllm": False, **named, **fields},
            )  # fmt: skip
        return trainer, [str(x.message) for x in caught]

    trainer, _ = built()
    in_effect = settings_in_effect(trainer.args, trainer._settings)
    advised = {}
    for cause in sorted({*CAUSES, *OTHER_CAUSES} - {"adapter_missing"}):
        finding = Finding(cause, 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
        diagnosis = Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, trainer._settings, in_effect)
        text, advised[cause] = remedy_for(diagnosis._replace(about=trainer._about), finding)
        if cause in ("head", "rounding"):
            assert ("grpo/fp32_head.yaml" in text) == bool(advised[cause])
            assert bool(advised[cause]) != text.endswith("(recipe grpo/fp16.yaml).")
        if cause in ("lora_merge", "frozen_base"):
            assert ("load it with `dtype=float32`" in text) == (given == "an object")
    for settings in {repr(x): x for x in advised.values() if x}.values():
        _, said = built(**settings)
        assert not any("will be ignored" in line for line in said), settings
    if "cast_lm_head_to_fp32" in advised["head"]:
        assert built(**advised["head"])[0].model.get_output_embeddings().weight.dtype == torch.float32
    else:
        with pytest.raises(AttributeError, match="embed_tokens"):
            built(cast_lm_head_to_fp32=True)
    assert ("cast_lm_head_to_fp32" in advised["head"]) == (not tied or adapter == "none")


def test_weights_that_are_in_float32_are_not_told_to_be(tiny_model_path, tmp_path):
    """TRL loads a model in float32 where nothing is set."""
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    sampler, finding = (
        StaleSampler(tiny_model_path, noise=0.0),
        Finding("lora_merge", 0.9, 1.0, Evidence(1.0, 1.0, {}, "")),
    )
    for dtype, advised in ((None, {}), ("bfloat16", {"model_init_kwargs": {"dtype": "float32"}})):
        trainer = build(
            *TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, extra={"peft_config": adapter},
            model_init_kwargs={"dtype": dtype} if dtype else None,
        )  # fmt: skip
        in_effect = settings_in_effect(trainer.args, trainer._settings)
        diagnosis = Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, trainer._settings, in_effect)
        text, settings = remedy_for(diagnosis._replace(about=trainer._about), finding)
        assert settings == advised
        assert ("The sampler rounds" in text) == (not advised)


def test_routers_that_the_trainer_does_not_know_are_not_replayed(tmp_path):
    path = build_tiny_model(tmp_path / "experts", experts=4)
    finding = Finding("routing", 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
    config = config_of("GRPO", {"rollout_correction": "auto"})
    in_effect = settings_in_effect(config, config.settings)
    for known in (True, False):
        model = load_model(path)
        for module in [x for x in model.modules() if type(x).__name__ == "Qwen3MoeTopKRouter"]:
            module.__class__ = type(module) if known else type("OwnTopKRouter", (type(module),), {})
        trainer = build(*TRAINERS["grpo"], model, tmp_path, sampler=StaleSampler(path, noise=0.0))
        diagnosis = Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, config.settings, in_effect)
        text, settings = remedy_for(diagnosis._replace(about=trainer._about), finding)
        replay = {"rollout_routing": "replay", "rollout_engine_kwargs": {"enable_return_routed_experts": True}}
        assert settings == (replay if known else {})  # without replay, vLLM need not return its experts
        assert ("the trainer must know how the model's routers work" in text) == (not known)


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL has no asynchronous trainer")
def test_a_setting_that_a_trainer_lacks_keeps_no_other_from_it():
    config = config_of("AsyncGRPO", {"repetition_penalty": 1.2})
    finding = Finding("penalty", 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
    in_effect = settings_in_effect(config, config.settings)
    text, settings = remedy_for(
        Diagnosis("found", [finding], 0.3, 0.1, None, 100, 10, config.settings, in_effect), finding
    )
    assert settings == {"repetition_penalty": 1.0}
    assert "This trainer has no `generation_kwargs`." in text


@pytest.mark.parametrize("trainer", [name for name in CLASSES if name != "AsyncGRPO"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("correction", ["disabled", "trl", "decoupled_token_is", "bypass_ppo_clip"])
def test_the_advice_of_every_alarm_is_possible_in_the_run_that_gets_it(trainer, mode, correction):
    """The configuration is built anew with what a text says to set."""
    fields = {"use_vllm": True, "vllm_mode": "colocate", "rollout_correction": correction, **MODES[mode]}
    if not fields.keys() <= CLASSES[trainer].__dataclass_fields__.keys():
        pytest.skip("a field of GRPO alone")
    if mode == "VESPO" and correction not in ("disabled", "trl"):
        pytest.skip("a loss with weights of its own takes no other")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        config = CLASSES[trainer](**MACHINE, **fields)
    advised = set()
    for bound, state in itertools.product(BOUNDS.values(), STATES.values()):
        metrics = {f"{PREFIX}{key}": x for key, x in {**METRICS, **state}.items()}
        metrics |= {"completions/clipped_ratio": 0.9, "clip_ratio/region_mean": 0.5, "step": 12}
        window = Window(metrics, config.settings, fields=vars(config))
        window.course.add(window)
        if bound.applies(window):
            advised |= {*values_in(fill(bound.advice, window, value=0.4, limit=0.5, side="below"))}
    assert advised
    for ((name, value),) in advised:  # an alarm names one field at a time
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = CLASSES[trainer](**MACHINE, **{**fields, name: value})
        assert getattr(config, name) == value
        assert not [x for x in caught if f"`{name}` is set to" in str(x.message) and "no effect" in str(x.message)]


def flat(mapping, above=""):
    """A mapping by dotted names."""
    parts = ({f"{above}{k}": x} if not isinstance(x, dict) else flat(x, f"{above}{k}.") for k, x in mapping.items())
    return {name: x for part in parts for name, x in part.items()}


HERE, SERVER = ({"use_vllm": True, "vllm_mode": mode} for mode in ("colocate", "server"))


def values_in(text):
    """Fields and values that a text says to set: a tuple of pairs for each advice, which may name two fields."""
    one = r"`(\w+)` to (\w+)"
    both = [((a, x), (b, y)) for a, x, b, y in re.findall(f"{one} and {one}", text)]
    others = re.sub(f"{one} and {one}", "", text)
    alone = [(pair,) for pair in re.findall(one, others) + re.findall(r"`(\w+): ([^`]+)`", text)]
    return [
        tuple((name, yaml.safe_load(value)) for name, value in pairs)
        for pairs in both + alone
        if all(name in KNOWN and value not in ("it", "their") for name, value in pairs)
    ]


# Errors ---------------------------------------------------------------------------------------------------------------

REFUSED = [
    ("GRPO", {"rollout_correction": "auto", "loss_type": "vespo"}),
    ("GRPO", {**HERE, "rollout_correction": "auto", "loss_type": "vespo"}),
    ("GRPO", {**HERE, "loss_type": "vespo"}),
    ("GRPO", {"rollout_correction": "bypass_pg_is", "loss_type": "cispo"}),
    ("GRPO", {"rollout_correction": "bypass_pg_is", "importance_sampling_level": "sequence"}),
    ("GRPO", {"rollout_is": "token", "rollout_is_threshold": [[0, 1], [1, 1]]}),
    ("GRPO", {"rollout_rs_exclude_from_baseline": True, "rollout_rs": ["token_tv"], "rollout_rs_threshold": 0.2}),
    ("RLOO", {"rollout_rs_exclude_from_baseline": True, "rollout_correction": "bypass_ppo_clip_geo_rs"}),
    ("GRPO", {**SERVER, "rollout_routing": "replay"}),
    ("GRPO", {**SERVER, "rollout_support": "replay", "top_p": 0.9}),
    ("GRPO", {**HERE, "vllm_model_impl": "transformers"}),
    *(
        [("AsyncGRPO", {"rollout_support": "replay", "top_p": 0.9}), ("AsyncGRPO", {"rollout_routing": "replay"}),
         ("AsyncGRPO", {"rollout_rs_exclude_from_baseline": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2})]
        if HAS_ASYNCHRONOUS
        else []
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::trl_rollout_corr.messages.SettingWarning")
@pytest.mark.parametrize(("trainer", "fields"), REFUSED, ids=str)
def test_the_remedy_of_every_error_can_be_followed(trainer, fields):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        CLASSES[trainer](**MACHINE, **fields)
    message = str(error.value).partition(";")[0]
    subject = re.findall(r"`(\w+)`", message)[0]
    advised = [*values_in(re.sub(r"\b([Ss])et it to", rf"\1et `{subject}` to", message).replace("'", ""))]
    assert advised, message
    for pairs in advised:
        config = CLASSES[trainer](**MACHINE, **{**fields, **dict(pairs)})
        assert [getattr(config, name) for name, _ in pairs] == [value for _, value in pairs]
