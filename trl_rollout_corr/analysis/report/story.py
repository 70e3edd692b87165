"""The story of a run, or of one against another: the gap, alarms, what is rejected, and the reward, over the same steps."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ...health.examine import Finding
from ...health.rules import HEALTHY
from ...messages import PREFIX
from .drawing import Chart, Story
from .trends import ROLES, TRENDS, Curve, Trend, curves_of, draw_curves, healthy, in_short, is_flat, rows_of


# What the story shows, from top to bottom. The sample size stands in where nothing is rejected.
TOLD = ("k3-kl", "rejected", "sample-size", "effective-lr", "reward")
_VERSUS = ("second", "line")  # of two runs


def story(runs: Mapping[str, tuple[Sequence[Mapping[str, Any]], Sequence[Finding]]]) -> Story | None:
    """
    Tell what happened, in charts over the same steps.

    Args:
        runs (`Mapping[str, tuple[Sequence[Mapping], Sequence[Finding]]]`):
            Log and findings by name of the run. Of one, every curve is drawn; of two, the main ones against each other.

    Returns:
        [`Story`] or `None`: the gap, what is rejected, what is left of the step, and the reward, as far as they were logged;
        `None` if nothing was.
    """
    charts: list[Chart] = []
    tables: dict[str, Curve] = {}
    for trend in sorted((trend for trend in TRENDS if trend.name in TOLD), key=lambda trend: TOLD.index(trend.name)):
        if trend.name == "sample-size" and any(chart.name == "rejected" for chart in charts):
            continue
        curves = _of_runs(trend, runs)
        if curves:
            charts.append(_panel(trend, curves, _roles(runs, curves), versus=len(runs) > 1))
            tables.update({_column(trend, name, runs): curve for name, curve in curves.items()})
    if not charts:
        return None
    alarms = _marks(runs)
    note = f"Dashed red: first alarms, {_in_words(runs)}." if alarms else "No alarm was raised."
    said = " ".join(f"{chart.title}: {chart.alt}" for chart in charts)
    return Story(
        "What happened",
        f"The run over optimizer steps. {said} {note}",
        charts,
        list(alarms.items()),
        ("step", *tables),
        rows_of(tables),
        note,
        list(runs) if len(runs) > 1 else [],
    )


def _of_runs(trend: Trend, runs: Mapping[str, tuple[Sequence[Mapping[str, Any]], Any]]) -> dict[str, Curve]:
    main = next(iter(trend.metrics.values()))
    if len(runs) == 1:
        ((logs, _),) = runs.values()
        curves = curves_of(trend, logs)
        return curves if main in curves else {}
    found = {name: curves_of(trend, logs) for name, (logs, _) in runs.items()}
    return {name: curves[main] for name, curves in found.items() if main in curves}


def _roles(runs: Collection[str], curves: Collection[str]) -> Sequence[str]:
    """Colours of the curves: that of its run, of two."""
    if len(runs) == 1:
        return ROLES
    return [role for role, name in zip(_VERSUS, runs, strict=True) if name in curves]


def _column(trend: Trend, curve: str, runs: Collection[str]) -> str:
    """Head of a column, which says of what and of which run."""
    if len(runs) > 1:
        return f"{trend.title}: {curve}"
    return trend.title if curve == next(iter(trend.metrics.values())) else f"{trend.title}: {curve}"


def _panel(trend: Trend, curves: Mapping[str, Curve], roles: Sequence[str], *, versus: bool) -> Chart:
    band = HEALTHY.get(next(iter(trend.metrics)).removeprefix(PREFIX), (None, None))
    says = "; ".join(f"{name + ' ' if versus else ''}{in_short(curve)}" for name, curve in curves.items())
    draw = partial(draw_curves, curves=curves, band=band, alarms=[], log=trend.log, roles=roles, versus=versus)
    flat = all(map(is_flat, curves.values()))
    return Chart(trend.name, trend.title, f"{says}.{healthy(band)}", draw, (), (), flat=says if flat else "")


def _marks(runs: Mapping[str, tuple[Any, Sequence[Finding]]]) -> dict[int, list[str]]:
    """What was first found at which step. Findings have the numbers of their cards; of two runs, the one of the run, too."""
    marks: dict[int, list[str]] = {}
    for letter, (_, findings) in zip("AB", runs.values(), strict=False):
        for i, finding in enumerate(findings, 1):
            marks.setdefault(finding.step, []).append(f"{letter if len(runs) > 1 else ''}{i}")
    return dict(sorted(marks.items()))


def _in_words(runs: Mapping[str, tuple[Any, Sequence[Finding]]]) -> str:
    """Every alarm, by its step."""
    found = sorted(
        (finding.step, f"{letter if len(runs) > 1 else ''}{i}", finding.rule)
        for letter, (_, findings) in zip("AB", runs.values(), strict=False)
        for i, finding in enumerate(findings, 1)
    )
    where = ", ".join(f"{name} ({rule}) at step {step}" for step, name, rule in found)
    letters = [f"{letter}: {name}" for letter, name in zip("AB", runs, strict=False)] if len(runs) > 1 else []
    return f"numbered as the findings: {where}" + (f" ({', '.join(letters)})" if letters else "")
