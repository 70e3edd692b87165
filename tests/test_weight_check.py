"""Weights that are pushed and do not arrive in the sampler: proven by what vLLM holds, and never where they do arrive."""

import json
import math
import re
import sys
import threading
from contextlib import nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from tests.launching import ROOT, output_of
from tests.tiny import build_tiny_model
from tests.training import TRAINERS, VLLM, build_checked, counting_forwards, losing, losses, messages, saying
from trl_rollout_corr.pushes.fingerprints import (
    fingerprint,
    packed_columns,
    packed_experts,
    read_weights,
    some_columns,
)
from trl_rollout_corr.pushes.server_api import AdapterCheck, read_server, replicas_of, score_on_server
from trl_rollout_corr.pushes.weight_check import WeightCheck


NOT_THERE = "The sampler does not have the weights of the trainer"


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(kind="grpo", tied=False, **fields):
        path = tied_model_path if tied else tiny_model_path
        fields = {**VLLM, "max_steps": 8, "learning_rate": 1e-4, **fields}
        return build_checked(*TRAINERS[kind], path, tmp_path, **fields)

    return make


# A vLLM in the process of the trainer ---------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        *(("grpo", lost) for lost in ("everything", "the head", "one layer", "norms", "keys")),
        *(("grpo", lost) for lost in ("every second push", "every third push")),
        *(("grpo", lost) for lost in ("half of the keys", "one row of the head")),
        ("rloo", "the head"),  # `test_weight_check_runs.py` has the others
    ],
)
def test_what_does_not_arrive_ends_the_run(make, kind, lost):
    """Also a head that is untied, at a learning rate at which the policy hardly moves."""
    trainer = make(kind, learning_rate=1e-6)
    with losing(lost), pytest.raises(RuntimeError, match=NOT_THERE) as raised:
        trainer.train()
    assert "set `trainer.rollout_step`" in str(raised.value)
    assert (
        "`lm_head.weight`" in str(raised.value)
        or lost in ("one layer", "norms", "everything", "keys", "half of the keys")
        or "push" in lost
    )
    assert "k_proj" in str(raised.value) or lost not in ("keys", "half of the keys")
    assert ("holds other values than were sent" in str(raised.value)) == (
        lost in ("half of the keys", "one row of the head")
    )
    assert trainer.state.global_step <= 4


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("aligned", "float32"),
        ("aligned", "bfloat16"),
        ("several steps per generation", "bfloat16"),
        ("not a multiple", "float32"),
        ("two iterations", "bfloat16"),
    ],
)
@pytest.mark.filterwarnings("ignore:The trainer computes", "ignore:.*changes? the distribution")
def test_what_arrives_says_nothing(make, schedule, dtype, caplog):
    """Not even where rounding removes most updates, or where options of sampling change the distribution."""
    options = {"generation_kwargs": {"min_tokens": 6}, "repetition_penalty": 1.3, "top_p": 0.9}
    for learning_rate, more in ((1e-7, {}), (1e-2, options)):
        engine = {"rollout_engine_kwargs": {"dtype": dtype}}
        make(tied=True, schedule=schedule, learning_rate=learning_rate, max_steps=8, **engine, **more).train()
    assert not messages(caplog)


@pytest.mark.vllm
def test_a_tied_head_that_is_not_packed_again_ends_the_run(make, monkeypatch):
    monkeypatch.setattr("trl_rollout_corr.pushes.reloading.pack_tied_heads", lambda model: None)
    with pytest.raises(RuntimeError, match=NOT_THERE):
        make(tied=True).train()


@pytest.mark.vllm
def test_a_resumed_run_whose_pushes_fail_ends(make, tmp_path):
    """From its first push on: vLLM has the weights of `model`, and not those of the checkpoint."""
    trainer = make(max_steps=2, learning_rate=1e-2, save_strategy="steps", save_steps=2)
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    with losing("everything", held=first), pytest.raises(RuntimeError, match=NOT_THERE):
        make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.vllm
