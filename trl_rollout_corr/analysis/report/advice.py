"""The settings of a run, and those to try."""

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import torch

from ...config import RolloutCorrectionConfig
from ...rules import Finding
from .. import spread
from .drawing import number
from .source import Source
from .table import Table


class Settings(NamedTuple):
    """Settings in YAML, and what to know about them."""

    title: str
    text: str
    yaml: str


def advice(source: Source, findings: list[Finding]) -> list[Settings]:
    """
    Settings of the run, and those to try.

    Args:
        source ([`~trl_rollout_corr.analysis.report.source.Source`]):
            What the report is about.
        findings (`list[Finding]`):
            What is unhealthy.

    Returns:
        `list[Settings]`: with what to know about each.
    """
    if source.config is None:
        text = (
            "Bounds that fit this run are computed from its tokens. Set `rollout_dump_dir`, train some steps, and report on "
            "the folder of the run."
        )
        return [Settings("A dump first", text, "rollout_dump_dir: dump\nrollout_dump_steps: 10\n")]
    own = Settings(
        "This run", "Its settings, without those of the monitor and the dump.", yaml_of(_own(source.config))
    )
    if not source.table.batch.any():
        return [own]
    suggestion = _suggestion(source.table, source.config)
    if suggestion.get("rollout_rs_threshold", [1.0])[0] == 0.0:  # the drift leaves no bound below
        return [own, Settings("To try", "None: the policies have nothing to do with each other. Find out why.", "")]
    if suggestion["rollout_correction"] == "disabled":
        return [own, Settings("To try", "The policies agree on every token: nothing to correct.", yaml_of(suggestion))]
    text = (
        "Bounds from the spread of these tokens, which reject at most 5 percent of them. "
        "`python -m trl_rollout_corr compare` shows what they and every preset would do to this dump."
    )
    if any(finding.severity == "critical" for finding in findings):
        text += " First do what the findings say: bounds made from unhealthy steps describe the disease."
    return [own, Settings("To try", text, yaml_of(suggestion))]


def _suggestion(table: Table, config: RolloutCorrectionConfig) -> dict[str, Any]:
    rows = np.flatnonzero(table.represents)
    width = int(np.diff(table.starts)[rows].max())
    valid = table.padded(table.valid, rows, width)
    log_ratio = torch.where(valid, table.padded(table.d, rows, width), 0.0)
    return spread.suggest(
        spread.measure(log_ratio, valid), config.rollout_loss_type if config.bypass_mode else "decoupled"
    )


def _own(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Fields that differ from their default, beside the preset."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(RolloutCorrectionConfig)}
    default = dataclasses.asdict(RolloutCorrectionConfig())
    about_loss = [name for name in fields if not name.startswith(("rollout_monitor", "rollout_dump"))]
    return {name: fields[name] for name in about_loss if fields[name] != default[name] or name == "rollout_is"}


def yaml_of(fields: dict[str, Any]) -> str:
    """Fields as YAML, one a line."""
    values = {key: json.dumps(value).replace("Infinity", ".inf").replace('"', "") for key, value in fields.items()}
    return "".join(f"{key}: {value}\n" for key, value in values.items())


def in_short(config: RolloutCorrectionConfig) -> str:
    """The settings in a line."""
    parts = [config.rollout_correction] if config.rollout_correction else []
    parts.append(
        f"{config.rollout_is} weights {_bounds(config.rollout_is_threshold)}" if config.rollout_is else "no weights"
    )
    criteria = zip(config.rollout_rs or [], config.rollout_rs_threshold or [], strict=True)
    parts += [f"{name} {_bounds(bound)}" for name, bound in criteria] or ["no rejection"]
    parts.append(f"bypass, {config.rollout_loss_type}" if config.bypass_mode else "decoupled")
    parts += ["metrics only"] if config.rollout_metrics_only else []
    return "; ".join(parts)


def _bounds(bound: Any) -> str:
    return json.dumps(bound).replace("Infinity", "inf") if isinstance(bound, list) else f"up to {number(bound)}"
