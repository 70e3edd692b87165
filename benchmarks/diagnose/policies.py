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
_NARROW = {
    "kind": "Qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
# Shapes by name. `tune` is what bounds were set on, `judge` is what the published matrix is of.
SHAPES: dict[str, dict[str, Any]] = {
    "tune-qwen2": {
        "kind": "Qwen2",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "tune-llama": {
        "kind": "Llama",
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "tune-qwen3": {
        "kind": "Qwen3",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
    },
    "tune-sure": {
        "kind": "Llama",
        "sharpness": 16,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "tune-surer": {**_NARROW, "sharpness": 14},
    "tune-loops": {**_NARROW, "sharpness": 14},
    "tune-surest": _NARROW,
    "judge-qwen3": {
        "kind": "Qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "judge-llama": {
        "kind": "Llama",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "tune-moe": {
        "kind": "Qwen3Moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "judge-moe-small": {
        "kind": "Qwen3Moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "judge-moe": {
        "kind": "Qwen3Moe",
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
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
