"""Versions of tokens on their way from server to trainer: TRL's real loop, and a server that answers as vLLM 0.32 does."""

import asyncio
import inspect
import json
import multiprocessing
import queue
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from accelerate import PartialState
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.asynchronous import WeightsStay, build_ours
from tests.tiny import build_tiny_tokenizer, conversations, with_tools
from trl_rollout_corr.asynchronous.token_versions import VersionedLoop, _as_generation, versions_of
from trl_rollout_corr.asynchronous.trl_parts import AsyncRolloutWorker, RolloutLoop


# A turn in the history has the tokens that were sampled
AS_SAMPLED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.x }}{% endfor %}<eos>{% elif m.role == 'tool' %}>{{ m.content }}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
INFO = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}


def answer_of(ids: list[int], **versions: int) -> dict:
    """Answer of vLLM 0.32.0, to a request for log-probabilities. `versions` has the number of tokens of each label."""
    ends = np.cumsum([0, *versions.values()]).tolist()
    spans = [
        {"version": label.removeprefix("v"), "start": start, "end": end}
        for label, start, end in zip(versions, ends[:-1], ends[1:], strict=True)
    ]
    logps = [{"token_id": token, "logprob": -token / 8, "rank": 1} for token in ids]
    content = [{**logp, "top_logprobs": [logp]} for logp in logps]
    nothing = dict.fromkeys(
        ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics",
         "kv_transfer_params", "ec_transfer_params")
    )  # fmt: skip
    choice = {
        "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids, "routed_experts": None,
        "sampling_mask": None, "weight_versions": spans, "logprobs": {"content": content},
    }  # fmt: skip
    return {
        "request_id": "generate-tokens-8d771861be0766f0", "model": "model", "created": 1795421066, "output_mode": "tokens",
        "usage": {"prompt_tokens": 3, "total_tokens": 3 + len(ids), "completion_tokens": len(ids)}, "choices": [choice],
        **nothing,
    }  # fmt: skip


