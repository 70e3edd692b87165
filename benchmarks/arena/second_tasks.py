"""
Tasks of the second proof (`PROTOCOL.md`). Like those of `tasks.py`, with rewards of more kinds.

`TASKS` has both. What is tuned on and what judges is listed in `cells.py`.
"""

import random
import string
from collections.abc import Callable

import tasks
from tasks import TAGS, Task, draw


_letters = string.ascii_lowercase


def rotate(dice: random.Random) -> tuple[str, str]:
    """Fourteen letters behind a digit: the answer begins at the letter of that number and goes round."""
    by, letters = dice.randrange(10), draw(dice, _letters[:16], 14)
    return f"{by}{letters}", letters[by:] + letters[:by]


def neighbours(dice: random.Random) -> tuple[str, str]:
    """Eighteen digits: the answer has the sum of each and the next one, modulo 10, and at last the last one."""
    digits = draw(dice, string.digits, 18)
    return digits, "".join(str((int(a) + int(b)) % 10) for a, b in zip(digits, digits[1:] + "0", strict=True))


def interleave(dice: random.Random) -> tuple[str, str]:
    """Two rows of eight letters: the answer takes one of each in turns."""
    a, b = (draw(dice, _letters[:16], 8) for _ in range(2))
    return f"{a}+{b}", "".join(x + y for x, y in zip(a, b, strict=True))


def differences(dice: random.Random) -> tuple[str, str]:
    """Sixteen digits: the answer has the first, and then each minus the one before, modulo 10."""
    digits = draw(dice, string.digits, 16)
    return digits, "".join(str((int(b) - int(a)) % 10) for a, b in zip("0" + digits, digits, strict=False))


def unpack(dice: random.Random) -> tuple[str, str]:
    """Seven letters, each behind the number of its repetitions, 1 to 4: the answer writes them out."""
    parts = [(dice.randint(1, 4), dice.choice(_letters[:12])) for _ in range(7)]
    return "".join(f"{n}{letter}" for n, letter in parts), "".join(letter * n for n, letter in parts)


def mirror(dice: random.Random) -> tuple[str, str]:
    """Eight letters: the answer has them, and then backwards."""
    letters = draw(dice, _letters[:16], 8)
    return letters, letters + letters[::-1]


def records(dice: random.Random) -> tuple[str, str]:
    """Sixteen letters: the answer has at each place the last one of the alphabet among those so far."""
    letters = draw(dice, _letters[:16], 16)
    return letters, "".join(max(letters[: i + 1]) for i in range(len(letters)))


def complement(dice: random.Random) -> tuple[str, str]:
    """Sixteen digits: the answer has them backwards, each taken from 9."""
    digits = draw(dice, string.digits, 16)
    return digits, "".join(str(9 - int(digit)) for digit in reversed(digits))


def triple(dice: random.Random) -> tuple[str, str]:
    """Twenty-one letters: the answer has each three times."""
    letters = draw(dice, _letters[:12], 21)
    return letters, "".join(letter * 3 for letter in letters)


def tag_reverse(dice: random.Random) -> tuple[str, str]:
    """Twelve letters, backwards."""
    letters = draw(dice, _letters[:16], 12)
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
    letters = draw(dice, _letters[:16], 12)
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
        Task("rotate", string.digits + _letters[:16], rotate, 0.06, 14, 15, warm_steps=900),
        Task("neighbours", string.digits, neighbours, 0.05, 18, 18, warm_steps=900, dense=True),
        tag_task("tag_reverse", _letters[:16], tag_reverse, 0.04, 12, 12, warm_steps=700),
        tag_task("tag_shift", string.digits, tag_shift, 0.04, 12, 12, warm_steps=500, tied=True),
        Task("interleave", _letters[:16] + "+", interleave, 0.05, 16, 17, warm_steps=900),
        Task("differences", string.digits, differences, 0.05, 16, 16, warm_steps=1100, tied=True),
        Task("unpack", "1234" + _letters[:12], unpack, 0.05, 28, 14, warm_steps=1300),
        Task("mirror", _letters[:16], mirror, 0.05, 16, 8, warm_steps=700, tied=True),
        Task("records", _letters[:16], records, 0.05, 16, 16, warm_steps=700, dense=True),
        Task("complement", string.digits, complement, 0.05, 16, 16, warm_steps=700, dense=True, tied=True),
        tag_task("tag_even", string.digits + "e", tag_even, 0.05, 16, 16, warm_steps=900),
        tag_task("tag_swap", _letters[:16], tag_swap, 0.04, 12, 12, warm_steps=700, tied=True),
        Task("triple", _letters[:12], triple, 0.012, 63, 21, warm_steps=900, batch=32),
    )
}

TASKS = {**tasks.TASKS, **SECOND}
