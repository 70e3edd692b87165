"""The documents say what the code does."""

import json
import math
import re
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from docs.tables import made
from tests.reference import threshold_of
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.correction.age import (
    Staleness,
    count_ages,
    count_completions,
    count_lags,
    engine_gap,
    update_gap,
)
from trl_rollout_corr.correction.groups import add_up_groups
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.pushes.push_checks import Unmoved
from trl_rollout_corr.pushes.rescore import Rescored
from trl_rollout_corr.replay.router_hooks import Flips
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.tools.bands import HEALTHY, band_in_words
from trl_rollout_corr.tools.monitor.examine import examine
from trl_rollout_corr.trainers.age_notice import AgeNotice


ROOT = Path(__file__).parent.parent


EVIDENCE = "benchmarks/arena/EVIDENCE.md"
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "recipes/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    EVIDENCE,
]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_parts_that_are_made_of_the_code_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    assert text == made(text), "`make tables` writes them"


@pytest.mark.parametrize(
    ("tokens", "preset", "mean", "size"),
    [
        (1000, "trl", 0.59, 0.47),
        (2200, "trl", 0.36, 0.30),
        (4000, "trl", 0.20, 0.18),
        (8000, "trl", 0.07, 0.06),
        (1000, "decoupled_seq_is", 0.70, 0.54),
        (4000, "decoupled_seq_is", 0.28, 0.21),
    ],
)
def test_length_alone_gives_completions_these_weights(tokens, preset, mean, size):
    variance = 2 * 0.0008 * tokens  # of the sum of log-ratios, for this `k3_kl`
    sums = torch.distributions.Normal(-variance / 2, variance**0.5).icdf((torch.arange(100_000) + 0.5) / 100_000)
    sums, zeros = sums[:, None], torch.zeros(len(sums), 1)  # completions of one token, which have these sums
    config = RolloutCorrectionConfig(rollout_correction=preset)
    metrics = compute_rollout_correction(sums, zeros, zeros + 1, config, advantages=zeros[:, 0] + 1).metrics()
    assert metrics[f"{PREFIX}rollout_is_mean"] == pytest.approx(mean, abs=0.006)
    assert metrics[f"{PREFIX}rollout_is_eff_sample_size"] == pytest.approx(size, abs=0.006)
    method, alarms = (" ".join((ROOT / f"docs/{page}.md").read_text().split()) for page in ("method", "alarms"))
    assert f"{mean:.2f}, {size:.2f}" in method or f"{size:.2f} at {tokens:,}" in alarms


def test_the_table_of_fields_is_that_of_the_configurations():
    from trl_rollout_corr import (
        RolloutCorrectedAsyncGRPOConfig,
        RolloutCorrectedGRPOConfig,
        RolloutCorrectedRLOOConfig,
    )

    section = (ROOT / "docs/processes.md").read_text().split("### Fields of each trainer\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 2
    for names, *known in rows:
        for name in re.findall(r"`(.+?)`", names):
            for config, told in zip(
                (RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig, RolloutCorrectedAsyncGRPOConfig),
                known,
                strict=True,
            ):
                has = any(re.fullmatch(name.replace("*", ".*"), field) for field in config.__dataclass_fields__)
                assert has == told.startswith("yes"), f"{name} in {config.__name__}"


def documented_keys() -> set[str]:
    """Keys in the first column of the tables that list metrics."""
    text = (ROOT / "docs/metrics.md").read_text().split("## All metrics")[1]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def reported_keys() -> set[str]:
    """Keys of every configuration that adds some, with the names of criteria replaced by `<c>`."""
    from trl_rollout_corr.tools.monitor.callback import ALARMS  # imports TRL

    keys = set()
    for threshold in (2.0, [0.5, 2.0]):
        config = RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=True,
            rollout_rs=list(CRITERIA),
            rollout_rs_threshold=[threshold_of(name, 2.0) for name in CRITERIA],
        )
        ones = torch.ones(2, 1)
        # one token is kept, one rejected
        train, rollout = torch.tensor([[-1.0], [-6.0]]), torch.tensor([[-1.0], [-0.5]])
        correction = compute_rollout_correction(train, rollout, ones, config, advantages=torch.tensor([1.0, -1.0]))
        keys |= {key.removeprefix(PREFIX) for key in correction.metrics()}
    keys |= {key.removeprefix(PREFIX) for key in (*accounted_keys(), ALARMS, *keys_of_pushes())}
    return {documented_name(key) for key in keys}


