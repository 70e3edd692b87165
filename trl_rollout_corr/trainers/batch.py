"""Keys of a batch that TRL shuffles and splits with everything else. The first two are TRL's names in GRPO."""

OLD_LOGPS = "old_per_token_logps"  # (B, T), of the policy that the trainer had when the batch was generated
ROLLOUT_LOGPS = "sampling_per_token_logps"  # (B, T), of the policy that sampled
COEFFICIENTS = (
    "rollout_corr_coefficients"  # (B, T), what multiplies the policy gradient, where that is known at generation
)
# Filled in at the first visit, and NaN before
FIRST_LOGPS = "rollout_corr_first_logps"  # (B, T), of the policy at the first visit, where that is the old one
FIRST_COEFFICIENTS = "rollout_corr_first_coefficients"  # (B, T)
REWARDS = "rollout_corr_rewards"  # (B,)
ROLLOUT_STEP = "rollout_corr_step"  # (B,), optimizer step of the weights that sampled; NaN where unknown
AGAIN_LOGPS = "rollout_corr_again_logps"  # (B, T), of sequences that the trainer scores alone; NaN for the others
