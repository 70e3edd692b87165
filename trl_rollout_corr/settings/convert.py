"""`trl-rollout-corr convert`: settings of another tool, as YAML of this package. No torch."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..messages import warn, yaml_lines
from .config import RolloutCorrectionConfig
from .fields import FIELDS
from .files import Document, Foreign, find_foreign, read_document


# Keys of verl's `algorithm` section that are not about rollout correction, and their counterparts in TRL
_ELSEWHERE = {
    "gamma": "it discounts rewards per token, and TRL's trainers give one reward to the whole completion",
    "lam": "it is a parameter of GAE",
    "use_kl_in_reward": "RLOO does that with `beta`; GRPO puts the divergence into the loss",
    "kl_ctrl": "TRL has `beta`",
    "kl_penalty": "TRL has `beta`",
    "norm_adv_by_std_in_grpo": "TRL has `scale_rewards`",
}
_ESTIMATORS = {
    "grpo": "train with `RolloutCorrectedGRPOTrainer`",
    "rloo": "train with `RolloutCorrectedRLOOTrainer`",
    "gae": "TRL has neither GAE nor a value model. GRPO and RLOO compare completions of the same prompt instead",
}


def convert(path: str) -> str:
    """
    Translate a configuration of another tool to YAML of fields of [`RolloutCorrectionConfig`]. It is a YAML file, a shell
    script with arguments for verl, or `-` for standard input. A warning with its line names every key that is left out.
    """
    document = read_document(sys.stdin if path == "-" else Path(path))
    foreign = find_foreign(document.content)
    _refuse_ours(document.content, foreign)
    if foreign is None:
        raise ValueError(
            "no settings of rollout correction found: neither verl's `algorithm.rollout_correction`, nor the `rollout_is*` "
            "keys of its first releases, nor TRL's `vllm_importance_sampling_*`."
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fields = foreign.translate(foreign.settings)
            RolloutCorrectionConfig(**fields)  # raises an error if a value is refused
        except ValueError as error:
            line = _line(document, foreign, getattr(error, "field", None))
            raise ValueError(f"line {line}: {error}" if line else str(error)) from None
    for warning in caught:
        line = _line(document, foreign, getattr(warning.message, "field", None)) or document.line(*foreign.above) or 1
        warn(f"{path}:{line}: {warning.message}")
    for key, lines in document.replaced.items():
        for line in lines:
            warn(f"{path}:{line}: `{key[-1]}` has no effect: line {document.lines[key]} sets it again.")
    for line, message in _left_out(document, foreign):
        warn(f"{path}:{line}: {message}")
    return yaml_lines(fields)


def _refuse_ours(content: Any, foreign: Foreign | None) -> None:
    """A recipe of this package has nothing to convert."""
    keys = set(content) if isinstance(content, Mapping) else set()
    named = isinstance(content, Mapping) and isinstance(content.get("rollout_correction"), str)
    ours = named or (keys & FIELDS and {"output_dir", "model_name_or_path"} & keys)
    if ours and (foreign is None or foreign.maybe_ours):
        raise ValueError("a configuration of this package already: there is nothing to convert")


def _line(document: Document, foreign: Foreign, field: str | None) -> int | None:
    """Line of a setting. verl's `loss_type` is our `rollout_loss_type`."""
    names = () if field is None else (field, field.removeprefix("rollout_"))
    return next((line for name in names if (line := document.lines.get((*foreign.above, name)))), None)


def _left_out(document: Document, foreign: Foreign) -> Iterator[tuple[int, str]]:
    """Lines and messages about the other keys of a configuration of verl. TRL's other fields need no translation."""
    if "algorithm" not in document.content:
        return
    algorithm = document.content["algorithm"]
    taken = set(foreign.settings or ()) if foreign.above == ("algorithm",) else {"rollout_correction"}
    for key in (key for key in algorithm if key not in taken):
        reason = _ESTIMATORS.get(str(algorithm[key])) if key == "adv_estimator" else _ELSEWHERE.get(key)
        line = document.line("algorithm", str(key)) or 1
        yield line, f"`algorithm.{key}` is left out: {reason or 'it is not about rollout correction'}."
    for key, value in document.content.items():
        if key != "algorithm" and value:
            count = f" ({len(value)} keys)" if isinstance(value, Mapping) else ""
            line = min(line for path, line in document.lines.items() if path[0] == str(key))
            yield line, f"`{key}`{count} is left out: it is not about rollout correction."
