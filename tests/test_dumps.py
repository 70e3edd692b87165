"""Sequences on disk: what a run writes to `rollout_dump_dir`, its files, and what is damaged."""

import json
import math
import os
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from datetime import UTC, date, datetime
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import TrainerCallback

from tests.distributed.test_ranks import launch
from tests.dumps import make_dump, read_dump, read_table
from tests.large_dump import make_large_dump
from tests.launching import ROOT, clean_environment
from tests.tiny import PROMPTS, StaleSampler
from tests.training import TRAINERS, BrokenSampler, build, evaluation, losses, saying, watcher
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.diagnosis import command as diagnosing
from trl_rollout_corr.tools.dump import folder as dump
from trl_rollout_corr.tools.dump import reading, writing
from trl_rollout_corr.tools.dump.columns import FORMAT, SCHEMA
from trl_rollout_corr.tools.dump.folder import files_of
from trl_rollout_corr.tools.dump.in_effect import read_settings
from trl_rollout_corr.tools.dump.reading import open_dump
from trl_rollout_corr.tools.dump.rows import Decoder, on_host
from trl_rollout_corr.tools.dump.sequences import Sequences
from trl_rollout_corr.tools.dump.writing import SequenceDump


MODES = {
    "measured": {"rollout_correction": "disabled"},
    "decoupled": {"rollout_correction": "decoupled_seq_is_rs"},
    "decoupled, whole batch": {"rollout_correction": "decoupled_token_is", "rollout_is_batch_normalize": True},
    "bypass, clipped": {"rollout_correction": "bypass_ppo_clip_geo_rs"},
    "bypass, reinforce": {"rollout_correction": "bypass_pg_token_icepop"},
}


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(kind="grpo", sampler=None, **fields):
        trainer_class, config_class = TRAINERS[kind]
        sampler = sampler or StaleSampler(tiny_model_path)
        fields = {"output_dir": tmp_path / "run", **fields}
        return build(trainer_class, config_class, tiny_model_path, fields.pop("output_dir"), sampler=sampler, **fields)

    return make


def observed(trainer) -> list[dict]:
    """Every sequence that was trained on, as it passed through the trainer: `(step, completion, ...)`."""
    sequences = []
    inner = trainer._observer.add_correction

    def corrected(now, seen):
        batch, correction = seen.batch, seen.correction
        for i, mask in enumerate(batch["completion_mask"].bool()):
            sequences.append(
                {
                    "step": trainer.state.global_step + 1,
                    "token_ids": batch["completion_ids"][i][mask].tolist(),
                    "train_logps": seen.train_logps[i][mask].tolist(),
                    "rollout_logps": batch["sampling_per_token_logps"][i][mask].tolist(),
                    "keep": correction.keep[i][mask].tolist(),
                    "coefficients": seen.coefficients[i][mask].tolist(),
                    "advantage": batch["advantages"][i].item(),
                }
            )
        inner(now, seen)

    trainer._observer.add_correction = corrected
    return sequences


def distance(sequence: dict) -> float:
    """Largest absolute log-ratio of a sequence."""
    pairs = zip(sequence["train_logps"], sequence["rollout_logps"], strict=True)
    return max(math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_a_dump_has_the_worst_sequences_and_some_at_random(make, tmp_path, mode):
    dump = tmp_path / "dump"
    trainer = make(rollout_dump_dir=str(dump), rollout_dump_sampled=3, rollout_dump_worst=2, **MODES[mode])
    sequences = observed(trainer)
    losses(trainer)
    rows = read_dump(dump).rows
    assert {row["step"] for row in rows} == {1, 2, 3}
    for step in (1, 2, 3):
        seen = [sequence for sequence in sequences if sequence["step"] == step]
        written = [row for row in rows if row["step"] == step]
        assert len(seen) == 8
        assert sum(row["sampled"] for row in written) == 3
        worst = sorted(distance(row) for row in written if row["worst"])
        assert worst == pytest.approx(sorted(map(distance, seen))[-2:])
        for row in written:
            assert {name: row[name] for name in seen[0]} in seen


def test_rows_hold_text_and_what_happened(make, tmp_path):
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), rollout_correction="decoupled_seq_is_rs", epsilon=0.3)
    losses(trainer)
    dump = read_dump(tmp_path / "dump")
    assert dump.fields["rollout_correction"] == "decoupled_seq_is_rs"
    assert (dump.fields["epsilon"], dump.fields["epsilon_high"], dump.fields["num_iterations"]) == (0.3, None, 1)
    about = open_dump(tmp_path / "dump").about
    assert (about["model"], about["trainer"]) == ("tiny0", "RolloutCorrectedGRPOTrainer")
    assert date.fromisoformat(about["date"]) <= datetime.now(UTC).date()
    assert [entry["step"] for entry in dump.logs if "loss" in entry] == [1, 2, 3]
    tokenizer = trainer.processing_class
    for row in dump.rows:
        assert row["prompt"] in [tokenizer.decode(tokenizer(prompt).input_ids) for prompt in PROMPTS]
        assert row["completion"] == tokenizer.decode(row["token_ids"])
        assert row["tokens"] == [tokenizer.decode([token]) for token in row["token_ids"]]
        assert row["reward"] == len(tokenizer.decode(row["token_ids"], skip_special_tokens=True)) / 4
        assert row["weights"] is not None
        assert row["staleness"] is None  # this sampler does not say which weights it has


@pytest.mark.seam
@pytest.mark.parametrize("mode", ["decoupled", "bypass, reinforce"])
def test_a_correction_can_be_repeated_from_a_dump(make, tmp_path, mode):
    make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_sampled=8, **MODES[mode]).train()
    dump = read_dump(tmp_path / "dump")
    settings = read_settings(dump.fields)
    for row in dump.rows:
        logps = [torch.tensor([row[name]]) for name in ("train_logps", "rollout_logps")]
        correction = compute_rollout_correction(*logps, torch.tensor([row["mask"]]), settings)
        assert correction.coefficients[0].tolist() == pytest.approx(row["coefficients"], rel=1e-5)
        assert correction.keep[0].tolist() == row["keep"]


