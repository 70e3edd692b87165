"""
`rollout_compile`: what is compiled, and what a compiler is told in other words. Torch only.

Operations one by one and a compiler want different words for the same numbers. On a CPU, the first are fastest in arithmetic,
as operations on booleans are not vectorised; the second vectorises comparisons, but neither a test for NaN nor another look at
the same bytes, and it reads booleans one by one.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def compiled(function: Callable) -> Callable:
    """
    Compile a function of tensors at its first call, for any number of rows and tokens.

    It is one graph (`tests/test_compile.py`), and is not held to that at run time: what makes the compiler give up after many
    changes of settings must not end a run.

    Args:
        function (`Callable`):
            A function of a module.

    Returns:
        `Callable`: the same numbers.

    Raises:
        `RuntimeError`: when it is called, if there is no compiler that works.
    """

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return _compiled(function)(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join([line for line in str(error).splitlines() if line][:2])
            raise RuntimeError(
                f"`rollout_compile` is True, but `torch.compile` does not work here: {reason} Install what it needs, or set "
                "it to False: the numbers are the same."
            ) from error

    return call


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def forget():
    """Compile anew at the next call."""
    _compiled.cache_clear()
    torch.compiler.reset()


def as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 where a mask is not 0, else 0. The bytes of booleans are read as numbers: CPUs convert those six times as fast."""
    if mask.dtype != torch.bool:
        mask = mask.detach() != 0
    return mask.to(dtype) if torch.compiler.is_compiling() else mask.view(torch.uint8).to(dtype)


def zero_unless(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`x` where `counts` is 1, and 0 where it is 0, whatever `x` is there."""
    if torch.compiler.is_compiling():
        return torch.where(counts > 0, x, 0.0)
    return x.nan_to_num(0.0, 0.0, 0.0).mul_(counts)  # NaN * 0 is NaN


def expm1(x: torch.Tensor) -> torch.Tensor:
    """`exp(x) - 1`, with all digits of a small `x`."""
    if not torch.compiler.is_compiling():
        return torch.expm1(x)
    # For CPUs, a compiler takes the difference of two numbers near 1. Below a half, so many terms of the series are all of it
    series = torch.ones_like(x)
    for n in range(11, 1, -1):
        series = 1.0 + series * x * (1 / n)
    return torch.where(x.abs() < 0.5, series * x, x.exp() - 1.0)
