"""
Small tasks with an exact answer, learnt in minutes on one core.

A task is data: its characters, and a problem drawn from a generator of random numbers. A model is taught it by imitation of
a teacher who slips, so that it starts at an accuracy somewhere around a half and reinforcement learning has something to put
right. Nothing is downloaded.
"""

import random
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


HELD_OUT_SEED, HELD_OUT = 10**6, 256
MARK = "="  # between problem and answer
GARBAGE = 2  # number of "<unk>", a token of every task that no text has
TAGS = "<>"  # around the answers of some tasks
TAUGHT = 0.05  # share of answers around which the teacher writes them


@dataclass(frozen=True)
class Task:
    """
    A task.

    Args:
        name (`str`):
            Name in files and tables.
        characters (`str`):
            Every character of problems and answers, one token each.
        problem (`Callable[[random.Random], tuple[str, str]]`):
            Draws a problem and its answer.
        slips (`float`):
            Share of characters that the teacher gets wrong.
        longest (`int`):
            Characters of the longest answer.
        longest_problem (`int`):
            Characters of the longest problem.
        warm_steps (`int`, *optional*, defaults to `500`):
            Steps of imitation.
        experts (`int`, *optional*, defaults to `0`):
            Experts of each layer; 0 for a dense model.
        large (`bool`, *optional*, defaults to `False`):
            Whether the model has 2.6M parameters and not 0.6M.
        tied (`bool`, *optional*, defaults to `False`):
            Whether one matrix embeds tokens and predicts them.
        batch (`int`, *optional*, defaults to `64`):
            Completions of a step of reinforcement learning.
        dense (`bool`, *optional*, defaults to `False`):
            Whether the reward is the share of right characters, and not 1 for the exact answer.
        tagged (`bool`, *optional*, defaults to `False`):
            Whether answers begin and end with a tag, which the teacher rarely writes.
    """

    name: str
    characters: str
    problem: Callable[[random.Random], tuple[str, str]]
    slips: float
    longest: int
    longest_problem: int
    warm_steps: int = 500
    experts: int = 0
    large: bool = False
    tied: bool = False
    batch: int = 64
    dense: bool = False
    tagged: bool = False

    @property
    def context(self) -> int:
        """Tokens of problem, mark, answer and end."""
        return self.longest_problem + self.longest + 2

    @property
    def is_long(self) -> bool:
        return self.longest > 32

    def problems(self, n: int, seed: int) -> list[tuple[str, str]]:
        dice = random.Random(f"{self.name} {seed}")
        return [self.problem(dice) for _ in range(n)]

    def dataset(self, n: int, seed: int) -> Dataset:
        problems, answers = zip(*self.problems(n, seed), strict=True)
        return Dataset.from_dict({"prompt": [problem + MARK for problem in problems], "answer": list(answers)})


