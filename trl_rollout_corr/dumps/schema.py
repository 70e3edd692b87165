"""Columns of a dump, and how its files are marked."""

import pyarrow as pa


# The version grows when a column is added or changes its meaning; readers refuse another version.
FORMAT, VERSION = "trl_rollout_corr.dump", 3

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # optimizer steps made when the sequence was trained on
        ("rank", pa.int32()),
        ("sampled", pa.bool_()),  # drawn at random: these rows represent the batch
        ("worst", pa.bool_()),  # among those with the largest |log-ratio| of a token
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.list_(pa.string())),  # text of each token of the completion; all lists have this length
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),  # tokens of the loss
        ("train_logps", pa.list_(pa.float32())),  # nats; NaN and infinity are kept
        ("rollout_logps", pa.list_(pa.float32())),
        ("weights", pa.list_(pa.float32())),  # bounded and normalised importance weights; null without weights
        ("keep", pa.list_(pa.bool_())),  # tokens that no criterion rejects
        ("coefficients", pa.list_(pa.float32())),  # factor of the policy gradient
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("staleness", pa.int32()),  # age of the weights that sampled, in optimizer steps; null if unknown
        ("prompt_ids", pa.list_(pa.int32())),
        ("padding", pa.int32()),  # tokens of padding before the prompt, in the batch that the trainer scored
        # `train_logps` of the sequences that were scored alone
        ("again_logps", pa.list_(pa.float32())),
        # turn of each token, if a rollout function returns turns
        ("turn_ids", pa.list_(pa.int32())),
        # `staleness` of each token, if the server tells it; NaN if unknown
        ("token_staleness", pa.list_(pa.float32())),
    ]
)
