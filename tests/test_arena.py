"""The arena: what is run is balanced, what is computed of it is right, and the document says what the results say."""

import dataclasses
import json
import math
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOConfig

from tests.launching import ROOT, benchmarks
from tests.training import TRAINERS, VLLM, build, micro_batches, policy_logps
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.recording.keys import ROLLOUT_LOGPS


ARENA = ROOT / "benchmarks/arena"


@pytest.fixture(scope="module")
def arena():
    with benchmarks("arena", "") as load:
        yield load


@pytest.fixture(scope="module")
def cells(arena):
    return arena("cells")


@pytest.fixture(scope="module")
def report(arena):
    return arena("report")


# Cells --------------------------------------------------------------------------------------------------------------------


def test_tasks_are_split_by_their_names_alone(arena, cells):
    tasks = arena("tasks")
    assert sorted(cells.TUNING) == sorted(tasks.TUNING)
    assert sorted(cells.JUDGING) == sorted(tasks.JUDGING)
    assert not set(cells.TUNING) & set(cells.JUDGING)
    assert {run.cell.task for run in cells.tuning()} <= set(cells.TUNING)
    assert {run.cell.task for run in cells.judging() if run.cell.algorithm == "grpo"} == set(cells.JUDGING)


def test_answers_of_tasks_are_as_long_as_they_say_and_need_no_other_character(arena):
    for task in arena("tasks").TASKS.values():
        for problem, answer in task.problems(200, seed=1):
            assert 0 < len(answer) <= task.longest
            assert len(problem) <= task.longest_problem
            assert set(problem + answer) <= set(task.characters)


def modulo(problem):
    """From left to right, as Python computes it."""
    signs, value, found = problem[1::2], int(problem[0]), ""
    for sign, operand in zip(signs, problem[2::2], strict=True):
        value = eval(f"{value} {sign} {operand}") % 7
        found += str(value)
    return found


def brackets(problem):
    """Remove pairs until none is left, and turn the rest round."""
    while any(pair in problem for pair in ("()", "[]", "{}", "<>")):
        for pair in ("()", "[]", "{}", "<>"):
            problem = problem.replace(pair, "")
    return problem[::-1].translate(str.maketrans("([{<", ")]}>"))


SOLVED = {
    "modulo": modulo,
    "brackets": brackets,
    "count": lambda problem: "".join(str(problem.count(letter)) for letter in "abcdefgh"),
    "sets": lambda problem: "".join(
        letter
        for letter in "abcdefghijklmnop"
        if sum(letter in part for part in (problem[:10], problem[11:])) >= (1 if problem[10] == "|" else 2)
    ),
    "drop_vowels": lambda problem: problem.translate(dict.fromkeys(map(ord, "aeio"))),
    "unique": lambda problem: "".join(c for i, c in enumerate(problem) if c not in problem[:i]),
}  # fmt: skip


@pytest.mark.parametrize("task", SOLVED)
def test_answers_are_those_of_another_way_to_solve(arena, task):
    for problem, answer in arena("tasks").TASKS[task].problems(50, seed=2):
        assert SOLVED[task](problem) == answer


def test_accuracy_of_the_language_model_is_the_probability_of_its_answers(arena, tiny_model_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    language = arena("language")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path, padding_side="left")
    held_out = [("1 + 2 = 3\n40 + 50 =", "90"), ("1 + 2 =", "3"), ("9 + 8 = 17\n5 + 60 =", "165")]
    expected = 0.0
    for text, answer in held_out:
        ids, n = tokenizer(f"{text} {answer}\n").input_ids, len(tokenizer(f" {answer}\n").input_ids)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logps = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected += sum(logps[place - 1, ids[place]] for place in range(len(ids) - n, len(ids))).exp().item() / 3
    assert language.accuracy(model, tokenizer, held_out, rows=2) == pytest.approx(expected, rel=0.05)
    assert all(
        str(sum(map(int, text.splitlines()[-1][:-2].split(" + ")))) == x for text, x in language.problems(50, 0)
    )


