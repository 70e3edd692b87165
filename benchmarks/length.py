"""
Mean weight of TRL's default correction against the length of completions, with a fresh vLLM. Nothing is trained.

    python benchmarks/length.py             # samples, scores, writes `results/length.json`: half an hour of one core
    python benchmarks/length.py --report    # prints the table of `arena/EVIDENCE.md`, and draws its picture from that file

vLLM writes completions in bfloat16, and the model of `examples/smollm2.py` scores them with the same weights in bfloat16.
TRL multiplies the ratios of all tokens, and drops a completion whose product is above 3. The first tokens of a completion are
a completion of that length, because `ignore_eos` keeps the end of an answer from ending it.
"""

import json
import os
import sys
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist


sys.path += [str(Path(__file__).parents[1] / name) for name in ("benchmarks/language_model", "examples", "benchmarks")]

import gap
from tables import markdown


HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results/length.json", HERE.parent / "docs/images/length.svg"
BOUND = 3.0  # `vllm_importance_sampling_clip_max`
SAMPLED = {4096: 12, 1024: 24, 256: 36}  # completions of each length
LENGTHS = [2**i for i in range(4, 13)]  # from 16 to 4096
SHOWN = (64, 256, 1024, 4096)  # in the table
COLUMNS = {
    "tokens": "{tokens}", "completions": "{completions}", "`k3_kl`": "{k3:.4f}",
    "TRL's default": "{default:.2f} ± {error:.2f}", "calculated": "{calculated:.2f}", "dropped": "{dropped:.0%}",
    "`token_truncate`": "{token_truncate:.2f}",
}  # fmt: skip


def calculated(k3: float, tokens: int) -> float:
    """Mean weight if log-ratios are independent and normal: their sum has the variance `v` and the mean `-v / 2`."""
    v = 2 * k3 * tokens
    return NormalDist().cdf((log(BOUND) - v / 2) / sqrt(v))


def sample(folder: Path) -> list[dict[str, list]]:
    """Completions of each length, whether or not the answer ends before."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True, "max_model_len": max(LENGTHS) + 256, "max_num_seqs": 24, "seed": 0}
    llm = LLM(str(folder), dtype="bfloat16", logprobs_mode="processed_logprobs", **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, groups = [gap.tokenize(tokenizer, text) for text in gap.PROMPTS], []
    for length, count in SAMPLED.items():
        asked, prompts = prompts[:count], prompts[count:]
        params = SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True)
        outputs = [out.outputs[0] for out in llm.generate([{"prompt_token_ids": ids} for ids in asked], params)]
        pairs = [zip(out.token_ids, out.logprobs, strict=True) for out in outputs]
        logps = [[entry[token].logprob for token, entry in pair] for pair in pairs]
        groups.append({"prompts": asked, "completions": [list(out.token_ids) for out in outputs], "logps": logps})
    return groups


def rows_of(differences: list) -> list[dict]:
    """The mean weight at each length, of log-ratios of completions."""
    import torch

    rows = []
    for tokens in LENGTHS:
        d = torch.stack([row[:tokens] for row in differences if len(row) >= tokens])
        product, k3 = d.sum(1).exp(), float((d.exp() - 1 - d).mean())
        weights = product.masked_fill(product > BOUND, 0)
        row = {"tokens": tokens, "completions": len(d), "k3": k3}
        row |= {"default": float(weights.mean()), "error": float(weights.std() / len(d) ** 0.5)}
        row |= {"dropped": float((product > BOUND).double().mean()), "calculated": calculated(k3, tokens)}
        rows.append({**row, "token_truncate": float(d.exp().clamp(max=BOUND).mean())})
    return rows


def measure():
    """Sample, score, and write the rows."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import torch
    from smollm2 import make_model

    gap.ROWS, folder, differences = 2, make_model(), []
    for group in sample(folder):
        scored = gap.score(gap.Sampler("bfloat16", {}), gap.TRAINERS["bfloat16"], group, str(folder))["logps"]
        pairs = zip(scored, group["logps"], strict=True)
        differences += [(torch.tensor(mine) - torch.tensor(theirs)).double() for mine, theirs in pairs]
    RESULTS.write_text(json.dumps(rows_of(differences), indent=1) + "\n")


def table(rows: list[dict]) -> str:
    return markdown([row for row in rows if row["tokens"] in SHOWN], COLUMNS)


def draw(rows: list[dict]):
    """Measured and calculated, in colors that can be read on white and on black."""
    from matplotlib import pyplot, rcParams

    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    rcParams.update({"svg.hashsalt": "length", **dict.fromkeys(grey, "#808080")})
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    x, k3 = [row["tokens"] for row in rows], rows[-1]["k3"]
    axes.errorbar(x, [row["default"] for row in rows], [row["error"] for row in rows], fmt="o", label="measured")
    axes.plot(x, [calculated(k3, n) for n in x], label=f"calculated for a k3_kl of {k3:.4f}")
    axes.set(xscale="log", ylim=(0, 1.15), xlabel="tokens of a completion", ylabel="mean weight of TRL's default")
    axes.set_xticks(LENGTHS, LENGTHS, minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    if "--report" not in sys.argv:
        measure()
    results = json.loads(RESULTS.read_text())
    print(table(results))
    draw(results)
