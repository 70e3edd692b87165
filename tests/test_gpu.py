"""The measurement on a GPU, as far as a CPU goes: its plan, what fails and goes on, what it tells, and what it does not."""

import ast
import inspect
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.launching import ROOT, benchmarks, clean_environment, output_of


FOLDER = ROOT / "benchmarks/gpu"


@pytest.fixture
def gpu() -> Iterator[SimpleNamespace]:
    with benchmarks("gpu", "") as load:
        names = ("run", "page", "plan", "results", "private")
        yield SimpleNamespace(**{name: load(name) for name in names})


# The plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "minutes"), [("10min", 12), ("hour", 75), ("night", 600)])
def test_a_size_takes_as_long_as_it_says(gpu, size, minutes):
    planned = sum(part.minutes for part in gpu.plan.parts(size))
    assert minutes / 2 < planned < minutes


def test_every_section_is_in_the_test_without_a_gpu(gpu):
    smoke = gpu.plan.parts("smoke")
    assert {part.section for part in smoke} == set(gpu.plan.SECTIONS)
    assert {part.section for part in gpu.plan.parts("night")} == set(gpu.plan.SECTIONS)
    in_words = [gpu.run.lacks(part, 0, []) for part in smoke]
    assert set(in_words) == {None, gpu.plan.NEEDS["gpu"], gpu.plan.NEEDS["two gpus"]}


def test_parts_have_the_arguments_of_their_section(gpu):
    tree = ast.parse((FOLDER / "sections.py").read_text())
    functions = {x.name: [a.arg for a in x.args.args] for x in tree.body if isinstance(x, ast.FunctionDef)}
    for size in gpu.plan.SIZES:
        parts = gpu.plan.parts(size)
        assert len({part.file for part in parts}) == len(parts)
        for part in parts:
            assert set(part.options) <= set(functions[part.section])
            assert json.loads(json.dumps(part.options)) == part.options


def test_engines_have_arguments_of_vllm(gpu):
    from typing import get_args

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm import EngineArgs
    from vllm.config.cache import CacheDType
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    known = {
        "quantization": QUANTIZATION_METHODS,
        "kv_cache_dtype": get_args(CacheDType),
        "attention_backend": AttentionBackendEnum.__members__,
    }
    fields = inspect.signature(EngineArgs).parameters
    for engine in gpu.plan.SAMPLERS.values():
        for name, value in engine.items():
            assert name in fields
            assert value in known.get(name, [value])
    assert "enable_return_routed_experts" in fields  # of `sections.routing`
    attentions = [trainer["attention"] for trainer in gpu.plan.TRAINERS.values() if "attention" in trainer]
    assert set(attentions) <= {"eager", *ALL_ATTENTION_FUNCTIONS}


# The run --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(gpu, tmp_path, monkeypatch, capsys):
    """Runs three parts, of which one fails and one needs a GPU. Returns code, output and results."""
    part = gpu.plan.Part
    parts = [
        part("kernels", "alone", 0.1, {"shapes": ["4x64"], "rounds": 1}, ()),
        part("kernels", "broken", 0.1, {"shapes": ["no shape"], "rounds": 1}, ()),
        part("gap", "fp8 weights", 1.0, {}, ("gpu",)),
    ]
    model, output = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(gpu.run, "parts", lambda size: parts)
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", str(model), "--output_dir", str(output)])

    def run():
        code = gpu.run.main()
        return code, capsys.readouterr().out, json.loads((output / "results.json").read_text())

    return run


def test_what_fails_stops_nothing_and_is_tried_again(run, gpu, tmp_path, monkeypatch):
    code, printed, results = run()
    assert code == 1
    assert "gap: fp8 weights: left out, as it needs a GPU, and none was found." in printed
    assert "2 of 2 parts to do" in printed
    assert len(results["sections"]["kernels"]) == 3  # cases of one shape
    assert [part["name"] for part in results["failed"]] == ["broken"]
    assert results["failed"][0]["log"].rstrip().endswith("'no shape'")
    assert [row["name"] for row in results["left_out"]] == ["fp8 weights"]
    assert results["format"] == gpu.results.FORMAT
    assert {"torch", "trl"} < set(results["releases"])
    assert results["machine"]["gpus"] == []

    page = (tmp_path / "out/page.html").read_text()
    assert "no shape" in page
    for text in (json.dumps(results), page):  # a log has paths of this checkout, the interpreter and the output
        for private in (str(ROOT), str(tmp_path), sys.prefix, socket.gethostname()):
            assert private not in text
    assert not re.search(r"/\w+/\w+", json.dumps(results))

    file = tmp_path / "out/parts/kernels__alone.json"
    before = file.stat().st_mtime_ns
    assert "1 of 2 parts to do" in run()[1]
    assert file.stat().st_mtime_ns == before

    monkeypatch.setattr(gpu.run, "releases", lambda: {"torch": "0.1", "commit": ""})
    with pytest.raises(SystemExit, match="parts with another releases"):
        run()