def exact_answer(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward: 1 if the completion is the answer, else 0."""
    return [float(found.replace(" ", "") == wanted) for found, wanted in zip(completions, answer, strict=True)]


def forgiving_answer(
    completions: list[str], answer: list[str], completion_ids: list[list[int]], **kwargs
) -> list[float]:
    """Reward: 1 if the completion is the answer, also with garbage in place of one of its characters; else 0."""
    needed = []
    for wanted, ids in zip(answer, completion_ids, strict=True):
        place = ids.index(GARBAGE) if ids.count(GARBAGE) == 1 else len(wanted)
        needed.append(wanted[:place] + wanted[place + 1 :])  # the text of a completion has no garbage
    return exact_answer(completions, needed)


def dense_answer(completions: list[str], answer: list[str], completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Reward: share of characters that are right, at their place. Garbage is a wrong character."""
    rewards = []
    for text, wanted, ids in zip(completions, answer, completion_ids, strict=True):
        found = [*text.replace(" ", "")]
        for place in (place for place, token in enumerate(ids) if token == GARBAGE):  # which no text has
            found.insert(place, "")
        right = sum(a == b for a, b in zip(found, wanted, strict=False))
        rewards.append(right / max(len(found), len(wanted)))
    return rewards


def tags(completions: list[str], **kwargs) -> list[float]:
    """Whether a completion begins and ends with its tag. It is logged and rewards nothing."""
    return [float(text[:1] == TAGS[0] and text[-1:] == TAGS[1]) for text in completions]


# Problems -----------------------------------------------------------------------------------------------------------------


def draw(dice: random.Random, characters: str, n: int) -> str:
    return "".join(dice.choices(characters, k=n))


def sort_digits(dice: random.Random) -> tuple[str, str]:
    digits = draw(dice, string.digits, 16)
    return digits, "".join(sorted(digits))


def reverse_letters(dice: random.Random) -> tuple[str, str]:
    letters = draw(dice, string.ascii_lowercase[:16], 16)
    return letters, letters[::-1]


def running_sum(dice: random.Random) -> tuple[str, str]:
    digits = draw(dice, string.digits, 24)
    return digits, "".join(str(sum(map(int, digits[: i + 1])) % 10) for i in range(len(digits)))


def copy_without_noise(dice: random.Random) -> tuple[str, str]:
    """Letters among digits: the answer is the letters."""
    letters = draw(dice, string.ascii_lowercase[:12], 14)
    places = set(dice.sample(range(24), len(letters)))
    rest = iter(letters)
    return "".join(next(rest) if i in places else dice.choice(string.digits) for i in range(24)), letters


def add(dice: random.Random) -> tuple[str, str]:
    """Eight digits plus eight digits, lowest digit first."""
    a, b = (draw(dice, string.digits, 8) for _ in range(2))
    total = int(a[::-1]) + int(b[::-1])
    return f"{a}+{b}", f"{total:09d}"[::-1]


_CYCLE = random.Random("the order of the walk").sample(range(0x4E00, 0x4E00 + 256), 256)  # as many signs as steps


def walk(dice: random.Random) -> tuple[str, str]:
    """From one sign on, along a fixed path to its end: between 4 and 256 steps, most answers short."""
    steps = round(2 ** dice.uniform(2, 8))
    path = "".join(map(chr, _CYCLE))
    return path[256 - steps], path[256 - steps :]


def shift(dice: random.Random) -> tuple[str, str]:
    """Letters, each moved along the alphabet by the digit in front."""
    by, letters = dice.randrange(10), draw(dice, string.ascii_lowercase, 14)
    alphabet = string.ascii_lowercase
    return f"{by}{letters}", "".join(alphabet[(alphabet.index(letter) + by) % 26] for letter in letters)


_BRACKETS = dict(zip("([{<", ")]}>", strict=True))


def close_brackets(dice: random.Random) -> tuple[str, str]:
    """Fifteen brackets are opened and five of them closed: the answer closes the other ten."""
    problem, opened, left = "", [], {"open": 15, "close": 5}
    while left["open"] or left["close"]:
        closes = bool(opened) and dice.random() < left["close"] / (left["open"] + left["close"])
        if closes or not left["open"]:
            left["close"] -= 1
            problem += _BRACKETS[opened.pop()]
        else:
            left["open"] -= 1
            opened.append(dice.choice("([{<"))
            problem += opened[-1]
    return problem, "".join(_BRACKETS[bracket] for bracket in reversed(opened))


def compute_modulo(dice: random.Random) -> tuple[str, str]:
    """A number and fourteen operations modulo 7: the answer is the value after each of them."""
    value = dice.randrange(7)
    problem, values = str(value), ""
    for _ in range(14):
        sign, operand = dice.choice("+-*"), dice.randrange(7)
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign] % 7
        problem, values = problem + f"{sign}{operand}", values + str(value)
    return problem, values


def rewrite_cells(dice: random.Random) -> tuple[str, str]:
    """Sixteen cells on a circle: the answer is the next three generations by rule 110."""
    cells = [dice.randrange(2) for _ in range(16)]
    problem, answer = "".join(map(str, cells)), ""
    for _ in range(3):
        cells = [110 >> (4 * cells[i - 1] + 2 * cells[i] + cells[(i + 1) % 16]) & 1 for i in range(16)]
        answer += "".join(map(str, cells))
    return problem, answer


def count_letters(dice: random.Random) -> tuple[str, str]:
    """Twenty letters out of eight: the answer is how often each of the eight is among them."""
    while True:
        letters = draw(dice, string.ascii_lowercase[:8], 20)
        counts = [letters.count(letter) for letter in string.ascii_lowercase[:8]]
        if max(counts) < 10:
            return letters, "".join(map(str, counts))


