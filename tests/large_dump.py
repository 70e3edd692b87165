"""
A dump of any size, made quickly: what a long run leaves at the default `rollout_dump_max_gb`. As a program, it also measures.

    python tests/large_dump.py outputs/large 1.0
    /usr/bin/time -v trl-rollout-corr report outputs/large
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.tools.dump.columns import FORMAT, SCHEMA, VERSION
from trl_rollout_corr.tools.dump.folder import append_log


VOCABULARY = 30_000
_PROMPT = 100  # tokens


def make_large_dump(
    folder: Path,
    *,
    gigabytes: float = 1.0,
    steps: int | None = None,
    rows: int = 16,
    length: int = 1000,
    seed: int = 0,
) -> Path:
    """
    Write files of `rows` completions of about `length` tokens, half of them drawn at random and half as the worst, until there
    are so many `steps` or `gigabytes`. Texts are as frequent as words are, log-probabilities are random, and the gap grows
    with the step. Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    settings = RolloutCorrectionConfig(rollout_correction="auto").settings.fields
    metadata = {FORMAT: str(VERSION), "settings": json.dumps(settings, default=str), "about": "{}"}
    words = pa.array([f" word{i}" if i % 3 else f" {i}" for i in range(VOCABULARY)])
    size, step = 0, 0
    while size < gigabytes * 1e9 if steps is None else step < steps:
        step += 1
        table = _table(step, rows, length, words, rng)
        path = folder / f"step-{step:08d}-rank-00000.parquet"
        pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")
        size += path.stat().st_size
        entry = {
            "loss": 0.01,
            "reward": 0.5,
            "learning_rate": 1e-6,
            "rollout_corr/k3_kl": 1e-4,
            "rollout_corr/kl": 1e-4,
        }
        append_log(folder, {**entry, "step": step})
    return folder


def _table(step: int, rows: int, length: int, words: pa.Array, rng: np.random.Generator) -> pa.Table:
    """One file of a dump."""
    lengths = rng.integers(max(length // 2, 1), length + length // 2 + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    n = int(offsets[-1])
    ids = _ids(n, rng)
    train = -rng.exponential(0.5, n).astype(np.float32)
    d = rng.normal(0, 0.02 * min(step, 8) ** 0.5, n).astype(np.float32) * (1 - np.exp(train))
    weights = np.exp(np.minimum(d, 0.5)).astype(np.float32)

    def lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values)

    texts = words.take(pa.array(ids))
    whole = [
        "".join(texts[start:stop].to_pylist())
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    prompts = _ids(_PROMPT * rows, rng).astype(np.int32)
    prompt_offsets = np.arange(0, _PROMPT * rows + 1, _PROMPT, dtype=np.int32)
    drawn = np.arange(rows) < max(rows // 2, 1)
    columns = {
        "step": pa.array(np.full(rows, step, np.int32)),
        "rank": pa.array(np.zeros(rows, np.int32)),
        "sampled": pa.array(drawn),
        "worst": pa.array(~drawn),
        "prompt": pa.array([f"Question {step}.{i}? " * 20 for i in range(rows)]),
        "completion": pa.array(whole),
        "tokens": lists(texts),
        "token_ids": lists(pa.array(ids)),
        "mask": lists(pa.array(np.ones(n, bool))),
        "train_logps": lists(pa.array(train)),
        "rollout_logps": lists(pa.array(train - d)),
        "weights": lists(pa.array(weights)),
        "keep": lists(pa.array(rng.random(n) > 0.001)),
        "coefficients": lists(pa.array(weights)),
        "reward": pa.array(rng.integers(0, 2, rows).astype(np.float32)),
        "advantage": pa.array(rng.normal(0, 1, rows).astype(np.float32)),
        "staleness": pa.array(np.full(rows, min(step - 1, 4), np.int32)),
        "prompt_ids": pa.ListArray.from_arrays(prompt_offsets, pa.array(prompts)),
        "padding": pa.array(rng.integers(0, 50, rows).astype(np.int32)),
    }
    unknown = {field.name: pa.nulls(rows, field.type) for field in SCHEMA if field.name not in columns}
    return pa.table({**columns, **unknown}).select(SCHEMA.names).cast(SCHEMA)


def _ids(n: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens, a few of which are frequent, as in a language."""
    return (np.exp(rng.random(n) * np.log(VOCABULARY)) - 1).astype(np.int32).clip(0, VOCABULARY - 1)


if __name__ == "__main__":
    make_large_dump(Path(sys.argv[1]), gigabytes=float(sys.argv[2]))
