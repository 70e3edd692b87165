"""Healthy bands of metrics, for charts and documents, and what a gap explains of another number."""

import math


# Root mean square of the log-ratio, in nats, below which a correction per token changes nothing (`benchmarks/exact`).
# Rounding to bfloat16 causes more in most models.
NEGLIGIBLE = 0.004

# Largest `k3_kl` with fresh weights in our runs (for weights of 8 bits, the mean of the first steps), by what their
# engine rounds to fewer than 16 bits
ROUNDED = {"": 0.002, "cache": 0.05, "weights": 0.02}

# Healthy band by metric without its prefix: `(lower, upper)`, with `None` for no bound. With fresh weights, runs with
# a lasting `k3_kl` of 0.009 collapsed, and rounding to bfloat16 gave 0.002.
HEALTHY: dict[str, tuple[float | None, float | None]] = {
    "k3_kl": (None, 0.005),
    "kl_advantage_positive": (None, 0.02),
    "chi2_token": (None, 1.0),
    "chi2_seq": (None, 10.0),
    "effective_lr": (0.5, 1.5),
    "nonfinite_fraction": (None, 0.0),
    "rollout_is_mean": (0.8, 1.2),
    "sampling/importance_sampling_ratio/mean": (0.8, 1.2),
    "rollout_is_std": (None, 1.0),
    "rollout_is_eff_sample_size": (0.5, None),
    "rollout_rs_masked_fraction": (None, 0.3),
    "rollout_is_veto_fraction": (None, 0.1),
}


def beyond_entropy(surprise: float, entropy: float, k3: float) -> float:
    """
    Mean of `-log p` of the sampler's tokens minus the trainer's entropy, in nats, as far as a gap of `k3` nats does
    not explain it. An older or noisier sampler is surer or less sure of its tokens: to first order the two are
    `sqrt(2 k3)` standard deviations of `log p` apart, which are taken as a nat.
    """
    apart = surprise - entropy
    return math.copysign(max(abs(apart) - math.sqrt(2 * max(k3, 0.0)), 0.0), apart)


def band_in_words(name: str) -> str:
    """The healthy band of a metric in words, such as "below 0.3"; empty without a band."""
    low, high = HEALTHY.get(name, (None, None))
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if high is not None:
        return f"below {high:g}" if high else "0"
    return f"above {low:g}" if low is not None else ""