@contextmanager
def answering(answer: Callable[[str, dict], tuple[int, dict]]) -> Iterator[tuple[str, list[tuple[str, dict]]]]:
    """Address of a server that answers each POST with a status and a body, and its requests so far."""
    seen: list[tuple[str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.reply(*answer(*seen[-1]))

        def do_GET(self):
            self.reply(200, INFO)

        def reply(self, status, body):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def double(x: str) -> str:
    """
    Say something twice.

    Args:
        x: What to say.
    """
    return 2 * x


def rewards(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def run_loop(url: str, tokenizer, loop_class=VersionedLoop, n: int = 4, tools=(double,), **kwargs) -> list:
    """Samples that a loop of TRL's rollout worker puts into its queue."""
    samples: list = []
    PartialState()  # TRL's logger needs it

    class Buffer(queue.Queue):
        def put_nowait(self, sample):
            samples.append(sample)
            if len(samples) >= n:
                loop._stop_event.set()

    values = {"model_version_value": multiprocessing.Value("i", 7), "heartbeat_value": multiprocessing.Value("d", 0.0)}
    queues = {name: queue.Queue() for name in ("exception_info_queue", "metrics_queue")}
    loop = loop_class(
        dataset=conversations(8), reward_funcs=[rewards], processing_class=tokenizer, tools=list(tools),
        eos_token_ids=[tokenizer.eos_token_id], rollout_buffer=Buffer(), failed_event=multiprocessing.Event(),
        num_generations=2, max_inflight_tasks=2, vllm_server_url=url, **values, **queues,
        **{"model_name": "model", **kwargs},
    )  # fmt: skip
    random.seed(0)
    loop.run()
    return samples


def chat_tokenizer():
    tokenizer = with_tools(build_tiny_tokenizer(), "double", "x")
    tokenizer.chat_template = AS_SAMPLED
    return tokenizer


def test_versions_travel_with_the_tokens_of_two_turns():
    tokenizer = chat_tokenizer()
    first, second = ([*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in ("zc", "zz"))
    behind_a_tool = tokenizer(">").input_ids[0]

    def answer(path, body):
        last = behind_a_tool in body["token_ids"]
        return 200, answer_of(second, vdefault=1, v5=2) if last else answer_of(first, v3=1, v4=2)

    with answering(answer) as (url, seen):
        samples = run_loop(url, tokenizer, temperature=0.5, top_k=7, min_p=0.1, max_tokens=9)
    assert {path for path, _ in seen} == {"/inference/v1/generate"}
    given = {"temperature": 0.5, "top_p": 1.0, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.0, "max_tokens": 9}
    for _, body in seen:
        seed = body["sampling_params"].pop("seed")
        assert 0 <= seed < 2**63
        assert body.keys() == {"model", "token_ids", "sampling_params", "cache_salt"}
        assert body["cache_salt"] == "7"  # the version of the weights: no prefix of older ones is taken from the cache
        assert (body["model"], body["sampling_params"]) == ("model", {**given, "n": 1, "logprobs": 0})
    asked = {tuple(body["token_ids"]) for _, body in seen}
    for sample in samples:
        sampled = sample.completion_mask != 0
        starts = np.flatnonzero(sampled[1:] & ~sampled[:-1]) + 1
        assert {tuple(sample.input_ids[:start].tolist()) for start in starts} <= asked
        assert sample.input_ids[sampled].tolist() == [*first, *second]
        assert sample.versions[sampled].tolist() == [3, 4, 4, -1, 5, 5]
        assert set(sample.versions[~sampled]) == {-1}
        np.testing.assert_allclose(sample.old_log_probs[sampled], -np.array([*first, *second]) / 8)
        assert (sample.model_version, sample.metrics["reward"] in (0.0, 1.0)) == (7, True)


def test_names_of_trls_rollout_worker():
    """Beside those of the requests and answers above."""
    assert AsyncRolloutWorker._loop_cls is RolloutLoop
    assert [*inspect.signature(RolloutLoop._post).parameters][:3] == ["self", "path", "payload"]
    assert [*inspect.signature(RolloutLoop._score_group).parameters] == ["self", "group"]
    assert isinstance(RolloutLoop.model_version, property)


@pytest.mark.vllm
def test_vllm_takes_the_salt_of_a_request():
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    payload = {"model": "model", "prompt": [1, 2], "max_tokens": 3, "n": 1, "return_token_ids": True}
    assert GenerateRequest(**_as_generation(payload, 7)).cache_salt == "7"


class NotedTransfer(WeightsStay):
    """A weight transfer that notes its calls among the requests of a server."""

    def __init__(self, seen):
        for name in ("pause", "send_weights", "resume"):
            setattr(self, name, lambda *args, name=name: seen.append((name, {})))


LABEL, PROBE = "/update_weight_version", "/inference/v1/generate"


def pushes(model, folder, answer, own_worker=False) -> tuple[list, type]:
    """What the transfer and the server are asked at two pushes, and the loop of the rollout worker."""
    with answering(answer) as (url, seen):
        worker = AsyncRolloutWorker(vllm_server_url="elsewhere") if own_worker else None
        extra = {"weight_transfer": NotedTransfer(seen), "reward_funcs": rewards, "rollout_worker": worker}
        trainer = build_ours(model, folder, extra=extra, vllm_server_base_url=url)
        trainer._sync_weight()  # TRL's callback, as training begins
        trainer._end.running = True
        trainer._sync_weight()
        return seen, trainer.rollout_worker._loop_cls


def test_weights_are_labelled_before_requests_go_on(tiny_model_path, tmp_path):
    seen, loop = pushes(tiny_model_path, tmp_path, lambda path, body: (200, answer_of([6], vdefault=1)))
    labels = [body["new_version"] for path, body in seen if path == LABEL]
    push = ["pause", "send_weights"]
    assert [path for path, _ in seen] == [*push, "resume", PROBE, LABEL, *push, LABEL, "resume"]
    assert (labels, loop) == (["1", "2"], VersionedLoop)


def without_versions(path, body):
    """The answer of vLLM 0.31."""
    answer = answer_of([6])
    del answer["choices"][0]["weight_versions"]
    return 200, answer


@pytest.mark.parametrize("answer", [lambda path, body: (403, {"error": "--enable-scale-out"}), without_versions])
def test_a_server_that_tells_no_versions_is_asked_as_by_trl(tiny_model_path, tmp_path, answer):
    seen, loop = pushes(tiny_model_path, tmp_path, answer)
    push = ["pause", "send_weights", "resume"]
    assert ([path for path, _ in seen], loop) == ([*push, PROBE, *push], RolloutLoop)


def test_the_worker_of_a_user_stays_as_it_is(tiny_model_path, tmp_path):
    seen, loop = pushes(tiny_model_path, tmp_path, lambda path, body: (200, answer_of([6], v1=1)), own_worker=True)
    assert ([path for path, _ in seen], loop) == (["pause", "send_weights", "resume"] * 2, RolloutLoop)


def test_a_server_that_refuses_the_first_label_is_asked_as_by_trl(tiny_model_path, tmp_path, caplog):
    def answer(path, body):
        return (500, {"error": "busy"}) if path == LABEL else (200, answer_of([6], vdefault=1))

    seen, loop = pushes(tiny_model_path, tmp_path, answer)
    push = ["pause", "send_weights", "resume"]
    assert ([path for path, _ in seen], loop) == ([*push, PROBE, LABEL, *push], RolloutLoop)
    [said] = [record.message for record in caplog.records if "label" in record.message]
    assert "refused version 1 as the label of its weights (status 500: " in said
    assert "Training goes on" in said


def test_a_push_is_not_lost_with_its_label(tiny_model_path, tmp_path, caplog):
    """As on a server that was restarted without the endpoint."""
    labels = []

    def answer(path, body):
        labels.extend([body] if path == LABEL else [])
        return (404, {}) if len(labels) > 1 else (200, answer_of([6], vdefault=1))

    with answering(answer) as (url, seen):
        extra = {"weight_transfer": NotedTransfer(seen), "reward_funcs": rewards, "rollout_worker": None}
        trainer = build_ours(tiny_model_path, tmp_path, extra=extra, vllm_server_base_url=url)
        trainer._sync_weight()
        trainer._end.running = True
        for _ in range(3):
            trainer._sync_weight()
    assert [path for path, _ in seen][-4:] == ["pause", "send_weights", LABEL, "resume"]
    assert len([record for record in caplog.records if "refused version 2" in record.message]) == 1
    assert not [record for record in caplog.records if "refused version 3" in record.message]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [3]}', b'{"choices": null}'])
def test_an_answer_of_another_form_tells_no_versions(tiny_model_path, tmp_path, body):
    with answering(lambda path, asked: (200, body)) as (url, _):
        extra = {"weight_transfer": NotedTransfer([]), "reward_funcs": rewards, "rollout_worker": None}
        trainer = build_ours(tiny_model_path, tmp_path, extra=extra, vllm_server_base_url=url)
        trainer._sync_weight()
    assert trainer.rollout_worker._loop_cls is RolloutLoop


# Answers that no vLLM should give ----------------------------------------------------------------------------------------


def span(version, start, end) -> dict:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "versions", "complains"),
    [
        ([span("3", 0, 4)], [3, 3, 3, 3], False),
        ([span("4", 2, 4), span("3", 0, 2)], [3, 3, 4, 4], False),  # in any order
        ([span("default", 0, 1), span("1", 1, 4)], [-1, 1, 1, 1], False),  # weights without a label
        ([span(3, 0, 4)], [3, 3, 3, 3], False),
        ([span("3", 0, 3)], [3, 3, 3, -1], True),
        ([span("3", 0, 9)], [3, 3, 3, 3], False),  # clipped
        ([span("3", -2, 2)], [3, 3, -1, -1], True),
        ([span("3", -9, -5)], [-1, -1, -1, -1], True),
        ([span("3", 3, 1)], [-1, -1, -1, -1], True),
        ([span("3", 0, 3), span("4", 2, 4)], [3, 3, -1, 4], True),  # two versions of one token
        ([span("3", 0, 3), span("3", 2, 4)], [3, 3, 3, 3], False),
        ([span("3", 0, 2), span("4", 1, 3), span("4", 1, 4)], [3, -1, 4, 4], True),
        ([span(None, 0, 2), span("4", 2, 4)], [-1, -1, 4, 4], True),
        ([span("9" * 5000, 0, 4)], [-1, -1, -1, -1], False),
        ([span("-3", 0, 4)], [-1, -1, -1, -1], False),
        ([span("\u0663", 0, 4)], [-1, -1, -1, -1], False),
        ([span(-3, 0, 4)], [-1, -1, -1, -1], True),
        ([span(True, 0, 4)], [-1, -1, -1, -1], True),
        ([span("3", 0, None)], [-1, -1, -1, -1], True),
        ([span("3", 0, 4.0)], [-1, -1, -1, -1], True),
        ([{"version": "3", "end": 4}], [-1, -1, -1, -1], True),
        ([3, 4, None, "3"], [-1, -1, -1, -1], True),
        (None, [-1, -1, -1, -1], True),
        ([], [-1, -1, -1, -1], True),
        (7, [-1, -1, -1, -1], True),
        ({"version": "3", "start": 0, "end": 4}, [-1, -1, -1, -1], True),
    ],
)
def test_spans_of_versions(spans, versions, complains):
    found, complaint = versions_of(spans, 4)
    assert (found.tolist(), bool(complaint)) == (versions, complains)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=3),
    lambda x: (
        st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["version", "start", "end", "x"]), x, max_size=4)
    ),
    max_leaves=6,
)
PLACE = st.integers(-3, 9) | st.just(10**20) | JSON
LABELS = st.integers(-1, 4) | st.integers(0, 4).map(str) | st.just("default") | JSON
SPANS = st.lists(st.fixed_dictionaries({"version": LABELS, "start": PLACE, "end": PLACE}) | JSON, max_size=4) | JSON