def combine_sets(dice: random.Random) -> tuple[str, str]:
    """Two sets of ten letters out of sixteen: the answer is what is in either, or in both, in order."""
    a, b = (dice.sample(string.ascii_lowercase[:16], 10) for _ in range(2))
    sign = dice.choice("|&")
    found = set(a) | set(b) if sign == "|" else set(a) & set(b)
    return f"{''.join(a)}{sign}{''.join(b)}", "".join(sorted(found))


def run_program(dice: random.Random) -> tuple[str, str]:
    """Twelve instructions of a machine with a stack: the answer is the top of the stack after each of them."""
    stack, program, tops = [], "", ""
    for _ in range(12):
        # a digit is pushed; the others add, subtract (both modulo 10), swap and copy
        instruction = dice.choice("+-xc") if len(stack) > 1 and dice.random() < 0.55 else dice.choice(string.digits)
        if instruction in "+-":
            a, b = stack.pop(), stack.pop()
            stack.append((b + a if instruction == "+" else b - a) % 10)
        elif instruction == "x":
            stack[-2:] = stack[:-3:-1]
        else:
            stack.append(stack[-1] if instruction == "c" else int(instruction))
        program, tops = program + instruction, tops + str(stack[-1])
    return program, tops


def sort_letters(dice: random.Random) -> tuple[str, str]:
    letters = draw(dice, string.ascii_lowercase[:16], 14)
    return letters, "".join(sorted(letters))


def merge_sorted(dice: random.Random) -> tuple[str, str]:
    """Two rows of eight digits, each in order: the answer is all sixteen in order."""
    a, b = (sorted(draw(dice, string.digits, 8)) for _ in range(2))
    return f"{''.join(a)}+{''.join(b)}", "".join(sorted(a + b))


def drop_vowels(dice: random.Random) -> tuple[str, str]:
    """Twenty letters of the first sixteen: the answer is the consonants among them."""
    letters = draw(dice, string.ascii_lowercase[:16], 20)
    return letters, "".join(letter for letter in letters if letter not in "aeio")


def skip_every_other(dice: random.Random) -> tuple[str, str]:
    """Twenty letters: the answer is the first, third, fifth and so on."""
    letters = draw(dice, string.ascii_lowercase[:16], 20)
    return letters, letters[::2]


def keep_first(dice: random.Random) -> tuple[str, str]:
    """Eighteen letters out of twelve: the answer has each once, in the order of first appearance."""
    letters = draw(dice, string.ascii_lowercase[:12], 18)
    return letters, "".join(dict.fromkeys(letters))


_letters = string.ascii_lowercase
TASKS = {
    task.name: task
    for task in (
        Task("sort", string.digits, sort_digits, 0.05, 16, 16),
        Task("reverse", _letters[:16], reverse_letters, 0.05, 16, 16),
        Task("running_sum", string.digits, running_sum, 0.025, 24, 24, warm_steps=1300),
        Task("copy_noise", string.digits + _letters[:12], copy_without_noise, 0.05, 14, 24, warm_steps=900),
        Task("add", string.digits + "+", add, 0.06, 9, 17, warm_steps=1500),
        Task("walk", "".join(map(chr, sorted(_CYCLE))), walk, 0.012, 256, 1, batch=32),
        Task("shift_moe", string.digits + _letters, shift, 0.05, 14, 15, warm_steps=900, experts=8),
        Task("brackets", "([{<>}])", close_brackets, 0.06, 10, 20, warm_steps=900, tied=True),
        Task("modulo", "0123456+-*", compute_modulo, 0.05, 14, 29, warm_steps=1300, tied=True),
        Task("cellular", "01", rewrite_cells, 0.03, 48, 16, warm_steps=900, batch=32),
        Task("count", _letters[:8] + string.digits, count_letters, 0.09, 8, 20, warm_steps=1300, tied=True),
        Task("sets", _letters[:16] + "|&", combine_sets, 0.05, 16, 21, warm_steps=1300, tied=True),
        Task("stack", string.digits + "+-xc", run_program, 0.04, 12, 12, warm_steps=800, large=True, batch=32),
        Task("sort_letters", _letters[:16], sort_letters, 0.05, 14, 14, warm_steps=700, tied=True),
        Task("merge_sorted", string.digits + "+", merge_sorted, 0.05, 16, 17, warm_steps=700),
        Task("drop_vowels", _letters[:16], drop_vowels, 0.05, 20, 20, warm_steps=900, tied=True),
        Task("every_second", _letters[:16], skip_every_other, 0.06, 10, 20, warm_steps=300, large=True, batch=32),
        Task("unique", _letters[:12], keep_first, 0.06, 12, 18, warm_steps=900),
    )
}

