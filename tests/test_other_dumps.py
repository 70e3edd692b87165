"""Dumps of other tools, as `docs/migration.md` says: batches of verl."""

import re

import pytest
import torch

from tests.dumps import make_dump, read_dump
from tests.launching import ROOT
from trl_rollout_corr.__main__ import main


@pytest.fixture
def rows(tmp_path):
    def shift(row):
        row["rollout_logps"] = [*row["rollout_logps"][:1], *row["rollout_logps"][:-1]]
        return row

    folder = make_dump(tmp_path / "ours", steps=2, tools=False, sampled=32, worst=0, logs=False)
    return [shift(row) for row in read_dump(folder).rows]


def test_the_script_of_the_document_makes_a_dump_of_batches_of_verl(rows, tmp_path, monkeypatch, capsys):
    width, length = 4, max(len(row["token_ids"]) for row in rows)
    (tmp_path / "verl_batches").mkdir()
    for step in (1, 2):
        mine = [row for row in rows if row["step"] == step]
        batch = {name: torch.zeros(len(mine), length) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
        batch |= {
            "prompts": torch.zeros(len(mine), width, dtype=torch.long),
            "token_level_scores": torch.zeros(len(mine), length),
        }
        batch |= {name: torch.zeros(len(mine), length, dtype=torch.long) for name in ("responses", "response_mask")}
        batch["attention_mask"] = torch.zeros(len(mine), width + length, dtype=torch.long)
        for i, row in enumerate(mine):
            n, p = len(row["token_ids"]), len(row["prompt_ids"])
            batch["prompts"][i, width - p :] = torch.tensor(row["prompt_ids"])
            batch["attention_mask"][i, width - p : width + n] = 1
            batch["responses"][i, :n] = torch.tensor(row["token_ids"])
            batch["response_mask"][i, :n] = 1
            batch["old_log_probs"][i, :n] = torch.tensor(row["train_logps"])
            batch["rollout_log_probs"][i, :n] = torch.tensor(row["rollout_logps"])
            batch["advantages"][i, :n] = row["advantage"]  # verl leaves 0 in the padding
            batch["token_level_scores"][i, n - 1] = row["reward"]
        torch.save(batch, tmp_path / "verl_batches" / f"{step}.pt")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/migration.md").read_text().split("## Dumps of verl")[1]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    made = read_dump(tmp_path / "dump").rows
    names = ("step", "prompt_ids", "token_ids", "mask", "reward")
    assert [{name: row[name] for name in names} for row in made] == [
        {name: row[name] for name in names} for row in rows
    ]
    for ours, theirs in zip(made, rows, strict=True):
        assert (ours["padding"], ours["staleness"]) == (width - len(theirs["prompt_ids"]), None)
        assert ours["train_logps"] == pytest.approx(theirs["train_logps"])
        assert ours["advantage"] == pytest.approx(theirs["advantage"], abs=1e-6)
    assert main(["diagnose", str(tmp_path / "dump")]) == 1
    assert "log-probabilities that are one token off" in capsys.readouterr().out.lower()
