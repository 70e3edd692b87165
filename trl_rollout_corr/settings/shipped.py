"""Recipes and examples, which an installed package carries with it."""

import shutil
from pathlib import Path


_PACKAGE = Path(__file__).parent
_PARTS = ("recipes", "examples")


def source() -> Path:
    """The folder that has them: in the wheel a part of the package, in a checkout the checkout."""
    return next(folder for folder in (_PACKAGE / "shipped", _PACKAGE.parent) if (folder / "recipes").is_dir())


def write_recipes(folder: str | Path) -> str:
    """
    Write `recipes/` and `examples/` into a folder, in which the commands of the documents then work as they are.

    Args:
        folder (`str` or `Path`):
            Where to. It is made if it is not there.

    Returns:
        `str`: what was written, and the command to run next.

    Raises:
        `ValueError`: if the folder has `recipes` or `examples` already.
    """
    folder = Path(folder)
    if found := [part for part in _PARTS if (folder / part).exists()]:
        raise ValueError(f"has {' and '.join(found)} already, which would be overwritten. Name another folder.")
    for part in _PARTS:
        shutil.copytree(source() / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    count = len(list(folder.glob("recipes/*/*.yaml")))
    return (
        f"Wrote {count} recipes and configurations to {folder / 'recipes'}, and what runs them to {folder / 'examples'}.\n"
        f"Next:\n    cd {folder}\n    accelerate launch --config_file recipes/accelerate/cpu.yaml examples/grpo.py "
        "--config recipes/grpo/cpu.yaml\n"
    )
