"""Allowed imports of each module."""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_rollout_corr
from tests.launching import HAS_ASYNCHRONOUS, run


PACKAGE = Path(trl_rollout_corr.__file__).parent
ROOT = Path(__file__).parents[1]
# The core decides the loss and its metrics. A module imports modules above it. What replays and pushes build on comes first
LEAVES = {
    "": ["messages", "door"],
    "settings": [
        "criteria",
        "presets",
        "thresholds",
        "trl_correction",
        "names",
        "fields",
        "resolve",
        "effects",
        "words",
        "unlikely",
        "config",
    ],  # so far without torch
    "correction": [
        "functional",
        "sums",
        "metrics",
        "groups",
        "age",
        "compute",
    ],  # so far without numpy and TRL
    "trainers": [
        "keys",
        "metadata",
        "ranks",
        "gradient_check",
        "completions",
        "forward_pass",
    ],
}
# What runs in the process of a server, too
IN_A_SERVER = {"pushes": ["reloading", "fingerprints"], "": ["worker"]}
# What makes choices of the sampler again, and what gives it weights
ROOMS = {
    "replay": [
        "seam",
        "routers",
        "sampled_experts",
        "router_hooks",
        "capture",
        "experts",
        "kept_tokens",
        "choices",
        "on_demand",
    ],
    "pushes": [
        "frozen_check",
        "weight_check",
        "merged_adapters",
        "colocated_engine",
        "server_api",
        "scoring_sampler",
        "rescore",
        "push_checks",
        "pushes",
        "to_vllm",
    ],
}
SEAM = {
    "trainers": [
        "model_checks",
        "observer",
        "watcher",
        "scoring",
        "versions",
        "quantised_engine",
        "engine_arguments",
        "trl_checks",
        "trl_interface",
        "vllm_engine",
        "visits",
        "age_notice",
        "batches",
        "mixin",
        "grpo",
        "rloo",
    ],
}
CORE = (LEAVES, IN_A_SERVER, ROOMS, SEAM)
# What observes, explains and translates. It may import the core, and tools above it
TOOLS = {
    "tools": [
        "formats",
        "recipes",
        "documents",
        "engine_checks",
        "bands",
        "run_facts",
        "decision",
    ],
    "tools.translation": [
        "trl",
        "verl",
        "counterparts",
        "setting_files",
        "own_settings",
        "dotted_settings",
        "trl_files",
        "convert",
    ],
    "tools.monitor": [
        "stock",
        "windows",
        "history",
        "texts",
        "rule",
        "conditions",
        "rules",
        "examine",
        "callback",
    ],
    "tools.dump": [
        "in_effect",
        "columns",
        "rows",
        "sequences",
        "folder",
        "sample",
        "claims",
        "reading",
        "writing",
        "import_verl",
    ],
    "tools.logs": ["tables", "trackers", "log_files"],
    "tools.diagnosis": [
        "observed",
        "measures",
        "location",
        "trends",
        "arrivals",
        "wrong_values",
        "positions",
        "subsets",
        "sampling",
        "drift",
        "changes",
        "precision",
        "causes",
        "other_causes",
        "ranking",
        "loading",
        "text",
        "trl_log",
        "command",
        "first_step",
    ],
    "tools.probe": ["parts", "set_up", "process", "probe"],
    "tools.analysis": ["recompute", "compare"],
    "tools.report": [
        "run",
        "token_tables",
        "examples",
        "page",
        "facts",
        "log_charts",
        "compose",  # so far without matplotlib
        "drawing",
        "html_page",
        "follow",
        "report",
    ],
}
# A trainer of its own, and the commands
OUTSIDE = {
    "asynchronous": [
        "checks",
        "packing",
        "placeholders",
        "trl_parts",
        "stopping",
        "samples",
        "server_pushes",
        "async_grpo",
    ],
    "axolotl": ["trainer", "plugin"],
    "": ["__main__"],
}


def names(*parts: dict[str, list[str]]) -> list[str]:
    """Modules in their order."""
    return [
        ".".join(filter(None, (room, name))) for part in parts for room, modules in part.items() for name in modules
    ]


ORDER = names(*CORE, TOOLS, {"tools": ["check"]}, OUTSIDE)
WITHOUT_TORCH = [
    *names({room: LEAVES[room] for room in ("", "settings")}),
    "tools.formats",
    "tools.recipes",
    "tools.documents",
    "tools.bands",
    "tools.run_facts",
    "tools.decision",
    *names({"tools.translation": TOOLS["tools.translation"]}),
    *(f"tools.monitor.{name}" for name in TOOLS["tools.monitor"] if name != "callback"),
    "__main__",
]
WITHOUT_MATPLOTLIB = [name for name in ORDER[: ORDER.index("tools.report.drawing")] if name.startswith("tools.report")]
MAY_IMPORT_TRL = (
    "trainers.",
    "replay.choices",
    "pushes.to_vllm",
    "asynchronous.",
    "axolotl.",
    "tools.check",
    "tools.diagnosis.first_step",
    "tools.dump.writing",
    "tools.monitor.callback",
    "tools.probe.process",
    "tools.probe.set_up",
    "tools.engine_checks",
)
WITHOUT_TRL = [name for name in ORDER if not name.startswith(MAY_IMPORT_TRL)]


