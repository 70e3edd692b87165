"""
Log-probabilities over the tokens that truncated sampling kept: `rollout_support: replay`.

With `top_p`, `top_k` or `min_p`, vLLM draws a token from a kept set `S`, and its log-probability is normalised over
`S`. So is the trainer's here:

    log p(token) = logit(token) - log sum_{k in S} exp(logit(k))

vLLM returns the kept sets as candidates, where the log-probability of a cut token is minus infinity. The trainer needs
only the logits of kept tokens, from the hidden states below the head and the rows of the head.

`B` completions, `T` completion tokens, `M` kept tokens of a completion, `V` tokens of the vocabulary, `H` the size of
a hidden state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag


# Largest kept set without `top_k`; vLLM then gets this `top_k`
LARGEST = 512
# Candidates above `top_k`: vLLM keeps all tokens whose logit equals the logit of the last one
_TIES = 8
# Elements of the head's rows, or of its gradient, in memory at once
_ELEMENTS = 2**24

# Columns of a batch. A token with a large set does not widen the others, as it would in a tensor `(B, T, K)`
KEPT = "rollout_corr_kept"  # (B, M), ids of the kept tokens, one sampled token after another; then -1
KEPT_SIZES = "rollout_corr_kept_sizes"  # (B, T), number of kept tokens of each token


class KeptTokens:
    """
    Replay of the tokens that truncated sampling kept.

    The kept sets are read from candidates that a colocated vLLM, the `generation` of TRL, returns. Without `top_k`,
    sampling gets a `top_k` of [`LARGEST`], so that the candidates hold every kept set. `temperature` divides logits,
    and `unwrap` returns a model without its wrappers.
    """

    def __init__(self, generation: Any, temperature: float, unwrap: Callable[[Any], Any]) -> None:
        self.temperature, self._unwrap = temperature, unwrap
        self._sets: list[list[list[int]]] | None = None  # ids per completion and token, of the last generation
        engine = generation.llm.llm_engine
        self.vocabulary = engine.model_config.get_vocab_size()
        overrides = generation.generation_kwargs
        top_k = overrides.get("top_k", generation.top_k) or 0
        if top_k <= 0:
            overrides.pop("top_k", None)
            top_k = generation.top_k = min(LARGEST, self.vocabulary)
        generation.logprobs = number = min(top_k + _TIES, self.vocabulary)
        for config in (engine.model_config, engine.vllm_config.model_config):
            if 0 <= config.max_logprobs < number:  # vLLM reads it with every request
                config.max_logprobs = number

    def read(
        self,
        completion_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[Sequence[float | None]]],
        token_ids: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[float | None]]:
        """
        Store the kept sets of a generation, and return the log-probabilities of its sampled tokens. A token with a set
        larger than the candidates gets no log-probability, and `rollout_nan_policy` decides about it.
        """
        sampled: list[list[float | None]] = []
        self._sets = []
        for ids, rows, candidates in zip(completion_ids, logprobs, token_ids, strict=True):
            sampled.append([])
            self._sets.append([])
            for token, row, tokens in zip(ids, rows, candidates, strict=True):
                inside = [k for k, logp in zip(tokens, row, strict=True) if logp is not None and logp > -math.inf]
                complete = len(inside) < len(tokens) or len(tokens) >= self.vocabulary
                sampled[-1].append(row[tokens.index(token)] if complete else None)
                self._sets[-1].append(inside)
        return sampled

    def clear(self) -> None:
        """Forget the kept sets."""
        self._sets = None

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> dict[str, torch.Tensor]:
        """Columns for a padded batch that was just generated."""
        return {} if self._sets is None else columns_of_sets(self._sets, logits_to_keep, input_ids.device)

    def alone(self, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        """Columns for completion `i` of a batch, alone and without padding."""
        if KEPT not in batch:
            return {}
        # kept tokens follow the order of the completion, and padding comes last
        n = max(int(batch["completion_mask"][i].sum()), 1)
        return {KEPT: batch[KEPT][[i]], KEPT_SIZES: batch[KEPT_SIZES][[i], :n]}

    def within(self, forward: Callable[..., tuple], columns: Mapping[str, torch.Tensor]) -> Callable[..., tuple]:
        """TRL's `forward`, over the kept tokens in the columns of a batch, if there are any."""
        if KEPT not in columns:
            return forward
        return partial(over_kept_tokens, forward, columns, self.temperature, self._unwrap)