def test_a_dump_changes_nothing_about_training(make, tmp_path):
    common = {"rollout_correction": "decoupled_token_is", "schedule": "two iterations", "max_steps": 4}
    without = losses(make(**common))
    assert losses(make(**common, rollout_dump_dir=str(tmp_path / "dump"))) == without
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {1, 3}  # revisits are not corrected anew


def test_nothing_is_written_by_default(make, tmp_path):
    make().train()
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_dump_can_be_sparse(make, tmp_path):
    make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_steps=2, max_steps=5).train()
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {2, 4}


def test_a_sparse_dump_takes_the_next_step_that_has_something(make, tmp_path):
    fields = {"rollout_dump_dir": str(tmp_path / "dump"), "rollout_dump_steps": 2, "schedule": "two iterations"}
    make(**fields, max_steps=6).train()  # completions are corrected at steps 1, 3 and 5
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {3, 5}


def test_every_batch_of_a_step_draws_numbers_of_its_own(make, tmp_path):
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_sampled=4, rollout_dump_worst=0)
    dump = watcher(trainer, SequenceDump)
    ones = torch.ones(1, 3)
    columns = dict.fromkeys(("train_logps", "rollout_logps", "weights", "keep", "coefficients"), ones)
    columns |= {"mask": ones.bool(), "reward": ones[0, :1], "advantage": ones[0, :1], "staleness": None}
    chances, chosen = [], dump._chosen

    def remember(distance, chance):
        chances.extend(chance.tolist() if len(chance) == 1 else [])
        return chosen(distance, chance)

    dump._chosen = remember
    for batch in range(64):
        dump.offer(1, {"completion_ids": torch.full((1, 3), batch)}, columns)
    assert len(set(chances)) == 64
    kept = [offered.chance for offered in dump.offered]
    assert sorted(kept) == sorted(chances)[-4:]


def test_a_full_disk_ends_the_dump_and_not_the_run(make, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_rows", full)
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), max_steps=3)
    with pytest.warns(UserWarning, match=r"The dump in .* ends here: .*No space left") as warned:
        assert len(losses(trainer)) == 3
    assert len(warned) == 1


@pytest.mark.parametrize("place", ["write_rows", "on_host", "make_row", "append_log"])
def test_no_error_of_the_dump_ends_the_run(place, make, tmp_path, monkeypatch):
    """Such as one of a tokenizer, or of a log with a number that JSON does not know."""

    def broken(*args, **kwargs):
        raise TypeError("unhashable")

    monkeypatch.setattr(writing, place, broken)
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), max_steps=3)
    with pytest.warns(UserWarning, match=r"The dump in .* ends here: TypeError: unhashable\.") as warned:
        assert len(losses(trainer)) == 3
    assert len(warned) == 1


