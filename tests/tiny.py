"""
A tiny Qwen2 with a character tokenizer, and a sampler whose policy is not the trainer's.

Functions import the libraries they need, so that a run of tests that need none does not wait for them.
"""

import random
from pathlib import Path

import torch


CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=>.?:"
PROMPTS = ["12 ab=", "3 4=", "a long prompt=", "99="]


def build_tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_tiny_model(folder: Path, seed: int = 0, experts: int = 0, tied: bool = False) -> str:
    import transformers

    tokenizer = build_tiny_tokenizer()
    torch.manual_seed(seed)
    kind = "Qwen3Moe" if experts else "Qwen2"
    moe = {"moe_intermediate_size": 32, "num_experts": experts, "num_experts_per_tok": 2, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,  # a head size of 32 is the smallest that vLLM has CPU kernels for
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=tied,
        **(moe if experts else {}),
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():  # the default initialisation is so flat that every token has the same probability
        if tied:  # and a head that is tied repeats the last token, the more the larger it is
            model.lm_head.weight.mul_(3)
        else:
            model.lm_head.weight.mul_(10)
            model.lm_head.weight[tokenizer.eos_token_id].mul_(3)  # and completions would never end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def build_model_with_code(folder: Path) -> str:
    """
    A tiny model whose configuration, model and tokenizer are code of its own. A part that is imported writes its name to the
    file that the environment variable `RAN` names.
    """
    import json

    build_tiny_model(folder)
    parts = {
        "configuration_own": ("Config", "Qwen2Config", '    model_type = "own"'),
        "modeling_own": ("ForCausalLM", "Qwen2ForCausalLM", "    config_class = OwnConfig"),
        "tokenization_own": ("TokenizerFast", "PreTrainedTokenizerFast", "    pass"),
    }
    for module, (name, base, body) in parts.items():
        lines = ["import os", f"from transformers import {base}"]
        lines += ["from .configuration_own import OwnConfig"] if module == "modeling_own" else []
        lines += [f'print("{module}", file=open(os.environ["RAN"], "a"))', f"class Own{name}({base}):", body]
        (folder / f"{module}.py").write_text("\n".join(lines) + "\n")
    of_model = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    of_tokenizer = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]},
    }
    for file, more in (("config.json", of_model), ("tokenizer_config.json", of_tokenizer)):
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return str(folder)


def prompts(n: int = 32):
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [PROMPTS[i % len(PROMPTS)] for i in range(n)]})


def load_model(path: str, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def length_reward(completions, **kwargs) -> list[float]:
    return [len(completion) / 4 for completion in completions]


class StaleSampler:
    """
    A `rollout_func` whose log-probabilities come from another model than the trainer's, plus noise.

    Completions are random tokens, the same for the same optimizer step, so that two trainers can be compared and a run can
    be resumed.
    """

    def __init__(
        self, model_path: str, *, noise: float = 0.2, seed: int = 0, min_length: int = 1, max_length: int = 8
    ):
        self.model = load_model(model_path)
        self.noise, self.seed, self.lengths = noise, seed, (min_length, max_length)

    def __call__(self, prompts, trainer) -> dict:
        step, rank = trainer.state.global_step, trainer.accelerator.process_index
        return self.sample(
            prompts, trainer.processing_class, key=f"{self.seed} {step} {rank} {trainer.model.training}"
        )

    def sample(self, prompts, tokenizer, key: str) -> dict:
        dice = random.Random(key)
        prompt_ids = [tokenizer(prompt).input_ids for prompt in prompts]
        completion_ids = [self.draw(tokenizer, dice) for _ in prompts]
        logprobs = [
            [min(logp + self.noise * dice.gauss(0, 1), 0.0) for logp in logps]
            for logps in self.score(prompt_ids, completion_ids)
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def draw(self, tokenizer, dice: random.Random) -> list[int]:
        """A completion: random tokens and the end."""
        length = dice.randint(*self.lengths) - 1
        return [*(dice.randrange(3, len(tokenizer)) for _ in range(length)), tokenizer.eos_token_id]

    @torch.no_grad()
    def score(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]  # at the end, where no token looks
        logits = self.model(torch.tensor(padded)).logits
        return [
            of_row[len(prompt) - 1 :].log_softmax(-1)[range(len(completion)), completion].tolist()
            for of_row, prompt, completion in zip(logits, prompts, completions, strict=True)
        ]


# A conversation with tools, in characters: a turn ends with <eos>, and the answer of a tool stands between ">" and "="
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}>{{ m.content }}{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def with_tools(tokenizer, name: str, argument: str, characters: str = "a-m"):
    """Tokenizer of an agent: a turn with one of some characters calls the tool of a name, with the character as argument."""
    tokenizer.chat_template = CHAT_TEMPLATE
    call = {"type": "function", "function": {"name": name, "arguments": {argument: "{character}"}}}
    tool_calls = {
        "open_pattern": f"(?P<character>[{characters}])",
        "close": "<eos>",
        "content": "text",
        "repeats": True,
    }
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {"tool_calls": {**tool_calls, "transform": call}, "content": {"close": "<eos>", "content": "text"}},
    }
    return tokenizer


def conversations(n: int = 32, **columns):
    from datasets import Dataset

    prompts = [[{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}] for i in range(n)]
    return Dataset.from_dict({"prompt": prompts, **{name: [x] * n for name, x in columns.items()}})
