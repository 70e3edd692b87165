"""
A dump of the batches of a run of verl, for `trl-rollout-corr diagnose` and `report`.

`trl-rollout-corr docs verl#dumps-of-verl` says how to save the batches. Run this script in the folder that contains
`verl_batches`; it writes the folder `dump`.
"""

from pathlib import Path

import torch

from trl_rollout_corr.tools.dump.folder import write_rows
from trl_rollout_corr.tools.dump.rows import make_row, on_host


for path in Path("verl_batches").glob("*.pt"):
    verl = torch.load(path)
    width, loss = verl["prompts"].shape[1], verl["response_mask"].bool()
    prompt_mask, completion_mask = verl["attention_mask"].split([width, loss.shape[1]], dim=1)
    batch = {
        "prompt_ids": verl["prompts"],
        "prompt_mask": prompt_mask,
        "completion_ids": verl["responses"],
        "completion_mask": completion_mask,
        "train_logps": verl["old_log_probs"],
        "rollout_logps": verl["rollout_log_probs"],
        "mask": loss,
        "keep": loss,
        "coefficients": loss.float(),
        "reward": verl["token_level_scores"].sum(1),
        "advantage": (verl["advantages"] * loss).sum(1) / loss.sum(1).clamp(min=1),
        "weights": None,
        "staleness": None,  # or the age of each completion in optimizer steps, as floats
        "again_logps": None,
    }
    step = int(path.stem)
    write_rows(Path("dump"), step, 0, [make_row(row, step) for row in on_host(batch)], settings={})
