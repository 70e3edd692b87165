"""From what was seen to a diagnosis: which causes, in which order, and how sure."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from .causes import CAUSES, Cause
from .observed import Observed
from .signatures import DIFFUSE, FLOOR, LARGE, STAGES, Seen, Signature, Stage, core, noise_floor


LEAST = 30  # tokens that it takes to say anything
_REST = 0.3  # share of what is explained by nothing else, from which it is looked at, too


class Finding(NamedTuple):
    """
    A cause that was found.

    Args:
        name (`str`):
            Its name, a key of `CAUSES`.
        certainty (`float`):
            How sure, from 0.5 to 0.99.
        share (`float`):
            Share of the sum of squared log-ratios that it explains.
        seen ([`Seen`]):
            The evidence.
    """

    name: str
    certainty: float
    share: float
    seen: Seen

    @property
    def cause(self) -> Cause:
        return CAUSES[self.name]


class Diagnosis(NamedTuple):
    """
    What is the matter with a dump.

    Args:
        verdict (`str`):
            `"found"`, `"unknown"` or `"nothing"`.
        findings (`list[Finding]`):
            Causes, the one that explains most first, and those that are normal last. Empty if the verdict is another.
        size (`float`):
            Root mean square of the log-ratio, in nats.
        k3 (`float`):
            `rollout_corr/k3_kl`.
        floor (`float` or `None`):
            The gap as a multiple of what the trainer differs from itself; `None` where that is not known.
        n_tokens, n_sequences (`int`):
            What it is made of.
        in_effect (`Mapping[str, Any]`, *optional*):
            Settings of the run, as far as they are known.
    """

    verdict: str
    findings: list[Finding]
    size: float
    k3: float
    floor: float | None
    n_tokens: int
    n_sequences: int
    in_effect: Mapping[str, Any] = {}

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to do: nothing at all, or no more than what is normal."""
        return self.verdict == "nothing" or (
            self.verdict == "found" and self.size < LARGE and all(finding.cause.normal for finding in self.findings)
        )


def diagnose(o: Observed, without: Collection[str] = ()) -> Diagnosis:
    """
    Find the causes.

    Args:
        o ([`Observed`]):
            Tokens of a dump.
        without (`Collection[str]`, *optional*):
            Causes that are known not to be there, which are not looked for.

    Returns:
        [`Diagnosis`].

    Raises:
        `ValueError`: in one line, if there are too few tokens to say anything.
    """
    if len(o) < LEAST and not len(o.broken_row):
        raise ValueError(
            f"{len(o)} tokens of the loss have a log-probability of both policies: too few to say anything"
        )
    findings, ended = _look(o, STAGES, without)
    rest = 1 - sum(finding.share for finding in findings if finding.name != "nan_rows")
    if not ended and (not _whole(findings)) and rest > _REST and _matters(o):
        diffuse, _ = _look(o, DIFFUSE, without)
        findings += [finding._replace(share=finding.share * rest) for finding in diffuse]
    # what is in every run comes last, however large: it is not what is to be looked at
    findings.sort(key=lambda finding: (finding.cause.normal, -finding.share * finding.certainty))
    verdict = "found" if findings else "unknown" if _matters(o) else "nothing"
    floor = noise_floor(o)
    multiple = None if not floor else floor**-0.5
    return Diagnosis(verdict, findings, o.size, o.k3, multiple, len(o), int((o.lengths > 0).sum()), o.settings)


def _whole(findings: list[Finding]) -> bool:
    """Whether a cause was found that acts on all tokens, beneath which noise says nothing."""
    return any(finding.name not in ("nan_rows", "first_token", "last_token", "seams") for finding in findings)


def _matters(o: Observed) -> bool:
    inside = o.d[core(o)]
    return bool(inside.size) and float((inside**2).mean()) ** 0.5 >= FLOOR


def _look(o: Observed, stages: tuple[Stage, ...], without: Collection[str]) -> tuple[list[Finding], bool]:
    """What the stages find, and whether one of them ended it."""
    findings: list[Finding] = []
    for stage in stages:
        here = _found(o, stage, without) if _matters(o) or not stage.floor else []
        if here and not stage.several:
            here = [max(here, key=lambda finding: finding.certainty * finding.share)]
        findings += here
        if here and stage.ends:
            return findings, True
    return findings, False


def _found(o: Observed, stage: Stage, without: Collection[str]) -> list[Finding]:
    looked_for = (signature for signature in stage.signatures if signature.cause not in without)
    tests = ((signature, signature.test(o)) for signature in looked_for)
    return [
        Finding(signature.cause, _certainty(signature, seen), seen.share, seen)
        for signature, seen in tests
        if seen is not None and seen.statistic > signature.weak
    ]


def _certainty(signature: Signature, seen: Seen) -> float:
    """From 0.5 where the statistic is weak to 0.99 where it is strong."""
    reach = (seen.statistic - signature.weak) / (signature.strong - signature.weak)
    return 0.5 + 0.49 * min(max(reach, 0.0), 1.0)
