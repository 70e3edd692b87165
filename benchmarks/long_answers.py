"""
Long answers with a fresh vLLM in bfloat16: is TRL's default correction enough there?

    python benchmarks/long_answers.py    # half an hour of one core; adds what is missing to `results/long_answers.json`
    python benchmarks/long_answers.py --arms trl auto --seeds 0 --folder outputs/long    # two runs of the tutorial

A small model writes 512 tokens for each prompt. Its reward is the share of digits that are one larger than the digit before.
The start is a model of random weights, so that nothing has to be taught first. The runs of `auto` before E6 and in E6 were
trained with its former rules.
"""

import functools
import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean


HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "examples"), str(HERE)]
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

RESULTS = HERE / "results/long_answers.json"
TOKENS, STEPS, PROMPTS = 512, 20, 4
SPREAD = 0.25  # of the random weights
ARMS = {  # by the name on the command line: the name in tables, and settings
    "none": ("none", {"rollout_correction": "disabled"}),
    "trl": ("TRL's default", {"rollout_correction": "trl"}),
    "token_truncate": (
        "TRL's `token_truncate`",
        {"rollout_correction": "trl", "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "auto": ("`auto`", {"rollout_correction": "auto"}),
}
# What a run keeps of each step. A correction without weights logs no mean weight, which is 1 then.
CURVES = {
    "rewards": lambda entry: entry["reward"],
    "gaps": lambda entry: entry["rollout_corr/k3_kl"],
    "weights": lambda entry: entry.get("rollout_corr/effective_lr", 1.0),
}
EVERY = 10  # steps between two lines, and between two dumps
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


def make_model(folder: Path) -> Path:
    import sorting
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = sorting.make_tokenizer()
    config = sorting.make_model(tokenizer).config
    config.max_position_embeddings, config.initializer_range = 2 * TOKENS, SPREAD
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, arm: str, seed: int, steps: int, folder: Path | None) -> dict:
    """Train an arm, with monitor and dump if there is a folder for them. Returns its row."""
    import quickstart
    import sorting
    from transformers import PreTrainedTokenizerFast, PrinterCallback, set_seed

    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    settings = {**quickstart.TRAINING, "output_dir": str(model / "out"), "max_steps": steps, "seed": seed}
    settings |= {"max_completion_length": TOKENS, "vllm_max_model_length": TOKENS + 32, "learning_rate": 3e-4}
    settings |= {"per_device_train_batch_size": 8 * PROMPTS, "bf16": True, "gradient_checkpointing": False}
    settings |= {"generation_kwargs": {"ignore_eos": True}, **ARMS[arm][1]}
    if folder:
        settings |= {"rollout_dump_dir": str(folder / arm), "rollout_dump_steps": EVERY}
    else:
        settings["rollout_monitor"] = None
    trainer = RolloutCorrectedGRPOTrainer(
        str(model),
        rising,
        args=RolloutCorrectedGRPOConfig(**settings),
        train_dataset=sorting.make_prompts(PROMPTS * steps, seed=seed),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(lines())
    set_seed(seed)  # vLLM samples with torch's generator
    trainer.train()
    return row_of(arm, seed, trainer.state.log_history)


def row_of(arm: str, seed: int, history: list[dict]) -> dict:
    """The row of a run, of its log: means for the table, and a curve of each number."""
    log = [entry for entry in history if "reward" in entry]
    curves = {curve: [read(entry) for entry in log] for curve, read in CURVES.items()}
    rewards, gaps, weights = curves.values()
    row = {"arm": ARMS[arm][0], "seed": seed, "before": fmean(rewards[:5]), "after": fmean(rewards[-5:])}
    row |= {"mean": fmean(rewards), "k3": fmean(gaps), "weight": fmean(weights)}
    return row | {curve: [round(value, 5) for value in values] for curve, values in curves.items()}


def lines():
    """A callback that prints the three curves of a run, every ten steps."""
    from transformers import TrainerCallback

    class Lines(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            print(f"\n{'step':>5} {'reward':>7} {'mean weight':>11} {'k3_kl':>7}", flush=True)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" in logs and state.global_step % EVERY == 0:
                reward, gap, weight = (read(logs) for read in CURVES.values())
                print(
                    f"{state.global_step:>2}/{state.max_steps} {reward:>7.2f} {weight:>11.2f} {gap:>7.4f}", flush=True
                )

    return Lines()


def table(rows: list[dict]) -> str:
    from tables import markdown

    return markdown(rows, COLUMNS)


def main(words: list[str] | None = None):
    parser = ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, help="keep results here, and each run's dump; the monitor watches")
    asked = parser.parse_args(words)

    import quickstart  # noqa: F401
    import torch
    import vllm
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.cache(vllm.LLM)  # one engine
    torch.set_num_threads(1)
    path = asked.folder / "results.json" if asked.folder else RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as made:
        model = make_model(Path(made))
        for seed in asked.seeds:
            for arm in (arm for arm in asked.arms if (ARMS[arm][0], seed) not in done):
                print(f"\n{ARMS[arm][0]}, seed {seed}", flush=True)
                rows.append(train(model, arm, seed, asked.steps, asked.folder))
                path.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
