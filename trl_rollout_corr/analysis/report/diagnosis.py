"""A diagnosis as a section of the report, and as a page of its own: `trl-rollout-corr diagnose --html`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...diagnosis import Diagnosis, Finding, Observed
from ...diagnosis.pictures import Points, picture
from ...diagnosis.written import advise, detail, evidence, headline, sure
from ...probe.experiments import COLUMNS
from ...settings.formatting import percent, yaml_lines
from .drawing import Axes, Chart, Colors
from .markup import code, document, escaped, figure, table


def chart(o: Observed, finding: Finding) -> Chart:
    """The picture of one cause."""
    points = picture(o, finding)
    return Chart(
        f"cause-{finding.name}",
        points.y[:1].upper() + points.y[1:],
        f"{finding.cause.title}: {evidence(finding)}.",
        partial(_draw, points=points),
        (points.x, points.y),
        [*zip(points.at, points.values, strict=True)],
    )


def _draw(axes: Axes, colors: Colors, *, points: Points):
    if isinstance(points.at[0], str):
        places = np.arange(len(points.at))
        axes.bar(places, points.values, 0.65, color=colors["line"], alpha=0.85)
        axes.set_xticks(places, [*map(str, points.at)], rotation=0 if len("".join(map(str, points.at))) < 36 else 18)
    else:
        axes.plot(points.at, points.values, color=colors["line"], marker="o", markersize=4)
    axes.axhline(0, color=colors["muted"], linewidth=0.8)
    axes.set_xlabel(points.x)


def cards(o: Observed, diagnosis: Diagnosis) -> str:
    """What was found, as pieces of a page."""
    kind = "healthy" if diagnosis.healthy else "finding"
    head = f'<p class="{kind}"><strong>{escaped(headline(diagnosis))}.</strong> {code(detail(diagnosis))}</p>\n'
    return head + "".join(_card(o, diagnosis, finding) for finding in diagnosis.findings)


def _card(o: Observed, diagnosis: Diagnosis, finding: Finding) -> str:
    cause, advice = finding.cause, advise(diagnosis, finding)
    kind = "finding" if cause.normal else "finding warning"
    yaml = f'<pre class="remedy">{escaped(yaml_lines(advice.settings))}</pre>' if advice.settings else ""
    return (
        f'<article class="{kind}"><h3>{escaped(cause.title)}</h3>'
        f"\n<p>{escaped(sure(finding))} ({percent(round(finding.certainty, 2))}), explains "
        f"{percent(round(finding.share, 2))} of d<sup>2</sup>: {escaped(evidence(finding))}.</p>\n"
        f"<p><strong>What to do.</strong> {code(advice.text)}</p>{yaml}\n{figure(chart(o, finding))}</article>\n"
    )


def lines(diagnosis: Diagnosis) -> list[str]:
    """The same in Markdown."""
    found = [f"**{headline(diagnosis)}.** {detail(diagnosis)}"]
    for finding in diagnosis.findings:
        advice = advise(diagnosis, finding)
        found += [
            "",
            f"- {finding.cause.title}: {sure(finding)}, {percent(round(finding.share, 2))} of d^2; {evidence(finding)}. "
            f"{advice.text}",
        ]
        if advice.settings:
            found += ["", "```yaml", yaml_lines(advice.settings).rstrip(), "```"]
    return found


def page_of_diagnosis(name: str, o: Observed, diagnosis: Diagnosis, experiments: Sequence[Sequence[str]] = ()) -> str:
    """A page of its own, with the rows of the experiments of a probe."""
    parts = [("diagnosis", "Diagnosis", cards(o, diagnosis))]
    if experiments:
        parts.append(("experiments", "Counter-experiments", table(COLUMNS, experiments)))
    return document(f"Diagnosis: {escaped(Path(name).name)}", "", parts)
