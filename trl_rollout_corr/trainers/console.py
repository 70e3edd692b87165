"""Console output of training: one line per log. Trackers get more, see `trackers`."""

import logging
import os
import sys
import time
from datetime import timedelta

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ..health.rule import ALARMS
from ..messages import PREFIX, __version__, logger


# Environment variable that leaves the output to Transformers if it is 0
SWITCH = "TRL_ROLLOUT_CORR_CONSOLE"

# Columns of a line, shown where the log has them: name, key, and format
_COLUMNS = (
    ("loss", "loss", "{:<7.2g}"),
    ("grad_norm", "grad_norm", "{:<5.2g}"),
    ("reward", "reward", "{:.3f}"),
    ("k3_kl", f"{PREFIX}k3_kl", "{:<7.2g}"),
    ("ESS", f"{PREFIX}rollout_is_eff_sample_size", "{:.2f}"),
    ("rejected", f"{PREFIX}rollout_rs_masked_fraction", "{:5.1%}"),
    ("effective_lr", f"{PREFIX}effective_lr", "{:.2f}"),
)


class Console(PrinterCallback):
    """
    Prints a line per log: progress, time left, loss, norm of the gradient, reward, `k3_kl`, effective sample size, share
    rejected, effective learning rate and the number of alarms.

    The trainers put it in the place of the callback by which Transformers prints every metric, unless the environment variable
    `TRL_ROLLOUT_CORR_CONSOLE` is 0.
    """

    def __init__(self) -> None:
        self._started, self._first_step = time.monotonic(), 0  # until training begins, for logs outside it
        self._handler: logging.Handler | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._started, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            self._handler = None if logger.hasHandlers() else _AboveTheBar()
            if self._handler is not None:
                logger.addHandler(self._handler)
            write(f"Rollout correction {__version__}: {args.description}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        step, last = state.global_step, state.max_steps
        done, seconds = step - self._first_step, time.monotonic() - self._started
        if "train_runtime" in logs:
            write(f"{done} steps in {timedelta(seconds=round(seconds))}")
            return
        left = f"{timedelta(seconds=round(seconds / done * (last - step)))} left" if done else ""
        write(f"step {step:>{len(str(last))}}/{last} {left:>13}  {_line(logs) or logs}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.is_world_process_zero and self._handler is not None:
            logger.removeHandler(self._handler)


class _Bar(ProgressCallback):
    """The progress bar, without the log."""

    def on_log(self, *args: object, **kwargs: object) -> None:
        pass


class _AboveTheBar(logging.Handler):
    """Writes messages to standard error, without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def write(line: str) -> None:
    """Print a line, or several, without tearing a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()  # of a job, which is a file


def _line(logs: dict[str, float]) -> str:
    """The line for a log, without progress; empty if the log has no column."""
    kind = "eval_" if any(key.startswith("eval_") for key in logs) else ""
    values = [(name, how, logs.get(kind + key)) for name, key, how in _COLUMNS]
    parts = [f"{name} {how.format(value)}" for name, how, value in values if isinstance(value, (int, float))]
    alarms = int(logs.get(ALARMS, 0))
    parts += [f"{alarms} alarm{'s' if alarms > 1 else ''}"] if alarms else []
    return "  ".join([*(["eval"] if kind and parts else []), *parts])


def add_console(handler: CallbackHandler) -> None:
    """Add the callback that prints lines in place of the output of Transformers. Notebooks keep their own output."""
    if os.environ.get(SWITCH) == "0":
        return
    for i, callback in reversed(list(enumerate(handler.callbacks))):
        if type(callback) is PrinterCallback:
            handler.callbacks[i] = Console()
            return
        if type(callback) is ProgressCallback:
            handler.callbacks[i : i + 1] = [_Bar(callback.max_str_len), Console()]
            return