def test_a_folder_that_cannot_be_used_is_refused_before_the_first_step(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`rollout_dump_dir` is .*, which cannot be used: "):
        make(rollout_dump_dir=str(tmp_path / "file")).train()


def test_what_json_does_not_know_ends_no_run_and_can_be_read_back(make, tmp_path):
    class Odd:
        def __str__(self):
            return "odd"

    kwargs = {
        "dtype": torch.float16,
        "hf_overrides": {"head_dtype": torch.float32, "rope_theta": np.float32(2.0), 3: (1, {Path("a")})},
        "seed": torch.tensor(7),
        "compilation_config": Odd(),
    }
    callback = Logging({"odd": Odd(), "ratio": torch.tensor(0.5)})
    with pytest.warns(UserWarning, match="has no effect: `use_vllm` is False"):
        trainer = make(rollout_dump_dir=tmp_path / "dump", rollout_engine_kwargs=kwargs, max_steps=2)
    trainer.callback_handler.callbacks.insert(0, callback)  # before the dump
    assert len(losses(trainer)) == 2
    written = read_dump(tmp_path / "dump")
    read = read_settings(written.fields).rollout_engine_kwargs
    assert read == {
        "dtype": "float16",
        "hf_overrides": {"head_dtype": "float32", "rope_theta": 2.0, "3": [1, ["a"]]},
        "seed": 7,
        "compilation_config": "odd",
    }
    assert (written.logs[0]["odd"], written.logs[0]["ratio"]) == ("odd", 0.5)
    assert main(["compare", str(tmp_path / "dump")]) == 0


class Logging(TrainerCallback):
    """Adds to what is logged."""

    def __init__(self, more: dict):
        self.more = more

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs.update(self.more)


def test_completions_that_are_masked_as_truncated_are_not_drawn(make, tmp_path, tiny_model_path):
    def truncate(output):
        for ids in output["completion_ids"][::2]:
            ids[-1] = 5  # not the end of a sequence

    sampler = BrokenSampler(tiny_model_path, truncate)
    make(sampler=sampler, rollout_dump_dir=str(tmp_path / "dump"), mask_truncated_completions=True).train()
    rows = read_dump(tmp_path / "dump").rows
    assert len(rows) == 3 * 4
    assert all(any(row["mask"]) and row["tokens"] for row in rows)


def test_a_dump_stays_below_its_size(make, tmp_path):
    dump = tmp_path / "dump"
    make(rollout_dump_dir=str(dump), rollout_dump_max_gb=5e-5, max_steps=8).train()
    rows = read_dump(dump).rows
    assert sum(path.stat().st_size for path in files_of(dump)) <= 5e4
    assert {rows[0]["step"], rows[-1]["step"]} == {1, 8}
    assert len({row["step"] for row in rows}) < 8


def test_evaluation_is_not_dumped(make, tmp_path):
    make(rollout_dump_dir=str(tmp_path / "dump"), **evaluation()).train()
    dump = read_dump(tmp_path / "dump")
    assert sum(row["sampled"] for row in dump.rows) == 3 * 8
    assert any("eval_loss" in entry for entry in dump.logs)


def test_sequences_without_log_probabilities_are_the_worst(make, tmp_path, tiny_model_path):
    def break_one(output):
        output["logprobs"][1][0] = None

    sampler = BrokenSampler(tiny_model_path, break_one)
    make(sampler=sampler, rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_worst=1, max_steps=1).train()
    (worst,) = [row for row in read_dump(tmp_path / "dump").rows if row["worst"]]
    assert worst["rollout_logps"][0] is None
    assert worst["coefficients"][0] == 0.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rollout_dump_steps", 0, "`rollout_dump_steps` must be an integer of 1 or more, got 0"),
        ("rollout_dump_sampled", -1, "`rollout_dump_sampled` must be an integer of 0 or more, got -1"),
        ("rollout_dump_worst", 1.5, "`rollout_dump_worst` must be an integer of 0 or more, got 1.5"),
        ("rollout_dump_max_gb", 0, "`rollout_dump_max_gb` must be a number above 0, got 0"),
        ("rollout_dump_max_gb", "1GB", "`rollout_dump_max_gb` must be a number above 0, got '1GB'"),
    ],
)
def test_options_that_cannot_be_meant(field, value, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(rollout_dump_dir="dump", **{field: value})


def test_a_number_is_no_folder():
    with pytest.raises(ValueError, match="`rollout_dump_dir` must be the path of a folder, or None, got 5"):
        RolloutCorrectionConfig(rollout_dump_dir=5)


def test_options_of_a_dump_that_is_off():
    with pytest.warns(
        UserWarning, match="`rollout_dump_worst` is set to 3 but has no effect: `rollout_dump_dir` is None"
    ):
        RolloutCorrectionConfig(rollout_dump_worst=3)


def test_the_commands_of_the_readme_read_a_run(make, tmp_path, capsys):
    fields = {"rollout_dump_dir": str(tmp_path / "run" / "dump"), "save_strategy": "steps", "save_steps": 2}
    make(**fields, max_steps=4, rollout_correction="decoupled_geo_rs_token_tis").train()
    assert main(["compare", str(tmp_path / "run" / "dump")]) == 0
    assert "this run" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert all(f"<h2>{title}" in page or title in page for title in ("Findings", "What happened", "Who is rejected"))


# Runs that follow one another, and runs at the same time ------------------------------------------------------------------


def steps_of(folder) -> list[int]:
    return sorted({row["step"] for row in read_dump(folder).rows})


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_a_run_that_is_started_again_leaves_the_rows_of_the_first_and_says_where_its_own_are(make, tmp_path, caplog):
    dump, output = tmp_path / "run" / "dump", str(tmp_path / "report.html")
    make(rollout_dump_dir=str(dump)).train()
    before = content(dump)
    for number in (2, 3):
        with saying(
            caplog, rf"The dump of this run goes to '.*dump-{number}': '.*dump' .* contains the dump of the run .*run'"
        ):
            make(rollout_dump_dir=str(dump), max_steps=number).train()
    assert content(dump) == before
    assert [steps_of(folder) for folder in (dump, tmp_path / "run/dump-2", tmp_path / "run/dump-3")] == [
        [1, 2, 3],
        [1, 2],
        [1, 2, 3],
    ]
    assert open_dump(tmp_path / "run").path.name == "dump-3"
    assert main(["report", str(tmp_path / "run"), "-o", output]) == 0
    assert open_dump(dump).damage == [f"{str(tmp_path / 'run/dump-3')!r} contains the dump of a later run"]


def test_a_second_training_of_a_trainer_has_a_folder_of_its_own(make, tmp_path):
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), max_steps=2)
    trainer.train()
    before = content(tmp_path / "dump")
    trainer.train()
    assert content(tmp_path / "dump") == before
    assert steps_of(tmp_path / "dump-2") == [1, 2]


@pytest.mark.parametrize("asked", [".", "sub/..", "link"])
def test_a_second_run_finds_a_folder_next_to_one_without_a_name_of_its_own(make, tmp_path, monkeypatch, asked):
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    (here / "link").symlink_to(here)
    monkeypatch.chdir(here)
    for number in (1, 2, 3):
        make(rollout_dump_dir=asked, max_steps=number, output_dir=str(tmp_path / f"run-{number}")).train()
    assert [steps_of(tmp_path / name) for name in ("here", "here-2", "here-3")] == [[1], [1, 2], [1, 2, 3]]
    assert open_dump(Path(asked)).damage == [f"{str(tmp_path / 'here-3')!r} contains the dump of a later run"]


class Interruption(TrainerCallback):
    """Ends the first training in the middle of its second step."""

    done = False

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_a_training_after_an_interrupted_step_begins_with_nothing(make, tmp_path, monkeypatch):
    """It dumps and counts its own completions only, also if the disk was full before."""

    def full(*args):
        raise OSError(28, "No space left on device")

    fields = {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "rollout_dump_worst": 64}
    extra = {"callbacks": [Interruption()]}
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), rollout_diagnose=True, extra=extra, **fields)
    write = writing.write_rows
    monkeypatch.setattr(writing, "write_rows", full)
    with pytest.warns(UserWarning, match="The dump in .* ends here"), pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.setattr(writing, "write_rows", write)
    found = observed(trainer)
    trainer.train()
    (folder,) = [path for path in tmp_path.glob("dump*") if files_of(path)]
    rows = read_dump(folder).rows
    of_step = [[row["token_ids"] for row in rows if row["step"] == step] for step in (1, 2)]
    assert len(of_step[0]) == len(of_step[1]) == len(found) // 2


