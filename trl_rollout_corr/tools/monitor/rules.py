"""Health rules, as data. `docs/alarms.md` lists them."""

from typing import Any

from . import conditions
from .rule import Bound
from .texts import FRESHER, LARGE_K3, MOMENTUM


def _rule(name: str, *bounds: dict[str, Any], **shared: Any) -> tuple[Bound, ...]:
    """The bounds of a rule, from their own and their shared fields; a bound without a name takes the rule's."""
    return tuple(Bound(**{"name": name, **shared, **fields}) for fields in bounds or [{}])


# Each is a tuple of bounds about one problem, the most serious first. While a bound is passed, the ones after it stay
# silent
RULES = [
    _rule(
        "no_tokens",
        key="nonfinite_fraction",
        limit=0.5,
        seen="No token was left in the loss, so this step has no metrics.",
        why=MOMENTUM,
        advice="{no_tokens}",
        returns=False,
        patience=5,
        measure=conditions.without_tokens,
    ),
    _rule(
        "nothing_to_learn",
        key="zero_advantage_fraction",
        limit=0.5,
        seen="All advantages are 0, so no reward changes the policy.",
        why="All completions of a prompt got the same reward, or none.",
        advice="{cut}",
        patience=7,
        lasting=7,
        measure=conditions.without_advantages,
    ),
    _rule(
        "cut",
        key="completions/clipped_ratio",
        limit=0.8,
        seen="A share of {value} of the completions is cut off at `max_completion_length`{began}.",
        why="Answers may be missing: the policy learns to write more than the limit, or no longer ends.",
        advice="Look at some: if they go on well, raise `max_completion_length`, and if they repeat themselves, go "
        "back to a checkpoint.",
        patience=5,
        measure=conditions.cut_since_the_start,
    ),
    _rule(
        "clipped",
        key="clip_ratio/region_mean",
        limit=0.3,
        seen="A share of {value} is clipped at the first visit of a batch (`clip_ratio/region_mean`), above "
        "{limit:g}.",
        why="In bypass mode the clip range is around the sampler, so that the gap alone can use it up.",
        advice="Widen `epsilon` and `epsilon_high` until only a few are clipped in the first steps.",
        applies=lambda window: window.clips_at_once,
        measure=lambda window: window.trl_metric("clip_ratio/region_mean"),
    ),
    _rule(
        "nonfinite",
        {
            "name": "nonfinite_many",
            "limit": 0.1,
            "far": 5.0,
            "severity": "critical",
            "foretells_collapse": True,
            "covers": ("everything_rejected",),
        },
        {"limit": 0.0, "patience": 1},
        key="nonfinite_fraction",
        seen="A share of {value} of the tokens came without a finite log-probability.",
        why="Logits are NaN, or only the number is missing: a `rollout_func` returns None, or a vLLM server -9999.",
        advice="Look for NaN in the weights and for a failed push: no correction repairs this.",
    ),
    _rule(
        "k3_kl",
        {
            "name": "k3_at_start",
            "limit": LARGE_K3,
            "severity": "critical",
            "foretells_collapse": True,
            "seen": "`k3_kl` has been at least {value} since the first step, above {limit:g}, and no update is the "
            "reason.",
            "why": "Rounding does not explain it, because {gave} in our measurements: the sampler reads or reports "
            "other tokens, holds other weights, or draws from another distribution.",
            "advice": "{diagnose}",
            "patience": 1,
            "measure": conditions.gap_from_the_start,
            "applies": lambda window: not window.rounds_more,
        },
        {"name": "k3_high", "limit": 0.03, "far": 10.0, "foretells_collapse": True},
        {"name": "k3_uncorrected", "limit": 0.015, "patience": 5},
        {
            "name": "k3_corrected",
            "limit": 0.03,
            "far": 10.0,
            "seen": "`k3_kl` is {value}, above {limit:g}, and {corrects}.",
            "why": "{corrected}",
            "advice": "{correct}",
            "applies": lambda window: window.corrects is not False,
        },
        {
            "name": "k3_lasting",
            "limit": 0.005,
            "seen": "`k3_kl` is {value} with fresh weights, and its median of the steps 21 to 40 is above {limit:g} "
            "as well.",
            "why": "The limit is of dense models in bfloat16, and a gap of 0.009 from artificial noise collapsed "
            "five of six uncorrected runs of ours.",
            "advice": "{find}",
            "measure": conditions.gap_of_fresh_weights,
            "applies": lambda window: not window.rounds_more,
        },
        {
            "name": "k3_early",
            "limit": 0.015,
            "seen": "`k3_kl` has been at least {value} since the first step, above {limit:g}, with weights that are "
            "known to be fresh.",
            "why": "This may be harmless with experts or an engine in 8 bits; otherwise something differs, because "
            "{gave} in our measurements.",
            "advice": "{find}",
            "measure": conditions.gap_from_the_start,
            "applies": lambda window: window.corrects is not False and window.is_fresh and not window.rounds_more,
        },
        key="k3_kl",
        seen="`k3_kl` is {value}, above {limit:g}, and nothing corrects for it.",
        why="{uncorrected}",
        advice="{correct}",
        applies=lambda window: window.corrects is False,
    ),
    _rule(
        "unlearning",
        key="kl_advantage_positive",
        limit=0.02,
        foretells_collapse=True,
        seen="Rewarded tokens have become unlikely: `kl_advantage_positive` is {value} above `kl` at the start of the "
        "run, and the limit is {limit:g}.",
        why="In most of our runs with this alarm accuracy fell, at the same time or later, so evaluate on held-out "
        "prompts now.",
        advice="{correct}",
        patience=11,
        measure=conditions.gap_of_rewarded,
        confirmed=lambda window: window.course.rewarded_stay_unlikely,
        covers=("gap_stays", "gap_clipped", "k3_high", "k3_uncorrected", "k3_corrected"),
    ),
    _rule(
        "gap_stays",
        {
            "limit": 0.03,
            "why": "This alarm may be false, because some of our runs kept their accuracy with such a gap; in others "
            "rewarded tokens lost probability, and training collapsed.",
            "applies": lambda window: window.corrects and not window.clips,
            "confirmed": conditions.unlearns,
        },
        {
            "name": "gap_clipped",
            "limit": 0.065,
            "why": "This alarm may be false: only a few of our runs showed a gap of this size, and accuracy fell for "
            "a short time in some of them.",
            "applies": lambda window: window.corrects and window.clips,
        },
        key="kl",
        foretells_collapse=True,
        seen="`kl` does not return to its value at the start of the run: it is {value} higher, above {limit:g}.",
        advice="{correct}",
        patience=5,
        lasting=15,
        measure=conditions.lasting_gap,
        covers=("k3_corrected",),
    ),
    _rule(
        "biased_ratio",
        key="kl",
        limit=0.01,
        seen="The mean ratio of trainer to sampler, `1 + k3_kl - kl`, differs from 1 by {value}.",
        why="It is 1 for any two policies, so the sampler never draws some tokens, or reports other "
        "log-probabilities than it drew with.",
        advice="{defaults}",
        applies=lambda window: window.before_updates,
        measure=conditions.bias,
        covers=("k3_corrected",),
    ),
    _rule(
        "gap_by_sign",
        key="kl_advantage_negative",
        limit=0.002,
        seen="`kl_advantage_negative` and `kl_advantage_positive` differ by {value}, above {limit:g}, although the "
        "weights that sample are fresh.",
        why="Neither rounding nor a push knows the advantage, so something after the rewards makes the difference.",
        advice="{find}",
        applies=lambda window: window.is_fresh,
        measure=conditions.gap_by_sign,
    ),
    _rule(
        "other_draws",
        key="surprise",
        limit=0.2,
        seen="`surprise` differs from TRL's `entropy` by a share of {value}, above {limit:g}, although `k3_kl` is "
        "small.",
        why="Unless the sampler is less sure of its tokens, as one with older weights may be, they were drawn with "
        "another temperature, with `top_p`, or in another way.",
        advice="Return the log-probabilities with which they were drawn, or draw from the whole distribution at the "
        "trainer's `temperature`.",
        measure=conditions.draws,
    ),
    _rule(
        "fresh_gap",
        key="fresh_k3_kl",
        limit=10.0,
        seen="After a push, sampler and trainer are {value} times as far apart as after the first pushes "
        "(`fresh_k3_kl`), above {limit:g}.",
        why="{of_push}",
        advice="{push_or_text}",
        patience=1,
        measure=conditions.fresh_growth,
        confirmed=conditions.stands_still_or_far_apart,
    ),
    _rule(
        "bit_equal",
        key="bit_equal",
        limit=0.0,
        below=True,
        seen="A share of {value} of the tokens has bit-equal log-probabilities, below {limit:g}.",
        why="A sampler that holds older weights than the trainer differs as well.",
        advice="`trl-rollout-corr probe` splits the gap of a fresh sampler into parts.",
    ),
    _rule(
        "staleness",
        key="staleness_max",
        limit=16.0,
        seen="Completions are up to {value} optimizer steps older than the policy that trains on them.",
        why="The gap grows with the age of the sampling weights.",
        advice=f"{FRESHER}.",
    ),
    _rule(
        "weight_mean",
        {
            "name": "weight_of_completions",
            "limit": 0.8,
            "below": True,
            "seen": "The mean importance weight of completions{length} is {value}, below {limit:g}.",
            "why": "{fell}",
            "advice": "{correct}",
            "applies": lambda window: window.weighs_completions,
        },
        {
            "name": "weight_mean_low",
            "limit": 0.5,
            "below": True,
            "why": "{apart}",
            "advice": "{correct}",
        },
        {
            "name": "weight_mean_high",
            "limit": 2.0,
            "why": "The mean multiplies the optimizer step, and a few tokens with a huge weight or wrong "
            "log-probabilities raise it.",
            "advice": "{correct}",
        },
        key="rollout_is_mean",
        far=10.0,
        seen="The mean importance weight is {value}, {side} {limit:g}.",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "effective_sample_size",
        key="rollout_is_eff_sample_size",
        limit=0.3,
        far=10.0,
        below=True,
        seen="The effective sample size of the weights is {value}, below {limit:g}.",
        why="A few tokens or completions determine the gradient, so it is noisy.",
        advice="{correct}",
        applies=lambda window: window.weights_act,
    ),
    _rule(
        "rejected",
        key="rollout_rs_masked_fraction",
        limit=0.5,
        seen="A share of {value} of the tokens is rejected, above {limit:g}.",
        why="Few tokens are left to train on, and they are not a fair sample of the completions.",
        advice="{correct}",
        returns=False,
    ),
    _rule(
        "vetoed",
        key="rollout_is_veto_fraction",
        limit=0.1,
        far=5.0,
        seen="A share of {value} of the completions contains a token below the lower bound of seq_max_k1.",
        why="Rounding does not move a token that far.",
        advice="Look for broken rows of logits, for tokens scored at another position, and for text added after "
        "sampling.",
        applies=conditions.vetoes,
    ),
    _rule(
        "everything_rejected",
        key="effective_lr",
        limit=1e-6,
        below=True,
        seen="All tokens were rejected or have no gradient (`effective_lr` is {value}).",
        why=MOMENTUM,
        advice="{correct}",
        applies=lambda window: not window.only_measures,
        returns=False,
        covers=("rejected", "weight_mean_low", "weight_of_completions", "effective_sample_size"),
    ),
]
BOUNDS: dict[str, Bound] = {bound.name: bound for rule in RULES for bound in rule}
# By bound: the bounds that stay silent while it is passed
SILENCED: dict[str, set[str]] = {
    bound.name: {*bound.covers, *(later.name for later in rule[i:])}
    for rule in RULES
    for i, bound in enumerate(rule, 1)
}
