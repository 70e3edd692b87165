"""Composition of a page from the facts about one or two runs: sections, cards, tables and charts."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ...messages import capitalized
from ...settings.config import settings_of_preset
from ...settings.presets import UNSET
from ...settings.resolve import Settings
from ...settings.trl_correction import given_to_trl
from ..decision import in_words
from ..diagnosis import trl_log
from ..diagnosis.text import detail, evidence_in_words, explains, headline, remedy_for, sure
from ..diagnosis.trl_log import RatioCourse, suspicions
from ..dump.sequences import Sequences
from ..formats import number, steps, yaml_lines
from ..monitor.rule import Alarm
from .examples import choose_completions
from .facts import Facts, state_of
from .log_charts import main_numbers, more_trends, overview, rejected
from .page import Banner, Card, Page, Section
from .run import Run
from .token_tables import Lost, find_lost, find_worst


def compose(runs: Sequence[Facts]) -> Page:
    """Compose the page of one run, or of two against each other."""
    title = f"Rollout report: {' against '.join(facts.name for facts in runs)}"
    banners = [_banner(facts) for facts in runs]
    sections: list[Section | None] = [overview(runs), _alarms(runs)]
    if len(runs) > 1:
        sections.append(_differences(runs))
    else:
        (one,) = runs
        settings = one.run.settings
        sections = [_diagnosis(one), *sections, _settings(one), more_trends(one), rejected(one)]
        if one.run.dump and (sequences := one.run.dump.sequences):
            lost = find_lost(sequences, settings)
            sections += _tokens(sequences, lost, settings)
            sections.append(Section("worst", "The worst tokens", worst=find_worst(sequences)))
    return Page(title, banners, [section for section in sections if section is not None])


# Of one run or two ---------------------------------------------------------------------------------------------------


def _banner(facts: Facts) -> Banner:
    run = facts.run
    about = [(name.capitalize(), value) for name, value in run.about.items() if value]
    if not run.log.empty:
        about.append(("Logged steps", f"{_span(run.log.index)}, {facts.windows}"))
    if run.dump is not None:
        sequences = run.dump.sequences
        both = int((sequences.sampled & sequences.worst).sum())
        drawn = f"{int(sequences.sampled.sum()):,} drawn at random and {int(sequences.worst.sum()):,} the worst"
        drawn += f", {both:,} of them both" if both else ""
        about.append(("Dumped steps", f"{_span(sequences.step)}, in {run.dump.path.name}"))
        if run.dump.sample:
            about.append(("Sample", f"{run.dump.sample}."))
        about.append(("Completions", f"{len(sequences):,}, {drawn}; {int(sequences.mask.sum()):,} tokens of the loss"))
    title = f"{facts.letter}: {facts.name}" if facts.letter else ""
    return Banner(title, *state_of(facts), main_numbers(run.log), about, run.damage)


def _alarms(runs: Sequence[Facts]) -> Section:
    cards = []
    for facts in runs:
        cards += [_alarm(alarm, f"{facts.letter}{i}") for i, alarm in enumerate(facts.alarms, 1)]
        if not facts.alarms:
            level, _, reason = state_of(facts)
            cards.append(Card(f"{facts.letter}: {reason}" if facts.letter else reason, "", level))
    return Section("findings", "Findings", cards=cards)


def _alarm(alarm: Alarm, name: str) -> Card:
    meta = f"{alarm.bound}: `{alarm.key}` {number(alarm.value)}, {steps(alarm.step, alarm.last_step)}"
    return Card(alarm.seen, alarm.why, alarm.severity, name, alarm.advice, meta=meta)


def _differences(runs: Sequence[Facts]) -> Section | None:
    """Settings that differ between two runs with a dump."""
    settings = [(facts.name, _own(facts.run)) for facts in runs if facts.run.settings]
    if len(settings) < 2:
        return None
    (first, of_first), (second, of_second) = settings
    rows = [
        {
            "setting": name,
            first: yaml_lines({"": of_first.get(name)})[2:],
            second: yaml_lines({"": of_second.get(name)})[2:],
        }
        for name in dict.fromkeys([*of_first, *of_second])
        if of_first.get(name) != of_second.get(name)
    ]
    return Section("settings", "Settings that differ", table=pd.DataFrame(rows)) if rows else None


def _own(run: Run) -> dict[str, Any]:
    """The preset of a run with a dump, and the fields that differ from it; with `trl`, TRL's fields."""
    assert run.settings
    assert run.dump
    fields = run.settings.fields
    preset = fields["rollout_correction"]
    alone = settings_of_preset(preset).fields
    left_out = ("rollout_monitor", "rollout_dump")
    changed = {x: y for x, y in fields.items() if y != alone[x] and not x.startswith(left_out)}
    if run.settings.by_trl:
        of_trl = {*UNSET, "rollout_nan_policy"}
        changed = {x: y for x, y in changed.items() if x not in of_trl} | given_to_trl(run.dump.fields)
    return {"rollout_correction": preset, **changed}


