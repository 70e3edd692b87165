"""`trl-rollout-corr compare`."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import yaml

from tests import reference
from tests.dumps import make_dump, read_dump, read_table
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main, make_parser
from trl_rollout_corr.settings.presets import PRESETS
from trl_rollout_corr.tools.analysis import recompute
from trl_rollout_corr.tools.analysis.recompute import batch_of
from trl_rollout_corr.tools.dump import folder as dump
from trl_rollout_corr.tools.dump.reading import open_dump


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
    assert [entry["name"] for entry in entries][:3] == ["this run", "disabled", "decoupled_token_is"]
    assert sorted(entry["name"] for entry in entries[1:]) == sorted(PRESETS)
    fields = [{**entry["fields"], "rollout_correction": None} for entry in entries[1:]]
    assert all(a != b for i, a in enumerate(fields) for b in fields[:i])


def rows_of(*arguments) -> list[str]:
    """Names in the first column of the table, without marks."""
    lines = [line for line in compare(*arguments).splitlines() if line.startswith("| ")][2:]
    return [line.split("|")[1].split("(")[0].strip() for line in lines]


def test_a_run_is_not_advised_the_settings_that_it_has(tmp_path):
    found = document(make_dump(tmp_path / "healthy", age=3, settings={"rollout_correction": "auto"}))["recommendation"]
    assert (found["row"], found["settings"]) == ("this run", {})
    assert "The run uses `auto` already, so leave it, and find" in found["why"]
    changed = {"rollout_correction": "auto", "rollout_rs": "token_tv", "rollout_rs_threshold": [[0.3, 0.3]]}
    found = document(make_dump(tmp_path / "changed", spread=0.3, age=3, settings=changed))["recommendation"]
    assert (found["settings"], found["remove"]) == (
        {"rollout_correction": "auto"},
        ["rollout_rs", "rollout_rs_threshold"],
    )
    far = make_dump(tmp_path / "far", spread=1.0, age=3, settings={"rollout_correction": "auto"})
    far = document(far)["recommendation"]
    assert (far["row"], far["settings"]) == ("this run", {})


def test_a_run_that_loses_its_gradient_is_not_left_as_it_is_without_a_log(tmp_path):
    """Its gap is small, but the table shows an effective learning rate near 0."""
    settings = {"rollout_is": "sequence", "rollout_is_threshold": [0.9, 1.0]}
    folder = make_dump(tmp_path, steps=1, spread=0.08, length=80, settings=settings, logs=False)
    found = document(folder)
    assert found["settings"][0]["effective_lr"] < 0.5
    assert found["recommendation"]["settings"] == {"rollout_correction": "auto"}


MODE = "vllm_importance_sampling_mode"
FIELDS = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
OF_TRAINER = {  # fields of TRL, by trainer
    "grpo": {"per_device_train_batch_size": 8, "use_vllm": True, MODE: "sequence_mask"},
    "rloo": {"per_device_train_batch_size": 8, "use_vllm": True},
    "async": {"per_device_train_batch_size": 8},
}


def with_ages(folder, age, trainer):
    """The dump of a run in which the completions of each step have an age."""
    for step, path in enumerate(dump.files_of(folder), 1):
        table, before, about, _ = read_table(path)
        rows = [{**row, "staleness": age(step)} for row in table.to_pylist()]
        settings = {name: value for name, value in before.items() if name not in OF_TRAINER["grpo"]}
        dump.write_rows(
            folder, *map(int, re.findall(r"\d+", path.name)), rows, {**settings, **OF_TRAINER[trainer]}, about
        )
    return folder


@pytest.mark.parametrize("trainer", OF_TRAINER)
def test_the_row_of_trl_is_for_a_trainer_that_trl_corrects(tmp_path, trainer):
    """TRL corrects nothing in RLOO, and its asynchronous loss clips around the sampler."""
    rows = {it["name"] for it in document(with_ages(make_dump(tmp_path, rows=8), lambda step: 0, trainer))["settings"]}
    assert ("trl" in rows) == (trainer == "grpo")
    assert {"auto", "disabled", "this run"} <= rows


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_healthy_run_with_fresh_weights_is_left_as_it_is(tmp_path, trainer):
    for name in ("trl", "disabled", "auto"):
        folder = make_dump(tmp_path / name, steps=2, spread=0.06, length=10, settings={"rollout_correction": name})
        found = document(with_ages(folder, lambda step: 0, trainer))["recommendation"]
        assert (found["settings"], found["row"]) == ({}, "this run")


def test_the_table_is_markdown_and_has_dashes_for_what_there_is_not(tmp_path):
    first, _ = compare(make_dump(tmp_path, spread=3.0, gaussian=True, logs=False)).split(
        "\nTypical log-ratio (spread s) "
    )
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


@pytest.mark.parametrize("spread", [0.0, 0.003])
def test_a_gap_without_effect_needs_no_other_settings(spread, tmp_path):
    folder = make_dump(tmp_path / "dump", spread=spread)
    text = compare(folder)
    assert "| this run (recommended)" in text
    assert "Recommended: this run. The gap is so small that a correction would change nothing" in text
    assert document(folder)["recommendation"]["settings"] == {}


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
    said = error_of(capsys, tmp_path / "settings")
    assert "the settings in the dump cannot be read, perhaps because another release wrote it" in said
    assert (
        "Compare it with that release; `report` and `diagnose` read the rest of it with this one: `rollout_iss`"
        in said
    )


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
    settings = RolloutCorrectionConfig().settings.fields | {"rollout_loss_type": "reinforce"}
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
    settings = read_dump(tmp_path / "short").fields
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