@pytest.mark.slow  # vLLM prepares for experts, or does not, once per process
def test_experts_that_do_not_arrive_end_the_run(tmp_path):
    path = build_tiny_model(tmp_path / "model", experts=4)
    script = f"""
        from pathlib import Path
        from tests.training import TRAINERS, VLLM, build_checked, losing, sharing_engines

        def make():
            return build_checked(*TRAINERS["grpo"], {path!r}, Path({str(tmp_path)!r}), **VLLM, learning_rate=1e-5, max_steps=6)

        with sharing_engines():
            trainer = make()
            trainer.train()
            checked = trainer._pushes.checks.weights
            print("compared", len(checked._exact), "of", len(checked._before.sent))
            for lost in ("experts", "one expert"):
                with losing(lost):
                    try:
                        make().train()
                    except RuntimeError as error:
                        print(error)
    """
    found = output_of(sys.executable, "-c", dedent(script))
    assert re.search(rf"{NOT_THERE}.* did not change in a single bit .*experts\.", found)
    assert re.search(rf"{NOT_THERE}.*vLLM holds other values than were sent .*experts\.", found)
    assert "compared 25 of 25" in found


@pytest.mark.vllm
def test_an_adapter_that_is_not_merged_is_named(make, monkeypatch, caplog):
    peft = pytest.importorskip("peft")
    extra = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])}
    make(extra=extra, max_steps=12).train()
    assert not messages(caplog)
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.merge", lambda self: None)
    with saying(caplog, "^Merging an adapter.*the wrong weights are sent"):
        make(extra=extra, max_steps=12).train()


