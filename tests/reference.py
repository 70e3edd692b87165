"""
Rollout correction written a second time, as loops over Python floats, to test the package against.

Sequences are lists of `(train_logp, rollout_logp)` pairs of the valid tokens only: padding does not exist here.
"""

import math
import re
import statistics


WINDOW = 16  # tokens whose ratios are multiplied


def clip(x, bound=20.0):
    return min(max(x, -bound), bound)


def turns_of(mask):
    """Turn of each token of the model, as a run of such tokens."""
    turns, last = [], False
    for model in mask:
        if model:
            turns.append(turns[-1] + (not last) if turns else 0)
        last = model
    return turns


def groups(length, unit, turns):
    """Indices of the tokens that are judged together: one, a turn, or the sequence."""
    keys = {"token": range(length), "turn": turns, "seq": [0] * length}[unit]
    return [[t for t in range(length) if keys[t] == key] for key in sorted(set(keys))]


def ratios(sequences, level, turns=None):
    """Raw importance ratio per token. `turns` are those of [`turns_of`], by sequence."""
    result = []
    for i, sequence in enumerate(sequences):
        row = [0.0] * len(sequence)
        for group in groups(len(row), unit_of_level(level), turns and turns[i]):
            before = range(max(group[0] - WINDOW + 1, 0), group[0]) if level == "window" else []
            d = [sequence[t][0] - sequence[t][1] for t in (*before, *group)]
            exponent = sum(d) / len(d) if level == "geometric" else sum(d)
            for t in group:
                row[t] = math.exp(min(exponent, 20))
        result.append(row)
    return result


def unit_of_level(level):
    return {"token": "token", "window": "token", "turn": "turn"}.get(level, "seq")


def bound(r, lower, upper, clamp):
    if lower is None:
        return min(r, upper)
    return min(max(r, lower), upper) if clamp else (r if lower <= r <= upper else 0.0)


def weights(sequences, level, lower, upper, normalize=False, clamp=False, turns=None):
    """Bounded importance weight per token."""
    bounded = [[bound(r, lower, upper, clamp) for r in row] for row in ratios(sequences, level, turns)]
    if normalize:
        mean = statistics.fmean(normalization_units(bounded, level, turns))
        bounded = [[w / mean if mean > 1e-8 else w for w in row] for row in bounded]
    return bounded


def normalization_units(bounded, level, turns=None):
    """Values per token, once for each that is judged as one."""
    unit = unit_of_level(level)
    return [row[g[0]] for i, row in enumerate(bounded) for g in groups(len(row), unit, turns and turns[i])]


def threshold_of(name: str, bound: float) -> float:
    """A bound for any criterion: the one given, below 1 for a difference of probabilities."""
    return min(bound, 0.9) if name.endswith("_tv") else bound


def parts(name):
    """Unit that is judged, how its tokens are reduced, and their divergence."""
    unit, how, divergence = re.fullmatch("(token|turn|seq)_(?:(sum|mean|max)_)?(.+)", name).groups()
    return unit, how or "sum", divergence


def token_statistic(token, divergence):
    d = token[0] - token[1]
    if divergence in ("k1", "k2", "k3"):
        return {"k1": -d, "k2": clip(d) ** 2 / 2, "k3": math.exp(clip(d)) - 1 - clip(d)}[divergence]
    p, q = math.exp(token[0]), math.exp(token[1])
    if divergence == "tv":
        return p - q
    if divergence == "kl":
        return math.copysign(binary_kl(q, p), p - q)
    return max(binary_kl(p, q), binary_kl(q, p))


def statistic_in(unit, token, divergence):
    """Statistic of a token in a criterion of tokens, turns or sequences."""
    if unit == "token" or divergence not in ("tv", "binary_kl"):
        return token_statistic(token, divergence)
    p, q = math.exp(token[0]), math.exp(token[1])
    return abs(p - q) if divergence == "tv" else binary_kl(q, p)


def binary_kl(a, b):
    a, b = (min(max(x, 1e-6), 1 - 1e-6) for x in (a, b))
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def reduced(values, how):
    """The numbers that must be within the bounds."""
    return {"sum": [sum(values)], "mean": [sum(values) / len(values)], "max": values}[how]


def keeps(sequences, name, bounds, advantages=None, turns=None):
    """True for each token that one criterion keeps. `bounds` as the user writes them: on the ratio for k1."""
    unit, how, divergence = parts(name)
    result = []
    for index, sequence in enumerate(sequences):
        if unit == "token" and divergence in ("tv", "kl"):  # only what the advantage pushes further away is dropped
            changes, advantage = [token_statistic(token, divergence) for token in sequence], advantages[index]
            result.append(
                [not ((advantage > 0 and x > bounds[1]) or (advantage < 0 and x < -bounds[0])) for x in changes]
            )
            continue
        row = [False] * len(sequence)
        for group in groups(len(row), unit, turns and turns[index]):
            values = reduced([statistic_in(unit, sequence[t], divergence) for t in group], how)
            if divergence == "k1":
                ln = [math.log(b) if b else -math.inf for b in bounds]
                inside = all(ln[0] <= -x <= ln[1] for x in values)
            else:
                inside = all(x <= bounds for x in values)
            for t in group:
                row[t] = inside
        result.append(row)
    return result