def by_hand(spans: object, length: int) -> list[int]:
    """Version of each token: the only one that spans give it."""
    claims: list[set[int]] = [set() for _ in range(length)]
    for one in spans if isinstance(spans, list) else []:
        if not isinstance(one, dict) or not {"version", "start", "end"} <= one.keys():
            continue
        version, start, end = one["version"], one["start"], one["end"]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in (start, end)):
            continue
        if isinstance(version, str):
            version = int(version) if version in [str(i) for i in range(99)] else -1
        elif isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**31:
            continue
        for i in range(length):
            if start <= i < end:
                claims[i].add(version)
    return [claim.pop() if len(claim) == 1 else -1 for claim in claims]


@settings(max_examples=200, deadline=None)
@given(spans=SPANS, length=st.integers(0, 6))
def test_any_answer_about_versions_gives_one_for_each_token(spans, length):
    versions, complaint = versions_of(spans, length)
    assert versions.tolist() == by_hand(spans, length)
    assert complaint or -1 not in versions or "version" in str(spans)


def odd_answers() -> list[dict]:
    """Answers to a request whose completion has three tokens, with and without versions."""
    spans = [
        None, [], 3, "3", {}, [None], [3, 4], [{}], [span("3", 0, 2)], [span("3", 0, 9)], [span(None, 0, 3)],
        [span("4", 2, 3), span("3", 0, 2)], [span(3, 0, 3)], [span("3", "0", [3])], [span("3", 0, 2), span("4", 1, 3)],
    ]  # fmt: skip
    answers = [answer_of([6, 7, 1]) for _ in (*spans, None)]
    for answer, versions in zip(answers, spans, strict=False):
        answer["choices"][0]["weight_versions"] = versions
    del answers[-1]["choices"][0]["weight_versions"]
    return answers


