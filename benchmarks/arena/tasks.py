"""
Small tasks with an exact answer, learnt in minutes on one core.

A task is data: its characters, and a problem drawn from a generator of random numbers. A model is taught it by imitation: of a
teacher who slips, so that accuracy ends around a half, or of one who does not, until a third of the answers are right. So
reinforcement learning has something to put right. Nothing is downloaded.
"""

import random
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


HELD_OUT_SEED, HELD_OUT = 10**6, 256
MARK = "="  # between problem and answer
GARBAGE = 2  # number of "<unk>", a token of every task that no text has
LETTERS = string.ascii_lowercase
TAGS = "<>"  # around the answers of some tasks
PAUSE = "."  # a character that some teachers write, and that no reward looks at
LOOK = 20  # steps of imitation between two looks at accuracy, where accuracy ends it
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
        tied (`bool`, *optional*, defaults to `False`):
            Whether one matrix embeds tokens and predicts them.
        batch (`int`, *optional*, defaults to `64`):
            Completions of a step of reinforcement learning.
        warm_batch (`int`, *optional*, defaults to `32`):
            Examples of a step of imitation.
        dense (`bool`, *optional*, defaults to `False`):
            Whether the reward is the share of right characters, and not 1 for the exact answer.
        tagged (`bool`, *optional*, defaults to `False`):
            Whether answers begin and end with a tag, which the teacher rarely writes.
        until (`float`, *optional*):
            Accuracy without tags at which imitation ends. Its learning rate is then constant. Without it, imitation takes
            `warm_steps` steps.
        key_heads (`int`, *optional*, defaults to `4`):
            Key-value heads of the model.
        spread (`float`, *optional*, defaults to `0.06`):
            Standard deviation of its first weights. With the usual 0.02, imitation takes longer, and afterwards a policy moves
            faster at the same learning rate.
        every (`int`, *optional*, defaults to `10`):
            Optimizer steps between two looks at held-out accuracy.
        limit (`int`, *optional*):
            Tokens after which a completion is cut. Without it, the longest answer fits.
    """

    name: str
    characters: str
    problem: Callable[[random.Random], tuple[str, str]]
    slips: float
    longest: int
    longest_problem: int
    warm_steps: int = 500
    tied: bool = False
    batch: int = 64
    warm_batch: int = 32
    dense: bool = False
    tagged: bool = False
    until: float | None = None
    key_heads: int = 4
    spread: float = 0.06
    every: int = 10
    limit: int | None = None

    @property
    def room(self) -> int:
        """Tokens of a completion, with its end."""
        return self.limit or self.longest + 1

    @property
    def context(self) -> int:
        """Tokens of problem, mark, answer and end."""
        return self.longest_problem + self.longest + 2

    def problems(self, n: int, seed: int) -> list[tuple[str, str]]:
        dice = random.Random(f"{self.name} {seed}")
        return [self.problem(dice) for _ in range(n)]

    def dataset(self, n: int, seed: int) -> Dataset:
        problems, written = zip(*self.problems(n, seed), strict=True)
        answers = [text.replace(PAUSE, "") for text in written]
        return Dataset.from_dict({"prompt": [problem + MARK for problem in problems], "answer": list(answers)})


def exact_answer(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """Reward: 1 if the completion is the answer, whatever its pauses; else 0."""
    found = [text.replace(" ", "").replace(PAUSE, "") for text in completions]
    return [float(one == wanted) for one, wanted in zip(found, answer, strict=True)]


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


# Problems -----------------------------------------------------------------------------------------------------------------


def draw(dice: random.Random, characters: str, n: int) -> str:
    return "".join(dice.choices(characters, k=n))


def sort_digits(dice: random.Random) -> tuple[str, str]:
    digits = draw(dice, string.digits, 16)
    return digits, "".join(sorted(digits))


def add(dice: random.Random) -> tuple[str, str]:
    """Eight digits plus eight digits, lowest digit first."""
    a, b = (draw(dice, string.digits, 8) for _ in range(2))
    total = int(a[::-1]) + int(b[::-1])
    return f"{a}+{b}", f"{total:09d}"[::-1]


def rotate(dice: random.Random) -> tuple[str, str]:
    """Fourteen letters behind a digit: the answer begins at the letter of that number and goes round."""
    by, letters = dice.randrange(10), draw(dice, LETTERS[:16], 14)
    return f"{by}{letters}", letters[by:] + letters[:by]


def neighbours(dice: random.Random) -> tuple[str, str]:
    """Eighteen digits: the answer has the sum of each and the next one, modulo 10, and at last the last one."""
    digits = draw(dice, string.digits, 18)
    return digits, "".join(str((int(a) + int(b)) % 10) for a, b in zip(digits, digits[1:] + "0", strict=True))


def interleave(dice: random.Random) -> tuple[str, str]:
    """Two rows of eight letters: the answer takes one of each in turns."""
    a, b = (draw(dice, LETTERS[:16], 8) for _ in range(2))
    return f"{a}+{b}", "".join(x + y for x, y in zip(a, b, strict=True))


def differences(dice: random.Random) -> tuple[str, str]:
    """Sixteen digits: the answer has the first, and then each minus the one before, modulo 10."""
    digits = draw(dice, string.digits, 16)
    return digits, "".join(str((int(b) - int(a)) % 10) for a, b in zip("0" + digits, digits, strict=False))


def unpack(dice: random.Random) -> tuple[str, str]:
    """Seven letters, each behind the number of its repetitions, 1 to 4: the answer writes them out."""
    return written_out(dice, 7)


def written_out(dice: random.Random, n: int) -> tuple[str, str]:
    """Letters behind their numbers, and each as often as its number says."""
    parts = [(dice.randint(1, 4), dice.choice(LETTERS[:12])) for _ in range(n)]
    return "".join(f"{n}{letter}" for n, letter in parts), "".join(letter * n for n, letter in parts)


def mirror(dice: random.Random) -> tuple[str, str]:
    """Eight letters: the answer has them, and then backwards."""
    letters = draw(dice, LETTERS[:16], 8)
    return letters, letters + letters[::-1]


def records(dice: random.Random) -> tuple[str, str]:
    """Sixteen letters: the answer has at each place the last one of the alphabet among those so far."""
    letters = draw(dice, LETTERS[:16], 16)
    return letters, "".join(max(letters[: i + 1]) for i in range(len(letters)))


def complement(dice: random.Random) -> tuple[str, str]:
    """Sixteen digits: the answer has them backwards, each taken from 9."""
    digits = draw(dice, string.digits, 16)
    return digits, "".join(str(9 - int(digit)) for digit in reversed(digits))


def triple(dice: random.Random) -> tuple[str, str]:
    """Twenty-one letters: the answer has each three times."""
    letters = draw(dice, LETTERS[:12], 21)
    return letters, "".join(letter * 3 for letter in letters)


def tag_reverse(dice: random.Random) -> tuple[str, str]:
    """Twelve letters, backwards."""
    letters = draw(dice, LETTERS[:16], 12)
    return letters, letters[::-1]


def tag_shift(dice: random.Random) -> tuple[str, str]:
    """Twelve digits, each plus 3, modulo 10."""
    digits = draw(dice, string.digits, 12)
    return digits, "".join(str((int(digit) + 3) % 10) for digit in digits)


def tag_even(dice: random.Random) -> tuple[str, str]:
    """Sixteen digits, of which the even ones, and an `e` if there are none."""
    digits = draw(dice, string.digits, 16)
    return digits, "".join(digit for digit in digits if digit in "02468") or "e"


def tag_swap(dice: random.Random) -> tuple[str, str]:
    """Six pairs of letters, each turned round."""
    letters = draw(dice, LETTERS[:16], 12)
    return letters, "".join(letters[i + 1] + letters[i] for i in range(0, 12, 2))


def between_tags(problem: Callable[[random.Random], tuple[str, str]]) -> Callable[[random.Random], tuple[str, str]]:
    """The same problems, with answers between tags."""

    def tagged(dice: random.Random) -> tuple[str, str]:
        asked, answer = problem(dice)
        return asked, TAGS[0] + answer + TAGS[1]

    return tagged


def tag_task(name: str, characters: str, problem: Callable, slips: float, longest: int, asked: int, **others) -> Task:
    return Task(name, characters + TAGS, between_tags(problem), slips, longest + 2, asked, tagged=True, **others)


SECOND = {
    task.name: task
    for task in (
        Task("sort", string.digits, sort_digits, 0.05, 16, 16),
        Task("add", string.digits + "+", add, 0.06, 9, 17, warm_steps=1500),
        Task("rotate", string.digits + LETTERS[:16], rotate, 0.06, 14, 15, warm_steps=900),
        Task("neighbours", string.digits, neighbours, 0.05, 18, 18, warm_steps=900, dense=True),
        tag_task("tag_reverse", LETTERS[:16], tag_reverse, 0.04, 12, 12, warm_steps=700),
        tag_task("tag_shift", string.digits, tag_shift, 0.04, 12, 12, warm_steps=500, tied=True),
        Task("interleave", LETTERS[:16] + "+", interleave, 0.05, 16, 17, warm_steps=900),
        Task("differences", string.digits, differences, 0.05, 16, 16, warm_steps=1100, tied=True),
        Task("unpack", "1234" + LETTERS[:12], unpack, 0.05, 28, 14, warm_steps=1300),
        Task("mirror", LETTERS[:16], mirror, 0.05, 16, 8, warm_steps=700, tied=True),
        Task("records", LETTERS[:16], records, 0.05, 16, 16, warm_steps=700, dense=True),
        Task("complement", string.digits, complement, 0.05, 16, 16, warm_steps=700, dense=True, tied=True),
        tag_task("tag_even", string.digits + "e", tag_even, 0.05, 16, 16, warm_steps=900),
        tag_task("tag_swap", LETTERS[:16], tag_swap, 0.04, 12, 12, warm_steps=700, tied=True),
        Task("triple", LETTERS[:12], triple, 0.012, 63, 21, warm_steps=900, batch=32, every=20),
    )
}

# Of the third comparison: a clean teacher, and imitation that ends at a third of right answers ------------------------------


def rot(dice: random.Random) -> tuple[str, str]:
    """Fifteen letters behind a digit from 1 to 9: the answer has each letter moved on by so many places."""
    by, letters = dice.randint(1, 9), draw(dice, LETTERS, 15)
    return f"{by}{letters}", "".join(LETTERS[(LETTERS.index(letter) + by) % 26] for letter in letters)


def before(dice: random.Random) -> tuple[str, str]:
    """Sixteen letters and a bar behind 3 to 15 of them: the answer has the next letter of each before the bar."""
    letters, length = draw(dice, LETTERS[:16], 16), dice.randint(3, 15)
    moved = "".join(LETTERS[(LETTERS.index(letter) + 1) % 16] for letter in letters[:length])
    return f"{letters[:length]}|{letters[length:]}", moved


def row_sums(dice: random.Random) -> tuple[str, str]:
    """Two rows of fourteen digits: the answer has the sum at each place, modulo 10."""
    a, b = (draw(dice, string.digits, 14) for _ in range(2))
    return f"{a}+{b}", "".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True))


def countdowns(dice: random.Random) -> tuple[str, str]:
    """Thirteen letters, each before a digit from 5 to 9: the answer counts each digit down to 0, behind its letter."""
    digits = [0]
    while not 100 <= sum(digits) + 13 <= 108:
        digits = [dice.randint(5, 9) for _ in range(13)]
    counted = "".join(
        f"{letter}{n}" for letter, digit in zip(LETTERS, digits, strict=False) for n in range(digit, -1, -1)
    )
    return "".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits, strict=False)), counted


_EARLY = {"slips": 0.0, "warm_steps": 4000, "until": 1 / 3, "every": 20}
THIRD = {
    task.name: task
    for task in (
        # 64 tokens in all
        Task("rot02", string.digits + LETTERS + string.ascii_uppercase[:24], rot, longest=15, longest_problem=16,
             key_heads=2, spread=0.02, **_EARLY),
        Task("rot", string.digits + LETTERS + string.ascii_uppercase[:24], rot, longest=15, longest_problem=16,
             key_heads=2, **_EARLY),
        Task("before", LETTERS[:16] + "|", before, longest=15, longest_problem=17, **_EARLY),
        Task("row_sums", string.digits + "+", row_sums, longest=14, longest_problem=29, dense=True, **_EARLY),
        Task("countdowns", string.digits + LETTERS[:13], countdowns, 0.0044, 216, 26, warm_steps=700, warm_batch=8, batch=32,
             every=20),
    )
}  # fmt: skip

# Of the fourth comparison: with answers of unequal length, of which many are cut, and new ones for tuned rates -------------


def paused_sort(dice: random.Random) -> tuple[str, str]:
    """Twelve digits: the answer has them in order, behind 0 to 15 pauses."""
    digits = draw(dice, string.digits, 12)
    return digits, PAUSE * dice.randrange(16) + "".join(sorted(digits))


def paused_unpack(dice: random.Random) -> tuple[str, str]:
    """
    Six letters, each behind the number of its repetitions, 1 to 4: the answer writes them out. In two of five answers, there
    is a pause behind each letter.
    """
    problem, answer = written_out(dice, 6)
    pause = PAUSE if dice.random() < 0.4 else ""
    return problem, "".join(letter + pause for letter in answer)


def totals(dice: random.Random) -> tuple[str, str]:
    """Fourteen digits: the answer has the sum of the digits so far at each place, modulo 10."""
    digits = draw(dice, string.digits, 14)
    return digits, "".join(str(total % 10) for total in accumulate(map(int, digits)))


def merge(dice: random.Random) -> tuple[str, str]:
    """Two rows of seven digits, each in order: the answer has all in order."""
    a, b = ("".join(sorted(draw(dice, string.digits, 7))) for _ in range(2))
    return f"{a}+{b}", "".join(sorted(a + b))


def folded(dice: random.Random) -> tuple[str, str]:
    """Sixteen letters: the answer has at each place the later one of the letter and the one at the mirrored place."""
    letters = draw(dice, LETTERS[:16], 16)
    return letters, "".join(max(x, y) for x, y in zip(letters, reversed(letters), strict=True))


def tag_unzip(dice: random.Random) -> tuple[str, str]:
    """Fourteen letters: the first, third, fifth and so on, and then the others."""
    letters = draw(dice, LETTERS[:16], 14)
    return letters, letters[::2] + letters[1::2]


FOURTH = {
    task.name: task
    for task in (
        Task("paused_sort", string.digits + PAUSE, paused_sort, 0.03, longest=27, longest_problem=12, warm_steps=700,
             limit=22),
        Task("paused_unpack", "1234" + LETTERS[:12] + PAUSE, paused_unpack, 0.03, longest=48, longest_problem=12,
             warm_steps=1300, limit=21),
        Task("totals", string.digits, totals, 0.05, 14, 14, warm_steps=1100),
        Task("merge", string.digits + "+", merge, 0.05, 14, 15, warm_steps=700, tied=True),
        Task("folded", LETTERS[:16], folded, 0.05, 16, 16, warm_steps=900, dense=True),
        tag_task("tag_unzip", LETTERS[:16], tag_unzip, 0.04, 14, 14, warm_steps=900, tied=True),
    )
}  # fmt: skip

# New ones, for a rule that decides by itself -------------------------------------------------------------------------


def zigzag(dice: random.Random) -> tuple[str, str]:
    """Fourteen letters: the first, the last, the second, the last but one, and so on."""
    letters = draw(dice, LETTERS[:16], 14)
    return letters, "".join(letters[i] + letters[-1 - i] for i in range(7))


def pack(dice: random.Random) -> tuple[str, str]:
    """Seven runs of one to four equal letters: the answer has each letter behind the length of its run."""
    lengths, letters = [dice.randint(1, 4) for _ in range(7)], [dice.choice(LETTERS[:12])]
    while len(letters) < 7:
        letters.append(dice.choice([letter for letter in LETTERS[:12] if letter != letters[-1]]))
    runs = [*zip(lengths, letters, strict=True)]
    return "".join(letter * n for n, letter in runs), "".join(f"{n}{letter}" for n, letter in runs)


FIFTH = {
    task.name: task
    for task in (
        Task("zigzag", LETTERS[:16], zigzag, 0.05, 14, 14, warm_steps=900),
        Task("pack", "1234" + LETTERS[:12], pack, 0.05, 14, 28, warm_steps=1300, tied=True),
    )
}

# New ones, for gaps and ages that no rule was chosen by --------------------------------------------------------------


def tally(dice: random.Random) -> tuple[str, str]:
    """Fourteen of seven letters: the answer has those that occur, in the order of the alphabet, each behind its number."""
    letters = draw(dice, LETTERS[:7], 14)
    return letters, "".join(f"{min(letters.count(letter), 9)}{letter}" for letter in sorted(set(letters)))


def tag_runs(dice: random.Random) -> tuple[str, str]:
    """Eighteen digits, of which each run of equal ones is written once."""
    digits = draw(dice, string.digits[:3], 18)
    return digits, digits[0] + "".join(b for a, b in pairwise(digits) if a != b)


SIXTH = {
    task.name: task
    for task in (
        Task("tally", string.digits + LETTERS[:7], tally, 0.05, 14, 14, warm_steps=1100),
        tag_task("tag_runs", string.digits[:3], tag_runs, 0.04, 18, 18, warm_steps=900, tied=True),
    )
}

# New ones, for a gap that grows by itself, and for several updates -------------------------------------------------------


def ordinals(dice: random.Random) -> tuple[str, str]:
    """Fifteen of four letters: the answer has at each place how often its letter has occurred so far, at most 9."""
    letters = draw(dice, LETTERS[:4], 15)
    return letters, "".join(str(min(letters[: i + 1].count(letter), 9)) for i, letter in enumerate(letters))


def tag_inside_out(dice: random.Random) -> tuple[str, str]:
    """Twelve letters, from the middle outwards: the sixth, the seventh, the fifth, the eighth, and so on."""
    letters = draw(dice, LETTERS[:16], 12)
    return letters, "".join(letters[5 - i] + letters[6 + i] for i in range(6))


SEVENTH = {
    task.name: task
    for task in (
        Task("ordinals", string.digits + LETTERS[:4], ordinals, 0.05, 15, 15, warm_steps=1100),
        tag_task("tag_inside_out", LETTERS[:16], tag_inside_out, 0.04, 12, 12, warm_steps=2000),
    )
}

# New ones, with answers of more than 30 tokens ---------------------------------------------------------------------------


def to_and_fro(dice: random.Random) -> tuple[str, str]:
    """Fourteen letters: the answer has them, then backwards, and then once more."""
    letters = draw(dice, LETTERS[:16], 14)
    return letters, letters + letters[::-1] + letters


def tag_counts(dice: random.Random) -> tuple[str, str]:
    """Twelve digits: the answer has each, and behind it the two that follow it when one counts on, modulo 10."""
    digits = draw(dice, string.digits, 12)
    return digits, "".join(str((int(digit) + i) % 10) for digit in digits for i in range(3))


EIGHTH = {
    task.name: task
    for task in (
        Task("to_and_fro", LETTERS[:16], to_and_fro, 0.02, 42, 14, warm_steps=1100),
        tag_task("tag_counts", string.digits, tag_counts, 0.015, 36, 12, warm_steps=1100, tied=True),
    )
}

TASKS = {**SECOND, **THIRD, **FOURTH, **FIFTH, **SIXTH, **SEVENTH, **EIGHTH}


# Models -------------------------------------------------------------------------------------------------------------------


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", MARK, *task.characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(task: Task, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Qwen2 of 0.6M parameters."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=task.key_heads,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=task.tied,
            initializer_range=task.spread,
        )
    )


def warm_start(task: Task, folder: Path) -> Path:
    """
    Teach a new model the task by imitation of a sloppy teacher, and save it.

    Args:
        task ([`Task`]):
            The task.
        folder (`Path`):
            Where models of tasks are kept. If this one is there already, nothing is done.

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if task.until is None else 1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=task.warm_steps, pct_start=0.2)
    if task.until is not None:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    dice, encode = random.Random(0), partial(examples, task, tokenizer)
    for step in range(task.warm_steps):
        if task.until is not None and step % LOOK == 0 and accuracy(task, model, tokenizer, TAGS) >= task.until:
            break
        loss = model(**encode([task.problem(dice) for _ in range(task.warm_batch)], dice)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: its file says that the folder is complete
    seconds = time.perf_counter() - start
    found = accuracy(task, model, tokenizer), accuracy(task, model, tokenizer, TAGS)
    print(
        f"{task.name}: accuracy {found[0]:.2f} (without tags {found[1]:.2f}) after {seconds:.0f} s of imitation",
        flush=True,
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
    kept = (TAGS if task.tagged else "") + PAUSE
    drawn = "".join(character for character in task.characters if character not in kept)

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
def accuracy(task: Task, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, without: str = "") -> float:
    """
    Share of exact answers on held-out problems, of the trained model (not vLLM), sampled at temperature 1. Characters of
    `without` at the ends of answers do not count.
    """
    held_out = task.dataset(HELD_OUT, HELD_OUT_SEED)
    inputs = tokenizer(list(held_out["prompt"]), return_tensors="pt", padding=True, return_token_type_ids=False)
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = model.generate(
            **inputs, max_new_tokens=task.room, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    model.train(training)
    completions = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    answers = [answer.strip(without) for answer in held_out["answer"]]
    return sum(exact_answer([text.replace(" ", "").strip(without) for text in completions], answers)) / HELD_OUT