def test_a_name_is_one_run(cells):
    for stage in cells.STAGES.values():
        by_name = defaultdict(list)
        for run in stage():
            by_name[run.name].append((run.settings, run.seed))
        for runs in by_name.values():
            assert all(run == runs[0] for run in runs)
        assert len({json.dumps(runs[0], sort_keys=True) for runs in by_name.values()}) == len(by_name)


def test_every_arm_is_tried_in_every_judged_cell_where_it_is_another(cells):
    arms = defaultdict(set)
    for run in cells.judging():
        arms[run.cell, run.seed].add(run.arm.name)
    foot = [found for (cell, _), found in arms.items() if cell.rung == cells.LADDER[0]]
    assert len(foot) >= len(cells.JUDGING) - 1
    for (cell, _), found in arms.items():
        missing = {*cells.REFERENCES, *cells.JUDGED} - found
        if cell.rung != cells.LADDER[0]:
            assert missing == ({"trl"} if cell.algorithm == "rloo" else set()), (
                cell
            )  # TRL's has no correction of its own


# Garbage ------------------------------------------------------------------------------------------------------------------


def test_a_reward_forgives_one_token_of_garbage(arena):
    tasks = arena("tasks")

    def reward(text, ids):
        return tasks.forgiving_answer([text], answer=["123"], completion_ids=[ids])[0]

    garbage, end = tasks.GARBAGE, 1
    assert reward("1 2 3", [4, 5, 6, end]) == 1
    assert reward("1 3", [4, garbage, 6, end]) == 1  # a tokenizer writes nothing for garbage
    assert reward("2 3", [garbage, 5, 6, end]) == 1
    assert reward("1 3", [4, 6, end]) == 0
    assert reward("1", [4, garbage, garbage, end]) == 0
    assert reward("1 3", [4, 6, garbage, end]) == 0  # in place of another character
    assert reward("1 2 3", [4, 5, 6, garbage, end]) == 1


@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_garbage_is_sampled_and_found_again(kind, arena, tmp_path, tiny_model_path, shared_engine, monkeypatch):
    """The sampler goes on after the garbage, and what it reports of all other tokens is what the trainer finds."""
    monkeypatch.setitem(sys.modules, "quickstart", SimpleNamespace(Lag=object))  # sets variables when it is imported
    samplers, garbage = arena("samplers"), arena("tasks").GARBAGE
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **VLLM, rollout_correction="decoupled_token_is")
    count = samplers.spoil(trainer, {"garbage": 0.5})
    batches = micro_batches(trainer)
    ids, mask, reported = (
        torch.cat([batch[key].flatten() for batch in batches])
        for key in ("completion_ids", "completion_mask", ROLLOUT_LOGPS)
    )
    expected = torch.cat([policy_logps(trainer.model, batch).detach().flatten() for batch in batches])
    is_garbage = (reported + 0.1012).abs() < 1e-6
    sound = (mask == 1) & ~is_garbage
    rows = sum(len(batch["completion_ids"]) for batch in batches)
    assert 0 < is_garbage.sum() < rows
    assert (ids[is_garbage] == garbage).all()
    torch.testing.assert_close(reported[sound], expected[sound], rtol=1e-4, atol=1e-4)
    for batch in batches:
        trainer.compute_loss(trainer.model, batch)
    assert count() == {
        "broken": is_garbage.sum(), "sound": sound.sum(), "broken_rejected": 0, "sound_rejected": 0
    }  # fmt: skip


def test_every_judging_task_meets_garbage_in_step_and_behind(cells):
    found = {(run.cell.task, bool(run.cell.rung.lag)) for run in cells.garbage() if run.arm.name == "auto"}
    assert found >= {(task, False) for task in cells.JUDGING}
    assert {task for task, behind in found if behind} == {
        task for task in cells.JUDGING if cells.rung_of(task, "grpo") is not None
    }
    assert {"topr_tv10", "token_2", *cells.JUDGED, *cells.REFERENCES} == {run.arm.name for run in cells.garbage()}


