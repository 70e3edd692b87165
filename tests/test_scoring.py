"""A text that is scored alone after a push: at temperature 1, and within the memory of a training step."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer import utils

from tests.tiny import StaleSampler
from tests.training import TRAINERS, build
from trl_rollout_corr.trainers import scoring
from trl_rollout_corr.trainers.scoring import score_text


HAS_FUSED_HEAD = hasattr(utils, "add_fused_lm_head")
VOCABULARY, N = 60_000, 500


class LargestTensor(TorchDispatchMode):
    """Numbers of the largest tensor that an operation has made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return made


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
def test_a_text_has_the_log_probabilities_of_temperature_1(temperature, tiny_model_path, tmp_path):
    fields = {"temperature": temperature, "rollout_correction": "decoupled_token_is"}
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path), **fields)
    ids, forward = torch.randint(3, 40, (1, 30)), trainer.model.forward
    with torch.no_grad():
        expected = trainer.model(ids).logits[0, 9:-1].log_softmax(-1).gather(1, ids[0, 10:, None])[:, 0]
        found = trainer._score_text(ids, 20)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert trainer.model.forward == forward


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, **shape, num_key_value_heads=2, tie_word_embeddings=True)
    )
    if HAS_FUSED_HEAD:
        utils.add_fused_lm_head(model, temperature=0.5)  # as in a trainer
    return model


ACCELERATOR = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)


ONLY_FUSED = pytest.mark.skipif(not HAS_FUSED_HEAD, reason="this TRL computes logits in training too")


@pytest.mark.parametrize("from_logits", [pytest.param(False, marks=ONLY_FUSED), True])
def test_a_score_makes_no_tensor_of_all_logits(model, from_logits, monkeypatch):
    ids = torch.randint(3, VOCABULARY, (1, N + 10), generator=torch.Generator().manual_seed(0))
    if from_logits:  # before 1.16, where a training step has them too
        monkeypatch.delattr(scoring.utils, "add_fused_lm_head", raising=False)
    with torch.no_grad(), LargestTensor() as largest:
        score_text(model, ACCELERATOR, None, ids, N)
    assert (largest.numbers >= N * VOCABULARY) == from_logits, largest.numbers


def test_a_score_that_fails_leaves_the_model_as_it_was(model, monkeypatch):
    forward = model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_text(model, ACCELERATOR, None, torch.randint(3, 9, (1, 8)), 4)
    assert model.forward == forward
