"""What `grpo.yaml` names: prompts and a reward for GSM8K, whose answers end with `#### 18`."""

import re


def prompts(cfg, *args, **kwargs):
    """Axolotl calls this for the `type` of the data set: a function of an example, and how to map it."""

    def prompt_of(example, tokenizer=None):
        return {"prompt": example["question"], "answer": example["answer"].rpartition("#### ")[2]}

    return prompt_of, {"remove_columns": ["question"]}


def right_answer(completions, answer, **kwargs):
    """1 for each completion whose last number is the answer."""
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in completions]
    return [float(found[-1:] == [right.replace(",", "")]) for found, right in zip(numbers, answer, strict=True)]
