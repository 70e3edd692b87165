"""Requests to vLLM, apart from the engine. The engine itself is in `test_vllm.py`."""

import pytest

from trl_rollout_corr.trainers.logprobs import check_logprobs


def test_complete_log_probabilities_pass():
    check_logprobs([[1, 2], [3]], [[-0.1, None], [-0.2]])


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, "without log-probabilities"),
        ([[-0.1, -0.2]], "got 1 lists for 2 completions"),
        ([[-0.1, -0.2], []], r"`logprobs\[1\]` must have one entry per token of the completion, got 0 for 1 tokens"),
        ([[-0.1, -0.2], [[-0.3]]], r"`logprobs\[1\]` must be a flat list"),
    ],
)
def test_incomplete_log_probabilities_do_not(logprobs, message):
    with pytest.raises(ValueError, match=message):
        check_logprobs([[1, 2], [3]], logprobs)
