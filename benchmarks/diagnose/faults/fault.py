"""A fault as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Fault:
    """A fault, and what injects it. What is not given stays as it should be."""

    cause: str  # that `diagnose` should name; `unknown` where none covers the fault
    what: str  # is wrong, in a line
    engine: Mapping[str, Any] = field(default_factory=dict)  # arguments of vLLM's engine
    sampling: Mapping[str, Any] = field(default_factory=dict)  # arguments of vLLM's `SamplingParams`
    # What becomes of a weight, by name, on its way into the sampler
    weights: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    # Changes the trainer's model, and returns what undoes it
    trainer: Callable[[torch.nn.Module], Callable[[], None]] | None = None
    # How the trainer lays out what it scores: `attend_padding` (the mask of attention has no zeros), `drop_prompt` (tokens
    # that the end of the prompt lacks), `prepend` (tokens before the prompt), `retokenize` (the last token of a tool's answer
    # is another one), `other_ids` (some tokens of the completion are others), `lose` (what later turns do not read)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    rows: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None  # changes a row of a dump
    # Where the weights of trainer and sampler move apart: `age` (samples come from older weights), `step` (no weights are
    # pushed), `visit` (a batch is trained on several times), `adapter` (it grows, and is merged in bfloat16), `run` (the
    # policy collapses), `engine` (the sampler changes by itself), `prompt` (some prompts are read as others), `twice` (an
    # adapter grows, and counts twice), `request` (some are sampled in another way), `replica` (one gets no weights), `budget`
    # (the engine forces a token), `cache` (old prefixes are read) or `base` (each push changes the weights that are frozen)
    drifts: str | None = None
