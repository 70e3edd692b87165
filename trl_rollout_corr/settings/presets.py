"""
Presets as data: a name, its weights, and its other settings.

First table: presets of verl 0.9.1. Second table: later methods.
"""

from copy import deepcopy
from typing import Any


# Rejection by the geometric mean of the ratio: a 0.1 percent drift per token, summed over 1000 tokens, is a factor of
# e.
_GEO_RS = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [[0.999, 1.001]]}
# Rejection by the mean k3 estimate of the KL divergence, in nats per token.
_K3_RS = {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": [0.01]}
_NO_IS = {"rollout_is": None}
_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": [0.5, 5.0]}
_PPO_CLIP = {"bypass_mode": True, "rollout_loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "rollout_loss_type": "reinforce"}
# Off-policy REINFORCE within a trust region; the bound on the ratio only prevents overflow
_DPPO = {"rollout_is": "token", "rollout_is_threshold": 20.0, **_REINFORCE}

VERL_PRESETS: dict[str, dict[str, Any]] = {
    # Biased, low variance: the safe start.
    "decoupled_token_is": _TOKEN_TIS,
    # Unbiased up to the cap; its variance grows with length.
    "decoupled_seq_is": _SEQ_TIS,
    # Weights outside the bounds are 0 instead of capped.
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    # Sequence weights; a sequence with a ratio outside [0.5, 2] is rejected.
    "decoupled_seq_is_rs": {**_SEQ_TIS, "rollout_rs": ["seq_sum_k1"], "rollout_rs_threshold": [[0.5, 2.0]]},
    # Length-neutral rejection alone.
    "decoupled_geo_rs": {**_NO_IS, **_GEO_RS},
    "decoupled_geo_rs_seq_tis": {**_SEQ_TIS, **_GEO_RS},
    "decoupled_geo_rs_token_tis": {**_TOKEN_TIS, **_GEO_RS},
    "decoupled_k3_rs": {**_NO_IS, **_K3_RS},
    "decoupled_k3_rs_seq_tis": {**_SEQ_TIS, **_K3_RS},
    "decoupled_k3_rs_token_tis": {**_TOKEN_TIS, **_K3_RS},
    # PPO clipped around the sampler: the ratio itself is the correction.
    "bypass_ppo_clip": {**_NO_IS, **_PPO_CLIP},
    "bypass_ppo_clip_geo_rs": {**_NO_IS, **_PPO_CLIP, **_GEO_RS},
    "bypass_ppo_clip_k3_rs": {**_NO_IS, **_PPO_CLIP, **_K3_RS},
    # Off-policy REINFORCE: explicit weights, no clipping.
    "bypass_pg_is": {**_SEQ_TIS, **_REINFORCE},
    "bypass_pg_token_icepop": {**_TOKEN_ICEPOP, **_REINFORCE},
    "bypass_pg_geo_rs": {**_NO_IS, **_REINFORCE, **_GEO_RS},
    "bypass_pg_geo_rs_seq_tis": {**_SEQ_TIS, **_REINFORCE, **_GEO_RS},
    "bypass_pg_geo_rs_token_tis": {**_TOKEN_TIS, **_REINFORCE, **_GEO_RS},
    # Measures, corrects nothing: loss and gradients are TRL's without its own correction.
    "disabled": _NO_IS,
}

# Trust regions on probabilities instead of ratios, and settings that two labs trained with. Thresholds are as
# published, except in `auto`.
LATER_PRESETS: dict[str, dict[str, Any]] = {
    # DPPO (https://huggingface.co/papers/2602.04879), with the bounds of SkyRL and verl, which truncate the ratio at
    # 20.
    "bypass_dppo_tv": {**_DPPO, "rollout_rs": ["token_tv"], "rollout_rs_threshold": [[0.2, 0.2]]},
    "bypass_dppo_kl": {**_DPPO, "rollout_rs": ["token_kl"], "rollout_rs_threshold": [[0.05, 0.05]]},
    # KPop (https://ringtech.notion.site/kpop), as in AReaL: the weights of kept tokens are unbounded.
    "decoupled_kpop": {
        "rollout_is": "token",
        "rollout_is_threshold": float("inf"),
        "rollout_rs": ["token_binary_kl"],
        "rollout_rs_threshold": [0.1],
    },
    # INTELLECT-3 (https://huggingface.co/papers/2512.16144): IcePop, and rejection of completions with a token ratio
    # below 1e-5.
    "decoupled_intellect3": {
        **_TOKEN_ICEPOP,
        "rollout_rs": ["seq_max_k1"],
        "rollout_rs_threshold": [[1e-5, float("inf")]],
    },
    # FlashREINFORCE, as in OpenRLHF 0.11.2, slime and miles: it rejects completions with a mean binary KL above 0.003.
    "bypass_flash_reinforce": {**_DPPO, "rollout_rs": ["seq_mean_binary_kl"], "rollout_rs_threshold": [0.003]},
    # TRL's own correction, which TRL itself applies: the fields of the unchanged script decide, see `trl_correction`.
    "trl": _NO_IS,
    # Chosen on some tasks and judged on others, see `benchmarks/arena`.
    "auto": {
        # Weights of TOPR (https://huggingface.co/papers/2503.14286), per window instead of per sequence: 1 where the
        # advantage is positive, else the product of a few ratios, at most 1. So what became unlikely since it was
        # sampled, and what follows it, is not pushed down much further. A product over a sequence shrinks with length.
        "rollout_is": "window",
        "rollout_is_threshold": [[0.0, 1.0], [1.0, 1.0]],
        "rollout_is_clamp": True,
        # With the newest weights the ratio is what the two engines compute differently. Weights would pull the policy
        # towards the sampler's errors, and no push ends this pull, because they come back with it.
        "rollout_is_stale_only": True,
        # DPPO's trust region, with the bound of `bypass_dppo_tv`: a probability that moved by more than 0.2 is not
        # pushed further. With 0.1, formats are learned later. It may be pushed back, so a lower bound rejects rewarded
        # corrupted tokens: the sampler was sure of them, and their trainer probability is a thousand times lower.
        "rollout_rs": ["token_tv", "token_k1"],
        "rollout_rs_threshold": [[0.2, 0.2], [0.001, float("inf")]],
    },
}

PRESETS: dict[str, dict[str, Any]] = {**VERL_PRESETS, **LATER_PRESETS}

# The preset of a run that names no correction
DEFAULT = "auto"

# Without a preset: no correction
_OFF: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_clamp": False,
    "rollout_is_stale_only": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "rollout_loss_type": "ppo_clip",
}

# Default of each field that a preset decides. It means "as the preset says"; `None` turns weights and rejection off.
UNSET: dict[str, Any] = {**dict.fromkeys(_OFF), "rollout_is": "preset", "rollout_rs": "preset"}


def values_of_preset(preset: str | None) -> dict[str, Any]:
    """Values of all fields that a preset decides, as a copy. `None` is no correction."""
    return deepcopy({**_OFF, **(PRESETS[preset] if preset else {})})
