"""What the dumps with faults are made of: samples of an engine, scores of a trainer, and the rows of a dump."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faults
import torch
from policies import EOS, VOCABULARY

from trl_rollout_corr.correction.functional import k3
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.pushes.rescore import is_due
from trl_rollout_corr.tools.dump import folder as dump


STEPS, ROWS, AGAIN = 8, 8, 12  # optimizer steps, sequences of each, and how many of all are scored a second time
ADAPTERS = ("adapter_missing", "stale_adapter")  # faults of an adapter that the sampler should load by itself
Weights = dict[str, torch.Tensor]
Scores = tuple[list[list[float]], list[int]]  # of the trainer, and the padding before each prompt
Again = dict[int, list[float]]  # second scores of some sequences, by their number


class Sample(NamedTuple):
    """One sequence: its prompt, its completion, and the log-probabilities of the sampler."""

    prompt: list[int]
    completion: list[int]
    logps: list[float]
    mask: list[bool]


# Sampling -----------------------------------------------------------------------------------------------------------------


def start(folder: Path, dtype: str, **engine: Any) -> Any:
    from vllm import LLM

    settings = {"dtype": dtype, "logprobs_mode": "processed_logprobs", "enable_prefix_caching": False, **engine}
    return LLM(
        str(folder),
        enforce_eager=True,
        max_model_len=192,
        max_num_seqs=256,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **settings,
    )


def requests(seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of a seed, and how long their completions may be."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(2, VOCABULARY) for _ in range(dice.randint(3, 40))] for _ in range(STEPS * ROWS)]
    return prompts, [dice.randint(16, 72) for _ in prompts]


def sample(
    llm: Any,
    seeds: list[int],
    sampling: dict[int, dict[str, Any]],
    ask: Callable[[int], tuple[list[list[int]], list[int]]] = requests,
) -> dict[int, list[Sample]]:
    """Samples of all seeds in one pass of the engine. `ask` has the prompts of a seed, and the lengths of its completions."""
    from vllm import SamplingParams

    prompts, params, owners = [], [], []
    for seed in seeds:
        for prompt, length in zip(*ask(seed), strict=True):
            prompts.append({"prompt_token_ids": prompt})
            fields = {"temperature": 1.0, "logprobs": 0, **sampling.get(seed, {})}
            params.append(SamplingParams(max_tokens=length, detokenize=False, stop_token_ids=[EOS], **fields))
            owners.append(seed)
    samples: dict[int, list[Sample]] = {seed: [] for seed in seeds}
    for seed, prompt, out in zip(owners, prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(out.outputs[0].token_ids)
        # of the first candidate, which is the sampled token where no others were asked for
        logps = [max(candidate.logprob for candidate in entry.values()) for entry in out.outputs[0].logprobs]
        # every other seed has turns
        mask = mask_of(tokens, len(samples[seed])) if seed % 4 >= 2 else [True] * len(tokens)
        samples[seed].append(Sample(prompt["prompt_token_ids"], tokens, logps, mask))
    return samples


def mask_of(tokens: list[int], i: int) -> list[bool]:
    """An answer of a tool in every other completion."""
    mask = [True] * len(tokens)
    if i % 2 and len(tokens) > 14:
        first = len(tokens) // 3
        mask[first : first + 4] = [False] * 4
    return mask


# Scoring ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(
    model: Any,
    samples: list[Sample],
    *,
    temperature: float = 1.0,
    attend_padding: bool = False,
    drop_prompt: int = 0,
    prepend: int = 0,
    retokenize: bool = False,
    other_ids: int = 0,
    lose: str = "",
) -> Scores:
    """Log-probabilities of the trainer, and the padding before each prompt. Prompts are padded on the left, as in TRL."""
    if lose:
        how = {"temperature": temperature}
        return _losing_context(model, samples, lose, **how)
    prompts = [[*range(7, 7 + 9 * prepend, 9), *s.prompt[: len(s.prompt) - drop_prompt]] for s in samples]
    width, length = max(map(len, prompts)), max(len(s.completion) for s in samples)
    ids = torch.zeros(len(samples), width + length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    padding = [width - len(prompt) for prompt in prompts]
    for row, (prompt, s) in enumerate(zip(prompts, samples, strict=True)):
        ids[row, padding[row] : width] = torch.tensor(prompt)
        ids[row, width : width + len(s.completion)] = torch.tensor(
            [t + 1 if other_ids and t % other_ids == 3 else t for t in s.completion]
        )
        attention[row, 0 if attend_padding else padding[row] : width + len(s.completion)] = 1
    read = ids.clone()
    if retokenize:
        for row, s in enumerate(samples):
            edges = [i for i in range(1, len(s.mask)) if s.mask[i] and not s.mask[i - 1]]
            for edge in edges:
                read[row, width + edge - 1] = 2 + (int(ids[row, width + edge - 1]) + 17) % (VOCABULARY - 2)
    kept = ids.shape[1] - width + 1
    logits = model(input_ids=read, attention_mask=attention, logits_to_keep=kept).logits[:, :-1].float() / temperature
    logps = logits.log_softmax(-1).gather(-1, ids[:, width:, None])[..., 0]
    return [logps[row, : len(s.completion)].tolist() for row, s in enumerate(samples)], padding


def _losing_context(model: Any, samples: list[Sample], lose: str, **how: Any) -> Scores:
    """
    Later turns are scored in a context that lacks tokens of the turns before: the `first_turn`, as reasoning that a template
    leaves out, or the last two of the tool's `answer`, as special tokens.
    """
    logps, padding = score(model, samples, **how)
    for row, s in enumerate(samples):
        edge = next((i for i in range(1, len(s.mask)) if s.mask[i] and not s.mask[i - 1]), None)
        if edge is None:
            continue
        answer = s.mask.index(False)
        gone = range(answer) if lose == "first_turn" else range(edge - 2, edge)
        kept = [i for i in range(len(s.completion)) if i not in gone]
        short = s._replace(completion=[s.completion[i] for i in kept], mask=[s.mask[i] for i in kept])
        again = score(model, [short], **how)[0][0]
        logps[row] = [again[kept.index(i)] if i >= edge else x for i, x in enumerate(logps[row])]
    return logps, padding


def score_steps(model: Any, samples: list[Sample], **how: Any) -> Scores:
    """As a trainer does it, a step at a time."""
    logps, padding = [], []
    for first in range(0, len(samples), ROWS):
        a, b = score(model, samples[first : first + ROWS], **how)
        logps += a
        padding += b
    return logps, padding


def effect(logps: list[list[float]], others: list[list[float]]) -> float:
    """Root mean square of a difference of log-probabilities, in nats, behind the first tokens of completions."""
    pairs = zip(logps, others, strict=True)
    d = torch.cat([torch.tensor(a[1:]) - torch.tensor(b[1:]) for a, b in pairs])
    return float(d.square().mean().sqrt())


def with_weights(model: Any, weights: Weights) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


# Scores after pushes ------------------------------------------------------------------------------------------------------


def after_pushes(
    model: Any, first: Weights, samples: list[Sample], trainer: Sequence[Weights], sampler: Sequence[Weights]
) -> dict[int, tuple[float, float]]:
    """
    `fresh_k3_kl` and `age_k3_kl` of the first samples after the pushes that a trainer scores, by optimizer step, from the
    weights of both sides at the beginning of each step. The engine's rounding is the one of the first weights, with which
    the tokens were drawn, and the two sides score with other paddings.
    """
    texts = samples[:ROWS]
    with_weights(model, first)
    engine = [torch.tensor(s.logps) - torch.tensor(score(model, [s])[0][0]) for s in texts]

    def together(weights: Weights) -> list[torch.Tensor]:
        return [torch.tensor(x) for x in score(with_weights(model, weights), texts)[0]]

    found = {}
    for step in filter(is_due, range(1, len(trainer) + 1)):
        now = together(sampler[step - 1])
        then = [x + noise for x, noise in zip(together(sampler[max(step - 2, 0)]), engine, strict=True)]
        with_weights(model, trainer[step - 1])
        ours = [torch.tensor(score(model, [s])[0][0]) for s in texts]
        found[step] = (_k3(ours, now), _k3(now, then))
    with_weights(model, first)
    return found


def _k3(logps: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    gaps = torch.cat([a - b for a, b in zip(logps, others, strict=True)])
    return float(k3(gaps.double()).mean())


# Dumps --------------------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    samples: list[Sample],
    scored: Scores,
    again: Again,
    *,
    about: dict[str, str],
    ages: list[int] | None = None,
    settings: dict[str, Any] | None = None,
    change: Any = None,
    rate: float | None = None,
    before: int = 0,
    by_length: bool = False,
    rewards: list[float] | None = None,
    pushes: Mapping[int, tuple[float, float]] | None = None,
):
    """
    Write a dump that begins after `before` optimizer steps, with a learning rate in the log, if there is one, and with
    the scores after `pushes` by optimizer step, `fresh_k3_kl` and `age_k3_kl`, if there are any. Without `rewards`,
    they mean nothing, unless they are `by_length`.
    """
    for step, (fresh, age) in (pushes or {}).items():
        dump.append_log(folder, {"step": step, f"{PREFIX}fresh_k3_kl": fresh, f"{PREFIX}age_k3_kl": age})
    logps, padding = scored
    for step in range(STEPS):
        rows = []
        usual = sorted(len(s.completion) for s in samples[step * ROWS : step * ROWS + ROWS])[ROWS // 2]
        for i in range(step * ROWS, step * ROWS + ROWS):
            s, n = samples[i], len(samples[i].completion)
            good = n >= usual if by_length else i % 2
            row = {
                "step": before + step + 1,
                "rank": 0,
                "sampled": True,
                "worst": False,
                "prompt": "",
                "completion": "",
                "tokens": [""] * n,
                "token_ids": s.completion,
                "mask": s.mask,
                "train_logps": logps[i],
                "rollout_logps": s.logps,
                "weights": None,
                "keep": [True] * n,
                "coefficients": [1.0] * n,
                "reward": rewards[i] if rewards else float(good),
                "advantage": rewards[i] if rewards else float(good * 2 - 1),
                "staleness": ages[i] if ages else 0,
                "prompt_ids": s.prompt,
                "padding": padding[i],
                "again_logps": again.get(i),
                "token_staleness": None,
            }
            rows.append(change(row) if change else row)
        dump.write_rows(folder, before + step + 1, 0, rows, settings or {}, about)
        if rate is not None:
            dump.append_log(folder, {"learning_rate": rate, "step": before + step + 1})


def about_of(seed: int, fault: str = "") -> dict[str, str]:
    """
    Metadata of a run: an adapter, which has nothing to do with most faults, how the engine caches, and the types of heads
    that compute in different ones.
    """
    served = {"pushed": "adapter"} if fault in ADAPTERS else {}
    has_one = fault in ("lora_merge", "adapter_twice", "frozen_base") or served
    adapter = {"adapter": "LORA"} if seed % 3 == 0 or has_one else {"adapter": "none"}
    engine = faults.FAULTS[fault].engine if fault else {}
    named = {"quantization": engine["quantization"]} if "quantization" in engine else {}
    heads = {"trainer_dtype": "bfloat16", "sampler_head_dtype": "float32"} if fault == "bf16_head" else {}
    return {**adapter, **served, **named, **heads, "kv_cache_dtype": engine.get("kv_cache_dtype", "auto")}


def ages_of(seed: int) -> list[int]:
    """Ages that mean nothing: batches are taken as they come, or two steps train on each."""
    return [(i // ROWS) % 2 if seed % 5 < 2 else 0 for i in range(STEPS * ROWS)]


def stop(llm: Any):
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()
