"""Histories in files that need no library of a tracker: JSON, lines of JSON, CSV and Parquet."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


History = list[dict[str, Any]]  # rows of a history
Runs = dict[str, History]  # histories by name of the run, in order; a name may be empty
_RUN = ("run_id", "run_name")  # columns of an export with several runs
_RANGE = ("__MIN", "__MAX")  # columns of a chart of W&B beside each metric
_OF_RUNS = {"Name", "State", "Created"}  # columns of W&B's table of runs
_LONGEST_CELL = 100_000_000  # characters


# JSON ----------------------------------------------------------------------------------------------------------------


def from_json(path: Path) -> Runs:
    """
    The state of a trainer, rows of a history (also as pandas or W&B write them), or a summary, which has one row.
    Lines of JSON have one row each.
    """
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError as error:
        if not (lines := _lines(text)):
            raise ValueError(f"{path.name} is damaged or not JSON: {error}") from None
        content = lines
    if isinstance(content, Mapping) and "log_history" in content:
        rows = content["log_history"]
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"{path.name}: `log_history` must be a list of entries")
        return {"": rows}
    rows = _rows_of(content)
    if rows is None:
        raise ValueError(
            f"{path.name} is JSON, but neither the state of a trainer, which contains a `log_history`, nor the rows "
            "of a history, such as `list(run.scan_history())` of W&B"
        )
    return by_run(rows)


def _lines(text: str) -> History:
    """Rows of lines of JSON; the last line may be cut short. Empty if other lines are something else."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number < len(lines) or number == 1:
                return []
            break
        if not isinstance(row, dict):
            return []
        rows.append(row)
    return rows if len(rows) > 1 or len(lines) > 1 else []


def _rows_of(content: Any) -> History | None:
    """Rows of a history in JSON, in any of the shapes in which libraries write a table; `None` for other content."""
    if isinstance(content, list):
        rows = [json.loads(row) if isinstance(row, str) and row.startswith("{") else row for row in content]
        return rows if all(isinstance(row, Mapping) for row in rows) else None
    if not isinstance(content, Mapping) or not content:
        return None
    if isinstance(content.get("columns"), list) and isinstance(content.get("data"), list):  # pandas, `orient="split"`
        return [dict(zip(map(str, content["columns"]), row, strict=False)) for row in content["data"]]
    for name in ("history", "rows", "data"):
        if isinstance(content.get(name), list):
            return _rows_of(content[name])
    columns = {name: column for name, column in content.items() if isinstance(column, Mapping | list)}
    if len(columns) == len(content):  # pandas: columns, each with its rows by number
        cells = {
            name: column if isinstance(column, Mapping) else dict(enumerate(column))
            for name, column in columns.items()
        }
        numbers = dict.fromkeys(number for column in cells.values() for number in column)
        return [{name: column[n] for name, column in cells.items() if n in column} for n in numbers]
    return [dict(content)] if any("/" in str(name) for name in content) else None  # the summary of a run


# Tables --------------------------------------------------------------------------------------------------------------


def from_csv(path: Path) -> Runs:
    """A history with a metric in each column, or a chart of W&B, whose columns begin with the name of the run."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        delimiter = max(",\t;", key=first.count)
        reader = csv.DictReader(file, delimiter=delimiter)
        names = [name for name in reader.fieldnames or () if name]
        if len(names) < 2:
            raise ValueError(
                f"{path.name} is no table: its first line must name a column for the step, and one for each metric"
            )
        if {*names} >= _OF_RUNS:
            raise ValueError(
                f"{path.name} is W&B's table of runs, which has the last value of each metric. Export the history of "
                "one run: `run.history(samples=10000).to_csv(...)`, or a chart as CSV"
            )
        rows = [
            {name: _cell(text) for name, text in row.items() if name and isinstance(text, str) and text}
            for row in reader
        ]
    charts = [name for name in names if " - " in name]
    return _read_chart(rows, charts) if charts and len(charts) >= len(names) - 2 else by_run(rows)


def _cell(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _read_chart(rows: History, columns: Sequence[str]) -> Runs:
    """Histories of a chart that W&B exports, by run. Each column is named `run - metric`."""
    runs: Runs = {}
    for column in columns:
        run, _, metric = column.rpartition(" - ")
        if metric.endswith(_RANGE):
            continue
        history = runs.setdefault(run, [{key: x for key, x in row.items() if key not in columns} for row in rows])
        for row, entry in zip(rows, history, strict=True):
            if column in row:
                entry[metric] = row[column]
    return {run: [row for row in history if len(row) > 1] for run, history in runs.items()}


def from_parquet(path: Path) -> Runs:
    """A history that W&B or Trackio has exported."""
    with pq.ParquetFile(path) as file:
        rows = file.read().to_pylist()
    return by_run(rows)


def by_run(rows: Iterable[Mapping[str, Any]]) -> Runs:
    """Rows by the name of their run, if a column tells it; a number is added to names that several runs have."""
    runs: Runs = {}
    names: dict[str, str] = {}
    for row in rows:
        identity = str(next((row[key] for key in _RUN if row.get(key)), ""))
        name = names.setdefault(identity, _new_name(str(row.get("run_name") or identity), names.values()))
        runs.setdefault(name, []).append({key: x for key, x in row.items() if key not in _RUN})
    return runs


def _new_name(name: str, taken: Iterable[str]) -> str:
    others = {*taken}
    number = 2
    found = name
    while found in others:
        found, number = f"{name}-{number}", number + 1
    return found