def columns_of_sets(sets: list[list[list[int]]], length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Columns of a batch from kept sets, for `length` tokens of a completion."""
    ids = [list(chain.from_iterable(row)) for row in sets]
    sizes = [[len(tokens) for tokens in row] for row in sets]
    longest = max(map(len, ids), default=0)
    padded = {
        KEPT: [row + [-1] * (longest - len(row)) for row in ids],
        KEPT_SIZES: [row + [0] * (length - len(row)) for row in sizes],
    }
    return {name: torch.tensor(rows, dtype=torch.int32, device=device) for name, rows in padded.items()}


def over_kept_tokens(
    forward: Callable[..., tuple],
    columns: Mapping[str, torch.Tensor],
    temperature: float,
    unwrap: Callable[[Any], Any],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """
    TRL's forward pass with log-probabilities over kept sets. Tokens without a set keep TRL's log-probabilities.
    Entropies stay TRL's, over the whole vocabulary.
    """
    base = unwrap(model)
    base = base.get_base_model() if hasattr(base, "get_base_model") else base  # the base of an adapter
    states: list[torch.Tensor] = []  # for each part of the batch
    hook = base.base_model.register_forward_hook(
        lambda module, inputs, output: states.append(output.last_hidden_state[:, -logits_to_keep - 1 : -1])
    )
    try:
        logps, *others = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
    finally:
        hook.remove()
    head = base.get_output_embeddings()
    has_set, sets = _sets_of(columns[KEPT], columns[KEPT_SIZES], input_ids[:, -logits_to_keep:])
    if has_set.any():
        new_logps = kept_logps(torch.cat(states)[has_set], head.weight, head.bias, sets, temperature)
        if has_set[attention_mask[:, -logits_to_keep:].bool()].all():
            logps = logps.detach()  # no loss depends on them, and the backward pass would cover the vocabulary
        logps = logps.masked_scatter(has_set, new_logps.to(logps.dtype))
    return logps, *others


class Sets(NamedTuple):
    """
    Kept sets of `N` tokens, one after the other: the `ids`, `(P,)`, of all `P` kept tokens, the `sizes`, `(N,)`, of
    the sets, and the place `own`, `(N,)`, of each sampled token among the `P`.
    """

    ids: torch.Tensor
    sizes: torch.Tensor
    own: torch.Tensor


def _sets_of(ids: torch.Tensor, sizes: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, Sets]:
    """Boolean mask, `(B, T)`, of the tokens with a known set that contains them, and their sets."""
    # where only some tokens of a completion are given, there are more ids than the sizes say
    used = torch.arange(ids.shape[1], device=tokens.device) < sizes.sum(1, keepdim=True)
    sizes, ids = sizes.flatten().long(), ids[used]
    of_token = _token_indices(sizes)
    sampled = ids == tokens.flatten()[of_token]
    has_set = torch.zeros_like(sizes, dtype=torch.bool)
    has_set[of_token[sampled]] = True
    used = has_set[of_token]
    return has_set.view_as(tokens), Sets(ids[used], sizes[has_set], sampled[used].nonzero()[:, 0])


def _token_indices(sizes: torch.Tensor) -> torch.Tensor:
    """Index of the token that each kept token belongs to, `(P,)`."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def kept_logps(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sets: Sets, temperature: float
) -> torch.Tensor:
    """
    Log-probabilities of sampled tokens over their kept sets, `(N,)`, in float32; from hidden states, `(N, H)`, and the
    head of a model: `weight`, `(V, H)`, and `bias`, `(V,)`.
    """
    logps: torch.Tensor = _KeptLogps.apply(states, weight, bias, *sets, temperature)
    return logps


