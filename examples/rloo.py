"""
RLOO with rollout correction, on questions whose answer is a number.

    accelerate launch --config_file recipes/accelerate/ddp.yaml examples/rloo.py --config recipes/rloo/auto.yaml

Any recipe of recipes/rloo, any model and dataset: options on the command line override the recipe. Without `--dataset_name`
the questions are GSM8K's.
"""

from run import train

from trl_rollout_corr import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer


if __name__ == "__main__":
    train(RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig, __doc__)
