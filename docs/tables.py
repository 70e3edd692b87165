"""
Parts of the documents that are made of the code: `make tables` writes them, and a test compares.

A page has such a part between `<!-- made: NAME -->` and `<!-- end -->`, and the function of this name makes it of what stands
there. In a table, columns that the function does not know are written by hand; in a section, all paragraphs but the first.
"""

import dataclasses
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import trl_rollout_corr
from benchmarks.tables import grid, markdown
from trl_rollout_corr.messages import capitalized
from trl_rollout_corr.settings.config import RolloutCorrectionConfig, settings_of_preset
from trl_rollout_corr.settings.criteria import CRITERIA, Criterion
from trl_rollout_corr.settings.presets import DEFAULT, PRESETS, UNSET, values_of_preset
from trl_rollout_corr.settings.thresholds import is_by_sign
from trl_rollout_corr.tools.bands import band_in_words
from trl_rollout_corr.tools.decision import OTHER_OF_TRL, ROWS, Row
from trl_rollout_corr.tools.diagnosis.causes import CAUSES, HIDES
from trl_rollout_corr.tools.diagnosis.other_causes import OTHER_CAUSES
from trl_rollout_corr.tools.dump.columns import COLUMNS
from trl_rollout_corr.tools.formats import yaml_lines
from trl_rollout_corr.tools.monitor.rule import Bound
from trl_rollout_corr.tools.monitor.rules import BOUNDS
from trl_rollout_corr.tools.monitor.texts import APART, DEFAULTS, HARMED, LOOK_AT_PUSH, OF_PUSH


RECORD = Path(__file__).parents[1] / "benchmarks/arena/alarms.json"  # `benchmarks/arena/alarms.py` writes it
EVIDENCE = RECORD.with_name("EVIDENCE.md")
# What depends on the run in the message of an alarm
IN_SHORT = {
    "of_push": OF_PUSH,
    "defaults": DEFAULTS,
    "push_or_text": LOOK_AT_PUSH,
    "corrects": "the run corrects for it",
    "uncorrected": f"Training is biased, and {HARMED}.",
    "corrected": "While vLLM is behind, up to 0.3 this may be harmless: such a gap grows at first and shrinks later.",
    "gave": "bfloat16 gave 0.002",
    "diagnose": "Set `rollout_diagnose: true` and start again: it names the cause after the first step.",
    "cut": "If answers are cut, raise `max_completion_length`; otherwise look at some completions and their rewards.",
    "correct": "[Set the correction](#the-correction-to-set).",
    "fell": "Each is the product of its tokens' ratios, which shrinks with length even if nothing is wrong.",
    "apart": APART,
    "find": "[Find the cause](run.md#diagnose).",
    "began": ", and ... at the start",
    "length": " of ... tokens on average",
    "no_tokens": "If `mask_truncated_completions` is set, it leaves out every completion without an EOS token, even one "
    "that a `stop` string has ended; otherwise check the `env_mask` of your `rollout_func`.",
}


def completed(table: str, cells: Callable[[str], Mapping[str, str]], names: Iterable[str] = ()) -> str:
    """
    A table with the cells that are known, by the head of their column, for the first name in a row; and with all names, in
    their order.
    """
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in table.strip().splitlines())
    rows = {re.findall(r"`([^`]+)`", row[0])[0]: row for row in rows}
    rows |= {name: [f"`{name}`", *[""] * (len(head) - 1)] for name in names if name not in rows}
    rows = {name: rows[name] for name in names or rows}
    known = {name: cells(name) for name in rows}
    return grid(head, ([known[name].get(*cell) for cell in zip(head, rows[name], strict=True)] for name in rows))


def sections(inside: str, text: Mapping[str, str]) -> str:
    """Sections by name, with their first paragraph."""
    kept = dict(re.findall(r"^### `(\w+)`\n\n.*?\n\n(.*?)(?=^### |\Z)", inside, re.MULTILINE | re.DOTALL))
    return "\n\n".join(f"### `{name}`\n\n{first}\n\n{kept.get(name, '')}".rstrip() for name, first in text.items())


def wrapped(text: str, before: str = "") -> str:
    """A paragraph in lines of at most 119 columns, each with `before` in front; code and links are not broken."""
    whole = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, 119 - len(before), break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{before}{line}" for line in lines).replace("\0", " ")


