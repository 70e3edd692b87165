"""`trl-rollout-corr compare`."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
import yaml

from tests import reference
from tests.dumps import make_dump, read_dump
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main, make_parser
from trl_rollout_corr.settings.presets import PRESETS
from trl_rollout_corr.tools.analysis import recompute
from trl_rollout_corr.tools.analysis.recommend import recommend
from trl_rollout_corr.tools.analysis.recompute import batch_of
from trl_rollout_corr.tools.analysis.spread import (
    Spread,
    measure,
    suggest_bounds,
)
from trl_rollout_corr.tools.dump import folder as dump
from trl_rollout_corr.tools.dump.reading import open_dump, read_table
from trl_rollout_corr.tools.monitor.examine import examine


NUMBERS = ("rejected", "sample_size", "effective_lr", "cosine", "norm")


def compare(*arguments) -> str:
    args = make_parser().parse_args(["compare", *map(str, arguments)])
    return args.run(args)


def document(*arguments) -> dict:
    return json.loads(compare(*arguments, "--json"), parse_constant=pytest.fail)  # NaN and infinity are not JSON


def outcomes(*arguments) -> dict[str, dict]:
    """Numbers by name of preset."""
    entries = document(*arguments)["settings"]
    return {entry["name"]: {key: entry[key] for key in NUMBERS} for entry in entries}


def like(numbers: dict[str, float | None], tolerance: float) -> dict:
    return {key: None if value is None else pytest.approx(value, rel=tolerance) for key, value in numbers.items()}


# The table ----------------------------------------------------------------------------------------------------------------


def by_hand(folder, preset: str, epsilon: float, epsilon_high: float) -> dict[str, float]:
    """The numbers of the table, by loops over Python floats."""
    config = RolloutCorrectionConfig(rollout_correction=preset).settings
    rows = [row for row in read_dump(folder).rows if row["sampled"]]
    tokens = [
        [
            (train, rollout)
            for train, rollout, counts in zip(row["train_logps"], row["rollout_logps"], row["mask"], strict=True)
            if counts
        ]
        for row in rows
    ]
    usable = [[pair for pair in sequence if math.isfinite(pair[1])] for sequence in tokens]
    count = sum(map(len, usable))
    keeps = [[True] * len(sequence) for sequence in usable]
    for name, bounds in zip(config.rollout_rs or [], config.rollout_rs_threshold or [], strict=True):
        more = reference.keeps(usable, name, bounds)
        keeps = [[a and b for a, b in zip(*both, strict=True)] for both in zip(keeps, more, strict=True)]
    weights = [[1.0] * len(sequence) for sequence in usable]
    result = {"rejected": None, "sample_size": None}
    if config.rollout_rs:
        result["rejected"] = sum(not kept for row in keeps for kept in row) / count
    if config.rollout_is:
        applied = reference.weights(usable, config.rollout_is, *config.bounding[1:3])
        flat = [w for row in applied for w in row]
        result["sample_size"] = sum(flat) ** 2 / count / sum(w * w for w in flat)
        weights = applied if config.applies_weights else weights
    coefficients = [[w * k for w, k in zip(*both, strict=True)] for both in zip(weights, keeps, strict=True)]
    result["effective_lr"] = sum(c for row in coefficients for c in row) / count
    product = square = corrected_square = 0.0
    for row, sequence, factors in zip(rows, tokens, coefficients, strict=True):
        factors = iter(factors)
        for train, rollout in sequence:
            plain = row["advantage"] * (1 - math.exp(train))
            factor = next(factors) if math.isfinite(rollout) else 0.0
            if config.clips_around_sampler and math.isfinite(rollout):
                ratio = math.exp(train - rollout)
                beyond = ratio > 1 + epsilon_high if row["advantage"] > 0 else ratio < 1 - epsilon
                factor = 0.0 if beyond else factor * ratio
            product += plain * plain * factor
            square += plain**2
            corrected_square += (plain * factor) ** 2
    result["cosine"] = product / math.sqrt(square * corrected_square)
    result["norm"] = math.sqrt(corrected_square / square)
    return result


def with_settings(folder, **settings):
    """The dump of a run with other settings of TRL."""
    for path in dump.files_of(folder):
        table, before, about, _ = read_table(path)
        dump.write_rows(
            folder, *map(int, re.findall(r"\d+", path.name)), table.to_pylist(), {**before, **settings}, about
        )
    return folder


@pytest.mark.parametrize(
    "preset",
    [
        "decoupled_token_icepop",
        "decoupled_seq_is_rs",
        "bypass_ppo_clip",
        "bypass_ppo_clip_k3_rs",
        "decoupled_geo_rs",
        "disabled",
    ],
)
def test_the_table_is_that_of_a_loop_over_tokens(preset, tmp_path):
    make_dump(tmp_path, spread=0.15, broken=2, ranks=2, seed=3)
    expected = by_hand(tmp_path, preset, 0.1, 0.2)
    assert outcomes(with_settings(tmp_path, epsilon=0.1, epsilon_high=0.2))[preset] == like(expected, 1e-5)
    if "ppo_clip" in preset:
        assert 0.3 < expected["cosine"] < 0.999  # something is clipped
    if config_of(preset).settings.criteria:
        assert 0.05 < expected["rejected"] < 1  # something is rejected


def config_of(preset: str) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(rollout_correction=preset)


SETTINGS = {
    "decoupled": {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.99, 1.01]},
    "bypass": {"rollout_correction": "bypass_ppo_clip_geo_rs", "rollout_rs_threshold": [0.99, 1.01]},
    "neutralize": {"rollout_is": "sequence", "rollout_nan_policy": "neutralize"},
    "turns": {"rollout_is": "turn", "rollout_rs": "turn_max_k1", "rollout_rs_threshold": [0.99, 1.01]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_settings_of_the_run_give_what_the_run_did(settings, tmp_path):
    folder = make_dump(tmp_path / "dump", steps=1, sampled=32, settings=settings, broken=3)
    (tmp_path / "same.yaml").write_text(yaml.safe_dump({**settings, "learning_rate": 1e-6, "use_vllm": True}))
    found = outcomes(folder, "--config", tmp_path / "same.yaml")
    assert found["this run"] == like(found[str(tmp_path / "same.yaml")], 1e-6)
    logged = read_dump(folder).logs[0]
    assert found["this run"]["effective_lr"] == pytest.approx(logged["rollout_corr/effective_lr"], rel=1e-6)
    for key, name in (("rejected", "rollout_rs_masked_fraction"), ("sample_size", "rollout_is_eff_sample_size")):
        if found["this run"][key] is not None:
            assert found["this run"][key] == pytest.approx(logged[f"rollout_corr/{name}"], rel=1e-6)


def test_factors_of_the_whole_batch_come_from_the_run(tmp_path):
    """Eight of its rows do not tell what was normalised."""
    settings = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.99, 1.01]}
    folder = make_dump(tmp_path, steps=1, sampled=8, settings={**settings, "rollout_rs_renormalize": True})
    rows = [row for row in read_dump(folder).rows if row["sampled"]]
    coefficients = [c for row in rows for c, counts in zip(row["coefficients"], row["mask"], strict=True) if counts]
    expected = sum(coefficients) / len(coefficients)
    assert outcomes(folder)["this run"]["effective_lr"] == pytest.approx(expected, rel=1e-6)


def test_worst_rows_do_not_count(tmp_path):
    make_dump(tmp_path, sampled=10, worst=6)
    rows = read_dump(tmp_path).rows
    assert document(tmp_path)["sequences"] == sum(row["sampled"] for row in rows) == 30 < len(rows)
    assert document(tmp_path)["notes"] == []


def test_every_preset_has_a_row(tmp_path):
    entries = document(make_dump(tmp_path))["settings"]
    first = ["this run", "bounds that fit", "disabled", "decoupled_token_is"]
    assert [entry["name"] for entry in entries][:4] == first
    assert sorted(entry["name"] for entry in entries[2:]) == sorted(PRESETS)
    fields = [{**entry["fields"], "rollout_correction": None} for entry in entries[2:]]
    assert all(a != b for i, a in enumerate(fields) for b in fields[:i])


def rows_of(*arguments) -> list[str]:
    """Names in the first column of the table, without marks."""
    lines = [line for line in compare(*arguments).splitlines() if line.startswith("| ")][2:]
    return [line.split("|")[1].split("(")[0].strip() for line in lines]


def test_a_run_is_not_advised_the_settings_that_it_has(tmp_path):
    found = document(make_dump(tmp_path / "healthy", age=3, settings={"rollout_correction": "auto"}))["recommendation"]
    assert (found["row"], found["fields"]) == ("this run", {})
    assert "The run uses the settings of `auto` already." in found["why"]
    changed = {"rollout_correction": "auto", "rollout_rs": "token_tv", "rollout_rs_threshold": [[0.3, 0.3]]}
    found = document(make_dump(tmp_path / "changed", age=3, settings=changed))["recommendation"]
    assert found["fields"] == {"rollout_correction": "auto"}
    far = make_dump(tmp_path / "far", spread=1.0, age=3, settings={"rollout_correction": "auto"})
    far = document(far)["recommendation"]
    assert (far["row"], far["fields"]) == ("this run", {})
    assert "find the cause of the gap first" in far["why"]


MODE = "vllm_importance_sampling_mode"
FIELDS = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
OF_TRAINER = {  # fields of TRL, by trainer
    "grpo": {"per_device_train_batch_size": 8, "use_vllm": True, MODE: "sequence_mask"},
    "rloo": {"per_device_train_batch_size": 8, "use_vllm": True},
    "async": {"per_device_train_batch_size": 8},
}


def of_age(folder, age, trainer):
    """The dump of a run in which the completions of each step have an age."""
    for step, path in enumerate(dump.files_of(folder), 1):
        table, before, about, _ = read_table(path)
        rows = [{**row, "staleness": age(step)} for row in table.to_pylist()]
        settings = {name: value for name, value in before.items() if name not in OF_TRAINER["grpo"]}
        dump.write_rows(
            folder, *map(int, re.findall(r"\d+", path.name)), rows, {**settings, **OF_TRAINER[trainer]}, about
        )
    return folder


def test_the_recommendation_depends_on_the_age_and_the_trainer(tmp_path, capsys):
    """With fresh weights `auto` was worse than TRL's correction, which only GRPO has."""
    folder = make_dump(
        tmp_path / "far", steps=2, rows=16, spread=0.2, logs=False, settings={"rollout_correction": "disabled"}
    )
    stale, of_trl = {"rollout_correction": "auto"}, {"rollout_correction": "trl", MODE: "token_truncate"}

    def recommended(age, trainer):
        return document(of_age(folder, age, trainer))["recommendation"]["fields"]

    assert recommended(lambda step: step + 1, "grpo") == stale
    assert recommended(lambda step: 0, "async") == {"rollout_correction": "decoupled_token_is"}
    assert recommended(lambda step: 0, "rloo") == {"rollout_correction": "decoupled_token_is"}
    assert recommended(lambda step: 2, "rloo") == {"rollout_correction": "decoupled_token_is"}
    found = document(of_age(folder, lambda step: 0, "grpo"))
    row = found["recommendation"]["row"]
    assert (row, found["recommendation"]["fields"]) == ("trl with token_truncate", of_trl)
    assert [it["fields"]["rollout_is"] for it in found["settings"] if it["name"] == row] == ["token"]
    text = compare(folder)
    assert f"| {row} (recommended)" in text
    assert "`auto` is for stale weights (3 steps old or more), and all are fresher." in text
    assert f"{MODE}: token_truncate" in text
    near = make_dump(tmp_path / "near", steps=2, rows=16, settings={"rollout_correction": "disabled"})
    main(["diagnose", str(of_age(near, lambda step: 0, "grpo")), "--json"])
    advised = [it["settings"] for it in json.loads(capsys.readouterr().out)["causes"] if it["preset"]]
    assert advised
    assert all({**settings, **of_trl} == settings for settings in advised)
    text = compare(dump.files_of(folder)[0])  # of step 1, in which the weights of every run are fresh
    assert "Recommended: auto." in text
    assert f"with fresher ones, set `rollout_correction` to trl and `{MODE}` to token_truncate." in text
    dump.append_log(folder, {"step": 3, "rollout_corr/staleness_max": 3.0})  # of which nothing is dumped
    assert "Recommended: auto." in compare(folder)


