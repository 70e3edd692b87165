"""Sequences on disk."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.dumps import make_dump, read_dump
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.dumps import files as dump
from trl_rollout_corr.dumps.reading import open_dump, read_table
from trl_rollout_corr.dumps.schema import FORMAT, SCHEMA


def steps_of(folder) -> list[int]:
    return sorted({row["step"] for row in read_dump(folder).rows})


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
    assert read.settings == {"rollout_is_threshold": [0.5, math.inf]}
    assert read.logs == []
    assert read_dump(path).rows == [row]  # one file alone
    assert (
        pq.read_schema(path).metadata[b"trl_rollout_corr.dump"] == b"3"
    )  # the mark that dumps of older releases have


def test_rows_are_in_order_of_steps_and_settings_are_the_last(tmp_path):
    make_dump(tmp_path, steps=12, ranks=2, rows=8, length=6)
    row = copy_of_a_row(tmp_path, 13)
    dump.write_rows(tmp_path, 13, 0, [row], {"rollout_is": None})
    read = read_dump(tmp_path)
    assert [row["step"] for row in read.rows] == sorted(row["step"] for row in read.rows)
    assert steps_of(tmp_path) == list(range(1, 14))
    assert read.settings == {"rollout_is": None}
    assert len(read.logs) == 12
    assert set(read.logs[0]) >= {"step", "reward", "rollout_corr/kl"}


def test_a_table_has_the_columns_that_are_asked_for(tmp_path):
    make_dump(tmp_path)
    table, settings, _, _ = read_table(tmp_path, ["step", "keep"])
    assert table.column_names == ["step", "keep"]
    assert table["keep"].to_pylist() == [row["keep"] for row in read_dump(tmp_path).rows]
    assert RolloutCorrectionConfig(**settings) == RolloutCorrectionConfig(rollout_correction="decoupled_token_is")


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
            patch.setattr(dump.os, "replace", never)
        with pytest.raises(KeyboardInterrupt):
            dump.write_rows(tmp_path, 3, 0, [row], {})
    assert read_dump(tmp_path).rows == before
    dump.write_rows(tmp_path, 3, 0, [row], {})
    assert steps_of(tmp_path) == [1, 2, 3]
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet", ".jsonl"}


def test_a_killed_process_leaves_nothing_in_a_run_that_is_resumed(tmp_path):
    make_dump(tmp_path, steps=2)
    left = tmp_path / ".step-00000003-rank-00000.parquet.0123456789abcdef.partial"
    left.write_bytes(b"PAR1 and then the power went")
    assert steps_of(tmp_path) == [1, 2]
    dump.rewind(tmp_path, 2)
    assert not left.exists()


@pytest.mark.parametrize(
    "link", ["step-00000003-rank-00000.partial", "step-00000003-rank-00000.parquet", "logs.partial"]
)
def test_a_dump_writes_through_no_link(tmp_path, link):
    folder, notes = make_dump(tmp_path / "dump", steps=2), tmp_path / "notes"
    notes.write_text("mine")
    (folder / link).symlink_to(notes)
    dump.write_rows(folder, 3, 0, [copy_of_a_row(folder, 3)], {}) if link.startswith("step") else dump.rewind(
        folder, 1
    )
    assert notes.read_text() == "mine"
    assert steps_of(folder) == ([1, 2, 3] if link.startswith("step") else [1])


def test_a_log_that_is_a_link_is_an_error_of_the_disk(tmp_path):
    """Which ends the dump, and not the run."""
    folder, notes = make_dump(tmp_path / "dump", steps=2), tmp_path / "notes"
    notes.write_text("mine")
    (folder / "logs.jsonl").unlink()
    (folder / "logs.jsonl").symlink_to(notes)
    with pytest.raises(OSError, match="symbolic links"):
        dump.append_log(folder, {"step": 4})
    assert notes.read_text() == "mine"


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


def test_other_versions_are_refused(tmp_path):
    path = dump.files_of(make_dump(tmp_path))[0]
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, FORMAT.encode(): b"4"}), path)
    with pytest.raises(
        ValueError, match=r"step-00000001-rank-00000.parquet has version 4 .* this release reads version 3$"
    ):
        read_dump(tmp_path)
    pq.write_table(table.drop_columns(["keep"]), path)
    with pytest.raises(ValueError, match=r"does not have the columns of a dump of version 3$"):
        read_dump(tmp_path)


def test_every_list_is_as_long_as_the_completion(tmp_path):
    may_be_null = ("prompt_ids", "again_logps", "turn_ids", "token_staleness")
    lists = [field.name for field in SCHEMA if pa.types.is_list(field.type) and field.name not in may_be_null]
    for row in read_dump(make_dump(tmp_path, settings={"rollout_is": None})).rows:
        assert row["weights"] is None
        assert {len(row[name]) for name in lists if name != "weights"} == {len(row["tokens"])}
        assert row["sampled"] or row["worst"]
        assert json.dumps(row)


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
