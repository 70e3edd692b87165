"""verl's helper for rollout correction, out of its wheel: downloaded when it is needed, without verl's dependencies."""

import importlib.machinery
import subprocess
import sys
import types
import zipfile
from pathlib import Path


VERSION = "0.9.1"
FOLDER = Path(".cache/verl")
_HELPER = "verl.trainer.ppo.rollout_corr_helper"
_FUNCTIONAL = "verl.utils.torch_functional"
# What the two modules import besides torch. None of it is used by the functions that are timed.
_UNUSED = {
    "tensordict": ["TensorDict"],
    "verl.protocol": ["DataProto"],
    "verl.trainer.config.algorithm": ["RolloutCorrectionConfig"],
    "verl.utils.device": ["get_device_name", "get_torch_device"],
    "verl.workers.config.actor": ["PolicyLossConfig"],
}


def _wheel() -> Path:
    """The wheel, downloaded unless it is there."""
    wheel = FOLDER / f"verl-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
        subprocess.run([*command, f"verl=={VERSION}"], check=True)
    return wheel


def _stand_in(name: str, members: list[str]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    for member in members:
        setattr(module, member, type(member, (), {"from_dict": staticmethod(lambda tensors: tensors)}))
    return module


def load() -> types.ModuleType:
    """The module with verl's functions on tensors. Weights come as a dictionary instead of verl's `DataProto`."""
    names = {name.rsplit(".", i)[0] for name in (*_UNUSED, _HELPER, _FUNCTIONAL) for i in range(name.count(".") + 1)}
    for name in sorted(names):
        if not name.startswith("verl") and name in sys.modules:
            continue
        sys.modules[name] = _stand_in(name, _UNUSED.get(name, []))
    with zipfile.ZipFile(_wheel()) as wheel:
        for name in (_FUNCTIONAL, _HELPER):
            path = f"{name.replace('.', '/')}.py"
            module = sys.modules[name]
            exec(compile(wheel.read(path), f"verl-{VERSION}/{path}", "exec"), module.__dict__)
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    return sys.modules[_HELPER]