@pytest.mark.parametrize("left", ["rows", "a log", "nothing but its claim"])
def test_whatever_another_run_left_is_not_written_over(left, make, tmp_path):
    dump = tmp_path / "dump"
    for name, text in (("dump-list", "[1]"), ("dump-null", "null"), ("dump-cut", "{")):  # of another tool
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    if left == "rows":
        make_dump(dump, steps=1)
    else:
        dump.mkdir()
        (dump / ("logs.jsonl" if left == "a log" else "run.json")).write_text('{"step": 1}\n')
    before = content(dump)
    make(rollout_dump_dir=str(dump), max_steps=1).train()
    assert content(dump) == before
    assert steps_of(tmp_path / "dump-2") == [1]
    assert open_dump(tmp_path).path.name == "dump-2"


def test_a_resumed_run_goes_on_in_its_own_folder(make, tmp_path):
    fields = {"rollout_dump_dir": str(tmp_path / "dump"), **SAVING, "max_steps": 4}
    make(rollout_dump_dir=str(tmp_path / "dump"), output_dir=tmp_path / "other", max_steps=6).train()
    before = content(tmp_path / "dump")
    make(**fields).train()
    whole = read_dump(tmp_path / "dump-2")
    make(**fields).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    resumed = read_dump(tmp_path / "dump-2")
    assert [row["step"] for row in resumed.rows] == [row["step"] for row in whole.rows]
    assert [entry["step"] for entry in resumed.logs if "loss" in entry] == [1, 2, 3, 4]
    assert content(tmp_path / "dump") == before
    assert not (tmp_path / "dump-3").exists()
    make(**{**fields, "max_steps": 5}).train(resume_from_checkpoint=True)
    assert steps_of(tmp_path / "dump-2") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("output_dir", ["branch", "run"])
def test_a_run_that_branches_from_the_checkpoint_of_another_has_a_folder_of_its_own(
    make, tmp_path, caplog, output_dir
):
    """Also where a run with this `output_dir` was there before."""
    fields = {"rollout_dump_dir": str(tmp_path / "dump"), **SAVING, "max_steps": 4}
    make(**fields).train()
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "checkpoint-2")
    before = content(tmp_path / "dump")
    with saying(caplog, r"The dump of this run goes to '.*dump-2'"):
        trainer = make(**fields, output_dir=tmp_path / output_dir)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert content(tmp_path / "dump") == before
    assert steps_of(tmp_path / "dump-2") == [3, 4]


def test_the_folder_of_a_run_leads_to_its_own_dump(make, tmp_path):
    for name, n in (("a", 1), ("b", 2)):
        make(rollout_dump_dir=str(tmp_path / "dump"), output_dir=tmp_path / name, **SAVING, max_steps=n + 1).train()
    assert [open_dump(tmp_path / name).path.name for name in ("a", "b")] == ["dump", "dump-2"]


