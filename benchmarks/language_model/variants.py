"""Other weights of the model, each a folder that is made once: rounded to fewer bits, or with an adapter that has learned."""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path


sys.path += [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parents[1] / "diagnose")]

import torch
from faults import FAULTS
from peft import LoraConfig, PeftModel, get_peft_model
from smollm2 import FOLDER, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


RANK = 16
_STEPS, _ROWS, _RATE = 20, 8, 4e-4


def make_variant(name: str) -> Path:
    """
    Make a variant, unless it is there: `"plain"` (the model), `"int8"` (matrices of the layers rounded as in the fault kit),
    `"adapter"` (LoRA on all matrices of the layers, which has learned to answer sums with the number only), or `"merged"`
    (the model with that adapter added, in bfloat16).
    """
    plain = make_model()
    if name == "plain":
        return plain
    folder = FOLDER.with_name(f"{FOLDER.name}-{name}")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            {"int8": _rounded, "adapter": _adapter, "merged": _merged}[name](plain, Path(work) / name)
            os.replace(Path(work) / name, folder)
    return folder


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _save(model: PreTrainedModel, plain: Path, folder: Path):
    """A checkpoint in bfloat16, with the tokenizer of the plain one."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in plain.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def _rounded(plain: Path, folder: Path):
    """With weights of fewer bits, which bfloat16 then rounds again."""
    model, rounded = load(plain, torch.float32), FAULTS["int8_weights"].weights
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(rounded(name, weight))
    _save(model, plain, folder)


def _adapter(plain: Path, folder: Path):
    """Imitation of answers to sums, some steps."""
    torch.manual_seed(0)
    dice = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load(plain, torch.float32), settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    for _ in range(_STEPS):
        numbers = [(dice.randrange(100), dice.randrange(100)) for _ in range(_ROWS)]
        texts = [_chat(tokenizer, f"What is {a} + {b}?") for a, b in numbers]
        answers = [f"{a + b}{tokenizer.eos_token}" for a, b in numbers]
        batch = tokenizer([x + y for x, y in zip(texts, answers, strict=True)], return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        for row, text in enumerate(texts):
            labels[row, : len(tokenizer(text).input_ids)] = -100
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _chat(tokenizer, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def _merged(plain: Path, folder: Path):
    """As TRL merges it for the sampler of a model in bfloat16."""
    model = PeftModel.from_pretrained(load(plain, torch.bfloat16), make_variant("adapter"))
    _save(model.merge_and_unload(), plain, folder)