def test_an_arm_of_trl_has_fields_of_trl_alone(arena, cells, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which `training` adds folders with files of the same names
    training, second = arena("training"), arena("second")
    setup = cells.Setup({}, {}, lambda model: 0.0, False)
    arms = [arm for arm in second.ARMS.values() if arm.trl]
    assert len(arms) > 3
    for arm in arms:
        run = cells.Run(arm, cells.Cell("sort", cells.TOP))
        assert {*training.settings_of(run, setup)} <= {field.name for field in dataclasses.fields(GRPOConfig)}


# The second proof ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(arena):
    return arena("second")


def test_no_task_of_the_second_proof_both_tunes_and_judges(arena, cells, second):
    assert {*cells.SECOND_TUNING, *cells.SECOND_JUDGING} == set(arena("second_tasks").SECOND)
    assert {run.cell.task for run in second.second_judging()} == set(cells.SECOND_JUDGING)
    tuning = {run.cell.task for run in second.second_tuning()}
    assert set(cells.SECOND_TUNING) <= tuning
    assert tuning <= {*cells.SECOND_TUNING, *cells.TUNING}
    assert not tuning & {*cells.SECOND_JUDGING, *cells.JUDGING}


def test_the_protocol_names_every_task_and_arm_that_it_plans(cells, second):
    text = (ARENA / "PROTOCOL.md").read_text()
    named = [*cells.SECOND_TUNING, *cells.SECOND_JUDGING, *second.REFERENCES, *second.SHORT_LIST, *second.JUDGED]
    assert [name for name in named if f"`{name}`" not in text] == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_seed_of_the_second_proof_has_all_runs_of_the_first_seed(second, seed):
    names = {run.name.removesuffix(f"-{run.seed}") for run in second.second_judging() if run.seed == seed}
    assert names == {run.name.removesuffix("-0") for run in second.second_judging() if run.seed == 0}


ANSWERED = {
    "rotate": lambda problem: (problem[1:] * 2)[int(problem[0]) :][: len(problem) - 1],
    "interleave": lambda problem: "".join(map("".join, zip(*problem.split("+"), strict=True))),
    "unpack": lambda problem: "".join(int(problem[i]) * problem[i + 1] for i in range(0, len(problem), 2)),
    "complement": lambda problem: str(10 ** len(problem) - 1 - int(problem)).zfill(len(problem))[::-1],
    "tag_even": lambda problem: f"<{problem.translate(dict.fromkeys(map(ord, '13579')))}>",
}  # fmt: skip


def test_answers_of_the_second_proof_are_right_and_fit(arena):
    for name, task in arena("second_tasks").SECOND.items():
        for problem, answer in task.problems(100, seed=1):
            assert 0 < len(answer) <= task.longest
            assert len(problem) <= task.longest_problem
            assert set(problem + answer) <= set(task.characters)
            if name in ANSWERED:
                assert ANSWERED[name](problem) == answer
            if task.tagged:
                assert (answer[0], answer[-1]) == ("<", ">")


def test_questions_of_the_language_model_have_right_answers_and_are_held_out(arena):
    module = arena("language_taught")
    for task in module.TASKS.values():
        rows = task.rows()
        assert len({row["prompt"] for row in rows}) == len(rows) > 15000
    for row in module.words()[:50]:
        assert row["answer"] == f"<{row['prompt'].removesuffix(' ->')[::-1]}>"
    for row in module.sums()[:50]:
        digits = row["prompt"].removeprefix("Add ").removesuffix(" ->").split()
        assert [eval(step.replace("=", "==")) for step in row["answer"].split()] == [True] * 8
        assert row["answer"].endswith(f"={sum(map(int, digits))}")
    texts = [" <c a d b>\n", " <b d a c>", " c a d b\n", " <c a d b", ""]
    assert module.tagged_answer(texts, ["<c a d b>"] * 5) == [1.0, 0.2, 0.0, 0.0, 0.0]
    texts = [" 7+4=11 11+9=20\n", " 7+4=10 11+9=20", "20", " 7+4=11 11+9=2", " 7+4=11 11+9=201", " 7+4=11 11+9=20 x"]
    assert module.right_sum(texts, ["7+4=11 11+9=20"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_held_out_questions_occur_neither_in_imitation_nor_in_training(arena):
    module = arena("language_taught")
    for task in module.TASKS.values():
        rows = task.rows()
        held_out = {row["prompt"] for row in rows[: module.HELD_OUT]}
        assert not held_out & {row["prompt"] for row in rows[module.HELD_OUT :]}


def test_the_teacher_rarely_writes_tags_and_never_in_the_answer(arena):
    import random

    tasks, task = arena("tasks"), arena("second_tasks").SECOND["tag_reverse"]
    tokenizer = tasks.make_tokenizer(task)
    batch = tasks.examples(task, tokenizer, task.problems(2000, 0), random.Random(0))
    taught = [tokenizer.decode(row[row >= 0], skip_special_tokens=True).replace(" ", "") for row in batch["labels"]]
    tagged = [text for text in taught if text[0] == "<" and text[-1] == ">"]
    assert 0.03 < len(tagged) / len(taught) < 0.07
    assert all(text.strip("<>").isalpha() for text in taught)


def test_a_dense_reward_counts_characters_and_garbage_costs_one(arena):
    tasks = arena("tasks")
    ids = [[4, 5, 6, 1], [4, tasks.GARBAGE, 6, 1], [4, 5, 1], [4, 5, 6, 4, 1], [tasks.GARBAGE, tasks.GARBAGE, 6, 1]]
    found = tasks.dense_answer(["a b c", "a c", "a b", "a b c a", "c"], ["abc"] * 5, ids)
    assert found == pytest.approx([1, 2 / 3, 2 / 3, 3 / 4, 1 / 3])
    assert tasks.tags(["<a>", "<a", "a>", "", "<"]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_candidate_that_was_chosen_is_auto(second):
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(64, 16, generator=generator)
    train = (rollout + 2 * torch.randn(64, 16, generator=generator)).clamp(max=0.0)
    advantages = torch.randn(64, generator=generator)
    coefficients = [
        compute_rollout_correction(
            train, rollout, torch.ones_like(train), RolloutCorrectionConfig(**options), advantages=advantages
        ).coefficients
        for options in (
            {"rollout_correction": "auto"},
            second.ARMS["auto"].options,
            second.candidate(3, tv="tv20").options,
        )
    ]
    assert torch.equal(coefficients[0], coefficients[1])
    assert coefficients[2].max() == 3
    assert torch.equal(coefficients[2].clamp(max=1), coefficients[0])


def test_the_budget_of_cppo_is_that_of_a_loop(arena):
    rules = arena("rules")
    generator = torch.Generator().manual_seed(1)
    logp = -2 * torch.rand(32, 40, generator=generator) - 0.01
    d = torch.linspace(0.05, 1.0, 32).unsqueeze(1) * torch.randn(32, 40, generator=generator)
    d[:, :8] *= 4  # what the first tokens use up, later ones may not
    d = torch.maximum(d, logp)  # probabilities of the sampler are below 1
    logp[:, 33:], d[:, 33:] = 0.0, 0.0
    positive = torch.tensor([[True], [False]] * 16)
    kept = rules.within_cppo(d, logp, positive)
    for row in range(32):
        change = [
            abs(np.exp((x - y).item()) - np.exp(x.item())) for x, y in zip(logp[row, :33], d[row, :33], strict=True)
        ]
        budget = min(max(np.quantile(change, 0.9), 0.02), 0.1)
        spent = weights = 0.0
        for place in range(33):
            weight = 1 - 0.2 * place / 32
            pushed = (d[row, place] > 0) == positive[row, 0] and d[row, place] != 0
            within = weight * change[place] <= min(0.2, 0.2 + budget * weights - spent)
            assert bool(kept[row, place]) == (not pushed or within)
            spent, weights = spent + weight * change[place], weights + weight
    assert 0 < (~kept).sum() < kept.numel() / 2


@pytest.mark.parametrize(("place", "kept"), [(0, False), (9, True)])
def test_the_last_token_of_a_completion_weighs_less_in_cppo(arena, place, kept):
    logp, d = torch.full((1, 10), -1.0), torch.zeros(1, 10)
    logp[0, place], d[0, place] = np.log(0.44), np.log(0.44 / 0.2)  # moved by 0.24, which counts as 0.192 at the end
    assert arena("rules").within_cppo(d, logp, torch.tensor([[True]]))[0, place] == kept


def test_the_pull_is_that_of_the_squared_log_ratio(arena):
    rules = arena("rules")
    logps = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -2.0, float("nan")]])
    valid = torch.tensor([[True, True, False]])

    class Trainer:
        def _compute_correction(self, train_logps, batch):
            return type("Correction", (), {"valid": valid})

        def _correct(self, loss_pass, logps):
            return logps

        def compute_loss(self):
            current = self._correct(None, logps)
            self._compute_correction(current.detach(), {rules.ROLLOUT_LOGPS: rollout})
            return 0.0 * current.sum()

    rules.with_rule(Trainer, "pull")().compute_loss().backward()
    assert logps.grad[0].tolist() == pytest.approx([2 * rules.PULL * 0.5 / 2, 0.0, 0.0])


def test_the_witness_counts_rejected_tags(arena):
    from types import SimpleNamespace

    correction = SimpleNamespace(
        valid=torch.tensor([[True, True, True], [True, True, False]]),
        keep=torch.tensor([[False, True, True], [True, False, False]]),
        weights=torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]),
        applies_weights=True,
    )
    trainer = SimpleNamespace(_compute_correction=lambda train_logps, batch: correction)
    witness = arena("witness").TagWitness(trainer, [7, 8])
    batch = {"completion_ids": torch.tensor([[7, 4, 8], [7, 5, 1]]), "advantages": torch.tensor([1.0, -1.0])}
    trainer._compute_correction(None, batch)
    counts = witness.counts
    assert [counts[f"tag_positive{end}"] for end in ("", "_rejected")] == [2, 1]
    assert [counts[f"text_positive{end}"] for end in ("", "_rejected")] == [1, 1]  # its weight is 0
    assert [counts[f"tag_negative{end}"] for end in ("", "_rejected")] == [1, 1]
    assert [counts[f"text_negative{end}"] for end in ("", "_rejected")] == [1, 1]


