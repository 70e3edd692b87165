"""
Gap between vLLM and the trainer in a mixture of experts, with and without `rollout_routing: replay`.

    python benchmarks/routing/run.py               # a tiny Qwen3-MoE with random weights
    python benchmarks/routing/run.py --upcycled    # a Qwen2-MoE made of the pretrained language model
    python benchmarks/routing/run.py --time        # CPU time of recording and of replay, printed

The weights stay as they are (learning rate 0). vLLM samples in bfloat16; the trainer computes in float32 or bfloat16. The
runs of one seed sample the same tokens. Writes its rows of `results.json`, and prints the table.
"""

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import fmean, median
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from tables import markdown


TYPES = ("float32", "bfloat16")
SEEDS = (0, 1, 2)
RANDOM, UPCYCLED = "Qwen3-MoE, random", "Qwen2-MoE of SmolLM2"
COLUMNS = {
    "model": "{model}",
    "trainer": "{trainer}",
    "replay": "{replay}",
    "tokens": "{tokens}",
    "k3": "{k3:.6f}",
    "largest log-ratio": "{largest:.3f}",
    "flipped tokens": "{flipped}",
}


def build_model(folder: str, seed: int, **sizes: int) -> None:
    """Write a mixture of 8 experts, 2 of them per token, in 4 layers, with a tokenizer of digits. `sizes` change it."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    characters = ["<pad>", "<eos>", *"0123456789+=abcdefghij"]
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    wrapped.save_pretrained(folder)
    torch.manual_seed(seed)
    fields = {
        "vocab_size": len(characters),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = Qwen3MoeConfig(**fields | sizes)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:  # weights of a trained model, in size: the default is nearly uniform
                p.mul_(10 if "lm_head" in name else 4)
    model.save_pretrained(folder)


def upcycle(folder: str, n_experts: int = 4) -> None:
    """
    Write a Qwen2-MoE whose experts are the feed-forward layers of the language model, each with 5 percent of noise. Its shared
    expert adds 0. (A Mixtral cannot be pushed to vLLM: transformers 5.17 has other names for its layers.)
    """
    import torch

    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from smollm2 import make_model
    from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    source = make_model()
    dense = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    shared = ("rope_parameters", "tie_word_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    sizes = [
        key for key in vars(dense.config) if key.endswith("_size") or key.startswith("num_") or key.startswith("max_")
    ]
    fields = {key: getattr(dense.config, key) for key in (*shared, *sizes)}
    torch.manual_seed(0)
    more = {"moe_intermediate_size": dense.config.intermediate_size, "shared_expert_intermediate_size": 64}
    experts = {"num_experts": n_experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    mixture = Qwen2MoeForCausalLM(Qwen2MoeConfig(**fields, **more, **experts))
    left = mixture.load_state_dict(dense.state_dict(), strict=False).missing_keys
    assert all(".mlp." in name or name.endswith("_proj.bias") for name in left), left
    with torch.no_grad():
        for layer, old in zip(mixture.model.layers, dense.model.layers, strict=True):
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias.zero_()
            layer.mlp.gate.weight.normal_(std=0.1)
            layer.mlp.shared_expert.down_proj.weight.zero_()
            up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
            pairs = ((layer.mlp.experts.gate_up_proj, up), (layer.mlp.experts.down_proj, old.mlp.down_proj.weight))
            for stacked, weight in pairs:
                stacked.copy_(weight + 0.05 * weight.std() * torch.randn_like(stacked))
    mixture.generation_config = dense.generation_config
    mixture.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def measure(
    model: str,
    dtype: str,
    replay: bool,
    seed: int,
    steps: int,
    *,
    engine: dict[str, Any] | None = None,
    use_cpu: bool = True,
) -> dict[str, Any]:
    """Metrics of one run, means over its steps. `engine` has further arguments of vLLM's engine."""
    from datasets import Dataset

    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    with tempfile.TemporaryDirectory() as output:
        args = RolloutCorrectedGRPOConfig(
            output,
            use_cpu=use_cpu,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            learning_rate=0.0,
            seed=seed,
            per_device_train_batch_size=32,
            num_generations=4,
            max_completion_length=48,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=96,
            temperature=1.0,
            model_init_kwargs={"dtype": dtype},
            rollout_correction="disabled",
            rollout_monitor=None,
            rollout_engine_kwargs={
                "dtype": "bfloat16",
                "enable_prefix_caching": False,
                "enforce_eager": True,
                **(engine or {}),
            },
            rollout_routing="replay" if replay else None,
        )
        prompts = [f"{a}+{b}=" for a in range(20) for b in range(20)]
        trainer = RolloutCorrectedGRPOTrainer(
            model, lambda completions, **_: [float(len(x)) for x in completions], args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )  # fmt: skip
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]

    def column(key: str) -> list[float]:
        return [entry[f"rollout_corr/{key}"] for entry in logs if f"rollout_corr/{key}" in entry]

    return {
        "k3": fmean(column("k3_kl")),
        "largest": max(map(abs, column("log_ratio_max") + column("log_ratio_min"))),
        "flipped": fmean(column("routing_flipped_fraction")) if replay else None,
        "tokens": round(sum(entry["completions/mean_length"] * 32 for entry in logs)),
    }