class Unknown:
    """A number that only a run has."""

    def __format__(self, form: str) -> str:
        return "..."


# The worst first; otherwise in the order of the rules, where alarms about the same stand together
IN_ORDER = sorted(BOUNDS.values(), key=lambda bound: (bound.severity != "critical", not bound.foretells_collapse))


def alarms(table: str) -> str:
    record = json.loads(RECORD.read_text(encoding="utf-8"))

    def cells(name: str) -> dict[str, str]:
        bound = BOUNDS[name]
        metric = f"`{bound.key}`{'*' if bound.measure else ''}"
        most = "1" if bound.patience == 1 else f"{bound.patience // 2 + 1} of {bound.patience}"
        return {
            "alarm": f"[`{name}`](#{name})",
            "severity": bound.severity,
            "limit": "off" if _is_off(bound) else f"{metric} {'below' if bound.below else 'above'} {bound.limit:g}",
            "steps": f"{bound.patience} in a row" if bound.lasting else f"{most}{_at_once(bound)}",
            "in healthy runs": _in_healthy_runs(record, bound),
        }

    return completed(table, cells, [bound.name for bound in IN_ORDER])


def _in_healthy_runs(record: Mapping[str, Any], bound: Bound) -> str:
    """
    Of the healthy corrected runs that have the number of an alarm, how many raise it; of uncorrected ones, if these alone do.
    """
    if _is_off(bound):
        return "off"
    raised, compared = (record[part].get(bound.name, {}) for part in ("alarms", "compared"))
    for counts in (raised, compared):
        if counts.get("corrected"):
            return f"{raised['corrected']} of {compared['corrected']}"
        if counts.get("uncorrected"):
            return f"{raised['uncorrected']} of {compared['uncorrected']}, uncorrected"
    return "not measured"


def _is_off(bound: Bound) -> bool:
    """True if no metric can pass the limit: a share is never below 0."""
    return bound.below and bound.limit == 0


def _at_once(bound: Bound) -> str:
    """The limit of a single step, if there is one."""
    side = "below" if bound.below else "above"
    return f", or 1 {side} {bound.at_once(bound.limit):g}" if math.isfinite(bound.far) else ""


def alarm_record(inside: str) -> str:
    """How many of the published runs raise each alarm, and the alarms that none raises."""
    results = json.loads(RECORD.read_text(encoding="utf-8"))
    runs, rows = results["runs"], results["alarms"]
    dips = sum(of_kind["dip"] for of_kind in runs.values())
    columns = {
        f"healthy, corrected: {runs['corrected']['healthy']} runs": "corrected",
        f"healthy, uncorrected: {runs['uncorrected']['healthy']}": "uncorrected",
        f"healthy, fresh weights: {runs['fresh']['healthy']}": "fresh",
        f"dip: {dips}": "dip",
        f"collapse, corrected: {runs['corrected']['collapse']}": "in_time",
        f"collapse, uncorrected: {runs['uncorrected']['collapse']}": "in_time_uncorrected",
        f"healthy, wrong log-probabilities: {runs['faulty']['healthy']}": "faulty",
    }
    raised = {name: row for name, row in rows.items() if any(row.values())}
    lines = [
        [f"[`{name}`](../../docs/alarms.md#{name})", *(str(row[key]) for key in columns.values())]
        for name, row in raised.items()
    ]
    silent = {name: results["compared"][name]["all"] for name in rows if name not in raised}
    off = [f"`{name}`" for name in silent if _is_off(BOUNDS[name])]
    never = [f"`{name}` (in {n} runs)" for name, n in silent.items() if n and not _is_off(BOUNDS[name])]
    unknown = [f"`{name}`" for name, n in silent.items() if not n and not _is_off(BOUNDS[name])]
    some = results["any"]
    healthy = f"Of the {runs['corrected']['healthy']} healthy corrected runs, {some['alarm']} raise an alarm, and "
    healthy += f"{some['foretold']} raise one of those that foretell a collapse."
    shown = (
        f"The column *dip* includes {runs['faulty']['dip']} runs with wrong log-probabilities. No column shows the "
    )
    shown += f"{runs['fresh']['collapse']} collapses with fresh weights."
    of_silent = f"Raised by none of the runs whose log has the number to compare: {', '.join(never)}. "
    of_silent += f"Never compared, as the number is missing or the run of another kind: {', '.join(unknown)}. "
    of_silent += f"Off by default: {', '.join(off)}."
    below = wrapped(f"{of_silent} {shown} {healthy}")
    return f"{grid(['alarm', *columns], lines)}\n\n{below}"


