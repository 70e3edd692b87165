"""Columns of a dump, and the marks of its files."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike


# The version grows when a column is added, removed, or changes its meaning. Version 2 added `prompt_ids`, `padding`
# and `again_logps`, 3 `turn_ids` and a column that 4 removed, 5 nulls in `rollout_logps`, 6 two columns that 8
# removed, 7 `advantages`, 8 `fresh`, and 9 `lag` in its place; the reader takes them all.
FORMAT, VERSION = "trl_rollout_corr.dump", 9


class Column(NamedTuple):
    """
    A column: its name, the type of its entries, whether there is one per token, and whether it may be null, or may
    include `gaps`, tokens that are null.
    """

    name: str
    type: pa.DataType
    per_token: bool = False
    null: bool = False
    gaps: bool = False

    @property
    def dtype(self) -> DTypeLike | None:
        """Type of the column in numpy, where null is NaN; `None` if it does not hold numbers."""
        if pa.types.is_nested(self.type) or pa.types.is_string(self.type):
            return None
        whole = pa.types.is_integer(self.type) or pa.types.is_boolean(self.type)
        return np.dtype(np.float64 if self.null and whole else self.type.to_pandas_dtype())


COLUMNS = (
    Column("step", pa.int32()),  # optimizer steps before training on the sequence
    Column("rank", pa.int32()),
    Column("sampled", pa.bool_()),  # drawn at random: these rows represent the batch
    Column("worst", pa.bool_()),  # among the rows with the largest |log-ratio| of a token
    Column("prompt", pa.string(), null=True),
    Column("completion", pa.string(), null=True),
    Column("tokens", pa.string(), per_token=True),  # text of each token of the completion
    Column("token_ids", pa.int32(), per_token=True),
    Column("mask", pa.bool_(), per_token=True),  # tokens of the loss
    Column("train_logps", pa.float32(), per_token=True),  # nats; NaN and infinity are kept
    # Null where a rollout function or worker returned None
    Column("rollout_logps", pa.float32(), per_token=True, gaps=True),
    Column("weights", pa.float32(), per_token=True, null=True),  # bounded and normalised; null without weights
    Column("keep", pa.bool_(), per_token=True),  # tokens that no criterion rejects
    Column("coefficients", pa.float32(), per_token=True),  # factor of the policy gradient
    Column("reward", pa.float32()),
    Column("advantage", pa.float32()),
    Column("staleness", pa.int32(), null=True),  # age of the weights that sampled, in steps; null if unknown
    Column("prompt_ids", pa.list_(pa.int32()), null=True),
    Column("padding", pa.int32(), null=True),  # tokens before the prompt, in the batch that the trainer scored
    # `train_logps` of sequences that were scored alone
    Column("again_logps", pa.float32(), per_token=True, null=True),
    Column("turn_ids", pa.int32(), per_token=True, null=True),  # if a rollout function returns turns
    # If each token has its own; `advantage` is their mean
    Column("advantages", pa.float32(), per_token=True, null=True),
    # Steps by which the weights that sampled are behind those of `train_logps`; null if unknown
    Column("lag", pa.int32(), null=True),
)
SCHEMA = pa.schema([(c.name, pa.list_(c.type) if c.per_token else c.type) for c in COLUMNS])
