"""Small models with the mixture of sure and unsure tokens that real ones have, made and not trained."""

from pathlib import Path
from typing import Any

import torch


VOCABULARY, EOS = 320, 1

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def _shape(kind: str, width: int, inner: int, layers: int, heads: int, pairs: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"kind": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": pairs, **more}


def _experts(
    width: int, layers: int, heads: int, pairs: int, inner: int, experts: int, taken: int, **more: Any
) -> dict[str, Any]:
    of_experts = {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": taken}
    return _shape("Qwen3Moe", width, 2 * inner, layers, heads, pairs, head_dim=32, **of_experts, **more)


# Shapes by name. Bounds were set on `tune`, and later on the first two of `judge` and on `third-llama`. The published tables
# are of the other two of `third`, and earlier ones of `field`.
SHAPES = {
    "tune-qwen2": _shape("Qwen2", 64, 160, 2, 2, 2),
    "tune-surer": _shape("Qwen3", 96, 192, 3, 3, 3, head_dim=32, sharpness=14),
    "tune-moe": _experts(64, 2, 2, 2, 64, 8, 2),
    "judge-qwen3": _shape("Qwen3", 128, 256, 3, 4, 2, head_dim=32),
    "judge-llama": _shape("Llama", 64, 192, 5, 2, 1),
    "judge-moe-small": _experts(64, 3, 2, 1, 64, 8, 2, norm_topk_prob=True),
    "judge-moe": _experts(128, 3, 4, 2, 96, 16, 4, norm_topk_prob=True),
    "field-qwen2": _shape("Qwen2", 128, 320, 3, 4, 2),
    "field-mistral": _shape("Mistral", 96, 224, 4, 3, 1, sliding_window=None),
    "field-moe": _experts(96, 3, 3, 1, 64, 12, 2, norm_topk_prob=True),
    "third-llama": _shape("Llama", 160, 352, 3, 5, 1),
    "third-qwen3": _shape("Qwen3", 96, 256, 4, 3, 1, head_dim=32),
    "third-moe": _experts(128, 3, 4, 1, 80, 10, 2, norm_topk_prob=True),
}


def build(shape: str, folder: Path, seed: int) -> Any:
    """
    A model, saved to a folder.

    `sharpness` of a shape is the size of its logits: the larger, the surer the model, and the more it repeats itself. A token
    that goes with a large part of its embedding that the head sees leaves little open; one that goes with a small part
    leaves much. Layers at random make it depend on what came before.
    """
    import transformers

    fields = {**_COMMON, **SHAPES[shape]}
    kind, sharpness = fields.pop("kind"), fields.pop("sharpness", 11)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields)).eval()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    size = embedding.shape[1]
    hidden = 8  # what the head does not see
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name and "lm_head" not in name:
                weight.normal_(std=(1.6 if "gate.weight" in name else 1.0) / weight.shape[-1] ** 0.5)
                if "o_proj" in name or "down_proj" in name:
                    weight.mul_(0.9 if "experts" in name else 0.35)  # so that it shows which expert was taken
        sure = torch.rand(VOCABULARY, 1).mul(0.95).add(0.05)
        seen = torch.nn.functional.normalize(torch.randn(VOCABULARY, size - hidden), dim=-1) * sure
        unseen = torch.nn.functional.normalize(torch.ones(VOCABULARY, hidden), dim=-1) * (1 - sure**2).sqrt()
        embedding.copy_(torch.cat([unseen, seen], 1) * size**0.5)
        head.copy_(torch.randn_like(head) * sharpness / size**0.5)
        head[:, :hidden] = 0
        head[EOS] = 0
        head[EOS, 0] = 9 / (size / hidden) ** 0.5 * 0.7
        head[0] = head[EOS] * -3  # padding is hardly ever sampled
        for weight in model.parameters():  # as in a checkpoint in bfloat16
            weight.copy_(weight.bfloat16())
    model.save_pretrained(folder)
    return model


def updated(
    model: Any, sequences: torch.Tensor, steps: int, learning_rate: float, seed: int, *, fixed: bool = False
) -> list[dict[str, torch.Tensor]]:
    """
    Weights after 0, 1, ... optimizer steps of policy gradients with rewards at random, anew in each step unless they are
    `fixed`. The model stays as it is.
    """
    import copy

    model = copy.deepcopy(model)
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    of_all = torch.randn(len(sequences), 1, generator=dice) if fixed else None
    for _ in range(steps):
        chosen = torch.randperm(len(sequences), generator=dice)[:32]
        batch = sequences[chosen]
        advantages = torch.randn(len(batch), 1, generator=dice) if of_all is None else of_all[chosen]
        logps = model(input_ids=batch).logits[:, :-1].log_softmax(-1).gather(-1, batch[:, 1:, None])[..., 0]
        (-(advantages * logps).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return weights


def learned(
    model: Any, batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], learning_rate: float
) -> list[dict[str, torch.Tensor]]:
    """
    Weights before each batch of `(ids, sampled, advantages)`: policy gradients on what was sampled, as in a run. `sampled` is
    1 on the tokens of completions. The model stays as it is.
    """
    import copy

    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    weights = []
    for ids, sampled, advantages in batches:
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        logps = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        (-(advantages[:, None] * logps * sampled[:, 1:]).sum() / sampled.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights
