"""Advice can be followed in the mode in which it is given: what a text names is set beside the settings of the run."""

import dataclasses
import functools
import itertools
import math
import re
import warnings

import pytest
import yaml

import trl_rollout_corr
from tests.launching import HAS_ASYNCHRONOUS, ROOT
from trl_rollout_corr.messages import PREFIX, SettingWarning
from trl_rollout_corr.settings.config import RolloutCorrectionConfig
from trl_rollout_corr.tools.diagnosis.causes import CAUSES
from trl_rollout_corr.tools.diagnosis.effects import EFFECTS
from trl_rollout_corr.tools.diagnosis.evidence import Evidence
from trl_rollout_corr.tools.diagnosis.ranking import Diagnosis, Finding
from trl_rollout_corr.tools.diagnosis.text import remedy_for
from trl_rollout_corr.tools.dump.in_effect import settings_in_effect
from trl_rollout_corr.tools.monitor.advice import (
    ADVISED,
    STALE_WEIGHTS,
    Advice,
    Correction,
    advise,
    in_words,
    known_age,
    to_leave,
)
from trl_rollout_corr.tools.monitor.rules import BOUNDS
from trl_rollout_corr.tools.monitor.texts import fill
from trl_rollout_corr.tools.monitor.windows import Window


MACHINE = {"output_dir": "output", "use_cpu": True, "bf16": False, "report_to": []}
CLASSES = {
    name: getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")
    for name in ("GRPO", "RLOO", *(["AsyncGRPO"] if HAS_ASYNCHRONOUS else []))
}
MODE = "vllm_importance_sampling_mode"
HERE, SERVER = ({"use_vllm": True, "vllm_mode": mode} for mode in ("colocate", "server"))
TRL, AUTO = {"rollout_correction": "trl"}, {"rollout_correction": "auto"}
FP8, GSPO = {"rollout_engine_kwargs": {"quantization": "fp8"}}, {"importance_sampling_level": "sequence"}
PARTS = {"linear": "fp8_per_channel", "ignore": ["*.gate"]}
# Trainer and fields of a run, by mode
MODES = {
    **{
        f"trl with {mode}": ("GRPO", {**HERE, **TRL, MODE: mode})
        for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    },
    "trl without correction": ("GRPO", {**HERE, **TRL, "vllm_importance_sampling_correction": False}),
    "trl with a server": ("GRPO", {**SERVER, **TRL}),
    "trl for RLOO": ("RLOO", {**HERE, **TRL}),
    "auto": ("GRPO", {**HERE, **AUTO}),
    "auto with a server": ("GRPO", {**SERVER, **AUTO}),
    "auto for RLOO": ("RLOO", {**HERE, **AUTO}),
    "auto with a sampler of one's own": ("GRPO", AUTO),
    "a sampler of one's own": ("GRPO", {}),
    "bypass": ("GRPO", {**HERE, "rollout_correction": "bypass_ppo_clip"}),
    "bypass with weights of completions": ("RLOO", {**HERE, "rollout_correction": "bypass_pg_is"}),
    "weights of completions": ("GRPO", {**HERE, "rollout_is": "sequence"}),
    "weights of completions by a preset": ("GRPO", {**HERE, "rollout_correction": "decoupled_seq_is_rs"}),
    "weights of turns": ("GRPO", {**HERE, "rollout_is": "turn", "rollout_is_threshold": [0.5, 5.0]}),
    "geometric weights": ("GRPO", {**HERE, "rollout_is": "geometric"}),
    "bounds beside a preset": ("GRPO", {**HERE, "rollout_correction": "auto", "rollout_is_threshold": 2.0}),
    "rejection": ("GRPO", {**HERE, "rollout_correction": "decoupled_geo_rs_token_tis"}),
    "disabled": ("GRPO", {**HERE, "rollout_correction": "disabled"}),
    "only measured": ("GRPO", {**HERE, **AUTO, "rollout_metrics_only": True}),
    **({"asynchronous": ("AsyncGRPO", {}), "asynchronous trl": ("AsyncGRPO", TRL)} if HAS_ASYNCHRONOUS else {}),
    "fp8": ("GRPO", {**HERE, **TRL, **FP8}),
    "fp8 with auto": ("GRPO", {**HERE, **AUTO, **FP8}),
    "fp8 without correction": ("GRPO", {**HERE, "rollout_correction": "disabled", **FP8}),
    "fp8 for RLOO": ("RLOO", {**HERE, **AUTO, **FP8}),
    "fp8 with GSPO": ("GRPO", {**HERE, **TRL, **FP8, **GSPO}),
    "fp8 with a loss that shrinks": ("GRPO", {**HERE, **TRL, **FP8, "loss_type": "cispo", "epsilon_high": 0.5}),
    "fp8 of linear layers": (
        "GRPO",
        {**HERE, **TRL, "rollout_engine_kwargs": {"quantization": "online", "quantization_config": PARTS}},
    ),
    "int8": ("GRPO", {**HERE, **TRL, "rollout_engine_kwargs": {"quantization": "int8_per_channel_weight_only"}}),
    "4 bits": ("GRPO", {**HERE, **TRL, "rollout_engine_kwargs": {"quantization": "mxfp4"}}),
    "a cache in fp8": ("GRPO", {**HERE, **TRL, "rollout_engine_kwargs": {"kv_cache_dtype": "fp8"}}),
    "bypass with GSPO": ("GRPO", {**HERE, "rollout_correction": "bypass_ppo_clip", **GSPO}),
    "a loss with weights of its own": (
        "GRPO", {**HERE, **TRL, MODE: "token_mask", "loss_type": "vespo"}
    ),
}  # fmt: skip
# Modes in which stale weights need another preset than the mode of the run says
STALE_IN = {
    **dict.fromkeys(
        ("fp8", "fp8 with auto", "fp8 without correction", "fp8 of linear layers", "int8"), "bypass_dppo_tv"
    ),
    "bypass with GSPO": "auto",
}
KNOWN = {name for config_class in CLASSES.values() for name in config_class.__dataclass_fields__}


