"""Health rules, as data. `docs/monitoring.md` lists them."""

from typing import Any

from . import conditions
from .rule import Bound, Rule


def _rule(name: str, detects: str, *bounds: dict[str, Any], **shared: Any) -> Rule:
    """A rule, from the fields of its bounds and those that they share. A rule with a single bound gives it its name."""
    return Rule(name, detects, tuple(Bound(**{"name": name, **shared, **fields}) for fields in bounds or [{}]))


# An advice names parts of `placeholders`, which depend on the settings of the run.
RULES = [
    _rule(
        "nonfinite",
        "The fault `nan_rows` raised one of the two.",
        {"name": "nonfinite_many", "limit": 0.1, "severity": "critical", "covers": ("everything_rejected",)},
        {"limit": 0.0, "patience": 1},
        key="nonfinite_fraction",
        seen="A share of {value:.2g} of the tokens came without a finite log-probability.",
        why="If the sampler returns NaN, the whole row of its logits is broken, so the token was not drawn from the policy.",
        advice="No correction repairs this. Look for NaN in the weights, and for a push of weights that failed. To stop at "
        "the first such token, set `rollout_nan_policy` to raise. By default such tokens are left out of the loss.",
    ),
    _rule(
        "k3_kl",
        "`k3_uncorrected` and `k3_high` came in time in the runs `none_0`, `none_1`, `none_2` and `rloo_none_0`. The faults "
        "`never_pushed`, `stale` and `padding` raised one of the three.",
        {"name": "k3_high", "limit": 0.03, "severity": "critical", "covers": ("k3_growth",)},
        {"name": "k3_uncorrected", "limit": 0.015, "patience": 5},
        {
            "name": "k3_corrected",
            "limit": 0.03,
            "seen": "`k3_kl` is {value:.2g}, above {limit:g}, and the run corrects for it.",
            "why": "This may be harmless. With a stale sampler the gap grows at first and shrinks later. If it stays, a "
            "critical alarm follows.",
            "advice": "If the gap does not shrink, {fresher}, or lower `learning_rate`. If it came suddenly, look for weights "
            "that were not pushed. {in_step}",
            "applies": lambda window: window.corrects,
            "covers": ("k3_growth",),
        },
        key="k3_kl",
        seen="`k3_kl` is {value:.2g}, above {limit:g}, and nothing corrects for it.",
        why="Not every run is harmed by a gap of this size. Rounding gives about 0.001, and a sampler in low precision "
        "gives more: an 8-bit KV cache gave up to 0.05. If precision does not explain the gap, the weights differ, or "
        "something is broken. Training on such completions is biased, and the gap tends to grow.",
        advice="{correct} If the gap came suddenly, look for weights that were not pushed. If it was there from the first "
        "step, look for dropout in the trainer (also `lora_dropout`), and for low precision in the sampler. {in_step}",
        applies=lambda window: not window.corrects,
    ),
    _rule(
        "unlearning",
        "It came in time in the run `grpo-merge_sorted-lag_32-faster-icepop-0`.",
        key="kl_advantage_positive",
        limit=0.02,
        severity="critical",
        seen="Rewarded tokens have become unlikely: `kl_advantage_positive` is {value:.2g} above `kl` at the start of the "
        "run, and the limit is {limit:g}.",
        why="This alarm may be false, because some of our runs with it kept their accuracy. In the others, accuracy fell when "
        "rewarded tokens became less likely, at the same time or later, and in some of them it recovered.",
        advice="{instead} {Fresher}, or lower `learning_rate`.",
        patience=9,
        measure=conditions.gap_of_rewarded,
        covers=("gap_stays", "gap_clipped", "k3_high", "k3_uncorrected", "k3_corrected", "k3_growth"),
    ),
    _rule(
        "gap_stays",
        "`gap_stays` came in time in the run `grpo-merge_sorted-lag_32-faster-dppo_tv-0`.",
        {
            "limit": 0.03,
            "why": "This alarm may be false, because some of our runs kept their accuracy with such a gap. With a stale "
            "sampler the gap grows at first and shrinks later. In other runs it stayed, rewarded tokens lost probability, "
            "and training collapsed.",
            "applies": lambda window: window.corrects and not window.clips,
            "confirmed": conditions.unlearns,
        },
        {
            "name": "gap_clipped",
            "limit": 0.065,
            "why": "This alarm may be false. Few of our runs had a gap of this size, and accuracy fell for a short time in "
            "some of them and not in others. Clipping removes tokens with a large log-ratio, so it tolerates a larger gap "
            "than importance weights do.",
            "applies": lambda window: window.corrects and window.clips,
            "measure": conditions.grown_gap,
        },
        key="kl",
        severity="critical",
        seen="`kl` does not return to its value at the start of the run. It is {value:.2g} higher, above {limit:g}.",
        advice="{Fresher}, or lower `learning_rate`. {instead} {do_not_widen} If accuracy on held-out prompts still rises, "
        "you can wait.",
        patience=5,
        lasting=15,
        measure=conditions.lasting_gap,
        covers=("k3_corrected", "k3_growth"),
    ),
    _rule(
        "kl_negative",
        "Only made-up logs raised it. The faults `raw_logprobs` and `one_token_shift` make `kl` negative, but not by as much.",
        key="kl",
        limit=conditions.NEGATIVE_KL,
        severity="critical",
        below=True,
        seen="`kl` is {value:.2g}, but a KL divergence is never negative.",
        why="Chance makes an estimate slightly negative, but not by this much. These are not the log-probabilities that the "
        "tokens were sampled with, so every ratio is wrong.",
        advice="No correction repairs this. Look for log-probabilities that were taken before temperature, that are shifted "
        "by one token, or that belong to another completion. {server}",
        applies=conditions.negative_all_along,
        covers=("biased_ratio", "k3_corrected"),
    ),
    _rule(
        "k3_growth",
        "It came in the runs `none_0`, `none_1`, `none_2` and `rloo_none_0`, but after the alarms of `k3_kl`, and after "
        "accuracy had begun to fall.",
        key="k3_kl",
        limit=3.0,
        seen="`k3_kl` is {value:.2g} times as large as early in the run.",
        why="This may be harmless while `k3_kl` is below 0.01. Updates on completions of another policy move the two policies "
        "further apart, and in our runs that collapsed the gap grew for many steps.",
        advice="{correct} {Fresher}, or lower `learning_rate`. To test the engine, run some steps with `learning_rate` 0: if "
        "the gap still grows, the updates are not the cause.",
        measure=conditions.k3_growth,
    ),
    _rule(
        "biased_ratio",
        "The faults `top_p`, `bos`, `cold_sampler` and `raw_logprobs` raised it.",
        key="kl",
        limit=0.01,
        seen="The mean ratio of trainer to sampler, `1 + k3_kl - kl`, differs from 1 by {value:.2g}.",
        why="The mean ratio is 1 for any two policies, however far apart they are. So the sampler never "
        "draws some tokens, or these are not the log-probabilities that the tokens were sampled with.",
        advice="{distortion} Check the temperature of the sampler, and whether tokens were added or changed after sampling.",
        applies=lambda window: window.fresh,
        measure=conditions.bias,
    ),
    _rule(
        "staleness",
        "It came in the run `grpo-add-lag_32-fast-none-0`, 61 steps before accuracy fell.",
        key="staleness_max",
        limit=16.0,
        seen="Completions are up to {value:.0f} optimizer steps older than the policy that trains on them.",
        why="This may be harmless if you want samples that old. The gap grows with the age of the weights that sampled.",
        advice="{Fresher}.",
    ),
    _rule(
        "weight_mean",
        "With sequence weights, the faults `top_p` and `repetition_penalty` raised one of the two.",
        {
            "name": "weight_mean_low",
            "limit": 0.5,
            "below": True,
            "why": "The mean weight multiplies the optimizer step, so it should be near 1. It falls if sampler and trainer "
            "are far apart. Weights of whole completions also fall with length, even if nothing is wrong.",
            "advice": "{level} {dropped} If `k3_kl` is above 0.01, {fresher}, or lower `learning_rate`.",
            "covers": ("effective_lr_low",),
        },
        {
            "name": "weight_mean_high",
            "limit": 2.0,
            "why": "The mean weight multiplies the optimizer step, so it should be near 1. A few tokens with a huge weight "
            "raise it, and so do wrong log-probabilities.",
            "advice": "{level} Check that the log-probabilities are taken after temperature and belong to their tokens. "
            "{lower_cap}",
            "covers": ("effective_lr_high",),
        },
        key="rollout_is_mean",
        seen="The mean importance weight is {value:.2g}, {side} {limit:g}.",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "weight_spread",
        "With sequence weights, the faults `padding` and `repetition_penalty` raised one of the two.",
        {
            "name": "effective_sample_size",
            "key": "rollout_is_eff_sample_size",
            "limit": 0.3,
            "below": True,
            "seen": "The effective sample size of the weights is {value:.2g}, below {limit:g}.",
        },
        {
            "name": "chi2_seq",
            "key": "chi2_seq",
            "limit": 10.0,
            "seen": "`chi2_seq` is {value:.2g}, above {limit:g}, and the weights are weights of whole completions.",
            "applies": lambda window: window.weights_act and window.setting("rollout_is") == "sequence",
        },
        why="A few tokens or completions determine the gradient, so it is noisy.",
        advice="{level} Use newer weights or a higher precision in the sampler. {dropped} {lower_cap}",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "weights_at_bound",
        "The faults `across_push`, `dropout`, `bos` and `cold_sampler` raised it.",
        key="rollout_is_ratio_fraction_high",
        limit=0.1,
        seen="A share of {value:.2g} of the importance ratios is above the bound and was truncated.",
        why="Truncation is meant for rare outliers. At this share it biases the gradient, because sampler and trainer are too "
        "far apart for these weights.",
        advice="{level} {Fresher}, or lower `learning_rate`. {add_rejection} Raise `rollout_is_threshold` only if "
        "`rollout_is_eff_sample_size` is high.",
        applies=conditions.truncates_outliers,
    ),
    _rule(
        "rejected",
        "With `decoupled_geo_rs_token_tis`, the faults `eos` and `own_updates` raised it.",
        key="rollout_rs_masked_fraction",
        limit=0.5,
        seen="A share of {value:.2g} of the tokens is rejected, above {limit:g}.",
        why="Too few tokens are left to train on, and they are not a fair sample of the completions.",
        advice="{widen} To make the gap smaller, {fresher}, or lower `learning_rate`.",
        covers=("effective_lr_low",),
    ),
    _rule(
        "vetoed",
        "The faults `seams` and `padding` raised it.",
        key="rollout_is_veto_fraction",
        limit=0.1,
        seen="A share of {value:.2g} of the completions has a token below the lower bound of seq_max_k1.",
        why="Rounding does not move a token that far.",
        advice="Look for broken rows of logits, for tokens that were scored at another position, and for text that was added "
        "after sampling. `log_ratio_min` shows the lowest log-ratio. To reject fewer completions, lower the bound of "
        "seq_max_k1 in `rollout_rs_threshold`.",
        applies=conditions.vetoes,
    ),
    _rule(
        "effective_lr",
        "With `decoupled_geo_rs_token_tis`, the faults `cold_sampler`, `top_p` and `stale` raised one of the three.",
        {
            "name": "everything_rejected",
            "limit": 1e-6,
            "below": True,
            "seen": "All tokens were rejected or have no gradient (`effective_lr` is {value:.2g}).",
            "why": "This may be chance if a step has few completions, or if the bounds reject short ones. If it lasts, the "
            "run learns nothing: only momentum and weight decay still change the weights.",
            "advice": "If `k3_kl` is as before, the bounds are too tight: widen {bounds}. If `k3_kl` has grown, find out why "
            "the sampler is so far from the trainer.",
            "covers": ("rejected", "weight_mean_low", "effective_sample_size", "selection"),
        },
        {
            "name": "effective_lr_low",
            "limit": 0.5,
            "below": True,
            "why": "With Adam this may have little effect, because Adam hides most of a factor that stays the same. Otherwise "
            "the run takes smaller steps than `learning_rate` says.",
            "advice": "{level} {widen} {renormalize} To make the gap smaller, {fresher}.",
        },
        {
            "name": "effective_lr_high",
            "limit": 1.5,
            "why": "With Adam this may have little effect, because Adam hides most of a factor that stays the same. Otherwise "
            "the run takes larger steps than `learning_rate` says.",
            "advice": "{level} {renormalized} {lower_cap} If you keep the settings, divide `learning_rate` by this factor.",
        },
        key="effective_lr",
        seen="`effective_lr` is {value:.2g}: the correction multiplies the optimizer step by this factor.",
        applies=lambda window: window.corrects,
    ),
    _rule(
        "endless",
        "Only made-up logs raised it. In a run of another project, the reward rose until no answer was finished.",
        key="completions/clipped_ratio",
        limit=0.25,
        seen="The share of completions that are cut at `max_completion_length` has grown by {value:.2g}, and the reward did "
        "not fall.",
        why="The task may need longer answers, and then nothing is wrong. If the answers repeat themselves, the policy has "
        "learned that answers without an end are not punished.",
        advice="Read some of these completions. If they are sound, raise `max_completion_length`. If they are not, give "
        "unfinished answers a reward of 0, or leave them out of the loss with `mask_truncated_completions`.",
        measure=lambda window: window.course.more_unfinished,
    ),
    _rule(
        "selection",
        "Only made-up logs raised it, because the completions of the published runs have one length.",
        key="rejected/long_positive",
        limit=0.2,
        seen="A share of {value:.2g} of the tokens of long completions with a positive advantage is rejected. That is over "
        "three times the share of all other tokens.",
        why="Training then sees mostly short or bad answers, so the policy may unlearn long ones.",
        advice="{by_length}",
        patience=5,
        measure=conditions.selection,
    ),
]
BOUNDS: dict[str, Bound] = {bound.name: bound for rule in RULES for bound in rule.bounds}
# By bound: the bounds that are silent while it is passed
SILENCED: dict[str, set[str]] = {
    bound.name: {*bound.covers, *(later.name for later in rule.bounds[i:])}
    for rule in RULES
    for i, bound in enumerate(rule.bounds, 1)
}