@pytest.mark.vllm
def test_a_sampler_that_is_behind_and_says_so_is_believed(make, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from quickstart import Lag

    trainer = make(learning_rate=1e-3, max_steps=20)
    Lag(trainer, 8)  # eight pushes of the same weights
    trainer.train()
    assert not messages(caplog)


@pytest.mark.vllm
def test_with_a_sampler_of_the_user_it_is_a_warning(make, caplog):
    trainer = make("grpo")
    trainer._pushes.doubt = "Completions come from `rollout_func`, which may use another sampler."
    with losing("the head"), saying(caplog, "^Completions come from `rollout_func`.*may not have the weights"):
        trainer.train()
    assert trainer.state.global_step == 8


@pytest.mark.vllm
def test_an_engine_that_cannot_be_read_is_told_once(make, monkeypatch, caplog):
    def fails(*args):
        raise AttributeError("another release of vLLM")

    monkeypatch.setattr("trl_rollout_corr.pushes.push_checks.read_weights", fails)
    with losing("everything"), saying(caplog, "^From here on.*not compared.*AttributeError: another release of vLLM"):
        make().train()


@pytest.mark.vllm
def test_the_check_does_not_touch_the_loss(make):
    runs = []
    for done in (False, True):
        trainer = make(learning_rate=1e-3)
        trainer._pushes.checks.weights.done = done
        with counting_forwards(trainer) as count:
            torch.manual_seed(0)
            runs.append((losses(trainer), count["forwards"]))
    assert runs[0] == runs[1]
    rescored = 3 * 8 + 2  # after the pushes 1, 2 and 4 eight completions one by one, after 8 two of them
    assert runs[0][1] == 8 * 2 + rescored


# Fingerprints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (2, 3, 8), ()])
def test_a_fingerprint_depends_on_each_bit(dtype, shape):
    x = torch.rand(shape).to(dtype) + 1
    whole = {fingerprint(x).item()}
    bits = x.clone().view(torch.int32 if dtype == torch.float32 else torch.int16)
    for place in range(x.numel()):
        changed = bits.clone()
        changed.view(-1)[place] ^= 1
        whole.add(fingerprint(changed.view(dtype)).item())
    assert len(whole) == 1 + x.numel()
    assert fingerprint(x.clone()).item() in whole


def test_changes_that_cancel_change_a_fingerprint():
    x = torch.zeros(4, 4)
    x[0, 0], x[1, 1] = 1, 2
    y = torch.zeros(4, 4)
    y[0, 0], y[1, 1] = 2, 1
    assert fingerprint(x) != fingerprint(y)


def test_the_columns_of_a_packed_layer_are_those_of_its_weight():
    weight = torch.randn(6, 17)
    layer = SimpleNamespace(weight=torch.empty(0), input_size=17, cpu_linear=lambda x, w, b: x @ weight.T)
    assert torch.equal(packed_columns(layer).T, some_columns(weight))


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_the_columns_of_packed_experts_are_those_of_their_weights(dtype, isa):
    """Also where vLLM adds zeros to the intermediate size: here 48, of which its kernels make 64."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts = SimpleNamespace(isa=isa, moe_config=SimpleNamespace(intermediate_size_per_partition=48))
    gate, up, down = (torch.randn(3, *shape, dtype=dtype) for shape in ((48, 96), (48, 96), (96, 48)))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 16)) for x in (gate, up)]
    packed = cpu_prepack_moe_weight(torch.cat(padded, 1), isa)
    assert torch.equal(packed_experts(experts, packed, gates=True), some_columns(torch.cat([gate, up], 1)))
    packed = cpu_prepack_moe_weight(torch.nn.functional.pad(down, (0, 16)), isa)
    assert torch.equal(packed_experts(experts, packed, gates=False), some_columns(down))


def test_weights_that_are_compared_as_whole_tensors_are_named_once(caplog, monkeypatch):
    """Those of an engine of several ranks, and one that an engine keeps in another layout; not a bias of zeros."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    for ranks, number, named in (
        (None, 1, "`own.weight`"),
        (object(), 2, "`own.weight`, `q_proj.weight`"),
    ):
        model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8), "own": torch.nn.Linear(8, 8, bias=False)})
        check = WeightCheck(lambda names, m=model, r=ranks: read_weights(m, names, r), model, lambda: "float32")
        with saying(caplog, rf"^{number} of the 3 .* at most as whole tensors \({named}\)"):
            for step in range(4):
                q, own = (torch.randn(8, 8) for _ in range(2))
                model["q_proj"].weight.data, model["own"].weight.data = q, own.T.contiguous()
                model["q_proj"].bias.data = torch.zeros(8)
                [*check.noting([("q_proj.weight", q), ("q_proj.bias", torch.zeros(8)), ("own.weight", own)])]
                check.judge(step)
            assert len(messages(caplog)) == 1


def test_a_quantised_layer_is_named():
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)})
    model["q_proj"].weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    found = read_weights(model, ["q_proj.weight", "norm.weight"])
    assert found["places"] == {name: [name] for name in ("q_proj.weight", "norm.weight")}
    assert found["quantised"] == ["q_proj.weight"]


class Experts(torch.nn.Module):
    """As vLLM keeps the experts of a layer, and a vocabulary, which it pads."""

    def __init__(self, dtype):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.randn(4, 6, 8, dtype=dtype), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.randn(4, 8, 3, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [False, True])
