"""Whatever is wrong with a dump, every command says so in one line and leaves with 2: 1 means that something was found."""

import dataclasses
import json
import math
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.dumps import make_dump, read_dump
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr import diagnosis as diagnosing
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.dumps import files as dump
from trl_rollout_corr.dumps.schema import FORMAT, SCHEMA, VERSION


FLOATS = [None, math.nan, math.inf, -math.inf, 0.0, 1e-45, 3e38, -3e38, 5.0]
INTEGERS = [None, -(2**31), 2**31 - 1, -1, 0, 7]
# What a column may be set to, by the type of its entries
ENTRIES = {
    pa.float32(): FLOATS,
    pa.int32(): INTEGERS,
    pa.bool_(): [None, True, False],
    pa.string(): [None, "", "\x00", "\u202e<b>", "x" * 500],
}
LISTS = [field.name for field in SCHEMA if pa.types.is_list(field.type)]
# How a list is changed
CHANGES = ("all entries", "an entry", "null", "empty", "shorter", "longer", "all entries", "an entry")

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
FIELDS = [*(field.name for field in dataclasses.fields(RolloutCorrectionConfig)), "rollout_new", "top_p"]
ABOUT = ["model", "trainer", "date", "adapter", "kv_cache_dtype", "trainer_dtype", "new"]
NO_JSON = st.sampled_from([b"", b"{", b"[" * 100_000, b"\xff\xfe\x00", b"9" * 5000, b'"\\ud800"', b"\n"])


def of_kind(names: list[str]):
    """Values for a key of these names in the metadata of a file: mostly of the right kind."""
    changed = st.dictionaries(st.sampled_from(names), ANYTHING, max_size=2)
    return (changed | ANYTHING).map(lambda x: json.dumps(x).encode()) | NO_JSON


METADATA = st.just({}) | st.sampled_from([("settings", FIELDS), ("about", ABOUT)]).flatmap(
    lambda key: of_kind(key[1]).map(lambda value: {key[0]: value})
)


@st.composite
def edit(draw):
    """A column, the row of which it is changed (`None` for all), how, and to what."""
    column = draw(st.sampled_from([*SCHEMA]))
    row, at = draw(st.none() | st.integers(0, 5)), draw(st.integers(0, 20))
    of_list = pa.types.is_list(column.type)
    how = draw(st.sampled_from(CHANGES)) if of_list else "value"
    return (
        column.name,
        row,
        how,
        draw(st.sampled_from(ENTRIES[column.type.value_type if of_list else column.type])),
        at,
    )


def edited(entries: list | None, how: str, value, at: int):
    """A list that is changed."""
    entries = list(entries or [])
    if how == "null":
        return None
    if how == "empty" or not entries:
        return []
    if how == "shorter":
        return entries[:-1]
    if how == "longer":
        return [*entries, entries[-1]]
    if how == "all entries":
        return [value] * len(entries)
    return [value if i == at % len(entries) else x for i, x in enumerate(entries)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    return read_dump(make_dump(tmp_path_factory.mktemp("intact"), steps=1, rows=6, length=24, sampled=5, worst=2)).rows


def written(folder, rows, edits=(), settings=b"{}", about=b"{}"):
    """A dump of one file, as it is after some edits."""
    rows = [dict(row) for row in rows]
    for name, row, how, value, at in edits:
        for i in range(len(rows)) if row is None else [row % len(rows)]:
            rows[i][name] = value if how == "value" else edited(rows[i].get(name), how, value, at)
    folder.mkdir(exist_ok=True)
    schema = SCHEMA.with_metadata({FORMAT: str(VERSION), b"settings": settings, b"about": about})
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "step-00000001-rank-00000.parquet")
    return folder


def answers(folder, capsys, *, draw: bool) -> list[str]:
    """Output of all commands on a dump: one line with exit code 2, or an answer. JSON is that of the standard."""
    commands = [["compare", "--json"], ["diagnose", "--json"], ["report", "-o", str(folder / "report.html")]]
    said = []
    for name, *options in commands:
        if name == "report" and not (draw or all(said)):
            break  # it takes a second to draw what can be used
        code = main([name, str(folder), *options])
        out, err = capsys.readouterr()
        assert code in ((0, 1) if name == "diagnose" and not err else (0, 2)), err
        if code == 2:
            assert out == ""
            assert err.endswith("\n")
            assert len(err.splitlines()) == 1, err
            assert "unexpected" not in err, err
        elif "--json" in options:
            json.loads(out, parse_constant=pytest.fail)
        said.append(err if code == 2 else "")
    return said


FUZZ = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
GIVEN = {"edits": st.lists(edit(), max_size=3), "metadata": METADATA}


@settings(max_examples=60, **FUZZ)
@given(**GIVEN)
@example(edits=[("token_ids", None, "empty", None, 0)], metadata={})
@example(edits=[("prompt_ids", 1, "an entry", None, 0)], metadata={})
@example(edits=[], metadata={"settings": b'{"bypass_mode": []}', "about": b'{"date": 1}'})
def test_a_dump_is_used_or_refused_in_one_line(rows, tmp_path, capsys, edits, metadata):
    answers(written(tmp_path / "dump", rows, edits, **metadata), capsys, draw=False)


