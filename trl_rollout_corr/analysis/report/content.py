"""What a report says, before it is HTML or Markdown."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...diagnosis import Diagnosis, Observed, diagnose
from ...dumps.reading import Sequences
from ...health.examine import Finding
from ...health.rules import examine
from ...messages import PREFIX, number, percent
from ..run import Run
from .advice import Advice, advise
from .distribution import distribution, logged_histogram
from .drawing import Chart, Story
from .rejected import reasons, rejected
from .shares import Share, counted_shares, logged_shares
from .story import story
from .summary import summarise
from .tokens import Worst, find_worst
from .trends import POINTS, trends
from .verdict import Verdict, judge, left_bands


# Before the first of these words is used
TERMS = (
    "A completion is drawn by one policy, the *sampler* (the inference engine), and learned from by another, the *trainer*. "
    "*d* is the log-probability of a token under the trainer minus that under the sampler, in nats: 0 where they agree. "
    "*k3_kl*, the gap, is the mean of exp(d) - 1 - d over tokens, an estimate of the KL divergence from sampler to trainer. "
    "A *weight* is exp(d) within bounds; the *effective sample size* is the share of a batch that weights leave. *Rejected* "
    "tokens do not take part in the loss, and the *effective learning rate* is the part of the step that weights and "
    "rejection leave."
)


class Section(NamedTuple):
    """A section: its identifier, title, introduction and charts."""

    name: str
    title: str
    text: str
    charts: list[Chart]


class Report(NamedTuple):
    """
    All that a report says.

    Args:
        name (`str`):
            Name of the run or dump.
        verdict ([`~trl_rollout_corr.analysis.report.verdict.Verdict`]):
            How it is doing.
        about (`list[tuple[str, str]]`):
            Model, trainer, correction, date and steps, as far as they are known: label and value.
        damage (`list[str]`):
            What could not be read, or is missing.
        story ([`~trl_rollout_corr.analysis.report.drawing.Story`] or `None`):
            What happened, in one picture; `None` without metrics.
        facts (`list[tuple[str, str]]`):
            What it is made of: label and value.
        findings (`list[Finding]`):
            What is unhealthy.
        nothing (`str`):
            What to say if nothing is.
        outside (`str`):
            Metrics that left their healthy band at the last step; empty if none did.
        advice (`list[Advice]`):
            Settings of the run, and those to try.
        sections (`list[Section]`):
            Charts.
        worst (`Worst` or `None`):
            Tokens that are furthest off, if there is a dump.
        diagnosis (`tuple[Observed, Diagnosis]` or `None`):
            What the matter is with the dump, and what it was seen in, if there are enough tokens.
    """

    name: str
    verdict: Verdict
    about: list[tuple[str, str]]
    damage: list[str]
    story: Story | None
    facts: list[tuple[str, str]]
    findings: list[Finding]
    nothing: str
    outside: str
    advice: list[Advice]
    sections: list[Section]
    worst: Worst | None
    diagnosis: tuple[Observed, Diagnosis] | None


def build(run: Run) -> Report:
    """
    Make a report.

    Args:
        run ([`~trl_rollout_corr.analysis.run.Run`]):
            A run, a dump, or both.

    Returns:
        [`Report`]: what it says.
    """
    findings = examine(run.logs, run.dump.config if run.dump else None)
    told = story({run.name: (run.logs, findings)})
    return Report(
        run.name,
        judge(run.logs, findings, _windows(run)),
        _about(run),
        run.damage,
        told,
        _facts(run),
        findings,
        f"Nothing unhealthy was found in {_windows(run)}." if run.logs else "There are no metrics to look at.",
        left_bands(run.logs),
        advise(run),
        [section for section in (_trends(run, findings, told), _distribution(run), _rejected(run)) if section],
        find_worst(run.dump.sequences) if run.dump else None,
        _diagnosed(run),
    )


def _diagnosed(run: Run) -> tuple[Observed, Diagnosis] | None:
    if run.dump is None:
        return None
    dump = run.dump
    observed = Observed(dump.sequences, dump.context, dump.written.settings, dump.written.about)
    try:
        return observed, diagnose(observed)
    except ValueError:  # too few tokens
        return None


def _windows(run: Run) -> str:
    n = len(run.logs)
    kind = "logging window" if run.logged_by == "trainer" else "dumped step"
    return f"{n} {kind}{'' if n == 1 else 's'}"


def _about(run: Run) -> list[tuple[str, str]]:
    names = ("Model", "Trainer", "Correction", "Date")
    found = [(name, value) for name, value in zip(names, run.about, strict=True) if value]
    if run.logs:
        last = run.logs[-1]["step"]
        planned = f" of {run.planned}" if run.planned and run.planned > 0 else ""
        found.append(("Last step", f"{last}{planned}"))
    return found


# Facts --------------------------------------------------------------------------------------------------------------------


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = []
    if run.logged_by == "trainer" and run.logs:
        facts.append(("Logged steps", f"{_span(entry['step'] for entry in run.logs)}, {_windows(run)}"))
    if run.dump is not None:
        facts += _facts_of_dump(run.dump.sequences)
    return facts


def _facts_of_dump(sequences: Sequences) -> list[tuple[str, str]]:
    columns = (sequences.sampled, sequences.worst, sequences.mask, sequences.counted, sequences.broken)
    sampled, worst, tokens, counted, broken = (f"{int(column.sum()):,}" for column in columns)
    facts = [
        ("Dumped steps", _span(sequences.step)),
        ("Sequences", f"{len(sequences):,}: {sampled} drawn at random, {worst} with the worst tokens (some are both)"),
        ("Tokens of the loss", f"{tokens}, {counted} in the sequences drawn at random"),
    ]
    if sequences.broken.any():
        facts.append(("Not finite", f"{broken} tokens without a finite log-ratio"))
    return facts


def _span(steps: Iterable[int]) -> str:
    steps = sorted(map(int, steps))
    return f"{steps[0]}" if steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}"


# Sections -----------------------------------------------------------------------------------------------------------------


def _trends(run: Run, findings: list[Finding], told: Story | None) -> Section | None:
    charts = trends(run.logs, findings, {panel.name for panel in told.panels} if told else ())
    if not charts:
        return None
    text = "Shaded green: healthy. Dashed red: where an alarm was first raised."
    if run.logged_by == "dump":
        text = f"The dump has no log, so these are computed from its sequences drawn at random. {text}"
    if len(run.logs) > POINTS:
        text += (
            " Lines are means over windows of steps, and the pale bands reach from the lowest to the highest value."
        )
    return Section("trends", "More trends", text, charts)


def _distribution(run: Run) -> Section | None:
    title = "How far apart the policies are"
    if run.dump is None or not run.dump.sequences.counted.any():
        chart = logged_histogram(run.logs)
        return Section("distribution", title, "From the log; a dump says more.", [chart]) if chart else None
    summary = summarise(run.dump.sequences, run.dump.config)
    if summary.spread == 0:
        return Section("distribution", title, "Not at all: d is 0 at every token.", [])
    text = "Counted over the sequences that were drawn at random, which represent the batch."
    if not summary.at_random:
        text = (
            "No sequence of this dump was drawn at random: these are the worst ones, and do not represent the batch."
        )
    return Section("distribution", title, text, distribution(summary))


def _rejected(run: Run) -> Section | None:
    title = "Who is rejected"
    families, text = logged_shares(run.logs), "Means of what was logged, over the whole batch."
    if not families and run.dump is not None and run.dump.sequences.counted.any():
        families, text = (
            counted_shares(run.dump.sequences, run.dump.config),
            "Counted over the sequences drawn at random.",
        )
    charts = rejected(families)
    if charts:
        total = _total(next(iter(families.values())))
        why = f" {said}" if run.dump and (said := reasons(run.logs, run.dump.config)) else ""
        text += (
            f" {total}{why}{_rewards(run)} Down-weighted: mean of max(0, 1 - coefficient) over tokens not rejected."
        )
        return Section("rejected", title, text, charts)
    if run.dump is None:
        return None
    return Section("rejected", title, "Nothing: the settings reject no tokens and apply no weights.", [])


def _rewards(run: Run) -> str:
    """Mean rewards of completions that keep a token, and of those that keep none."""
    means = {}
    for name in ("kept", "rejected"):
        values = [entry[key] for entry in run.logs if (key := f"{PREFIX}{name}/reward_mean") in entry]
        means[name] = np.mean(values) if values else math.nan
    if not math.isfinite(sum(means.values())):
        return ""
    kept, none = number(means["kept"]), number(means["rejected"])
    return f" The mean reward is {none} where a completion is rejected as a whole, and {kept} elsewhere."


def _total(shares: list[Share]) -> str:
    """Over all tokens, where their number is known."""
    if shares[0].tokens is None:
        return "Whoever loses most is learned from least."
    tokens, parts = [share.tokens or 0 for share in shares], []
    for name, values in (
        ("rejected", [share.rejected for share in shares]),
        ("down-weighted", [share.downweighted for share in shares]),
    ):
        known = [value for value in values if value is not None]
        if len(known) == len(shares):
            mean = math.fsum(value * n for value, n in zip(known, tokens, strict=True)) / sum(tokens)
            parts.append(f"{percent(mean)} {name}")
    return f"Of {sum(tokens):,} tokens: {', '.join(parts)}."
