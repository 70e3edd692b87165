"""Asynchronous GRPO with all of its real parts: vLLM's server, TRL's rollout worker, and weights that travel between them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import AutoTokenizer

from tests.asynchronous import WorkerHere, build_ours, parts_for_a_cpu
from tests.dumps import read_dump
from tests.launching import ACCELERATE, ROOT, free_port, output_of, serving
from tests.tiny import StaleSampler, build_tiny_model, build_tiny_tokenizer, load_model
from tests.training import logged, messages
from trl_rollout_corr.pushes.server_api import check_patterns
from trl_rollout_corr.tools.dump.reading import open_dump


pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LAUNCH = [
    ACCELERATE, "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--cpu",
]  # fmt: skip
SERVER = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
LIMITS = [
    "--max-model-len", "256", "--max-num-seqs", "64", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
]  # fmt: skip
OPTIONS = " ".join(["--dtype float32 --enforce-eager", *LIMITS])


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """A tiny model that takes conversations."""
    folder = build_tiny_model(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    close = {"close": tokenizer.eos_token, "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "n:",
        "fields": {"content": close},
    }
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    """
    No answer has a number, so that a completion without one is right. Many are, and many are not, from the first step on: a
    run learns at each step, whatever the server samples.
    """
    folder = tmp_path_factory.mktemp("questions")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}in:"}], "answer": "none"} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def example(chat_model, questions, tmp_path):
    """The command line of the example, with a server on a port of its own, which is returned as well."""
    port = free_port()

    def command(recipe: str, *options: str) -> list[str]:
        return [
            *LAUNCH, "examples/async_grpo.py", "--config", f"recipes/async_grpo/{recipe}.yaml",
            "--model_name_or_path", chat_model, "--dataset_name", questions, "--output_dir", str(tmp_path / "out"),
            "--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--disable_tqdm", "true",
            "--vllm_server_base_url", f"http://127.0.0.1:{port}", "--server_devices", "cpu", "--server_options", OPTIONS,
            "--num_generations", "8", "--per_device_train_batch_size", "32", "--token_budget", "0",
            "--max_completion_length", "16", "--gradient_checkpointing", "false", "--learning_rate", "1e-4", *options,
        ]  # fmt: skip

    return command, port


def pids(text: str) -> list[tuple[int, str]]:
    """Running processes whose command line holds a text, with the command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended
            continue
        if text in line and str(os.getpid()) != entry.parent.name:
            found.append((int(entry.parent.name), line[:200]))
    return found


