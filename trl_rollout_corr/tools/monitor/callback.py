"""The health rules during a run: a callback that warns."""

import io
import textwrap
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Self

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TrackioCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from ...messages import PREFIX, notify, warn_idle
from ...settings.resolve import Settings
from ...trainers.observer import Observer
from ...trainers.watcher import Watcher
from .examine import Examiner, parse_bounds
from .rule import ALARMS, Alarm
from .rules import SILENCED
from .windows import is_training_window


FIRST_PAUSE = 10  # windows between the first two messages about a cause; a window is an optimizer step or a log entry
_SYMBOLS = {"critical": "✖", "warning": "▲"}


class RolloutCorrectionMonitor(Watcher):
    r"""
    Examines the metrics of rollout correction of every optimizer step, and reports unhealthy ones.

    The metrics of a step are examined when the next step ends, or earlier if they are logged. So alarms do not depend
    on `logging_steps`. `trl-rollout-corr docs alarms` lists the rules. Each alarm is a message of the logger
    `trl_rollout_corr`: a line with the step, the observation and the bound; the first time also the reason and the
    advice. It is repeated after 10, 20, 40 and so on optimizer steps while it lasts. W&B and trackio receive it as an
    alert, if the run reports there. The number of bounds that raised an alarm since the last log is logged as
    `rollout_corr/monitor/alarms`.

    The trainers add a monitor by themselves, as `rollout_monitor` says. A monitor that you pass to them replaces it.

    Args:
        bounds (`dict[str, float or None]`, *optional*):
            Other limits, by name of a bound; `None` switches a bound off.

    Raises:
        `ValueError`: if `bounds` names an unknown bound or gives no number.

    Example:

    ```python
    from trl_rollout_corr import RolloutCorrectedGRPOTrainer, RolloutCorrectionMonitor

    trainer = RolloutCorrectedGRPOTrainer(..., callbacks=[RolloutCorrectionMonitor(bounds={"staleness": 32})])
    ```
    """

    reads_steps = True

    def __init__(self, bounds: Mapping[str, float | None] | str | None = None) -> None:
        self.of_configuration = False  # or passed by the user
        self.warned = False  # about fields of the configuration
        self.reporters: CallbackHandler | None = None  # the callbacks of the trainer, which may send alerts
        self.observer: Observer | None = None  # of the trainer; without one, windows are log entries
        self._warned_of_alerts = False  # that a tracker takes no alert
        self._examiner = Examiner(limits=parse_bounds(bounds))
        self._restart()

    @classmethod
    def of(cls, trainer: Any) -> Self:
        settings: Settings = trainer._settings
        monitor = cls(settings.rollout_monitor_bounds)
        monitor.of_configuration = True
        return monitor

    def begins(self, trainer: Any, checkpoint: object, *, everywhere: bool) -> None:
        monitor = keep_one_monitor(trainer.callback_handler)
        if monitor is not self:
            return
        self._examiner.settings = trainer._settings
        self.observer = trainer._observer if everywhere else None
        if not self.of_configuration and not self.warned:
            self.warned = True
            self._warn_about_fields(trainer._settings)

    def _warn_about_fields(self, settings: Settings) -> None:
        """Warn about fields of the configuration that the user's own monitor ignores."""
        reason = "the `RolloutCorrectionMonitor` among the callbacks takes the place of the trainer's own"
        if settings.rollout_monitor_bounds is not None:
            warn_idle("rollout_monitor_bounds", settings.rollout_monitor_bounds, reason)

    def _restart(self) -> None:
        self._windows = 0
        self._not_ours: dict[str, float] = {}  # the last logged metrics outside rollout correction
        self._alarms: set[str] = set()  # bounds that raised an alarm since the last log
        self._first_step: dict[str, int] = {}  # optimizer step at which a rule held first
        self._last_window: dict[str, int] = {}  # logging window in which a rule held last
        self._pauses: dict[str, tuple[int, int]] = {}  # by cause: window of the next message, and the pause after it

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._restart()
        self._examiner.fields = vars(args)
        with self.outlived("The monitor forgets the steps before the checkpoint"):
            self._examiner.restart(state.log_history, state.global_step)  # after resuming

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if not logs or not is_training_window(logs):
            return
        self._not_ours = {key: value for key, value in logs.items() if not key.startswith(PREFIX)}
        steps = [{**logs, "step": state.global_step}] if self.observer is None else self.observer.read_steps()
        self._examine(steps, state)
        for name in ("frac_reward_zero_std", "entropy"):
            self._not_ours.pop(name, None)  # they describe the steps up to here only
        _add(ALARMS, len(self._alarms), logs, state)
        self._alarms.clear()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.observer is not None:
            self.observer.close_step(state.global_step)
            self._examine(self.observer.read_steps(before=state.global_step), state)

    def _examine(self, windows: list[dict[str, float]], state: TrainerState) -> None:
        """Examine windows, and report alarms."""
        for window in windows:
            self._windows += 1
            with self.outlived(f"The monitor cannot judge step {state.global_step}, and perhaps later ones"):
                alarms = self._examiner.observe({**self._not_ours, **window})
                self._alarms.update(alarm.bound for alarm in alarms)
                for alarm in alarms:
                    self._say(alarm, state)

    # Messages --------------------------------------------------------------------------------------------------------

    def _say(self, alarm: Alarm, state: TrainerState) -> None:
        """Report an alarm, unless it was reported a short while ago."""
        first_step = self._first_step.setdefault(alarm.bound, alarm.step)
        self._last_window[alarm.bound] = self._windows
        if any(alarm.bound in SILENCED[bound] for bound in self._lately()):
            return  # the same cause, already reported in more detail
        explained = alarm.bound in self._pauses
        due, pause = self._pauses.get(alarm.bound, (self._windows, FIRST_PAUSE))
        if self._windows < due:
            return
        self._pauses[alarm.bound] = self._windows + pause, 2 * pause
        critical = alarm.severity == "critical"
        again = f" since step {first_step}" if first_step < alarm.step else ""
        head = f"{_SYMBOLS[alarm.severity]} step {alarm.step}: {alarm.in_short}{again}"
        notify(_with_details(head, [] if explained else [alarm.why, alarm.advice]), error=critical)
        if self.reporters is not None and state.is_world_process_zero:
            title, text = f"{alarm.bound} at step {alarm.step}", str(alarm)
            failed = report_alert(self.reporters, title, text, critical=critical)
            if failed and not self._warned_of_alerts:
                self._warned_of_alerts = True
                notify(
                    f"This alarm, and perhaps later ones, did not become an alert of {' and '.join(failed)}. Every "
                    "alarm is among the messages of the run all the same."
                )

    def _lately(self) -> list[str]:
        """Bounds that were exceeded a short while ago."""
        return [bound for bound, window in self._last_window.items() if self._windows - window < FIRST_PAUSE]