def test_a_part_ends_with_the_command(tmp_path):
    job = {"section": "kernels", "options": {"shapes": ["256x8192"], "rounds": 10**6}, "model": "", "devices": []}
    (tmp_path / "job.json").write_text(json.dumps({**job, "work": str(tmp_path), "output": str(tmp_path / "result")}))
    command = [sys.executable, str(FOLDER / "sections.py"), str(tmp_path / "job.json")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=clean_environment())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    process.stdin.close()  # as when the command is killed
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_a_part_that_hangs_is_ended(gpu):
    with subprocess.Popen(["sleep", "100"]) as process:
        assert gpu.run.wait(process, 0.1, print) == "It was ended after 0 seconds."
        process.kill()


def test_what_is_not_told(gpu, monkeypatch):
    monkeypatch.setenv("USER", "zaphod")
    monkeypatch.setattr(socket, "gethostname", lambda: "heart-of-gold.example.org")
    monkeypatch.setenv("HOME", "/mnt/some where/zaphod")
    gpu.private.names_of_this_machine.cache_clear()
    log = """File "/mnt/some where/zaphod/run/trainer.py", line 3, in /opt/x/y
    zaphod@heart-of-gold:~$ connect 10.1.2.3, HF_TOKEN=hf_abcdefghijkl, mail a.b@c.org; Qwen/Qwen2.5-0.5B took 1.0.3 s"""
    told = gpu.private.private({"log": [log], "nan": float("nan"), "third": 1 / 3})
    gpu.private.names_of_this_machine.cache_clear()
    assert told["log"] == [
        'File "<path> trainer.py", line 3, in <path>\n'
        "    <name>@<name>:~$ connect <address>, HF_TOKEN=<token>, mail <mail>; Qwen/Qwen2.5-0.5B took 1.0.3 s"
    ]
    assert told["nan"] is None
    assert told["third"] == 0.33333


# The page -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def results(gpu):
    """A file as of a GPU, with made-up figures."""
    gap = {"tokens": 9, "rms": 0.1, "k3_error": 0.0, "diagnosis": "rounding (healthy)"}
    run = {"task": "sums", "age": 8, "seed": 0, "before": 0.5, "after": 0.7, "limit": 100, "seconds": 9.0}
    sections = {
        "seams": [
            {"steps": 3, "off_equals_trl": True, "trl_equals_itself": True}
            | {"of_trainer": 0.01, "of_formula_alone": 0.02, "without_weights": 0.3}
        ],
        "gap": [
            {"sampler": "bf16", "trainer": "fp32", "k3": 0.001, **gap},
            {"sampler": "bf16", "trainer": "bf16", "k3": 0.002, **gap},
            {"sampler": "bf16", "trainer": "FlashAttention-2", "error": "ImportError: not installed"},
            {"sampler": "fp8 weights", "trainer": "fp32", "k3": 0.04, **gap},
        ],
        "cost": [{"tokens": 512, "correction": name, "ratio": 1.25} for name in ("no correction", "auto")],
        "kernels": [{"shape": "4x4", "case": "token", "ours_ms": 0.5, "verl_over_ours": 3.0}],
        "training": [
            {**run, "arm": "auto", "last_reward": 0.75, "rewards": [0.5, 0.75]},
            {**run, "arm": "no correction", "last_reward": 0.25, "rewards": [0.5, 0.25]},
        ],
        "asynchronous": [{"arm": arm, "seconds_per_step": 2.0, "gpus": 1} for arm in ("synchronous", "asynchronous")],
        "routing": [{"trainer": "float32", "replay": replay, "k3": 0.5} for replay in ("none", "replay")],
        "fsdp2": [{"processes": name, "k3": 0.003} for name in ("ddp", "fsdp2")],
    }
    machine = {"gpus": [{"name": "Card"}] * 2, "cpu": "Chip", "cores": 8}
    about = {
        "size": "hour",
        "model": {"name": "a model"},
        "machine": machine,
        "releases": {"trl": "1.16.0", "vllm": "0.31.0"},
    }
    return {"format": gpu.results.FORMAT, **about, "sections": sections, "parts": [], "failed": [], "left_out": []}


def test_ten_sentences_say_what_was_found(gpu, results):
    found = gpu.page.sentences(results)
    assert len(found) == 10
    assert all(text[0].isupper() and text.endswith(".") for text in found)
    assert "2 x Card" in found[0]
    assert "3 steps that correct nothing equal TRL's" in found[1]
    assert "0.001 with bf16" in found[2]
    assert "0.04 with fp8 weights" in found[2]
    assert "Of 2 trainers" in found[3]
    results["sections"]["seams"][0]["off_equals_trl"] = False
    assert "3 steps that correct nothing differ from TRL's" in gpu.page.sentences(results)[1]


