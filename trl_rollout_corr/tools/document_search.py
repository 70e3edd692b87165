"""
Search in sections of documents for the words of a question: BM25F (Zaragoza et al., 2004), with a lenient comparison of
words.

A word of the question stands for a word of a document if their stems are equal ("collapse", "collapsed"), or if the second
begins with the first ("async", "asynchronous"). Parts that hyphens or dots join count together and one by one
("seq-mean-k1" finds `seq_mean_k1`, "A3B" finds "Qwen3-30B-A3B").
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


# How often a word counts that stands in the heading, the keywords or the title of the page, compared with the text
_WEIGHTS = {"heading": 6.0, "keywords": 8.0, "page": 2.0, "text": 1.0}
_SATURATION, _LENGTH = 1.2, 0.6  # `k1` and `b` of BM25
_BEGINNING = 0.5  # of the weight of a word that only begins like the word of the question
_OF_NUMBERS = 0.3  # of the weight of a word
# Times the score of a section of which a heading or keyword is the question, or contains it
_NAMED, _IN_NAME = 3.0, 2.0

# Joined parts, with what may join them: `seq-mean-k1`, `W&B`, `1.10`, `3e-2`
_WORD = re.compile(r"\w+(?:[-./&']\w+)*")
_IS_NUMBER = re.compile(r"\d+(_\d+)*(e\d+)?")
_IGNORED = frozenset(
    re.findall(
        r"\w+",
        "a about am an and any are as at be but by can do does for from had has have how i if in into is it its me mean my of "
        "on or should so than that the then there this to use used using want was we what when where which who why will with "
        "would you your",
    )
)
_ENDINGS = re.compile(r"(ations?|ingly|edly|ings?|ions?|ies|ers?|ed|es|e|s|y)$")


def stem(word: str) -> str:
    """A word without its ending, if at least four letters are left; a word with digits or underscores as it is."""
    if not word.isalpha():
        return word
    short = _ENDINGS.sub("", word)
    word = short if len(short) >= 4 else word
    return word[:-1] if len(word) > 4 and word[-1] == word[-2] else word


def words_of(text: str) -> list[str]:
    """Words of a text in small letters, and the parts of joined ones."""
    found = []
    for match in _WORD.finditer(text.lower()):
        parts = [part for part in re.split(r"[-./&'_]", match[0]) if part]
        joined = re.sub(r"[-./&']", "_", match[0])
        found.append(joined)
        if len(parts) > 1 and not _IS_NUMBER.fullmatch(joined):
            found += [part for part in parts if len(part) > 1]
    return found


def question_words(question: str) -> dict[str, str]:
    """Words of a question that a search looks for, each once, and how they were typed."""
    typed = {re.sub(r"[-./&']", "_", word.lower()): word for word in _WORD.findall(question)}
    return {word: how for word, how in typed.items() if word not in _IGNORED} or typed


def _said(text: str) -> str:
    """The words of a text that count, in order."""
    return " ".join(word for word in words_of(text) if word not in _IGNORED)


@dataclass
class PageSection:
    """A section, with the texts of its fields (the keys of `_WEIGHTS`)."""

    name: str
    fields: Mapping[str, str]
    counts: dict[str, float] = field(init=False)
    length: int = field(init=False)
    names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = defaultdict(float)
        for key, text in self.fields.items():
            for word in words_of(text):
                self.counts[word] += _WEIGHTS[key]
        self.length = len(self.fields["text"].split())
        named = [self.fields["heading"], *self.fields["keywords"].split(",")]
        self.names = {_said(text) for text in named}

    def bears(self, whole: str) -> float:
        """Factor on the score, for the words of a question."""
        if whole in self.names:
            return _NAMED
        return _IN_NAME if whole and any(f" {whole} " in f" {name} " for name in self.names) else 1.0


class Index:
    """Sections that can be searched, and the words of all of them."""

    def __init__(self, sections: Iterable[PageSection]) -> None:
        self.sections = list(sections)
        self._mean_length = sum(x.length for x in self.sections) / max(len(self.sections), 1)
        self._words = {word: stem(word) for section in self.sections for word in section.counts}

    def known(self, word: str) -> dict[str, float]:
        """Words of the documents for which a word of a question stands, with their weights."""
        root = stem(word)
        found = {
            other: 1.0 if of == root else _BEGINNING
            for other, of in self._words.items()
            if self._like(root, other, of)
        }
        if not found and len(word) > 3 and not _IS_NUMBER.fullmatch(word):  # the middle of a word, or parts of it
            found = {other: _BEGINNING for other in self._words if word in other}
        return found

    @staticmethod
    def _like(root: str, other: str, of: str) -> bool:
        if _IS_NUMBER.fullmatch(root):
            return other == root
        return of == root or (len(root) > 2 and other.startswith(root))

    def search(self, question: str) -> tuple[list[tuple[PageSection, float]], list[str]]:
        """Sections with a word of a question, the best first, with their scores; and the words that no section has."""
        asked: list[tuple[dict[str, float], float]] = []
        unknown = []
        for word, typed in question_words(question).items():
            is_number = _IS_NUMBER.fullmatch(word)
            parts = [] if is_number else [self.known(part) for part in word.split("_") if len(part) > 1]
            if known := self.known(word):
                asked.append((known, _OF_NUMBERS if is_number else 1.0))
            elif any(parts):  # of "Qwen3-30B-A3B-Instruct", say
                asked += [(part, 1.0) for part in parts if part]
            else:
                unknown.append(typed)
        whole = _said(question)
        scored = [(section, self._score(section, asked) * section.bears(whole)) for section in self.sections]
        return sorted((x for x in scored if x[1] > 0), key=lambda x: -x[1]), unknown

    def _score(self, section: PageSection, asked: Sequence[tuple[Mapping[str, float], float]]) -> float:
        score = covered = whole = 0.0
        length = 1 - _LENGTH + _LENGTH * section.length / self._mean_length
        for known, weight in asked:
            # A word of a question is as rare as all of its forms together
            having = sum(any(word in other.counts for word in known) for other in self.sections)
            rarity = weight * math.log(1 + (len(self.sections) - having + 0.5) / (having + 0.5))
            count = sum(section.counts.get(word, 0.0) * part for word, part in known.items()) / length
            score += rarity * count * (_SATURATION + 1) / (count + _SATURATION)
            covered += rarity * (count > 0)
            whole += rarity
        return score * (covered / whole) if whole else 0.0
