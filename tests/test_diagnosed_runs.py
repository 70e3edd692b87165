"""Simulated runs with the faults of `benchmarks/diagnose/simulated.py`, and what `diagnose` says of their dumps."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.launching import ROOT, benchmarks
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.dump import folder as dump


with benchmarks("diagnose") as load_module:
    simulated = load_module("simulated")
SEED = 500  # neither of the design nor judged


@pytest.fixture
def said(tmp_path, capsys):
    """What `diagnose` prints of a simulated run, as text and as JSON, and its exit code."""

    def diagnosed(name: str, **fields) -> tuple[str, dict, int]:
        run = simulated.replace(simulated.CASES[name].run, **fields)
        folder = simulated.write(run, tmp_path / name, SEED)
        code = main(["diagnose", str(folder)])
        text = capsys.readouterr().out
        assert main(["diagnose", str(folder), "--json"]) == code
        return text, json.loads(capsys.readouterr().out), code

    return diagnosed


def first(answer: dict) -> tuple[str, float]:
    cause = answer["causes"][0]
    return cause["cause"], cause["score"]


@pytest.mark.parametrize("name", ["offset_up", "offset_down", "small_offset_up", "small_offset_down"])
def test_a_constant_is_neither_a_temperature_nor_a_truncation(said, name):
    text, answer, code = said(name)
    assert (first(answer)[0], code) == ("offset", 1)
    assert "is not normalised" in text or "not normalised" in text
    assert abs(answer["causes"][0]["evidence"]["amount"]) == pytest.approx(0.05 if "small" in name else 0.2, abs=0.01)


@pytest.mark.parametrize(("name", "cause"), [("colder", "temperature"), ("cold", "temperature"), ("hot", "temperature"),
                                             ("top_p", "truncation"), ("low_top_p", "truncation")])  # fmt: skip
def test_temperature_and_truncation_are_told_apart(said, name, cause):
    assert first(said(name)[1])[0] == cause


@pytest.mark.parametrize("scores", [True, False])
def test_completions_that_come_again_are_no_fillers(said, scores):
    """The trainer learns from a fixed pool, so its values of the same tokens differ, and their mean ratio exceeds 1."""
    text, answer, _ = said("pool", scores=scores)
    assert first(answer)[0] == "recorded"
    assert "with the same tokens and values of the sampler" in text
    assert "not_sampled" not in text


def test_a_push_that_is_lost_is_seen_by_the_scores_after_it(said):
    text, answer, _ = said("never_pushed")
    name, certainty = first(answer)
    assert (name, certainty > 0.9) == ("never_pushed", True)
    assert "the sampler has moved by 0 since it drew the tokens (`age_k3_kl`)" in text


def test_without_scores_a_lost_push_is_only_possible(said):
    text, answer, _ = said("never_pushed", scores=False)
    name, certainty = first(answer)
    assert name in ("never_pushed", "stale")
    assert certainty <= 0.7
    assert text.startswith("Possible: ")


def test_an_engine_that_takes_a_part_of_the_weights_is_not_one_that_gets_none(said):
    name, certainty = first(said("pushed_in_part")[1])
    assert (name, certainty <= 0.7) == ("pushed_in_part", True)


@pytest.mark.parametrize("name", ["8_bits_later", "8_bits_later_unscored", "8_bits_at_first"])
def test_a_precision_that_changes_is_no_lost_push(said, name):
    text, answer, _ = said(name)
    assert first(answer)[0] == "changed"
    assert answer["causes"][0]["evidence"]["step"] == 8
    assert "never_pushed" not in text


_OLD = {
    "an age that begins at one step": {"lag": 4, "late_from": 9},
    "a learning rate that rises at one step": {
        "lag": 1,
        "noise": 0.002,
        "rate": 0.03,
        "schedule": lambda step: 10.0 if step >= 8 else 1.0,
    },
}


@pytest.mark.parametrize("what", _OLD)
def test_what_old_weights_do_at_one_step_is_no_change_of_the_engine(said, what):
    assert "(changed)" not in said("stale", **_OLD[what])[0]


def faster(step: int) -> float:
    """A learning rate that rises at the step at which the engine changes its precision."""
    return 10.0 if step >= 8 else 1.0


_BITS = simulated.with_bits(5, range(8, 100))
_SWITCHES = {
    "samples of age 1": ({"lag": 1}, 0.7),
    "a learning rate that rises": ({"rate": 0.03, "schedule": faster}, 0.9),
    "two steps on the samples of a push": ({"every": 2, "steps": 24}, 0.9),
    "two steps on the samples of a push, and a learning rate that rises": (
        {"every": 2, "steps": 24, "rate": 0.03, "schedule": faster},
        0.9,
    ),
    "samples of age 1, and a learning rate that rises": ({"lag": 1, "rate": 0.03, "schedule": faster}, 0.5),
}


@pytest.mark.parametrize("what", _SWITCHES)
def test_a_change_of_the_engine_is_told_from_what_else_happens(said, what):
    """A score after a push shows the gap with equal weights, whatever the age of the samples and the learning rate."""
    fields, least = _SWITCHES[what]
    text, answer, _ = said("8_bits_later", **{"pushed": _BITS, **fields})
    name, certainty = first(answer)
    assert (name, certainty > least) == ("changed", True)
    assert ("scored again right after a push" in text) == (
        "lag" not in fields
    )  # announced as old, so that none is scored


def test_weights_that_get_old_at_one_step_are_no_certain_change(said):
    _, answer, _ = said("stale_unannounced", late_from=9)
    assert first(answer)[0] in ("changed", "stale")
    assert first(answer)[1] <= 0.7


def test_old_weights_that_are_announced_as_fresh_are_not_expected(said):
    text, answer, code = said("stale_unannounced", lag=8, steps=24)
    assert (first(answer)[0], code) == ("stale", 1)
    assert text.startswith("Possible: stale weights")


def test_small_moves_that_arrive_in_part_are_not_surely_lost(said):
    """Each move is below the noise of the kernels, so that nobody can tell whether a part of it arrives."""
    for name, certainty in map(first, (said("pushed_in_part", rate=rate)[1] for rate in (0.1, 0.3))):
        assert name != "never_pushed" or certainty <= 0.9


def test_a_gap_that_grows_over_several_steps_did_not_change_at_one():
    """The announced age of the stale run of the tutorial is 8 from step 8 on, and its gap keeps growing until step 40."""
    observed = simulated.read_tokens(ROOT / "benchmarks" / "tutorial" / "uncorrected")
    assert [finding.name for finding in simulated.diagnose(observed).findings] == ["stale"]


def test_a_cause_within_a_part_of_the_completions_is_named(said):
    text, answer, _ = said("top_p_of_half")
    assert [cause["cause"] for cause in answer["causes"]][:2] == ["some_completions", "truncation"]
    assert "looked at alone, these completions show more" in text
    assert answer["causes"][1]["settings"].items() >= {"top_p": 1.0, "top_k": 0, "min_p": None}.items()


@pytest.mark.parametrize("name", ["drawn_hot", "drawn_cold", "drawn_at_random"])
def test_tokens_of_another_distribution_are_seen_by_the_entropy(said, name):
    text, answer, code = said(name)
    assert (first(answer)[0], code) == ("other_draws", 1)
    assert "the trainer's entropy in the log" in text


@pytest.mark.parametrize("entropy", [True, False])
def test_a_healthy_answer_says_what_it_looked_at(said, entropy):
    text, answer, code = said("exact", entropy=entropy)
    assert (answer["verdict"], code) == ("nothing", 0)
    assert ("as it is if tokens are drawn with the reported probabilities" in text) == entropy
    assert ("does not prove that the tokens were drawn from these values" in text) != entropy


def test_without_an_entropy_nothing_is_said_of_the_draws(said):
    text, _, code = said("drawn_hot", entropy=False)
    assert code == 0
    assert "does not prove that the tokens were drawn from these values" in text


@pytest.mark.parametrize("name", ["short", "short_exact", "short_8_bits", "rounding", "unscored"])
def test_a_healthy_run_is_healthy_however_short(said, name):
    text, answer, code = said(name)
    assert (answer["healthy"], code) == (True, 0)
    assert "Unknown" not in text
    assert ("too few tokens" in text) == (name in ("short", "short_8_bits"))


def test_the_tutorial_has_a_healthy_run(capsys):
    assert main(["diagnose", str(ROOT / "benchmarks" / "tutorial" / "fresh")]) == 0
    assert "rollout_correction" not in capsys.readouterr().out


def test_a_gap_by_the_sign_of_the_advantage_is_told(said):
    text, answer, _ = said("by_reward")
    assert first(answer)[0] == "by_advantage"
    assert "in completions with a negative advantage" in text


def against_rewarded_tokens(row, dice):
    """Noise on the values where the advantage of the token is negative, with the mean ratio of samples."""
    logps, punished = np.asarray(row["rollout_logps"]), np.asarray(row["advantages"]) < 0
    scale = 0.3 * (1 - np.exp(logps)) * punished
    row["rollout_logps"] = np.minimum(logps - scale * dice.normal(size=len(scale)) + scale**2 / 2, 0.0).tolist()


def test_a_gap_by_the_sign_of_the_advantage_of_a_token_is_told(said):
    """The advantages of a completion add up to 0, so that its mean tells nothing."""
    text, answer, _ = said("by_reward", of_tokens=True, change=against_rewarded_tokens)
    assert first(answer)[0] == "by_advantage"
    assert "in tokens with a negative advantage" in text
    assert answer["causes"][0]["share_of_squared_log_ratio"] > 0.9


def cut_where_punished(row, dice):
    """Values that are too large where the advantage of the token is negative, as those of `top_p` are."""
    logps, punished = np.asarray(row["rollout_logps"]), np.asarray(row["advantages"]) < 0
    row["rollout_logps"] = np.minimum(logps + 0.25 * punished, 0.0).tolist()


def test_the_tokens_of_one_sign_are_looked_at_alone(said):
    _, answer, _ = said("by_reward", of_tokens=True, change=cut_where_punished)
    assert [cause["cause"] for cause in answer["causes"]] == ["by_advantage", "truncation"]


def test_old_weights_are_seen_by_the_advantages_of_tokens(said):
    """The trainer moved toward rewarded tokens, whatever the mean advantage of a completion."""
    _, answer, _ = said("stale_unannounced", of_tokens=True, lag=8, steps=24)
    assert first(answer)[0] == "stale"
    assert answer["causes"][0]["evidence"]["rewarded"] > 0.3


def test_old_weights_are_no_gap_by_the_sign_of_the_advantage(said):
    """The policy moves toward rewarded tokens and away from the others, and not by the same amount."""
    assert "(by_advantage)" not in said("stale", of_tokens=True, steps=24)[0]


def test_prompts_of_one_step_are_no_prompts_that_are_always_off(said):
    """All prompts of some steps show the gap, because their steps do."""
    for name in ("lost_later", "8_bits_at_first"):
        assert "(some_prompts)" not in said(name)[0]


def test_a_cache_that_was_noted_without_its_precondition_proves_nothing(said):
    assert "(prefix_cache)" not in said("noted_cache")[0]


def test_the_page_has_the_answers_that_were_judged():
    folder = ROOT / "benchmarks" / "diagnose"
    page = (folder / "SIMULATED.md").read_text()
    for name in ("simulated.json", "simulated_second.json"):
        for table in simulated.tables(json.loads((folder / name).read_text())):
            assert table + "\n" in page


def test_one_text_is_one_sample_however_often_it_comes(tmp_path):
    """Log-ratios of the same token after the same words are no sign that the token shows them everywhere."""
    run = simulated.replace(simulated.CASES["exact"].run, steps=4)
    folder, dice = simulated.write(run, tmp_path / "dump", SEED), np.random.default_rng(0)
    rows = [row for path in dump.files_of(folder) for row in pq.read_table(path).to_pylist()]
    some = rows[:4]
    for row in some:
        noise = 0.05 * dice.normal(size=len(row["mask"]))
        row["train_logps"] = (np.asarray(row["rollout_logps"]) + noise).tolist()
    again = [{**row, "staleness": 0} for row in some for _ in range(20)]
    dump.write_rows(tmp_path / "again", 1, 0, again, {}, {"adapter": "none"})
    observed = simulated.read_tokens(tmp_path / "again")
    assert observed.once.sum() <= sum(len(row["mask"]) for row in some)
    names = [finding.name for finding in simulated.diagnose(observed).findings]
    assert "weights" not in names
    assert "not_sampled" not in names
