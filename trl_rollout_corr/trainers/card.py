"""The model card of a trained model: TRL's, with the model and the correction named, for readers and as metadata."""

from pathlib import Path

import yaml

from ..messages import __version__


# Tags of models on the Hub: the subject, and the name of this package. The Hub finds models by tags, and not by other metadata
TAGS = ["rollout-correction", "trl-rollout-corr"]


def complete_card(text: str, model: str, output_dir: str, correction: str) -> str:
    """Add the model and the correction, in one line, to TRL's model card. Parts of an unexpected form are not changed."""
    about = (
        f"The mismatch between the policy that sampled and the policy that trained was handled by "
        f"trl-rollout-corr {__version__}, with `{correction}`.\n\n"
    )
    text = text.replace("# Model Card for None", f"# Model Card for {Path(output_dir).name}")
    text = text.replace("[None](https://huggingface.co/None)", f"`{Path(model).name}`")  # TRL does not link folders
    text = text.replace('model="None"', f'model="{output_dir}"')
    text = text.replace(
        "### Framework versions\n\n", f"{about}### Framework versions\n\n- trl-rollout-corr: {__version__}\n"
    )
    if text.startswith("---\n"):
        metadata = {"trl_rollout_corr": {"model": Path(model).name, "correction": correction}}
        text = f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}{text[4:]}"
    return text if about in text else f"{text}\n{about}"
