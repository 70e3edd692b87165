"""
GRPO with rollout correction, on questions whose answer is a number.

    accelerate launch --config_file recipes/accelerate/ddp.yaml examples/grpo.py --config recipes/grpo/auto.yaml

Any recipe of recipes/grpo, any model and dataset: options on the command line override the recipe. Without `--dataset_name`
the questions are GSM8K's.
"""

from run import train

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


if __name__ == "__main__":
    train(RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, __doc__)
