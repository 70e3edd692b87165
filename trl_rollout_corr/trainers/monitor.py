"""The health rules during a run: a callback that warns, stops, or tightens."""

import io
import textwrap
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from copy import copy
from functools import partial

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TrackioCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from ..health.examine import Examiner, parse_bounds
from ..health.rule import Alarm
from ..health.rules import RULES
from ..health.windows import is_training_window
from ..messages import PREFIX, report, warn
from ..settings.config import RolloutCorrectionConfig
from ..settings.fields import MONITOR_ACTIONS, MonitorAction, preset_remedy
from ..settings.presets import PRESETS, Preset


ALARMS, TIGHTENED = f"{PREFIX}monitor/alarms", f"{PREFIX}monitor/tightened"
MONITOR_FIELDS = ("rollout_monitor", "rollout_monitor_preset", "rollout_monitor_bounds")
# What a preset decides while a run goes on. Its mode stays that of the run.
TIGHTENED_FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_is_clamp", "rollout_rs", "rollout_rs_threshold")
FIRST_PAUSE = 10  # logging windows between the first two messages about a cause
_SYMBOLS = {"critical": "✖", "warning": "▲"}


class RolloutCorrectionMonitor(TrainerCallback):
    r"""
    Examines the metrics of rollout correction whenever they are logged, and reports unhealthy ones.

    The rules are those of `trl-rollout-corr docs monitoring`. Each finding is a message of the logger `trl_rollout_corr`: a
    line with the step, the observation and the bound of the rule; the first time also the reason and the advice. It is
    repeated after 10, 20, 40 and so on logging windows while it lasts. The same goes to W&B and trackio as an alert, if the
    run reports there. The number of rules that hold is logged as `rollout_corr/monitor/alarms`.

    The trainers add a monitor by themselves, as `rollout_monitor` says. One that is passed to them takes its place.

    Args:
        action (`str`, *optional*, defaults to `"warn"`):
            Action at the first critical alarm. `"stop"` saves a checkpoint and ends training. `"tighten"`
            switches to another preset, once, and logs `rollout_corr/monitor/tightened`.
        preset (`str`, *optional*):
            Preset that `"tighten"` switches to: its weights and rejection, with their bounds. It must have the mode
            (`bypass_mode`, `rollout_loss_type`) of the run.
        bounds (`dict[str, float or None]`, *optional*):
            Other bounds of the rules, by name; `None` switches a rule off.

    Raises:
        `ValueError`: if the action, the preset or a threshold is not one; and when a trainer gets the monitor or begins to
            train, if the preset does not suit the run.

    Example:

    ```python
    from trl_rollout_corr import RolloutCorrectedGRPOTrainer, RolloutCorrectionMonitor

    trainer = RolloutCorrectedGRPOTrainer(..., callbacks=[RolloutCorrectionMonitor("stop", bounds={"k3_high": 0.1})])
    ```
    """

    def __init__(
        self,
        action: MonitorAction = "warn",
        preset: Preset | None = None,
        bounds: Mapping[str, float | None] | str | None = None,
    ) -> None:
        if action not in MONITOR_ACTIONS:
            raise ValueError(f"`rollout_monitor` must be one of {', '.join(MONITOR_ACTIONS)}, got {action!r}.")
        if action == "tighten":
            check_name(preset)
        self.action, self.preset = action, preset
        self.of_configuration = False  # or brought by the user
        self.tightened = False
        self.reporters: CallbackHandler | None = None  # those of the trainer, which may send alerts
        self._examiner = Examiner(RULES, bounds=parse_bounds(bounds))
        self._restart()

    def _restart(self) -> None:
        self._examiner.restart()
        self._stopping = False
        self._windows = 0
        self._since: dict[str, int] = {}  # step at which a cause was seen first
        self._seen: dict[str, int] = {}  # window in which it was seen last
        self._pauses: dict[str, tuple[int, int]] = {}  # by cause: window of the next message, and the pause after it

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.action == "tighten" and not self.tightened:
            check_preset(self.preset, args)
        self._restart()
        self._examiner.settings = args
        for entry in state.log_history:  # of a run that is resumed
            self._examiner.observe(entry)
        self._examiner.forget_streaks()  # settings may have changed since
        if self.action == "tighten" and any(TIGHTENED in entry for entry in state.log_history):
            self._tighten(args)
            report(f"The resumed run had been tightened, and continues with {self._description(args)}.")

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
        self._windows += 1
        findings = self._examiner.observe({**logs, "step": state.global_step})
        _add(ALARMS, len(findings), logs, state)
        tightened, acted = self.tightened, self._act(findings, args, control)
        if self.tightened and not tightened:
            _add(TIGHTENED, 1, logs, state)
        for finding in findings:
            self._say(finding, acted if finding is findings[0] else None, state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # `save_strategy="best"` takes the wish to save back if it evaluates in the step that stops
        if self._stopping:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._stopping = False

    # Actions ----------------------------------------------------------------------------------------------------------

    def _act(self, findings: list[Alarm], args: TrainingArguments, control: TrainerControl) -> str | None:
        """Act on a critical alarm. Returns a sentence about the action."""
        critical = bool(findings) and findings[0].severity == "critical"
        if not critical or self.action == "warn":
            return None
        if self.action == "stop":
            self._stopping = control.should_save = control.should_training_stop = True
            return f"`rollout_monitor` is 'stop': training ends here, with a checkpoint in {args.output_dir}."
        if self.tightened:
            return None
        try:
            check_preset(self.preset, args)  # settings may have been changed since the run began
        except ValueError as error:
            self.action = "warn"
            return f"The settings stay as they are: {error}"
        self._tighten(args)
        self._examiner.forget_streaks()
        return f"`rollout_monitor` is 'tighten': training continues with {self._description(args)}."

    def _tighten(self, args: TrainingArguments) -> None:
        self.tightened = True
        tighten(args, self.preset)

    def _description(self, args: TrainingArguments) -> str:
        settings = ", ".join(f"`{name}={getattr(args, name)!r}`" for name in TIGHTENED_FIELDS)
        return f"the preset {self.preset}, {settings}"

    # Messages ---------------------------------------------------------------------------------------------------------

    def _say(self, finding: Alarm, acted: str | None, state: TrainerState) -> None:
        """Speak about a finding, unless it was said a short while ago."""
        since = self._since.setdefault(finding.rule, finding.step)
        self._seen[finding.rule] = self._windows
        if any(finding.rule in RULES[rule].covers for rule in self._lately()):
            return  # the same cause, and more was said about it
        explained = finding.rule in self._pauses
        due, pause = self._pauses.get(finding.rule, (self._windows, FIRST_PAUSE))
        if self._windows < due and not acted:
            return
        self._pauses[finding.rule] = self._windows + pause, 2 * pause
        critical, done = finding.severity == "critical", [acted] if acted else []
        again = f" since step {since}" if since < finding.step else ""
        head = f"{_SYMBOLS[finding.severity]} step {finding.step}: {finding.in_short}{again}"
        report(_with_details(head, done if explained else [*done, finding.why, finding.advice]), error=critical)
        if self.reporters is not None and state.is_world_process_zero:
            title, text = f"{finding.rule} at step {finding.step}", " ".join([str(finding), *done])
            report_alert(self.reporters, title, text, critical=critical)

    def _lately(self) -> list[str]:
        """Rules that held a short while ago."""
        return [rule for rule, window in self._seen.items() if self._windows - window < FIRST_PAUSE]


def _with_details(head: str, details: list[str]) -> str:
    """A line, and sentences indented below it."""
    fill = partial(textwrap.fill, width=110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join([head, *map(fill, details)])


def _add(key: str, value: int, logs: dict[str, float], state: TrainerState) -> None:
    """Add a number to the log: to the entry that other callbacks get, and to the copy that the trainer has just kept."""
    logs[key] = value
    if state.log_history:
        state.log_history[-1][key] = value


def report_alert(handler: CallbackHandler, title: str, text: str, *, critical: bool) -> None:
    """Send an alert to the trackers of the run among W&B and trackio, as an error (`critical`) or a warning."""
    for callback in handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._initialized:
            callback._wandb.run.alert(title[:63], text, level="ERROR" if critical else "WARN")
        elif isinstance(callback, TrackioCallback) and callback._initialized:
            levels = callback._trackio.AlertLevel
            with redirect_stdout(io.StringIO()):  # trackio would print the alert a second time
                callback._trackio.alert(title, text, level=levels.ERROR if critical else levels.WARN)


def settle_monitors(handler: CallbackHandler, args: RolloutCorrectionConfig, *, renew: bool) -> None:
    """
    Keep one monitor among the callbacks of a trainer: the last that the user brought, or else that of the configuration,
    which is made anew on request. It comes first, before callbacks that report its additions to the log.
    """
    found = [x for x in handler.callbacks if isinstance(x, RolloutCorrectionMonitor)]
    brought = [x for x in found if not x.of_configuration]
    kept = brought[-1] if brought else found[0] if found and not renew else None
    if kept is None and renew and args.rollout_monitor is not None:
        kept = RolloutCorrectionMonitor(*(getattr(args, name) for name in MONITOR_FIELDS))
        kept.of_configuration = True
    handler.callbacks = [x for x in handler.callbacks if x not in found]
    if kept is not None:
        if brought and kept.reporters is None and kept.action == "tighten":
            check_preset(kept.preset, args, warns=True)
        kept.reporters = handler
        handler.callbacks.insert(0, kept)


# The action `tighten` -------------------------------------------------------------------------------------------------


def tighten(args: RolloutCorrectionConfig, name: Preset | None) -> None:
    """Set weights and rejection of a configuration to those of a preset. The trainer reads them at every micro-batch."""
    preset = RolloutCorrectionConfig.from_preset(check_name(name))
    for field in TIGHTENED_FIELDS:
        setattr(args, field, getattr(preset, field))


def check_name(preset: Preset | None) -> Preset:
    """Check that a preset exists, and return its name."""
    if preset is None or preset not in PRESETS:
        raise ValueError(
            f"`rollout_monitor_preset` is {preset!r}, but `rollout_monitor='tighten'` switches to it. {preset_remedy(preset)}"
        )
    return preset


def check_tightened(config: RolloutCorrectionConfig, *, warns: bool = False) -> None:
    """Check the preset that the monitor of a configuration may switch to, see [`check_preset`]."""
    if config.rollout_monitor == "tighten":
        check_preset(config.rollout_monitor_preset, config, warns=warns)


def check_preset(name: Preset | None, args: RolloutCorrectionConfig, *, warns: bool = False) -> None:
    """Refuse a preset that a run cannot switch to. `warns` repeats warnings about the settings it would then have."""
    name = check_name(name)
    preset = RolloutCorrectionConfig.from_preset(name)
    refused = f"`rollout_monitor_preset` is {name!r}, which `rollout_monitor='tighten'` cannot switch to: "
    if _mode(preset) != _mode(args):
        raise ValueError(
            f"{refused}its mode is {_mode(preset)}, that of the run is {_mode(args)}. Choose a preset of the same mode."
        )
    if preset.rollout_is is None and preset.rollout_rs is None:
        raise ValueError(f"{refused}it has neither weights nor rejection.")
    if args.rollout_metrics_only:
        raise ValueError(f"{refused}`rollout_metrics_only` is True. Set it to False, or `rollout_monitor` to 'warn'.")
    tightened = copy(args)
    tightened.rollout_monitor = None  # it switches once
    known = _warnings_of(tightened, warns)
    tighten(tightened, name)
    try:
        found = _warnings_of(tightened, warns)
    except ValueError as error:
        raise ValueError(f"{refused}{error} Or choose another preset.") from None
    for message in found:
        if message not in known:
            warn(
                f"Once `rollout_monitor='tighten'` has switched to {name!r}: {message} Or choose another "
                "`rollout_monitor_preset`: the settings of a preset are fixed."
            )


def _warnings_of(config: RolloutCorrectionConfig, warns: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.check(warns=warns)
    return [str(warning.message) for warning in caught]


def _mode(config: RolloutCorrectionConfig) -> str:
    return f"bypass ({config.rollout_loss_type})" if config.bypass_mode else "decoupled"
