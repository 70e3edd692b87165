"""
What the alarms of the monitor are worth: its rules, applied to the log of every published run.

    python benchmarks/arena/alarms.py

It trains nothing. It writes `alarms.json`, of which `make tables` makes two tables of `EVIDENCE.md`.
"""

import json
import lzma
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.resolve import Settings
from trl_rollout_corr.tools.monitor.examine import Examiner
from trl_rollout_corr.tools.monitor.rule import Alarm
from trl_rollout_corr.tools.monitor.rules import BOUNDS


HERE = Path(__file__).parent
ARCHIVE, DATA = HERE / "runs.jsonl.xz", HERE / "alarms.json"
FALL = 0.1  # of held-out accuracy, below an own best
IN_TIME = 5  # optimizer steps
AUTO = ("rounded", "cap3")  # arms of former rules of `auto`
OFF = 0.01  # a gap whose runs are counted, with weights of any age
LARGE = (0.03, 0.1, 0.3, 1.0, 2.0)  # gaps whose runs are counted
GAP = PREFIX + "k3_kl"


class Replay(NamedTuple):
    """A run and its alarms."""

    record: Mapping[str, Any]
    log: list[dict[str, Any]]  # an entry for each optimizer step
    kind: str  # fresh, uncorrected, corrected, or faulty
    course: str  # healthy, dip, or collapse
    fall: int | None  # step of the look at which it has collapsed
    alarms: list[Alarm]  # the first of each bound
    compared: set[str]  # the bounds whose number the log has

    @property
    def foretold(self) -> bool:
        """True if an alarm that foretells a collapse is raised, rightly or not."""
        return any(BOUNDS[alarm.bound].foretells_collapse for alarm in self.alarms)

    def announces(self, alarm: Alarm) -> bool:
        """True if an alarm comes so early that somebody can act on it."""
        return self.fall is not None and alarm.step <= self.fall - IN_TIME


def replays(archive: Path = ARCHIVE) -> list[Replay]:
    """
    All published runs with our metrics, which TRL's own trainer does not log. Runs to which no push arrives are left out:
    their age is not what they announce.
    """
    records = map(json.loads, lzma.decompress(archive.read_bytes()).decode().splitlines())
    return [
        replay(record)
        for record in records
        if GAP in record["history"] and not record["settings"]["sampler"].get("lost")
    ]


def replay(record: Mapping[str, Any]) -> Replay:
    """Apply the rules to a run as the monitor does, after each optimizer step."""
    settings = settings_of(record)
    log = [{**_zeros(settings), **_completed(entry)} for entry in _entries(record["history"])]
    examiner = Examiner(settings, fields=record["settings"].get("way", {}))
    alarms = examiner.alarms_of(log)
    course, fall = _course(record["steps"], record["accuracy"])
    return Replay(record, log, _kind(record, settings), course, fall, alarms, examiner.compared)


def settings_of(record: Mapping[str, Any]) -> Settings:
    """Settings in effect of a run."""
    known = RolloutCorrectionConfig.__dataclass_fields__
    fields = {key: value for key, value in record["settings"]["options"].items() if key in known}
    return RolloutCorrectionConfig(**fields).settings


def _entries(history: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, Any]]:
    for values in zip(*history.values(), strict=True):
        yield dict(zip(history, values, strict=True))


def _completed(entry: dict[str, Any]) -> dict[str, Any]:
    """
    An entry with a metric that the archive does not have. Advantages of a group add up to 0, so that all are 0 in a step
    without one above 0.
    """
    if entry.get(GAP) is None:
        return entry
    none = entry.get(f"{PREFIX}kl_advantage_positive") is None
    return {**entry, f"{PREFIX}zero_advantage_fraction": float(none)}


def _zeros(settings: Settings) -> dict[str, float]:
    """
    Shares that a run with these settings logs. The archive drops a column of zeros, so these are 0 where it has none;
    any other metric that it does not have was not measured.
    """
    names = ["nonfinite_fraction"]
    if settings.criteria:
        names.append("rollout_rs_masked_fraction")
    if any(criterion.name == "seq_max_k1" for criterion in settings.criteria):
        names.append("rollout_is_veto_fraction")
    return {PREFIX + name: 0.0 for name in names}


def _kind(record: Mapping[str, Any], settings: Settings) -> str:
    """What kind of run it is."""
    sampler = record["settings"]["sampler"]
    if "garbage" in sampler:
        return "faulty"
    if not sampler.get("lag") and not sampler.keys() & {"quantization", "noise"}:
        return "fresh"
    return "corrected" if settings.corrects else "uncorrected"


def _course(steps: Sequence[int], accuracy: Sequence[float]) -> tuple[str, int | None]:
    """Whether accuracy collapsed, and the step of the look that shows it first: two in a row are 0.1 below the best so far."""
    bests = [max(accuracy[: i + 1]) for i in range(len(accuracy))]
    low = [now <= best - FALL for now, best in zip(accuracy, bests, strict=True)]
    fall = next((step for step, (now, after) in zip(steps, pairwise(low), strict=False) if now and after), None)
    return ("collapse" if fall is not None else "dip" if any(low) else "healthy"), fall


