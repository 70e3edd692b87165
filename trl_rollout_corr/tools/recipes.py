"""Recipes and examples that the installed package contains."""

import shutil
from pathlib import Path


_PACKAGE = Path(__file__).parents[1]
_PARTS = ("recipes", "examples")


def source() -> Path:
    """Folder of recipes, examples and documents: inside the package if it comes from a wheel, else the checkout."""
    return next(folder for folder in (_PACKAGE / "shipped", _PACKAGE.parent) if (folder / "recipes").is_dir())


def write_recipes(folder: str | Path) -> str:
    """
    Write `recipes/` and `examples/` into a folder, which may be new. The commands of the documents work there
    unchanged. Returns a message about the files and the command to run next.
    """
    folder = Path(folder)
    if parts := [part for part in _PARTS if (folder / part).exists()]:
        raise ValueError(f"already contains {' and '.join(parts)}, which would be overwritten. Name another folder.")
    for part in _PARTS:
        shutil.copytree(source() / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    count = len(list(folder.glob("recipes/*/*.yaml")))
    return (
        f"Wrote {count} recipes and configurations to {folder / 'recipes'}, and scripts for them to "
        f"{folder / 'examples'}.\nNext:\n    cd {folder}\n    accelerate launch --config_file "
        "recipes/accelerate/cpu.yaml examples/grpo.py --config recipes/grpo/cpu.yaml\n"
    )