# Modules of rooms of the core that a run without replay, monitor and adapter does not load
ALWAYS = ("seam", "on_demand", "pushes", "to_vllm")
ONLY_IF_ASKED = {room: [name for name in modules if name not in ALWAYS] for room, modules in ROOMS.items()}
WITHOUT_TOOLS = [
    "correction.compute",
    "trainers.grpo",
    "trainers.rloo",
    *(["asynchronous.async_grpo"] if HAS_ASYNCHRONOUS else []),
]


# Each part begins with nothing of the package loaded, and what is heavy comes late: libraries stay once they are loaded
IMPORTS = """
import importlib, json, sys, warnings

sys.modules["vllm"] = None  # no module of ours is imported with it alone, and it takes longer than all others
model, folder = sys.argv[1:3]
without_torch, without_matplotlib, without_trl, trainers = map(json.loads, sys.argv[3:])


def ours() -> list[str]:
    return [name for name in sys.modules if name.startswith("trl_rollout_corr")]


def forget():
    for name in [*ours(), *(name for name in sys.modules if name.partition(".")[0] == "tests")]:
        del sys.modules[name]


def first_to_load(heavy: list[str], modules: list[str]) -> str:
    forget()
    for module in modules:
        importlib.import_module(f"trl_rollout_corr.{module}")
        loaded = [name for name in heavy if name in sys.modules]
        if loaded:
            return f"{module} imports {loaded}"
    return ""


def loaded_by(module: str) -> list[str]:
    forget()
    importlib.import_module(f"trl_rollout_corr.{module}")
    return ours()


def loaded_by_training(**fields) -> list[str]:
    forget()
    from tests.tiny import StaleSampler
    from tests.training import TRAINERS, build

    build(*TRAINERS["grpo"], model, folder, sampler=StaleSampler(model), max_steps=1, **fields).train()
    return ours()


found = {
    "torch": first_to_load(["torch", "numpy", "pyarrow", "matplotlib"], without_torch),
    "matplotlib": first_to_load(["matplotlib"], without_matplotlib),
    "trl": first_to_load(["trl", "transformers", "accelerate"], without_trl),
    "loaded": {module: loaded_by(module) for module in trainers},
}
found["unwatched"] = {
    correction: loaded_by_training(rollout_correction=correction, rollout_monitor=None) for correction in ("auto", "default")
}
found["default"] = loaded_by_training(rollout_monitor="warn")
forget()
for name in [name for name in sys.modules if name.startswith("trl.experimental")]:
    del sys.modules[name]  # TRL warns when it is imported
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    exec("from trl_rollout_corr import *")
found["experimental"] = RolloutCorrectedAsyncGRPOTrainer._trl_class.__module__
found["told"] = [warning.category.__name__ for warning in told]
found["axolotl"] = [name for name in sys.modules if "axolotl" in name]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imports(tiny_model_path, tmp_path_factory) -> dict:
    """What is loaded, found in one process without pytest: a process of its own for each part takes a minute."""
    lists = [json.dumps(modules) for modules in (WITHOUT_TORCH, WITHOUT_MATPLOTLIB, WITHOUT_TRL, WITHOUT_TOOLS)]
    command = [sys.executable, "-c", IMPORTS, tiny_model_path, str(tmp_path_factory.mktemp("run"))]
    process = run(*command, *lists, TRL_EXPERIMENTAL_SILENCE="")
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_settings_and_their_translation_load_without_torch(imports):
    assert imports["torch"] == ""


def test_only_charts_load_matplotlib(imports):
    assert imports["matplotlib"] == ""


def test_all_but_the_trainers_loads_without_trl(imports):
    assert imports["trl"] == ""


def test_axolotl_is_not_imported_with_the_package(imports):
    assert imports["axolotl"] == []


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
def test_imports_of_this_package_do_not_warn_of_experimental_parts_of_trl(imports):
    assert "trl.experimental" in imports["experimental"]
    assert "TRLExperimentalWarning" not in imports["told"]


def imported(path: Path) -> Iterator[str]:
    """
    Modules of the package that a module imports, at its top or inside functions, or names in a string (not in a docstring),
    as paths from the package.
    """
    folder = path.parent.relative_to(PACKAGE).parts
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield from re.findall(r"\btrl_rollout_corr\.([a-z_]+(?:\.[a-z_]+)*)", node.value)
        whole = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):  # what is imported may be a module or a name in one
            above = [PACKAGE.name, *folder[: len(folder) - node.level + 1]] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            whole = [f"{module}.{alias.name}" for alias in node.names]
        yield from (name.removeprefix(f"{PACKAGE.name}.") for name in whole if name.startswith(f"{PACKAGE.name}."))


def module_of(path: Path) -> str:
    """Name of a module from the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_arrows_point_up_only():
    places = {name: place for place, name in enumerate(ORDER)}
    arrows = set()
    for path in PACKAGE.rglob("*.py"):
        name = module_of(path)
        for found in imported(path):
            target = next((one for one in (found, found.rpartition(".")[0]) if one in places), None)
            if name in places and target is not None and target != name and name != "door":
                assert places[target] < places[name], f"{name} imports {found}"
                arrows.add((name, target))
    assert {name for name, _ in arrows} | {target for _, target in arrows} >= {
        "messages",
        "tools.check",
        "trainers.mixin",
    }