def population_std(values):
    return statistics.pstdev(values) if len(values) > 1 else 0.0


def policy_metrics(sequences):
    rows = [row for row in sequences if row]
    d = [[train - rollout for train, rollout in row] for row in rows]
    flat = [x for row in d for x in row]
    train = [-statistics.fmean(t for t, _ in row) for row in rows]
    rollout = [-statistics.fmean(r for _, r in row) for row in rows]
    gap = [t - r for t, r in zip(train, rollout, strict=True)]
    return {
        "surprise": -statistics.fmean(t for row in rows for t, _ in row),
        "training_ppl": statistics.fmean(math.exp(min(x, 60)) for x in train),
        "rollout_ppl": statistics.fmean(math.exp(min(x, 60)) for x in rollout),
        "log_ppl_diff": statistics.fmean(gap),
        "ppl_ratio": statistics.fmean(math.exp(min(x, 60)) for x in gap),
        "kl": -statistics.fmean(flat),
        "k3_kl": statistics.fmean(math.exp(min(x, 60)) - 1 - x for x in flat),
        "bit_equal": sum(t == r for row in rows for t, r in row) / len(flat),
        "chi2_token": statistics.fmean(math.exp(2 * clip(x)) for x in flat) - 1,
        "chi2_seq": statistics.fmean(math.exp(2 * clip(sum(row))) for row in d) - 1,
    }


def weight_metrics(sequences, level, lower, upper, normalize=False, clamp=False, turns=None):
    turns = turns and [row for row in turns if row]
    sequences = [row for row in sequences if row]
    raw, applied = ratios(sequences, level, turns), weights(sequences, level, lower, upper, clamp=clamp, turns=turns)
    low = 1 / upper if lower is None else lower
    flat_raw, flat = [x for row in raw for x in row], [x for row in applied for x in row]
    units = normalization_units(raw, level, turns)
    extremes = flat if unit_of_level(level) == "token" else units
    mean = statistics.fmean(flat)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_max": max(extremes),
        "rollout_is_min": min(extremes),
        "rollout_is_std": population_std(flat),
        "rollout_is_eff_sample_size": 1 / statistics.fmean((w / mean) ** 2 for w in flat) if mean else 0.0,
        "rollout_is_ratio_fraction_high": statistics.fmean(x > upper for x in units),
        "rollout_is_ratio_fraction_low": statistics.fmean(x < low for x in units),
    }
    if lower is not None and not clamp:
        metrics["rollout_is_oob_ratio"] = statistics.fmean(not lower <= x <= upper for x in flat_raw)
    if normalize:
        factor = statistics.fmean(normalization_units(applied, level, turns))
        metrics["rollout_is_batch_norm_factor"] = factor if factor > 1e-8 else 1.0
    return metrics


def rejection_metrics(sequences, name, bounds, advantages=None, turns=None):
    """Metrics of one criterion, without the `rollout_rs_<name>_` in front."""
    unit, how, divergence = parts(name)
    flat, kept = [], keeps(sequences, name, bounds, advantages, turns)
    for i, row in enumerate(sequences):
        for group in groups(len(row), unit, turns and turns[i]):
            values = reduced([statistic_in(unit, row[t], divergence) for t in group], how)
            flat += [max(values, key=lambda x: (abs(x), x))] * len(group)
    return {
        "mean": statistics.fmean(flat),
        "masked_fraction": statistics.fmean(not k for row in kept for k in row),
    }


def direction_metrics(sequences, advantages):
    """`kl` of the tokens whose advantage has a sign, and the mean of `(r - 1) A` there."""
    pairs = list(zip(sequences, advantages, strict=True))
    gains = {
        sign: [math.expm1(min(train - rollout, 20.0)) * a for row, a in pairs for train, rollout in row if a * of > 0]
        for sign, of in (("positive", 1), ("negative", -1))
    }
    by_sign = {
        "positive": [rollout - train for row, advantage in pairs for train, rollout in row if advantage > 0],
        "negative": [rollout - train for row, advantage in pairs for train, rollout in row if advantage < 0],
    }
    return {
        f"{name}_advantage_{sign}": statistics.fmean(values)
        for name, found in (("kl", by_sign), ("gain", gains))
        for sign, values in found.items()
        if values
    }


# Closed forms of `docs/method.md`, for weights whose logarithm is normal with variance `v` and mean `-v / 2`
_normal = statistics.NormalDist()


def effective_sample_size(v):
    """Effective sample size before any bound."""
    return math.exp(-v)


def truncated_mean(v, upper):
    """Mean of `min(w, upper)`."""
    return icepop_mean(v, upper) + upper * (1 - _normal.cdf((math.log(upper) + v / 2) / math.sqrt(v)))


def icepop_mean(v, upper):
    """Mean of `w` where `w <= upper`, and 0 elsewhere."""
    return _normal.cdf((math.log(upper) - v / 2) / math.sqrt(v))
