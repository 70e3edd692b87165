"""
Command line.

```bash
trl-rollout-corr convert old.yaml
trl-rollout-corr report outputs/run -o report.html
trl-rollout-corr compare outputs/run/dump
trl-rollout-corr diagnose outputs/run/dump
trl-rollout-corr probe Qwen/Qwen3-0.6B --config recipe.yaml
trl-rollout-corr recipes
trl-rollout-corr docs debugging
trl-rollout-corr check run.yaml
```
"""

import argparse
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypeAlias

from .messages import SelfContainedError, __version__, progress
from .tools.formats import visible


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_RUN = (
    "folder of a run (`output_dir`), a trainer_state.json, a dump (the folder of `rollout_dump_dir`, or one of its "
    "files), or what a tracker kept (`trl-rollout-corr docs run#a-run-without-a-dump`)"
)


def main(arguments: list[str] | None = None) -> int:
    """
    Run the command line and return the exit code: 2 for unusable input, 1 if `check` finds a mistake or `diagnose` or
    `probe` finds a cause.
    """
    parser = make_parser()
    args, options = parser.parse_known_args(arguments)
    args.options = options
    if args.command is None:
        parser.print_help()
        return 0
    if options and args.command not in ("probe", "convert"):
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output, refusal = "", ""
        try:
            output = args.run(args)
        except Exception as error:  # a traceback would exit with 1, which means that something was found
            refusal = _refusal(args, error)
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    for message in dict.fromkeys(messages):  # also of a command that failed: they may say why
        progress(f"warning: {visible(message)}")
    if refusal:
        progress(visible(" ".join(refusal.split())))
        return 2
    sys.stdout.write(output)
    return int(args.code)


def _refusal(args: argparse.Namespace, error: Exception) -> str:
    """The message about unusable input."""
    if isinstance(error, SelfContainedError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{args.command} needs {error.name}, which is missing: pip install {error.name}"
    if isinstance(error, OSError):
        return f"{error.filename or getattr(args, args.subject)}: {error.strerror or error}"
    if isinstance(error, ValueError | TypeError):
        return f"{getattr(args, args.subject)}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{args.command}: unexpected {error!r} in {where}. If the input is not damaged, please report this line."


def make_parser() -> argparse.ArgumentParser:
    """The parser. It sets `run`, a function of the arguments that returns the text to print."""
    parser = argparse.ArgumentParser(
        prog="trl-rollout-corr",
        description="Tools for training with TRL when the sampler (vLLM) and the trainer differ.",
        epilog=(
            "`trl-rollout-corr COMMAND --help` explains a command, and `trl-rollout-corr docs` lists the documents."
        ),
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(code=0, subject="command")  # exit code of a completed command, and the subject of an error
    commands = parser.add_subparsers(dest="command")

    _add_convert(commands)
    _add_report(commands)
    _add_compare(commands)
    _add_diagnose(commands)
    _add_probe(commands)
    _add_recipes(commands)
    _add_docs(commands)
    _add_check(commands)
    return parser


def _add_convert(commands: _Commands) -> None:
    command = commands.add_parser(
        "convert",
        help="translate settings of verl, TRL or Axolotl into YAML of this package",
        description="Translate the settings of verl, TRL or Axolotl, and print YAML of this package and of "
        "TRL. A warning names each setting that is left out. In a training script of verl, put `trl-rollout-corr "
        "convert` in the place of `python3 -m verl.trainer.main_ppo`.",
        usage="%(prog)s [-h] [--trainer {grpo,rloo,async_grpo}] (FILE | KEY=VALUE [KEY=VALUE ...])",
        allow_abbrev=False,
    )
    _add_trainer_of_file(command)
    command.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="FILE",
        help="YAML file, or - for standard input; or arguments of verl such as algorithm.adv_estimator=grpo",
    )
    command.set_defaults(run=_convert, subject="file")


def _add_trainer_of_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trainer",
        choices=("grpo", "rloo", "async_grpo"),
        help="trainer that a file of TRL is for (default: the one that its settings tell, or GRPO)",
    )


def _add_report(commands: _Commands) -> None:
    command = commands.add_parser(
        "report",
        help="turn a run into one page",
        description="Turn a run into one page: its state, the cause of the gap between sampler and trainer, alarms, "
        "curves, and tokens with their text. Name two runs to compare them. Exit code 2: the input cannot be used.",
    )
    command.add_argument(
        "source",
        nargs="+",
        help=f"{_RUN}; or two of these",
    )
    output = "file to write: .html for the page, .png for its state and main curves (default: report.html)"
    command.add_argument("-o", "--output", default="report.html", help=output)
    follow = (
        "write the page again every few seconds, until Ctrl-C. The browser loads it again. The run may start later"
    )
    command.add_argument("--follow", action="store_true", help=follow)
    command.set_defaults(run=_report, subject="output")


def _add_compare(commands: _Commands) -> None:
    command = commands.add_parser(
        "compare",
        help="show what each preset would do to the completions of a run",
        description="Show what each preset would have done to the completions in a dump, and recommend settings. "
        "Needs neither the model nor a GPU. Exit code 2: the input cannot be used.",
    )
    command.add_argument(
        "dump", help="folder of `rollout_dump_dir`, one of its files, or the folder of a run with a dump in it"
    )
    command.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with other settings to compare, such as a recipe. May be given several times",
    )
    command.add_argument("--json", action="store_true", help="print JSON, with every preset and unrounded numbers")
    command.set_defaults(run=_compare, subject="dump")


