"""Settings under which the sampler's log-probabilities are not comparable to the trainer's are found at the start."""

import json
import math
import re
import threading
import warnings
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from accelerate import PartialState
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from tests.asynchronous import parts_for_a_cpu
from tests.launching import serving
from tests.training import TRAINERS, assert_in_step, build, build_checked, config_fields, logged, messages
from trl_rollout_corr.trainers.vllm_engine import check_server_logprobs, read_configuration


both_trainers = pytest.mark.parametrize("config_class", [config for _, config in TRAINERS.values()])


@both_trainers
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_p": 0.9}, "`top_p=0.9`"),
        ({"top_k": 50}, "`top_k=50`"),
        ({"min_p": 0.05}, "`min_p=0.05`"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty=1.1`"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, r"`structured_outputs='\[0-9\]\+'`"),
        ({"generation_kwargs": {"presence_penalty": 0.5, "top_p": 0.8}}, "`top_p=0.8`, `presence_penalty=0.5`"),
        ({"generation_kwargs": {"min_tokens": 4}}, "`min_tokens=4`"),
        ({"generation_kwargs": {"logit_bias": {5: 1.0}}}, "`logit_bias="),
    ],
)
def test_what_distorts_the_sampler_is_named_once(config_class, fields, named, tmp_path):
    with pytest.warns(UserWarning, match=named) as caught:
        config_class(**config_fields(tmp_path, use_vllm=True, **fields))
    assert len([w for w in caught if re.search("changes? the distribution", str(w.message))]) == 1


@both_trainers
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"top_k": -1, "generation_kwargs": {"presence_penalty": 0.0, "min_tokens": 0, "stop": ["!"]}},
        {"generation_kwargs": {"logprobs": 0, "n": 1, "temperature": 0.7}, "temperature": 0.7},
        {"use_vllm": False, "top_p": 0.9},  # a rollout function, which does as it likes
    ],
)
def test_neutral_settings_are_silent(config_class, fields, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config_class(**config_fields(tmp_path, **{"use_vllm": True, **fields}))


@both_trainers
@pytest.mark.parametrize("temperature", [0, -1.0, 0.001, math.nan, math.inf])
def test_temperatures_of_which_vllm_has_another_distribution_are_refused(config_class, temperature, tmp_path):
    with pytest.raises(ValueError, match=r"`temperature` must be a number of at least 0.01, got "):
        config_class(**config_fields(tmp_path, use_vllm=True, temperature=temperature))


@both_trainers
def test_misspelt_options_of_sampling_are_refused_before_vllm_starts(config_class, tmp_path):
    fields = config_fields(tmp_path, use_vllm=True, generation_kwargs={"min_token": 3})
    with pytest.raises(ValueError, match=r"`generation_kwargs` for 'min_token' is 3, .* Did you mean 'min_tokens'\?"):
        config_class(**fields)
    with pytest.warns(UserWarning, match="Did you mean 'min_tokens'.*If the vLLM of your server knows it"):
        config_class(**fields, vllm_mode="server")


@both_trainers
def test_one_seed_for_all_completions_is_warned_about(config_class, tmp_path):
    with pytest.warns(UserWarning, match="`seed` to 3, which vLLM uses for each completion.*are equal"):
        config_class(**config_fields(tmp_path, use_vllm=True, generation_kwargs={"seed": 3}))


@both_trainers
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"temperature": 0.7}, r"for 'temperature' is 0.7, .* scored with `temperature`, which is 1.0"),
        ({"logprobs": None}, r"for 'logprobs' must be 0, got None"),
        ({"logprobs": 5}, r"for 'logprobs' must be 0, got 5"),
        ({"n": 2}, r"for 'n' must be 1, got 2"),
    ],
)
def test_what_breaks_the_ratio_is_refused(config_class, overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_class(**config_fields(tmp_path, use_vllm=True, generation_kwargs=overrides))


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_a_server_must_return_processed_logprobs(mode):
    with pytest.raises(
        ValueError, match=f"`--logprobs-mode {mode}`.*Restart it with `--logprobs-mode processed_logprobs`"
    ):
        check_server_logprobs(mode, temperature=0.7)


def test_raw_logprobs_of_a_server_are_the_same_at_temperature_one():
    check_server_logprobs("processed_logprobs", temperature=0.7)
    with pytest.warns(UserWarning, match="agree only without penalties"):
        check_server_logprobs("raw_logprobs", temperature=1.0)
    with pytest.raises(ValueError, match="every ratio would be wrong"):
        check_server_logprobs("processed_logits", temperature=1.0)


class Silent(BaseHTTPRequestHandler):
    """A server that answers what `answers` has for a path, and nothing else."""

    answers: dict[str, object] = {}

    def do_GET(self):
        path = self.path.split("?")[0]
        self.send_response(200 if path in self.answers else 404)
        self.end_headers()
        self.wfile.write(json.dumps(self.answers.get(path, {})).encode())

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("tells", [True, False])
def test_the_configuration_of_a_server_is_read(tells):
    of_vllm = {"model_config": {"logprobs_mode": "raw_logprobs"}}

    class Server(Silent):
        answers = {"/server_info": {"vllm_config": of_vllm}} if tells else {}

    with HTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever).start()
        url = f"http://127.0.0.1:{http.server_port}"
        with nullcontext() if tells else pytest.raises(RuntimeError, match="Start it with `VLLM_SERVER_DEV_MODE=1`"):
            assert read_configuration(url) == of_vllm
        http.shutdown()


