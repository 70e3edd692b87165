"""
Values per token that a sampler or a user's function returns for completions, checked and brought into one form.

`n` completions, `T` tokens in one of them.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from ..messages import warn
from .keys import NOT_GIVEN


# vLLM's server writes minus infinity like this, because JSON cannot
_SERVER_INFINITY = -9999.0
# In nats: more than rounding can add to a log-probability of 0
_ROUNDING = 0.01


def _as_list(value: Any) -> Any:
    """A tensor, an array or a tuple as a list; anything else unchanged."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rows_of(name: str, rows: Any, lengths: Sequence[int] | None, advice: str = "") -> list[list[Any]]:
    """Values of each token as lists, from lists, tensors or arrays, per completion of `lengths`."""
    rows = _as_list(rows)
    if not isinstance(rows, list):
        raise ValueError(f"`{name}` must be a list with one list per completion, got {_short(rows)}.")
    if lengths is not None and len(rows) != len(lengths):
        raise ValueError(
            f"`{name}` must have one list per completion, got {len(rows)} lists for {len(lengths)} completions."
        )
    read = [_row(name, i, row) for i, row in enumerate(rows)]
    for i, (row, length) in enumerate(zip(read, lengths or map(len, read), strict=True)):
        if len(row) != length:
            raise ValueError(
                f"`{name}[{i}]` must have one entry per token of the completion, got {len(row)} for {length} tokens. "
                f"{advice}"
            )
    return read


def _row(name: str, i: int, row: Any) -> list[Any]:
    row = _as_list(row)
    if not isinstance(row, list):
        raise ValueError(
            f"`{name}[{i}]` must be a list with one entry per token of the completion, got {_short(row)}."
        )
    return [_as_list(value) for value in row]


def _whole_numbers(name: str, i: int, row: list[Any]) -> list[int]:
    for t, value in enumerate(row):
        if not hasattr(value, "__index__"):
            raise ValueError(f"`{name}[{i}][{t}]` must be a whole number, got {_short(value)}.")
    return [operator.index(value) for value in row]


# Log-probabilities ---------------------------------------------------------------------------------------------------


def as_logps(logps: Any) -> np.ndarray:
    """
    Log-probabilities of tokens, `(T,)` in nats, float32: minus infinity where a server of vLLM wrote -9999, NaN for
    `None`.
    """
    values = np.asarray(logps, dtype=np.float32)
    return np.where(values <= _SERVER_INFINITY, -np.inf, values)


def sampled_logps(name: str, logps: Any, sampled: np.ndarray, *, none: float = NOT_GIVEN) -> np.ndarray:
    """
    Log-probabilities of tokens, `(T,)` in nats, as [`as_logps`] reads them, but `none` for `None`. Raises a
    `ValueError` where `sampled`, `(T,)`, is true and a value exceeds 0 by more than rounding.
    """
    values = as_logps(logps)
    above = np.flatnonzero(sampled & (values > _ROUNDING))
    if len(above):
        raise ValueError(
            f"`{name}[{above[0]}]` is {values[above[0]]:.6g}, but a log-probability is at most 0. Return the "
            "logarithm of the probability that the token was sampled with, in nats, not the probability or the "
            "logarithm with another sign."
        )
    return np.where([x is None for x in logps], np.float32(none), values)


def read_logprobs(
    logprobs: Any,
    lengths: Sequence[int] | None = None,
    mask: Sequence[Any] | None = None,
    *,
    none: float = math.nan,
) -> list[list[float]]:
    """
    Log-probability of each token of each completion, checked against the `lengths` of the completions, if known.
    `mask` is 0 on tokens that were not sampled, where any value will do. A `None` becomes `none`.
    """
    if logprobs is None:
        raise ValueError(
            "The completions came without log-probabilities, which rollout correction needs. Set `use_vllm=True`, or "
            "return them as `logprobs` from your `rollout_func`: one list per completion with the log-probability of "
            "each sampled token, after temperature."
        )
    rows = rows_of(
        "logprobs",
        logprobs,
        lengths,
        "Check that `rollout_func` neither drops nor appends tokens (an end-of-sequence token, for instance) after "
        "sampling.",
    )
    for i, row in enumerate(rows):
        for t, value in enumerate(row):
            if isinstance(value, list):
                raise ValueError(
                    f"`logprobs[{i}]` must be a flat list with one number per token, got nested lists. If vLLM "
                    "returned several candidates per token, keep the log-probability of the sampled one."
                )
            if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
                raise ValueError(f"`logprobs[{i}][{t}]` must be a number or None, got {_short(value)}.")
    masks = [np.ones(len(row), bool) for row in rows] if mask is None else [np.asarray(x) != 0 for x in mask]
    return [
        sampled_logps(f"logprobs[{i}]", row, sampled, none=none).tolist()
        for i, (row, sampled) in enumerate(zip(rows, masks, strict=True))
    ]


# A user's function ---------------------------------------------------------------------------------------------------


