"""
What counts as a difference in the comparisons: the spread over training seeds. Definitions: `PROTOCOL.md`. No torch here.

Scores are those of rows of `results.row_of`. Cells have scores by arm and seed.
"""

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import sqrt
from statistics import mean, variance
from typing import Any

import numpy as np


Scores = Mapping[str, Mapping[int, float]]  # of a cell, by arm and seed
REFERENCE = "on_policy"
FULL = 3  # seeds
DIFFERS, CLOSE = 0.06, 0.1  # of corrections with seed 0; of an arm from the best one
DRAWS, MIDDLE = 10_000, 0.9


def scores(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Scores by cell, arm and seed."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[row["cell"]][row["arm"]][row["seed"]] = row["accuracy"]
    return {cell: dict(by_arm) for cell, by_arm in found.items()}


def spreads(rows: Iterable[Mapping[str, Any]]) -> dict[bool, float]:
    """
    Pooled standard deviation over training seeds, of arms without and with a run that falls (`False` and `True`). A group of
    which nothing is known is left out.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["cell"], row["arm"]].append(row)
    variances: dict[bool, list[float]] = defaultdict(list)
    for group in groups.values():
        if len(group) >= FULL:
            variances[any(row["falls"] for row in group)].append(variance(row["accuracy"] for row in group))
    return {fall: sqrt(mean(found)) for fall, found in variances.items()}


def differ(one: Mapping[int, float], other: Mapping[int, float], spread: float) -> float:
    """How far the mean of one arm is above that of another, or 0 if they do not differ."""
    gap = mean(one.values()) - mean(other.values())
    return gap if abs(gap) > 2 * spread * sqrt(1 / len(one) + 1 / len(other)) else 0.0


def wanted(cell: Scores) -> list[str]:
    """Arms that need seeds 1 and 2, by their scores with seed 0."""
    first = {arm: by_seed[0] for arm, by_seed in cell.items() if arm != REFERENCE and 0 in by_seed}
    best = max(first.values(), default=0.0)
    if best - min(first.values(), default=0.0) <= DIFFERS:
        return []
    return [REFERENCE, *(arm for arm, score in first.items() if best - score <= CLOSE)]


def regret(cell: Scores, arm: str) -> float:
    """
    How far an arm is behind the best one. With three seeds of each, the best is taken by two of them and compared on the
    third, so that it is not the luckiest.
    """
    arms = {name: by_seed for name, by_seed in cell.items() if name != REFERENCE}
    full = {name: by_seed for name, by_seed in arms.items() if len(by_seed) >= FULL}
    if arm not in full:
        return max(mean(by_seed.values()) for by_seed in arms.values()) - mean(arms[arm].values())
    behind = []
    for seed in full[arm]:
        best = max(full, key=lambda name: mean(x for s, x in full[name].items() if s != seed))
        behind.append(full[best][seed] - full[arm][seed])
    return mean(behind)


def worst_regret(cells: Mapping[str, Scores], arm: str) -> tuple[float, str]:
    """The largest regret of an arm, and its cell."""
    return max((regret(cell, arm), name) for name, cell in cells.items() if arm in cell)


_dice, _normal = random.Random(0), array("d")  # numbers that were drawn, which all draws begin with


def drawn_scores(scores: Sequence[tuple[float, float]], draws: int) -> np.ndarray:
    """Draws of scores with a mean and a deviation, `(draws, scores)`; always the same."""
    number = draws * len(scores)
    while len(_normal) < number:
        _normal.append(_dice.gauss(0.0, 1.0))
    mean_of, deviation_of = np.array(scores).T
    return mean_of + np.array(_normal[:number]).reshape(draws, -1) * deviation_of


@lru_cache(maxsize=2)  # arms of the same cells share their draws, and most follow each other
def drawn_regrets(cells: tuple[tuple[tuple[float, float], ...], ...], draws: int) -> list[np.ndarray]:
    """
    How far each arm of a cell is behind the best one, `(draws, arms)`, of each cell. Of an arm, mean and deviation are given.
    """
    drawn = drawn_scores([of_arm for cell in cells for of_arm in cell], draws)
    ends = np.cumsum([len(cell) for cell in cells])[:-1]
    return [cell.max(1, keepdims=True) - cell for cell in np.split(drawn, ends, axis=1)]


def interval(
    cells: Mapping[str, Scores], arm: str, spread: Callable[[str, str], float], draws: int = DRAWS
) -> tuple[float, float]:
    """
    Where the largest plain regret of an arm is in the middle 90 of 100 draws of all scores. `spread` is that of the scores of
    an arm in a cell.
    """
    means = {
        name: {
            other: (mean(by_seed.values()), spread(name, other) / sqrt(len(by_seed)))
            for other, by_seed in cell.items()
            if other != REFERENCE
        }
        for name, cell in cells.items()
        if arm in cell
    }
    places = [[*of_arms].index(arm) for of_arms in means.values()]
    regrets = drawn_regrets(tuple(tuple(of_arms.values()) for of_arms in means.values()), draws)
    found = np.sort(np.max([cell[:, place] for cell, place in zip(regrets, places, strict=True)], axis=0))
    edge = round((1 - MIDDLE) / 2 * draws)
    return float(found[edge]), float(found[-edge - 1])