def test_stale_weights_of_8_bits_are_recommended_the_preset_of_the_table(tmp_path, capsys):
    """The answer of docs/choosing.md, from `compare`, `diagnose` and the alarm in the report."""
    engine = {"quantization": "fp8"}
    fields = {"rollout_correction": "disabled", "rollout_engine_kwargs": engine}
    folder = make_dump(tmp_path, steps=6, rows=16, spread=0.3, age=8, settings=fields)

    def recommended(trainer, **of_trl):
        fields = {**OF_TRAINER[trainer], "vllm_mode": "colocate" if trainer == "grpo" else None, **of_trl}
        return document(with_settings(folder, **fields))["recommendation"]["fields"]["rollout_correction"]

    assert recommended("async") == recommended("rloo") == "auto"
    assert recommended("grpo", importance_sampling_level="sequence") == "auto"
    assert recommended("grpo", importance_sampling_level="token") == "bypass_dppo_tv"
    assert "| bypass_dppo_tv (recommended)" in compare(folder)
    main(["diagnose", str(folder), "--json"])
    assert {it["preset"] for it in json.loads(capsys.readouterr().out)["causes"]} <= {"bypass_dppo_tv", None}
    main(["report", str(folder), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "rollout_correction</code> to bypass_dppo_tv" in page
    assert "to auto" not in page
    assert recommended("grpo", rollout_engine_kwargs={"quantization": "mxfp4"}) == "auto"
    assert recommended("grpo", rollout_engine_kwargs={"kv_cache_dtype": "fp8"}) == "auto"
    assert recommended("grpo", rollout_engine_kwargs=engine, vllm_mode="server") == "auto"


def test_an_asynchronous_run_of_trls_loss_is_advised_for_stale_weights():
    """TRL's asynchronous loss clips around the sampler, and no bypass preset takes its place."""
    of_trl = {"bypass_mode": True, "rollout_loss_type": "ppo_clip", "rollout_clip_ratio_c": None}
    run = dataclasses.replace(RolloutCorrectionConfig(rollout_correction="trl").settings, rollout_is=None, **of_trl)
    fields, reason = recommend(run, [], 0.05, 8.0, OF_TRAINER["async"])
    assert fields == {"rollout_correction": "auto"}
    assert "stale" not in reason
    assert "fresher" not in reason


@pytest.mark.parametrize("trainer", OF_TRAINER)
def test_the_row_of_trl_is_for_a_trainer_that_trl_corrects(tmp_path, trainer):
    """TRL corrects nothing in RLOO, and its asynchronous loss clips around the sampler."""
    rows = {it["name"] for it in document(of_age(make_dump(tmp_path, rows=8), lambda step: 0, trainer))["settings"]}
    assert ("trl" in rows) == (trainer == "grpo")
    assert {"auto", "disabled", "this run"} <= rows


def test_no_bypass_preset_takes_the_place_of_trls_asynchronous_loss(tmp_path):
    """TRL clips around the sampler there, which reads as bypass mode."""
    clips = {"bypass_mode": True, "rollout_loss_type": "ppo_clip", "rollout_clip_ratio_c": None, "rollout_is": None}
    run = dataclasses.replace(RolloutCorrectionConfig(rollout_correction="trl").settings, **clips)
    in_effect = {name: x for name, x in dataclasses.asdict(run).items() if name in FIELDS}
    folder = of_age(make_dump(tmp_path, spread=0.05, logs=False), lambda step: step, "async")
    with_settings(folder, **in_effect)
    found = document(folder)
    assert found["suggestion"]["rollout_correction"] == "decoupled_geo_rs_token_tis"
    assert "| bypass_ppo_clip" not in compare(folder)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_healthy_run_with_fresh_weights_is_left_as_it_is(tmp_path, trainer):
    for name, settings in {"trl": {"rollout_correction": "trl"}, "none": {"rollout_correction": "disabled"}}.items():
        folder = of_age(make_dump(tmp_path / name, steps=2, spread=0.06, settings=settings), lambda step: 0, trainer)
        found = document(folder)["recommendation"]
        assert (found["fields"], found["row"]) == ({}, "this run")
        assert "no alarm was raised" in found["why"]
    auto = make_dump(tmp_path / "auto", steps=2, spread=0.06, settings={"rollout_correction": "auto"})
    folder = of_age(auto, lambda step: 0, trainer)
    assert document(folder)["recommendation"]["fields"] != {}  # `auto` is for stale weights


def test_the_table_is_markdown_and_has_dashes_for_what_there_is_not(tmp_path):
    first, _ = compare(make_dump(tmp_path, spread=3.0, gaussian=True, logs=False)).split("\nSpread")
    rows = [line for line in first.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert cells["settings"] == ["rejected", "ESS", "effective lr", "cosine", "norm"]
    assert cells["disabled (reference)"] == ["-", "-", "1.000", "1.000", "1.000"]
    assert cells["decoupled_geo_rs"] == ["1.000", "-", "0.000", "-", "0.000"]


def test_what_stops_at_broken_tokens_has_no_numbers(tmp_path, capsys):
    path = tmp_path / "strict.yaml"
    path.write_text("rollout_nan_policy: raise")
    folder = str(make_dump(tmp_path / "dump", broken=1, sampled=32))
    assert main(["compare", folder, "--config", str(path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^3 of \d+ tokens lack a finite log-probability\.$", output, re.MULTILINE)
    assert f"{path}: `rollout_nan_policy: raise` ends the run at these sequences." in output
    assert outcomes(folder, "--config", path)[str(path)] == dict.fromkeys(NUMBERS)
    assert all(value == value for row in outcomes(folder).values() for value in row.values())


def test_notes_say_what_the_numbers_are(tmp_path):
    text = compare(make_dump(tmp_path / "a", settings={"rollout_correction": "bypass_pg_is"}))
    assert "The run: bypass, reinforce; the trainer's log-probabilities come from the current policy." in text
    text = compare(make_dump(tmp_path / "b", settings={"rollout_is": "token", "rollout_metrics_only": True}))
    assert "The run: decoupled; the trainer's log-probabilities come from the old policy." in text
    assert "This run only measures (`rollout_metrics_only`)" in text
    folder = make_dump(tmp_path / "c", group=1)  # alone in its group, every advantage is 0
    assert "there is no gradient to compare" in compare(folder)
    assert outcomes(folder)["decoupled_token_is"]["cosine"] is None


# Which steps, and which row -----------------------------------------------------------------------------------------------


def drifting(folder, **options):
    """A dump whose policies drift apart, and the step at which an alarm says so."""
    make_dump(folder, steps=10, spread=0.02, growth=1.4, sampled=32, length=60, **options)
    logs = read_dump(folder).logs
    settings = RolloutCorrectionConfig(rollout_correction="decoupled_token_is").settings
    alarms = [finding for finding in examine(logs, settings) if finding.key == "rollout_corr/k3_kl"]
    return folder, min(finding.step for finding in alarms)


def test_after_an_alarm_bounds_are_made_of_steps_that_are_named(tmp_path):
    folder, alarm = drifting(tmp_path / "dump")
    found = document(folder)
    assert found["steps"] == list(range(1, 11))
    assert found["suggestion"] is None
    assert any(f"No bounds are made, because an alarm was raised at step {alarm}" in note for note in found["notes"])
    assert found["recommendation"]["fields"] == {"rollout_correction": "auto"}
    healthy = dump.files_of(folder)[alarm - 5]
    assert document(healthy)["steps"] == [alarm - 4]
    assert document(healthy)["suggestion"] is not None


def test_after_an_alarm_about_bounds_there_are_bounds(tmp_path):
    """Bounds that reject nearly everything say nothing against the sequences."""
    settings = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.9999, 1.0001]}
    folder = make_dump(tmp_path / "dump", steps=6, settings=settings)
    findings = examine(read_dump(folder).logs, RolloutCorrectionConfig(**settings).settings)
    assert {finding.bound for finding in findings} & {"rejected"}
    assert document(folder)["suggestion"] is not None


@pytest.mark.parametrize(
    ("settings", "preset"),
    [
        ({}, "auto"),
        ({"rollout_correction": "bypass_ppo_clip_k3_rs"}, "bypass_dppo_tv"),
        ({"rollout_correction": "bypass_pg_is"}, "bypass_dppo_tv"),
    ],
)
def test_without_healthy_steps_what_needs_no_bounds_is_recommended(settings, preset, tmp_path):
    folder = make_dump(tmp_path / "dump", spread=1.0, age=3, settings=settings)
    found = document(folder)
    assert found["suggestion"] is None
    assert found["recommendation"]["fields"] == {"rollout_correction": preset}
    assert preset in found["recommendation"]["row"].split(", ")
    text = compare(folder)
    assert "No bounds are made" in text
    assert "rollout_rs_threshold" not in text
    (folder / "logs.jsonl").unlink()  # which has the alarm
    assert document(folder)["suggestion"] is not None


def test_one_row_is_recommended(tmp_path):
    folder = make_dump(tmp_path / "dump", spread=0.02)
    rows = [line for line in compare(folder).splitlines() if line.startswith("|") and "recommended" in line]
    assert len(rows) == 1
    found = document(folder)
    best = found["recommendation"]
    assert rows[0].startswith(f"| {best['row']} (recommended)")
    assert f"Recommended: {best['row']}. {best['why']}" in compare(folder)
    assert [entry["name"] for entry in found["settings"] if entry["reference"]] == ["disabled"]
    assert compare(folder).count("(reference)") == 1


def test_policies_that_have_nothing_to_do_with_each_other_have_no_bounds(tmp_path):
    found = document(make_dump(tmp_path / "dump", spread=4.0, age=3, gaussian=True, logs=False))
    assert found["suggestion"] is None
    assert found["recommendation"]["fields"] == {"rollout_correction": "auto"}


def test_bounds_of_policies_that_are_far_apart_come_with_a_warning(tmp_path):
    assert "The policies are far apart" in compare(make_dump(tmp_path / "dump", spread=1.0, logs=False))
    assert "The policies are far apart" not in compare(make_dump(tmp_path / "near"))


@pytest.mark.parametrize("spread", [0.0, 0.003])
def test_a_gap_without_effect_needs_no_other_settings(spread, tmp_path):
    folder = make_dump(tmp_path / "dump", spread=spread)
    text = compare(folder)
    assert "| this run (recommended)" in text
    assert "Recommended: this run. The root mean square of the log-ratio is" in text
    assert "A correction would change nothing." in text
    assert document(folder)["recommendation"]["fields"] == {}
    assert document(folder)["suggestion"] is None


# Suggestion ---------------------------------------------------------------------------------------------------------------


def log_ratios(s: float, length: int, rows: int = 2000) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(rows, length, generator=rng, dtype=torch.float64) * s - s * s / 2


def spread_of(s: float, length: int, rows: int = 2000) -> Spread:
    d = log_ratios(s, length, rows)
    return measure(d, torch.ones_like(d, dtype=torch.bool))


@pytest.mark.parametrize(("s", "length"), [(0.04, 400), (0.1, 100), (0.2, 17), (0.2, 400), (0.5, 20)])
def test_suggested_bounds_reject_at_most_5_percent_and_no_less_than_needed(s, length):
    d = log_ratios(s, length)
    lower, upper = suggest_bounds(measure(d, torch.ones_like(d, dtype=torch.bool)))
    mean = d.mean(1)
    assert 0.01 < ((mean.exp() < lower) | (mean.exp() > upper)).double().mean() <= 0.05
    assert lower < 1 < upper


def test_bounds_are_those_of_the_document():
    """`docs/choosing.md`: for 1600 tokens at s = 0.04 the bounds are [0.9972, 1.002]."""
    lower, upper = suggest_bounds(spread_of(0.04, 1600, rows=400))
    assert lower == pytest.approx(0.9972, abs=3e-4)
    assert upper == pytest.approx(1.002, abs=3e-4)


@pytest.mark.parametrize(
    ("settings", "preset"),
    [
        ({}, "decoupled_geo_rs_token_tis"),
        ({"rollout_correction": "bypass_ppo_clip"}, "bypass_ppo_clip_geo_rs"),
        ({"rollout_correction": "bypass_pg_is"}, "bypass_pg_geo_rs_token_tis"),
    ],
)
def test_the_suggested_yaml_is_a_configuration_in_the_mode_of_the_run(settings, preset, tmp_path):
    folder = make_dump(tmp_path / "dump", settings=settings)
    *_, text = re.findall(r"^```yaml\n(.*?)^```$", compare(folder), re.MULTILINE | re.DOTALL)
    fields = yaml.safe_load(text)
    config = RolloutCorrectionConfig(**fields).settings
    assert config.mode == RolloutCorrectionConfig(**settings).settings.mode
    assert config.rollout_correction == preset
    assert config.rollout_rs == ["seq_mean_k1"]
    assert document(folder)["suggestion"] == fields
    (tmp_path / "suggested.yaml").write_text(text)
    found = outcomes(folder, "--config", tmp_path / "suggested.yaml")[str(tmp_path / "suggested.yaml")]
    assert found["rejected"] <= 0.05


# Bad input ----------------------------------------------------------------------------------------------------------------


def error_of(capsys, *arguments) -> str:
    """The one line that the command prints when it refuses."""
    assert main(["compare", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    about = str(arguments[-1] if "--config" in arguments else arguments[0])  # the file that is at fault
    assert line.startswith(f"{about}: ")
    return line.removeprefix(f"{about}: ")


def test_a_path_without_a_dump(tmp_path, capsys):
    assert error_of(capsys, tmp_path / "missing") == "no such file or folder"
    assert error_of(capsys, tmp_path).startswith("this folder does not contain a dump")
    (tmp_path / "step-00000001-rank-00000.partial").write_bytes(b"PAR1")
    assert error_of(capsys, tmp_path).startswith("this folder does not contain a dump")


@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.9, 0.999])
def test_a_truncated_file(keep, tmp_path, capsys):
    path = dump.files_of(make_dump(tmp_path))[1]
    content = path.read_bytes()
    path.write_bytes(content[: keep if keep in (0, 3) else int(keep * len(content))])
    assert error_of(capsys, path).startswith(f"{path.name} is damaged, or it is not a Parquet file: ")
    assert main(["compare", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"warning: {tmp_path}: {path.name} is damaged, or it is not a Parquet file: ")
    assert output.err.endswith(" It is left out.\n")
    assert json.loads(output.out)["steps"] == [1, 3]


def test_dumps_that_cannot_be_compared(tmp_path, capsys):
    only_worst = make_dump(tmp_path / "worst", sampled=0)
    assert "no sequence was drawn at random" in error_of(capsys, only_worst)
    row = read_dump(only_worst).rows[0]
    n = len(row["mask"])
    for name, columns, message in (
        ("short", {"keep": row["keep"][:-1]}, "lists of different lengths"),
        ("tools", {"mask": [False] * n}, "no token of the loss"),
        (
            "broken",
            {"rollout_logps": [math.nan] * n},
            "no token of the loss has a finite log-probability under both policies",
        ),
    ):
        dump.write_rows(tmp_path / name, 1, 0, [{**row, "sampled": True, **columns}], {})
        assert message in error_of(capsys, tmp_path / name)
    dump.write_rows(tmp_path / "settings", 1, 0, [{**row, "sampled": True}], {"rollout_iss": "token"})
    assert "the settings in the dump: " in error_of(capsys, tmp_path / "settings")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"algorithm: {rollout_correction: {rollout_is: token}}",
            "it has no setting of this package, such as `rollout_correction: auto`. `trl-rollout-corr convert`",
        ),
        (b"rollout_correction: {rollout_is: token}", "trl-rollout-corr convert"),
        (b"learning_rate: 1", "it has no setting of this package"),
        (b"", "no setting"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"rollout_correction: tis", "'tis', which is not a preset. Common presets are auto"),
        (
            b"rollout_iss: token",
            "`rollout_iss` is not a field of RolloutCorrectionConfig. Did you mean 'rollout_is'?",
        ),
        (b"rollout_is_threshold: 0.5", "`rollout_is_threshold` must be at least 1"),
    ],
)
def test_bad_settings_name_their_file(content, message, tmp_path, capsys):
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    folder = make_dump(tmp_path / "dump", steps=1)
    assert message in error_of(capsys, folder, "--config", path)
    assert "No such file" in error_of(capsys, folder, "--config", tmp_path / "missing.yaml")


def test_settings_without_effect_are_warned_about(tmp_path, capsys):
    path = tmp_path / "idle.yaml"
    path.write_text("rollout_correction: auto\nrollout_loss_type: reinforce")
    assert main(["compare", str(make_dump(tmp_path / "dump", steps=1)), "--config", str(path)]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {path}: `rollout_loss_type` is set to 'reinforce' but has no effect")


def test_the_settings_of_a_run_are_not_warned_about_again(tmp_path, capsys):
    settings = dataclasses.asdict(RolloutCorrectionConfig().settings) | {"rollout_loss_type": "reinforce"}
    row = read_dump(make_dump(tmp_path / "a")).rows[0]
    dump.write_rows(tmp_path / "b", 1, 0, [{**row, "sampled": True}], settings)
    assert main(["compare", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""


def test_tokens_of_tools_and_padding_take_no_part(tmp_path):
    make_dump(tmp_path, rows=8, sampled=8)
    sequences = open_dump(tmp_path).sequences
    batch = batch_of(sequences, sequences.represents)
    expected = [
        [logp for logp, counts in zip(row["train_logps"], row["mask"], strict=True) if counts]
        for row in read_dump(tmp_path).rows
    ]
    (block,) = batch.blocks
    assert [logps[mask].tolist() for logps, mask in zip(block.train_logps, block.mask, strict=True)] == expected
    assert block.mask.shape[1] == max(map(len, expected))


def test_a_long_completion_pads_no_other(tmp_path, monkeypatch):
    """Sequences lie in blocks of about one length, and what refers to a whole batch refers to all blocks."""
    make_dump(tmp_path / "short", rows=32, length=10, steps=1, spread=0.4, tools=False)
    make_dump(tmp_path / "long", rows=8, length=4000, steps=1, spread=0.4, tools=False)
    rows = [row for name in ("short", "long") for row in read_dump(tmp_path / name).rows]
    settings = read_dump(tmp_path / "short").settings
    dump.write_rows(tmp_path / "both", 1, 0, [{**row, "sampled": True} for row in rows], settings)
    sequences = open_dump(tmp_path / "both").sequences
    every = np.ones(len(sequences), bool)
    batch = batch_of(sequences, every)
    assert len(batch.blocks) > 1
    assert sum(block.mask.numel() for block in batch.blocks) < 2 * batch.n_tokens + 128 * len(rows)
    monkeypatch.setattr(recompute, "_SHORT", 10**6)
    one_block = batch_of(sequences, every)
    assert len(one_block.blocks) == 1
    token = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    whole = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [0.99, 1.01]}
    for fields in (token, {**token, "rollout_is_batch_normalize": True}, {**whole, "rollout_rs_renormalize": True}):
        settings = RolloutCorrectionConfig(**fields).settings
        effects = [recompute.recompute(x, settings, clip=(0.8, 1.2)) for x in (batch, one_block)]
        assert like(effects[1]._asdict(), 1e-5) == effects[0]._asdict()


@pytest.mark.parametrize("distance", [1e4, 1e9])
def test_absurd_log_ratios_are_survived(distance):
    log_ratio = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 0.05
    log_ratio[0, 0] = -distance
    bounds = suggest_bounds(measure(log_ratio, torch.ones(40, 30, dtype=torch.bool)))
    assert bounds[0] < 1 < bounds[1]