def keys_of_pushes() -> set[str]:
    counted = (
        Rescored.of({"fresh": torch.ones(2), "age": torch.ones(2), "texts": torch.ones(2)}),
        Unmoved.of({"quantised": torch.ones(2)}),
    )
    return {key for sums in counted for key in sums.finish()}


def documented_name(key: str) -> str:
    """A key without prefix, with names of criteria and of turns replaced as in the tables."""
    pattern = "|".join(sorted(CRITERIA, key=len, reverse=True))
    return re.sub("^turn_[a-z]+/", "turn_<part>/", re.sub(pattern, "<c>", key.removeprefix(PREFIX)))


def accounted_keys() -> set[str]:
    """Keys of three completions, of which one is rejected and one was dropped, that were trained on twice."""
    keep = torch.tensor([[True, True], [False, False], [True, True]])
    turns, gaps, signs = torch.tensor([[1, 2], [1, 1], [1, 1]]), torch.zeros(3, 2), torch.tensor([1.0, 0.0, -1.0])
    groups = add_up_groups(torch.ones_like(keep), keep, keep.float(), signs, torch.ones(3), turns, gaps)
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    statistics = compute_rollout_correction(zeros, zeros, ones, RolloutCorrectionConfig(rollout_is="token")).statistics
    segments = update_gap(torch.zeros(3, 2), torch.zeros(3, 2), keep) | engine_gap(statistics)
    segments |= count_ages(torch.ones(2)) | count_lags(torch.ones(3), keep) | count_completions(keep, 1)
    return {*groups.finish(), *Staleness.of(segments).finish(), *Flips.count(keep, keep).finish()}


def test_every_metric_is_documented_and_every_documented_metric_is_reported():
    assert documented_keys() == reported_keys()


def test_no_metric_has_the_name_of_a_folder_of_others():
    """Trackers that keep a file per metric, such as MLflow's, cannot store `a` beside `a/b`."""
    keys = {PREFIX + key for key in reported_keys()}
    assert [(key, other) for key in keys for other in keys if other.startswith(f"{key}/")] == []


def test_names_in_trackers_are_those_of_transformers():
    from transformers.integrations.integration_utils import rewrite_logs

    section = (ROOT / "docs/metrics.md").read_text().split("## Names in dashboards and trackers")[1]
    table = re.findall(r"^\| .* \| `(\S+)` \| `(\S+)` \|$", section, re.MULTILINE)
    logged, shown = table[:2]
    assert {*rewrite_logs(dict.fromkeys(logged, 0.0))} == {*shown}
    (key,) = re.findall(r"search for `(\S+)`", section)
    assert key == shown[0]