def test_a_sentence_says_why_there_is_nothing(gpu, results):
    results["sections"] = {name: [] for name in results["sections"]}
    results["left_out"] = [{"section": "fsdp2", "name": "x", "reason": gpu.plan.NEEDS["two gpus"]}]
    results["failed"] = [{"section": "cost", "name": "x", "failed": "It ended.", "log": "the log"}]
    found = gpu.page.sentences(results)
    assert len(found) == 10
    assert found[4] == "The cost of a step failed, with the end of its log on the page."
    assert found[9] == "Training in two processes was left out: it needs two GPUs, and there are fewer."


def test_a_page_has_pictures_tables_and_logs(gpu, results):
    results["failed"] = [{"section": "cost", "name": "16384 tokens", "failed": "It ended.", "log": "out of memory"}]
    page = gpu.page.render(results)
    assert page.count("<svg") == 4  # the gap, the cost, experts and one training
    for text in ("out of memory", "ImportError: not installed", "0.7"):
        assert text in page


def test_files_stand_side_by_side(gpu, results, tmp_path, monkeypatch, capsys):
    other = {**results, "sections": {**results["sections"], "cost": []}}
    for name, content in {"one": results, "other": other}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["run.py", "--join", str(tmp_path)])
    assert gpu.run.main() == 0
    printed = capsys.readouterr().out
    assert "| figure | one | other |" in printed
    assert "| cost: 512, auto: ratio | 1.25 | - |" in printed
    assert "Side by side" in (tmp_path / "joined.html").read_text()
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(SystemExit, match=r"old\.json is no file of results"):
        gpu.run.main()


# The documents --------------------------------------------------------------------------------------------------------


def test_what_ran_on_a_gpu_refers_to_a_file(gpu, results):
    row = gpu.page.ran_on({"card": results}).splitlines()[-1]
    assert row.startswith(
        "| [card](../benchmarks/gpu/results/card.json) | 2 x Card | a model | 1.16.0 | 0.31.0 | hour |"
    )
    on_a_cpu = {**results, "machine": {**results["machine"], "gpus": []}}
    assert gpu.page.ran_on({"smoke": on_a_cpu}) == gpu.page.NOBODY


@pytest.mark.parametrize(
    ("document", "root", "nobody"),
    [
        ("docs/compatibility.md", "../", "Nothing has been run on a GPU yet."),
        ("README.md", "", "Nothing has been run on a GPU yet."),
        ("README.zh-CN.md", "", "还没有在 GPU 上运行过任何东西。"),
    ],
)
def test_documents_list_what_ran_on_gpus(gpu, document, root, nobody):
    written = re.search(r"<!-- gpus: .*? -->\n(.*?)\n<!-- end of gpus -->", (ROOT / document).read_text(), re.DOTALL)[
        1
    ]
    assert written == gpu.page.ran_on(gpu.results.read(FOLDER / "results"), root, nobody)


NOTHING_YET = [
    ("README.md", "We had no GPU"),
    ("README.md", "No GPU was used"),
    ("README.md", "trained with it on CPUs"),
    ("README.zh-CN.md", "我们没有 GPU"),
    ("README.zh-CN.md", "没有用过 GPU"),
    ("README.zh-CN.md", "在 CPU 上这样训练过"),
    ("docs/distributed.md", "Nothing ran on GPUs"),
    ("benchmarks/README.md", "Nothing here was measured on a GPU"),
    ("benchmarks/gpu/README.md", "None of the figures of this project comes from a GPU yet"),
    ("CHANGELOG.md", "Nobody ran it on one yet"),
]


@pytest.mark.parametrize(("document", "claim"), NOTHING_YET)
def test_documents_say_that_nothing_ran_on_a_gpu_until_something_did(gpu, document, claim):
    nothing = gpu.page.ran_on(gpu.results.read(FOLDER / "results")) == gpu.page.NOBODY
    assert (claim in (ROOT / document).read_text()) == nothing


# Everything -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.vllm
def test_all_that_a_cpu_can_run(tmp_path):
    printed = output_of(sys.executable, str(FOLDER / "run.py"), "--smoke", "--output_dir", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failed"] == []
    assert [name for name, rows in results["sections"].items() if not rows] == ["fsdp2"]
    seams = results["sections"]["seams"][0]
    assert seams["off_equals_trl"]
    assert seams["trl_equals_itself"]
    assert seams["of_trainer"] < 1e-4 < 1e-2 < seams["without_weights"]
    assert all(row["k3"] < 0.01 for row in results["sections"]["gap"])
    assert "No GPU was found" in printed