@pytest.mark.slow
@settings(max_examples=120, **FUZZ)
@given(**GIVEN)
def test_a_dump_is_drawn_or_refused_in_one_line(rows, tmp_path, capsys, edits, metadata):
    answers(written(tmp_path / "dump", rows, edits, **metadata), capsys, draw=True)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ({"edits": [("token_ids", 0, "null", None, 0)]}, "`token_ids` of a row is null"),
        ({"edits": [("token_ids", 0, "shorter", None, 0)]}, "a row has lists of different lengths"),
        ({"edits": [("token_ids", 0, "an entry", None, 3)]}, "`token_ids` of a row has an entry that is null"),
        ({"edits": [("again_logps", 0, "empty", None, 0)]}, "a row has lists of different lengths"),
        ({"edits": [("mask", None, "longer", None, 0)]}, "a row has lists of different lengths"),
        ({"edits": [("keep", None, "an entry", None, 0)]}, "`keep` of a row has an entry that is null"),
        ({"edits": [("reward", 0, "value", None, 0)]}, "`reward` of a row is null"),
        ({"edits": [("step", None, "value", None, 0)]}, "`step` of a row is null"),
        ({"settings": b"[1]"}, "its metadata `settings` is not a JSON object"),
        ({"settings": b"{"}, "its metadata `settings` is not a JSON object"),
        ({"settings": b"[" * 100_000}, "its metadata `settings` is not a JSON object"),
        ({"about": b"3"}, "its metadata `about` is not a JSON object"),
        ({"about": b'{"kv_cache_dtype": 8}'}, "its metadata `about` is not a JSON object"),
    ],
)
def test_what_is_damaged_is_named(rows, tmp_path, capsys, fault, complaint):
    folder = written(tmp_path / "dump", rows, **fault)
    for said in answers(folder, capsys, draw=True):
        assert said.startswith(f"{folder}: step-00000001-rank-00000.parquet is damaged: ")
        assert complaint in said


def test_text_of_another_encoding_is_damage(rows, tmp_path, capsys):
    [path] = dump.files_of(written(tmp_path / "dump", [{**rows[0], "prompt": "\u00e9" * 999}]))
    table = pq.read_table(path)
    latin = pa.array([b"\xe9" * 999]).view(pa.string())
    pq.write_table(table.set_column(table.column_names.index("prompt"), "prompt", latin), path)
    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: {path.name} is damaged, or it is not a Parquet file: ")
    assert len(said.splitlines()) == 1


def test_what_is_damaged_is_left_out_of_what_is_intact(rows, tmp_path, capsys):
    folder = written(tmp_path / "dump", rows, [("reward", 0, "value", None, 0)])
    dump.write_rows(folder, 2, 0, [{**row, "step": 2} for row in rows], {})
    assert main(["compare", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"] == [2]
    said = "step-00000001-rank-00000.parquet is damaged: `reward` of a row is null. It is left out."
    assert err == f"warning: {folder}: {said}\n"


def test_an_error_that_nobody_thought_of_is_one_line_too(rows, tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise KeyError("no\nsuch")

    monkeypatch.setattr(diagnosing, "read_tokens", fail)
    assert main(["diagnose", str(written(tmp_path / "dump", rows))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(r"diagnose: unexpected KeyError('no\nsuch') in test_damaged.py:")
    assert main(["compare", "x" * 5000]) == 2
    assert capsys.readouterr().err.endswith(": File name too long\n")


# Names, numbers and links -------------------------------------------------------------------------------------------------

COMMANDS = [["report", "-o", "r.html"], ["diagnose"], ["compare"]]


def state(**more) -> str:
    """The log of a run of three steps, whose last entry has other values, which are text of JSON."""
    entries = [{"step": step, "loss": 0.1, "rollout_corr/kl": 0.01, "rollout_corr/k3_kl": 0.01} for step in (1, 2, 3)]
    text = json.dumps({"log_history": [*entries[:2], {**entries[2], **dict.fromkeys(more, "HERE")}]})
    for value in more.values():
        text = text.replace('"HERE"', value, 1)
    return text


NUMBERS = ["1e400", "-1e400", "1e300", "NaN"]


@pytest.mark.parametrize("value", NUMBERS)
def test_a_metric_beyond_all_numbers_is_drawn(tmp_path, capsys, monkeypatch, value):
    (tmp_path / "trainer_state.json").write_text(state(**{"rollout_corr/k3_kl": value}))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize("link", ["r.html", "r.html.partial"])
def test_a_report_writes_through_no_link(rows, tmp_path, capsys, link):
    folder, notes = written(tmp_path / "dump", rows), tmp_path / "notes"
    notes.write_text("mine")
    (tmp_path / link).symlink_to(notes)
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    assert notes.read_text() == "mine"
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in tmp_path.iterdir()} == {"dump", "notes", "r.html", link}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["pipe", "trainer_state.json", "step-00000001-rank-00000.parquet"])
def test_a_pipe_is_not_waited_for(tmp_path, capsys, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        assert main([*command, str(source)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