def test_each_expert_and_each_row_of_a_padded_vocabulary_is_looked_at(dtype, together):
    """One that holds another value is named, by its own name where the checkpoint has one, after two pushes."""
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(10, 8, dtype=dtype)})
    model["embed_tokens"].org_vocab_size = 7
    model["mlp"] = torch.nn.ModuleDict({"experts": Experts(dtype)})
    model["norm"] = torch.nn.LayerNorm(8, bias=False, dtype=dtype)
    for p in model.parameters():
        p.data.copy_(torch.arange(p.numel()).view(p.shape))  # exact in bfloat16
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    w13, w2 = model["mlp"]["experts"].w13_weight, model["mlp"]["experts"].w2_weight
    weights = {"embed_tokens.weight": model["embed_tokens"].weight.data[:7], "norm.weight": model["norm"].weight.data}
    if together:
        weights |= {"mlp.experts.gate_up_proj": w13.data, "mlp.experts.down_proj": w2.data}
    for i in range(0 if together else 4):
        parts = {"gate_proj": w13.data[i, :3], "up_proj": w13.data[i, 3:], "down_proj": w2.data[i]}
        weights |= {f"mlp.experts.{i}.{name}.weight": part for name, part in parts.items()}
    for wrong, row in {name: x.view(-1, x.shape[-1])[-1] for name, x in weights.items()}.items():
        check = WeightCheck(partial(read_weights, model), torch.nn.Linear(2, 2), lambda: str(dtype).partition(".")[2])
        for step in range(3):
            for x in weights.values():
                x.add_(1.0)
            [*check.noting([(name, x.clone()) for name, x in weights.items()])]
            assert check.read([*weights])["values"].keys() == weights.keys()
            if step == 0:
                check.judge(step)
                continue
            row[0] += 1
            if step == 1:
                check.judge(step)
            else:
                with pytest.raises(RuntimeError, match=rf"holds other values than were sent for 1 of .*`{wrong}`"):
                    check.judge(step)
            row[0] -= 1


def test_a_layout_of_its_own_is_never_wrong():
    """An engine that keeps other values from the first push on, as one that scales or swaps weights."""
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(8, bias=False)})
    check = WeightCheck(partial(read_weights, model), torch.nn.Linear(2, 2), lambda: "float32")
    for step in range(5):
        sent = torch.full((8,), float(step))
        model["norm"].weight.data = 1 + sent
        [*check.noting([("norm.weight", sent)])]
        check.judge(step)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_constant_does_not_show_that_a_layout_is_kept(swapped):
    """A bias of zeros, and a norm of ones, which an engine keeps in another type or order."""
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(32, bias=False)})
    check = WeightCheck(
        partial(read_weights, model), torch.nn.Linear(2, 2), lambda: "float32" if swapped else "bfloat16"
    )
    for step in range(5):
        sent = torch.ones(32) if swapped else torch.zeros(32, dtype=torch.bfloat16)
        if step > 1:
            sent += step * torch.arange(32)
        model["norm"].weight.data = sent.flip(0).float() if swapped else sent.float()
        [*check.noting([("norm.weight", sent)])]
        check.judge(step)


def test_a_constant_that_was_right_twice_must_stay_right():
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(32, bias=False)})
    check = WeightCheck(partial(read_weights, model), torch.nn.Linear(2, 2), lambda: "float32")
    for step in range(4):
        sent = torch.full((32,), 1.0 + step)
        model["norm"].weight.data = sent + (torch.arange(32) == 3) * (step > 1)
        [*check.noting([("norm.weight", sent)])]
        wrong = pytest.raises(RuntimeError, match="holds other values than were sent")
        with wrong if step == 3 else nullcontext():
            check.judge(step)


def judged(pushes, held, dtype="float32", **judge) -> WeightCheck:
    """A check after pushes of one weight, of an engine that holds some values."""
    model, held = torch.nn.Linear(2, 2), iter(held)
    check = WeightCheck(lambda names: {"held": {"w": [next(held)]}, "places": {"w": ["w"]}}, model, lambda: dtype)
    for step, value in enumerate(pushes):
        [*check.noting([("w", torch.full((4,), value))])]
        check.judge(step, **judge)
    return check


def test_one_push_that_fails_ends_no_run():
    judged([1.0, 2.0, 3.0, 4.0], [1, 1, 3, 4])
    with pytest.raises(RuntimeError, match=NOT_THERE):
        judged([1.0, 2.0, 3.0, 4.0], [1, 1, 3, 3])


def test_updates_that_rounding_removes_are_not_missing():
    judged([1.0, 1.0001, 1.0002, 1.0003], [1] * 4, dtype="bfloat16")
    with pytest.raises(RuntimeError, match=NOT_THERE):
        judged([1.0, 1.0001, 1.0002, 1.0003], [1] * 4)