def measure_time(folder: str, rounds: int = 25) -> None:
    """CPU time of sampling with recorded routes, and of a forward and backward pass with replayed ones, in turns with none."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from trl_rollout_corr.replay.capture import RecordingEngine
    from trl_rollout_corr.replay.router_hooks import RouterHooks
    from trl_rollout_corr.replay.routers import find_routers
    from trl_rollout_corr.replay.sampled_experts import SampledRoutes

    model = AutoModelForCausalLM.from_pretrained(folder)
    routers = find_routers(model)
    routes = SampledRoutes([*routers], 64, 8)
    options = {"enable_prefix_caching": False, "max_model_len": 128, "gpu_memory_utilization": 0.3}
    llm: Any = LLM(folder, dtype="bfloat16", enforce_eager=True, **options)
    prompts = [{"prompt_token_ids": [2 + i] * 16} for i in range(16)]
    params = SamplingParams(max_tokens=48, ignore_eos=True, detokenize=False)
    replay = RouterHooks(routers)
    ids, mask = torch.empty(0), torch.empty(0)

    def sample(engine: Any) -> None:
        nonlocal ids, mask
        routes.clear()
        outputs = engine.generate(prompts, sampling_params=params, use_tqdm=False)
        ids = torch.tensor(
            [[*x["prompt_token_ids"], *out.outputs[0].token_ids] for x, out in zip(prompts, outputs, strict=True)]
        )
        mask = torch.ones_like(ids)

    def train(replays: bool) -> None:
        if replays:
            with replay.over(model, routes.place(ids, mask, 48)):
                loss = model(input_ids=ids).logits.float().logsumexp(-1).mean()
        else:
            loss = model(input_ids=ids).logits.float().logsumexp(-1).mean()
        loss.backward()
        replay.end()

    parts = {
        "sampling": (lambda: sample(llm), lambda: sample(RecordingEngine(llm, routes))),
        "forward and backward pass": (lambda: train(False), lambda: train(True)),
    }
    for part, pair in parts.items():
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for do, found in zip(pair, seconds, strict=True):
                start = time.process_time()
                do()
                found.append(time.process_time() - start)
        plain, routed = (1e6 * median(found[1:]) / ids.numel() for found in seconds)  # the first round warms up
        ratios = [y / x for x, y in zip(*seconds, strict=True)][1:]
        spread = f"median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{part}: {plain:.0f} us per token, with routes {routed:.0f}; ratio of a round: {spread}")


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds."""
    lines = []
    for model, dtype in dict.fromkeys((row["model"], row["trainer"]) for row in rows):
        for replay in (False, True):
            runs = [row for row in rows if (row["model"], row["trainer"], row["replay"]) == (model, dtype, replay)]
            flipped = [
                run["flipped"] for run in rows if run["model"] == model and run["trainer"] == dtype and run["replay"]
            ]
            lines.append(
                {
                    "model": model,
                    "trainer": dtype,
                    "replay": "replay" if replay else "none",
                    "tokens": sum(run["tokens"] for run in runs),
                    "k3": fmean(run["k3"] for run in runs),
                    "largest": max(run["largest"] for run in runs),
                    "flipped": "0" if replay else f"{fmean(flipped):.3f}",
                }
            )
    return markdown(lines, COLUMNS)


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--upcycled", action="store_true", help="needs the package of the language model")
    parser.add_argument("--time", action="store_true", help="measure time instead")
    args = parser.parse_args()
    if args.time:
        with tempfile.TemporaryDirectory() as folder:
            build_model(folder, 0, hidden_size=256, moe_intermediate_size=256, num_experts=64, num_experts_per_tok=8)
            return measure_time(folder)
    upcycled = args.upcycled
    name = UPCYCLED if upcycled else RANDOM
    results = Path(__file__).parent / "results.json"
    rows = [row for row in json.loads(results.read_text()) if row["model"] != name]
    for seed in SEEDS[:1] if upcycled else SEEDS:
        with tempfile.TemporaryDirectory() as model:
            if upcycled:
                upcycle(model)
            else:
                build_model(model, seed)
            for dtype in TYPES[:1] if upcycled else TYPES:
                for replay in (False, True):
                    row = {"model": name, "trainer": dtype, "replay": replay, "seed": seed}
                    rows.append(row | measure(model, dtype, replay, seed, steps=2 if upcycled else 4))
                    print(rows[-1], flush=True)
    results.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
