"""The log of a trainer of TRL, without this package: what `diagnose` suspects, and what `report` shows."""

import html
import json
import math
import random
import re

import pytest

from tests.dumps import make_dump
from tests.training import TRAINERS, BrokenSampler, build, messages
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.diagnosis.trl_log import gap_of_ratio
from trl_rollout_corr.tools.monitor.stock import GAP, LENGTH, RATIO


NOISE = random.Random(0)
# Ratios by step. The first three are public runs: one that learned nothing, one that was given up, one whose vLLM slept
FLAT = {step: 0.59 + NOISE.gauss(0, 0.02) for step in range(10, 1491, 10)}
SUDDEN = dict(enumerate([0.97, 0.75, 0.4, 0.2, 0.065], 1))
SLOW = {step: 1.0 - 0.34 * step / 2000 + NOISE.gauss(0, 0.01) for step in range(0, 2001, 10)}
HEALTHY = {step: 0.99 + NOISE.gauss(0, 0.02) for step in range(1, 60)}


def write(folder, ratios, **others):
    """The state of a trainer of TRL; `others` are metrics that go from one value to another."""
    entries = []
    for i, (step, ratio) in enumerate(ratios.items()):
        entry = {"step": step, "loss": 0.1, "reward": 0.4, "learning_rate": 1e-6, RATIO: ratio}
        for key, (first, last) in others.items():
            name = {"gap": GAP, "length": LENGTH}[key]
            entry[name] = first + (last - first) * i / (len(ratios) - 1)
        entries.append(entry)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(
        json.dumps({"log_history": [*entries, {"step": 9, "train_runtime": 1.0}]})
    )
    return folder


