"""
Figures in documents are those of the results files.

Tables of `benchmarks/**/README.md` are made by the benchmark, of its results file. A figure elsewhere is a cell of such a
table. For README, the manual and some pages of benchmarks, `tests/figures.yaml` says which. On other pages of
benchmarks, a comment behind the figure does: `0.29<!-- = exact#bias: auto; s from 0.1 -->`. Both name a cell in the same way:
the row `auto` and the column `s from 0.1` of the section `bias` of `benchmarks/exact/README.md`, rounded as in the document.
`.` is `benchmarks/README.md`, `arena.RESULTS` is `benchmarks/arena/RESULTS.md`; several cells in front name a row together,
`64x2048, token`.
"""

import json
import re
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
import yaml

from tests.launching import ROOT, benchmarks


BENCHMARKS = ROOT / "benchmarks"


# Tables ---------------------------------------------------------------------------------------------------------------


def results_of(folder: str) -> Any:
    """Content of the results file of a benchmark; by name, if it has several."""
    files = {path.stem: json.loads(path.read_text()) for path in (BENCHMARKS / folder).glob("*.json")}
    return files["results"] if list(files) == ["results"] else files


def tables_here(load, results) -> list[str]:
    tables = load("tables")
    columns = {"computation": tables.COMPUTATION, "step": tables.STEP, "step_pretrained": tables.STEP}
    columns |= {"memory": tables.MEMORY, "step_first_steps": tables.STEP, "step_auto": tables.STEP}
    on_gpus = [name for name in results if name.startswith("gpu")]
    assert columns.keys() | OF_TRL.keys() | {"pushes", *on_gpus} == results.keys()
    of_pushes = [tables.markdown(results["pushes"][name], form) for name, form in tables.OF_PUSHES.items()]
    on_gpu = [table for name in on_gpus for table in load("gpu").tables(results[name])]
    return [tables.markdown(results[name]["rows"], form) for name, form in columns.items()] + of_pushes + on_gpu