def test_the_examples_of_auto_are_what_it_computes():
    section = (ROOT / "docs/method.md").read_text().split("\n## `auto`\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:6] for line in section.splitlines() if re.match(r"\| (posi|nega)tive", line)]
    assert len(rows) > 5
    for sign, sampler, trainer, ratio, factor in rows:
        q, p = float(sampler), float(trainer)
        assert p / q == pytest.approx(float(ratio), rel=0.01)
        train, rollout = (torch.tensor([[probability]]).log() for probability in (p, q))
        advantage = torch.tensor([1.0 if "positive" in sign else -1.0])
        settings = RolloutCorrectionConfig(rollout_correction="auto")
        found = compute_rollout_correction(train, rollout, torch.ones(1, 1), settings, advantages=advantage)
        assert found.coefficients.item() == pytest.approx(float(factor), abs=1e-6)


# Options of OpenRLHF, and fields of this package: `docs/verl.md` has them
PER_TOKEN = {"rollout_is": "token", "rollout_is_threshold": math.inf}
OPENRLHF = [
    (("token", "mask", "ratio", 0.5, 5.0), {"rollout_is": "token", "rollout_is_threshold": [0.5, 5.0]}),
    (
        ("token", "clip", "ratio", 0.5, 5.0),
        {"rollout_is": "token", "rollout_is_threshold": [0.5, 5.0], "rollout_is_clamp": True},
    ),
    (("token", "clip", "ratio", 0.0, 2.0), {"rollout_is": "token", "rollout_is_threshold": 2.0}),
    *(
        (("seq", "mask", gate, low, high), {**PER_TOKEN, "rollout_rs": [criterion], "rollout_rs_threshold": [bounds]})
        for gate, low, high, criterion, bounds in [
            ("ratio", 0.5, 5.0, "seq_mean_k1", [0.5, 5.0]),
            ("binary_kl", 0.0, 0.003, "seq_mean_binary_kl", 0.003),
            ("tv", 0.0, 0.05, "seq_mean_tv", 0.05),
        ]
    ),
]


def factor_of_openrlhf(train: list[float], rollout: list[float], options: tuple) -> list[float]:
    """Factor of each token of a completion on its gradient, as the documents of OpenRLHF describe it."""
    level, mode, gate, low, high = options
    ratios = [math.exp(p - q) for p, q in zip(train, rollout, strict=True)]
    pairs = [(math.exp(q), math.exp(p)) for p, q in zip(train, rollout, strict=True)]  # sampler, trainer
    numbers = {
        "ratio": [math.log(r) for r in ratios],
        "binary_kl": [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for q, p in pairs],
        "tv": [abs(q - p) for q, p in pairs],
    }[gate]
    if level == "seq":
        numbers = [sum(numbers) / len(numbers)] * len(numbers)
    numbers = [math.exp(x) for x in numbers] if gate == "ratio" else numbers
    if mode == "clip":
        return [min(max(x, low), high) for x in numbers]
    return [r if low <= x <= high else 0.0 for r, x in zip(ratios, numbers, strict=True)]


@pytest.mark.parametrize(("options", "settings"), OPENRLHF, ids=str)
def test_settings_of_openrlhf_give_each_token_the_same_factor(options, settings):
    import yaml

    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(64, 5, generator=generator).double() - 0.05
    spread = torch.rand(64, 1, generator=generator).double() * 1.5
    train = (rollout + spread * torch.randn(64, 5, generator=generator).double()).clamp(max=-0.01)
    expected = [factor_of_openrlhf(p, q, options) for p, q in zip(train.tolist(), rollout.tolist(), strict=True)]
    ones, signs = torch.ones(64, 5), torch.ones(64)
    found = compute_rollout_correction(train, rollout, ones, RolloutCorrectionConfig(**settings), advantages=signs)
    assert found.coefficients.double().numpy() == pytest.approx(torch.tensor(expected).double().numpy(), rel=1e-4)
    assert (found.coefficients != 1).any()
    assert (found.coefficients == 0).any() == (options[1] == "mask")
    page = (ROOT / "docs/verl.md").read_text()
    row = ", ".join(
        f"`{name}: {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}`"
        for name, value in settings.items()
    )
    assert any(f"`level {options[0]}`" in line and row in line for line in page.splitlines()), row


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_the_documents_compiles_and_names_what_exists(document):
    for code in blocks(document, "python"):
        compile(code, document, "exec")
        for statement in re.findall(r"^from trl_rollout_corr import .+", code, re.MULTILINE):
            exec(statement, {})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_yaml_in_the_documents_is_a_valid_configuration(document):
    import yaml

    own = set(RolloutCorrectionConfig.__dataclass_fields__)
    for text in blocks(document, "yaml"):
        settings = yaml.safe_load(text)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            RolloutCorrectionConfig(**{key: value for key, value in settings.items() if key in own})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_make_targets_in_the_documents_exist(document):
    known = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets, paths, links = named_in((ROOT / document).read_text())
    assert links  # of every document, and the others at least of this one
    assert document != "README.md" or (targets and paths)
    for target in targets:
        assert target in known or target in ("a", "sense", "the", "it"), target
    for path in paths:
        assert (ROOT / path).exists(), path
    for link, anchor in links:
        target = (ROOT / document).parent / link if link else ROOT / document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), f"{link}#{anchor}"


