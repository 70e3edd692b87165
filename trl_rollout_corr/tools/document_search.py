"""
Search in sections of documents for the words of a question, with the full-text index of SQLite (FTS5): stems of words,
and BM25 with a weight for each field.
"""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ..messages import SelfContainedError


class PageSection(NamedTuple):
    """A section of a page, and what a search reads of it."""

    name: str  # `page#anchor`
    heading: str
    keywords: str
    page: str  # its name and its title
    text: str


class Found(NamedTuple):
    """A section that answers a question."""

    name: str
    score: float
    line: str  # a part of its text with words of the question


_WEIGHTS = "0.0, 6.0, 10.0, 2.0, 1.0"  # of the fields of `PageSection`, for the function `bm25`
# Times the score of a section of which a heading or keyword is the question, or contains it
_NAMED, _IN_NAME = 3.0, 2.0
_WORDS_OF_A_PART = 18  # in the line of a section

# Joined parts, with what may join them: `seq-mean-k1`, `W&B`, `1.10`, `3e-2`
_WORD = re.compile(r"\w+(?:[-./&']\w+)*")
_IS_NUMBER = re.compile(r"\d+([-.]?\d+)*(e-?\d+)?")
_IGNORED = frozenset(
    re.findall(
        r"\w+",
        "a about all am an and any are as at be but by can do does for from had has have how i if in into is it its "
        "me mean my of on or should so than that the then there this to use used using want was we what when where "
        "which who why will with would you your",
    )
)


class Index:
    """Sections that can be searched. Raises a [`SelfContainedError`] if this Python's SQLite has no FTS5."""

    def __init__(self, sections: Iterable[PageSection]) -> None:
        sections = list(sections)
        self._names = {
            x.name: [_words_to_find(text).lower() for text in (x.heading, *x.keywords.split(","))] for x in sections
        }
        self._base = sqlite3.connect(":memory:")
        fields = f"name unindexed, {', '.join(PageSection._fields[1:])}"
        try:
            self._base.execute(f"create virtual table sections using fts5({fields}, tokenize = 'porter unicode61')")
        except sqlite3.OperationalError as error:
            raise SelfContainedError(
                f"`docs` cannot search for words, because SQLite was built without FTS5 ({error}). "
                "`trl-rollout-corr docs` lists the pages."
            ) from None
        self._base.executemany("insert into sections values (?, ?, ?, ?, ?)", sections)

    def search(self, question: str) -> tuple[list[Found], list[str]]:
        """Sections with words of a question, the best first, and the words that no section has."""
        words = list(dict.fromkeys(_words_to_find(question).split())) or _WORD.findall(question)
        phrases = {word: self._phrases(word) for word in words}
        asked = [phrase for of_word in phrases.values() for phrase in of_word]
        scores, lines = defaultdict[str, list[float]](list), dict[str, str]()
        for phrase in asked:
            for name, score, line in self._matching(phrase):
                scores[name].append(score)
                lines.setdefault(name, " ".join(line.split()))
        known = " ".join(word for word in words if phrases[word])
        # A section with few of the words says less than their sum
        found = [
            Found(name, sum(each) * len(each) / len(asked) * self._bears(name, known), lines[name])
            for name, each in scores.items()
        ]
        return sorted(found, key=lambda x: -x.score), [word for word in words if not phrases[word]]

    def _bears(self, name: str, words: str) -> float:
        """Factor on the score of a section, for the words of a question."""
        inside = [said for said in self._names[name] if f" {words.lower()} " in f" {said} "]
        return _NAMED if words.lower() in inside else _IN_NAME if inside else 1.0

    def _phrases(self, word: str) -> list[str]:
        """What to look for: a word, or else the parts that it joins, or else the sections that contain it anywhere."""
        whole = _phrase(word)
        if self._matching(whole):
            return [whole]
        if _IS_NUMBER.fullmatch(word):
            return []
        parts = [_phrase(part) for part in re.split(r"[-./&'_]", word) if len(part) > 1]
        if len(parts) > 1 and (known := [part for part in parts if self._matching(part)]):
            return known
        inside = self._base.execute("select text from sections where text like ?", (f"%{word}%",)).fetchone()
        longer = re.search(rf"\w*{re.escape(word)}\w*", inside[0], re.IGNORECASE) if inside and len(word) > 3 else None
        return [_phrase(longer[0])] if longer else []

    def _matching(self, phrase: str) -> list[tuple[str, float, str]]:
        """Name, score and part of the text of each section with a phrase."""
        columns = f"name, -bm25(sections, {_WEIGHTS}), snippet(sections, 4, '', '', '...', {_WORDS_OF_A_PART})"
        return self._base.execute(f"select {columns} from sections where sections match ?", (phrase,)).fetchall()


def _words_to_find(text: str) -> str:
    """The words of a text that a search looks for."""
    return " ".join(word for word in _WORD.findall(text) if word.lower() not in _IGNORED)


def _phrase(word: str) -> str:
    """A word for FTS5, whose parts follow one another. Words may begin with it, and numbers may not."""
    begins = "*" if len(word) > 2 and not _IS_NUMBER.fullmatch(word) else ""
    parts = " ".join(re.findall(r"[^\W_]+", word))
    return f'"{parts}"{begins}'
