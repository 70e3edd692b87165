"""What a report says, before it is HTML or Markdown."""

import math
from typing import Any, NamedTuple

import numpy as np

from ...metrics import PREFIX
from ...rules import HEALTHY, Finding, examine
from .advice import Settings, advice, in_short
from .distribution import distribution, logged_histogram
from .drawing import Chart, number, percent
from .rejected import Share, counted_shares, logged_shares, shares
from .source import Source
from .summary import bounds
from .table import Table
from .tokens import Excerpt, Token, broken_tokens, worst_completions, worst_tokens
from .trends import POINTS, trends


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
        facts (`list[tuple[str, str]]`):
            What it is about: label and value.
        findings (`list[Finding]`):
            What is unhealthy.
        nothing (`str`):
            What to say if nothing is.
        outside (`str`):
            Metrics that left their healthy band at the last step; empty if none did.
        settings (`list[Settings]`):
            Settings of the run, and those to try.
        sections (`list[Section]`):
            Charts.
        worst (`list[Token]`):
            Tokens with the largest log-ratio.
        excerpts (`list[Excerpt]`):
            Completions around them.
        broken (`list[Token]`):
            Some tokens without a log-ratio.
        n_broken (`int`):
            How many there are.
        has_tokens (`bool`):
            Whether there is a dump.
    """

    name: str
    facts: list[tuple[str, str]]
    findings: list[Finding]
    nothing: str
    outside: str
    settings: list[Settings]
    sections: list[Section]
    worst: list[Token]
    excerpts: list[Excerpt]
    broken: list[Token]
    n_broken: int
    has_tokens: bool


def build(source: Source) -> Report:
    """
    Make a report.

    Args:
        source ([`~trl_rollout_corr.analysis.report.source.Source`]):
            A run, a dump, or both.

    Returns:
        [`Report`]: what it says.
    """
    table, config = source.table, source.config
    findings = examine(source.logs, config)
    worst = worst_tokens(table) if table is not None else []
    return Report(
        source.name,
        _facts(source),
        findings,
        f"Nothing unhealthy was found in {_windows(source)}." if source.logs else "There are no metrics to look at.",
        _outside(source.logs),
        advice(source, findings),
        [section for section in (_trends(source, findings), _distribution(source), _rejected(source)) if section],
        worst,
        worst_completions(worst, table) if table is not None else [],
        broken_tokens(table) if table is not None else [],
        int(table.broken.sum()) if table is not None else 0,
        table is not None,
    )


def _outside(logs: list[dict[str, Any]]) -> str:
    """The rules wait for more than one unhealthy window, so that the last ones may have left a band without a finding."""
    last = logs[-1] if logs else {}
    names = [
        f"`{name}` ({number(value)})"
        for name, (low, high) in HEALTHY.items()
        if (value := last.get(PREFIX + name)) is not None
        and ((low is not None and value < low) or (high is not None and value > high))
    ]
    return f"At the last step, these were outside their healthy bands: {', '.join(names)}." if names else ""


def _windows(source: Source) -> str:
    n = len(source.logs)
    kind = "logging window" if source.logged_by == "trainer" else "dumped step"
    return f"{n} {kind}{'' if n == 1 else 's'}"


# Facts --------------------------------------------------------------------------------------------------------------------


def _facts(source: Source) -> list[tuple[str, str]]:
    facts = []
    if source.logged_by == "trainer" and source.logs:
        facts.append(("Logged steps", f"{_span([entry['step'] for entry in source.logs])}, {_windows(source)}"))
    if source.table is not None:
        facts += _facts_of_dump(source.table)
    if source.config is not None:
        facts.append(("Settings", in_short(source.config)))
    return facts


def _facts_of_dump(table: Table) -> list[tuple[str, str]]:
    sampled, worst = int(table.sampled.sum()), int(table.worst.sum())
    facts = [
        ("Dumped steps", _span(table.step)),
        ("Sequences", f"{len(table):,}: {sampled:,} drawn at random, {worst:,} with the worst tokens (some are both)"),
        (
            "Tokens of the loss",
            f"{int(table.mask.sum()):,}, {int(table.batch.sum()):,} in the sequences drawn at random",
        ),
    ]
    if table.broken.any():
        facts.append(("Not finite", f"{int(table.broken.sum()):,} tokens without a finite log-ratio"))
    return facts


def _span(steps: Any) -> str:
    first, last = int(min(steps)), int(max(steps))
    return f"{first}" if first == last else f"{first} to {last}"


# Sections -----------------------------------------------------------------------------------------------------------------


def _trends(source: Source, findings: list[Finding]) -> Section | None:
    if not source.logs:
        return None
    text = "Shaded green: healthy. Dashed red: where an alarm was first raised."
    if source.logged_by == "dump":
        text = f"The dump has no log, so these are computed from its sequences drawn at random. {text}"
    if len(source.logs) > POINTS:
        text += (
            " Lines are means over windows of steps, and the pale bands reach from the lowest to the highest value."
        )
    return Section("trends", "Trends", text, trends(source.logs, findings))


def _distribution(source: Source) -> Section | None:
    title = "How far apart the policies are"
    table = source.table
    if table is None or not table.batch.any():
        chart = logged_histogram(source.logs)
        return Section("distribution", title, "From the log; a dump says more.", [chart]) if chart else None
    text = "d = log p of the trainer - log p of the sampler, of a token of the loss. "
    if table.sampled.any():
        text += "Counted over the sequences that were drawn at random, which represent the batch."
    else:
        text += (
            "No sequence of this dump was drawn at random: these are the worst ones, and do not represent the batch."
        )
    return Section("distribution", title, text, distribution(table, bounds(source.config)))


def _rejected(source: Source) -> Section | None:
    title = "Who is rejected"
    families, text = logged_shares(source.logs), "Means of what was logged, over the whole batch."
    if not families and source.table is not None and source.table.batch.any():
        families = counted_shares(source.table, source.config)
        text = "Counted over the sequences drawn at random."
    charts = shares(families)
    if not charts:
        if source.table is None:
            return None
        return Section("rejected", title, "Nothing: the settings reject no tokens and apply no weights.", [])
    total = _total(next(iter(families.values())))
    text += f" {total}{_rewards(source.logs)} Down-weighted: mean of max(0, 1 - coefficient) over tokens not rejected."
    return Section("rejected", title, text, charts)


def _rewards(logs: list[dict[str, Any]]) -> str:
    """Mean rewards of completions that keep a token, and of those that keep none."""
    means = []
    for name in ("kept", "rejected"):
        values = [entry[key] for entry in logs if (key := f"{PREFIX}{name}/reward_mean") in entry]
        means.append(np.mean(values) if values else math.nan)
    kept, rejected = means
    if not math.isfinite(kept + rejected):
        return ""
    return f" The mean reward is {number(rejected)} where a completion is rejected as a whole, and {number(kept)} elsewhere."


def _total(found: list[Share]) -> str:
    """Over all tokens, where their number is known."""
    if found[0].tokens is None:
        return "Whoever loses most is learned from least."
    tokens = sum(share.tokens for share in found)
    parts = []
    for name, attribute in (("rejected", "rejected"), ("down-weighted", "downweighted")):
        values = [getattr(share, attribute) for share in found]
        if None not in values:
            mean = math.fsum(value * share.tokens for value, share in zip(values, found, strict=True)) / tokens
            parts.append(f"{percent(mean)} {name}")
    return f"Of {tokens:,} tokens: {', '.join(parts)}."