OF_TRL = {"length": "table", "long_answers": "table"}  # their tables are in `arena/EVIDENCE.md`
# `tests/test_arena.py` has those of the arena
TABLES = {
    "results": tables_here,
    "diagnose": lambda load, results: load("run").tables(results["results"]),
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
def test_tables_about_long_completions_are_those_of_the_results(name):
    results = json.loads((BENCHMARKS / f"results/{name}.json").read_text())
    with benchmarks("") as load:
        table = getattr(load(name), OF_TRL[name])(results)
    assert table + "\n" in (BENCHMARKS / "arena/EVIDENCE.md").read_text(), table


@pytest.mark.parametrize("published", [True, False])
def test_the_picture_of_long_answers_shows_its_results(published, tmp_path):
    """In each panel, the heights of both arms are their results, on the axis that they share."""
    rows = json.loads((BENCHMARKS / "results/long_answers.json").read_text())
    with benchmarks("") as load:
        picture = load("long_picture")
    path = picture.PICTURE if published else tmp_path / "picture.svg"
    if not published:
        picture.draw(rows, path)
    text = path.read_text()
    runs = {arm: picture.runs_of(rows, arm) for arm in picture.ARMS}
    values: dict[str, list[float]] = {name: [] for name in (*picture.POINTS, "reward")}
    heights: dict[str, list[float]] = {name: [] for name in values}
    for arm, of_arm in runs.items():
        assert len(of_arm) == 3
        points = [
            float(y) for y in re.findall(rf'<use [^>]*y="(\S+)" style="fill: {picture.LIGHT[arm]}; stroke', text)
        ]
        (curve,) = re.findall(rf'<path d="([^"]+)"[^>]*stroke: {picture.LIGHT[arm]}; stroke-width: 2.4', text)
        for name, three in zip(picture.POINTS, (points[:3], points[3:]), strict=True):
            values[name] += [run[name] for run in of_arm]
            heights[name] += three
        values["reward"] += picture.band(of_arm)[1]
        heights["reward"] += [float(y) for y in re.findall(r"[ML] \S+ (\S+)", curve)]
    for name, found in values.items():
        slope, start = np.polyfit(found, heights[name], 1)
        assert slope < 0  # y grows downwards
        assert heights[name] == pytest.approx(slope * np.array(found) + start, abs=0.01)


def test_what_readme_says_of_the_picture_of_long_answers_holds_for_each_seed():
    """With equal gaps, TRL's default has a third of the weight, and ends lower."""
    rows = json.loads((BENCHMARKS / "results/long_answers.json").read_text())
    for seed in range(3):
        default, auto = (
            {row["arm"]: row for row in rows if row["seed"] == seed}[arm] for arm in ("TRL's default", "`auto`")
        )
        assert default["weight"] < 0.35 < 0.99 < auto["weight"]
        assert default["after"] < 0.8 * auto["after"]
        assert default["k3"] == pytest.approx(auto["k3"], rel=0.15)


# Figures --------------------------------------------------------------------------------------------------------------


NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
SOURCE = r"([\w.]+)(?:#([\w-]+))?: (.+); (.+?)"
FIGURE = re.compile(rf"({NUMBER})<!-- = (.+?) -->")
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


def is_in_cell(figure: str, source: str) -> bool:
    """True if a figure is the number of its cell, rounded as the figure is."""
    folder, anchor, row, column = re.fullmatch(SOURCE, source).groups()
    there = cells(folder, anchor).get((row, column), set())
    decimals = len(figure.partition(".")[2])
    numbers = re.findall(NUMBER, *there) if len(there) == 1 else []  # one cell, and no other of that name
    return figure.replace(",", "") in {f"{float(number.replace(',', '')):.{decimals}f}" for number in numbers}


# A map of the figures of README and docs ------------------------------------------------------------------------------


MAP = yaml.safe_load((ROOT / "tests/figures.yaml").read_text())


def flat(text: str) -> str:
    return " ".join(text.split())


def unlike(page: str, entries: list[dict[str, Any]]) -> list[str]:
    """Entries of the map that are not on their page, or whose figures are not in their cells."""
    found = []
    for entry in entries:
        text, sources = entry["text"], entry.get("cells", [])
        figures = re.findall(r"\{(.+?)\}", text)
        if re.sub(r"[{}]", "", text) not in page:
            found.append(f"not on the page: {text}")
        if len(figures) != len(sources):
            found.append(f"{len(figures)} figures, {len(sources)} cells: {text}")
        pairs = zip(figures, sources, strict=False)
        found += [f"{figure} is not in {source}" for figure, source in pairs if not is_in_cell(figure, source)]
    return found


@pytest.mark.parametrize("page", MAP)
def test_figures_of_the_map_are_on_their_page_and_in_their_cells(page):
    assert unlike(flat((ROOT / page).read_text()), MAP[page]) == []


def test_a_figure_of_the_map_that_is_not_in_its_cell_is_found():
    page = flat((ROOT / "README.md").read_text())
    entries = [entry for entry in MAP["README.md"] if entry.get("cells")]
    assert len(entries) > 3
    for entry in entries:
        changed = {**entry, "text": entry["text"].replace("{", "{9", 1)}
        assert len(unlike(page, [changed])) == 2  # neither on the page nor in the cell
        assert unlike(page, [{**entry, "cells": [f"{source} not" for source in entry["cells"]]}]) != []


# Comments on pages of benchmarks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_are_those_of_the_tables(document):
    text = (ROOT / document).read_text()
    assert text.count("<!-- =") == len(FIGURE.findall(text))  # each is behind a number, and well written
    assert [figure for figure, source in FIGURE.findall(text) if not is_in_cell(figure, source)] == []
    # Python-Markdown, which makes the site, would take the text up to the next backtick for code
    assert [comment for comment in re.findall(r"<!--.*?-->", text, re.DOTALL) if "`" in comment] == []
    if document in MAP:
        assert "<!-- =" not in text, "the map has the figures of this page"