def _with_details(head: str, details: list[str]) -> str:
    """A line, and sentences indented below it."""
    fill = partial(textwrap.fill, width=110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([head, *map(fill, details)])


def _add(key: str, value: int, logs: dict[str, float], state: TrainerState) -> None:
    """Add a number to the log entry that other callbacks get, and to the copy that the trainer keeps."""
    logs[key] = value
    if state.log_history:
        state.log_history[-1][key] = value


def report_alert(handler: CallbackHandler, title: str, text: str, *, critical: bool) -> list[str]:
    """
    Send an alert to the trackers of the run among W&B and trackio, as an error (`critical`) or a warning. Returns the
    trackers that did not take it, each with its error.
    """
    failed = []
    for callback in handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._initialized:
            send = partial(callback._wandb.run.alert, title[:63], text, level="ERROR" if critical else "WARN")
        elif isinstance(callback, TrackioCallback) and callback._initialized:
            levels = callback._trackio.AlertLevel
            send = partial(callback._trackio.alert, title, text, level=levels.ERROR if critical else levels.WARN)
        else:
            continue
        try:
            with redirect_stdout(io.StringIO()):  # trackio would print the alert a second time
                send()
        except Exception as error:  # an alarm that is told elsewhere must not end a run
            failed.append(f"{type(callback).__name__.removesuffix('Callback')} ({type(error).__name__}: {error})")
    return failed


def keep_one_monitor(handler: CallbackHandler) -> RolloutCorrectionMonitor | None:
    """
    Keep the user's last monitor, or else the configuration's, first, so that reporters see its alarms. Returns it, or
    `None`.
    """
    monitors = [x for x in handler.callbacks if isinstance(x, RolloutCorrectionMonitor)]
    brought = [x for x in monitors if not x.of_configuration]
    monitor = next(iter([*reversed(brought), *monitors, None]))
    handler.callbacks = [x for x in handler.callbacks if x not in monitors]
    if monitor is not None:
        monitor.reporters = handler
        handler.callbacks.insert(0, monitor)
    return monitor
