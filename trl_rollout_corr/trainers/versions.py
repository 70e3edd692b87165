"""
Supported releases of TRL, the differences between them, and TRL's own correction, which changes from release to
release.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ..settings.resolve import Settings
from ..settings.trl_correction import PREFIX_OF_TRL, SWITCH


# Tested minor releases of TRL, each with the newest vLLM for CPUs that TRL allows. The Makefile and the tests of
# documents and of CI read this table.
TESTED_VLLM = {
    "1.11": "0.27.1",
    "1.12": "0.27.1",
    "1.13": "0.28.0",
    "1.14": "0.30.0",
    "1.15": "0.31.0",
    "1.16": "0.31.0",
}
OLDEST, NEWEST_TESTED = next(iter(TESTED_VLLM)), next(reversed(TESTED_VLLM))
FIRST_UNSUPPORTED = "2"
# Advice in messages about a TRL outside this table
TESTED = "the tested releases: `pip install --constraint constraints.txt .` in a clone of trl-rollout-corr"


def release() -> Version:
    """Installed release of TRL. A development version counts as the release that follows it."""
    return Version(Version(version("trl")).base_version)


INSTALLED = release()


def outside_window(trl: Version, named: str) -> str | None:
    """Error message about a release of TRL that is too old or too new; `None` otherwise."""
    if Version(OLDEST) <= trl < Version(FIRST_UNSUPPORTED):
        return None
    works = f"trl-rollout-corr works with trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl {named}."
    if trl < Version(OLDEST):
        nearest = f'`pip install "trl=={OLDEST}.*"`, which works with vLLM up to {TESTED_VLLM[OLDEST]}'
        return f"{works} The release that is nearest to yours: {nearest}. Or install {TESTED}."
    return f"{works} Install {TESTED}."


def is_untested(trl: Version) -> bool:
    """True if a release of TRL is newer than the tested ones."""
    return trl.release[:2] > Version(NEWEST_TESTED).release


# TRL's own correction, which changes from release to release ---------------------------------------------------------


@contextmanager
def without_trl_correction(config: Any, settings: Settings) -> Iterator[None]:
    """
    Switch TRL's own correction off while a trainer of TRL reads its configuration, unless `rollout_correction` is
    `"trl"`. The configuration warned about its fields if the user set them.
    """
    if settings.by_trl:
        yield
        return
    before = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name.startswith(PREFIX_OF_TRL)}
    switches = [name for name, value in before.items() if value is True]
    try:
        for name in switches:
            setattr(config, name, False)
        yield
    finally:
        for name in switches:
            setattr(config, name, True)


def refuse_weights(batch: Mapping[str, Any]) -> None:
    """Refuse importance weights from TRL, because its correction is switched off."""
    weights = [key for key in batch if key.startswith("importance_sampling")]
    if weights:
        raise RuntimeError(
            f"trl {INSTALLED} put {', '.join(f'`{key}`' for key in weights)} into the batch: a correction of its own, "
            f"although `{SWITCH}` is switched off. Completions would be corrected twice. Switch it off in your "
            f"configuration, or install {TESTED}."
        )


def refuse_fused_loss(trainer: type, config: Any) -> None:
    """Refuse Liger's GRPO loss of TRL 1.11 to 1.13, which computes no log-probabilities."""
    if config.use_liger_kernel and hasattr(trainer, "compute_liger_loss"):
        raise ValueError(
            f"`use_liger_kernel` is True: trl {INSTALLED} then computes the loss of GRPO in one kernel, which rollout "
            "correction does not reach. Set it to False, or install trl 1.14 or newer."
        )