@functools.cache
def built(trainer, fields):
    """A configuration; a warning about its settings is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        warnings.filterwarnings("ignore", ".* act on single tokens or turns", SettingWarning)  # expected with GSPO
        return CLASSES[trainer](**MACHINE, **yaml.safe_load(fields))


def of_mode(mode, removed=(), **advised):
    trainer, fields = MODES[mode]
    fields = {name: value for name, value in fields.items() if name not in removed}
    return built(trainer, yaml.safe_dump({**fields, **advised}))


def values_in(text):
    """Fields and values that a text says to set."""
    pairs = re.findall(r"`(\w+)` to (\w+)", text) + re.findall(r"`(\w+): ([^`]+)`", text)
    return [(name, yaml.safe_load(value)) for name, value in pairs if name in KNOWN and value not in ("it", "their")]


def names_to_remove(text):
    """Fields that a text says to remove."""
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"[Rr]emove ((?:, |`\w+`)+)", text)))


def alternatives(text):
    """Fields and values that a text says to set, by what is set together."""
    together = re.findall(r"`\w+` to \w+(?:(?:,| and) `\w+` to \w+)*|`\w+: [^`]+`", text)
    return [dict(values) for part in together if (values := values_in(part))]


def follow(mode, text):
    """Set the values that a text names, and see that they are in effect; and that other fields exist."""
    text = re.sub(r"The run uses this already: .*?`\. |`generation_kwargs`", "", text)
    removed = names_to_remove(text)
    for advised in alternatives(text):
        config = of_mode(mode, removed, **advised)
        assert {name: getattr(config, name) for name in advised} == advised
        name, value = next(iter(advised.items()))
        if value == "auto":
            alone = built(MODES[mode][0], yaml.safe_dump({"rollout_correction": "auto"})).settings
            assert dataclasses.replace(config.settings, rollout_engine_kwargs=None) == alone
        if (name, value) == ("rollout_is", "token") or advised.get(MODE) == "token_truncate":
            assert config.settings.bounding.level == "token"
            assert config.settings.corrects
    asynchronous = MODES[mode][0] == "AsyncGRPO"
    text = re.sub(r"`steps_per_generation` or `num_i\w+`" if asynchronous else r", in asynchronous .*?\)", "", text)
    lacking = {*removed}.union(*re.findall(r"This trainer has no `(\w+)`|If `(\w+)` is set", text))
    named = {*re.findall(r"`(\w+)(?:`|: )", text)} & KNOWN - lacking
    assert named <= {*CLASSES[MODES[mode][0]].__dataclass_fields__}, text
    return dict(values_in(text))


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
# Modes with a correction that takes single tokens out of the gradient, or whose advice has one whatever the age
REJECT = {
    "auto", "auto with a server", "auto for RLOO", "auto with a sampler of one's own", "bounds beside a preset", "rejection",
    "bypass", "weights of completions by a preset", "weights of turns",
    "trl with sequence_mask", "trl with token_mask", "trl with a server", "asynchronous", "asynchronous trl",
    "fp8", "fp8 with auto", "fp8 for RLOO", "fp8 with GSPO", "fp8 with a loss that shrinks", "fp8 of linear layers", "int8",
    "4 bits", "a cache in fp8", "bypass with GSPO", "a loss with weights of its own",
}  # fmt: skip
# By state: the age of the oldest completion
AGES = {"open": None, "old": 8.0, "fresh": 0.0}
TOKEN_TRUNCATE = {"rollout_correction": "trl", MODE: "token_truncate"}
HAVE_IT = ("trl with token_truncate",)


def of_stale(mode, settings):
    """What is advised with stale weights: the mode of a correction of ours is kept."""
    of_mode = ADVISED["decoupled" if settings.by_trl else settings.mode]
    return {"rollout_correction": STALE_IN.get(mode, of_mode)}


def for_fresh(mode):
    """What is advised with fresh weights."""
    trainer, fields = MODES[mode]
    if trainer != "GRPO" or "use_vllm" not in fields:
        return {"rollout_correction": "decoupled_token_is"}
    off = "vllm_importance_sampling_correction"
    return {**TOKEN_TRUNCATE, **({off: True} if off in fields else {})}


@pytest.mark.parametrize("mode", MODES)
def test_the_correction_for_a_gap_depends_on_the_age(mode):
    """`auto` is advised for stale weights only; with fresh ones it was worse than TRL's correction."""
    config, fresh = of_mode(mode), for_fresh(mode)
    stale = of_stale(mode, config.settings)
    for fields in (vars(config), settings_in_effect(config, config.settings)):
        known, old, unknown = (advise(config.settings, age, fields) for age in (0.0, 8.0, None))
        assert (old.best.settings, old.fresh) in ((stale, None), ({}, None))
        assert unknown.best == old.best
        assert (unknown.fresh is None) == (fresh == stale)
        if mode.endswith("a sampler of one's own"):  # which counts as fresh unless it reports its weights
            assert known == unknown
        else:
            assert known == (unknown.fresh or unknown.best, None)
            assert known.best.settings == ({} if mode in HAVE_IT else fresh)
        for age, correction in ((8.0, old.best), (0.0, unknown.fresh or unknown.best)):
            after = of_mode(mode, correction.remove, **correction.settings)
            best, of_fresh = advise(after.settings, age, vars(after))
            assert after.settings.corrects
            assert (of_fresh or best).settings == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", AGES)
