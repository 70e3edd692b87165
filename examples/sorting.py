"""
A task that a laptop learns in minutes: sort sixteen digits.

The prompt is `3918...=` and the completion the same digits in order. The reward is 1 for an exact answer and 0 otherwise, so
that learning is visible as the share of exact answers. Model and tokenizer are made here; nothing is downloaded.
"""

import random
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


DIGITS = 16
SLIPS = 0.05  # share of digits that the teacher of the warm start gets wrong, for reinforcement learning to put right
HELD_OUT_SEED = 10**6


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.6M parameters."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
            initializer_range=0.06,  # learns faster than with the default of 0.02, at this width
        )
    )


def make_prompts(n: int, seed: int) -> Dataset:
    dice = random.Random(seed)
    problems = ["".join(dice.choices("0123456789", k=DIGITS)) for _ in range(n)]
    return Dataset.from_dict({"prompt": [f"{digits}=" for digits in problems]})


def exact_answer(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """Reward: 1 if the completion is the digits of the prompt in order, else 0."""
    pairs = zip(prompts, completions, strict=True)
    return [
        float("".join(sorted(prompt.removesuffix("="))) == completion.replace(" ", "")) for prompt, completion in pairs
    ]


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n: int = 256, *, greedy: bool = False
) -> float:
    """Share of exact answers on held-out prompts, of the trained model (not vLLM), sampled at temperature 1 or greedy."""
    prompts = list(make_prompts(n, HELD_OUT_SEED)["prompt"])
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False).to(model.device)
    training = model.training
    model.eval()
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = model.generate(**inputs, max_new_tokens=DIGITS + 1, **how)
    model.train(training)
    completions = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return sum(exact_answer(prompts, completions)) / n


def warm_start(folder: Path, steps: int = 400, batch_size: int = 16, seed: int = 0) -> Path:
    """
    Teach a new model the task by imitation of a sloppy teacher, and save it.

    Args:
        folder (`Path`):
            Where to save model and tokenizer. If they are there already, nothing is done.
        steps (`int`, *optional*, defaults to `400`):
            Steps of supervised learning.
        batch_size (`int`, *optional*, defaults to `16`):
            Examples per step.
        seed (`int`, *optional*, defaults to `0`):
            Seed of weights and examples.

    Returns:
        `Path`: the folder.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    start = time.perf_counter()
    print(f"Warming up a model of 0.6M parameters, once, in {folder}", flush=True)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.2)
    for step in range(1, steps + 1):
        loss = imitation_loss(model, tokenizer, batch_size)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 4, 1) == 0:
            left = (time.perf_counter() - start) * (steps / step - 1)
            print(f"  step {step}/{steps}  loss {loss.item():.2f}  {left:.0f} s left", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: its file says that the folder is complete
    return folder


def imitation_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch_size: int) -> torch.Tensor:
    """Cross-entropy of the teacher's answers to random problems."""
    zero, equals = tokenizer.convert_tokens_to_ids(["0", "="])
    digits = torch.randint(zero, zero + 10, (batch_size, DIGITS))  # the tokens of the digits are in order
    answers = digits.sort(-1).values
    slips = torch.rand(answers.shape) < SLIPS
    answers = torch.where(slips, torch.randint(zero, zero + 10, answers.shape), answers)
    equals = torch.full((batch_size, 1), equals)
    end = torch.full((batch_size, 1), tokenizer.eos_token_id)
    ids = torch.cat([digits, equals, answers, end], dim=1)
    labels = ids.clone()
    labels[:, : DIGITS + 1] = -100  # the prompt
    return model(ids, labels=labels).loss