# Three processes, which fork when everything is imported, take their folder at the same moment
TRAININGS = """
import os, sys, time, traceback
from pathlib import Path
sys.modules["vllm"] = None  # which takes a third of the time to import
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build
from trl_rollout_corr.tools.dump import writing

model, folder = sys.argv[1], Path(sys.argv[2])
claim, classes = writing.claim, TRAINERS["grpo"]

def train(number):
    def at_once(*args, **kwargs):
        (folder / f"ready {number}").touch()
        while len([*folder.glob("ready *")]) < 3:
            time.sleep(0.001)
        return claim(*args, **kwargs)

    writing.claim = at_once
    trainer = build(*classes, model, folder / number, sampler=StaleSampler(model), max_steps=3,
                    rollout_dump_dir=str(folder / "dump"))
    trainer.train()

children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        try:
            train(str(number))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_runs_that_start_at_the_same_moment_do_not_mix(tiny_model_path, tmp_path):
    command = [sys.executable, "-c", TRAININGS, str(tiny_model_path), str(tmp_path)]
    environment = clean_environment(OMP_NUM_THREADS="1")
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    folders = [tmp_path / name for name in ("dump", "dump-2", "dump-3")]
    assert {json.loads((folder / "run.json").read_text())["output_dir"] for folder in folders} == {
        str(tmp_path / str(number)) for number in range(3)
    }
    for folder in folders:
        assert len(files_of(folder)) == 3
        assert [entry["step"] for entry in read_dump(folder).logs if "loss" in entry] == [1, 2, 3]


@pytest.mark.slow
def test_all_ranks_write_to_the_folder_that_the_first_took(tiny_model_path, tmp_path):
    before = content(make_dump(tmp_path / "dump", steps=1))
    case = {"model": str(tiny_model_path), "max_steps": 2, "rollout_dump_dir": str(tmp_path / "dump")}
    process = launch({"run": case}, tmp_path / "work", 2)
    assert process.returncode == 0, process.stderr[-8000:]
    assert content(tmp_path / "dump") == before
    assert {row["rank"] for row in read_dump(tmp_path / "dump-2").rows} == {0, 1}
    assert process.stderr.count("The dump of this run goes to") == 1
    assert [*tmp_path.glob("dump-*")] == [tmp_path / "dump-2"]


# The files ---------------------------------------------------------------------------------------------------------------


def copy_of_a_row(folder, step: int) -> dict:
    return {**read_dump(folder).rows[0], "step": step}


def test_what_is_written_is_read(tmp_path):
    row = dict.fromkeys(SCHEMA.names)
    row |= {
        "step": 3,
        "rank": 1,
        "sampled": True,
        "worst": False,
        "prompt": "2 + 2 =",
        "completion": " 4",
        "reward": 1.0,
    }
    row |= {"tokens": [" ", "4"], "token_ids": [5, 9], "mask": [True, False], "train_logps": [-0.5, -1.5]}
    row |= {"rollout_logps": [math.inf, -0.25], "keep": [False, False], "coefficients": [0.0, 2.0], "advantage": -0.5}
    path = dump.write_rows(tmp_path / "new" / "dump", 3, 1, [row], {"rollout_is_threshold": [0.5, math.inf]})
    read = read_dump(path.parent)
    assert read.rows == [row]
    assert read.fields == {"rollout_is_threshold": [0.5, math.inf]}
    assert read.logs == []
    assert read_dump(path).rows == [row]  # one file alone
    assert pq.read_schema(path).metadata[b"trl_rollout_corr.dump"] == b"9"


def test_rows_are_in_order_of_steps_and_settings_are_the_last(tmp_path):
    make_dump(tmp_path, steps=12, ranks=2, rows=8, length=6)
    row = copy_of_a_row(tmp_path, 13)
    dump.write_rows(tmp_path, 13, 0, [row], {"rollout_is": None})
    read = read_dump(tmp_path)
    assert [row["step"] for row in read.rows] == sorted(row["step"] for row in read.rows)
    assert steps_of(tmp_path) == list(range(1, 14))
    assert read.fields == {"rollout_is": None}
    assert len(read.logs) == 12
    assert set(read.logs[0]) >= {"step", "reward", "rollout_corr/kl"}


def test_a_folder_that_looks_like_a_partition_is_a_folder(tmp_path):
    folder = make_dump(tmp_path / "step=7" / "lr=1e-6")
    assert steps_of(folder) == [1, 2, 3]


@pytest.mark.parametrize("moment", ["while it is written", "before it is renamed"])
def test_a_crash_loses_the_file_that_is_being_written(moment, tmp_path, monkeypatch):
    make_dump(tmp_path, steps=2)
    before = read_dump(tmp_path).rows

    def half(table, path, **options):
        path.write(b"PAR1 and then the power went")
        raise KeyboardInterrupt

    def never(source, target):
        raise KeyboardInterrupt

    row = copy_of_a_row(tmp_path, 3)
    with monkeypatch.context() as patch:
        if moment == "while it is written":
            patch.setattr(dump.pq, "write_table", half)
        else:
            patch.setattr(os, "replace", never)
        with pytest.raises(KeyboardInterrupt):
            dump.write_rows(tmp_path, 3, 0, [row], {})
    assert read_dump(tmp_path).rows == before
    dump.write_rows(tmp_path, 3, 0, [row], {})
    assert steps_of(tmp_path) == [1, 2, 3]
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet", ".jsonl"}


def test_a_log_entry_that_a_crash_cut_short_is_left_out(tmp_path):
    make_dump(tmp_path, steps=2)
    with (tmp_path / "logs.jsonl").open("a") as file:
        file.write('{"loss": 0.1, "rollout_co\n')
    dump.append_log(tmp_path, {"step": 4})
    assert [entry["step"] for entry in read_dump(tmp_path).logs] == [1, 2, 4]


def test_the_first_and_the_latest_step_are_never_removed(tmp_path):
    make_dump(tmp_path, steps=6, ranks=2)
    size = sum(path.stat().st_size for path in dump.files_of(tmp_path))
    dump.remove_oldest(tmp_path, size)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    dump.remove_oldest(tmp_path, 0.75 * size)
    assert steps_of(tmp_path) == [1, 4, 5, 6]
    dump.remove_oldest(tmp_path, 0)
    assert steps_of(tmp_path) == [1, 6]
    assert len(dump.files_of(tmp_path)) == 4


def test_a_run_that_resumes_forgets_what_came_after_its_checkpoint(tmp_path):
    make_dump(tmp_path, steps=4)
    dump.rewind(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]
    assert [entry["step"] for entry in read_dump(tmp_path).logs] == [1, 2]


def in_version(path, version, *lacking, **settings):
    """Make a file of a dump one of another version, without some columns and with further settings."""
    table = pq.read_table(path).drop_columns(list(lacking))
    metadata = dict(table.schema.metadata)
    written = {**json.loads(metadata[b"settings"]), **settings}
    metadata |= {FORMAT.encode(): str(version).encode(), b"settings": json.dumps(written).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)


_OF_8 = ["lag"]  # and `fresh`, which 9 removed
_OF_7 = ["advantages", *_OF_8]
LATER = {
    8: _OF_8,
    7: _OF_8,
    6: _OF_7,
    5: _OF_7,
    4: _OF_7,
    3: _OF_7,
    2: [*_OF_7, "turn_ids"],
    1: [*_OF_7, "turn_ids", "prompt_ids", "padding", "again_logps"],
}


def make_two_steps(folder) -> Path:
    return make_dump(folder, steps=2, settings={"rollout_correction": "decoupled_token_is"})


@pytest.fixture(scope="module")
def todays_answers(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command on a dump of today."""
    folder, found = tmp_path_factory.mktemp("today"), {}
    make_two_steps(folder / "dump")
    for command in ("diagnose", "compare", "report"):
        with chdir(folder), redirect_stdout(StringIO()) as output:
            found[command] = main([command, str(folder / "dump")]), output.getvalue()
    return found