def test_an_alarm_names_the_correction_for_the_age(mode, state):
    config, metrics = of_mode(mode), {f"{PREFIX}{name}": x for name, x in {**METRICS, **STATES[state]}.items()}
    window = Window({**metrics, "step": 12}, config.settings, fields=vars(config))
    window.course.add(window)
    said = alternatives(fill(BOUNDS["unlearning"].advice, window, value=0.4, limit=0.5, side="below"))
    best, fresh = advise(config.settings, AGES[state], vars(config))
    expected = [it.settings for it in (best, fresh) if it is not None and it.settings]
    assert [{**({"rollout_correction": "trl"} if MODE in it else {}), **it} for it in said] == expected


LEAVES = {
    "auto": TOKEN_TRUNCATE,
    "auto with a server": TOKEN_TRUNCATE,
    "auto for RLOO": {"rollout_correction": "decoupled_token_is"},
    "auto with a sampler of one's own": {"rollout_correction": "decoupled_token_is"},
    "bounds beside a preset": TOKEN_TRUNCATE,
    "fp8 with auto": TOKEN_TRUNCATE,
    "fp8 for RLOO": {"rollout_correction": "decoupled_token_is"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", AGES)
def test_a_run_on_auto_with_fresh_weights_is_told_to_leave_it(mode, state):
    """With fresh weights and a gap, all runs on `auto` lost accuracy, and none on TRL's `token_truncate` did."""
    config, metrics = of_mode(mode), {f"{PREFIX}{name}": x for name, x in {**METRICS, **STATES[state]}.items()}
    window = Window({**metrics, "step": 12}, config.settings, fields=vars(config))
    window.course.add(window)
    text = fill(BOUNDS["k3_corrected"].advice, window, value=0.05, limit=0.03, side="above")
    said = [*alternatives(text), {}][0]
    told = LEAVES.get(mode, {}) if state != "old" else {}
    assert said == told, text
    assert text.startswith("If the weights that sample are fresh: ") == (
        bool(told) and (state == "open" or mode.endswith("a sampler of one's own"))
    )
    if told:
        follow(mode, text)


@pytest.mark.parametrize("mode", MODES)
def test_the_advice_of_every_alarm_can_be_followed(mode):
    settings = of_mode(mode).settings
    own_weights = settings.bounding is not None
    for bound in BOUNDS.values():
        for state in STATES.values():
            metrics = {f"{PREFIX}{name}": x for name, x in {**METRICS, **state}.items()}
            if not own_weights:
                metrics = {name: x for name, x in metrics.items() if "rollout_is_" not in name}
            window = Window(
                {**metrics, "completions/clipped_ratio": 0.9, "step": 12}, settings, fields=vars(of_mode(mode))
            )
            window.course.add(window)
            if bound.applies(window):
                said = follow(mode, fill(bound.advice, window, value=0.4, limit=0.5, side="below"))
                of_weights = bound.key in ("rollout_is_mean", "rollout_is_eff_sample_size")
                if of_weights and own_weights and settings.bounding.level == "sequence":
                    assert {"rollout_is", MODE} & said.keys()


@pytest.mark.parametrize("mode", MODES)
def test_the_remedy_of_every_cause_can_be_followed(mode):
    config = of_mode(mode)
    in_effect = settings_in_effect(config, config.settings)
    absent = set() if MODES[mode][0] == "AsyncGRPO" else {"adapter_missing"}
    absent |= set() if config.settings.rollout_is == "sequence" else {"whole_completions"}
    for name, age in itertools.product(sorted({*CAUSES, *EFFECTS} - absent), AGES.values()):
        finding = Finding(name, 0.9, 1.0, Evidence(1.0, 1.0, {}, ""))
        diagnosis = Diagnosis("found", [finding], 0.1, 0.1, None, 100, 10, config.settings, in_effect, age=age)
        text, settings = remedy_for(diagnosis, finding)
        follow(mode, text)
        after = of_mode(mode, names_to_remove(text), **settings)
        assert {key: getattr(after, key) for key in settings} == settings
        if name == "whole_completions":
            assert after.settings.rollout_is == "token"
            if config.settings.by_trl and age != 0.0:  # which may be stale
                preset = STALE_IN.get(mode, "auto")
                assert f"With {STALE_WEIGHTS}, set `rollout_correction` to {preset} instead." in text
                assert settings == ({"rollout_correction": preset} if age == 8.0 else {MODE: "token_truncate"})
        if CAUSES.get(name, EFFECTS.get(name)).correction == "rejecting" and age == 0.0:
            assert ("have not trained with such tokens" in text) == (mode not in REJECT), text
        if age == 8.0:
            assert "have not trained with such tokens" not in text


# Clauses of a page that forbid something, or speak of a mode
FORBIDS, OF_OURS = "Do not widen", "with a correction of this package"
# Alarms that only a run with criteria can raise
OF_CRITERIA = {"rejected", "vetoed"}


def sections_of(page):
    """Sections about alarms or causes of a page, by name."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / f"docs/{page}.md").read_text(), flags=re.DOTALL)
    found = re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(body.replace("\n>", "\n").split()) for name, body in found}


@pytest.mark.parametrize("page", ["alarms", "causes"])
def test_the_advice_of_a_page_can_be_followed_with_trl_unless_it_names_a_mode(page):
    """`rollout_correction: trl`, the default, refuses the fields of our weights and rejection."""
    sections, clauses = sections_of(page), []
    assert len(sections) > 20
    for name, text in sections.items():
        whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
        for clause in re.split(r"(?<=[.;:]) ", whole):
            of_ours = OF_OURS in clause or name in OF_CRITERIA
            clauses.append((name, clause.replace("\0", " "), of_ours))
    for _, clause, of_ours in clauses:
        for advised in alternatives(clause):
            of_mode("weights of completions by a preset" if of_ours else "trl with sequence_mask", **advised)
    named = {clause: {*re.findall(r"`(rollout_(?:is|rs)\w*)[`:]", clause)} & KNOWN for _, clause, _ in clauses}
    refused = [(name, clause) for name, clause, of_ours in clauses if named[clause] and not of_ours]
    assert [(name, clause) for name, clause in refused if not clause.startswith(FORBIDS)] == []
    assert any(named[clause] and of_ours for _, clause, of_ours in clauses)


# Single branches --------------------------------------------------------------------------------------------------------


def test_an_age_is_known_from_the_second_step_on():
    """In the first step, all weights are fresh, whatever follows."""
    assert [known_age(0.0, step) for step in (1, 2)] == [None, 0.0]
    assert [known_age(2.0, step) for step in (1, 2)] == [2.0, 2.0]
    assert [known_age(None, step) for step in (1, 5)] == [None, None]


def test_steps_that_train_on_one_generation_do_not_make_it_stale():
    fields = {**vars(of_mode("trl with sequence_mask")), "steps_per_generation": 8, "gradient_accumulation_steps": 2}
    settings = of_mode("trl with sequence_mask").settings
    named = [advise(settings, age, fields).best.settings["rollout_correction"] for age in (5.0, 6.0)]
    assert named == ["trl", "auto"]  # the fourth step on a generation is 3 steps old by itself
    once = {**fields, "steps_per_generation": 2}
    assert advise(settings, 5.0, once).best.settings["rollout_correction"] == "auto"


def test_a_dump_without_the_fields_of_trl_is_advised_by_its_settings():
    ours = RolloutCorrectionConfig(rollout_correction="decoupled_seq_is").settings
    weighs = of_mode("trl with sequence_mask").settings
    assert [advise(x, 0.0, {}).best.settings for x in (weighs, ours)] == [
        TOKEN_TRUNCATE,
        {"rollout_correction": "decoupled_token_is"},
    ]


def test_an_unknown_run_is_told_everything_and_unless_it_has_it():
    advice = advise(None, None, vars(of_mode("auto")))
    assert (advice.best.settings, advice.fresh.settings) == ({"rollout_correction": "auto"}, TOKEN_TRUNCATE)
    assert in_words(advice, None) == (
        f"With {STALE_WEIGHTS}, set `rollout_correction` to auto; with fresher ones, set `rollout_correction` to trl and "
        f"`{MODE}` to token_truncate, unless the run has it."
    )
    kept = Advice(Correction({"rollout_correction": "auto"}), Correction({}))
    assert in_words(kept, of_mode("trl with token_truncate").settings).endswith(
        "with fresher ones, the correction of the run is right."
    )


def test_what_a_run_has_is_not_named_again():
    config = of_mode("trl with sequence_mask")
    told = in_words(advise(config.settings, 0.0, vars(config)), config.settings)
    assert told == f"Set `{MODE}` to token_truncate."


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (AUTO, True),
        ({**AUTO, "rollout_is": None}, False),
        ({"rollout_correction": "bypass_dppo_tv", "rollout_is": "token"}, False),
    ],
    ids=str,
)
def test_only_weights_together_with_a_region_are_to_be_left(fields, told):
    """Without the weights, or in bypass mode, which was not judged with weights, nothing is said against the region."""
    config = built("GRPO", yaml.safe_dump({**HERE, **fields}))
    assert any(criterion.directed for criterion in config.settings.criteria)
    assert bool(to_leave(advise(config.settings, 0.0, vars(config)), config.settings)) == told


def test_fields_that_trl_refuses_are_to_be_removed():
    config = built("GRPO", yaml.safe_dump({**HERE, **AUTO, "rollout_is_batch_normalize": True}))
    assert advise(config.settings, 0.0, vars(config)).best.remove == ("rollout_is_batch_normalize",)
    assert advise(config.settings, 0.0, vars(built("RLOO", yaml.safe_dump({**HERE, **AUTO})))).best.remove == ()


@pytest.mark.parametrize(
    ("age", "fields"),
    [
        (8.0, {**AUTO, "rollout_rs": None}),  # the weights of `auto`
        (8.0, {**AUTO, "rollout_is": None}),  # its rejection
        (0.0, {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "token"}),
    ],
    ids=str,
)
def test_a_part_of_a_correction_is_not_the_correction(age, fields):
    config = built("GRPO", yaml.safe_dump({**HERE, **fields}))
    assert advise(config.settings, age, vars(config)).best.settings


# Errors ---------------------------------------------------------------------------------------------------------------

REFUSED = [
    ("GRPO", {"rollout_correction": "auto", "loss_type": "vespo"}),
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
    for name, value in advised:
        config = CLASSES[trainer](**MACHINE, **{**fields, name: value})
        assert getattr(config, name) == value
