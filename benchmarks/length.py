"""
Mean weight of TRL's default correction against the length of completions, with a fresh vLLM. Nothing is trained.

    python benchmarks/length.py             # samples, scores, writes `results/length.json`: 25 minutes of one core
    python benchmarks/length.py --report    # prints the table of `docs/trl.md`, and draws its picture from that file

vLLM writes completions in bfloat16, and the model of `examples/smollm2.py` scores them with the same weights, in float32 and
in bfloat16. TRL multiplies the ratios of all tokens, and drops a completion whose product is above 3. The first tokens of a
completion are a completion of that length, because `ignore_eos` keeps the end of an answer from ending it.
"""

import argparse
import json
import os
import sys
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist


HERE = Path(__file__).parent
sys.path += [str(HERE / "language_model"), str(HERE.parent / "examples"), str(HERE)]

from tables import markdown


RESULTS = Path(__file__).parent / "results/length.json"
PICTURE = Path(__file__).parents[1] / "docs/images/length.svg"
BOUND = 3.0  # `vllm_importance_sampling_clip_max`
SAMPLED = {4096: 12, 1024: 24, 256: 36}  # completions of each length
LENGTHS = [2**i for i in range(4, 13)]  # from 16 to 4096
SHOWN = (64, 256, 1024, 4096)  # in the table
COLUMNS = {
    "tokens": "{tokens}", "trainer": "{trainer}", "completions": "{completions}", "`k3_kl`": "{k3:.4f}",
    "TRL's default": "{default:.2f} ± {error:.2f}", "calculated": "{calculated:.2f}", "dropped": "{dropped:.0%}",
    "`token_truncate`": "{token_truncate:.2f}",
}  # fmt: skip


def calculated(k3: float, tokens: int) -> float:
    """Mean weight if log-ratios are independent and normal: their sum has the variance `v` and the mean `-v / 2`."""
    v = 2 * k3 * tokens
    return NormalDist().cdf((log(BOUND) - v / 2) / sqrt(v))


def sample(folder: Path, length: int, count: int, first: int) -> dict[str, list]:
    """Completions of so many tokens, whether or not the answer ends before."""
    import gap
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [gap.tokenize(tokenizer, text) for text in gap.PROMPTS[first : first + count]]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [out.outputs[0] for out in engine(folder).generate(asked, params)]
    pairs = [zip(out.token_ids, out.logprobs, strict=True) for out in outputs]
    logps = [[entry[token].logprob for token, entry in pair] for pair in pairs]
    return {"prompts": prompts, "completions": [list(out.token_ids) for out in outputs], "logps": logps}


def engine(folder: Path, made: list = []):  # noqa: B006
    """The engine of this process."""
    if not made:
        from vllm import LLM

        options = {"enforce_eager": True, "max_model_len": max(LENGTHS) + 256, "max_num_seqs": 24, "seed": 0}
        options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
        made.append(LLM(str(folder), dtype="bfloat16", logprobs_mode="processed_logprobs", **options))
    return made[0]


def rows_of(trainer: str, differences: list) -> list[dict]:
    """The mean weight at each length, of log-ratios of completions."""
    import torch

    rows = []
    for tokens in LENGTHS:
        d = torch.stack([row[:tokens] for row in differences if len(row) >= tokens])
        product = d.sum(1).exp()
        weights = product.masked_fill(product > BOUND, 0)
        row = {"tokens": tokens, "trainer": trainer, "completions": len(d)}
        row |= {"k3": float((d.exp() - 1 - d).mean()), "default": float(weights.mean())}
        row |= {"error": float(weights.std() / len(d) ** 0.5), "dropped": float((product > BOUND).double().mean())}
        row |= {"token_truncate": float(d.exp().clamp(max=BOUND).mean())}
        rows.append({**row, "calculated": calculated(row["k3"], tokens)})
    return rows


def measure():
    """Sample, score, and write the rows."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import gap
    import torch
    from smollm2 import make_model

    gap.ROWS, folder = 2, make_model()
    counts = list(SAMPLED.values())
    samples = [sample(folder, *group, sum(counts[:i])) for i, group in enumerate(SAMPLED.items())]
    rows = []
    for name in ("bfloat16", "float32"):
        differences = []
        for group in samples:
            scored = gap.score(gap.Sampler("bfloat16", {}), gap.TRAINERS[name], group, str(folder))["logps"]
            pairs = zip(scored, group["logps"], strict=True)
            differences += [(torch.tensor(mine) - torch.tensor(theirs)).double() for mine, theirs in pairs]
        rows += rows_of(name, differences)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: list[dict]) -> str:
    return markdown([row for row in rows if row["tokens"] in SHOWN], COLUMNS)


def draw(rows: list[dict]):
    """Measured and calculated, in colors that can be read on white and on black."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "length", "text.color": "#808080", "axes.edgecolor": "#808080"}
    figure = matplotlib.figure.Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for trainer, color in {"bfloat16": "#d9730d", "float32": "#2f81f7"}.items():
        chosen = [row for row in rows if row["trainer"] == trainer]
        x, k3 = [row["tokens"] for row in chosen], chosen[-1]["k3"]
        axes.errorbar(x, [row["default"] for row in chosen], [row["error"] for row in chosen], fmt="o", color=color,
                      label=f"TRL's default, trainer in {trainer}")  # fmt: skip
        axes.plot(x, [calculated(k3, n) for n in x], color=color, label=f"calculated, k3_kl = {k3:.4f}")
    x = [row["tokens"] for row in rows if row["trainer"] == "bfloat16"]
    axes.plot(x, [row["token_truncate"] for row in rows[-len(x) :]], "--", color="#808080", label="token_truncate")
    axes.set(xscale="log", xticks=x, xticklabels=x, ylim=(0, 1.15), xlabel="tokens of a completion", ylabel="mean weight")
    axes.tick_params(colors="#808080", which="both")
    axes.minorticks_off()
    axes.xaxis.label.set_color("#808080")
    axes.yaxis.label.set_color("#808080")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only print the table and draw the picture")
    if not parser.parse_args().report:
        measure()
    results = json.loads(RESULTS.read_text())
    print(table(results))
    draw(results)