@pytest.mark.parametrize("version", LATER)
@pytest.mark.parametrize("command", ["diagnose", "compare", "report"])
def test_dumps_of_earlier_versions_are_read(command, version, todays_answers, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in dump.files_of(make_two_steps(tmp_path / "dump")):
        in_version(path, version, *LATER[version], rollout_no_more=3)
    code = main([command, str(tmp_path / "dump")])
    output = capsys.readouterr()
    assert code != 2, output.err
    if version > 2:  # nothing is missing that the diagnosis reads
        assert (code, output.out) == todays_answers[command]


def test_a_dump_of_an_earlier_release_beside_one_of_today_is_one_dump(tmp_path):
    first, _ = dump.files_of(make_dump(tmp_path, steps=2))
    in_version(first, 1, *LATER[1])
    sequences = open_dump(tmp_path).sequences
    assert {*sequences.step} == {1, 2}
    assert np.isnan(sequences.again_logps[sequences.step[sequences.row] == 1]).all()


def test_completions_that_version_8_calls_fresh_have_no_lag(tmp_path):
    """Their age counts the updates on a generation. Where version 8 did not know, the age is all that is known."""
    (path,) = dump.files_of(make_dump(tmp_path, steps=1, age=3))
    in_version(path, 8, "lag")
    table = pq.read_table(path)
    fresh = [None, *([True, False] * len(table))][: len(table)]
    pq.write_table(table.append_column("fresh", pa.array(fresh, pa.bool_())), path)
    assert open_dump(tmp_path).sequences.age.tolist() == [0 if told else 3 for told in fresh]


@pytest.mark.parametrize("version", ["10", "0", "x"])
def test_versions_of_later_releases_are_refused_with_a_remedy(tmp_path, version):
    (path,) = dump.files_of(make_dump(tmp_path, steps=1))
    in_version(path, version)
    with pytest.raises(
        ValueError, match=rf"is in version {version} of .* reads versions 1 to 9. Read it with the release"
    ):
        read_dump(tmp_path)
    in_version(path, 4, "reward")
    with pytest.raises(ValueError, match="lacks the column `reward`, which every dump contains"):
        read_dump(tmp_path)


def test_turns_of_a_rollout_function_take_the_place_of_runs(tmp_path):
    rows = read_dump(make_dump(tmp_path / "runs", rows=4)).rows
    mask = [row["mask"] for row in rows]
    of_runs = open_dump(tmp_path / "runs").sequences.turn
    for i, row in enumerate(rows):
        row["turn_ids"] = [0] * len(mask[i]) if i else [*range(len(mask[i]))]
    dump.write_rows(tmp_path / "turns", 1, 0, rows, {}, {})
    of_ids = open_dump(tmp_path / "turns").sequences.turn
    first = len(mask[0])
    assert len(set(of_ids[:first])) == first > len(set(of_runs[:first]))
    assert len(set(of_ids[first:])) == len(rows) - 1


# What is damaged --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "compare", "diagnose"])
def test_commands_say_in_one_line_what_is_wrong(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of another tool")
    (path,) = dump.files_of(make_dump(tmp_path / "cut", steps=1))
    path.write_bytes(path.read_bytes()[:-100])
    for path in ("missing", "other.parquet", "cut", "."):
        assert main([command, path]) == 2
        out, message = capsys.readouterr()
        assert (out, message.count("\n")) == ("", 1)
        assert message.startswith(f"{path}: ")
        assert "unexpected" not in message


def test_a_command_that_fails_says_what_it_warned_of(tmp_path, capsys, monkeypatch):
    """A damaged file is left out with a warning, which may be why the rest is not enough."""
    folder = make_dump(tmp_path / "dump", steps=2)
    first, second = dump.files_of(folder)
    first.write_bytes(first.read_bytes()[:-100])
    with monkeypatch.context() as patch:
        patch.setattr(diagnosing, "write_text", lambda *args: [][0])
        assert main(["diagnose", str(folder)]) == 2
    out, message = capsys.readouterr()
    warned, refused = message.splitlines()
    assert out == ""
    assert f"{first.name} is damaged" in warned
    assert refused.startswith("diagnose: unexpected IndexError")
    pq.write_table(pq.read_table(second).slice(0, 0), second)
    assert main(["diagnose", str(folder)]) == 2
    assert f"the dump holds no sequences. {first.name} is damaged" in capsys.readouterr().err


def test_text_of_another_encoding_is_damage(tmp_path, capsys):
    (path,) = dump.files_of(make_dump(tmp_path / "dump", steps=1))
    table = pq.read_table(path)
    latin = pa.array([b"\xe9" * 999] * len(table)).view(pa.string())
    pq.write_table(table.set_column(table.column_names.index("prompt"), "prompt", latin), path)
    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: {path.name} is damaged: ")


def test_an_error_that_nobody_thought_of_is_one_line_too(tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise KeyError("no\nsuch")

    monkeypatch.setattr(diagnosing, "diagnose", fail)
    assert main(["diagnose", str(make_dump(tmp_path / "dump"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(r"diagnose: unexpected KeyError('no\nsuch') in test_dumps.py:")


def metadata(key: str, text: str):
    """A change of a dump: other metadata of its last file."""

    def change(folder):
        path = files_of(folder)[-1]
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, key.encode(): text.encode()}), path)

    return change


def column(name: str, change_row):
    """A change of a dump: other rows of a column of its last file, or none."""

    def change(folder):
        path = files_of(folder)[-1]
        table = pq.read_table(path)
        place, about = table.column_names.index(name), table.schema.metadata
        field = table.field(place)
        if change_row is None:
            table = table.drop_columns([name])
        else:
            values = [change_row(value) for value in table[name].to_pylist()]
            table = table.set_column(place, field, pa.array(values, field.type))
        pq.write_table(table.replace_schema_metadata(about), path)

    return change


def line(text: str):
    """A change of a dump: another line in its log."""

    def change(folder):
        dump.append_log(folder, {"step": 3})
        (folder / "logs.jsonl").write_text((folder / "logs.jsonl").read_text() + f"{text}\n")

    return change


NOTHING_IS_WRONG = ""
DAMAGE = {
    "metadata that is no object": (metadata("settings", "[1]"), "`settings` is not a JSON object"),
    "metadata that is no JSON": (metadata("about", "["), "`about` is not JSON"),
    "metadata of another kind": (metadata("about", '{"model": {"a": 1}, "kv_cache_dtype": [1]}'), NOTHING_IS_WRONG),
    "no mask": (column("mask", None), "lacks the column `mask`"),
    "too few texts": (column("tokens", lambda tokens: tokens[:-1]), "lists of different lengths, `mask` and `tokens`"),
    "no step": (column("step", lambda step: None), "a row lacks `step`"),
    "an infinite step": (line('{"step": 1e400, "rollout_corr/k3_kl": 1}'), NOTHING_IS_WRONG),
    "a step that is not a number": (line('{"step": NaN, "rollout_corr/k3_kl": 1}'), NOTHING_IS_WRONG),
    "metrics of other types": (line('{"step": 4, "rollout_corr/k3_kl": [1], "reward": {}}'), NOTHING_IS_WRONG),
    "a line that was cut short": (line('{"step": 4, "rollout_corr/k3'), NOTHING_IS_WRONG),
    "a claim of another tool": (lambda folder: (folder / "run.json").write_text("[1]"), NOTHING_IS_WRONG),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_one_line(change, message, tmp_path, capsys):
    folder = make_dump(tmp_path / "dump", steps=2, rows=16, length=20)
    change(folder)
    for command in (["diagnose"], ["compare"], ["report", "-o", str(tmp_path / "report.html")]):
        code = main([*command, str(folder)])
        said = capsys.readouterr().err
        if message.startswith("lists of") and command == ["compare"]:
            continue  # it does not read the text
        assert (code in (0, 1), said.count("\n")) == (True, bool(message)), said
        assert message in said
        assert "unexpected" not in said


@pytest.mark.parametrize("history", ['[{"step": 1e400, "rollout_corr/k3_kl": 1}]', "null", "[[1]]"])
def test_a_strange_state_of_a_trainer_is_one_line(history, tmp_path, capsys):
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": {history}}}')
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}: trainer_state.json")
    assert (said.count("\n"), "unexpected" in said) == (1, False)


def test_rows_cost_one_copy_of_a_batch_and_one_text_of_a_token(monkeypatch):
    batch = {
        "mask": torch.tensor([[True, True], [True, False], [False, True]]),
        "token_ids": torch.arange(6).view(3, 2),
        "train_logps": -torch.rand(3, 2),
        "half": torch.rand(3, 2).bfloat16()[:, :1],
        "double": torch.rand(3, dtype=torch.float64),
        "missing": None,
    }
    copies, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x) or cpu(x))
    for chosen in (None, torch.tensor([2, 0])):
        rows = [*on_host(batch, chosen)]
        assert len(rows) == (3 if chosen is None else 2)
        for place, row in zip(range(3) if chosen is None else chosen, rows, strict=True):
            assert row.keys() == batch.keys()
            assert all(x is None if batch[name] is None else x.equal(batch[name][place]) for name, x in row.items())
    assert len(copies) == 2
    decoded = []
    decoder = Decoder(lambda ids: decoded.append(ids) or str(ids))
    assert [*decoder.decode_each([3, 1, 3]), *decoder.decode_each([1])] == ["[3]", "[1]", "[3]", "[1]"]
    assert len(decoded) == 2


# Large dumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[math.nan, -math.inf])
def large(request, tmp_path, monkeypatch):
    """A dump of which a tenth fits, with one broken completion in its middle, and without its log, which has the metrics."""
    monkeypatch.setattr(reading, "MOST_TOKENS", 12_000)
    folder = make_dump(tmp_path / "dump", steps=60, rows=32, length=50, sampled=16, logs=False, tools=False)
    path = files_of(folder)[30]
    table, settings, about, _ = read_table(path)
    rows = table.to_pylist()
    broken = next(row for row in rows if row["sampled"])
    broken["rollout_logps"][3] = request.param
    dump.write_rows(folder, 31, 0, rows, settings, about)
    return folder


def test_of_a_large_dump_the_commands_read_a_sample_and_say_so(large, tmp_path, capsys):
    page = tmp_path / "report.html"
    said = []
    for command in (["diagnose"], ["diagnose", "--json"], ["compare"], ["report", "-o", str(page)]):
        assert main([*command, str(large)]) in (0, 1)
        said.append(page.read_text() if "report" in command else capsys.readouterr().out)
    for text in said:
        assert "A sample of the dump was read" in text
        assert "all with a log-probability that is not finite" in text
        assert "To read a step as a whole, name its file" in text
    assert "1 tokens in 1 completions, a share of " in said[0]
    assert ", lack a finite log-probability from the sampler" in said[0]
    main(["diagnose", str(files_of(large)[2])])
    assert "A sample" not in capsys.readouterr().out


def test_a_sample_is_even_and_keeps_the_ends_and_what_is_bad(large):
    table, *_ = read_table(large)
    whole = Sequences(table)
    sample = open_dump(large).sequences
    assert int(sample.lengths.sum()) <= 12_000
    rows_of = {step: int((sample.step == step).sum()) for step in range(1, 61)}
    assert min(rows_of.values()) >= 2
    drawn = {step: int((whole.sampled & (whole.step == step)).sum()) for step in (1, 60)}
    assert all(rows_of[step] >= drawn[step] for step in drawn)
    assert max(rows_of[step] for step in range(3, 59)) <= 8
    assert sample.broken.sum() == 1
    assert sample.log_ratio[sample.valid].max() == whole.log_ratio[whole.valid].max()
    # the worst are read, but do not represent the batch: the gap of the sample is that of the dump
    assert (~sample.sampled).any()
    gaps = [float(np.square(x.log_ratio[x.counted]).mean()) for x in (whole, sample)]
    assert gaps[1] == pytest.approx(gaps[0], rel=0.15)


def test_a_sample_keeps_the_tail_of_what_represents_the_batch(tmp_path, monkeypatch, capsys):
    """A few completions are far off, so that they are drawn at random and among the worst: `report` and `diagnose` agree."""
    monkeypatch.setattr(reading, "MOST_TOKENS", 24_000)
    shape = {"steps": 40, "rows": 32, "length": 50, "sampled": 24, "worst": 8, "spread": 0.02}
    folder = make_dump(tmp_path / "dump", logs=False, tools=False, vary=False, **shape)
    dice = np.random.default_rng(0)
    for path in files_of(folder):
        table, settings, about, _ = read_table(path)
        rows = table.to_pylist()
        for row in rows:
            row["sampled"] = True
            if dice.random() < 0.04:
                row["train_logps"] = [x - abs(dice.normal()) for x in row["rollout_logps"]]
        dump.write_rows(folder, rows[0]["step"], 0, rows, settings, about)

    def read(*, worst: bool):
        return open_dump(folder, worst=worst).sequences

    whole = Sequences(read_table(folder)[0])
    gaps = [float(np.square(x.log_ratio[x.counted]).mean()) for x in (whole, read(worst=False), read(worst=True))]
    assert gaps[1:] == pytest.approx([gaps[0]] * 2, rel=0.25)
    assert int(read(worst=True).lengths.sum()) <= 24_000
    assert main(["diagnose", str(folder), "--json"]) == 1
    causes = [cause["title"] for cause in json.loads(capsys.readouterr().out)["causes"]]
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    assert causes[0] in (tmp_path / "r.html").read_text().split('<section id="overview">')[0].replace("\n", " ")


def test_rows_are_written_in_groups_that_can_be_skipped(tmp_path):
    folder = make_dump(tmp_path / "dump", steps=1, rows=200, length=6)
    (path,) = files_of(folder)
    assert pq.read_metadata(path).num_row_groups == 4
    assert len(open_dump(path).sequences) == pq.read_metadata(path).num_rows


@pytest.mark.parametrize("command", ["diagnose", "compare", "report"])
@pytest.mark.slow
def test_a_dump_of_a_gigabyte_needs_two_gibibytes(command, tmp_path):
    folder = make_large_dump(tmp_path / "dump", gigabytes=1.0)
    output = ["-o", str(tmp_path / "report.html")] if command == "report" else []
    script = "import resource, sys; from trl_rollout_corr.__main__ import main; main(sys.argv[1:]); "
    script += "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_maxrss, used.ru_utime + used.ru_stime)"
    run = [sys.executable, "-c", script, command, str(folder), *output]
    out = subprocess.run(run, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True).stdout
    kibibytes, seconds = map(float, out.splitlines()[-1].split())
    assert kibibytes < 2 * 2**20
    assert seconds < 120  # one minute on two cores


@pytest.mark.parametrize("value", ["1e400", "-1e400", "1e300", "NaN"])
def test_a_metric_beyond_all_numbers_is_drawn(tmp_path, value):
    entries = [f'{{"step": {step}, "rollout_corr/k3_kl": {value if step == 3 else 0.01}}}' for step in (1, 2, 3)]
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{", ".join(entries)}]}}')
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0