def suspected(capsys, folder):
    code = main(["diagnose", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    return [cause["cause"] for cause in found["causes"]]


def test_a_report_quotes_the_worst_and_the_last_value_and_the_fall_of_the_reward(tmp_path, capsys):
    """The weight crosses its limit at 0.78, and the run ends at 0.05 with a reward of 0.02."""
    folder, steps = tmp_path / "run", range(10, 1001, 10)
    ratios = {
        step: 0.97 if step < 600 else max(0.78 - (step - 600) / 300, 0.03) + 0.02 * (step > 990) for step in steps
    }
    write(folder, ratios, length=(90, 90))
    state = json.loads((folder / "trainer_state.json").read_text())
    for entry in state["log_history"][:-1]:
        good = entry["step"] < 600
        entry["reward"] = (0.7 if good else max(0.7 - (entry["step"] - 600) / 200, 0.02)) + NOISE.gauss(0, 0.01) * good
    (folder / "trainer_state.json").write_text(json.dumps(state))
    main(["report", str(folder), "-o", str(tmp_path / "page.html")])
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("Look into it. ")
    assert "At worst, `sampling/importance_sampling_ratio/mean` is 0.03 (step " in said
    assert "and 0.05 at the end." in said
    assert re.search(r"The reward fell from 0\.70?\d* \(step \d+\) to 0\.02, both means of 5 values\.", said)
    assert "The reward fell from 0.7" in (tmp_path / "page.html").read_text()


def test_a_reward_that_rises_or_only_varies_did_not_fall(tmp_path, capsys):
    for name, reward in (("rises", lambda i: i / 100), ("varies", lambda i: 0.5 + NOISE.gauss(0, 0.1))):
        folder = write(tmp_path / name, HEALTHY)
        state = json.loads((folder / "trainer_state.json").read_text())
        for i, entry in enumerate(state["log_history"][:-1]):
            entry["reward"] = reward(i)
        (folder / "trainer_state.json").write_text(json.dumps(state))
        main(["report", str(folder), "-o", str(tmp_path / f"{name}.html")])
        assert "reward fell" not in capsys.readouterr().out


@pytest.mark.parametrize("known", [{}, {"length": (90, 90)}, {"gap": (0.006, 0.006), "length": (90, 90)}], ids=str)
def test_three_shapes_are_three_first_suspicions(known, tmp_path, capsys):
    shapes = {"flat": FLAT, "sudden": SUDDEN, "slow": SLOW, "healthy": HEALTHY}
    found = {}
    for name, ratios in shapes.items():
        moving = {
            key: (a, a + 1.0) if name in ("sudden", "slow") and key == "gap" else (a, b)
            for key, (a, b) in known.items()
        }
        found[name] = suspected(capsys, write(tmp_path / name, ratios, **moving))
    assert [causes[0] for causes in (found["flat"], found["sudden"], found["slow"])] == [
        "whole_completions",
        "broken",
        "drift",
    ]
    assert found["healthy"] == []


def test_what_else_a_log_can_show(tmp_path, capsys):
    longer = write(tmp_path / "longer", SLOW, gap=(0.006, 0.006), length=(20, 90))
    assert suspected(capsys, longer) == ["whole_completions"]
    far = write(tmp_path / "far", dict.fromkeys(range(9), 1e-8), gap=(0.8, 0.8), length=(4000, 4000))
    assert suspected(capsys, far) == ["large_gap"]
    assert suspected(capsys, write(tmp_path / "raw", dict.fromkeys(range(9), 1.6))) == ["large_gap"]
    tiny = write(tmp_path / "tiny", dict.fromkeys(range(1, 9), 1e-8), length=(90, 90))  # 0.2 nats a token
    assert suspected(capsys, tiny) == ["large_gap"]
    steps = {**HEALTHY, 20: 0.01, 40: 0.02}
    assert suspected(capsys, write(tmp_path / "steps", steps)) == ["single_steps"]
    assert suspected(capsys, write(tmp_path / "one", {1: 0.5})) == ["whole_completions"]


@pytest.mark.parametrize(("length", "cause"), [(4000, "whole_completions"), (90, "large_gap")])
def test_a_tiny_ratio_is_put_down_to_length_only_if_completions_are_long(length, cause, tmp_path, capsys):
    folder = write(tmp_path, dict.fromkeys(range(1, 9), 1e-6), length=(length, length))
    assert suspected(capsys, folder) == [cause]


@pytest.mark.parametrize(
    ("ratios", "causes"),
    [
        ({1: 2.9e-8, **dict.fromkeys(range(2, 9), math.nan)}, ["not_a_number", "large_gap"]),  # a public run
        (dict.fromkeys(range(1, 9), math.nan), ["not_a_number"]),
        ({**HEALTHY, 30: math.inf}, ["not_a_number"]),
    ],
    ids=["later", "always", "once"],
)
def test_a_ratio_that_is_no_number_is_the_first_suspicion(tmp_path, capsys, ratios, causes):
    folder = write(tmp_path / "run", ratios, length=(90, 90))
    assert suspected(capsys, folder) == causes
    assert main(["diagnose", str(folder)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Possible: ratios that are NaN or infinite.")
    lost = [step for step, ratio in ratios.items() if not math.isfinite(ratio)]
    assert f"NaN or infinite, first in step {lost[0]}." in text
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    assert "Healthy" not in (tmp_path / "report.html").read_text().partition("<h2")[0]


@pytest.mark.parametrize(("ratio", "length", "gap"), [(0.59, 1000, 0.0008), (0.78, 500, 0.0008), (0.53, 500, 0.002)])
def test_the_gap_of_a_ratio_is_that_of_the_calculation_about_trl(ratio, length, gap):
    """As in the table of `docs/trl.md`, the other way round."""
    assert gap_of_ratio(ratio, length) == pytest.approx(gap, rel=0.03)


def test_the_answer_states_its_doubt_and_the_page_draws_the_curve(tmp_path, capsys):
    folder = write(tmp_path / "run" / "checkpoint-10", FLAT, gap=(0.006, 0.006), length=(90, 90)).parent
    assert main(["diagnose", str(folder)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("Possible: weights of whole completions, which shrink with length.")
    for words in ("proves nothing", "a `k3_kl` of 0.0087 is", "vllm_importance_sampling_mode: token_truncate"):
        assert words in re.sub(r"0\.008[67]\d", "0.0087", text)
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    page = html.unescape((tmp_path / "report.html").read_text().replace("<code>", "`").replace("</code>", "`"))
    for words in (
        "TRL's mean importance ratio",
        "weight_of_completions",
        "A log contains means only",
        "of 90 tokens on average",
    ):
        assert words in page
    assert main(["report", str(folder), "-o", str(tmp_path / "report.png")]) == 0


def test_an_alarm_about_a_fall_does_not_put_it_down_to_length(tmp_path, capsys):
    folder = write(tmp_path, SUDDEN, length=(90, 90))
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 0
    page = html.unescape((tmp_path / "report.html").read_text())
    assert "the mean weight was 0.97 at the start" in page
    assert "even if nothing is wrong" not in page


# Weights of whole completions in a run of this package ------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.01, -0.01])
def test_small_weights_of_whole_completions_are_an_alarm_at_the_second_step(shift, tiny_model_path, tmp_path, caplog):
    def change(output):
        output["logprobs"] = [[logp + shift for logp in row] for row in output["logprobs"]]

    sampler = BrokenSampler(tiny_model_path, change, noise=0.0, min_length=60, max_length=60)
    fields = {"rollout_is": "sequence", "rollout_monitor": "warn", "max_completion_length": 60}
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields)
    trainer.train()
    said = [message for message in messages(caplog) if "weight_of_completions" in message]
    assert bool(said) == (shift > 0)
    if said:
        assert said[0].startswith(
            "▲ step 2: The mean importance weight of completions of 60 tokens on average is 0.55"
        )
        assert "Set `rollout_correction` to auto and remove `rollout_is`: " in " ".join(said[0].split())


def test_the_diagnosis_names_them_first(tmp_path, capsys):
    common = {"spread": 0.11, "length": 90, "vary": False, "tools": False, "gaussian": True, "steps": 3}
    trl = make_dump(tmp_path / "trl", settings={"rollout_correction": "trl"}, **common)
    main(["diagnose", str(trl), "--json"])
    found = json.loads(capsys.readouterr().out)
    first = found["causes"][0]
    assert (first["cause"], first["settings"]) == ("whole_completions", {})
    assert found["correction"]["settings"] == {"rollout_correction": "auto"}
    assert "Or set `vllm_importance_sampling_mode` to token_truncate, another" in found["correction"]["why"]
    assert first["score"] > 0.9
    assert first["evidence"]["weight"] < 0.8 < 0.95 < first["evidence"]["tokens"]
    ours = make_dump(tmp_path / "ours", settings={"rollout_is": "token"}, **common)
    main(["diagnose", str(ours), "--json"])
    assert "whole_completions" not in {cause["cause"] for cause in json.loads(capsys.readouterr().out)["causes"]}
    short = make_dump(tmp_path / "short", settings={"rollout_correction": "trl"}, **{**common, "spread": 0.01})
    main(["diagnose", str(short), "--json"])
    assert "whole_completions" not in {cause["cause"] for cause in json.loads(capsys.readouterr().out)["causes"]}
