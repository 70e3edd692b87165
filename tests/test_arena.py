"""The arena: what is run is balanced, what is computed of it is right, and the document says what the results say."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from tests.launching import ROOT, benchmarks


ARENA = ROOT / "benchmarks/arena"


@pytest.fixture(scope="module")
def arena():
    with benchmarks("arena", "") as load:
        yield load


@pytest.fixture(scope="module")
def cells(arena):
    return arena("cells")


@pytest.fixture(scope="module")
def report(arena):
    return arena("report")


# Cells --------------------------------------------------------------------------------------------------------------------


def test_tasks_are_split_by_their_names_alone(arena, cells):
    tasks = arena("tasks")
    assert sorted(cells.TUNING) == sorted(tasks.TUNING)
    assert sorted(cells.JUDGING) == sorted(tasks.JUDGING)
    assert not set(cells.TUNING) & set(cells.JUDGING)
    assert {run.cell.task for run in cells.tuning()} <= set(cells.TUNING)
    assert {run.cell.task for run in cells.judging()} == set(cells.JUDGING)


@pytest.mark.parametrize("stage", ["tuning", "judging", "full"])
def test_a_name_is_one_run(stage, cells):
    by_name = defaultdict(list)
    for run in cells.STAGES[stage]():
        by_name[run.name].append((run.settings, run.seed))
    for runs in by_name.values():
        assert all(run == runs[0] for run in runs)
    assert len({json.dumps(runs[0], sort_keys=True) for runs in by_name.values()}) == len(by_name)


def test_every_sampler_is_judged_on_two_tasks_and_at_both_rates(cells):
    judged = [cell for cell in cells.judged_cells() if cell.algorithm == "grpo"]
    assert len({(cell.task, cell.sampler) for cell in judged}) == len(judged)
    assert set(Counter(cell.task for cell in judged).values()) == {5}
    met = Counter(cell.sampler for cell in judged)
    assert set(met) == set(cells.JUDGED_SAMPLERS)
    assert min(met.values()) == 2
    rates = defaultdict(set)
    for cell in judged:
        rates[cell.task].add(cell.learning_rate)
        rates[cell.sampler].add(cell.learning_rate)
    assert all(found == {cells.SLOW, cells.FAST} for found in rates.values())
    rloo = [cell for cell in cells.judged_cells() if cell.algorithm == "rloo"]
    assert len({cell.task for cell in rloo}) == len({cell.sampler for cell in rloo}) == 3


def test_what_an_interrupted_stage_has_done_is_balanced(cells):
    runs = cells.judging()
    first = [run for run in runs if run.seed == 0]
    assert runs[: len(first)] == first  # one seed of all cells before the second of any
    order = list(dict.fromkeys(run.cell for run in first))
    assert order == cells.judged_cells()
    tasks = {cell.task for cell in order}
    for n in range(2, len(order)):
        counts = Counter(cell.task for cell in order[:n] if cell.algorithm == "grpo")
        assert max(counts.values()) - min(counts[task] for task in tasks) <= 1
    # all arms of a cell together, and in one engine but for the reference, whose cache is not in eight bits
    changes = sum(a.cell != b.cell for a, b in pairwise(first))
    assert changes == len(order) - 1
    assert set(cells.CORE) <= set(cells.judged_cells())


def test_every_arm_is_tried_in_every_cell_where_it_is_another(cells):
    arms = defaultdict(set)
    for run in cells.judging():
        arms[run.cell, run.seed].add(run.arm.name)
    for (cell, _), found in arms.items():
        expected = set()
        if cell.sampler == "in step":
            expected.add("none")  # which is on-policy there
        if cell.algorithm == "rloo":
            expected.add("trl")  # which has no correction of its own
        assert set(cells.JUDGED) - found == expected


# The report ---------------------------------------------------------------------------------------------------------------


def row(cell, arm, accuracy, seed=0, **others):
    return {"cell": cell, "arm": arm, "seed": seed, "start": 0.5, "accuracy": accuracy, "rejected": None, **others}


STALE, IN_STEP = "grpo-reverse-lag_16-fast", "grpo-reverse-in_step-slow"


def test_a_run_in_a_few_numbers(cells, report):
    run = cells.Run(cells.ARMS["icepop"], cells.Cell("reverse", "burst", cells.SLOW))
    record = {
        "steps": [0, 10, 20, 30],
        "accuracy": [0.5, 0.2, 0.6, 0.7],
        "history": {
            "step": [1, 2],
            "rollout_corr/rollout_is_oob_ratio": [0.1, 0.3],
            "rollout_corr/k3_kl": [0.1, 0.1],
        },
        "broken": {"broken": 10, "broken_rejected": 9, "sound": 100, "sound_rejected": 1},
        "settings": run.settings,
    }
    found = report.row_of(run, record)
    assert found["accuracy"] == pytest.approx(0.5)  # of the last three looks, of which the first is the lowest
    assert (found["start"], found["lowest"], found["rejected"]) == (0.5, 0.2, pytest.approx(0.2))
    assert (found["caught"], found["sound_rejected"]) == (0.9, 0.01)


def test_regret_is_against_the_best_correction_and_not_against_the_unreachable(report):
    group = {
        row["arm"]: row for row in (row(STALE, "on_policy", 0.9), row(STALE, "trl", 0.7), row(STALE, "auto", 0.8))
    }
    assert report.regret(group, "trl") == pytest.approx(0.1)
    assert report.regret(group, "auto") == 0.0
    assert report.behind(group, "trl", "on_policy") == pytest.approx(0.2)


def test_cells_that_are_not_complete_are_left_out(report):
    arms = ["on_policy", "none", "auto"]
    rows = [
        row(STALE, "on_policy", 0.9),
        row(STALE, "auto", 0.8),
        row(IN_STEP, "on_policy", 0.8),
        row(IN_STEP, "auto", 0.7),
    ]
    # in step, no correction is the reference itself, so nothing is missing there
    assert set(report.groups_of(rows, arms)) == {(IN_STEP, 0)}
    rows.append(row(STALE, "none", 0.1))
    assert set(report.groups_of(rows, arms)) == {(STALE, 0), (IN_STEP, 0)}
    summary = {line.split("|")[1].strip(" `"): line for line in report.summary(rows, arms).splitlines()[2:]}
    assert "| 0.750 | 0.100 | 0.000 | 0.00 |" in summary["auto"]
    assert f"| 0.700 | 0.70 | {STALE} |" in summary["none"]


def test_losses_are_named(report):
    arms = ["trl", "auto"]
    rows = [row(STALE, "trl", 0.8), row(STALE, "auto", 0.7), row(IN_STEP, "trl", 0.5), row(IN_STEP, "auto", 0.7)]
    said = report.against(rows, "auto", "trl", arms)
    assert "2 cells: +0.050 on average" in said
    assert f"above in 1, below in 1: {STALE} (0.10)" in said


def test_the_document_says_what_the_results_say(report):
    results = json.loads((ARENA / "results.json").read_text())
    readme = (ARENA / "README.md").read_text()
    assert report.filled(readme, report.tables(results)) == readme
    results["judging"]["rows"][0]["accuracy"] = 0.123
    assert report.filled(readme, report.tables(results)) != readme


# The simulation -----------------------------------------------------------------------------------------------------------


def test_the_simulation_knows_the_gradient_and_what_is_broken(arena):
    simulate = arena("simulate")
    tokens = simulate.draw(np.random.default_rng(0), 2**15, spread=0.1)
    everything = simulate.judge(tokens, np.ones_like(tokens.d, bool))
    assert everything["gradient"] == pytest.approx(1.0, abs=0.05)  # importance weights are unbiased
    assert np.exp(tokens.d).mean() == pytest.approx(1.0, abs=0.01)
    broken = simulate.draw(np.random.default_rng(1), 2**15, spread=0.01, broken=0.1)
    caught = simulate.judge(broken, simulate.within_ratio(0.5, 5.0)(broken))
    assert broken.broken.mean() == pytest.approx(0.1, abs=0.01)
    assert caught["caught"] > 0.9 > 0.001 > caught["rejected"]


def test_a_budget_of_the_second_moment_is_kept(arena):
    simulate = arena("simulate")
    tokens = simulate.draw(np.random.default_rng(0), 2**15, spread=1.0)
    keep = simulate.within_moment(0.04)(tokens)
    for d, kept in zip(tokens.d.reshape(-1, 2**14), keep.reshape(-1, 2**14), strict=True):
        assert (d[kept] ** 2).mean() <= 0.04
        assert np.abs(d[kept]).max() <= np.abs(d[~kept]).min()