def test_weights_that_are_nan_are_not_missing():
    judged([1.0, float("nan"), -float("nan"), float("nan")], [1, 2, 2, 2])


# A server -------------------------------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does."""

    state: dict = {}

    def do_GET(self):
        self.answer({"data": [{"id": name} for name in self.state["models"]]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            self.answer({"results": self.state["workers"]})
            return
        logps = [None, *({str(t): {"logprob": self.state["logp"] - t}} for t in body["prompt"][1:])]
        self.state["replica"] = self.headers["X-data-parallel-rank"]
        self.answer({"choices": [{"index": 0, "prompt_logprobs": logps}]})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Server) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", Server.state
        http.shutdown()
        thread.join()


def test_a_server_scores_a_text(server):
    url, state = server
    state["logp"] = -1.0
    assert score_on_server(url, "model", [3, 4, 5]) == [-5.0, -6.0]
    assert state["replica"] is None
    assert score_on_server(url, "model", [6, 7], 1) == [-8.0]
    assert state["replica"] == "1"
    state["logp"] = -9999.0 + 4  # which stands for minus infinity
    assert score_on_server(url, "model", [3, 4, 3]) == [-math.inf, -9998.0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 2),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_external_lb": True}, 1),
        ({}, 1),
    ],
)
def test_replicas_are_the_engines_behind_one_address(config, expected):
    assert replicas_of({"parallel_config": config}) == expected
    assert replicas_of(None) == 1


def test_the_workers_of_a_server_are_read_together(server):
    url, state = server
    state["workers"] = [{"held": {"w": [1, 2]}, "places": {"a": ["w"]}}, {"held": {"w": [3, 4]}, "places": {}}]
    assert read_server(url, ["a"]) == {"held": {"w": [[1, 3], [2, 4]]}, "places": {"a": ["w"]}}


def test_an_adapter_that_never_changes_is_an_error(server, tmp_path, caplog):
    url, state = server
    state["models"] = ["base", "policy-v1", "policy-v2", "policy-v3"]
    check, file = AdapterCheck(), tmp_path / "adapter_model.safetensors"
    for version, (content, trained) in enumerate(
        [("a", 1), ("a", 1), ("b", 2)], 1
    ):  # a learning rate of 0, and a step
        file.write_text(content)
        check.pushed(url, f"policy-v{version}", tmp_path, trained, version)
    assert not messages(caplog)
    with pytest.raises(RuntimeError, match="is the same, to the last bit"):
        check.pushed(url, "policy-v3", tmp_path, 3, 4)


def test_an_adapter_that_the_server_does_not_list_is_named(server, tmp_path, caplog):
    url, state = server
    state["models"] = ["base"]
    (tmp_path / "adapter_model.safetensors").write_text("a")
    check = AdapterCheck()
    with saying(caplog, "does not list it.*It has base"):
        check.pushed(url, "policy-v1", tmp_path, 1, 1)
    caplog.clear()
    check.pushed(url, "policy-v2", tmp_path, 1, 2)  # once is enough
    assert not messages(caplog)


def test_a_server_whose_adapters_cannot_be_listed_is_told_once(tmp_path, caplog):
    (tmp_path / "adapter_model.safetensors").write_text("a")
    check = AdapterCheck()
    with saying(caplog, "^From here on, nothing tells whether.*cannot be read"):
        for version in (1, 2):
            check.pushed("http://127.0.0.1:1", f"policy-v{version}", tmp_path, 1, version)


def test_weights_in_a_form_that_cannot_be_read_are_told_once(caplog):
    def held(names):
        return {"held": {"w": [1]}, "places": {}, "unreadable": ["w"]}

    check = WeightCheck(held, torch.nn.Linear(2, 2), lambda: "float32")
    with saying(caplog, "^2 of the 2 weights.*are not compared.*`packed`, `w`"):
        for step in range(3):
            [*check.noting([("w", torch.randn(2, 2)), ("packed", torch.zeros(2, dtype=torch.uint8))])]
            check.judge(step)