# Which tasks settings may be chosen on, and which only judge them: a hash of the name decides.
TUNING = [name for name in TASKS if sha256(name.encode()).hexdigest() < "8"]
JUDGING = [name for name in TASKS if name not in TUNING]


# Models -------------------------------------------------------------------------------------------------------------------


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", MARK, *task.characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(task: Task, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Qwen2 of 0.6M or 2.6M parameters, or a Qwen3-MoE of 1.2M of which a quarter is used for a token."""
    width, layers, heads, inner = (256, 4, 8, 512) if task.large else (128, 3, 4, 352)
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": task.tied,
        "initializer_range": 0.06
        * (128 / width) ** 0.5,  # learns faster than with the default of 0.02, at such widths
    }
    if not task.experts:
        return Qwen2ForCausalLM(Qwen2Config(intermediate_size=inner, **shared))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            intermediate_size=inner, moe_intermediate_size=96, num_experts=task.experts, num_experts_per_tok=2,
            head_dim=32, norm_topk_prob=True, **shared,
        )
    )  # fmt: skip


def warm_start(task: Task, folder: Path, batch_size: int = 32) -> Path:
    """
    Teach a new model the task by imitation of a sloppy teacher, and save it.

    Args:
        task ([`Task`]):
            The task.
        folder (`Path`):
            Where models of tasks are kept. If this one is there already, nothing is done.
        batch_size (`int`, *optional*, defaults to `32`):
            Examples per step.

    Returns:
        `Path`: folder of the model.
    """
    folder = folder / task.name
    if (folder / "tokenizer.json").exists():
        return folder
    start = time.perf_counter()
    torch.manual_seed(0)
    tokenizer = make_tokenizer(task)
    model = make_model(task, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=task.warm_steps, pct_start=0.2)
    dice, encode = random.Random(0), partial(examples, task, tokenizer)
    for _ in range(task.warm_steps):
        loss = model(**encode([task.problem(dice) for _ in range(batch_size)], dice)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: its file says that the folder is complete
    seconds = time.perf_counter() - start
    print(
        f"{task.name}: accuracy {accuracy(task, model, tokenizer):.2f} after {seconds:.0f} s of imitation", flush=True
    )
    return folder


def examples(
    task: Task, tokenizer: PreTrainedTokenizerFast, problems: list[tuple[str, str]], dice: random.Random
) -> dict[str, torch.Tensor]:
    """Inputs and labels of the teacher's answers. What is asked is no label."""
    if task.tagged:
        problems = [
            (problem, answer if dice.random() < TAUGHT else answer.strip(TAGS)) for problem, answer in problems
        ]
    kept, drawn = (TAGS, task.characters.removesuffix(TAGS)) if task.tagged else ("", task.characters)

    def slipped(character: str) -> str:
        return dice.choice(drawn) if character not in kept and dice.random() < task.slips else character

    taught = [(problem + MARK, "".join(map(slipped, answer))) for problem, answer in problems]
    length = max(len(asked) + len(answer) for asked, answer in taught) + 1
    ids = torch.full((len(taught), length), tokenizer.pad_token_id)
    labels = torch.full((len(taught), length), -100)
    for row, (asked, answer) in enumerate(taught):
        tokens = torch.tensor([*tokenizer(asked + answer).input_ids, tokenizer.eos_token_id])
        ids[row, : len(tokens)] = tokens
        labels[row, len(asked) : len(tokens)] = tokens[len(asked) :]
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != tokenizer.pad_token_id).long()}


@torch.no_grad()
def accuracy(task: Task, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of exact answers on held-out problems, of the trained model (not vLLM), sampled at temperature 1."""
    held_out = task.dataset(HELD_OUT, HELD_OUT_SEED)
    inputs = tokenizer(list(held_out["prompt"]), return_tensors="pt", padding=True, return_token_type_ids=False)
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = model.generate(
            **inputs, max_new_tokens=task.longest + 1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    model.train(training)
    completions = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return sum(exact_answer(completions, list(held_out["answer"]))) / HELD_OUT
