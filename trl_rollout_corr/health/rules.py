"""Health rules, as data. `docs/monitoring.md` lists them."""

from . import conditions
from .conditions import NEGATIVE_KL
from .rule import Rule


_RULES = [
    Rule(
        "nonfinite_many",
        key="nonfinite_fraction",
        bound=0.1,
        severity="critical",
        seen="A share of {value:.2g} of the tokens came without a finite log-probability.",
        why="The sampler is broken: its completions are no samples of the policy.",
        advice="No correction helps. Look for NaN in the weights and for a push of weights that failed. With "
        "`rollout_nan_policy` set to raise, the run stops at the first such token.",
        covers=("nonfinite", "everything_rejected"),
    ),
    Rule(
        "everything_rejected",
        key="effective_lr",
        bound=1e-6,
        severity="critical",
        seen="Every token of a logging window was rejected or has no gradient (`effective_lr` is {value:.2g}).",
        why="Nothing was learned from it; only momentum and weight decay still change the weights.",
        advice="If `k3_kl` is as before, the bounds are too tight: widen `rollout_rs_threshold`, or IcePop's "
        "`rollout_is_threshold`. If `k3_kl` is larger, find out why the sampler is so far from the trainer.",
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
        advice="{correct} If the gap came suddenly, look for weights that were not pushed; if the gap exists from the first "
        "step on, for dropout in the trainer.",
        applies=lambda window: not window.corrects,
        covers=("k3_uncorrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "unlearning",
        key="kl_advantage_positive",
        bound=0.03,
        severity="critical",
        seen="Rewarded tokens have become unlikely: `kl_advantage_positive` is {value:.2g} above its value at the start, "
        "more than {bound:g}.",
        why="In our runs, a falling probability of rewarded tokens came before or with a drop in accuracy.",
        advice="{instead} Push weights more often or lower `learning_rate`.",
        lasting=3,
        measure=conditions.gap_of_rewarded,
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
        seen="`kl` stays more than {bound:g} above its value at the start, now {value:.2g}, also where the advantage is "
        "positive.",
        why="With a stale sampler the gap first grows, then shrinks. In our runs, a gap that stayed in spite of a "
        "correction came before a collapse if rewarded tokens became less likely too.",
        advice="Push weights more often or lower `learning_rate`. {instead} Do not widen `rollout_rs_threshold`.",
        patience=5,
        lasting=15,
        applies=lambda window: window.corrects and not window.clips,
        measure=conditions.lasting_gap,
        confirmed=conditions.unlearns,
        covers=("k3_corrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "gap_clipped",
        key="kl",
        bound=0.065,
        severity="critical",
        seen="`kl` stays more than {bound:g} above its value at the start, now {value:.2g}.",
        why="Clipping removes tokens with a large log-ratio, and tolerates a larger gap than importance weights. In our "
        "runs, a gap of this size still came before a collapse.",
        advice="Push weights more often or lower `learning_rate`.",
        patience=5,
        lasting=15,
        applies=lambda window: window.corrects and window.clips,
        measure=conditions.lasting_gap,
        covers=("k3_corrected", "k3_growth", "kl_high", "chi2_token", "gap_in_step"),
    ),
    Rule(
        "kl_negative",
        key="kl",
        bound=NEGATIVE_KL,
        severity="critical",
        seen="`kl` is {value:.2g}, but a KL divergence is never negative.",
        why="The tokens were sampled with other log-probabilities than these, so that every ratio is wrong.",
        advice="No correction helps. Look for log-probabilities that were taken before temperature (a server needs "
        "`--logprobs-mode processed_logprobs`), that are shifted by one token, or that belong to another completion.",
        below=True,
        applies=conditions.negative_all_along,
        covers=("biased_ratio", "kl_negative_lately", "k3_corrected", "gap_in_step"),
    ),
    Rule(
        "nonfinite",
        key="nonfinite_fraction",
        bound=0.0,
        seen="A share of {value:.2g} of the tokens came without a finite log-probability.",
        why="NaN from the sampler means that a whole row of its logits is broken, so that the token was not drawn from "
        "the policy.",
        advice="To find the cause, set `rollout_nan_policy` to raise, which stops at the first such token; drop leaves "
        "them out of the loss.",
        patience=1,
    ),
    Rule(
        "kl_negative_lately",
        key="kl",
        bound=NEGATIVE_KL,
        seen="`kl` is {value:.2g}, but a KL divergence is never negative: unlike at the start, some tokens have wrong "
        "log-probabilities.",
        why="Weights and rejection limit the effect of such tokens, but cannot repair them.",
        advice="Look for a change in the sampler, and inspect the tokens of `log_ratio_max` and `log_ratio_min`. Until the "
        "cause is found, drop them: `rollout_is_threshold` [0.5, 5.0] (IcePop).",
        below=True,
        applies=lambda window: not conditions.negative_all_along(window),
        covers=("biased_ratio", "k3_corrected", "chi2_token", "k3_growth", "gap_in_step"),
    ),
    Rule(
        "gap_in_step",
        key="k3_kl",
        bound=0.03,
        seen="`k3_kl` is {value:.2g}, above {bound:g}, and the sampler announces no staleness.",
        why="Either its weights are older than it says, or sampler and trainer compute different policies from the same "
        "weights.",
        advice="Look for weights that are not pushed, for a sampler of your own that is behind without setting "
        "`trainer.rollout_step`, for dropout in the trainer (also `lora_dropout` of an adapter), and for a sampler in low "
        "precision.",
        applies=lambda window: window.get("staleness_max") == 0,
        covers=("k3_uncorrected", "k3_corrected"),
    ),
    Rule(
        "k3_corrected",
        key="k3_kl",
        bound=0.03,
        seen="`k3_kl` is {value:.2g}, above {bound:g}, and the run corrects for it.",
        why="With a stale sampler the gap first grows, then shrinks. A gap that stays is serious (`gap_stays`).",
        advice="If it does not shrink, push weights more often or lower `learning_rate`. If it came suddenly, look for "
        "weights that were not pushed.",
        applies=lambda window: window.corrects,
        covers=("k3_growth", "chi2_token"),
    ),
    Rule(
        "k3_uncorrected",
        key="k3_kl",
        bound=0.015,
        seen="`k3_kl` is {value:.2g}, above {bound:g}, and nothing corrects for it.",
        why="Rounding gives about 0.001. Training on the data of another policy is biased, and the gap tends to grow.",
        advice="{correct} Or make the gap smaller, by fresher weights or a higher precision in the sampler.",
        patience=5,
        applies=lambda window: not window.corrects,
    ),
    Rule(
        "k3_growth",
        key="k3_kl",
        bound=3.0,
        seen="`k3_kl` is {value:.2g} times its value early in the run.",
        why="Updates on the data of another policy move the policies further apart; in our runs, a growing gap came "
        "before a collapse.",
        advice="{correct} Lower `learning_rate` or push weights more often. To test the engine, run some steps with "
        "`learning_rate` 0: if the gap still grows, updates are not the cause.",
        measure=conditions.k3_growth,
    ),
    Rule(
        "kl_high",
        key="kl",
        bound=0.1,
        seen="`kl` is {value:.2g}, above {bound:g}.",
        why="The sampled tokens are much less likely for the trainer than for the sampler.",
        advice="If `k3_kl` is as large, the policies differ: use fresher weights or a higher precision in the sampler. "
        "{correct} If `k3_kl` is much smaller, sampling is truncated: leave `top_p`, `top_k` and `min_p` at their "
        "defaults.",
    ),
    Rule(
        "biased_ratio",
        key="kl",
        bound=0.01,
        seen="The mean ratio of trainer to sampler, `1 + k3_kl - kl`, differs from 1 by {value:.2g}.",
        why="The mean ratio is 1 for any two policies, so these are not the log-probabilities of the sampled tokens.",
        advice="{truncated} If all have their defaults, look for another temperature, and for tokens that were added or "
        "changed after sampling.",
        applies=lambda window: window.fresh,
        measure=conditions.bias,
    ),
    Rule(
        "staleness",
        key="staleness_max",
        bound=16.0,
        seen="Completions are up to {value:.0f} optimizer steps older than the policy they train.",
        why="The gap to the sampler grows with the age of its weights.",
        advice="Push weights more often: lower `steps_per_generation`, `num_iterations` or the queue of an asynchronous "
        "sampler.",
    ),
    Rule(
        "weight_mean_low",
        key="rollout_is_mean",
        bound=0.5,
        seen="The mean importance weight is {value:.2g}, below {bound:g}.",
        why="The mean should be near 1; the optimizer step shrinks with the mean weight.",
        advice="If `rollout_is` is sequence, set it to token: sequence weights fall with length. If IcePop drops too many "
        "tokens, widen `rollout_is_threshold`. A smaller upper bound lowers the mean weight further.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "weight_mean_high",
        key="rollout_is_mean",
        bound=2.0,
        seen="The mean importance weight is {value:.2g}, above {bound:g}.",
        why="The mean ratio is 1 for any two policies, so log-probabilities may be wrong, or few tokens have a huge "
        "weight.",
        advice="Check that the log-probabilities are taken after temperature and belong to their tokens; then lower "
        "`rollout_is_threshold`.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_high",),
    ),
    Rule(
        "effective_sample_size",
        key="rollout_is_eff_sample_size",
        bound=0.3,
        seen="The effective sample size of the weights is {value:.2g}, below {bound:g}.",
        why="Few tokens determine the gradient.",
        advice="If `rollout_is` is sequence, set it to token. With token weights, lower `rollout_is_threshold`, and use "
        "fresher weights or a higher precision in the sampler. A higher bound never helps.",
        below=True,
        applies=lambda window: window.weights_act,
        covers=("weight_std", "chi2_seq"),
    ),
    Rule(
        "weight_std",
        key="rollout_is_std",
        bound=1.0,
        seen="The importance weights have a standard deviation of {value:.2g}, above {bound:g}.",
        why="The standard deviation is larger than the mean, so that the gradient is noisy.",
        advice="Lower `rollout_is_threshold`; if `rollout_is` is sequence, set it to token, with seq_mean_k1 in "
        "`rollout_rs`.",
        applies=lambda window: window.weights_act,
    ),
    Rule(
        "weights_at_bound",
        key="rollout_is_ratio_fraction_high",
        bound=0.1,
        seen="A share of {value:.2g} of the importance ratios is above the bound and was truncated.",
        why="Truncation is meant for rare outliers; at this share it is a bias.",
        advice="If `rollout_is` is sequence, set it to token. With token weights, the policies are too far apart for "
        "weights alone: add `rollout_rs`, or use fresher weights in the sampler. Raise `rollout_is_threshold` only "
        "if the effective sample size is high.",
        applies=conditions.truncates_outliers,
    ),
    Rule(
        "icepop_dropped",
        key="rollout_is_oob_ratio",
        bound=0.3,
        seen="IcePop dropped a share of {value:.2g} of the tokens, above {bound:g}.",
        why="IcePop is meant for rare outliers; at this share too few tokens are left to train on.",
        advice="Widen `rollout_is_threshold` to {token}; bounds such as [0.5, 5.0] are for tokens, and tighter ones for "
        "means over a completion.",
        applies=lambda window: window.weights_act,
        covers=("effective_lr_low",),
    ),
    Rule(
        "chi2_token",
        key="chi2_token",
        bound=1.0,
        seen="`chi2_token` is {value:.2g}, above {bound:g}.",
        why="A few tokens have a huge ratio, so that token weights without a bound would be mostly noise.",
        advice="Keep `rollout_is_threshold` at 2 or below, or drop outliers with IcePop (a pair of bounds). "
        "`log_ratio_p99` and `log_ratio_max` show the size of the outliers.",
    ),
    Rule(
        "chi2_seq",
        key="chi2_seq",
        bound=10.0,
        seen="`chi2_seq` is {value:.2g}, above {bound:g}, with sequence weights.",
        why="Sequence weights are of little use at this length: few completions determine the gradient.",
        advice="Set `rollout_is` to token or geometric.",
        applies=lambda window: window.weights_act and window.setting("rollout_is") == "sequence",
    ),
    Rule(
        "rejected",
        key="rollout_rs_masked_fraction",
        bound=0.5,
        seen="A share of {value:.2g} of the tokens is rejected, above {bound:g}.",
        why="Too few tokens are left to train on, and they are a biased selection.",
        advice="If the share was as large at the start, widen `rollout_rs_threshold` to the spread of the sampler: for "
        "seq_mean_k1, also in place of a seq_sum criterion, {geometric}. If it grew, so did `k3_kl`, which is the "
        "cause.",
        covers=("effective_lr_low",),
    ),
    Rule(
        "vetoed",
        key="rollout_is_veto_fraction",
        bound=0.1,
        seen="A share of {value:.2g} of the completions has a token below the lower bound of seq_max_k1.",
        why="Rounding is not the cause: look for broken rows of logits, tokens scored at another position, and text "
        "that was added after sampling.",
        advice="`log_ratio_min` shows the lowest log-ratio. To reject fewer completions, lower the first bound in "
        "`rollout_rs_threshold`.",
        applies=conditions.vetoes,
    ),
    Rule(
        "effective_lr_low",
        key="effective_lr",
        bound=0.5,
        seen="`effective_lr` is {value:.2g}: the correction shrinks the optimizer step to this share.",
        why="The run learns more slowly than `learning_rate` says.",
        advice="If the mean weight is as small, set `rollout_is` to token; if tokens are rejected, widen "
        "`rollout_rs_threshold`. `rollout_rs_renormalize` and `rollout_is_batch_normalize` restore the size of the "
        "step, but not the data.",
        below=True,
        applies=lambda window: window.corrects,
    ),
    Rule(
        "effective_lr_high",
        key="effective_lr",
        bound=1.5,
        seen="`effective_lr` is {value:.2g}: the correction enlarges the optimizer step by this factor.",
        why="The run takes larger steps than `learning_rate` says.",
        advice="Lower `rollout_is_threshold`, or set `rollout_is` to token if it is sequence. With "
        "`rollout_rs_renormalize`, `effective_lr` is large because few tokens are kept: widen "
        "`rollout_rs_threshold`.",
        applies=lambda window: window.corrects,
    ),
    Rule(
        "selection",
        key="rejected/long_positive",
        bound=0.2,
        seen="A share of {value:.2g} of the tokens of long completions with a positive advantage is rejected, over three "
        "times the share of all others.",
        why="Training then sees mostly short or bad answers, and may unlearn long ones.",
        advice="Use criteria that do not depend on length: in `rollout_rs`, seq_mean_k1 or seq_mean_k3 in place of seq_sum "
        "or seq_max; or widen `rollout_rs_threshold`.",
        patience=5,
        measure=conditions.selection,
    ),
]
RULES: dict[str, Rule] = {rule.name: rule for rule in _RULES}
