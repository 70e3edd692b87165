"""
A tiny vision-language model with a processor, pictures, and a sampler of random tokens.

vLLM's Idefics3 needs no torchvision, which PyPI does not have for a CPU build of torch. Qwen2-VL, Gemma 3 and LLaVA need it.
"""

import random
from pathlib import Path

import torch

from tests.tiny import PROMPTS, build_tiny_tokenizer


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
AROUND, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
TOKENS_OF_AN_IMAGE = [AROUND, GLOBAL, IMAGE, IMAGE, IMAGE, IMAGE, AROUND]


def build_vision_model(folder: Path) -> str:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models import idefics3
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    # it needs no torchvision, but transformers hides it without, as a comment in its module has a class of torchvision's
    idefics3.Idefics3ImageProcessorPil = Idefics3ImageProcessorPil
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_tokens([GLOBAL], special_tokens=True)
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    text = LlamaConfig(
        **sizes, **ends, bos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer), num_hidden_layers=2,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    config = Idefics3Config(
        vision_config={**sizes, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
        text_config=text,
        image_token_id=image,
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
        head.mul_(10)
        head[tokenizer.eos_token_id].mul_(3)
        # the token of an image must not be sampled, as it would have no image: one coordinate is the same for all tokens
        embedding[:, 0] = 0.1
        head[image] = 0
        head[image, 0] = -10
    model.generation_config.update(**ends)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def questions(n: int = 64, images: bool = True):
    """Prompts about four pictures, or the same prompts without pictures."""
    from datasets import Dataset
    from PIL import Image

    columns = {"prompt": [[{"role": "user", "content": PROMPTS[i % 4][:-1]}] for i in range(n)]}
    if images:
        columns["image"] = [Image.new("RGB", (32, 32), COLOURS[i % 4]) for i in range(n)]
    return Dataset.from_dict(columns)


def length_reward(completions, **kwargs) -> list[float]:
    return [len(completion[0]["content"]) / 4 for completion in completions]


def random_sampler(prompts, trainer) -> dict:
    """A `rollout_func` that draws tokens and log-probabilities: the same for the same optimizer step."""
    dice, processor = random.Random(trainer.state.global_step), trainer.processing_class
    ids = [
        processor.apply_chat_template([x], add_generation_prompt=True, tokenize=True, return_dict=True)
        for x in prompts
    ]
    completions = [[dice.randrange(3, 40) for _ in range(dice.randint(2, 8))] for _ in prompts]
    logprobs = [[dice.gauss(-3.0, 0.5) for _ in completion] for completion in completions]
    return {"prompt_ids": [x["input_ids"][0] for x in ids], "completion_ids": completions, "logprobs": logprobs}


def expand_once(trainer) -> None:
    """Give vLLM one token for each image, which it expands itself. TRL 1.16 gives it all of them."""
    generate, tokenizer = trainer.vllm_generation.generate, trainer.processing_class.tokenizer
    image, expanded = tokenizer.convert_tokens_to_ids(IMAGE), tokenizer.convert_tokens_to_ids(TOKENS_OF_AN_IMAGE)

    def collapsed(ids: list[int]) -> list[int]:
        at, n = 0, len(expanded)
        while at <= len(ids) - n:
            if ids[at : at + n] == expanded:
                ids = [*ids[:at], image, *ids[at + n :]]
            at += 1
        return ids

    trainer.vllm_generation.generate = lambda prompts, **kwargs: generate(
        prompts=[collapsed(ids) for ids in prompts], **kwargs
    )


def vision_logps(model, batch: dict) -> torch.Tensor:
    """Log-probabilities of the completions under a model, with gradient, without any of TRL's code."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    of_images = {key: batch[key] for key in ("pixel_values", "pixel_attention_mask") if key in batch}
    length = batch["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask, **of_images).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
