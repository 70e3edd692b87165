"""`trl-rollout-corr report`: numbers, the page, the picture, and files that cannot be read."""

import dataclasses
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from matplotlib.figure import Figure

from tests.dumps import make_dump, read_dump, read_table
from tests.launching import ROOT
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main, make_parser
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.tools.bands import HEALTHY
from trl_rollout_corr.tools.dump.folder import files_of, write_rows
from trl_rollout_corr.tools.monitor.examine import examine
from trl_rollout_corr.tools.report import facts as facts_module
from trl_rollout_corr.tools.report import html_page, log_charts
from trl_rollout_corr.tools.report.drawing import COLORS, draw
from trl_rollout_corr.tools.report.facts import SHOWN
from trl_rollout_corr.tools.report.log_charts import MORE, draw_trends
from trl_rollout_corr.tools.report.run import read_run


SETTINGS = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.99, 1.01]}
OVERVIEW = [
    "Gap (k3_kl), nats per token",
    "Share of tokens rejected",
    "Effective sample size of the importance weights",
    "Effective learning rate",
    "Reward",
]


def write(source, output) -> str:
    """Run the command and return the page."""
    sources = map(str, source if isinstance(source, list) else [source])
    args = make_parser().parse_args(["report", *sources, "-o", str(output)])
    assert args.run(args).endswith(f"\n{output}\n")  # after the state
    return output.read_text(encoding="utf-8")


class Page(HTMLParser):
    """A page, read: tags, attributes, text, identifiers, the sentence that describes each chart, and its table."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.charts, self.tables = set(), [], {}, {}
        self.words, self.ids, self._open, self._role = [], [], [], None
        self.feed(text)
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.attributes += attrs.items()
        self._open.append(tag)
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if attrs.get("role") == "img":
            self.charts[len(self.charts)] = attrs["aria-label"]
        assert tag != "svg" or self._role == "img"  # of the element around it
        self._role = attrs.get("role")
        if tag == "table":
            number = len(self.charts) - 1
            self._rows = self.tables[number if number not in self.tables else 1000 + len(self.tables)] = []
        if tag == "tr" and self.tables:
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.words.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self._rows[-1][-1] += data

    def table(self, alt: str) -> list[list[str]]:
        """Rows of the table below the chart of this title."""
        (number,) = [number for number, label in self.charts.items() if label.startswith(f"{alt}.")]
        return self.tables[number][1:]

    def trend(self, title: str, column: int = 1) -> dict[float, float]:
        """Values by step of a chart over steps."""
        rows = self.table(title)
        return {float(row[0]): float(row[column]) for row in rows if row[column] != "-"}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "dump"
    return make_dump(folder, steps=6, length=200, growth=1.6, settings=SETTINGS, broken=1)


@pytest.fixture(scope="module")
def page(dump) -> Page:
    return Page(write(dump, dump.parent / "report.html"))


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the charts empty, which saves a second a page."""
    monkeypatch.setattr(html_page, "svg", lambda chart: "")