def test_a_dump_that_gets_no_sequence_is_named(make, tmp_path):
    with pytest.warns(UserWarning, match="`rollout_dump_steps` is set to 50 but has no effect: the run ends at step"):
        make(rollout_dump_dir=str(tmp_path / "rare"), rollout_dump_steps=50).train()
    with pytest.warns(UserWarning, match="`rollout_dump_worst` are 0, so the folder gets the log and no sequence"):
        make(rollout_dump_dir=str(tmp_path / "none"), rollout_dump_sampled=0, rollout_dump_worst=0)


# Batches of verl ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shifted(tmp_path):
    def shift(row):
        row["rollout_logps"] = [*row["rollout_logps"][:1], *row["rollout_logps"][:-1]]
        return row

    folder = make_dump(tmp_path / "ours", steps=2, tools=False, sampled=32, worst=0, logs=False)
    return [shift(row) for row in read_dump(folder).rows]


@pytest.mark.parametrize("of_tokens", [True, False])
def test_the_script_makes_a_dump_of_batches_of_verl(shifted, tmp_path, monkeypatch, capsys, of_tokens):
    rows, width = shifted, 4
    length = max(len(row["token_ids"]) for row in rows)
    (tmp_path / "verl_batches").mkdir()
    for step in (1, 2):
        mine = [row for row in rows if row["step"] == step]
        batch = {name: torch.zeros(len(mine), length) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
        batch |= {
            "prompts": torch.zeros(len(mine), width, dtype=torch.long),
            "token_level_scores": torch.zeros(len(mine), length),
        }
        batch |= {name: torch.zeros(len(mine), length, dtype=torch.long) for name in ("responses", "response_mask")}
        batch["attention_mask"] = torch.zeros(len(mine), width + length, dtype=torch.long)
        for i, row in enumerate(mine):
            n, p = len(row["token_ids"]), len(row["prompt_ids"])
            batch["prompts"][i, width - p :] = torch.tensor(row["prompt_ids"])
            batch["attention_mask"][i, width - p : width + n] = 1
            batch["responses"][i, :n] = torch.tensor(row["token_ids"])
            batch["response_mask"][i, :n] = 1
            batch["old_log_probs"][i, :n] = torch.tensor(row["train_logps"])
            batch["rollout_log_probs"][i, :n] = torch.tensor(row["rollout_logps"])
            batch["advantages"][i, :n] = row["advantage"]  # verl leaves 0 in the padding
            batch["advantages"][i, 0] += of_tokens  # of this token alone
            batch["token_level_scores"][i, n - 1] = row["reward"]
        torch.save(batch, tmp_path / "verl_batches" / f"{step}.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["import_verl", "verl_batches", "dump"])
    runpy.run_module("trl_rollout_corr.tools.dump.import_verl", run_name="__main__")
    made = read_dump(tmp_path / "dump").rows
    names = ("step", "prompt_ids", "token_ids", "mask", "reward")
    assert [{name: row[name] for name in names} for row in made] == [
        {name: row[name] for name in names} for row in rows
    ]
    for ours, theirs in zip(made, rows, strict=True):
        assert (ours["padding"], ours["staleness"]) == (width - len(theirs["prompt_ids"]), None)
        assert ours["train_logps"] == pytest.approx(theirs["train_logps"])
        n = len(theirs["token_ids"])
        assert ours["advantage"] == pytest.approx(theirs["advantage"] + of_tokens / n, abs=1e-6)
        own = [theirs["advantage"] + (t == 0) for t in range(n)]
        assert ours["advantages"] == (pytest.approx(own, abs=1e-6) if of_tokens else None)
    assert main(["diagnose", str(tmp_path / "dump")]) == 1
    assert "log-probabilities that are one token off" in capsys.readouterr().out.lower()