def gaps_by_age(inside: str) -> str:
    """`k3_kl` of the published runs by the age of the weights in vLLM."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["ages"]
    columns = {
        "age, optimizer steps": "{age}",
        "healthy runs with `cap3` or `rounded`": "{healthy}",
        "smallest `k3_kl`": "{smallest:g}",
        "median": "{median:g}",
        "largest": "{largest:g}",
        "above 0.01": "{above}",
        "corrected runs that collapsed": "{collapsed}",
        "their median": "{fell}",
    }
    return markdown([{**row, "fell": row["median_collapsed"] or "-"} for row in rows], columns)


def alarm_sections(inside: str) -> str:
    text = {}
    for bound in IN_ORDER:
        first = next(other for other in IN_ORDER if (other.why, other.advice) == (bound.why, bound.advice))
        again = f"The rest is the same as for [`{first.name}`](#{first.name})."
        rest = f"{bound.why} {bound.advice}" if bound is first else again
        numbers = {
            "value": Unknown(),
            "limit": Unknown() if _is_off(bound) else bound.limit,
            "side": "below" if bound.below else "above",
        }
        message = " ".join(f"{bound.seen} {rest}".format(**numbers, **IN_SHORT).split())
        text[bound.name] = wrapped(message, "> ")
    return sections(inside, text)


# Situations of the table of decisions, in words
WHEN = {
    ("hides_mistake", True): "a cause was found that a correction would hide",
    ("uses_it", True): "the run uses `auto`",
    ("excludes_it", True): "`loss_type: vespo`",
    ("gap", "none"): "no gap",
    ("gap", "small"): "a small gap (`k3_kl` up to 0.005)",
    ("is_harmed", False): "nothing unhealthy was seen",
}


def decisions(_: str) -> str:
    """The answers of `trl_rollout_corr/tools/decision.py`. The first one that fits counts."""
    lines = [
        [
            " and ".join(WHEN[pair] for pair in row.when.items()) or "otherwise",
            _answer(row) or "leave the settings as they are",
        ]
        for row in ROWS
    ]
    of_trl = yaml_lines(OTHER_OF_TRL.set).strip()
    lines[-1][1] += (
        f"; in GRPO with TRL's weights of whole completions and an up-to-date vLLM, `{of_trl}` is level with it"
    )
    return grid(["situation", "answer"], lines)


def _answer(row: Row) -> str:
    return ", ".join(f"`{line}`" for line in yaml_lines(row.set).splitlines())


def cause_sections(inside: str) -> str:
    text = {}
    for name, it in {**OTHER_CAUSES, **CAUSES}.items():
        more = ", ".join(f"`{line}`" for line in yaml_lines(it.advised).splitlines() if line not in it.remedy)
        remedy = it.remedy.replace(HIDES, "Do not correct for it.")
        text[name] = wrapped(f"*{capitalized(it.title)}.* {remedy}{f' Settings: {more}.' if more else ''}")
    return sections(inside, text)


def metrics(table: str) -> str:
    """What each metric says, and at the end which values are healthy."""
    said = dict(re.findall(r"^\| `([^`]+)`.* \| (.*?)(?: \*\*Healthy:.*)? \|$", table, re.MULTILINE))

    def cells(name: str) -> dict[str, str]:
        healthy = band_in_words(name)
        if not healthy:  # then what is written by hand stays in its own column
            return {"what it says": said[name]}
        return {"healthy": healthy, "what it says": f"{said[name]} **Healthy: {healthy}.**"}

    return completed(table, cells)


def fields(table: str) -> str:
    fields = {field.name: field for field in dataclasses.fields(RolloutCorrectionConfig)}
    text = RolloutCorrectionConfig.__doc__ or ""
    types = dict(re.findall(r"^ +(\w+) \((.*?)(?:, \*optional\*.*)?\):$", text, re.MULTILINE))

    def cells(name: str) -> dict[str, str]:
        default = (
            f"`{values_of_preset(DEFAULT)[name]}` in `{DEFAULT}`" if name in UNSET else f"`{fields[name].default}`"
        )
        if name == "rollout_correction":  # "default" stands for it until the other fields are read
            default = f"`{DEFAULT}`"
        return {
            "type": types[name],
            "default": default,
            "what it does": fields[name].metadata["help"].replace("%%", "%"),
        }

    return completed(table, cells)


# Presets that a comparison of `benchmarks/arena` trained
JUDGED = (
    DEFAULT, "trl", "decoupled_token_is", "decoupled_token_icepop", "bypass_ppo_clip", "bypass_dppo_tv", "disabled",
)  # fmt: skip


def judged_presets(table: str) -> str:
    return completed(table, _preset_cells, JUDGED)


def other_presets(table: str) -> str:
    return completed(table, _preset_cells, [name for name in PRESETS if name not in JUDGED])


def _preset_cells(name: str) -> dict[str, str]:
    settings = settings_of_preset(name)
    rejection = ", ".join(map(_rule, settings.criteria, settings.rollout_rs_threshold or []))
    bound = settings.rollout_is_threshold
    pairs = bound if is_by_sign(bound) else [bound] if isinstance(bound, list) else []
    if is_by_sign(bound):
        bound = "; ".join(map(_side, pairs, ("negative", "positive")))
    else:
        bound = " or ".join(f"[{low:g}, {high:g}]" for low, high in pairs) or f"{bound:g}"
    return {
        "preset": f"`{name}`",
        "weights": settings.rollout_is or "-",
        "bound": bound if settings.rollout_is else "-",
        "rejection": rejection or "-",
        "mode": f"bypass, {settings.rollout_loss_type}" if settings.bypass_mode else "decoupled",
    }


def _side(pair: list[float], sign: str) -> str:
    low, high = pair
    return f"{f'{high:g}' if low == high else f'at most {high:g}'} where the advantage is {sign}"


def _rule(criterion: Criterion, bounds: float | list[float]) -> str:
    """A criterion and its bounds."""
    if criterion.directed:
        return f"`{criterion.name}` within -{bounds[0]:g}, {bounds[1]:g}"
    bounds = f"in [{bounds[0]:g}, {bounds[1]:g}]" if isinstance(bounds, list) else f"up to {bounds:g}"
    return f"`{criterion.name}` {bounds}"


def criteria(table: str) -> str:
    def cells(number: str) -> dict[str, str]:
        found = [name for name in CRITERIA if re.fullmatch(rf"[a-z]+(_(sum|mean|max))?_{number}", name)]
        return {"criteria": ", ".join(f"`{name}`" for name in found)}

    return completed(table, cells)


def names(table: str) -> str:
    def cells(name: str) -> dict[str, str]:
        first = " ".join((inspect.getdoc(getattr(trl_rollout_corr, name)) or "").split("\n\n")[0].split())
        return {"what it is": re.sub(r"\[`~?(?:[\w.]+\.)?(\w+)`\]", r"`\1`", first)}

    return completed(table, cells, trl_rollout_corr.__all__)


def dump(table: str) -> str:
    columns = {column.name: column for column in COLUMNS}

    def cells(name: str) -> dict[str, str]:
        it = columns[name]
        of = re.sub(r"list<item: (\w+)>", r"list of \1", str(it.type))  # `<...>` would be a tag
        return {"type": f"{of}{' for each token' if it.per_token else ''}{', or null' if it.null else ''}"}

    return completed(table, cells, columns)


def made(page: str) -> str:
    """A page with its parts as the code has them."""
    parts = {
        it.__name__: it
        for it in (
            alarms, alarm_record, gaps_by_age, alarm_sections, decisions,
            cause_sections, metrics, fields, judged_presets, other_presets, criteria, names, dump,
        )
    }  # fmt: skip
    return re.sub(
        r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)",
        lambda match: f"{match[1]}\n{parts[match[2]](match[3])}\n\n{match[4]}",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path in [*Path(__file__).parent.glob("*.md"), EVIDENCE]:
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