def make_run(folder, logs, **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": len(logs), "log_history": logs, **more}))
    return folder


def shown(text: str) -> str:
    """A sentence with code in it, as the page shows it."""
    return " ".join(text.replace("`", "").split())


# What is on the page ------------------------------------------------------------------------------------------------------


def test_a_dump(page, dump):
    content = read_dump(dump)
    findings = examine(content.logs, RolloutCorrectionConfig(**SETTINGS).settings)
    assert findings
    for finding in findings:
        assert all(shown(text) in page.text for text in (finding.seen, finding.why, finding.advice))
    assert {
        "overview",
        "findings",
        "settings",
        "trends",
        "rejected",
        "lost",
        "completions",
        "worst",
    } <= set(page.ids)
    assert page.text.startswith(
        f"Rollout report: dump Rollout report: dump Look into it {shown(findings[0].seen)} Seen in step"
    )
    assert "Logged steps1 to 6, 6 logging windows" in page.text
    broken = sum(math.isnan(logp) for row in content.rows for logp in row["rollout_logps"])
    assert broken > 1
    assert f"{broken} tokens of the loss have a log-probability that is NaN or infinite" in page.text
    assert len(page.charts) == len(set(page.charts.values())) > len(OVERVIEW)


def test_the_state_of_a_run_is_the_alarm_that_silenced_an_earlier_one(tmp_path, capsys):
    """`k3_kl` passes 0.015 at step 11, and 0.03 at step 20, where `k3_uncorrected` falls silent."""
    folder = shutil.copytree(ROOT / "benchmarks/tutorial/uncorrected", tmp_path / "run")
    entries = [json.loads(line) for line in (folder / "logs.jsonl").read_text().splitlines()]
    for entry in entries:
        entry["rollout_corr/k3_kl"] = 0.001 if entry["step"] < 9 else 0.02 if entry["step"] < 19 else 0.04
    (folder / "logs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    main(["report", str(folder), "-o", str(tmp_path / "page.html")])
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith(
        "Look into it. `k3_kl` is 0.04, above 0.03, and nothing corrects for it. Seen in steps 20 to "
    )
    text = Page((tmp_path / "page.html").read_text()).text
    assert 0 < text.index("k3_uncorrected") < text.index("k3_high")  # the findings below keep their order
    assert re.search("192 drawn at random and 192 the worst, \\d+ of them both; \\d", text)


def test_charts_share_no_identifier(page):
    assert len(page.ids) == len(set(page.ids))
    referred = [value for _, value in page.attributes if value and (value.startswith("#") or value.startswith("url("))]
    assert len(referred) > 100
    assert {value.strip("url(#)") for value in referred} <= {i.strip("url(#)") for i in page.ids}


def test_nothing_is_loaded_and_nothing_is_run(dump, page):
    text = (dump.parent / "report.html").read_text(encoding="utf-8")
    assert not {"script", "img", "link", "iframe", "object", "base"} & page.tags
    assert all(not name.startswith("on") and name != "src" for name, _ in page.attributes)
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert set(re.findall(r"\w+://[^\"<) ]*", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")


def test_every_color_of_a_chart_has_one_for_the_dark(dump):
    style, *charts = (dump.parent / "report.html").read_text(encoding="utf-8").split("<svg")
    charts = "".join(part.split("</svg>")[0] for part in charts)
    used = set(re.findall(r"(?:stroke|fill): (#\w+)", charts))
    assert {COLORS[role][0] for role in ("text", "muted", "grid", "line", "band", "alarm")} <= used
    for role, (light, dark) in COLORS.items():
        used.discard(light)
        assert f'[style*="stroke: {light}"] {{ stroke: var(--{role}) !important; }}' in style
        assert f'[style*="fill: {light}"] {{ fill: var(--{role}) !important; }}' in style
        assert f"--{role}: {dark};" in style.split("prefers-color-scheme: dark")[1]
    assert not used


def test_a_run_alone(dump, tmp_path, undrawn):
    logs = read_dump(dump).logs
    make_run(tmp_path / "run" / "checkpoint-9", logs[:2])
    make_run(
        tmp_path / "run" / "checkpoint-10", [*logs, {"step": 6, "eval_loss": 1.0}, {"step": 6, "train_runtime": 9.0}]
    )
    page = Page(write(tmp_path / "run", tmp_path / "report.html"))
    assert "Logged steps1 to 6, 6 logging windows" in page.text
    assert all(shown(finding.seen) in page.text for finding in examine(logs))
    assert "trends" in page.ids
    assert not {"lost", "completions", "worst"} & set(page.ids)
    assert "rollout_dump_dir" in page.text
    expected = {entry["step"]: entry["rollout_corr/rollout_is_mean"] for entry in logs}
    assert page.trend("Mean importance weight") == pytest.approx(expected, rel=1e-3)


def test_a_run_with_a_dump(dump, tmp_path, undrawn):
    logs = [{**entry, "step": entry["step"] + 10} for entry in read_dump(dump).logs]
    shutil.copytree(dump, tmp_path / "run" / "sequences")
    make_run(tmp_path / "run", logs)
    page = Page(write(tmp_path / "run", tmp_path / "report.html"))
    assert "Logged steps1 to 16, 12 logging windowsDumped steps1 to 6" in page.text
    assert {"trends", "rejected", "worst"} <= set(page.ids)


def test_of_several_dumps_the_latest_is_taken_and_the_others_are_named(tmp_path, undrawn, capsys):
    for i, name in enumerate(("b", "a", "c")):
        folder = make_dump(tmp_path / "runs" / name, steps=i + 1)
        for file in folder.iterdir():
            os.utime(file, (1e9 - i, 1e9 - i))
    page, error = damage_of(tmp_path / "runs", tmp_path / "report.html", capsys)
    assert (
        error == f"warning: {tmp_path / 'runs'}: it also contains the dumps `a`, `c`. Name two of them to see both.\n"
    )
    assert "It also contains the dumps" in page.text
    assert "Dumped steps1, in b" in page.text
    assert "Logged steps1, 1 logging window" in page.text


def test_a_real_run(tiny_model_path, tmp_path, undrawn):
    trainer = build(
        *TRAINERS["grpo"], tiny_model_path, tmp_path / "out", sampler=StaleSampler(tiny_model_path),
        save_strategy="steps", save_steps=2, **SETTINGS,
    )  # fmt: skip
    trainer.train()
    page = Page(write(tmp_path / "out", tmp_path / "report.html"))
    logs = [entry for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]
    keys = ("k3_kl", "rollout_rs_masked_fraction", "rollout_is_eff_sample_size", "effective_lr")
    for title, key in zip(OVERVIEW, keys, strict=False):
        values = page.trend(title)
        expected = {entry["step"]: entry[f"rollout_corr/{key}"] for entry in logs}
        assert values == pytest.approx({step: expected[step] for step in values}, rel=1e-3)
        assert values
    assert f"Logged steps1 to {trainer.state.global_step}," in page.text


def test_a_healthy_run_is_called_healthy(tmp_path, undrawn):
    page = Page(write(make_dump(tmp_path / "dump", spread=0.005), tmp_path / "report.html"))
    assert "Nothing unhealthy was found in 3 logging windows." in page.text


def log_of_gaps(gaps, **more):
    """A log with these values of `k3_kl`."""
    return [
        {
            "step": step,
            "reward": 0.5,
            **{PREFIX + key: value for key, value in {"k3_kl": gap, "kl": gap, **more}.items()},
        }
        for step, gap in enumerate(gaps, 1)
    ]


@pytest.mark.parametrize(
    ("log", "state"),
    [
        (log_of_gaps([0.001] * 12), "Healthy Nothing unhealthy was found in 12 logging windows."),
        (log_of_gaps([0.0, 0.0, 10.7, 0.0, 0.0, 11.0, 0.0, 0.0, 13.6]), "Look into it k3_kl is 11"),
        (log_of_gaps([*[0.0] * 8, 5.04]), "Look into it k3_kl is 5"),
        (
            log_of_gaps([0.001, 0.001, 0.02, *[0.001] * 9]),
            "No alarm No alarm was raised in 12 logging windows, but k3_kl, healthy below 0.005, is 0.02 in 1 of 12 windows.",
        ),
        (
            log_of_gaps([0.001] * 4, rollout_is_eff_sample_size=0.4, effective_lr=1.6),
            "No alarm No alarm was raised in 4 logging windows, but rollout_is_eff_sample_size, healthy above 0.5, is "
            "0.4 in 4 of 4 windows; effective_lr, healthy 0.5 to 1.5, is 1.6 in 4 of 4 windows.",
        ),
        (
            log_of_gaps([0.001] * 4, zero_advantage_fraction=1.0),
            "No alarm No alarm was raised in 4 logging windows, but all advantages were 0 in 4 of 4 windows, so that there "
            "was nothing to learn from.",
        ),
        (log_of_gaps([0.001] * 9, zero_advantage_fraction=1.0), "Look into it All advantages are 0"),
    ],
)
def test_a_run_is_called_healthy_only_if_every_value_is(log, state, tmp_path, undrawn):
    page = Page(write(make_run(tmp_path / "run", log), tmp_path / "report.html"))
    assert page.text.startswith(f"Rollout report: run Rollout report: run {state}")
    assert ("Healthy Nothing" in page.text) == state.startswith("Healthy")


def test_the_values_that_are_looked_at_are_those_of_the_charts():
    charts = {next(iter(trend.metrics)) for trend in (*log_charts.OVERVIEW.values(), *log_charts.MORE.values())}
    assert {*SHOWN} == charts & {*HEALTHY}


def test_the_boxes_say_over_which_windows_they_are_means(tmp_path, undrawn):
    gaps = [1e-5, *[0.004] * 9, *[0.002] * 10]
    page = Page(write(make_run(tmp_path / "run", log_of_gaps(gaps)), tmp_path / "report.html"))
    assert "Gap (k3_kl), nats per token: 0.002 mean of the last 10 windows; of the first 10: 0.0036," in page.text
    assert any("1e-5 at step 1, 0.002 at step 20" in label for label in page.charts.values())
    short = Page(write(make_run(tmp_path / "short", log_of_gaps(gaps[:2])), tmp_path / "report.html"))
    assert "Gap (k3_kl), nats per token: 0.004 last window; first window: 1e-5," in short.text


def reasons(page):
    """Reasons in the tooltips of rejected tokens, and the number of tooltips of rejected tokens."""
    titles = [value for name, value in page.attributes if name == "title" and "factor 0" in value]
    return {reason for title in titles for reason in re.findall(r", rejected: (.*)$", title)}, len(titles)


def test_a_tooltip_names_the_rule_that_rejected_the_token(tmp_path, undrawn):
    shown_by = {}
    two = {"rollout_rs": ["token_k1", "seq_mean_k1"], "rollout_rs_threshold": [[0.6, 1.6], [0.97, 1.03]]}
    icepop = {"rollout_correction": "decoupled_token_icepop", "rollout_is_threshold": [0.9, 1.1]}
    for name, settings in {"auto": {"rollout_correction": "auto"}, "two": two, "icepop": icepop}.items():
        folder = make_dump(tmp_path / name, spread=0.8, settings=settings, tools=False, broken=2 * (name == "two"))
        page = Page(write(folder, tmp_path / "report.html"))
        shown_by[name], number = reasons(page)
        assert number
        titles = [x for _, x in page.attributes if x and re.search(r"factor 0(?!\.)", x)]
        assert all("rejected: " in title for title in titles)
    assert shown_by["auto"] <= {"token_tv", "token_k1", "token_tv and token_k1", "token_k1 and token_tv"}
    assert "token_tv" in shown_by["auto"]
    assert {"token_k1", "seq_mean_k1", "token_k1 and seq_mean_k1", "no finite log-probability"} >= shown_by["two"]
    assert {"token_k1", "seq_mean_k1"} <= shown_by["two"]
    assert shown_by["icepop"] == {"weight outside of rollout_is_threshold"}


def test_a_tooltip_is_silent_about_rules_that_the_run_did_not_have(tmp_path, undrawn):
    """A dump whose tokens were rejected by something else, such as a trainer of its own."""
    folder = make_dump(tmp_path / "made", spread=0.8, settings={"rollout_correction": "auto"}, tools=False)
    content = read_dump(folder)
    for row in content.rows:
        row["keep"] = [not keep for keep in row["keep"]]
        row["coefficients"] = [float(keep) for keep in row["keep"]]
    write_rows(tmp_path / "other", 1, 0, content.rows, content.fields)
    page = Page(write(tmp_path / "other", tmp_path / "report.html"))
    assert reasons(page)[0] == set()
    assert reasons(page)[1] > 0


def test_nothing_to_see(tmp_path):
    folder = make_dump(
        tmp_path / "dump", steps=1, rows=1, length=1, group=1, spread=1e-9, worst=0, sampled=1, logs=False
    )
    page = Page(write(folder, tmp_path / "report.html"))
    assert "None: no token of the loss has a log-ratio other than 0." in page.text
    assert "There are no metrics to look at." in page.text


def test_tokens_that_are_broken_or_absurd(dump, tmp_path):
    content = read_dump(dump)
    first, second, third = content.rows[:3]
    lists = [name for name, value in first.items() if isinstance(value, list)]
    rows = [
        {**first, **{name: [] for name in lists}},
        {**second, "rollout_logps": [math.nan] * len(second["mask"]), "reward": math.nan, "advantage": math.nan},
        {**third, "train_logps": [-1e4] * len(third["mask"]), "weights": None, "staleness": None},
    ]
    for name, chosen in (("all", rows), ("empty", rows[:1]), ("broken", rows[:2])):
        write_rows(tmp_path / name, 1, 0, [{**row, "sampled": True} for row in chosen], content.fields)
    assert "There are no metrics to look at." in Page(write(tmp_path / "empty", tmp_path / "empty.html")).text
    broken = Page(write(tmp_path / "broken", tmp_path / "broken.html")).text
    assert f"{sum(second['mask'])} tokens of the loss have a log-probability that is NaN or infinite" in broken
    assert "The largest |d|" in Page(write(tmp_path / "all", tmp_path / "all.html")).text


def test_long_runs_are_drawn_as_windows(tmp_path):
    logs = [
        {
            "step": step,
            "rollout_corr/k3_kl": 1e-3 * step,
            "rollout_corr/kl": math.nan if step % 7 else 0.01,
            "loss": None,
        }
        for step in range(1, 1001)
    ]
    page = Page(write(make_run(tmp_path / "run", logs), tmp_path / "report.html"))
    values = page.trend(OVERVIEW[0])
    assert len(values) == 250
    assert values[2.5] == 0.0025
    assert "Lines are means over windows" in page.text
    assert len((tmp_path / "report.html").read_text()) < 200_000


def test_who_is_rejected_is_read_from_the_log_if_it_is_there(dump, tmp_path, undrawn):
    logs = [
        {
            "step": step,
            "rollout_corr/k3_kl": 0.001,
            "rollout_corr/rejected/advantage_positive": 0.1 * step,
            "rollout_corr/rejected/advantage_negative": 0.3,
            "rollout_corr/downweighted/advantage_positive": 0.05,
            "rollout_corr/rejected/reward_mean": 0.125,
            "rollout_corr/kept/reward_mean": 0.875,
        }
        for step in (1, 2)
    ]
    page = Page(write(make_run(tmp_path / "run", logs), tmp_path / "report.html"))
    assert [
        ["tokens", "share"],
        ["rejected, of those with a positive advantage", "15 %"],
        ["rejected, of those with a negative advantage", "30 %"],
        ["down-weighted, of those with a positive advantage", "5 %"],
    ] in page.tables.values()
    assert "The mean reward is 0.125 where a completion is rejected as a whole, and 0.875 elsewhere." in page.text


def test_turns_are_drawn(tmp_path, undrawn):
    gaps = {"first": 0.001, "last": 0.003, "start": 0.2}
    log = {f"rollout_corr/turn_{part}/k3_kl": gap for part, gap in gaps.items()}
    logs = [{"step": step, "rollout_corr/k3_kl": 0.001, **log} for step in (1, 2)]
    page = Page(write(make_run(tmp_path / "run", logs), tmp_path / "report.html"))
    assert "first 0.001 at step 1, 0.001 at step 2; last 0.003" in page.text
    assert "start of later turns 0.2 at step 1" in page.text


# The verdict and the overview ---------------------------------------------------------------------------------------------


def test_the_banner_has_the_means_of_the_last_windows(tmp_path, undrawn):
    logs = [
        {"step": step, "rollout_corr/k3_kl": 1e-4 * step, "rollout_corr/effective_lr": 1.0, "reward": step / 128}
        for step in range(1, 201)
    ]
    run = make_run(tmp_path / "run", logs)
    page = Page(write(run, tmp_path / "report.html"))
    banner = page.text[: page.text.index("What happened")]
    for text in (
        "Gap (k3_kl), nats per token: 0.0191 mean of the last 20 windows; of the first 20: 0.00105, healthy: below 0.005",
        "Effective learning rate: 1 mean of the last 20 windows; of the first 20: 1, healthy: 0.5 to 1.5",
        "Share of tokens rejected: - not logged",
        "Reward: 1.49 mean of the last 20 windows; of the first 20: 0.082",
    ):
        assert text in banner
    levels = re.findall(r'class="card (\w*)"', (tmp_path / "report.html").read_text().split("<nav>")[0])
    assert levels == ["warning", "healthy", "", ""]
    logs[-1]["rollout_corr/rollout_is_eff_sample_size"] = 0.4
    page = Page(write(make_run(tmp_path / "run", logs), tmp_path / "report.html"))
    assert "Effective sample size of the importance weights: 0.4 healthy: above 0.5" in page.text


def test_the_overview_has_every_alarm_and_numbers_them_as_the_findings(dump, page):
    findings = examine(read_dump(dump).logs, RolloutCorrectionConfig(**SETTINGS).settings)
    text = (dump.parent / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'class="number">(\d+)<', text) == [str(i) for i, _ in enumerate(findings, 1)]
    marks = sorted((finding.step, str(i), finding.bound) for i, finding in enumerate(findings, 1))
    told = ", ".join(f"{name} ({rule}) at step {step}" for step, name, rule in marks)
    assert (
        f"Dashed red lines mark the first alarms. Their numbers are the numbers of the findings: {told}." in page.text
    )


def log_of(**metrics) -> pd.DataFrame:
    """A log of steps 1, 2, 3."""
    names = {name: name if name == "reward" else PREFIX + name for name in metrics}
    return pd.DataFrame(
        {names[name]: values for name, values in metrics.items()}, index=pd.Index([1, 2, 3], name="step")
    )


def overview(logs, alarms=()):
    return draw_trends(log_charts.OVERVIEW, logs, alarms=alarms)


def axes_of(chart):
    axes = Figure().add_subplot()
    draw(chart, axes)
    return axes


def drawn(chart) -> dict:
    """Curves of a chart by their name in the legend."""
    return {line.get_label(): line for line in axes_of(chart).get_lines()}


def test_every_alarm_is_marked_with_its_number_and_close_ones_do_not_overlap():
    (gap,) = overview({"run": log_of(k3_kl=[0.001, 0.002, 0.003])}, [(1, "1"), (2, "2"), (2, "3")])
    texts = axes_of(gap).texts
    assert [text.get_text() for text in texts] == ["1", "2, 3"]
    assert [text.xy[0] for text in texts] == [1, 2]
    assert abs(texts[0].xyann[1] - texts[1].xyann[1]) >= 11  # the size of the letters


def test_a_part_that_is_equal_to_the_whole_is_not_drawn_again():
    (gap,) = overview({"run": log_of(k3_kl=[0.001, 0.002, 0.003], engine_k3_kl=[0.001, 0.002, 0.003])})
    assert len(gap.curves) == 1
    assert gap.note.endswith("Healthy: below 0.005. Engine: the same curve.")
    (gap,) = overview({"run": log_of(k3_kl=[0.001, 0.002, 0.003], engine_k3_kl=[0.001, 0.002, 0.002])})
    lines = drawn(gap)
    assert lines["engine"].get_zorder() > lines["all"].get_zorder()
    assert (lines["all"].get_linestyle(), lines["engine"].get_linestyle()) == ("-", "--")


def test_one_quantity_has_one_healthy_band():
    """TRL's `kl`, to its reference model, is another quantity."""
    log = log_of(k3_kl=[0.001] * 3, kl=[0.0] * 3).assign(kl=[5.0] * 3)
    charts = draw_trends({**log_charts.OVERVIEW, **MORE}, {"": log})
    assert [(chart.name, chart.band) for chart in charts] == [("k3-kl", (None, 0.005))]


def test_a_legend_covers_nothing():
    (chart,) = overview({"run": log_of(k3_kl=[0.001, 0.002, 0.003], engine_k3_kl=[0.001, 0.002, 0.002])})
    figure = Figure(figsize=(5.0, 2.9), layout="constrained")
    axes = figure.add_subplot()
    draw(chart, axes)
    figure.savefig(io.BytesIO())
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y0 >= inside.y1 - 1
    assert legend.y1 <= figure.bbox.y1


def test_of_two_runs_each_has_its_color_in_every_chart():
    first = log_of(k3_kl=[0.01, 0.02, 0.03], reward=[0.1] * 3)
    second = log_of(k3_kl=[0.001] * 3, reward=[0.1] * 3, rollout_rs_masked_fraction=[0.1, 0.2, 0.3])
    charts = overview({"a": first, "b": second})
    assert [chart.title for chart in charts] == [OVERVIEW[0], OVERVIEW[1], OVERVIEW[4]]
    for chart in charts:
        assert list(chart.table) == (["step", "a", "b"] if chart.title != OVERVIEW[1] else ["step", "b"])
        colors = {name: line.get_color() for name, line in drawn(chart).items() if name in ("a", "b")}
        if len(chart.curves) == 1:  # no legend
            colors = {"b": COLORS[chart.curves[0].color][0]}
        assert colors["b"] == COLORS["second"][0]
        assert colors.get("a", COLORS["line"][0]) == COLORS["line"][0]  # as in a page about this run alone


def test_a_gap_of_rounding_does_not_squeeze_the_axis():
    (gap,) = overview({"run": log_of(k3_kl=[1e-13, 0.01, 0.02])})
    assert 1e-7 < axes_of(gap).get_ylim()[0] < 1e-6
    assert gap.table["all"].iloc[0] == 1e-13
    (gap,) = overview({"run": log_of(k3_kl=[1e-13, 2e-13, 1e-12])})
    assert axes_of(gap).get_ylim()[0] < 1e-12


# Two runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    make_dump(folder / "uncorrected" / "dump", steps=6, growth=2.5, settings={"rollout_correction": "disabled"})
    make_dump(folder / "corrected" / "dump", steps=6, spread=0.01, settings=SETTINGS)
    return [folder / "uncorrected" / "dump", folder / "corrected" / "dump"]


def test_two_runs_side_by_side(two, tmp_path, undrawn):
    page = Page(write(two, tmp_path / "report.html"))
    assert "Rollout report: uncorrected/dump against corrected/dump" in page.text
    (a, b) = (read_dump(folder).logs for folder in two)
    for column, logs in ((1, a), (2, b)):
        expected = {entry["step"]: entry[f"{PREFIX}k3_kl"] for entry in logs}
        assert page.trend(OVERVIEW[0], column) == pytest.approx(expected, rel=1e-3)
    said = re.search(
        r"Reward uncorrected/dump .*?, ([\d.]+) at step 6; corrected/dump .*?, ([\d.]+) at step 6", page.text
    )
    assert [float(x) for x in said.groups()] == pytest.approx([a[-1]["reward"], b[-1]["reward"]], rel=2e-3)
    assert "A: uncorrected/dumpLook into it" in page.text
    assert "B: corrected/dumpHealthy" in page.text
    assert "rollout_rs_threshold null[[0.99, 1.01]]".replace(" ", "") in page.text.replace(" ", "")
    for finding in examine(a, RolloutCorrectionConfig(rollout_correction="disabled").settings):
        assert shown(finding.seen) in page.text


def test_the_picture_of_two_runs_and_of_one(two, tmp_path):
    for sources, name in ((two, "two.png"), (two[:1], "one.png")):
        assert main(["report", *map(str, sources), "-o", str(tmp_path / name)]) == 0
        picture = matplotlib.image.imread(tmp_path / name)
        height, width = picture.shape[:2]
        assert 1000 < width < 1400
        assert height > 0.4 * width
        for part in np.array_split(picture[..., :3], 4):  # text, or a chart
            assert part.std() > 0.03


# What is damaged or missing -----------------------------------------------------------------------------------------------


def damage_of(folder, output, capsys) -> tuple[Page, str]:
    """The page, and what is printed, of a dump that can be read in part."""
    assert main(["report", str(folder), "-o", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8")), capsys.readouterr().err


# Settings -----------------------------------------------------------------------------------------------------------------


def settings_of(path) -> list[dict]:
    section = path.read_text(encoding="utf-8").split('<section id="settings">')[1].split("</section>")[0]
    parts = section.split("<pre>")[1:]
    return [yaml.safe_load(html.unescape(part.split("</pre>")[0])) for part in parts]


def test_settings_are_those_of_the_run_and_those_that_compare_suggests(dump, page):
    own, suggested = settings_of(dump.parent / "report.html")
    assert RolloutCorrectionConfig(**own).settings == RolloutCorrectionConfig(**SETTINGS).settings
    args = make_parser().parse_args(["compare", str(dump), "--json"])
    compared = json.loads(args.run(args))
    assert suggested == compared["recommendation"]["settings"]
    assert f"{RolloutCorrectionConfig(**SETTINGS).description}" in page.text
    assert "decoupled_geo_rs_token_tis with changes: " in page.text


def test_a_dump_without_settings_is_called_unknown(tmp_path, undrawn, capsys):
    """By every command that reads it, and nothing assumes the default preset."""
    folder = make_dump(tmp_path / "dump", spread=0.3, steps=8, age=8)
    for path in files_of(folder):
        table, _, about, _ = read_table(path)
        write_rows(folder, *map(int, re.findall(r"\d+", path.name)), table.to_pylist(), {}, about)
    page = Page(write(folder, tmp_path / "report.html"))
    assert "Unknown settings" in page.text
    assert "TRL's loss, unchanged" not in page.text
    assert "Settings to try" not in page.text
    assert "unless the run has it" in page.text
    assert "The run corrects for" not in page.text
    assert "the run corrects for it" not in page.text.replace("it is not known whether the run corrects for it", "")
    assert settings_of(tmp_path / "report.html") == [{"rollout_correction": "auto"}]
    args = make_parser().parse_args(["compare", str(folder)])
    assert "The dump does not say with which settings it was written" in (compared := args.run(args))
    assert "assumes the default, `rollout_correction: auto`." in compared
    main(["diagnose", str(folder)])
    assert "The run corrects for" not in capsys.readouterr().out


def dump_of_another_release(folder):
    """A dump with a setting that this release does not have."""
    for path in files_of(make_dump(folder, spread=0.3, steps=8, age=8)):
        table, settings, about, _ = read_table(path)
        step, rank = map(int, re.findall(r"\d+", path.name))
        write_rows(folder, step, rank, table.to_pylist(), {**settings, "rollout_magic": 1}, about)
    return folder


def test_settings_that_cannot_be_applied_are_not_compared(tmp_path, capsys):
    folder = dump_of_another_release(tmp_path / "dump")
    assert main(["compare", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the settings in the dump cannot be read, perhaps because another release wrote it" in line
    assert "with this one: `rollout_magic`" in line


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_settings_that_cannot_be_read_count_as_unknown(command, tmp_path, undrawn, capsys):
    """A dump of another release is still worth reading."""
    folder = dump_of_another_release(tmp_path / "dump")
    page = tmp_path / "report.html"
    status = main([command, str(folder), *(["-o", str(page)] if command == "report" else [])])
    out, said = capsys.readouterr()
    assert status != 2, said
    assert said.count("the settings in the dump count as unknown (they cannot be read: ") == 1
    assert "rollout_magic" in said
    assert "?." not in said
    assert "The run corrects for" not in out
    if command == "report":
        text = Page(page.read_text()).text
        assert "Unknown settings" in text
        assert "he settings in the dump count as unknown (they cannot be read: " in text


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["policies that agree", "no healthy step"])
def test_the_report_recommends_the_settings_that_compare_recommends(spread, tmp_path, undrawn):
    folder = make_dump(tmp_path / "dump", spread=spread)
    page = Page(write(folder, tmp_path / "report.html"))
    args = make_parser().parse_args(["compare", str(folder), "--json"])
    best = json.loads(args.run(args))["recommendation"]
    assert settings_of(tmp_path / "report.html")[1:] == ([best["settings"]] if best["settings"] else [])
    assert ("Settings to try" in page.text) == bool(best["settings"])
    assert best["why"].replace("`", "") in page.text


def test_an_alarm_in_the_log_of_the_trainer_counts_where_the_dump_has_no_log(tmp_path, undrawn, capsys):
    """In each command as in the alarm: a small gap of the dump is no reason to leave the settings."""
    folder = make_run(tmp_path / "run", log_of_gaps([0.001, 0.001, *[0.02] * 10]))
    make_dump(folder / "dump", spread=0.003, worst=0, settings={"rollout_correction": "disabled"}, logs=False)
    advised = {"rollout_correction": "auto"}
    page = Page(write(folder, tmp_path / "report.html"))
    assert "k3_uncorrected: rollout_corr/k3_kl" in page.text
    assert settings_of(tmp_path / "report.html")[1:] == [advised]
    assert "nothing unhealthy was seen" not in page.text
    capsys.readouterr()
    assert main(["diagnose", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["correction"]["settings"] == advised
    assert main(["compare", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]["settings"] == advised
    # without that log, nothing unhealthy is seen
    assert main(["diagnose", str(folder / "dump")]) == 0


@pytest.mark.filterwarnings("ignore:`rollout")
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_correction": "disabled"},
        {"rollout_is": "geometric", "rollout_is_batch_normalize": True, "rollout_nan_policy": "neutralize"},
    ],
)
def test_settings_of_every_kind_are_drawn_and_can_be_read_back(settings, tmp_path):
    folder = make_dump(tmp_path / "dump", steps=2, settings=settings, logs=False)
    page = Page(write(folder, tmp_path / "report.html"))
    own = settings_of(tmp_path / "report.html")[0]
    assert RolloutCorrectionConfig(**own).settings == RolloutCorrectionConfig(**settings).settings
    assert not page.charts


# One story, and one size --------------------------------------------------------------------------------------------------


def lagging(folder, **settings) -> Path:
    """A dump of completions that are 0 to 8 steps old, whose gap grows with their age, and is corrected."""
    content = read_dump(make_dump(folder / "made", steps=20, length=60, spread=0.003, worst=0, broken=0))
    rng = np.random.default_rng(0)
    for row in content.rows:
        row["staleness"] = min(row["step"] - 1, 8)
        size = 0.02 * row["staleness"]
        moved = rng.normal(-(size**2) / 2, size, len(row["mask"]))
        row["rollout_logps"] = [logp - 1.0 for logp in row["rollout_logps"]]  # so that none is likelier than 1
        row["train_logps"] = (np.array(row["rollout_logps"]) + moved).tolist()
        write = {**content.fields, **dataclasses.asdict(RolloutCorrectionConfig(**settings))}
    for step in range(1, 21):
        write_rows(folder / "dump", step, 0, [row for row in content.rows if row["step"] == step], write)
    shutil.copy(folder / "made" / "logs.jsonl", folder / "dump")
    return folder / "dump"


def test_a_healthy_run_that_corrects_for_old_weights_is_told_one_story(tmp_path, undrawn):
    folder = lagging(tmp_path, rollout_correction="auto")
    page = Page(write(folder, tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    banner = page.text[: page.text.index("What happened")]
    assert "Its gap is expected, and is corrected." in banner
    assert "Expected: the sampler is up to" in page.text
    assert "Stale weights: samples of an older policy" in page.text
    assert "Nothing has to be done. To make the gap smaller: sample with newer weights" in page.text
    assert not re.search(r'class="card (warning|critical)"', text)
    assert "Settings to try" not in page.text
    assert "# the settings of the run" not in text
    assert "Found:" not in page.text


def test_a_run_that_does_not_correct_for_old_weights_is_told_to(tmp_path, undrawn):
    page = Page(write(lagging(tmp_path, rollout_correction="disabled"), tmp_path / "report.html"))
    assert "Found: stale weights" in page.text
    assert "as expected" not in page.text
    assert settings_of(tmp_path / "report.html")[1] == {"rollout_correction": "auto"}


def test_a_run_has_the_same_color_in_every_picture():
    def color(*folders):
        runs = [facts_module.analyse(read_run(str(folder)), folder.parent.name, "x") for folder in folders]
        chart = log_charts.overview(runs).charts[0]
        return {curve.name or runs[0].name: curve.color for curve in chart.curves}

    def both(folder):
        return make_dump(folder / "off" / "dump", settings={"rollout_correction": "disabled"}), make_dump(
            folder / "on" / "dump", settings=SETTINGS
        )

    with tempfile.TemporaryDirectory() as folder:
        off, on = both(Path(folder))
        assert color(off) == {"off": "second"}
        assert color(on) == {"on": "line"}
        assert color(off, on) == color(on, off) == {"off": "second", "on": "line"}


def test_texts_of_any_size_make_a_page_of_a_size(tmp_path, undrawn):
    """A server may write whatever text it likes for a token, and a file of 10 kB may hold a million tokens."""
    content = read_dump(make_dump(tmp_path / "made", steps=1, rows=4, length=40, tools=False))
    for row in content.rows:
        row["tokens"] = ["\u6570" * 200_000] * len(row["tokens"])
        row["prompt"] = "?" * 2_000_000
    write_rows(tmp_path / "wide", 1, 0, content.rows, content.fields)
    page = write(tmp_path / "wide", tmp_path / "report.html")
    assert len(page) < 700_000
    assert "\u6570" * 100 + "\u2026" in page
    assert "\u6570" * 101 not in page
    row = content.rows[0]
    for name, value in row.items():
        if isinstance(value, list) and name != "prompt_ids":
            row[name] = ["a"] * 1_000_000 if name == "tokens" else [value[0]] * 1_000_000
    write_rows(tmp_path / "long", 1, 0, [{**row, "sampled": True}], content.fields)
    start = time.monotonic()
    assert len(write(tmp_path / "long", tmp_path / "report.html")) < 300_000
    assert time.monotonic() - start < 100


# The worst tokens -----------------------------------------------------------------------------------------------------------


def test_the_worst_token_is_the_worst(dump, page):
    worst = max(
        abs(train - rollout)
        for row in read_dump(dump).rows
        for mask, train, rollout in zip(row["mask"], row["train_logps"], row["rollout_logps"], strict=True)
        if mask and math.isfinite(train - rollout)
    )
    table = page.tables[max(page.tables)]
    start = next(i for i, row in enumerate(table) if "times" in row)
    rows = [row for row in table[start + 1 :] if row[1] != "NaN"]
    assert abs(float(rows[0][1])) == pytest.approx(worst, rel=0.01)
    assert len(rows) == len({row[0] for row in rows}) > 5
    assert [row[1] for row in table[start + 1 :]][: -len(rows)] == ["NaN"] * (len(table) - start - 1 - len(rows))


def test_worst_tokens_stand_in_their_text_and_broken_ones_are_marked(dump, page):
    pattern = r'<td class="text">(.*?)<mark class="(\w*)">(.*?)</mark>(.*?)</td><td>(.*?)</td>'
    shown = re.findall(pattern, (dump.parent / "report.html").read_text(encoding="utf-8"))
    texts = ["".join(row["tokens"]).replace("\n", "↵") for row in read_dump(dump).rows]
    for before, shade, token, after, d in shown:
        assert any(html.unescape(before + token + after) in text for text in texts)
        assert len(before + after) >= 6  # tokens of context
        assert (shade == "broken") == (d == "NaN")
    assert {d == "NaN" for *_, d in shown} == {True, False}
    assert 'class="broken">not finite' in (dump.parent / "report.html").read_text(encoding="utf-8")


# Text that others wrote ---------------------------------------------------------------------------------------------------


EVIL = [
    "<script>alert(1)</script>",
    "</pre></style>",
    '"><img src=x onerror=alert(1)>',
    "&amp;",
    "|`*_#@x",
    "\u202egnp.\u2066exe\x00",
]
MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\x00]")  # of direction, which reorder a text, and NUL


@pytest.fixture
def hostile(dump, tmp_path):
    content = read_dump(dump)
    rows = [{**row, "tokens": [EVIL[i % len(EVIL)] for i in range(len(row["tokens"]))]} for row in content.rows[:8]]
    rows = [{**row, "prompt": "</div>" + "".join(EVIL), "completion": "".join(EVIL)} for row in rows]
    folder = tmp_path / "<b>&$x$\u202e"
    write_rows(folder, 1, 0, rows, content.fields, {"model": "llama\u2067"})
    return folder


def test_text_of_the_dump_is_escaped(hostile, tmp_path):
    text = write(hostile, tmp_path / "report.html")
    page = Page(text)
    assert not {"script", "img", "b"} & page.tags
    assert "onerror" not in dict(page.attributes)
    assert "<script>alert(1)</script>" in page.text
    assert "&amp;amp;" in text
    assert "Rollout report: <b>&$x$\\u202e" in page.text
    assert not MARKS.findall(text)
    assert "\\u202egnp." in page.text
    assert "llama\\u2067" in page.text


def test_of_two_equal_runs_both_are_seen():
    steps = pd.Index(range(1, 9), name="step")
    log = pd.DataFrame({"rollout_corr/k3_kl": 0.01 * steps, "reward": 0.1 * steps}, index=steps)
    for other, hidden in ((log, True), (2 * log, False)):
        for chart in draw_trends(log_charts.OVERVIEW, {"first": log, "second": other}):
            assert [curve.dashed for curve in chart.curves] == [False, hidden]
            assert len({curve.color for curve in chart.curves}) == 2


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_the_same_input_gives_the_same_output(name, dump, tmp_path):
    written = []
    for i in (1, 2):
        (tmp_path / f"{i}").mkdir()
        assert main(["report", str(dump), "-o", str(tmp_path / f"{i}" / name)]) == 0
        written.append((tmp_path / f"{i}" / name).read_bytes())
    assert written[0] == written[1]


# What cannot be read or written -------------------------------------------------------------------------------------------


def _text(name: str, text: str):
    return lambda folder, _: (folder / name).write_text(text) and folder / name


def _truncated(folder, dump):
    path = folder / "step-00000001-rank-00000.parquet"
    path.write_bytes(next(dump.glob("*.parquet")).read_bytes()[:-100])
    return folder


def _foreign_file(folder, _):
    pq.write_table(pa.table({"a": [1]}), folder / "data.parquet")
    return folder / "data.parquet"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder, _: folder / "missing", "no such file or folder"),
        (
            lambda folder, _: folder,
            "it contains neither a dump (files step-*.parquet) nor a log (trainer_state.json, a history of W&B",
        ),
        (_text("trainer_state.json", '{"log_history": [{"ste'), "trainer_state.json is damaged or not JSON"),
        (_text("other.json", "[1, 2]"), "other.json is JSON, but neither the state of a trainer"),
        (_text("other.json", '{"log_history": 1}'), "other.json: `log_history` must be a list of entries"),
        (_text("trainer_state.json", '{"log_history": []}'), "trainer_state.json holds no log entries yet"),
        (
            _text("trainer_state.json", '{"log_history": [{"step": 1, "loss": 1}]}'),
            "contains no `rollout_corr/` metrics",
        ),
        (
            _text("trainer_state.json", '{"log_history": [{"rollout_corr/kl": 1}]}'),
            "does not tell the optimizer step",
        ),
        (
            _text("notes.txt", "hello\nworld"),
            "this is neither a file of a dump (step-*.parquet) nor a log that can be read",
        ),
        (_truncated, "step-00000001-rank-00000.parquet is damaged, or it is not a Parquet file"),
        (_foreign_file, "data.parquet is a Parquet file, but `rollout_dump_dir` did not write it"),
    ],
)
def test_bad_input_is_one_line(make, message, dump, tmp_path):
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in", dump)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        write(source, tmp_path / "report.html")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("report.pdf", "must end in .html or .png"),
        ("missing/report.html", "there is no folder"),
        ("folder.html", "cannot be written"),
    ],
)
def test_bad_output_is_one_line(name, message, dump, tmp_path):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ValueError, match=message) as error:
        write(dump, tmp_path / name)
    assert len(str(error.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_without_matplotlib_it_says_what_to_install(dump, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("trl_rollout_corr.tools.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(dump), "-o", str(tmp_path / "report.html")]) == 2
    assert capsys.readouterr().err == "report needs matplotlib, which is missing: pip install matplotlib\n"


# In a browser -------------------------------------------------------------------------------------------------------------

PROBE = """<!DOCTYPE html><body>{frames}<script>
onload = () => {{
  document.title = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument.documentElement;
    const visible = [...page.querySelectorAll("svg")].filter(svg => svg.checkVisibility());
    const charts = visible.map(svg => svg.getBoundingClientRect());
    const inside = charts.every(box => box.width > 200 && box.right <= page.clientWidth);
    return [frame.clientWidth, page.scrollWidth - page.clientWidth, charts.length, inside].join(" ");
  }}).join(";");
}};
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_no_browser_has_to_scroll_sideways(dump, page, tmp_path):
    text = html.escape((dump.parent / "report.html").read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px" srcdoc="{text}"></iframe>' for width in (320, 375, 1280)
    )
    (tmp_path / "probe.html").write_text(PROBE.format(frames=frames), encoding="utf-8")
    command = ["chromium", "--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    process = subprocess.run(
        [*command, (tmp_path / "probe.html").as_uri()], capture_output=True, text=True, timeout=400
    )
    title = process.stdout.split("<title>")[1].split("</title>")[0]
    for width, found in zip((320, 375, 1280), title.split(";"), strict=True):
        assert found.split() == [str(width), "0", str(len(page.charts)), "true"]
