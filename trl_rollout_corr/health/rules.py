"""
Health rules, as data. No torch, no TRL. `docs/monitoring.md` lists them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..messages import nearest
from .examine import Examiner, Finding, Rule, Window, by_severity


# Healthy band of each metric, `(lower, upper)` with `None` for no bound, without the prefix. For charts and docs.
HEALTHY: dict[str, tuple[float | None, float | None]] = {
    "k3_kl": (None, 0.01),
    "kl": (-0.1, 0.1),
    "kl_advantage_positive": (None, 0.03),
    "chi2_token": (None, 1.0),
    "chi2_seq": (None, 10.0),
    "effective_lr": (0.5, 1.5),
    "nonfinite_fraction": (None, 0.0),
    "rollout_is_mean": (0.8, 1.2),
    "rollout_is_std": (None, 1.0),
    "rollout_is_eff_sample_size": (0.5, None),
    "rollout_rs_masked_fraction": (None, 0.3),
    "rollout_is_veto_fraction": (None, 0.1),
}


def in_words(name: str) -> str:
    """The healthy band of a metric, as documents and reports write it: "below 0.3". Empty if it has none."""
    low, high = HEALTHY.get(name, (None, None))
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if high is not None:
        return f"below {high:g}" if high else "0"
    return f"above {low:g}" if low is not None else ""


# When a rule applies, and what it looks at -----------------------------------------------------------------------------


def _sequence_weights(window: Window) -> bool:
    return window.weights_act and window.setting("rollout_is") == "sequence"


def _truncates(window: Window) -> bool:
    return window.weights_act and window.get("rollout_is_oob_ratio") is None


def _vetoes(window: Window) -> bool:
    """Whether the lower bound of `seq_max_k1` is one for broken tokens. A tight one is ordinary rejection."""
    criteria, bounds = window.setting("rollout_rs"), window.setting("rollout_rs_threshold")
    if not isinstance(criteria, list) or not isinstance(bounds, list) or len(criteria) != len(bounds):
        return True
    bounds = dict(zip(criteria, bounds, strict=True)).get("seq_max_k1")
    return not isinstance(bounds, list) or bounds[0] <= 0.01


def _k3_growth(window: Window) -> float | None:
    """Growth of `k3_kl`. Below a few times the gap of bfloat16 it is of no consequence."""
    level, factor = window.course.k3.level, window.course.k3.factor
    if window.gap("k3_kl") is None or level is None or factor is None:
        return None
    return factor if level > 0.003 else 0.0


# A sampler in low precision is up to so far off, in nats per token, and stays there
_LOW_PRECISION = 0.03
NEGATIVE_KL = -0.1


def _lasting_gap(window: Window) -> float | None:
    """
    What has come on top of the gap that the engines had, once the sampler is as far behind as it gets. It is `kl`, to which
    only tokens contribute that the trainer has come to find unlikely; the others are bounded by the weights. Where `k3_kl`
    is much smaller, the mean ratio is not 1, and it is no gap.
    """
    kl, k3 = window.gap("kl"), window.gap("k3_kl")
    if kl is None or k3 is None or not window.course.settled:
        return None
    return kl - min(window.course.gap_at_start, _LOW_PRECISION) if k3 > kl / 2 else 0.0


# In nats per token: more than the noise of a window where nothing is unlearnt
_UNLEARNT = 0.005


def _unlearns(window: Window) -> bool:
    """
    Whether what was rewarded has become less likely, as far as anybody knows. A policy that learns from a sampler that is
    behind finds what did badly unlikely, which is most of its gap; where one falls, it is also what did well.
    """
    return window.course.rewarded_above(_UNLEARNT) is not False


def _gap_of_rewarded(window: Window) -> float | None:
    """
    What has come on top of the gap at the start where the advantage is positive, once the sampler is as far behind as it gets.
    All of that gap is taken off, whatever its size: dropout or truncated sampling are no matter of learning.
    """
    gap = window.gap_of_rewarded()
    return None if gap is None or not window.course.settled else gap - window.course.gap_at_start


def _in_step(window: Window) -> bool:
    """Whether the sampler had the weights of the trainer."""
    return window.get("staleness_max") == 0


def _negative_all_along(window: Window) -> bool:
    """Whether nothing bounds what is wrong with the log-probabilities, or it was so from the first step."""
    return not window.corrects or window.course.began_below(NEGATIVE_KL)


def _bias(window: Window) -> float | None:
    """
    How far the mean of the unbounded ratio, `1 + k3_kl - kl`, is from 1, where the difference is not that of the noise in
    `kl`. It is 1 for samples of the sampler's policy, whatever the trainer's.
    """
    kl, k3 = window.get("kl"), window.get("k3_kl")
    if kl is None or k3 is None:
        return None
    return abs(k3 - kl) if abs(k3 - kl) > k3 else 0.0


def _selection(window: Window) -> float | None:
    """Rejected share of long completions with a positive advantage, where it is over three times that of the others."""
    chosen, others = window.get("rejected/long_positive"), window.get("rejected/others")
    if chosen is None or others is None:
        return None
    return chosen if chosen > 3 * others else 0.0


# The rules ------------------------------------------------------------------------------------------------------------


_RULES = [
    Rule(
        "nonfinite_many",
        key="nonfinite_fraction",
        bound=0.1,
        severity="critical",
        seen="A share of {value:.2g} of the tokens came without a finite log-probability.",
        why="The sampler is broken: its completions are no samples of the policy.",
        advice="No correction helps. Look for NaN in the weights and for a push of weights that failed; with "
        "`rollout_nan_policy` set to raise the run stops at the first such token.",
        covers=("nonfinite", "everything_rejected"),
    ),
    Rule(
        "everything_rejected",
        key="effective_lr",
        bound=1e-6,
        severity="critical",
        seen="Every token of a logging window was rejected, or too far off to train on (`effective_lr` is "
        "{value:.2g}).",
        why="Nothing was learned from it; only momentum and weight decay still move the weights.",
        advice="If `k3_kl` is as always, the bounds are wrong: widen `rollout_rs_threshold`, or IcePop's "
        "`rollout_is_threshold`. If it is not, find out why the sampler is so far from the trainer.",
        below=True,
        applies=lambda window: window.corrects,
        covers=(
            "effective_lr_low",
            "rejected",
            "weight_mean_low",
            "effective_sample_size",
            "icepop_dropped",
            "selection",
        ),
    ),
    Rule(
        "k3_high",
        key="k3_kl",
        bound=0.03,
        severity="critical",
        seen="`k3_kl` is {value:.2g}, above {bound:g}, and nothing corrects for it.",
        why="Rounding gives about 0.001 and a sampler in low precision up to 0.02: sampler and trainer are different "
        "policies, and updates on such data drive them further apart.",
        advice="Set `rollout_correction` to bypass_ppo_clip, or to decoupled_geo_rs_token_tis with "
        "`rollout_rs_threshold` {geometric}. After a jump, look for weights that were not pushed; if it was so from the "
        "first step, for dropout in the trainer.",
        applies=lambda window: not window.corrects,
        measure=lambda window: window.gap("k3_kl"),
        covers=("k3_uncorrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "unlearning",
        key="kl_advantage_positive",
        bound=0.03,
        severity="critical",
        seen="What was rewarded has become unlikely: `kl_advantage_positive` is {value:.2g} above what it was at the start, "
        "more than {bound:g}.",
        why="A policy that learns finds unlikely what did badly. One that loses what did well came before a fall, or in it.",
        advice="Push weights more often or lower `learning_rate`; without correction, set `rollout_correction` to auto.",
        patience=3,
        lasting=3,
        measure=_gap_of_rewarded,
        covers=(
            "gap_stays",
            "gap_clipped",
            "k3_high",
            "k3_corrected",
            "k3_uncorrected",
            "k3_growth",
            "kl_high",
            "chi2_token",
        ),
    ),
    Rule(
        "gap_stays",
        key="kl",
        bound=0.03,
        severity="critical",
        seen="`kl` stays more than {bound:g} above what it was at the start, now {value:.2g}, also where the advantage is "
        "positive.",
        why="The gap to a sampler that is behind opens, and closes again as the policy settles. One that stays open in "
        "spite of the correction came before a fall, if what was rewarded became less likely too.",
        advice="Push weights more often or lower `learning_rate`; or clip around the sampler: `rollout_correction` "
        "bypass_ppo_clip. Do not widen `rollout_rs_threshold`.",
        patience=5,
        lasting=15,
        applies=lambda window: window.corrects and not window.clips,
        measure=_lasting_gap,
        confirmed=_unlearns,
        covers=("k3_corrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "gap_clipped",
        key="kl",
        bound=0.065,
        severity="critical",
        seen="`kl` stays more than {bound:g} above what it was at the start, now {value:.2g}.",
        why="Clipping takes out tokens that are far off, and bears more than weights do. A gap that stays so large came "
        "before a fall all the same.",
        advice="Push weights more often or lower `learning_rate`.",
        patience=5,
        lasting=15,
        applies=lambda window: window.corrects and window.clips,
        measure=_lasting_gap,
        covers=("k3_corrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "kl_negative",
        key="kl",
        bound=NEGATIVE_KL,
        severity="critical",
        seen="`kl` is {value:.2g}, and a divergence is never below 0.",
        why="The log-probabilities are not those the tokens were sampled with, so that every ratio is wrong.",
        advice="No correction helps. Look for log-probabilities before temperature (a server needs `--logprobs-mode "
        "processed_logprobs`), shifted by a token, or of another completion.",
        below=True,
        applies=_negative_all_along,
        measure=lambda window: window.gap("kl"),
        covers=("biased_ratio", "kl_negative_lately", "k3_corrected", "gap_in_step"),
    ),
    Rule(
        "nonfinite",
        key="nonfinite_fraction",
        bound=0.0,
        severity="warning",
        seen="A fraction of {value:.2g} of the tokens came without a finite log-probability.",
        why="A NaN from the sampler means that a whole row of its logits is broken, so that the token was not drawn "
        "from the policy.",
        advice="Set `rollout_nan_policy` to raise to stop at the first one and find the cause; drop leaves such "
        "tokens out of the loss.",
        patience=1,
    ),
    Rule(
        "kl_negative_lately",
        key="kl",
        bound=NEGATIVE_KL,
        severity="warning",
        seen="`kl` is {value:.2g}, and a divergence is never below 0: some tokens came with log-probabilities that are not "
        "theirs, which was not so at the start.",
        why="Weights and rejection bound what such tokens do, but cannot repair them.",
        advice="Look for what changed in the sampler, and at the tokens of `log_ratio_max` and `log_ratio_min`. Until it is "
        "found, drop them: `rollout_is_threshold` [0.5, 5.0] (IcePop).",
        below=True,
        applies=lambda window: not _negative_all_along(window),
        measure=lambda window: window.gap("kl"),
        covers=("biased_ratio", "k3_corrected", "chi2_token", "k3_growth", "gap_in_step"),
    ),
    Rule(
        "gap_in_step",
        key="k3_kl",
        bound=0.03,
        severity="warning",
        seen="`k3_kl` is {value:.2g}, above {bound:g}, although the sampler has the weights of the trainer.",
        why="It is not the age of the data. The two compute different policies from the same weights.",
        advice="Look for dropout in the trainer (also `lora_dropout` of an adapter), for a sampler in low precision, and "
        "for weights that a push leaves out.",
        applies=_in_step,
        measure=lambda window: window.gap("k3_kl"),
        covers=("k3_uncorrected", "k3_corrected"),
    ),
    Rule(
        "k3_corrected",
        key="k3_kl",
        bound=0.03,
        severity="warning",
        seen="`k3_kl` is {value:.2g}, above {bound:g}. It is corrected for.",
        why="A sampler that is behind gives that while its lag fills, and the gap then closes. It is serious if it stays "
        "(`gap_stays`).",
        advice="If it does not close, push weights more often or lower `learning_rate`. After a jump, look for weights that "
        "were not pushed.",
        applies=lambda window: window.corrects,
        measure=lambda window: window.gap("k3_kl"),
        covers=("k3_growth", "chi2_token"),
    ),
    Rule(
        "k3_uncorrected",
        key="k3_kl",
        bound=0.015,
        severity="warning",
        seen="`k3_kl` is {value:.2g}, above {bound:g}, and nothing corrects for it.",
        why="Rounding gives about 0.001. Training on the data of another policy is biased, and the gap tends to grow.",
        advice="Set `rollout_correction`, for instance to decoupled_geo_rs_token_tis with `rollout_rs_threshold` "
        "{geometric}; or bring the policies together with fresher or preciser sampling.",
        patience=5,
        applies=lambda window: not window.corrects,
        measure=lambda window: window.gap("k3_kl"),
    ),
    Rule(
        "k3_growth",
        key="k3_kl",
        bound=3.0,
        severity="warning",
        seen="`k3_kl` is {value:.2g} times what it was early in the run.",
        why="Updates on the data of another policy make the next data more foreign; a growing gap comes before a "
        "collapse.",
        advice="Without correction, set `rollout_correction` to decoupled_geo_rs_token_tis. With one, lower "
        "`learning_rate` or synchronise the sampler more often. To rule out the engine, run some steps with "
        "`learning_rate` 0: a gap that grows there is not due to updates.",
        measure=_k3_growth,
    ),
    Rule(
        "kl_high",
        key="kl",
        bound=0.1,
        severity="warning",
        seen="`kl` is {value:.2g}, above {bound:g}.",
        why="The trainer finds the sampled tokens much less likely than the sampler did.",
        advice="If `k3_kl` is as large, the policies differ: fresher or preciser sampling, or a correction with "
        "rejection. If it is much smaller, sampling is truncated: leave `top_p`, `top_k` and `min_p` at their "
        "defaults.",
        measure=lambda window: window.gap("kl"),
    ),
    Rule(
        "biased_ratio",
        key="kl",
        bound=0.01,
        severity="warning",
        seen="The mean ratio of trainer to sampler, `1 + k3_kl - kl`, is {value:.2g} away from 1.",
        why="It is 1 for any two policies, so these are not the log-probabilities of the sampled tokens.",
        advice="Leave `top_p`, `top_k`, `min_p` and penalties at their defaults. If they are, look for another "
        "temperature and for tokens that were added or changed after sampling.",
        patience=5,
        applies=lambda window: window.fresh,
        measure=_bias,
    ),
    Rule(
        "staleness",
        key="staleness_max",
        bound=16.0,
        severity="warning",
        seen="Completions are up to {value:.0f} optimizer steps older than the policy they train.",
        why="The gap to the sampler grows with every step it is behind.",
        advice="Push weights more often: lower `steps_per_generation`, `num_iterations` or the queue of an "
        "asynchronous sampler.",
    ),
    Rule(
        "weight_mean_low",
        key="rollout_is_mean",
        bound=0.5,
        severity="warning",
        seen="The mean importance weight is {value:.2g}, below {bound:g}.",
        why="It should be near 1; the step shrinks with it.",
        advice="Set `rollout_is` to token if it is sequence, whose weights fall with length; widen IcePop's "
        "`rollout_is_threshold` if it drops too many tokens. A smaller upper bound makes it worse.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "weight_mean_high",
        key="rollout_is_mean",
        bound=2.0,
        severity="warning",
        seen="The mean importance weight is {value:.2g}, above {bound:g}.",
        why="The mean ratio is 1 for any two policies, so log-probabilities may be wrong, or few tokens have a huge "
        "weight.",
        advice="Check that log-probabilities are those after temperature and not shifted by a token; then lower "
        "`rollout_is_threshold`.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_high",),
    ),
    Rule(
        "effective_sample_size",
        key="rollout_is_eff_sample_size",
        bound=0.3,
        severity="warning",
        seen="The effective sample size of the weights is {value:.2g}, below {bound:g}.",
        why="Few tokens carry the gradient.",
        advice="Set `rollout_is` to token if it is sequence; with token weights lower `rollout_is_threshold` and "
        "bring the policies together. A higher bound never helps.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("weight_std", "chi2_seq"),
    ),
    Rule(
        "weight_std",
        key="rollout_is_std",
        bound=1.0,
        severity="warning",
        seen="The importance weights have a standard deviation of {value:.2g}, above {bound:g}.",
        why="They vary more than they average, so that the gradient is noisy.",
        advice="Lower `rollout_is_threshold`, or set `rollout_is` to token if it is sequence, with rejection by "
        "seq_mean_k1 in `rollout_rs`.",
        applies=lambda window: window.weights_act,
    ),
    Rule(
        "weights_at_bound",
        key="rollout_is_ratio_fraction_high",
        bound=0.1,
        severity="warning",
        seen="A share of {value:.2g} of the importance ratios is above the bound and was truncated.",
        why="Truncation is meant for rare outliers; this much of it is bias.",
        advice="With sequence weights, set `rollout_is` to token. With token weights the policies are too far apart "
        "for weights alone: add `rollout_rs`, or sample fresher. Raise `rollout_is_threshold` only if the sample "
        "size is high.",
        applies=_truncates,
    ),
    Rule(
        "icepop_dropped",
        key="rollout_is_oob_ratio",
        bound=0.3,
        severity="warning",
        seen="IcePop dropped a share of {value:.2g} of the tokens, above {bound:g}.",
        why="It is meant for rare outliers; this much of it starves training.",
        advice="Widen `rollout_is_threshold` to {token}; bounds such as [0.5, 5.0] are for tokens, and tighter ones "
        "for averages of a completion.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "chi2_token",
        key="chi2_token",
        bound=1.0,
        severity="warning",
        seen="`chi2_token` is {value:.2g}, above {bound:g}.",
        why="A few tokens have a huge ratio, so that unbounded token weights would be mostly noise.",
        advice="Keep `rollout_is_threshold` at 2 or below, or drop the tail with IcePop (a pair); find out which "
        "tokens they are from `log_ratio_p99` and `log_ratio_max`.",
    ),
    Rule(
        "chi2_seq",
        key="chi2_seq",
        bound=10.0,
        severity="warning",
        seen="`chi2_seq` is {value:.2g}, above {bound:g}, with sequence weights.",
        why="Sequence weights are of little use at this length: few completions carry the gradient.",
        advice="Set `rollout_is` to token or geometric.",
        applies=_sequence_weights,
    ),
    Rule(
        "rejected",
        key="rollout_rs_masked_fraction",
        bound=0.5,
        severity="warning",
        seen="A share of {value:.2g} of the tokens is rejected, above {bound:g}.",
        why="Training starves, and what is kept is a narrow choice.",
        advice="If it was so from the start, widen `rollout_rs_threshold` to the spread of the sampler: for seq_mean_k1, "
        "also in place of a seq_sum criterion, {geometric}. If it grew, `k3_kl` did, and that is the problem.",
        covers=("effective_lr_low",),
    ),
    Rule(
        "vetoed",
        key="rollout_is_veto_fraction",
        bound=0.1,
        severity="warning",
        seen="A share of {value:.2g} of the completions has a token below the lower bound of seq_max_k1.",
        why="Rounding does not do that: look for broken rows of logits, tokens seen at another position, and text "
        "that was added after sampling.",
        advice="Find the tokens from `log_ratio_min`. To veto less, lower the first number of the bounds in "
        "`rollout_rs_threshold`.",
        applies=_vetoes,
    ),
    Rule(
        "effective_lr_low",
        key="effective_lr",
        bound=0.5,
        severity="warning",
        seen="`effective_lr` is {value:.2g}: the correction shrinks the step that much.",
        why="The run learns more slowly than `learning_rate` says.",
        advice="If weights are as small, set `rollout_is` to token; if it is rejection, widen "
        "`rollout_rs_threshold`. `rollout_rs_renormalize` and `rollout_is_batch_normalize` restore the size of the "
        "step, not the data.",
        below=True,
        applies=lambda window: window.corrects,
    ),
    Rule(
        "effective_lr_high",
        key="effective_lr",
        bound=1.5,
        severity="warning",
        seen="`effective_lr` is {value:.2g}: the correction enlarges the step that much.",
        why="The run takes larger steps than `learning_rate` says.",
        advice="Lower `rollout_is_threshold`, or set `rollout_is` to token if it is sequence. With "
        "`rollout_rs_renormalize` it says how little is kept: widen `rollout_rs_threshold`.",
        applies=lambda window: window.corrects,
    ),
    Rule(
        "lr_scale_low",
        key="lr_scale",
        bound=0.3,
        severity="warning",
        seen="`rollout_lr_scaling` takes steps of {value:.2g} of the learning rate.",
        why="The ratios of whole completions differ so much that few of them count. In long ones rounding is enough: the "
        "factor is about `exp(-k3_kl * length)`.",
        advice="Push weights more often. If the sampler is up to date, set `rollout_lr_scaling` to None.",
        below=True,
        applies=lambda window: not window.only_measured,
    ),
    Rule(
        "selection",
        key="rejected/long_positive",
        bound=0.2,
        severity="warning",
        seen="Of long completions with a positive advantage a share of {value:.2g} of the tokens is rejected, over "
        "three times that of all others.",
        why="Training then sees mostly the short or bad answers, and may unlearn long ones.",
        advice="Use criteria that do not depend on length: in `rollout_rs` seq_mean_k1 or seq_mean_k3 in place of "
        "seq_sum or seq_max; or widen `rollout_rs_threshold`.",
        patience=5,
        measure=_selection,
    ),
]
RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}


def parse_bounds(bounds: Mapping[str, float | None] | str | None) -> dict[str, float | None]:
    """
    Check the bounds of rules that a user has set.

    Args:
        bounds (`Mapping[str, float or None]` or `str`, *optional*):
            Bounds by name of the rule, `None` for a rule that is off; or the same as JSON.

    Returns:
        `dict[str, float or None]`: the same, as a new dictionary.

    Raises:
        `ValueError`: if there is no rule of a name, or a bound is not a number.
    """
    field = "`rollout_monitor_bounds`"
    if isinstance(bounds, str):
        try:
            bounds = json.loads(bounds)
        except json.JSONDecodeError as error:
            raise ValueError(f'{field} is {bounds!r}, which is not JSON. Write it as {{"k3_high": 0.1}}.') from error
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        raise ValueError(
            f"{field} must have a number, or None, by name of a rule, such as {{'k3_high': 0.1}}; got {bounds!r}."
        )
    for name, bound in bounds.items():
        if name not in RULES:
            raise ValueError(
                f"{field} has {name!r}, which is no rule.{nearest(name, RULES)} Available rules: {', '.join(RULES)}."
            )
        number = isinstance(bound, int | float) and not isinstance(bound, bool) and not math.isnan(bound)
        if bound is not None and not number:
            raise ValueError(
                f"{field} sets {name!r} to {bound!r}, which must be a number, or None to switch the rule off."
            )
    return dict(bounds)


def examine(history: Iterable[Mapping[str, Any]], settings: Any = None) -> list[Finding]:
    """
    Apply the rules to the log of a run, as the monitor would have during the run.

    Args:
        history (`Iterable[Mapping]`):
            Entries of `trainer.state.log_history`, each with a `step`.
        settings ([`RolloutCorrectionConfig`] or `dict`, *optional*):
            Settings of the run, whose `rollout_monitor_bounds` are used. Without them, a run whose log has neither
            weights nor rejection is taken as uncorrected.

    Returns:
        `list[Finding]`: one per cause, the most serious first.
    """
    bounds = Window({}, settings).setting("rollout_monitor_bounds")
    examiner = Examiner(RULES, settings, None if bounds is ... else parse_bounds(bounds))
    found: dict[str, Finding] = {}
    for entry in history:
        for finding in examiner.observe(entry):
            first = found.setdefault(finding.rule, finding)
            found[finding.rule] = replace(first, last_step=finding.step)
    return by_severity(found.values())
