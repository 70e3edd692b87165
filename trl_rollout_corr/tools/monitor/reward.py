"""A fall of the mean reward that a change of prompts does not explain."""

import math
from itertools import pairwise


class Reward:
    """
    Detector of a fall of the mean reward, from the mean reward of each logging window.

    A run with ever harder prompts loses reward, too. So a fall counts only if harder prompts would
    look different:

    - The reward was level before, for twice as long as the fall takes. A data set ordered from easy
      to hard shows no such period.
    - It falls over several spans, whereas a change of prompts makes the reward jump.
    - The fall is far larger than the scatter between steps, and than the scatter between spans of
      the run so far.
    - The fall is at least a quarter of the level before, and of what the run gained.

    The run is compared in spans of 5 windows, of 8, of 12, and so on: 8 spans before the fall, and
    4 spans of it.
    """

    SHORTEST, BEFORE, FALL = 5, 8, 4  # windows of the shortest span; spans
    STEPS = 3.5  # least fall in the first span, and after the second one, in units of the scatter
    WHOLE = 8.0  # least fall, in the same units
    LEVEL, JUMP = 0.25, 0.75  # largest range of the spans before, and largest fall in two spans, as shares of the fall
    SIZE = 0.25  # least fall, as a share of the level before and of the gain
    FIRST = 20  # windows whose mean is the reward at the start

    def __init__(self) -> None:
        self.before = self.after = math.nan  # mean reward before the latest fall, and in its last spans
        self.fell = False  # and did not recover since
        self._width = 0  # windows of the span where it fell
        self._sums = [0.0]  # of all rewards so far, by their number
        self._squares = [0.0]  # of the differences between one reward and the next
        self._last: float | None = None

    def add(self, value: float) -> None:
        """Add the mean reward of a window."""
        change = 0.0 if self._last is None else value - self._last
        self._last = value
        self._sums.append(self._sums[-1] + value)
        self._squares.append(self._squares[-1] + change**2)
        if self.fell and self._mean(self._width, 0) > (self.before + self.after) / 2:
            self.fell = False
        width = self.SHORTEST
        while width * (self.BEFORE + self.FALL) < len(self._sums):
            self._compare(width)
            width = math.ceil(1.5 * width)

    def _mean(self, start: int, end: int) -> float:
        """Mean reward of the windows from `start` to `end`, counted back from the latest window."""
        now = len(self._sums) - 1
        return (self._sums[now - end] - self._sums[now - start]) / (start - end)

    def _spans(self, number: int, width: int, end: int = 0) -> list[float]:
        """
        Mean rewards of consecutive spans; the last ends `end` windows before the latest window.
        """
        return [self._mean(end + (i + 1) * width, end + i * width) for i in reversed(range(number))]

    def _compare(self, width: int) -> None:
        """Look for a fall in the latest spans of `width` windows."""
        start = self.FALL * width  # of the fall
        before, after = self._mean(start + self.BEFORE * width, start), self._mean(2 * width, 0)
        size, gained = before - after, before - self._sums[self.FIRST] / self.FIRST
        if size <= self.SIZE * max(abs(before), gained):
            return
        level, fall = self._spans(self.BEFORE, width, start), self._spans(self.FALL, width)
        changes = [a - b for a, b in pairwise([*level[-2:], *fall])]
        jump = max(a + b for a, b in pairwise(changes))
        if max(level) - min(level) >= self.LEVEL * size or jump >= self.JUMP * size:
            return
        scatter = self._scatter(width)
        steps = min(before - fall[0], fall[1] - max(fall[2:]))
        if size > self.WHOLE * scatter and steps > self.STEPS * scatter:
            self.fell, self.before, self.after, self._width = True, before, after, width

    def _scatter(self, width: int) -> float:
        """
        Standard deviation of the mean of a span, from its windows or, if larger, from earlier
        spans.
        """
        now = len(self._sums) - 1
        start = now - self.FALL * width  # of the fall
        earlier = self._spans(start // width, width, now - start)
        between = sum((b - a) ** 2 for a, b in pairwise(earlier)) / (len(earlier) - 1)
        early, late = self._squares[start] / (start - 1), self._squares[now] - self._squares[start + 1]
        within = max(early, late / (now - start - 1))
        return math.sqrt(max(between, within / width) / 2)
