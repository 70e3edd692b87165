"""The tokens that lose their gradient, on the page: tables by text, and single completions."""

import dataclasses
import math
from collections import Counter

import pytest

from tests.dumps import WORDS, make_dump, read_dump
from tests.test_report import write
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.tools.dump.folder import write_rows
from trl_rollout_corr.tools.report import html_page
from trl_rollout_corr.tools.report.run import read_run
from trl_rollout_corr.tools.report.token_tables import find_lost


TRUNCATED = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.06,
    "rollout_rs": ["token_k1"],
    "rollout_rs_threshold": [[0.9, 1.1]],
}
AUTO = {"rollout_correction": "auto"}
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": [0.9, 1.1]}
TAG = WORDS.index(" <b>")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Leave the charts empty, which saves a second a page."""
    monkeypatch.setattr(html_page, "svg", lambda chart: "")


def tables_of(folder):
    run = read_run(str(folder))
    return find_lost(run.dump.sequences, run.settings)


def tokens_of(rows):
    """Every token of the loss with a finite log-ratio, of the sequences drawn at random."""
    for row in rows:
        for i, token in enumerate(row["tokens"]):
            d = row["train_logps"][i] - row["rollout_logps"][i]
            if row["sampled"] and row["mask"][i] and math.isfinite(d):
                yield {**{name: row[name][i] for name in ("train_logps", "rollout_logps", "coefficients")},
                       "text": token, "d": d, "advantage": row["advantage"]}  # fmt: skip


@pytest.mark.parametrize("settings", [TRUNCATED, ICEPOP])
def test_tables_are_those_of_a_loop_over_the_tokens_drawn_at_random(tmp_path, settings):
    folder = make_dump(tmp_path / "dump", rows=24, spread=0.08, broken=1, sampled=12, settings=settings)
    lost, rows = tables_of(folder), read_dump(folder).rows
    assert {row["sampled"] for row in rows} == {True, False}
    assert [table.sign for table in lost.tables] == ["positive", "negative"]
    for table in lost.tables:
        sign = 1 if table.sign == "positive" else -1
        of_sign = [token for token in tokens_of(rows) if token["advantage"] * sign > 0]
        chosen = [token["text"] for token in of_sign if token["coefficients"] == 0]
        shares = {
            text: (n, n / len(chosen), sum(token["text"] == text for token in of_sign) / len(of_sign))
            for text, n in Counter(chosen).items()
        }
        assert {row.example.text: (row.times, row.share, row.occurs) for row in table.rows}.items() <= shares.items()
        assert [row.times for row in table.rows] == sorted((n for n, *_ in shares.values()), reverse=True)[:12]
        assert (table.rejected, table.tokens) == (len(chosen), len(of_sign))
        first = table.rows[0]
        here = [token for token in of_sign if token["text"] == first.example.text and not token["coefficients"]]
        for mean, name in ((first.train, "train_logps"), (first.rollout, "rollout_logps")):
            assert mean == pytest.approx(sum(math.exp(token[name]) for token in here) / len(here), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"rollout_correction": "disabled"}, "No token"),
        ({"rollout_correction": "decoupled_seq_is_rs"}, "The criteria judge whole completions"),
        ({**TRUNCATED, "rollout_metrics_only": True}, "The run only measures"),
    ],
)
def test_the_text_says_what_the_tables_mean(tmp_path, settings, note):
    content = read_dump(make_dump(tmp_path / "made", spread=0.1))
    write_rows(tmp_path / "dump", 1, 0, content.rows, {**content.fields, **full(settings)})
    assert note in tables_of(tmp_path / "dump").text


def full(settings):
    """All fields of a configuration, as a dump holds them."""
    return dataclasses.asdict(RolloutCorrectionConfig(**settings))


# Single completions -------------------------------------------------------------------------------------------------------


def test_each_effect_has_a_mark_beside_its_colour_and_its_numbers(tmp_path):
    (row, *_), settings, _ = read_dump(make_dump(tmp_path / "made", steps=1, tools=False, vary=False))
    n = len(row["tokens"])
    effects = ["gone", "reduced", "raised", "outside", "full", "full"]
    factors = [0.0, 0.5, 1.5, 1.0, 1.0, 0.97]
    row |= {"advantage": -2.0, "sampled": True, "coefficients": factors + [1.0] * (n - 6)}
    row["mask"] = [effect != "outside" for effect in effects] + [True] * (n - 6)
    row["tokens"] = [f"t{i}" for i in range(n)]
    idle = {**row, "advantage": 0.0, "tokens": [f"z{i}" for i in range(n)]}
    write_rows(tmp_path / "dump", 1, 0, [row, idle], settings)
    text = write(tmp_path / "dump", tmp_path / "report.html")
    assert '<del class="gone" title="1: p ' in text
    assert 'factor 0" tabindex="0">t0</del>' in text
    assert 'factor 1" tabindex="-1">t4</span>' in text  # not a stop of the Tab key
    for i, effect in enumerate(effects):
        tag = "del" if effect == "gone" else "span"
        assert f'<{tag} class="{effect}"' in text
        assert f">t{i}</{tag}>" in text
    assert text.count('<span class="idle"') == n  # and the legend
    style = text.partition("</style>")[0]
    for effect in ("reduced", "raised", "gone"):
        assert "text-decoration" in style.partition(f"\n.{effect} {{")[2].partition("}")[0]


def test_long_completions_show_where_they_lost_and_leave_the_page_small(tmp_path):
    folder = make_dump(tmp_path / "made", steps=1, rows=16, length=4000, vary=False, spread=0.02, settings=TRUNCATED)
    rows, settings, _ = read_dump(folder)
    assert len(write(folder, tmp_path / "many.html")) < 1.5e6
    for row in rows:
        row["coefficients"] = [1.0] * 4000
        row["coefficients"][2000], row["mask"][2000] = 0.0, True
    write_rows(tmp_path / "dump", 1, 0, rows, settings)
    text = write(tmp_path / "dump", tmp_path / "one.html")
    assert text.count('<del class="gone" title="2001: p ') >= 5
    assert 'title="2002: p ' in text
    assert 'title="1500: p ' not in text
    assert " tokens …" in text