def _add_diagnose(commands: _Commands) -> None:
    command = commands.add_parser(
        "diagnose",
        help="name the cause of the gap between sampler and trainer, and its remedy",
        description="Find the cause of the gap between sampler and trainer from the completions in a dump, or what is "
        "suspect in the log of any run of TRL. Print how strong the evidence is, and what to do. Exit code 0: "
        "there is nothing to do, 1: there is something to do or to find out, 2: the input cannot be used.",
        allow_abbrev=False,
    )
    command.add_argument(
        "source",
        metavar="run",
        help=_RUN,
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_diagnose, subject="source")


def _add_probe(commands: _Commands) -> None:
    command = commands.add_parser(
        "probe",
        help="diagnose a model and its sampler before training, from a few completions",
        description="Build the trainer and the sampler of a run, sample and score a few completions, and split "
        "the gap into its parts, without training. All options of the run may be added, such as "
        "--temperature 0.7. Exit code 0: there is nothing to do, 1: there is something to do or to find out, 2: the "
        "input cannot be used.",
        allow_abbrev=False,
    )
    command.add_argument("model", help="name or folder of a model")
    command.add_argument(
        "--config", metavar="FILE", help="recipe of the run (default: TRL's settings, with vLLM in the same process)"
    )
    command.add_argument(
        "--prompts", metavar="FILE", help="text file with one prompt per line (default: 8 built-in prompts)"
    )
    command.add_argument(
        "--completions",
        type=_positive,
        metavar="N",
        help="smallest number of completions (default: 64 of at most 128 tokens, with --quick 8 of at most 32)",
    )
    command.add_argument("--quick", action="store_true", help="take fewer and shorter completions")
    command.add_argument(
        "--trainer", choices=("grpo", "rloo"), default="grpo", help="trainer of the run (default: grpo)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_probe, subject="model")


def _add_recipes(commands: _Commands) -> None:
    command = commands.add_parser(
        "recipes",
        help="write the recipes and their training scripts to a folder",
        description=(
            "Write the folders recipes/ and examples/. The commands of the documents then work in that folder."
        ),
    )
    command.add_argument(
        "folder", nargs="?", default=".", help="folder to write to, which may be new (default: the current one)"
    )
    command.set_defaults(run=_recipes, subject="folder")


def _add_docs(commands: _Commands) -> None:
    command = commands.add_parser(
        "docs",
        help="print a document, or the section of them with some words, or list them",
        description="Print a document or one of its sections. For any other words, print the section that has "
        "most of them, in its heading if there is one, and list others. Without a name, list all documents.",
    )
    command.add_argument(
        "name",
        nargs="*",
        help="a document such as debugging, a section such as alarms#k3_high, or words of a section",
    )
    command.set_defaults(run=_docs, subject="name")


def _add_check(commands: _Commands) -> None:
    command = commands.add_parser(
        "check",
        help="check that the installed TRL is supported, or check a file of settings",
        description="Without a file, print the installed versions, and say whether the installed TRL can be "
        "corrected. With a file, read it as a training script would, without loading a model, and name the mistakes. "
        "Exit code 0: TRL can be corrected, or the file contains no mistake, 1: otherwise, 2: the file cannot be "
        "read.",
    )
    command.add_argument("file", nargs="?", help="YAML file that a training script gets as --config")
    command.add_argument(
        "--trainer",
        choices=("grpo", "rloo", "async_grpo"),
        help="trainer that the file is for (default: the one that knows most of its settings)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_check, subject="file")


# Each command imports its work when it runs, because `convert` needs no torch and `--help` should not wait for it.


def _convert(args: argparse.Namespace) -> str:
    from .tools.translation.convert import convert

    # argparse keeps options before the first argument apart, and takes ours behind it for one of them
    last = argparse.ArgumentParser(prog="trl-rollout-corr convert", add_help=False, allow_abbrev=False)
    _add_trainer_of_file(last)
    named, behind = last.parse_known_args(args.arguments)
    arguments = [*args.options, *behind]
    args.file = arguments[0] if len(arguments) == 1 else "convert"
    return convert(arguments, named.trainer or args.trainer)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _report(args: argparse.Namespace) -> str:
    from .tools.report.report import follow_report, write_report

    return (follow_report if args.follow else write_report)(args.source, args.output)


def _compare(args: argparse.Namespace) -> str:
    from .tools.analysis.compare import compare

    return compare(args.dump, args.config, as_json=args.json)


def _diagnose(args: argparse.Namespace) -> str:
    from .tools.diagnosis.command import diagnose_source

    text, healthy = diagnose_source(args.source, as_json=args.json)
    args.code = 0 if healthy else 1
    return text


def _probe(args: argparse.Namespace) -> str:
    from .tools.probe.probe import probe

    run = {
        name: getattr(args, name)
        for name in ("model", "config", "options", "prompts", "completions", "trainer", "quick")
    }
    text, healthy = probe(run, as_json=args.json)
    args.code = 0 if healthy else 1
    return text


def _recipes(args: argparse.Namespace) -> str:
    from .tools.recipes import write_recipes

    return write_recipes(args.folder)


def _docs(args: argparse.Namespace) -> str:
    from .tools.documents import document

    args.name = " ".join(args.name)
    return document(args.name or None)


def _check(args: argparse.Namespace) -> str:
    from .tools.check import check_file, check_installation

    if args.file is None and args.trainer is not None:
        raise SelfContainedError(f"--trainer {args.trainer} has an effect only with a file")
    with redirect_stdout(sys.stderr):  # libraries print during their import
        if args.file is None:
            report, usable = check_installation(as_json=args.json)
        else:
            report, usable = check_file(args.file, args.trainer, as_json=args.json)
    args.code = 0 if usable else 1
    return report


if __name__ == "__main__":
    sys.exit(main())
