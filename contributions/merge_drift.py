"""TRL's push of a LoRA adapter changes the frozen base in bfloat16. Needs trl, peft and a CPU: python merge_drift.py"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_generation import VLLMGeneration


torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
base = Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, num_key_value_heads=4, **sizes)).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad and ".base_layer." in name}
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4)
# What a push reads, by TRL's own code: `sync_weights` sends each weight that it yields to vLLM
no_shards = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
push = SimpleNamespace(model=model, _dist=no_shards, _fix_param_name_to_vllm=lambda name, **kwargs: name)
for step in range(1, 301):
    ids = torch.randint(1024, (4, 32))
    model(ids, labels=ids).loss.backward()  # the base is frozen: only the adapter gets a gradient
    optimizer.step(), optimizer.zero_grad()
    for _ in VLLMGeneration._iter_named_params(push):
        pass
    if step in (1, 15, 100, 300):
        now = dict(model.named_parameters())
        changed = sum((now[name] != p).sum() for name, p in frozen.items()) / sum(p.numel() for p in frozen.values())
        print(f"after {step:3} pushes, {changed:.1%} of the frozen weights have changed")