# A real server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def server(request, tiny_model_path, tmp_path_factory):
    """A vLLM server, and its `--logprobs-mode`."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(tiny_model_path, log, "--max-model-len", "64", "--logprobs-mode", request.param) as url:
        yield request.param, url


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_real_server(server, kind, tiny_model_path, tmp_path, monkeypatch):
    # Weights go to a server through NCCL, which needs GPUs: this trains without moving, on the weights the server has.
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *args, **kwargs: None)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: None)
    mode, url = server

    def make(temperature: float):
        return build(
            *TRAINERS[kind], tiny_model_path, tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
            temperature=temperature, learning_rate=0.0,
        )  # fmt: skip

    if mode == "raw_logprobs":
        with pytest.raises(ValueError, match="Restart it with `--logprobs-mode processed_logprobs`"):
            make(temperature=0.7)
        return
    trainer = make(temperature=0.7)
    trainer.train()
    assert_in_step(trainer)


@pytest.mark.slow
@pytest.mark.vllm
def test_weights_that_do_not_reach_a_server_are_named(server, tiny_model_path, tmp_path, monkeypatch, caplog):
    mode, url = server
    if mode == "raw_logprobs":
        pytest.skip("no run with these log-probabilities")
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *args, **kwargs: None)
    PartialState()  # TRL's client logs through Accelerate
    transfer = parts_for_a_cpu().DiskWeightTransfer(url, tmp_path / "weights")
    transfer.init_weight_transfer()

    def train(sync_weights):
        monkeypatch.setattr(VLLMGeneration, "sync_weights", sync_weights)
        trainer = build_checked(
            *TRAINERS["grpo"], tiny_model_path, tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
            learning_rate=1e-3, max_steps=24, temperature=0.7,
        )  # fmt: skip
        trainer.train()
        return trainer

    fresh = logged(train(lambda self: None), "fresh_k3_kl")
    assert len(fresh) == 5  # pushes 1, 2, 4, 8 and 16
    assert fresh[-1] > 1e-4 > 1e-5 > fresh[0]
    trainer = train(lambda self: transfer.send_weights(self._iter_named_params()))
    assert trainer._pushes.checks.weights._before.held
    assert max(logged(trainer, "fresh_k3_kl")) < 1e-5
    assert not logged(trainer, "age_k3_kl")  # the sampler draws at another temperature
    assert not messages(caplog)
