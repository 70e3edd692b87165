"""The card of a trained model names the model and the correction."""

import pytest
import yaml

from tests.launching import HAS_ASYNCHRONOUS
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build
from trl_rollout_corr import __version__
from trl_rollout_corr.trainers.card import complete_card


def test_a_checkpoint_has_a_card(tiny_model_path, tmp_path, capsys):
    trainer = build(
        *TRAINERS["grpo"], tiny_model_path, tmp_path / "mine", sampler=StaleSampler(tiny_model_path),
        rollout_is="sequence", bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.1,
        save_strategy="steps", save_steps=2, max_steps=2,
    )  # fmt: skip
    trainer.train()
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "# Model Card for mine" in card
    assert "fine-tuned version of `tiny0`" in card
    assert f"handled by trl-rollout-corr {__version__}, with" in card
    # no field of the default preset is in effect, and the weights are reported and not applied
    line = "sequence weights up to 2 (reported only); seq_mean_k1 in [0.909091, 1.1]; bypass, ppo_clip"
    assert f"`{line}`" in card
    assert f"{__version__}: {line}\n" in capsys.readouterr().out
    assert f"- trl-rollout-corr: {__version__}" in card
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert {"trl", "grpo", "rollout-correction", "trl-rollout-corr"} <= set(metadata["tags"])
    assert metadata["trl_rollout_corr"] == {"model": "tiny0", "correction": line}
    assert "None" not in card
    trainer.create_model_card()  # as a user might, without a name
    assert "# Model Card for mine" in (tmp_path / "mine" / "README.md").read_text()


@pytest.mark.parametrize("text", ["", "# Another template\n"])
def test_a_card_of_another_form_gets_it_at_its_end(text):
    card = complete_card(text, "org/model", "out", "disabled; no weights")
    assert card.startswith(text)
    assert "`disabled; no weights`" in card


def test_models_of_every_trainer_are_found_by_the_name_of_the_package():
    for name in ("grpo", "rloo", *(["async_grpo"] if HAS_ASYNCHRONOUS else [])):
        trainer_class, _ = TRAINERS[name]
        assert {"trl", "rollout-correction", "trl-rollout-corr"} <= set(trainer_class._tag_names), name