# Results --------------------------------------------------------------------------------------------------------------


def counted(runs: Sequence[Replay]) -> dict[str, Any]:
    """The numbers of the documents."""
    return {
        "runs": {kind: _courses(runs, kind) for kind in ("corrected", "uncorrected", "fresh", "faulty")},
        "alarms": {name: _alarm(runs, name) for name in BOUNDS},
        "compared": {name: _compared(runs, name) for name in BOUNDS},
        "any": _any(runs),
        "gaps": [_above(runs, gap) for gap in LARGE],
        "ages": _ages(runs),
    }


def _courses(runs: Iterable[Replay], kind: str) -> dict[str, int]:
    of_kind = [run.course for run in runs if run.kind == kind]
    return {course: of_kind.count(course) for course in ("healthy", "dip", "collapse")}


def _alarm(runs: Iterable[Replay], name: str) -> dict[str, int]:
    """In how many runs an alarm comes: healthy ones by kind, those that dip, and collapses that it announces in time."""
    found = dict.fromkeys(("corrected", "uncorrected", "fresh", "faulty", "dip", "in_time", "in_time_uncorrected"), 0)
    for run in runs:
        alarm = next((alarm for alarm in run.alarms if alarm.bound == name), None)
        if alarm is None:
            continue
        found[run.kind] += run.course == "healthy"
        found["dip"] += run.course == "dip"
        early = run.announces(alarm)
        found["in_time"] += early and run.kind == "corrected"
        found["in_time_uncorrected"] += early and run.kind == "uncorrected"
    return found


def _compared(runs: Iterable[Replay], name: str) -> dict[str, int]:
    """How many runs have the number of an alarm: healthy ones by kind, and all. In the others its silence says nothing."""
    having = [run for run in runs if name in run.compared]
    healthy = {kind: _courses(having, kind)["healthy"] for kind in ("corrected", "uncorrected", "fresh", "faulty")}
    return {**healthy, "all": len(having)}


def _any(runs: Sequence[Replay]) -> dict[str, int]:
    """In how many healthy corrected runs any alarm comes, and any that foretells a collapse; how many collapses there are."""
    healthy = [run for run in runs if run.course == "healthy" and run.kind == "corrected"]
    collapses = [run for run in runs if run.course == "collapse"]
    return {
        "alarm": sum(bool(run.alarms) for run in healthy),
        "foretold": sum(run.foretold for run in healthy),
        "collapses": len(collapses),
    }


def _gaps(run: Replay) -> list[float]:
    return [entry[GAP] for entry in run.log if entry[GAP] is not None and math.isfinite(entry[GAP])]


def _above(runs: Iterable[Replay], gap: float) -> dict[str, Any]:
    """Of the runs with a larger gap in some step, how many stay healthy, dip and collapse."""
    large = [run for run in runs if max(_gaps(run)) > gap]
    return {"k3_kl": gap, **{kind: _courses(large, kind) for kind in ("corrected", "uncorrected")}}


def _ages(runs: Sequence[Replay]) -> list[dict[str, Any]]:
    """
    By the age of the sampler: `k3_kl` of healthy runs with `auto`, and of corrected runs that collapsed. Each run counts with
    its median. Runs with a fault or with 8 bits are left out.
    """
    plain = [run for run in runs if not run.record["settings"]["sampler"].keys() & {"garbage", "quantization"}]
    ages = sorted({_age(run) for run in plain if _is_good(run)})
    return [_of_age([run for run in plain if _age(run) == age], age) for age in ages]


def _age(run: Replay) -> int:
    return int(run.record["settings"]["sampler"].get("lag", 0))


def _is_good(run: Replay) -> bool:
    return run.course == "healthy" and run.record["arm"] in AUTO


def _of_age(runs: Iterable[Replay], age: int) -> dict[str, Any]:
    good, fell = list[float](), list[float]()
    for run in runs:
        if _is_good(run):
            good.append(median(_gaps(run)))
        elif run.kind == "corrected" and run.course == "collapse":
            fell.append(median(_gaps(run)))
    spread = {"smallest": min(good), "median": median(good), "largest": max(good)}
    return {
        "age": age,
        "healthy": len(good),
        **{name: _digits(gap) for name, gap in spread.items()},
        "above": sum(gap > OFF for gap in good),
        "collapsed": len(fell),
        "median_collapsed": _digits(median(fell)) if fell else None,
    }


def _digits(value: float) -> float:
    return float(f"{value:.2g}")


def write(results: Mapping[str, Any], path: Path = DATA) -> None:
    """As JSON, an alarm or an age a line."""
    lines = []
    for name, part in results.items():
        rows = part if isinstance(part, list) else [f"{json.dumps(key)}: {json.dumps(x)}" for key, x in part.items()]
        text = ",\n  ".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        brackets = "[]" if isinstance(part, list) else "{}"
        lines.append(f"{json.dumps(name)}: {brackets[0]}\n  {text}\n {brackets[1]}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(counted(replays()))
