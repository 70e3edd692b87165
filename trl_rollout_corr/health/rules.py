"""Health rules, as data. `docs/monitoring.md` lists them."""

from typing import Any

from . import conditions
from .rule import Bound, Rule


def _rule(name: str, detects: str, *bounds: dict[str, Any], **shared: Any) -> Rule:
    """A rule, from the fields of its bounds and those that they share. A rule with a single bound gives it its name."""
    return Rule(name, detects, tuple(Bound(**{"name": name, **shared, **fields}) for fields in bounds or [{}]))


RULES = [
    _rule(
        "nonfinite",
        "the fault `nan_rows`",
        {"name": "nonfinite_many", "limit": 0.1, "severity": "critical", "covers": ("everything_rejected",)},
        {"limit": 0.0, "patience": 1},
        key="nonfinite_fraction",
        seen="A share of {value:.2g} of the tokens came without a finite log-probability.",
        why="NaN from the sampler means that a whole row of its logits is broken: the token was not drawn from the policy.",
        advice="No correction helps. Look for NaN in the weights and for a push of weights that failed. With "
        "`rollout_nan_policy` set to raise, the run stops at the first such token; drop leaves such tokens out of the loss.",
    ),
    _rule(
        "k3_kl",
        "the runs `none_0`, `none_1`, `none_2`, `rloo_none_0`; the faults `never_pushed`, `stale`, `padding`",
        {"name": "k3_high", "limit": 0.03, "severity": "critical", "covers": ("k3_growth",)},
        {"name": "k3_uncorrected", "limit": 0.015, "patience": 5},
        {
            "name": "k3_corrected",
            "limit": 0.03,
            "seen": "`k3_kl` is {value:.2g}, above {limit:g}, and the run corrects for it.",
            "why": "With a stale sampler the gap first grows, then shrinks. A gap that stays is serious (`gap_stays`).",
            "advice": "If it does not shrink, push weights more often or lower `learning_rate`. If the gap came suddenly, "
            "look for weights that were not pushed. {in_step}",
            "applies": lambda window: window.corrects,
            "covers": ("k3_growth",),
        },
        key="k3_kl",
        seen="`k3_kl` is {value:.2g}, above {limit:g}, and nothing corrects for it.",
        why="Rounding gives about 0.001 and a sampler in low precision up to 0.02. A larger gap means that sampler and "
        "trainer are different policies. Training on such data is biased, and the gap tends to grow.",
        advice="{correct} If the gap came suddenly, look for weights that were not pushed; if it exists from the first step "
        "on, for dropout in the trainer and a sampler in low precision. {in_step}",
        applies=lambda window: not window.corrects,
    ),
    _rule(
        "unlearning",
        "the run `grpo-merge_sorted-lag_32-faster-icepop-0`",
        key="kl_advantage_positive",
        limit=0.03,
        severity="critical",
        seen="Rewarded tokens have become unlikely: `kl_advantage_positive` is {value:.2g} above its value at the start, "
        "more than {limit:g}.",
        why="In our runs, a falling probability of rewarded tokens came before or with a drop in accuracy.",
        advice="{instead} Push weights more often or lower `learning_rate`.",
        lasting=3,
        measure=conditions.gap_of_rewarded,
        covers=("gap_stays", "gap_clipped", "k3_high", "k3_uncorrected", "k3_corrected", "k3_growth"),
    ),
    _rule(
        "gap_stays",
        "the run `grpo-merge_sorted-lag_32-faster-dppo_tv-0`",
        {
            "limit": 0.03,
            "why": "With a stale sampler the gap first grows, then shrinks. In our runs, a gap that stayed in spite of a "
            "correction came before a collapse if rewarded tokens became less likely too.",
            "applies": lambda window: window.corrects and not window.clips,
            "confirmed": conditions.unlearns,
        },
        {
            "name": "gap_clipped",
            "limit": 0.065,
            "why": "Clipping removes tokens with a large log-ratio, and tolerates a larger gap than importance weights. In "
            "our runs, a gap of this size still came before a collapse.",
            "applies": lambda window: window.corrects and window.clips,
        },
        key="kl",
        severity="critical",
        seen="`kl` stays more than {limit:g} above its value at the start, now {value:.2g}.",
        advice="Push weights more often or lower `learning_rate`. {instead} Do not widen `rollout_rs_threshold`.",
        patience=5,
        lasting=15,
        measure=conditions.lasting_gap,
        covers=("k3_corrected", "k3_growth"),
    ),
    _rule(
        "kl_negative",
        "logs of tests only: `raw_logprobs` and `one_token_shift` make `kl` negative, but not by that much",
        key="kl",
        limit=conditions.NEGATIVE_KL,
        severity="critical",
        below=True,
        seen="`kl` is {value:.2g}, but a KL divergence is never negative.",
        why="The tokens were sampled with other log-probabilities than these, so that every ratio is wrong.",
        advice="No correction helps. Look for log-probabilities that were taken before temperature (a server needs "
        "`--logprobs-mode processed_logprobs`), that are shifted by one token, or that belong to another completion.",
        applies=conditions.negative_all_along,
        covers=("biased_ratio", "k3_corrected"),
    ),
    _rule(
        "k3_growth",
        "the runs `none_0`, `none_1`, `none_2`, `rloo_none_0`, but after `k3_kl`",
        key="k3_kl",
        limit=3.0,
        seen="`k3_kl` is {value:.2g} times its value early in the run.",
        why="Updates on the data of another policy move the policies further apart; in our runs, a growing gap came "
        "before a collapse.",
        advice="{correct} Lower `learning_rate` or push weights more often. To test the engine, run some steps with "
        "`learning_rate` 0: if the gap still grows, updates are not the cause.",
        measure=conditions.k3_growth,
    ),
    _rule(
        "biased_ratio",
        "the faults `top_p`, `bos`, `cold_sampler`, `raw_logprobs`",
        key="kl",
        limit=0.01,
        seen="The mean ratio of trainer to sampler, `1 + k3_kl - kl`, differs from 1 by {value:.2g}.",
        why="The mean ratio is 1 for any two policies, so these are not the log-probabilities of the sampled tokens.",
        advice="Leave `top_p`, `top_k`, `min_p` and penalties at their defaults, or set `rollout_support` to replay, which "
        "makes up for the first three. If all have their defaults, look for another temperature, and for tokens that were "
        "added or changed after sampling.",
        applies=lambda window: window.fresh,
        measure=conditions.bias,
    ),
    _rule(
        "staleness",
        "the run `grpo-add-lag_32-fast-none-0`, 61 steps before its fall",
        key="staleness_max",
        limit=16.0,
        seen="Completions are up to {value:.0f} optimizer steps older than the policy they train.",
        why="The gap to the sampler grows with the age of its weights.",
        advice="Push weights more often: lower `steps_per_generation`, `num_iterations` or the queue of an asynchronous "
        "sampler.",
    ),
    _rule(
        "weight_mean",
        "the faults `top_p`, `repetition_penalty`, with sequence weights",
        {"name": "weight_mean_low", "limit": 0.5, "below": True, "covers": ("effective_lr_low",)},
        {"name": "weight_mean_high", "limit": 2.0, "covers": ("effective_lr_high",)},
        key="rollout_is_mean",
        seen="The mean importance weight is {value:.2g}, {side} {limit:g}.",
        why="The mean should be near 1: the optimizer step grows and shrinks with it. Sequence weights fall with length, and "
        "few tokens with a huge weight or wrong log-probabilities raise the mean.",
        advice="If `rollout_is` is sequence, set it to token. If IcePop drops too many tokens, widen `rollout_is_threshold`. "
        "If the mean is large, check that the log-probabilities are taken after temperature and belong to their tokens.",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "weight_spread",
        "the faults `padding`, `repetition_penalty`, with sequence weights",
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
            "seen": "`chi2_seq` is {value:.2g}, above {limit:g}, with sequence weights.",
            "applies": lambda window: window.weights_act and window.setting("rollout_is") == "sequence",
        },
        why="Few tokens or completions determine the gradient, which is noisy.",
        advice="If `rollout_is` is sequence, set it to token or geometric. With token weights, lower `rollout_is_threshold`, "
        "and use fresher weights or a higher precision in the sampler. A higher bound never helps.",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "weights_at_bound",
        "the faults `across_push`, `dropout`, `bos`, `cold_sampler`",
        key="rollout_is_ratio_fraction_high",
        limit=0.1,
        seen="A share of {value:.2g} of the importance ratios is above the bound and was truncated.",
        why="Truncation is meant for rare outliers; at this share it is a bias.",
        advice="If `rollout_is` is sequence, set it to token. With token weights, the policies are too far apart for weights "
        "alone: add `rollout_rs`, or use fresher weights in the sampler. Raise `rollout_is_threshold` only if the effective "
        "sample size is high.",
        applies=conditions.truncates_outliers,
    ),
    _rule(
        "rejected",
        "the faults `eos`, `own_updates`, with `decoupled_geo_rs_token_tis`",
        key="rollout_rs_masked_fraction",
        limit=0.5,
        seen="A share of {value:.2g} of the tokens is rejected, above {limit:g}.",
        why="Too few tokens are left to train on, and they are a biased selection.",
        advice="If the share was as large at the start, widen `rollout_rs_threshold` to the spread of the sampler: for "
        "seq_mean_k1, also in place of a seq_sum criterion, {geometric}. If it grew, so did `k3_kl`, which is the cause.",
        covers=("effective_lr_low",),
    ),
    _rule(
        "vetoed",
        "the faults `seams`, `padding`",
        key="rollout_is_veto_fraction",
        limit=0.1,
        seen="A share of {value:.2g} of the completions has a token below the lower bound of seq_max_k1.",
        why="Rounding is not the cause: look for broken rows of logits, tokens scored at another position, and text that was "
        "added after sampling.",
        advice="`log_ratio_min` shows the lowest log-ratio. To reject fewer completions, lower the first bound in "
        "`rollout_rs_threshold`.",
        applies=conditions.vetoes,
    ),
    _rule(
        "effective_lr",
        "the faults `cold_sampler`, `top_p`, `stale`, with `decoupled_geo_rs_token_tis`",
        {
            "name": "everything_rejected",
            "limit": 1e-6,
            "below": True,
            "seen": "Every token of a logging window was rejected or has no gradient (`effective_lr` is {value:.2g}).",
            "why": "This may be chance if windows have few completions, or if bounds reject short ones. If it lasts, nothing "
            "is learned: only momentum and weight decay still change the weights.",
            "advice": "If `k3_kl` is as before, the bounds are too tight: widen `rollout_rs_threshold`, or IcePop's "
            "`rollout_is_threshold`. If `k3_kl` is larger, find out why the sampler is so far from the trainer.",
            "covers": ("rejected", "weight_mean_low", "effective_sample_size", "selection"),
        },
        {"name": "effective_lr_low", "limit": 0.5, "below": True},
        {"name": "effective_lr_high", "limit": 1.5},
        key="effective_lr",
        seen="`effective_lr` is {value:.2g}: the correction multiplies the optimizer step by this factor.",
        why="The run takes smaller or larger steps than `learning_rate` says.",
        advice="If the mean weight is as far from 1, set `rollout_is` to token or lower `rollout_is_threshold`. If tokens are "
        "rejected, widen `rollout_rs_threshold`: `rollout_rs_renormalize` restores the size of the step, but not the data.",
        applies=lambda window: window.corrects,
    ),
    _rule(
        "endless",
        "logs of tests only; a run of another project, in which the reward rose until no answer was finished",
        key="completions/clipped_ratio",
        limit=0.25,
        seen="The share of completions that are cut at `max_completion_length` has grown by {value:.2g}. The reward did not "
        "fall.",
        why="The task may need longer answers, and then this is no fault. If the answers repeat themselves, the policy has "
        "found out that answers without an end are not punished.",
        advice="Read some of these completions. If they are sound, raise `max_completion_length`. If they are not, give "
        "unfinished answers a reward of 0, or leave them out of the loss with `mask_truncated_completions`.",
        measure=lambda window: window.course.more_unfinished,
    ),
    _rule(
        "selection",
        "logs of tests only: completions of the published runs have one length",
        key="rejected/long_positive",
        limit=0.2,
        seen="A share of {value:.2g} of the tokens of long completions with a positive advantage is rejected, over three "
        "times the share of all others.",
        why="Training then sees mostly short or bad answers, and may unlearn long ones.",
        advice="Use criteria that do not depend on length: in `rollout_rs`, seq_mean_k1 or seq_mean_k3 in place of seq_sum or "
        "seq_max; or widen `rollout_rs_threshold`.",
        patience=5,
        measure=conditions.selection,
    ),
]
BOUNDS: dict[str, Bound] = {bound.name: bound for rule in RULES for bound in rule.bounds}
# By bound: what is silent while it is passed
SILENCED: dict[str, set[str]] = {
    bound.name: {*bound.covers, *(later.name for later in rule.bounds[i:])}
    for rule in RULES
    for i, bound in enumerate(rule.bounds, 1)
}
