"""Steps from the first alarm of the monitor to the fall of accuracy, in recorded runs. No torch here."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.health.examine import examine
from trl_rollout_corr.health.rule import Alarm, Bound
from trl_rollout_corr.health.rules import BOUNDS
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.presets import DEFAULT, PRESETS


# What the rules read, without prefix
READ = {bound.key for bound in BOUNDS.values()} | {
    *("kl", "k3_kl", "engine_kl", "engine_k3_kl", "staleness_max", "rejected/others"),
    "log_ppl_abs_diff",
}
FALL = 0.1
# Arms that learn: on-policy, corrected, or with a gap that does no harm
SILENT = ("on_policy", "geo_rs_tis", "token_tis", "bypass", "rloo_geo_rs_tis", "fp8_none", "fp8_geo_rs_tis")


def recorded(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Records of the runs: settings, held-out accuracy, and the inputs of the rules."""
    keys = {"step", "reward", *(PREFIX + key for key in READ)}
    return {
        "versions": next((run["versions"] for run in runs.values()), None),
        "runs": {
            name: {
                "options": run["settings"]["options"],
                "steps": run["steps"],
                "accuracy": [round(value, 4) for value in run["accuracy"]],
                "history": {key: values for key, values in run["history"].items() if key in keys},
            }
            for name, run in runs.items()
        },
    }


def silent_runs(recording: Mapping[str, Any]) -> list[str]:
    """Names of the runs on which no rule should fire."""
    return [name for name in recording["runs"] if name.rsplit("_", 1)[0] in SILENT]


def entries(run: Mapping[str, Any]) -> list[dict[str, float]]:
    """The log of a recorded run, as `trainer.state.log_history` has it."""
    history = {**run["history"], "step": map(int, run["history"]["step"])}
    rows = [dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def fall(run: Mapping[str, Any]) -> int | None:
    """First step at which accuracy is 0.1 below the start, and still is at the next look; `None` if there is none."""
    low = [value < run["accuracy"][0] - FALL for value in run["accuracy"]]
    pairs = zip(run["steps"], low, low[1:], strict=False)
    return next((step for step, now, after in pairs if now and after), None)


def settings_of(options: Mapping[str, Any]) -> RolloutCorrectionConfig | dict[str, Any]:
    """
    Settings of a run from what differs from the defaults, as far as the rules look at them. A preset that is not there (of
    another version) is left as it is: then it is known that the run is corrected, and no more.
    """
    known = {field.name for field in fields(RolloutCorrectionConfig)}
    if options.get("rollout_correction", DEFAULT) not in (*PRESETS, None):
        return dict(options)
    return RolloutCorrectionConfig(**{name: value for name, value in options.items() if name in known})


def alarms(run: Mapping[str, Any]) -> list[Alarm]:
    """Findings of the monitor in a recorded run."""
    return examine(entries(run), settings_of(run["options"]))


def table(recording: Mapping[str, Any]) -> str:
    """A line per run."""
    lines = ["| run | accuracy | falls at | first warning | first critical | lead | rules |", "| --- " * 7 + "|"]
    for name, run in recording["runs"].items():
        found, fell = alarms(run), fall(run)
        warning = min((finding.step for finding in found), default=None)
        critical = min((finding.step for finding in found if finding.severity == "critical"), default=None)
        leads = [fell - step for step in (warning, critical) if None not in (fell, step)]
        rules = ", ".join(f"`{finding.bound}` {finding.step}" for finding in sorted(found, key=lambda f: f.step))
        cells = [
            f"`{name}`",
            f"{run['accuracy'][0]:.2f} to {sum(run['accuracy'][-3:]) / 3:.2f}",
            *(("-" if step is None else str(step)) for step in (fell, warning, critical)),
            ", ".join(map(str, leads)) or "-",
            rules or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def closest(run: Mapping[str, Any], bound: Bound) -> float | None:
    """The limit at which a bound would just not be passed in a run; `None` if it has nothing to look at."""
    log, others = entries(run), dict.fromkeys(set(BOUNDS) - {bound.name})

    def fires(limit: float) -> bool:
        bounds = {**others, bound.name: limit}
        return bool(
            examine(log, settings_of({**run["options"], "rollout_monitor": "warn", "rollout_monitor_bounds": bounds}))
        )

    loose, tight = (-1e6, 1e6) if bound.below else (1e6, -1e6)
    if not fires(tight):
        return None
    while abs(tight - loose) > 1e-5 * max(abs(tight), abs(loose)) and abs(tight - loose) > 1e-9:
        middle = (loose + tight) / 2
        loose, tight = (loose, middle) if fires(middle) else (middle, tight)
    return loose


def margins(recording: Mapping[str, Any], names: Iterable[str]) -> str:
    """A line per bound: its limit, and how close some runs come to it."""
    lines = ["| bound | limit | closest | run |", "| --- | --- | --- | --- |"]
    for bound in BOUNDS.values():
        reached = {name: closest(recording["runs"][name], bound) for name in names}
        reached = {name: limit for name, limit in reached.items() if limit is not None}
        if reached:
            name = (min if bound.below else max)(reached, key=reached.get)
            lines.append(f"| `{bound.name}` | {bound.limit:g} | {reached[name]:.2g} | `{name}` |")
    return "\n".join(lines)
