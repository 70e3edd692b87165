"""Command `trl-rollout-corr check`: installed versions, and a check that the installed TRL can be corrected."""

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version

from ..messages import __version__


PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")


def installed(package: str) -> str | None:
    """Version of a package; `None` if it is not installed."""
    for distribution in (package, f"{package}-cpu"):  # vLLM has a distribution for CPUs
        try:
            return version(distribution)
        except PackageNotFoundError:
            pass
    return None


def inspect_trl() -> tuple[str, bool]:
    """Report on the installed packages, and `True` if the trainers work with them."""
    versions = {"python": platform.python_version(), "trl-rollout-corr": __version__}
    versions |= {name: installed(name) or "not installed" for name in PACKAGES}
    lines = [f"{name:<17} {number}" for name, number in versions.items()]
    names, problem = _look_at_trl()
    lines += ["", *names, "", problem or f"trl {installed('trl')} can be corrected.{_untested()}"]
    return "\n".join(lines) + "\n", problem is None


def _look_at_trl() -> tuple[list[str], str | None]:
    """Lines about the names of TRL in use, and the reason why the trainers do not start with it, if any."""
    if installed("trl") is None:
        return [], "trl is not installed: `pip install trl`."
    from ..trainers.versions import outside_window, release

    outside = outside_window(release(), version("trl"))
    if outside:  # modules may be missing
        return [], outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, about the versions above
            from ..trainers import trl_interface
    except Exception as error:  # any error of the import stops the trainers, too
        return [], f"trl {installed('trl')} cannot be imported: {type(error).__name__}: {error}"
    lines = [
        f"{owner.__name__:<17} {' '.join(trl_interface.changes(owner)) or 'all names in use are there'}"
        for owner in trl_interface.METHODS
    ]
    return lines, trl_interface.refusal((trl_interface.GRPOTrainer, trl_interface.RLOOTrainer))


def _untested() -> str:
    from ..trainers.versions import NEWEST_TESTED, OLDEST, is_untested, release

    if not is_untested(release()):
        return ""
    return (
        f" It is newer than the releases that this version was tested with ({OLDEST} to {NEWEST_TESTED}): the first step of a "
        "run will show whether the correction reaches the loss."
    )
