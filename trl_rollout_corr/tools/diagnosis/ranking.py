"""The search: the order of the tests, and the certainty of the causes that they find."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from ...settings.resolve import Settings
from ..bands import ROUNDED
from ..decision import Decision, decide, gap_of
from ..monitor.rules import BOUNDS
from ..run_facts import clips_by_trl
from .arrivals import NONE, with_equal_weights
from .causes import CAUSES, Cause, Test
from .location import where
from .measures import FLOOR, LARGE, POSSIBLE, Evidence, bounded
from .observed import DumpedTokens
from .other_causes import OTHER_CAUSES
from .precision import noise_floor


LIKELY = 0.7  # certainty above which a cause is more than possible
LEAST = 30  # fewest tokens for a diagnosis
_AS_WELL = 0.9  # another cause above this part of certainty times share explains the dump as well
_REST = 0.3  # unexplained share of d^2 above which the search looks for diffuse causes


_ENOUGH = 200  # fewest tokens of a part that is looked at alone
_THERE = "looked at alone, these completions show more: "


class Stage(NamedTuple):
    """Causes to look for together."""

    causes: tuple[str, ...]  # their names; the search takes the cause that explains most
    several: bool = False  # the search takes all causes found, because each acts on other tokens
    ends: bool = False  # a cause ends the search, because its effects could be mistaken for later causes
    floor: bool = True  # only where the log-ratio is large enough to matter
    fallback: tuple[str, ...] = ()  # names of causes to find by their fallback test

    @property
    def tests(self) -> list[tuple[str, Test]]:
        """Name and test of each cause."""
        late = ((name, CAUSES[name].fallback) for name in self.fallback)
        return [(name, CAUSES[name].test) for name in self.causes] + [(name, test) for name, test in late if test]


STAGES = (
    Stage(("nan_rows", "missing"), several=True, floor=False),
    Stage(("shift",), ends=True),
    Stage(("offset",), ends=True),
    Stage(("not_sampled",), ends=True),
    Stage(("later_turns",), ends=True),
    Stage(("first_token", "last_token", "seams"), several=True, floor=False),
    Stage(("by_advantage",), ends=True),
    Stage(("prefix_cache",), ends=True),
    Stage(("some_prompts",), ends=True),
    Stage(("some_completions",), ends=True),
    Stage(("padding", "dropout"), ends=True),
    Stage(("changed",), ends=True),
    Stage(("recorded",), ends=True),
    Stage(
        ("stale", "own_updates", "never_pushed", "adapter_missing", "pushed_in_part", "standing_still", "lora_merge")
    ),
    Stage(("truncation", "penalty", "temperature")),
)
# For the share of d^2 that no cause above explains
DIFFUSE = (
    Stage(("routing",), ends=True),
    Stage(("kv_cache", "quantised", "weights"), ends=True),
    Stage(("head", "rounding"), fallback=("stale", "weights")),
)
# Asked last, and however small the gap is
LAST = (Stage(("other_draws",), floor=False),)


class Finding(NamedTuple):
    """A cause that was found."""

    name: str  # key of `CAUSES` or `OTHER_CAUSES`
    certainty: float  # from 0.5 to 0.99: an order and the limits of the three words, and no probability
    share: float  # of the sum of squared log-ratios that it explains
    evidence: Evidence

    @property
    def cause(self) -> Cause:
        return OTHER_CAUSES.get(self.name) or CAUSES[self.name]


class Diagnosis(NamedTuple):
    """The causes of the gap in a dump."""

    verdict: str  # "found", "unknown", "small" or "nothing"
    findings: list[Finding]  # by share, normal ones last; empty unless the verdict is "found"
    size: float  # root mean square of the log-ratio, in nats
    k3: float  # `rollout_corr/k3_kl`
    floor: float | None  # the gap relative to the trainer's difference from itself; `None` if that is no baseline
    n_tokens: int
    n_sequences: int
    settings: Settings | None = None  # in effect in the run; `None` if unknown
    fields: Mapping[str, object] = {}  # what the run wrote of its configuration, with fields of TRL
    coarser: str = ""  # type of a sampler that rounds more coarsely than the trainer
    quiet: bool = False  # the log of the run shows no alarm and only small gaps
    where: tuple[str, ...] = ()  # sentences about the tokens, completions, turns or prompts that cause the whole gap
    surprise: tuple[float, float, float] | None = None  # mean of -log p, entropy, and error; `None` if unknown
    harmed: bool = False  # the run shows an alarm that a correction concerns, or lost much of its gradient
    about: Mapping[str, str] = {}  # what the run wrote of its model and its engine
    fresh: bool = False  # all samples are known to be of the weights of the policy that is corrected for

    @property
    def corrects(self) -> bool:
        """True if the loss corrects for the gap, here or in TRL."""
        acts = self.settings is not None and self.settings.corrects
        return acts or clips_by_trl(self.settings, self.fields)

    @property
    def decision(self) -> Decision:
        """The correction to set."""
        hides = any(not (x.cause.may_correct or x.cause.normal) and x.certainty > LIKELY for x in self.findings)
        harmed = self.harmed or any(x.cause.harms for x in self.findings)
        # what a correction tolerates without an alarm is small
        gap = "small" if self.corrects and self._is_quiet and self.size >= LARGE else gap_of(self.size)
        return decide(self.settings, self.fields, gap=gap, is_harmed=harmed, hides_mistake=hides)

    @property
    def _is_quiet(self) -> bool:
        """True if neither the log of the run nor its dump shows a gap above the limit of a corrected run."""
        return self.quiet and self.k3 <= BOUNDS["k3_corrected"].limit

    @property
    def expected(self) -> bool:
        """
        True if the gap comes only from weights that are quantised or announced as old, and from normal causes, and no
        correction is to be set.
        """
        found = [x for x in self.findings if not x.cause.normal]
        announced = all(x.cause.announced and x.evidence.numbers.get("oldest", 1) for x in found)
        small = self.size < LARGE or self._is_quiet
        return bool(found) and small and announced and not self.decision.set

    @property
    def healthy(self) -> bool:
        """True if nothing needs to be done, because the gap is absent, normal or expected."""
        normal = self.verdict == "found" and self.size < LARGE and all(x.cause.normal for x in self.findings)
        return (self.verdict in ("nothing", "small") or normal or self.expected) and not self.decision.set


def diagnose(tokens: DumpedTokens, without: Collection[str] = ()) -> Diagnosis:
    """Find the causes, except the absent ones in `without`. Raises a `ValueError` of one line for too few tokens."""
    if len(tokens) < LEAST and not len(tokens.broken.row):
        raise ValueError(
            f"{len(tokens)} tokens of the loss come with log-probabilities of both policies: too few for a diagnosis"
        )
    findings = _all_findings(tokens, without)
    verdict = "found" if findings else _without_cause(tokens)
    floor = None if tokens.coarser else noise_floor(tokens)
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        size=tokens.size,
        k3=tokens.k3,
        floor=floor**-0.5 if floor else None,
        n_tokens=len(tokens),
        n_sequences=int((tokens.lengths > 0).sum()),
        settings=tokens.settings,
        fields=tokens.fields,
        coarser=tokens.coarser,
        quiet=tokens.log.quiet,
        where=() if verdict == "nothing" else tuple(where(tokens)),
        surprise=tokens.surprise,
        harmed=tokens.log.harmed,
        about=tokens.about,
        fresh=bool(tokens.is_fresh.all()),
    )


def _all_findings(tokens: DumpedTokens, without: Collection[str]) -> list[Finding]:
    """Findings in the order in which they are told: by what they explain, and normal causes last."""
    if with_equal_weights(tokens) < NONE:
        without = {*without, *_those(lambda cause: cause.at_equal_weights)}  # measured at the first push
    findings, ended = _look(tokens, STAGES, without)
    rest = 1 - sum(finding.share for finding in findings)
    # causes that act on all tokens hide the diffuse ones
    if not ended and all(x.cause.of_some_tokens for x in findings) and rest > _REST and _matters(tokens):
        diffuse, _ = _look(tokens, DIFFUSE, without)
        findings += [finding._replace(share=finding.share * rest) for finding in diffuse]
    if all(finding.cause.normal for finding in findings) and tokens.size < LARGE:
        findings += _look(tokens, LAST, without)[0]
    # tokens without a log-ratio come first, and normal causes last, however large
    findings.sort(key=lambda x: (not x.cause.without_ratio, x.cause.normal, -x.share * x.certainty))
    faults = [finding for finding in findings if not finding.cause.normal]
    normal = [finding for finding in findings if finding.cause.normal]
    faults = [x for finding in faults for x in (finding, *_within(tokens, finding, without))]
    return faults + _other(tokens) + normal  # a fault also causes the effects of a large gap


def _those(have: Callable[[Cause], bool]) -> set[str]:
    """Names of the causes that have a property."""
    return {name for name, cause in CAUSES.items() if have(cause)}


def _matters(tokens: DumpedTokens) -> bool:
    inside = tokens.d[tokens.core]
    return bool(inside.size) and float((inside**2).mean()) ** 0.5 >= FLOOR


def _without_cause(tokens: DumpedTokens) -> str:
    """The verdict on a gap without a known cause: it need not have one if it is as small as rounding."""
    if not _matters(tokens):
        return "nothing"
    return "small" if tokens.k3 <= ROUNDED[""] and tokens.size < LARGE else "unknown"


def _within(tokens: DumpedTokens, finding: Finding, without: Collection[str]) -> list[Finding]:
    """The cause within the part of the sequences that a finding is about, if they are enough to look at alone."""
    rows, chosen = finding.evidence.rows, finding.evidence.tokens
    if rows is None:
        return []
    part = tokens.within(rows, chosen)
    if len(part) < _ENOUGH:
        return []
    found, ended = _look(part, STAGES, {*without, *_those(lambda cause: cause.of_a_part)})
    found = found if found or ended else _look(part, DIFFUSE, without)[0]
    faults = sorted((x for x in found if not x.cause.normal), key=lambda x: -x.share * x.certainty)
    return [
        x._replace(
            share=x.share * finding.share, evidence=x.evidence._replace(sentence=f"{_THERE}{x.evidence.sentence}")
        )
        for x in faults[:1]
    ]


def _look(tokens: DumpedTokens, stages: tuple[Stage, ...], without: Collection[str]) -> tuple[list[Finding], bool]:
    """Findings of the stages, and whether one of them ended the search."""
    findings: list[Finding] = []
    for stage in stages:
        tests = [(name, test) for name, test in stage.tests if name not in without]
        here = _findings(tokens, tests) if _matters(tokens) or not stage.floor else []
        if here and not stage.several:
            first, *others = sorted(here, key=lambda finding: -finding.certainty * finding.share)
            rival = max((x.certainty * x.share for x in others), default=0.0)
            as_well = rival > _AS_WELL * first.certainty * first.share and not first.cause.normal
            here = [first._replace(certainty=min(first.certainty, POSSIBLE)) if as_well else first]
        findings += [x._replace(certainty=min(x.certainty, x.evidence.most)) for x in here]
        if here and stage.ends:
            return findings, True
    return findings, False


def _other(tokens: DumpedTokens) -> list[Finding]:
    """Findings about what the run does with its gap or its weights, whatever causes the gap."""
    found = _findings(tokens, [(name, cause.test) for name, cause in OTHER_CAUSES.items()])
    return [finding._replace(certainty=min(finding.certainty, finding.evidence.most)) for finding in found]


def _findings(tokens: DumpedTokens, named: Iterable[tuple[str, Test]]) -> list[Finding]:
    """Findings of tests by the name of their cause."""
    tests = ((name, test, test.look(tokens)) for name, test in named)
    return [
        # 0.5 for a weak statistic, 0.99 for a strong one
        Finding(name, 0.5 + 0.49 * bounded((x.statistic - test.weak) / (test.strong - test.weak)), x.share, x)
        for name, test, x in tests
        if x is not None and x.statistic > test.weak
    ]