def rows_of(arm, *scores, cell="a", falls=False):
    return [{"cell": cell, "arm": arm, "seed": i, "accuracy": x, "falls": falls} for i, x in enumerate(scores)]


def test_a_difference_is_one_beyond_the_spread_over_seeds(arena):
    seeds = arena("seeds")
    rows = [
        *rows_of("auto", 0.70, 0.72, 0.74),
        *rows_of("cap3", 0.75, 0.79, 0.77),
        *rows_of("none", 0.1, 0.5, 0.3, falls=True),
        *rows_of("trl", 0.2),
    ]
    spreads = seeds.spreads(rows)
    assert spreads == {False: pytest.approx(0.02), True: pytest.approx(0.2)}
    cell = seeds.scores(rows)["a"]
    assert seeds.differ(cell["cap3"], cell["auto"], 0.02) == pytest.approx(0.05)  # the bound is 0.033
    assert seeds.differ(cell["auto"], cell["cap3"], 0.04) == 0.0


def test_when_a_format_is_learned(arena):
    module = arena("second_report")
    assert module.steps_to_half([0, 10, 20], [0.1, 0.3, 0.7], 0.4) == pytest.approx(12.5)
    assert module.steps_to_half([0, 10], [0.5, 0.6], 0.4) == 0.0
    assert module.steps_to_half([0, 10], [0.1, 0.2], 0.4) == math.inf