def test_the_core_and_the_trainers_import_no_tool():
    """The door imports tools, when a setting asks for them. A name in a string is a type or a link, and is not imported."""
    for name in names(*CORE, {room: OUTSIDE[room] for room in ("asynchronous", "axolotl")}):
        if name != "door":
            path = PACKAGE / (name.replace(".", "/") + ".py")
            tools = [found for found in imported(path) if found.startswith("tools")]
            assert tools == [] or not re.search(r"^\s*(from|import) .*tools", path.read_text(), re.MULTILINE), (
                name,
                tools,
            )


def test_the_door_leads_to_tools_alone():
    path = PACKAGE / "door.py"
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        opened = [node.module or "" for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
        assert opened, function.name
        assert all(module.split(".")[0] == "tools" for module in opened), function.name


@pytest.mark.parametrize("module", WITHOUT_TOOLS)
def test_what_decides_the_loss_loads_no_tool(imports, module):
    loaded = imports["loaded"][module]
    assert f"trl_rollout_corr.{module}" in loaded
    assert [name for name in loaded if name.startswith("trl_rollout_corr.tools")] == []
    if module == "correction.compute":
        rooms = {name.split(".")[1] for name in loaded if "." in name}
        assert rooms <= {"correction", "settings", "messages", "door"}
        assert "trl_rollout_corr.settings.config" not in loaded


@pytest.mark.parametrize("correction", ["auto", "default"])
def test_a_training_without_a_monitor_loads_no_tool(imports, correction):
    loaded = imports["unwatched"][correction]
    assert "trl_rollout_corr.pushes.pushes" in loaded
    assert [name for name in loaded if name.startswith("trl_rollout_corr.tools")] == []
    assert not {f"trl_rollout_corr.pushes.{name}" for name in ONLY_IF_ASKED["pushes"]} & {*loaded}


def test_a_training_with_default_settings_loads_no_replay(imports):
    loaded = imports["default"]
    assert "trl_rollout_corr.pushes.push_checks" in loaded
    assert not {f"trl_rollout_corr.replay.{name}" for name in ONLY_IF_ASKED["replay"]} & {*loaded}


def test_replays_and_checks_of_pushes_touch_no_private_part_of_a_trainer():
    """`Pushes` takes to the trainer what the checks of pushes found, and they do not see the trainer at all."""
    for room, modules in ONLY_IF_ASKED.items():
        for name in modules:
            code = ast.parse((PACKAGE / room / f"{name}.py").read_text())
            read = [node for node in ast.walk(code) if isinstance(node, ast.Attribute)]
            owners = [(ast.unparse(node.value).split(".")[-1], node.attr) for node in read]
            private = [attribute for owner, attribute in owners if owner == "trainer" and attribute.startswith("_")]
            seen = [attribute for _, attribute in owners if attribute == "trainer"]
            assert private + seen == [], name


def test_every_module_has_its_place():
    found = {module_of(path) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert found == set(ORDER)


def test_each_file_class_and_function_has_a_name_of_its_own():
    """Except functions of the door, which are named after what they open, and functions that only their module uses."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    names = [path.name for path in paths]
    for path in paths:
        defined = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        names += [node.name for node in defined if not node.name.startswith("_") and module_of(path) != "door"]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_trl_is_imported_by_the_trainers_scripts_and_the_process_of_the_probe_alone():
    for path in PACKAGE.rglob("*.py"):
        if not module_of(path).startswith(MAY_IMPORT_TRL):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {name.split(".")[0] for name in names} & {"trl", "transformers", "accelerate"}, path


def test_public_names():
    for name in trl_rollout_corr.__all__:
        assert getattr(trl_rollout_corr, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'RolloutCorrector'"):
        trl_rollout_corr.RolloutCorrector


def test_code_and_prose_of_the_package_have_one_width():
    """Tables of tests may be wider."""
    wide = [
        path.name for path in PACKAGE.rglob("*.py") if max(map(len, path.read_text().splitlines()), default=0) > 119
    ]
    assert wide == []


def test_docstrings_begin_with_a_noun_or_a_verb():
    rooms = ("correction", "replay", "pushes", "trainers")
    for path in (path for room in rooms for path in (PACKAGE / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "").split(" ")[0]
                assert first not in {"What", "Who", "Which", "How", "Where", "Whether"}, f"{path.name}: {node}"


def test_examples_import_public_names_only():
    """Examples are copied by users."""
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl_rollout_corr":
                assert node.module == "trl_rollout_corr", f"{path.name} imports {node.module}"
