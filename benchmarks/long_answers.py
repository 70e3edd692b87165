"""
Long answers with a fresh vLLM in bfloat16: is TRL's default correction enough there?

    python benchmarks/long_answers.py    # 4 runs, ten minutes of one core; writes `results/long_answers.json`

A small model writes 512 tokens for each prompt. Its reward is the share of digits that are one larger than the digit before.
The start is a model of random weights, so that nothing has to be taught first. All runs have one seed.
"""

import functools
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean


HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "examples"), str(HERE)]
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

RESULTS = HERE / "results/long_answers.json"
TOKENS, STEPS, PROMPTS = 512, 20, 4
ARMS = {
    "none": {"rollout_correction": "disabled"},
    "TRL's default": {"rollout_correction": "trl"},
    "TRL's `token_truncate`": {"rollout_correction": "trl", "vllm_importance_sampling_mode": "token_truncate"},
    "`auto`": {"rollout_correction": "auto"},
}
COLUMNS = {
    "correction": "{arm}", "seed": "{seed}", "reward, first 5 steps": "{before:.2f}", "reward, last 5 steps": "{after:.2f}",
    "mean over the run": "{mean:.2f}", "`k3_kl`": "{k3:.4f}", "mean weight": "{weight:.2f}",
}  # fmt: skip


def rising(completions: list[str], **kwargs) -> list[float]:
    """Reward: the share of tokens that are one larger than the one before, with 0 after 9."""
    rows = [text.split() if " " in text else list(text) for text in completions]
    pairs = [list(pairwise(row)) for row in rows]
    hits = [sum(a.isdigit() and b == str((int(a) + 1) % 10) for a, b in row) for row in pairs]
    return [hit / (TOKENS - 1) for hit in hits]


def make_model(folder: Path, spread: float) -> Path:
    import sorting
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = sorting.make_tokenizer()
    config = sorting.make_model(tokenizer).config
    config.max_position_embeddings, config.initializer_range = 2 * TOKENS, spread
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, arm: str, seed: int, steps: int) -> dict:
    import quickstart
    import sorting
    from transformers import PreTrainedTokenizerFast, PrinterCallback, set_seed

    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    settings = {**quickstart.TRAINING, "output_dir": str(folder / "out"), "max_steps": steps, "seed": seed}
    settings |= {"max_completion_length": TOKENS, "vllm_max_model_length": TOKENS + 32, "learning_rate": 3e-4}
    settings |= {"per_device_train_batch_size": 8 * PROMPTS, "bf16": True, "gradient_checkpointing": False}
    settings |= {"generation_kwargs": {"ignore_eos": True}, "rollout_monitor": None, **ARMS[arm]}
    trainer = RolloutCorrectedGRPOTrainer(
        str(folder),
        rising,
        args=RolloutCorrectedGRPOConfig(**settings),
        train_dataset=sorting.make_prompts(PROMPTS * steps, seed=seed),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left"),
    )
    trainer.remove_callback(PrinterCallback)
    set_seed(seed)  # vLLM samples with torch's generator
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in log]
    row = {"arm": arm, "seed": seed, "before": fmean(rewards[:5]), "after": fmean(rewards[-5:])}
    row |= {"mean": fmean(rewards), "k3": fmean(entry["rollout_corr/k3_kl"] for entry in log)}
    weights = [entry.get("rollout_corr/effective_lr", 1.0) for entry in log]
    return {**row, "weight": fmean(weights), "rewards": [round(reward, 4) for reward in rewards]}


def table(rows: list[dict]) -> str:
    from tables import markdown

    return markdown(rows, COLUMNS)


def main(seeds: tuple[int, ...] = (0,), steps: int = STEPS, spread: float = 0.25):
    import quickstart  # noqa: F401
    import torch
    import vllm
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.cache(vllm.LLM)  # one engine
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made), spread)
        for seed in seeds:
            for arm in ARMS:
                rows.append(train(folder, arm, seed, steps))
                print(table(rows[-1:]), flush=True)
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
