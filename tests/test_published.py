"""
Figures in documents are those of the results files.

Tables of `benchmarks/**/README.md` are made by the benchmark, of its results file. A figure elsewhere is a cell of such a
table, and a comment behind it says which: `0.29<!-- = exact#bias: auto; s from 0.1 -->` is in the row `auto` and the column
`s from 0.1` of the section `bias` of `benchmarks/exact/README.md`, rounded as in the document. `.` is
`benchmarks/README.md`, `arena.RESULTS` is `benchmarks/arena/RESULTS.md`; several cells in front name a row together,
`64x2048, token`.
"""

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, benchmarks


BENCHMARKS = ROOT / "benchmarks"


# Tables ---------------------------------------------------------------------------------------------------------------


def results_of(folder: str) -> Any:
    """Content of the results file of a benchmark; by name, if it has several."""
    files = {path.stem: json.loads(path.read_text()) for path in (BENCHMARKS / folder).glob("*.json")}
    return files["results"] if list(files) == ["results"] else files


def of_this_folder(load, results) -> list[str]:
    tables = load("tables")
    columns = {"computation": tables.COMPUTATION, "step": tables.STEP, "step_pretrained": tables.STEP}
    on_gpus = [name for name in results if name.startswith("gpu")]
    assert columns.keys() | OF_TRL.keys() | {"pushes", *on_gpus} == results.keys()
    of_pushes = [tables.markdown(results["pushes"][name], form) for name, form in tables.OF_PUSHES.items()]
    on_gpu = [table for name in on_gpus for table in load("gpu").tables(results[name])]
    return [tables.markdown(results[name]["rows"], form) for name, form in columns.items()] + of_pushes + on_gpu


OF_TRL = {"length": "table", "long_answers": "table"}  # their tables are in `docs/trl.md`
# `tests/test_arena.py` has those of the arena
TABLES = {
    "results": of_this_folder,
    "diagnose": lambda load, results: load("run").tables(results),
    "exact": lambda load, results: load("run").tables(results),
    "language_model": lambda load, results: load("report").tables(results),
}


@pytest.mark.parametrize("folder", TABLES)
def test_tables_are_those_of_the_results(folder):
    with benchmarks(folder, "") as load:
        tables = TABLES[folder](load, results_of(folder))
    path = BENCHMARKS / folder / "README.md"
    text = (path if path.exists() else BENCHMARKS / "README.md").read_text()
    for table in tables:
        assert table + "\n" in text, table


@pytest.mark.parametrize("name", OF_TRL)
def test_tables_of_the_page_about_trl_are_those_of_the_results(name):
    results = json.loads((BENCHMARKS / f"results/{name}.json").read_text())
    with benchmarks("") as load:
        table = getattr(load(name), OF_TRL[name])(results)
    assert table + "\n" in (ROOT / "docs/trl.md").read_text(), table


# Figures --------------------------------------------------------------------------------------------------------------


NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
FIGURE = re.compile(rf"({NUMBER})<!-- = ([\w.]+)(?:#([\w-]+))?: (.+?); (.+?) -->")
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    *(str(path.relative_to(ROOT)) for path in [*ROOT.glob("docs/*.md"), *BENCHMARKS.rglob("*.md")]),
]


def section(text: str, anchor: str) -> str:
    """Text below a heading, up to the next one of its level."""
    for level, title in re.findall(r"^(#+) (.+)$", text, re.MULTILINE):
        if re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") == anchor:
            below = text.split(f"\n{level} {title}\n", 1)[1]
            return re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]
    raise ValueError(f"no section {anchor!r}")


@cache
def cells(folder: str, anchor: str | None) -> dict[tuple[str, str], set[str]]:
    """Cells of the tables of a page, by row and column. A row is named by its first cell, by its first two, and so on."""
    folder, _, page = folder.partition(".")
    text = (BENCHMARKS / folder / f"{page or 'README'}.md").read_text()
    found = defaultdict(set)
    for table in re.findall(r"(?:^\|.*\n)+", section(text, anchor) if anchor else text, re.MULTILINE):
        columns, _, *rows = (
            [cell.replace("`", "").strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines()
        )
        for row in rows:
            for length in range(1, len(row)):
                for column, cell in zip(columns[length:], row[length:], strict=True):
                    found[", ".join(row[:length]), column].add(cell)
    return found


def mistakes(text: str) -> list[str]:
    """Figures of a document that are not in the cell that they name."""
    found = []
    for match in FIGURE.finditer(text):
        figure, folder, anchor, row, column = match.groups()
        there = cells(folder, anchor).get((row, column), set())
        decimals = len(figure.partition(".")[2])
        numbers = re.findall(NUMBER, *there) if len(there) == 1 else []  # one cell, and no other of that name
        if figure.replace(",", "") not in {f"{float(number.replace(',', '')):.{decimals}f}" for number in numbers}:
            found.append(match.group())
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_are_those_of_the_tables(document):
    text = (ROOT / document).read_text()
    assert text.count("<!-- =") == len(FIGURE.findall(text))  # each is behind a number, and well written
    assert mistakes(text) == []
    # Python-Markdown, which makes the site, would take the text up to the next backtick for code
    assert [comment for comment in re.findall(r"<!--.*?-->", text, re.DOTALL) if "`" in comment] == []


def test_a_figure_that_is_not_in_its_cell_is_found():
    text = Path(ROOT / "README.md").read_text()
    figures = [match.group() for match in FIGURE.finditer(text)]
    assert len(figures) > 5
    for figure in figures:
        assert mistakes(text.replace(figure, f"9{figure}", 1)) == [f"9{figure}"]
        assert mistakes(text.replace(figure, figure.replace("; ", "; no "))) != []