# Of one run ----------------------------------------------------------------------------------------------------------


def _diagnosis(facts: Facts) -> Section | None:
    if facts.course is not None:
        return _suspected(facts.course)
    if (diagnosis := facts.diagnosis) is None:
        return None
    level = "healthy" if diagnosis.healthy else "warning"
    cards = [Card(f"{headline(diagnosis)}.", detail(diagnosis), level)]
    for finding in diagnosis.findings:
        remedy, advised = remedy_for(diagnosis, finding)
        cards.append(
            Card(
                capitalized(finding.cause.title),
                f"{capitalized(sure(finding))}, {explains(finding)}: {evidence_in_words(finding)}.",
                "" if diagnosis.expected or finding.cause.normal else "warning",
                remedy=remedy,
                yaml=yaml_lines(advised),
            )
        )
    return Section("diagnosis", "Diagnosis", cards=cards)


def _suspected(course: RatioCourse) -> Section:
    """Section about what the log of TRL's own trainer suggests."""
    found = suspicions(course)
    cards = [
        Card(
            f"{trl_log.suspicion_headline(found)}.", trl_log.course_in_words(course), "warning" if found else "healthy"
        )
    ]
    for it in found:
        cards.append(Card(capitalized(it.title), it.text, "warning", remedy=it.remedy, yaml=yaml_lines(it.advised)))
    return Section("diagnosis", "Diagnosis", cards=cards)


def _tokens(sequences: Sequences, lost: Lost, settings: Settings | None) -> list[Section]:
    """Sections about the tokens that lose their gradient to the correction."""
    drawn = "completions that were drawn at random"
    if not lost.drawn:
        drawn = "completions, none of which was drawn at random, so that they do not represent the batch"
    explained = (
        f"The tables count {lost.completions:,} {drawn}. Each row is about one token of the vocabulary, and shows the "
        "last place where it was counted. `Share of all` is its share of all tokens with this sign of the advantage. "
        "The probabilities are means over the counted places."
    )
    text = f"{explained} {lost.text}".strip() if lost.tables else lost.text
    of_single = (
        "Each token is marked with what the correction did to it. Point at a token, or tap it, to see its "
        "probabilities, its factor on the policy gradient, and which rule rejected it; the Tab key goes from one "
        "changed token to the next. A factor from 0.95 to 1.05 counts as full. The completions that lost the most "
        "gradient come first: what the factor of each token lacks to 1 is added up and multiplied by |advantage|. A "
        "long completion is shortened to the places where most was changed."
    )
    chosen = choose_completions(sequences, settings)
    return [
        Section("lost", "Which tokens lose their gradient", text, lost=lost),
        Section("completions", "Some completions, token by token", of_single, completions=chosen),
    ]


def _settings(facts: Facts) -> Section:
    settings = facts.run.settings
    if settings is None and facts.run.dump is not None:
        text = "The dump does not say with which settings it was written, so this page assumes no correction."
        decision = facts.diagnosis.decision if facts.diagnosis else None
        said, fields = (in_words(decision), decision.set) if decision else ("", {})
        cards = [Card("Unknown settings", f"{text} {said}".strip(), yaml=yaml_lines(fields))]
        return Section("settings", "Settings", cards=cards)
    if settings is None:
        text = "Set `rollout_dump_dir`, train a few steps, and report on the folder of the run."
        lines = "rollout_dump_dir: dump\n"
        if facts.course is not None:
            text = f"Use a trainer of this package, which keeps the loss with `rollout_correction: trl`. {text}"
            lines = f"rollout_correction: trl\n{lines}"
        return Section("settings", "Settings to try", cards=[Card("A dump first", text, yaml=lines)])
    text = "Settings of the run, except for the monitor and the dump."
    of_run = Card("This run", text, yaml=yaml_lines(_own(facts.run)))
    if facts.diagnosis is None:
        return Section("settings", "Settings", cards=[of_run])
    decision = facts.diagnosis.decision
    if not decision.set:
        return Section("settings", "Settings", cards=[of_run, Card("Leave them", in_words(decision))])
    shows = "`trl-rollout-corr compare` shows the effect of every preset on this dump."
    to_try = Card("To try", f"{in_words(decision)} {shows}", yaml=yaml_lines(decision.set))
    return Section("settings", "Settings to try", cards=[of_run, to_try])


def _span(of: Any) -> str:
    first, last = int(min(of)), int(max(of))
    return f"{first}" if first == last else f"{first} to {last}"