class _KeptLogps(torch.autograd.Function):
    """
    [`kept_logps`] as an autograd function. It holds the rows of the head for a part of the tokens at a time, and
    writes their gradient once.

    With `p` the probabilities over a set, the gradient of a log-probability is, for the logit of a kept token `k`,
    `1[k is the sampled token] - p(k)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        sizes: torch.Tensor,
        own: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        logits = torch.zeros(len(ids), device=states.device)
        normalizer = torch.zeros(len(sizes), device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            for part, places, inside in _parts(sizes, states.shape[1]):
                rows = ids[places].long()
                set_logits = torch.einsum("nh,nkh->nk", states[part].float(), weight[rows].float())
                if bias is not None:
                    set_logits = set_logits + bias[rows].float()
                set_logits = (set_logits / temperature).masked_fill(~inside, -math.inf)
                normalizer[part] = set_logits.logsumexp(1)
                logits[places[inside]] = set_logits[inside]
        ctx.save_for_backward(
            states, weight, bias, ids, sizes, own, (logits - normalizer[_token_indices(sizes)]).exp()
        )
        ctx.temperature = temperature
        # log p(token) = logit(token) - log sum_{k in S} exp(logit(k))
        return logits[own] - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, ids, sizes, own, probabilities = ctx.saved_tensors
        of_token = _token_indices(sizes)
        by_logit = -probabilities
        by_logit[own] += 1
        by_logit *= slopes.float()[of_token] / ctx.temperature
        of_states = of_weight = of_bias = None
        with torch.autocast(states.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_states = torch.zeros_like(states)
                for part, places, inside in _parts(sizes, states.shape[1]):
                    factors, rows = by_logit[places].masked_fill(~inside, 0.0), ids[places].long()
                    of_states[part] = torch.einsum("nk,nkh->nh", factors, weight[rows].float()).to(states.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = _gradient_of_rows(weight, states.float(), ids, of_token, by_logit)
            if ctx.needs_input_grad[2]:
                of_bias = (
                    torch.zeros_like(bias, dtype=torch.float32).index_add_(0, ids.long(), by_logit).to(bias.dtype)
                )
        return of_states, of_weight, of_bias, None, None, None, None


def _parts(sizes: torch.Tensor, n_hidden: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """
    Parts of the tokens with sets of similar size: their indices, `(n,)`, the places of their kept tokens, `(n, k)`,
    and a mask of the places inside the set. A set of one token is in no part, because its log-probability is 0.
    """
    largest, starts = int(sizes.max()), sizes.cumsum(0) - sizes
    for width in (2**i for i in range(1, largest.bit_length() + 1)):
        alike = ((sizes > width // 2) & (sizes <= width)).nonzero()[:, 0]
        width = min(width, largest)
        for part in alike.split(max(1, _ELEMENTS // (width * n_hidden))):
            steps = torch.arange(width, device=sizes.device)
            inside = steps < sizes[part, None]
            yield part, torch.where(inside, starts[part, None] + steps, 0), inside


def _gradient_of_rows(
    weight: torch.Tensor, states: torch.Tensor, ids: torch.Tensor, of_token: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """
    Gradient of the head, `(V, H)`: for each row the sum over the tokens that kept it of a factor, `(P,)`, times a
    state. Each row is summed in float32 and written once.
    """
    gradient, order = torch.zeros_like(weight), ids.argsort()
    rows, counts = ids[order].long().unique_consecutive(return_counts=True)
    of_token, factors = of_token[order], factors[order]
    last = counts.cumsum(0)
    first, n = last - counts, max(1, _ELEMENTS // weight.shape[1])
    for part in range(0, len(rows), n):
        start, end = int(first[part]), int(last[part : part + n][-1])
        sums = embedding_bag(
            of_token[start:end],
            states,
            first[part : part + n] - start,
            mode="sum",
            per_sample_weights=factors[start:end],
        )
        gradient[rows[part : part + n]] = sums.to(gradient.dtype)
    return gradient
