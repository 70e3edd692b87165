"""A TRL of the future: methods of TRL with another text, and a whole copy of it."""

import inspect
import shutil
import textwrap
from pathlib import Path

import trl


def edited(function, *edits: tuple[str, str]):
    """A function of TRL with some of its text replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {function.__qualname__}"
        source = source.replace(old, new)
    names: dict = {}
    exec(
        compile(source, inspect.getsourcefile(inspect.unwrap(function)), "exec"),
        inspect.unwrap(function).__globals__,
        names,
    )
    return names[function.__name__]


def copy_trl(folder: Path, version: str, edits: dict[str, list[tuple[str, str]]]) -> str:
    """
    A copy of TRL, as if installed.

    Args:
        folder (`Path`):
            Where to put it.
        version (`str`):
            What it says its version is.
        edits (`dict[str, list[tuple[str, str]]]`):
            What to replace, and by what, by file in the package.

    Returns:
        `str`: what to put into `PYTHONPATH`.
    """
    package = Path(trl.__file__).parent
    shutil.copytree(package, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    (information,) = package.parent.glob("trl-*.dist-info")
    metadata = (information / "METADATA").read_text()
    own = folder / f"trl-{version}.dist-info"
    own.mkdir()
    found = next(line for line in metadata.splitlines() if line.startswith("Version: "))
    (own / "METADATA").write_text(metadata.replace(found, f"Version: {version}", 1))
    for name, replacements in edits.items():
        path = folder / "trl" / name
        source = path.read_text()
        for old, new in replacements:
            assert old in source, f"{old!r} is not in {name}"
            source = source.replace(old, new)
        path.write_text(source)
    return str(folder)
