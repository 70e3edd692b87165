"""Composition of a page: from the facts about one run, or about two, to sections, cards, tables and charts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...diagnosis import Diagnosis, Observed
from ...diagnosis.text import detail, evidence, headline, remedy_for, sure
from ...health.rule import Alarm
from ...messages import number, percent, steps, yaml_lines
from ...settings.config import RolloutCorrectionConfig
from .facts import Facts
from .log_charts import POINTS, more_trends, overview
from .page import Banner, Card, Group, Page, Section, table
from .rejection import reasons, rewards, total
from .token_charts import distribution, evidence_of, logged_histogram, who_is_rejected


def compose(runs: Sequence[Facts]) -> Page:
    """
    Compose the page of one run, or of two against each other.

    Args:
        runs (`Sequence[Facts]`):
            Facts about one run or two.

    Returns:
        [`~trl_rollout_corr.analysis.report.page.Page`].
    """
    one = runs[0] if len(runs) == 1 else None
    letters = [""] if one else ["A", "B"]
    shown = _overview(runs, letters)
    sections = [
        _diagnosis(*one.diagnosis) if one and one.diagnosis else None,
        shown,
        None if one else _differences(runs),
        _findings(runs, letters),
        *(_of_one(one, [chart.name for chart in shown.charts]) if one else []),
    ]
    return Page(
        f"Rollout report: {' against '.join(facts.name for facts in runs)}",
        [section for section in sections if section is not None],
        "" if one else _ends(runs),
        [_banner(facts, letter) for facts, letter in zip(runs, letters, strict=True)],
    )


def compose_diagnosis(
    name: str, observed: Observed, diagnosis: Diagnosis, experiments: Sequence[Sequence[str]] = ()
) -> Page:
    """Compose the page of a diagnosis, with the table of the experiments of a probe: its columns, then its rows."""
    sections = [_diagnosis(observed, diagnosis)]
    if experiments:
        columns, *rows = experiments
        sections.append(Section("experiments", "Counter-experiments", table=table(columns, rows)))
    return Page(f"Diagnosis: {name}", sections)


def _of_one(facts: Facts, shown: Sequence[str]) -> list[Section | None]:
    return [
        _settings(facts),
        _trends(facts, shown),
        _distribution(facts),
        _rejected(facts),
        Section("worst", "The worst tokens", worst=facts.worst) if facts.worst else None,
        Section("made-of", "Sources of this report", facts=_sources(facts)),
    ]


# Of one run or two --------------------------------------------------------------------------------------------------------


def _banner(facts: Facts, letter: str) -> Banner:
    names = ("Model", "Trainer", "Correction", "Date")
    about = [(name, value) for name, value in zip(names, facts.run.about, strict=True) if value]
    if not facts.log.empty:
        planned = f" of {facts.run.planned}" if facts.run.planned and facts.run.planned > 0 else ""
        about.append(("Last step", f"{facts.log.index[-1]}{planned}"))
    return Banner(f"{letter}: {facts.name}" if letter else "", facts.status, about, facts.run.damage)


def _ends(runs: Sequence[Facts]) -> str:
    """The rewards of two runs, or else their gaps, in a sentence."""
    tiles = [{tile.label: tile.value for tile in facts.status.tiles} for facts in runs]
    for label, words in (("Reward", "a reward of"), ("Gap (k3_kl, nats per token)", "a gap of")):
        first, second = (of_run.get(label, "-") for of_run in tiles)
        if "-" not in (first, second):
            return f"{runs[0].name} ends with {words} {first}, {runs[1].name} with {second}."
    return ""


def _overview(runs: Sequence[Facts], letters: Sequence[str]) -> Section:
    alarms = sorted(
        (finding.step, f"{letter}{i}", finding.rule)
        for facts, letter in zip(runs, letters, strict=True)
        for i, finding in enumerate(facts.findings, 1)
    )
    where = ", ".join(f"{name} ({rule}) at step {step}" for step, name, rule in alarms)
    text = f"Dashed red: first alarms, numbered as the findings: {where}." if alarms else "No alarm was raised."
    charts = overview({facts.name: facts.log for facts in runs}, [(step, name) for step, name, _ in alarms])
    return Section("overview", "What happened", text if charts else "", charts=charts)


def _findings(runs: Sequence[Facts], letters: Sequence[str]) -> Section:
    groups = []
    for facts, letter in zip(runs, letters, strict=True):
        cards = [_finding(finding, f"{letter}{i}") for i, finding in enumerate(facts.findings, 1)]
        groups.append(Group(cards or [_nothing_found(facts)], facts.name if letter else ""))
    return Section("findings", "Findings", groups=groups)


def _nothing_found(facts: Facts) -> Card:
    outside = facts.status.outside
    if facts.log.empty:
        return Card(facts.status.detail, level="warning")
    return Card(f"Nothing unhealthy was found in {facts.windows}.", outside, "warning" if outside else "healthy")


def _finding(finding: Alarm, name: str) -> Card:
    when = steps(finding.step, finding.last_step)
    return Card(
        finding.seen,
        finding.why,
        finding.severity,
        name,
        finding.advice,
        meta=f"{finding.rule}: `{finding.key}` {number(finding.value)}, {when}",
    )


def _differences(runs: Sequence[Facts]) -> Section | None:
    """Settings that differ between two runs with a dump."""
    configs = [dataclasses.asdict(facts.config) for facts in runs if facts.config]
    if len(configs) < 2:
        return None
    first, second = configs
    rows = [
        (key, *(yaml_lines({"": value}).removeprefix(": ").strip() for value in (first[key], second[key])))
        for key in first
        if first[key] != second[key] and not key.startswith(("rollout_dump", "rollout_correction_resolved"))
    ]
    columns = ("setting", *(facts.name for facts in runs))
    return Section("settings", "Settings that differ", table=table(columns, rows)) if rows else None


# Of one run ---------------------------------------------------------------------------------------------------------------


def _diagnosis(observed: Observed, diagnosis: Diagnosis) -> Section:
    cards = [Card(f"{headline(diagnosis)}.", detail(diagnosis), "healthy" if diagnosis.healthy else "warning")]
    for finding in diagnosis.findings:
        share, certainty = percent(round(finding.share, 2)), percent(round(finding.certainty, 2))
        advice = remedy_for(diagnosis, finding)
        cards.append(
            Card(
                _capital(finding.cause.title),
                f"{_capital(sure(finding))} ({certainty}), explains {share} of d^2: {evidence(finding)}.",
                "" if finding.cause.normal else "warning",
                remedy=advice.text,
                yaml=yaml_lines(advice.settings) if advice.settings else "",
                chart=evidence_of(observed, finding),
            )
        )
    return Section("diagnosis", "Diagnosis", groups=[Group(cards)])


def _settings(facts: Facts) -> Section:
    if facts.config is None:
        text = (
            "Bounds that fit this run are computed from its tokens. Set `rollout_dump_dir`, train some steps, and report on "
            "the folder of the run."
        )
        cards = [Card("A dump first", text, yaml="rollout_dump_dir: dump\nrollout_dump_steps: 10\n")]
    else:
        text = "Settings of the run, without those of the monitor and the dump."
        cards = [Card("This run", text, yaml=yaml_lines(_own(facts.config)))]
    best, healthy = facts.recommendation, facts.healthy
    if best is not None and healthy is not None:
        text = f"{_capital(best.reason)}."
        if healthy.alarm is not None and healthy.rows.any():
            text += f" Only steps to {healthy.last} are counted, before the alarm at step {healthy.alarm.step}."
        text += " `trl-rollout-corr compare` shows the effect of every preset on this dump."
        cards.append(Card("To try", text, yaml=yaml_lines(dict(best.settings))))
        if best.fitted:
            fits = "An alternative: bounds that fit the spread of these tokens."
            cards.append(Card("Bounds that fit", fits, yaml=yaml_lines(best.fitted)))
    return Section("settings", "Settings to try", groups=[Group(cards)])


def _own(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Fields that differ from their default, beside the preset."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(RolloutCorrectionConfig)}
    default = dataclasses.asdict(RolloutCorrectionConfig())
    left_out = ("rollout_monitor", "rollout_dump", "rollout_correction_resolved")
    about_loss = [name for name in fields if not name.startswith(left_out)]
    return {name: fields[name] for name in about_loss if fields[name] != default[name] or name == "rollout_is"}


def _trends(facts: Facts, shown: Sequence[str]) -> Section | None:
    alarms: dict[str, list[tuple[int, str]]] = {}
    for i, finding in sorted(enumerate(facts.findings, 1), key=lambda pair: pair[1].step):
        alarms.setdefault(finding.key, []).append((finding.step, str(i)))
    charts = more_trends(facts.log, alarms, shown)
    if not charts:
        return None
    text = "Shaded green: healthy. Dashed red: where an alarm was first raised, with the number of its finding."
    if facts.run.logged_by == "dump":
        text = f"The dump has no log, so the metrics are computed from its sequences drawn at random. {text}"
    if len(facts.log) > POINTS:
        text += (
            " Lines are means over windows of steps, and the pale bands reach from the lowest to the highest value."
        )
    return Section("trends", "More trends", text, charts=charts)


def _distribution(facts: Facts) -> Section | None:
    name, title, found = "distribution", "How far apart the policies are", facts.statistics
    if found is None:
        chart = logged_histogram(facts.log)
        return Section(name, title, "From the log; a dump has more detail.", charts=[chart]) if chart else None
    if found.size == 0:
        return Section(name, title, "d is 0 at every token: the policies agree.")
    text = "Counted over the sequences that were drawn at random, which represent the batch."
    if not found.at_random:
        text = (
            "No sequence of this dump was drawn at random: these are the worst ones, and do not represent the batch."
        )
    return Section(name, title, text, charts=distribution(found))


def _rejected(facts: Facts) -> Section | None:
    families = {family: shares for family, shares in facts.shares.items() if len(shares) > 1}
    if not families:
        nothing = "The settings reject no tokens and apply no weights."
        return Section("rejected", "Who is rejected", nothing) if facts.config else None
    first = next(iter(facts.shares.values()))
    counted = "tokens" in first
    parts = [
        "Counted over the sequences drawn at random."
        if counted
        else "Means of the logged shares, over whole batches.",
        total(first),
        reasons(facts.log, facts.config) if facts.config else "",
        rewards(facts.log),
        "Down-weighted: mean of max(0, 1 - coefficient) over tokens not rejected.",
    ]
    charts = [who_is_rejected(family, shares) for family, shares in families.items()]
    return Section("rejected", "Who is rejected", " ".join(filter(None, parts)), charts=charts)


def _sources(facts: Facts) -> list[tuple[str, str]]:
    """The steps, sequences and tokens that the page is made of: labels and values."""
    found = []
    if facts.run.logged_by == "trainer" and not facts.log.empty:
        found.append(("Logged steps", f"{_span(facts.log.index)}, {facts.windows}"))
    if facts.run.dump is not None:
        sequences = facts.run.dump.sequences
        columns = (sequences.sampled, sequences.worst, sequences.mask, sequences.counted, sequences.broken)
        sampled, worst, tokens, counted, broken = (f"{int(column.sum()):,}" for column in columns)
        found += [
            ("Dumped steps", _span(sequences.step)),
            (
                "Sequences",
                f"{len(sequences):,}: {sampled} drawn at random, {worst} with the worst tokens (some are both)",
            ),
            ("Tokens of the loss", f"{tokens}, {counted} in the sequences drawn at random"),
        ]
        if sequences.broken.any():
            found.append(("Not finite", f"{broken} tokens without a finite log-ratio"))
    return found


def _span(of: Any) -> str:
    first, last = int(min(of)), int(max(of))
    return f"{first}" if first == last else f"{first} to {last}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