def test_no_answer_about_versions_ends_the_worker(caplog):
    answers, first = odd_answers(), []

    def answer(path, body):
        if path != PROBE:
            return 200, completion_of([6, 7, 1])
        first.append(path)
        return 200, answers[(len(first) - 1) % len(answers)]

    with answering(answer) as (url, seen):
        samples = run_loop(url, chat_tokenizer(), n=2 * len(answers), tools=())
    assert {path for path, _ in seen} == {PROBE}
    assert {tuple(sample.input_ids[-3:].tolist()) for sample in samples} == {(6, 7, 1)}
    assert len({tuple(sample.versions[-3:].tolist()) for sample in samples}) > 3
    [said] = [record.message for record in caplog.records if record.name == "trl_rollout_corr"]
    assert re.search("does not tell the version of all tokens: `weight_versions` is .* for 3 tokens", said)
    assert "Training goes on" in said


def completion_of(ids: list[int]) -> dict:
    """Answer of `/v1/completions`."""
    return {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-token / 8 for token in ids]}}]}


def no_content(path, body):
    answer = answer_of([6, 7, 1], v3=3)
    answer["choices"][0]["logprobs"] = None
    return 200, answer


@pytest.mark.parametrize(
    ("answer", "keeps_asking"),
    [
        (lambda path, body: (404, {}), False),
        (lambda path, body: (500, {}), True),
        (no_content, False),
        (lambda path, body: (200, {**answer_of([6]), "choices": {}}), False),
    ],
)
def test_a_server_without_the_endpoint_is_asked_as_by_trl(caplog, monkeypatch, answer, keeps_asking):
    async def at_once(seconds):
        await pause(min(seconds, 0.01))

    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", at_once)  # TRL waits between its attempts
    with answering(lambda path, body: answer(path, body) if path == PROBE else (200, completion_of([6, 7, 1]))) as (
        url,
        seen,
    ):
        samples = run_loop(url, chat_tokenizer(), n=8, tools=())
    asked = [path for path, _ in seen]
    assert (PROBE in asked[-4:]) == keeps_asking
    for sample in samples:
        assert sample.input_ids[-3:].tolist() == [6, 7, 1]
        np.testing.assert_allclose(sample.old_log_probs[-3:], -np.array([6, 7, 1]) / 8)
        assert set(sample.versions) == {-1}
    [said] = [record.message for record in caplog.records if record.name == "trl_rollout_corr"]
    assert "/inference/v1/generate failed with " in said


@pytest.mark.slow  # `test_async_trainer.py` starts a worker that warns
def test_the_warning_of_the_worker_reaches_the_terminal(capfd):
    """The worker is a process of its own, as in training."""
    PartialState()  # TRL's logger needs it
    tokenizer = chat_tokenizer()
    with answering(without_versions) as (url, _):
        worker = AsyncRolloutWorker(
            model_name="model", dataset=conversations(8), reward_funcs=[rewards], processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id], num_generations=2, max_inflight_tasks=2, vllm_server_url=url,
            queue_maxsize=4,
        )  # fmt: skip
        worker._loop_cls = VersionedLoop
        worker.start()
        try:
            samples = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        finally:
            worker.stop()
    assert {int(version) for sample in samples for version in sample.versions} == {-1}
    assert capfd.readouterr().err.count("does not tell the version of all tokens") == 1