def assert_nothing_is_left(port: int, *texts: str):
    """No server, no engine, no rollout worker, and nobody on the port."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [line for text in (f"--port {port}", *texts) for _, line in pids(text)]
        with socket.socket() as probe:
            listening = probe.connect_ex(("127.0.0.1", port)) == 0
        if not left and not listening:
            return
        time.sleep(0.5)
    pytest.fail(f"left: {left}, port {port} {'answers' if listening else 'is free'}")


def test_an_adapter_that_the_server_would_scale_wrongly_is_refused(chat_model, tmp_path):
    plain = LoraConfig(r=4, lora_alpha=8)
    with serving(chat_model, tmp_path / "log", "--enable-lora", *LIMITS, **SERVER) as url:
        check_patterns(url, plain)
        for pattern in ({"rank_pattern": {"q_proj": 8}}, {"alpha_pattern": {"q_proj": 16}}):
            with pytest.raises(ValueError, match=rf"`{next(iter(pattern))}=.*wrong scale.* The server has vLLM 0\.31"):
                check_patterns(url, LoraConfig(r=4, lora_alpha=8, **pattern))


@pytest.mark.parametrize("recipe", ["token_is", "lora"])
def test_weights_reach_the_server(example, chat_model, tmp_path, recipe):
    """
    All of them, or an adapter: in the end it samples with another policy than at the start, one close to the trainer's. The
    last updates, which a stale sample misses, are small: the learning rate falls to 0 as a cosine does.
    """
    command, port = example
    options = ["--queue_maxsize", "32", "--max_inflight_tasks", "32", "--max_staleness", "2", "--max_steps", "16"]
    options += ["--lr_scheduler_type", "cosine"]
    options += ["--rollout_dump_dir", str(tmp_path / "dump"), "--logging_steps", "1"]
    options += ["--learning_rate", "1e-3"] if recipe == "lora" else ["--weights_folder", str(tmp_path / "weights")]
    output_of(*command(recipe, *options), **SERVER)
    assert_nothing_is_left(port, str(tmp_path))
    assert not list((tmp_path / "weights").glob("*"))
    rows, model = read_dump(tmp_path / "dump").rows, load_model(chat_model)
    assert open_dump(tmp_path / "dump").about["pushed"] == ("adapter" if recipe == "lora" else "weights")
    first, last = ([row for row in rows if row["step"] == step] for step in (1, 16))
    assert {row["staleness"] for row in first} == {0}
    assert max(row["staleness"] for row in last) <= 3  # one micro-batch is taken before weights are pushed
    assert squared_gap(model, first) < 1e-6  # rounding
    to_the_trainer = np.mean([x**2 for row in last for x in np.subtract(row["train_logps"], row["rollout_logps"])])
    assert squared_gap(model, last) > 1e-5
    assert to_the_trainer < squared_gap(model, last) / 2


def squared_gap(model, rows: list[dict]) -> float:
    """Mean squared difference between the log-probabilities of the sampler and those of a model."""
    gaps, tokenizer = [], build_tiny_tokenizer()
    for row in rows:
        prompt, completion = tokenizer(row["prompt"].replace(" ", "")).input_ids, row["token_ids"]
        with torch.no_grad():
            logps = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        gaps += np.subtract(logps[range(len(completion)), completion].tolist(), row["rollout_logps"]).tolist()
    return float(np.mean(np.square(gaps)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_nothing_behind(example, tmp_path, number):
    command, port = example
    options = ["--weights_folder", str(tmp_path / "weights"), "--max_steps", "1000", "--save_strategy", "no"]
    with (tmp_path / "log").open("w") as log:
        # without the launcher, which would get the signal in its place
        python = [sys.executable, *command("token_is", *options)[len(LAUNCH) :]]
        program = start(python, log)
        wait_for_steps(program, tmp_path / "log")
        program.send_signal(number)
        assert program.wait(180) != 0
    assert_nothing_is_left(port)


def start(command: list[str], log) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **SERVER},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # a shell makes what it starts in the background deaf to Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for_steps(program: subprocess.Popen, log: Path):
    while program.poll() is None and "k3_kl" not in log.read_text():
        time.sleep(0.5)
    assert program.poll() is None, log.read_text()[-5000:]


def test_a_push_in_the_middle_of_a_completion(tmp_path):
    """
    Each token has the probability that the weights of its moment give it: the first ones, and then those of the trainer. The
    model has what vLLM packs at the first load only.
    """
    PartialState()  # TRL's logger needs it
    path = build_tiny_model(tmp_path / "model", experts=4, tied=True)
    before, after = load_model(path), load_model(path)
    with torch.no_grad():
        for p in after.parameters():
            p.add_(0.3 * p.std().nan_to_num() * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    prompt = AutoTokenizer.from_pretrained(path)("12 ab= cd?").input_ids
    one_after_the_other = ["--max-num-seqs", "1"]  # so that one of them is under way, however late the push comes
    with serving(path, tmp_path / "server.log", *LIMITS, *one_after_the_other, **SERVER) as url:
        transfer = parts_for_a_cpu().DiskWeightTransfer(url, tmp_path / "weights")
        transfer.init_weight_transfer()
        stream = streamed(url, path, prompt, n=8, max_tokens=240)
        sampled = [next(stream) for _ in range(5)]
        transfer.pause()
        transfer.send_weights(after.named_parameters())
        transfer.resume()
        sampled += stream
        transfer.destroy()
        with pytest.raises(RuntimeError, match="did not load the weights"):
            transfer._load(tmp_path / "nothing")
    spans = []
    for number in range(8):
        _, ids, theirs = zip(*(token for token in sampled if token[0] == number), strict=True)
        by_old, by_new = (
            np.abs(np.subtract(StaleSampler.score(SimpleNamespace(model=model), [prompt], [list(ids)])[0], theirs))
            < 1e-3
            for model in (before, after)
        )
        n_old = len(ids) if by_old.all() else int(np.argmin(by_old))
        assert by_new[n_old:].all()
        spans.append(0 < n_old < len(ids) and not by_new[:n_old].all())
    assert any(spans)


@pytest.mark.parametrize("lost", ["nothing", "pushes", "pushes that cannot be read"])
def test_what_a_server_holds_is_checked(chat_model, tmp_path, monkeypatch, caplog, lost):
    """With our extension of its worker a push that fails ends the run, and without it there is a warning."""
    from trl_rollout_corr.asynchronous.server_pushes import PushesToServer
    from trl_rollout_corr.pushes import push_checks

    transfer_class = parts_for_a_cpu().DiskWeightTransfer
    load = transfer_class._load
    if lost != "nothing":
        monkeypatch.setattr(transfer_class, "_load", lambda self, x: load(self, x) if self._version == 1 else None)
    if lost == "pushes that cannot be read":
        monkeypatch.setattr(push_checks, "has_extension", lambda config: False)
    with serving(chat_model, tmp_path / "server.log", *LIMITS, **SERVER) as url:
        monkeypatch.setattr(PushesToServer, "server", url)  # samples come from this process
        transfer = parts_for_a_cpu().DiskWeightTransfer(url, tmp_path / "weights")
        worker = WorkerHere(chat_model, lags=(0,))
        fields = {"learning_rate": 1e-3, "max_steps": 24, "rollout_monitor": "warn"}
        trainer = build_ours(chat_model, tmp_path / "out", worker, extra={"weight_transfer": transfer}, **fields)
        trainer._engine_config = transfer.client.get_server_info()
        with pytest.raises(RuntimeError, match="does not have the weights") if lost == "pushes" else nullcontext():
            trainer.train()
    assert bool(trainer._pushes.checks.weights._before.held) == (lost != "pushes that cannot be read")
    found = [message for message in messages(caplog) if "[fresh_gap" in message]
    assert bool(found) == (lost == "pushes that cannot be read")  # the error comes before the second look
    if lost != "pushes":
        fresh, age = logged(trainer, "fresh_k3_kl"), logged(trainer, "age_k3_kl")
        assert len(fresh) == len(age) == 5  # pushes 1, 2, 4, 8 and 16
        assert fresh[0] < 1e-5  # before the first update
        assert max(age) > 1e-4
        assert (max(fresh) < 1e-5) == (lost == "nothing")


def test_a_replica_that_misses_pushes_is_told(chat_model, tmp_path, monkeypatch, caplog):
    """
    `/collective_rpc` answers for the first replica, which has all weights, and the second one has those of the trainer after
    every second push. Scores come after pushes that it misses, and after the first.
    """
    from trl_rollout_corr.asynchronous.server_pushes import PushesToServer
    from trl_rollout_corr.pushes import server_api

    extension, misses = "tests.missing_pushes.MissingPushes", tmp_path / "misses"
    monkeypatch.setattr(parts_for_a_cpu(), "_EXTENSION", extension)
    monkeypatch.setattr(server_api, "EXTENSION", extension)
    options = [*LIMITS, "--data-parallel-size", "2", "--worker-extension-cls", extension]
    transfer_class, missed = parts_for_a_cpu().DiskWeightTransfer, {"nothing": [], "second": [2, 4, 6, 8]}
    load, fresh = transfer_class._load, {}
    with serving(chat_model, tmp_path / "server.log", *options, MISSES_PUSHES=str(misses), **SERVER) as url:
        monkeypatch.setattr(PushesToServer, "server", url)  # samples come from this process
        for case, pushes in missed.items():

            def push(self, folder, pushes=pushes):
                misses.touch() if self._version in pushes else misses.unlink(missing_ok=True)
                load(self, folder)

            monkeypatch.setattr(transfer_class, "_load", push)
            transfer = transfer_class(url, tmp_path / "weights")
            worker = WorkerHere(chat_model, lags=(0,))
            fields = {"learning_rate": 1e-3, "max_steps": 8, "rollout_monitor": "warn"}
            trainer = build_ours(chat_model, tmp_path / "out", worker, extra={"weight_transfer": transfer}, **fields)
            trainer._engine_config = transfer.client.get_server_info()
            caplog.clear()
            trainer.train()
            fresh[case] = logged(trainer, "fresh_k3_kl")
            told = [message for message in messages(caplog) if "[fresh_gap" in message]
            assert bool(told) == (case == "second"), fresh
            assert sum("The first of 2 replicas" in message for message in messages(caplog)) == 1
    assert len(fresh["nothing"]) == len(fresh["second"]) == 4  # pushes 1, 2, 4 and 8
    assert max(fresh["nothing"]) < 1e-5
    assert fresh["second"][0] < 1e-5
    assert min(fresh["second"][1:]) > 1e-4


def streamed(url: str, model: str, prompt: list[int], n: int, max_tokens: int) -> Iterator[tuple[int, int, float]]:
    """Number of the completion, token and log-probability, as the server samples them."""
    request = {
        "model": model, "prompt": prompt, "n": n, "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    with requests.post(f"{url}/v1/completions", json=request, stream=True, timeout=60) as response:
        for line in response.iter_lines(chunk_size=1):
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                for token, logp in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
                    yield choice["index"], token, logp


def test_a_server_on_a_cpu_that_would_take_a_part_of_the_weights_is_refused(tmp_path):
    PartialState()
    path = build_tiny_model(tmp_path / "model")
    with (
        serving(path, tmp_path / "server.log", *LIMITS, "--worker-extension-cls", "", **SERVER) as url,
        pytest.raises(RuntimeError, match="runs on a CPU and was started without `--worker-extension-cls"),
    ):
        parts_for_a_cpu().DiskWeightTransfer(url, tmp_path / "weights").init_weight_transfer()


def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from serving import vllm_server

    with pytest.raises(RuntimeError, match="ended with exit code"), vllm_server(str(tmp_path), tmp_path / "log"):
        pass
