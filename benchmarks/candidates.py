"""
Cost of the candidates that `rollout_support: replay` asks vLLM for.

    python benchmarks/candidates.py [MODEL]

Times vLLM's sampling at `top_k` 50, in turns: the log-probability of the sampled token alone, and those of all candidates,
with the kept sets read from them; in seconds of CPU time, or on a GPU of wall clock. Without a model, a random one with four
layers and 32,000 tokens is made on the spot.
"""

import argparse
import os
import statistics
import tempfile
import time
from types import SimpleNamespace


os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from trl.generation.vllm_generation import extract_logprobs
from vllm import LLM, SamplingParams

from trl_rollout_corr.replay.kept_tokens import KeptTokens


TOP_K = 50


def random_model(folder: str) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = Qwen2Config(vocab_size=32_000, num_key_value_heads=8, max_position_embeddings=1024, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def main():
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model; by default a random one")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(folder)
        options = {"enforce_eager": True, "max_model_len": 1024, "skip_tokenizer_init": not args.model}
        llm = LLM(model, logprobs_mode="processed_logprobs", **options)
        generation = SimpleNamespace(llm=llm, top_k=TOP_K, generation_kwargs={}, logprobs=0)
        kept_tokens = KeptTokens(generation, 1.0, lambda model: model)
        prompts = [{"prompt_token_ids": [10 + i] * 16} for i in range(args.completions)]
        seconds: dict[int, list[float]] = {0: [], generation.logprobs: []}
        for _ in range(args.rounds + 1):
            for number, found in seconds.items():
                sampling = SamplingParams(
                    top_k=TOP_K, max_tokens=args.length, ignore_eos=True, logprobs=number, detokenize=bool(args.model)
                )
                start = clock()
                outputs = llm.generate(prompts, sampling_params=sampling, use_tqdm=False)
                logprobs, token_ids = extract_logprobs(outputs)
                if number:
                    ids = [output.token_ids for request in outputs for output in request.outputs]
                    kept_tokens.read(ids, logprobs, token_ids)
                found.append(clock() - start)
    tokens = args.completions * args.length
    medians = [statistics.median(found[1:]) for found in seconds.values()]  # the first round warms up
    ratios = [more / less for less, more in list(zip(*seconds.values(), strict=True))[1:]]
    for number, median in zip(seconds, medians, strict=True):
        print(f"{number + 1:3d} log-probabilities per token: {1e3 * median / tokens:.3f} ms per token")
    print(f"ratio of a round: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
