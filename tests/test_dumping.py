"""Files that a run writes to `rollout_dump_dir`."""

import math
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.dumps import make_dump, read_dump
from tests.tiny import PROMPTS, StaleSampler, length_reward
from tests.training import TRAINERS, BrokenSampler, build, config_fields, evaluation, losses
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.dumps.files import files_of
from trl_rollout_corr.dumps.reading import open_dump
from trl_rollout_corr.settings.fields import FIELDS
from trl_rollout_corr.trainers import dumping


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
    inner = trainer._observer.corrected

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

    trainer._observer.corrected = corrected
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
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), rollout_correction="decoupled_seq_is_rs")
    losses(trainer)
    dump = read_dump(tmp_path / "dump")
    assert dump.settings["rollout_correction"] == "decoupled_seq_is_rs"
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


@pytest.mark.parametrize("mode", ["decoupled", "bypass, reinforce"])
def test_a_correction_can_be_repeated_from_a_dump(make, tmp_path, mode):
    make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_sampled=8, **MODES[mode]).train()
    dump = read_dump(tmp_path / "dump")
    config = RolloutCorrectionConfig(rollout_correction=dump.settings["rollout_correction"])
    for row in dump.rows:
        logps = [torch.tensor([row[name]]) for name in ("train_logps", "rollout_logps")]
        correction = compute_rollout_correction(*logps, torch.tensor([row["mask"]]), config)
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
    dump = make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_sampled=4, rollout_dump_worst=0)._observer.dump
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

    monkeypatch.setattr(dumping, "write_rows", full)
    trainer = make(rollout_dump_dir=str(tmp_path / "dump"), max_steps=3)
    with pytest.warns(UserWarning, match=r"The dump in .* ends here: .*No space left") as warned:
        assert len(losses(trainer)) == 3
    assert len(warned) == 1


def test_a_folder_that_cannot_be_used_is_refused_before_the_first_step(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"`rollout_dump_dir` is .*, which cannot be used: "):
        make(rollout_dump_dir=str(tmp_path / "file")).train()


def test_a_folder_may_be_a_path(make, tmp_path):
    make(rollout_dump_dir=tmp_path / "dump", max_steps=1).train()
    assert read_dump(tmp_path / "dump").settings["rollout_dump_dir"] == str(tmp_path / "dump")


def test_what_json_does_not_know_ends_no_run_and_can_be_read_back(make, tmp_path):
    class Odd:
        def __str__(self):
            return "odd"

    endless: dict = {}
    endless["itself"] = endless
    kwargs = {
        "dtype": torch.float16,
        "hf_overrides": {"head_dtype": torch.float32, "rope_theta": np.float32(2.0), 3: (1, {Path("a")})},
        "seed": torch.tensor(7),
        "compilation_config": Odd(),
        "additional_config": endless,
    }
    callback = Logging({"odd": Odd(), "endless": endless, "ratio": torch.tensor(0.5)})
    with pytest.warns(UserWarning, match="has no effect: `use_vllm` is False"):
        trainer = make(rollout_dump_dir=tmp_path / "dump", rollout_engine_kwargs=kwargs, max_steps=2)
    trainer.callback_handler.callbacks.insert(0, callback)  # before the dump
    assert len(losses(trainer)) == 2
    written = read_dump(tmp_path / "dump")
    read = RolloutCorrectionConfig(**{k: v for k, v in written.settings.items() if k in FIELDS}).rollout_engine_kwargs
    assert read.pop("additional_config")["itself"]["itself"]
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
    assert math.isnan(worst["rollout_logps"][0])
    assert worst["coefficients"][0] == 0.0


# Runs that follow one another -----------------------------------------------------------------------------------------


def test_another_run_does_not_mix_with_a_dump(make, tmp_path):
    make(rollout_dump_dir=str(tmp_path / "dump")).train()
    before = read_dump(tmp_path / "dump")
    with pytest.raises(
        ValueError, match=r"`rollout_dump_dir`.*holds the dump of another run, and `output_dir` has no"
    ):
        make(rollout_dump_dir=str(tmp_path / "dump"))
    assert str(read_dump(tmp_path / "dump")) == str(before)


@pytest.mark.parametrize("left", ["rows", "a log"])
def test_a_dump_of_another_run_is_refused_before_the_model_is_loaded(left, tmp_path):
    dump = tmp_path / "dump"
    if left == "rows":
        make_dump(dump, steps=1)
    else:
        dump.mkdir()
        (dump / "logs.jsonl").write_text('{"step": 1}\n')
    for trainer_class, config_class in TRAINERS.values():
        args = config_class(**config_fields(tmp_path / "run", rollout_dump_dir=str(dump)))
        with pytest.raises(
            ValueError, match=r"another run, and `output_dir` has no checkpoint .* Name another folder"
        ):
            trainer_class("a model that does not exist", reward_funcs=length_reward, args=args)


def test_with_a_checkpoint_only_training_knows_whether_a_run_resumes(make, tmp_path):
    fields = {"rollout_dump_dir": str(tmp_path / "dump"), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make(**fields).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    with pytest.warns(UserWarning, match="If this run does not resume .* `train\\(\\)` will refuse the folder"):
        trainer = make(**fields)
    with pytest.raises(ValueError, match=r"holds the dump of another run. Name another folder"):
        trainer.train()
    make(**fields, resume_from_checkpoint=checkpoint)  # of the configuration: nothing to say
    other = {**fields, "output_dir": str(tmp_path / "elsewhere"), "max_steps": 3}
    with pytest.raises(ValueError, match="also set `resume_from_checkpoint` in the configuration"):
        make(**other)
    make(**other, resume_from_checkpoint=checkpoint).train(resume_from_checkpoint=checkpoint)
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {1, 2, 3}


def test_a_run_that_left_only_a_log_is_another_run_too(make, tmp_path):
    make(rollout_dump_dir=str(tmp_path / "dump"), rollout_dump_steps=100).train()
    assert not files_of(tmp_path / "dump")
    with pytest.raises(ValueError, match=r"`rollout_dump_dir`.*holds the dump of another run"):
        make(rollout_dump_dir=str(tmp_path / "dump"))


def test_a_second_training_does_not_write_into_the_dump_of_the_first(make, tmp_path):
    trainer = make(rollout_dump_dir=str(tmp_path / "first"), max_steps=2)
    trainer.train()
    rows = read_dump(tmp_path / "first").rows
    with pytest.raises(
        ValueError, match=r"holds the dump of another run\. Name another folder when the trainer is built"
    ):
        trainer.train()
    assert read_dump(tmp_path / "first").rows == rows


def test_a_resumed_run_goes_on_with_its_dump(make, tmp_path):
    fields = {
        "rollout_dump_dir": str(tmp_path / "dump"),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    make(**fields).train()
    whole = read_dump(tmp_path / "dump")
    with pytest.warns(UserWarning, match="With `train\\(resume_from_checkpoint=...\\)` the dump goes on"):
        trainer = make(**fields)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    resumed = read_dump(tmp_path / "dump")
    assert [row["step"] for row in resumed.rows] == [row["step"] for row in whole.rows]
    assert [entry["step"] for entry in resumed.logs if "loss" in entry] == [1, 2, 3, 4]


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


@pytest.mark.parametrize("command", ["report", "compare"])
def test_commands_say_in_one_line_what_is_wrong(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of another tool")
    for path in ("missing", "other.parquet", "."):
        assert main([command, path]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"{path}: ")
        assert message.count("\n") == 1