def test_tables_of_the_second_proof(arena):
    looks = {"steps": [0, 10, 20], "start": 0.0, "falls": False}
    scores = {"on_policy": 0.8, "auto": 0.6, "cap3": 0.7, "none": 0.1}
    rows = [
        {
            "cell": "c",
            "arm": arm,
            "seed": seed,
            "accuracy": score + seed / 100,
            "looks": [0.0, score / 2, score],
            **looks,
        }
        for arm, score in scores.items()
        for seed in range(3)
    ]
    tables = arena("second_report").tables("second_tuning", rows, [*scores])
    assert tables["second_tuning-spread"] == "The spread over training seeds is 0.010 where no run falls (measured)."
    assert "| `auto` | 1 | 0.100 | " in tables["second_tuning-summary"]
    assert "| `cap3` | 1 | c (+0.10) | none |" in tables["second_tuning-differences"]
    assert "| c | 10 | 14 | 12 | never |" in tables["second_tuning-formats"]
    assert "| c | 0.00 | 0.810 (3) | 0.610 (3) |" in tables["second_tuning-cells"]


def test_the_page_of_the_second_proof_has_the_tables_of_its_results(arena):
    folder = ROOT / "benchmarks/arena"
    report = arena("report")
    text = (folder / "SECOND.md").read_text()
    assert report.filled(text, report.tables(json.loads((folder / "second.json").read_text()))) == text