def named_in(text: str) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Targets of make, paths of the repository, and links with their anchors."""
    targets = re.findall(r"`?make ([a-z-]+)", text)
    rooms = "examples|recipes|docs|tests|benchmarks|trl_rollout_corr"
    paths = re.findall(rf"\b((?:{rooms})/[\w./-]*\w)", re.sub(r"https?://\S+", "", text))
    return targets, paths, re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text)


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"\]\([^)]*\)", "", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def healthy_claims(document: str) -> dict[str, list[str]]:
    """Healthy bands of metrics that a document has in a table, or in brackets."""
    text = (ROOT / document).read_text().replace("rollout_corr/", "")
    claims: dict[str, list[str]] = {}
    for keys, cells in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \|$", text, re.MULTILINE):
        for key in re.findall(r"`(\w+)`", keys):
            claims.setdefault(key, []).append(cells)
    for key, claim in re.findall(r"`(\w+)` \(((?:below|above) [\d.]+)\)", text):
        claims.setdefault(key, []).append(claim)
    return claims


@pytest.mark.parametrize(
    ("document", "keys"),
    {
        "docs/metrics.md": {key for key in HEALTHY if "/" not in key},  # without TRL's own
    }.items(),
)
def test_healthy_bands_are_those_of_the_code(document, keys):
    claims = healthy_claims(document)
    for key in keys:
        assert any(re.search(rf"(^|\W){re.escape(band_in_words(key))}(\W|$)", claim) for claim in claims[key]), claims[
            key
        ]


def test_every_document_is_listed():
    listed = re.findall(r"\]\(([\w./-]+)\)", (ROOT / "docs/README.md").read_text())
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert documents <= set(listed)


WORDS = (
    "gap",
    "ratio",
    "spread",
    "fresh",
    "stale",
    "collapse",
    "setting",
    "gain",
    "rule for differences",
    "second look",
)


@pytest.mark.parametrize("word", [*WORDS, "TRL's default schedule"])
def test_a_private_word_is_in_the_glossary(word):
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert any(re.search(rf"(^|\W){re.escape(word)}(\W|$)", row) for row in rows)


TUTORIAL = ROOT / "benchmarks/tutorial"


def messages_about(log: str, **fields) -> list[str]:
    """Lines of what the monitor says today about a recorded log."""
    from trl_rollout_corr import RolloutCorrectedGRPOConfig

    batch = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "num_generations": 8}
    args = RolloutCorrectedGRPOConfig("unused", use_cpu=True, bf16=False, use_vllm=True, **batch, **fields)
    history = [json.loads(line) for line in (TUTORIAL / log).read_text().splitlines()]
    lines = []
    for alarm in examine(history, args.settings, fields=vars(args)):
        lines.append(f"▲ step {alarm.step}: {alarm.in_short}")
        for words in (alarm.why, alarm.advice):
            lines += [f"    {line}" for line in textwrap.wrap(words, 106, break_on_hyphens=False)]
    return lines


def test_the_example_without_trl_prints_what_the_page_says(capsys):
    _, section = (ROOT / "docs/custom.md").read_text().split("## Without TRL")
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_tutorial_quotes_what_its_commands_print(capsys):
    """
    Each line of its outputs is in a recorded run, without the columns of times, or is what a command or the monitor says
    about it today.
    """
    printed = [line for path in sorted(TUTORIAL.glob("*.txt")) for line in path.read_text().splitlines()]
    for command in ("diagnose", "compare"):
        assert main([command, str(TUTORIAL / "uncorrected")]) in (0, 1)
    printed += capsys.readouterr().out.splitlines()
    without_times = {re.sub(r" +(\d+:\d\d|elapsed) +(\d+:\d\d|-|left)$", "", line) for line in printed}
    messages = messages_about("long.jsonl", rollout_correction="trl")
    messages += messages_about("uncorrected/logs.jsonl", rollout_correction="disabled")
    ages = AgeNotice(RolloutCorrectionConfig(rollout_correction="auto").settings)
    messages.append(ages.news(2, {f"{PREFIX}k3_kl": 0.01, f"{PREFIX}stale_fraction": 1.0}))
    quoted = [line for text in blocks("docs/tutorial.md", "text") for line in text.splitlines() if line]
    said = [line for line in quoted if line in messages]
    assert len(said) > 10
    assert [line for line in quoted if line.startswith("▲") and line not in said] == []
    assert [line for line in quoted if line not in said and line not in without_times] == []


# Form -----------------------------------------------------------------------------------------------------------------


# A line break in Chinese text is shown as a space
WRITTEN = [page for page in DOCUMENTS if ".zh-CN" not in page and page.startswith(("README", "docs/"))]
WRITTEN += ["CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "recipes/README.md"]


def shown_lines(document: str) -> list[str]:
    """Lines without blocks of code, comments and the targets of links that end a line."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()


def faults_of_form(document: str) -> list[str]:
    """Lines of prose above 120 columns, unless a single word is that long, and cells of tables above 40 words."""
    lines = shown_lines(document)
    wide = [line for line in lines if len(line) > 120 and not line.startswith("|") and " " in line.strip()]
    cells = [cell for line in lines if line.startswith("|") for cell in re.sub(r"\]\([^)]*\)", "]", line).split("|")]
    return wide + [cell for cell in cells if len(cell.split()) > 40]


@pytest.mark.parametrize("document", WRITTEN)
def test_a_page_is_wrapped(document):
    assert faults_of_form(document) == []


FOLDERS = ["benchmarks/*", "contributions", "contributions/*"]
OTHERS = ["AGENTS.md", *(str(x.relative_to(ROOT)) for folder in FOLDERS for x in ROOT.glob(f"{folder}/*.md"))]


@pytest.mark.parametrize("document", OTHERS)
def test_a_page_for_developers_is_wrapped(document):
    assert faults_of_form(document) == []