def validated(rollout_func: Callable[..., Any], warned: set[str]) -> Callable[..., Any]:
    """
    A `rollout_func` whose result is checked before TRL takes it, except log-probabilities, which [`read_logprobs`]
    checks. `warned` collects the keys that a warning named.
    """

    @wraps(rollout_func)
    def checked(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = rollout_func(prompts, *args, **kwargs)
        if not isinstance(result, Mapping):
            raise ValueError(f"`rollout_func` must return a dictionary, got {_short(result)}.")
        if not {"prompt_ids", "completion_ids"} <= result.keys():
            return result  # TRL names the missing keys
        result = dict(result)
        for key in ("prompt_ids", "completion_ids"):
            result[key] = _tokens(key, result[key], len(prompts))
        lengths = [len(ids) for ids in result["completion_ids"]]
        if (mask := result.get("env_mask")) is not None:
            rows = rows_of("env_mask", mask, lengths, "Give 1 to tokens of the model and 0 to all others.")
            result["env_mask"] = [_zeros_and_ones(i, row) for i, row in enumerate(rows)]
        else:
            _warn_about_masks(result, warned)
        if (turn_ids := result.get("turn_ids")) is not None:
            result["turn_ids"] = _checked_turns(turn_ids, lengths)
        _check_fields_of_rewards(result, len(prompts))
        return result

    return checked


def _tokens(name: str, rows: Any, n: int) -> list[list[int]]:
    rows = _as_list(rows)
    if not isinstance(rows, list) or len(rows) != n:
        got = f"{len(rows)} lists" if isinstance(rows, list) else _short(rows)
        raise ValueError(f"`{name}` must have one list of tokens for each of the {n} prompts, got {got}.")
    tokens = [_whole_numbers(name, i, _row(name, i, row)) for i, row in enumerate(rows)]
    if [] in tokens:
        raise ValueError(f"`{name}[{tokens.index([])}]` is empty, but must have at least one token.")
    return tokens


def _zeros_and_ones(i: int, row: list[Any]) -> list[int]:
    for t, value in enumerate(row):
        if value not in (0, 1):
            raise ValueError(
                f"`env_mask[{i}][{t}]` must be 1 on a token of the model and 0 on any other, got {_short(value)}."
            )
    return [int(value) for value in row]


def _checked_turns(turn_ids: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Turn of each token, which never decreases along a completion."""
    advice = "Give the tokens of a tool's answer the number of the turn before it."
    rows = rows_of("turn_ids", turn_ids, lengths, advice)
    for i, turns in enumerate(rows):
        for t, turn in enumerate(turns):
            before = turns[t - 1] if t else 0
            if not hasattr(turn, "__index__") or turn < before:
                raise ValueError(
                    f"`turn_ids[{i}][{t}]` is {turn!r} after {before!r}, but turns follow one another: use whole "
                    "numbers from 0 that never decrease along a completion."
                )
    return [[operator.index(turn) for turn in turns] for turns in rows]


def _check_fields_of_rewards(result: Mapping[str, Any], n: int) -> None:
    """Refuse other lists with fewer entries than completions. TRL would end in a `KeyError`."""
    for key in result.keys() - {"logprobs"}:
        if isinstance(result[key], list) and len(result[key]) < n:
            raise ValueError(
                f"`{key}` has {len(result[key])} entries for {n} completions, and TRL gives the reward functions one "
                "each. Return one entry per completion, or one value that is no list."
            )


def _warn_about_masks(result: Mapping[str, Any], warned: set[str]) -> None:
    """Warn once about each key that looks like a token mask. TRL reads only `env_mask`."""
    completions = [len(ids) for ids in result["completion_ids"]]
    whole = [len(p) + n for p, n in zip(result["prompt_ids"], completions, strict=True)]
    for key in result.keys() - {"prompt_ids", "completion_ids", "logprobs", "turn_ids", *warned}:
        lengths = _lengths_of_mask(result[key])
        if lengths not in (completions, whole):
            continue
        warned.add(key)
        tokens = "the tokens of each completion" if lengths == completions else "prompt and completion"
        warn(
            f"Tokens where `{key}` is 0 may be trained on as if the model had written them: `rollout_func` returns "
            f"`{key}`, which has a 0 or 1 for {tokens}, and no `env_mask`, and TRL gives `{key}` to the reward "
            "functions alone. If it is 0 on tokens of tools or of an environment, return it as `env_mask`, with one "
            "number for each token of the completion."
        )


def _lengths_of_mask(value: Any) -> list[int] | None:
    """Lengths of the rows of a mask with a 0 in it; `None` if the value is no such mask."""
    rows = _as_list(value)
    rows = [_as_list(row) for row in rows] if isinstance(rows, list) else []
    if not rows or not all(isinstance(row, list) for row in rows):
        return None
    values = [_as_list(x) for row in rows for x in row]
    is_mask = all(isinstance(x, (int, float)) and x in (0, 1) for x in values) and 0 in values
    return [len(row) for row in rows] if is_mask else None