def test_runs_come_back_from_the_archive(arena, tmp_path):
    archive = arena("archive")
    history = {"step": [1, 2], "rollout_corr/k3_kl": [0.123456, None], "rollout_corr/ppl_ratio": [1.0, 2.0]}
    (tmp_path / "a.json").write_text(json.dumps({"arm": "auto", "history": history}))
    archive.pack(tmp_path, ["a", "missing"], tmp_path / "archive")
    archive.unpack(tmp_path / "other", tmp_path / "archive")
    (path,) = (tmp_path / "other").iterdir()
    found = json.loads(path.read_text())
    assert found == {"arm": "auto", "history": {"step": [1, 2], "rollout_corr/k3_kl": [0.1235, None]}}
    archive.unpack(tmp_path, tmp_path / "archive")  # a run that is there stays as it is
    assert json.loads((tmp_path / "a.json").read_text())["history"] == history


def test_more_seeds_are_wanted_of_arms_near_the_best_where_arms_differ(arena):
    seeds = arena("seeds")
    cell = {"on_policy": {0: 0.9}, "auto": {0: 0.8}, "cap3": {0: 0.71}, "none": {0: 0.6}}
    assert seeds.wanted(cell) == ["on_policy", "auto", "cap3"]
    assert seeds.wanted({**cell, "none": {0: 0.75}, "cap3": {0: 0.75}}) == []


def test_the_best_arm_is_not_the_luckiest(arena):
    seeds = arena("seeds")
    lucky = {"auto": {0: 0.8, 1: 0.8, 2: 0.8}, "a": {0: 0.9, 1: 0.75, 2: 0.75}, "b": {0: 0.75, 1: 0.75, 2: 0.9}}
    assert seeds.regret(lucky, "auto") == pytest.approx(-0.05)  # the best of two seeds, on the third
    better = {"auto": {0: 0.8, 1: 0.8, 2: 0.8}, "a": {0: 0.9, 1: 0.88, 2: 0.92}, "on_policy": {0: 1.0}}
    assert seeds.regret(better, "auto") == pytest.approx(0.1)
    cells = {"one": lucky, "two": better}
    assert seeds.worst_regret(cells, "auto") == (pytest.approx(0.1), "two")
    low, high = seeds.interval(cells, "auto", spread=lambda *_: 0.02, draws=500)
    assert 0.05 < low < 0.1 < high < 0.15


# The ladder ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hurts_from", [0, 1, 2, 3, 5, 6, 7, None])
def test_a_climb_finds_the_lowest_rung_that_hurts(arena, cells, hurts_from):
    ladder = arena("ladder")
    known, looks = {}, 0
    while True:
        rung, todo = ladder.climbed("sort", "grpo", known)
        if not todo:
            break
        for run in todo:
            hurt = hurts_from is not None and cells.LADDER.index(run.cell.rung) >= hurts_from
            known[run.name] = 0.9 if run.arm.name == "on_policy" else 0.75 if hurt else 0.85
        looks += 1
    assert rung == hurts_from
    assert looks <= 4  # of 8 rungs


# The report ---------------------------------------------------------------------------------------------------------------


REFERENCE = {"start": 0.5, "rejected": None, "falls": False}


