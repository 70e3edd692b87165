"""Keys of tensors in a batch, which TRL shuffles and splits. The first two are TRL's, in GRPO."""

import math


OLD_LOGPS = "old_per_token_logps"  # (B, T), under the old policy: the trainer's when the batch was generated
ROLLOUT_LOGPS = "sampling_per_token_logps"  # (B, T), under the policy that sampled
NOT_GIVEN = math.inf  # in `ROLLOUT_LOGPS`: a rollout function or worker gave None. No probability has this logarithm
# (B, T), the same as TRL made it, with -9999 for minus infinity, for what TRL's loss reads
LOGPS_OF_TRL = "rollout_corr_logps_of_trl"
COEFFICIENTS = "rollout_corr_coefficients"  # (B, T), factor of the policy gradient, if known at generation
# Values of the first visit, for later ones (`num_iterations`). They are filled in place, because TRL may copy the
# dictionary
VISITED = "rollout_corr_visited"  # (B,), on the CPU, so that nothing waits for the device
FIRST_LOGPS = "rollout_corr_first_logps"  # (B, T)
FIRST_COEFFICIENTS = "rollout_corr_first_coefficients"  # (B, T)
REWARDS = "rollout_corr_rewards"  # (B,)
TURN_IDS = "rollout_corr_turn_ids"  # (B, T), turn of each token, if a rollout function returns turns
ROLLOUT_STEP = "rollout_corr_step"  # (B,), optimizer step of the weights that sampled; NaN if unknown
# (B,), True where the weights that sampled are those of the policy that is corrected for; missing if unknown
FRESH = "rollout_corr_fresh"
PADDING = "rollout_corr_padding"  # (B,), tokens of padding before the prompt, where the prompt's mask does not tell
AGAIN_LOGPS = "rollout_corr_again_logps"  # (B, T), of sequences scored one by one, without padding; NaN elsewhere
