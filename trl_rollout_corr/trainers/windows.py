"""What is added up between two logging steps."""

import torch
from accelerate import Accelerator

from ..accounting import Accounts, Segments
from ..metrics import Statistics, Sums


class LoggingWindow:
    """
    Sums of one logging window, on the device of this rank.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the other ranks.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.statistics: Statistics | None = None
        self.accounts: Accounts | None = None

    def add(self, statistics: Statistics | None, segments: Segments):
        """Add what one batch contributes."""
        if statistics is not None:
            self.statistics = statistics if self.statistics is None else self.statistics + statistics
        if segments:
            accounts = Accounts.of(segments)
            self.accounts = accounts if self.accounts is None else self.accounts + accounts

    def close(self) -> tuple[Statistics | None, Accounts | None]:
        """Sums of all ranks, in one gather, to the host. The window is empty afterwards."""
        window: tuple[Sums | None, ...] = (self.statistics, self.accounts)
        self.statistics = self.accounts = None
        present = [sums.vector for sums in window if sums is not None]
        if not present:
            return window
        everywhere = self.accelerator.gather(torch.cat(present)[None]).cpu()
        parts = iter(everywhere.split([len(vector) for vector in present], dim=1))
        return tuple(sums if sums is None else sums.combine(next(parts)) for sums in window)