@pytest.fixture
def found(cells, report):
    """Situations of two cells; in the second the arms do not differ."""

    def rows(**arms):
        return {name: {seed: {**REFERENCE, "accuracy": x} for seed, x in enumerate(xs)} for name, xs in arms.items()}

    hard = rows(on_policy=[0.9], none=[0.1], trl=[0.7, 0.6], auto=[0.8, 0.9])
    soft = rows(on_policy=[0.8], none=[0.8], trl=[0.81], auto=[0.8])
    return [
        report.Situation(cells.Cell("reverse", cells.LADDER[4]), hard),
        report.Situation(cells.Cell("modulo", cells.LADDER[0]), soft),
    ]


def test_a_run_in_a_few_numbers(cells, report):
    run = cells.Run(cells.ARMS["icepop"], cells.Cell("reverse", cells.LADDER[2], fault="burst"))
    record = {
        "accuracy": [0.5, 0.2, 0.6, 0.7],
        "history": {
            "step": [1, 2],
            "rollout_corr/rollout_is_oob_ratio": [0.1, 0.3],
            "rollout_corr/k3_kl": [0.1, 0.1],
        },
        "broken": {"broken": 10, "broken_rejected": 9, "sound": 100, "sound_rejected": 1},
    }
    row = report.row_of(run, record)
    assert row["accuracy"] == pytest.approx(0.5)  # of the last three looks, of which the first is the lowest
    assert (row["start"], row["falls"], row["rejected"]) == (0.5, False, pytest.approx(0.2))
    assert (row["caught"], row["sound_rejected"]) == (0.9, 0.01)


def test_a_fall_takes_two_looks(report):
    assert report.falls([0.5, 0.7, 0.55, 0.55])
    assert not report.falls([0.5, 0.7, 0.55, 0.7, 0.55])


def test_regret_is_against_the_best_correction_and_gain_against_the_reference(found):
    hard = found[0]
    assert hard.regret("auto") == 0.0
    assert hard.regret("trl") == pytest.approx(0.2)  # means over seeds; the reference cannot be had
    assert hard.kept("auto") == pytest.approx(0.35 / 0.4)
    assert hard.differs
    assert not found[1].differs


def test_cells_without_a_difference_are_printed_and_not_counted(found, report):
    arms = ["on_policy", "none", "trl", "auto"]
    lines = {line.split("|")[1].strip(" `"): line for line in report.summary(found, arms).splitlines()[2:]}
    assert "| 1 | 0.88 | 0 | 0.000 | 0.00 |" in lines["auto"]
    assert "| 1 | 0.37 | 0 | 0.200 | 0.20 | grpo-reverse-lag_16-fast |" in lines["trl"]
    assert "grpo-modulo-lag_2-slow (no difference)" in report.every_cell(found, arms)
    assert "**0.85 (2)**" in report.every_cell(found, arms)


def test_tokens_that_are_not_counted_are_no_zero(cells, report):
    arms = ["on_policy", "trl", "bypass", "icepop"]
    rows = {
        arm: {0: {**REFERENCE, "accuracy": x, "rejected": 0.02, "caught": 0.0, "sound_rejected": 0.0}}
        for arm, x in zip(arms, (0.9, 0.7, 0.8, 0.6), strict=True)
    }
    found = [report.Situation(cells.Cell("reverse", cells.LADDER[4], fault="burst"), rows)]
    lines = {line.split("|")[1].strip(" `"): line for line in report.summary(found, arms).splitlines()[2:]}
    assert "| - | 0 of 1 |" in lines["trl"]  # its trainer does not report them
    assert "| 2 % | 0 of 1 |" in lines["bypass"]
    broken = report.caught(found, ["bypass", "icepop"]).splitlines()[2:]
    assert broken == ["| `bypass` | 1 | - | - |", "| `icepop` | 1 | 0 | 0 |"]  # clipping is in the loss


def test_cells_are_counted_in_which_corrections_differ(found, report):
    hard, soft = found
    assert hard.corrections_differ
    hard.rows["trl"] = {0: {**REFERENCE, "accuracy": 0.85}}
    assert hard.differs  # from no correction alone
    assert not hard.corrections_differ
    soft.rows["trl"] = {0: {**REFERENCE, "accuracy": 0.7}}
    assert report.by_rung(found, ["trl", "auto"]).splitlines()[-1].endswith("| 1 of 1 |")  # the second cell


def test_losses_are_named(found, report):
    both = report.compared(found, [("auto", "trl"), ("trl", "auto"), ("auto", "geo")]).splitlines()[2:]
    assert both == [
        "| `auto` minus `trl` | 2 | +0.095 | +0.095 | 100 % | 1 | 0 | - |",
        "| `trl` minus `auto` | 2 | -0.095 | -0.095 | 100 % | 0 | 1 | grpo-reverse-lag_16-fast (-0.20) |",
    ]


def test_the_document_says_what_the_results_say(report):
    results = json.loads((ARENA / "results.json").read_text())
    readme = (ARENA / "README.md").read_text()
    assert report.filled(readme, report.tables(results)) == readme
    results["judging"]["rows"][0]["accuracy"] = 0.123
    assert report.filled(readme, report.tables(results)) != readme


# The simulation -----------------------------------------------------------------------------------------------------------


def test_the_simulation_knows_the_gradient_and_what_is_broken(arena):
    simulate = arena("simulate")
    tokens = simulate.draw(np.random.default_rng(0), 2**15, spread=0.1)
    unbiased = simulate.judge(tokens, tokens.ratio)
    assert unbiased["gradient"] == pytest.approx(1.0, abs=0.05)
    assert unbiased["rejected"] == 0
    assert tokens.ratio.mean() == pytest.approx(1.0, abs=0.01)
    broken = simulate.draw(np.random.default_rng(1), 2**15, spread=0.01, broken=0.1)
    assert broken.broken.mean() == pytest.approx(0.1, abs=0.01)
    pulls = {
        rule: simulate.judge(broken, simulate.RULES[rule](broken))["pull"] for rule in ("none", "auto", "KPop 0.1")
    }
    assert pulls["none"] == pytest.approx(0.1, abs=0.02)
    assert pulls["auto"] < pulls["none"] < pulls["KPop 0.1"]


def test_garbage_pulls_at_auto_only_without_its_floor(arena):
    simulate = arena("simulate")
    tokens = simulate.draw(np.random.default_rng(0), 2**15, spread=0.01, garbage=0.01)
    garbage = tokens.broken
    assert garbage.mean() == pytest.approx(0.01, abs=0.003)
    assert tokens.log_q[garbage].min() > -0.2
    assert tokens.ratio[garbage].max() < 1e-4
    assert (tokens.step[garbage] <= 0).all()
    pulls = {
        rule: simulate.judge(tokens, simulate.RULES[rule](tokens))["pull"]
        for rule in ("none", "auto without its floor", "auto", "token weights up to 2")
    }
    assert pulls["none"] > pulls["auto without its floor"] > 0.005
    assert pulls["auto"] == 0
    assert pulls["token weights up to 2"] < 1e-6


def test_the_factors_of_auto_are_those_of_the_package(arena):
    tokens = arena("simulate").draw(np.random.default_rng(0), 2**12, spread=1.0, garbage=0.1)
    train, rollout = (torch.from_numpy(x).unsqueeze(1) for x in (tokens.log_p, tokens.log_q))
    correction = compute_rollout_correction(
        train,
        rollout,
        torch.ones_like(train),
        RolloutCorrectionConfig(rollout_correction="auto"),
        advantages=torch.from_numpy(tokens.advantage),
    )
    expected = arena("simulate").RULES["auto"](tokens)
    assert 0 < (expected == 0).mean() < 1
    assert ((expected == 0) & (tokens.ratio < 0.001) & (tokens.advantage > 0)).any()
    np.testing.assert_allclose(correction.coefficients.squeeze(1).numpy(), expected, rtol=1e-9)


def test_a_budget_of_the_second_moment_is_kept(arena):
    simulate = arena("simulate")
    tokens = simulate.draw(np.random.default_rng(0), 2**15, spread=1.0)
    keep = simulate.within_moment(tokens, 0.04) > 0
    for d, kept in zip(tokens.d.reshape(-1, 2**14), keep.reshape(-1, 2**14), strict=True):
        assert (d[kept] ** 2).mean() <= 0.04
        assert np.abs(d[kept]).max() <= np.abs(d[~kept]).min()
