"""Who may import whom: rooms one above the other, read from the sources and proven in fresh processes.

An import counts wherever it stands: at the top of a module, inside a function, or for type checkers only.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.children import run_code
from tests.paths import ROOT
from tools.shape import ASSEMBLING, VALUES, WINGS, core_to_wings

PACKAGE = ROOT / "peft_mux"

ROOMS = (
    "errors",
    "rendezvous",
    "user_code",
    "kernels",
    "data",
    "scheduler",
    "storage",
    "modeling",
    "losses",
    "adapters",
    "arguments",
    "from_trl",
    "task",
    "engine",
    "log",
    "checkpoint",
    "parallel",
    "trainer",
    "generation",
    "planning",
    "reporting",
    "calls",
    "sweeps",
    "demo",
    "serve",
    "cli",
    "__main__",
    "__init__",
)
"""The parts of the package, from the ground up: each imports only itself and what stands before it, except for
`ASSEMBLING`: they put the parts together."""

DELETED = {
    "serve": "peft_mux/serve tests/serve",
    "command line": "peft_mux/cli peft_mux/__main__.py peft_mux/demo tests/cli",
    "calls and sweeps": "peft_mux/calls.py peft_mux/sweeps.py tests/calls tests/sweeps",
}
"""Files and tests of wings that nothing else imports."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PATHS = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
Graph = Mapping[str, set[str]]
"""What each node imports."""


@cache
def imported(module: str) -> set[str]:
    """Return the dotted names that a module imports, `a.b` for `from a import b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(PATHS[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative imports are not read here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def module_graph() -> Graph:
    """Return which modules each module imports."""
    return {
        module: {name if name in PATHS else name.rpartition(".")[0] for name in imported(module)}
        & PATHS.keys() - {module}
        for module in PATHS
    }


def entry_graph(folder: str) -> Graph:
    """Return which entries of a folder (its files and its folders) import which, of all that it contains."""

    def entry(module: str) -> str | None:
        if module == folder:
            return "__init__"
        return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else None

    assembling = {f"peft_mux.{name}" for name in ASSEMBLING} if folder == "peft_mux" else set()
    graph: dict[str, set[str]] = {}
    for module, others in module_graph().items():
        if (name := entry(module)) is not None:
            graph.setdefault(name, set()).update(filter(None, map(entry, others if module not in assembling else ())))
    return {name: others - {name} for name, others in graph.items()}


def circle(graph: Graph) -> str:
    """Return a circle of a graph in words; "" where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


# -------------------------------------------------------------------- sources


def test_the_list_of_rooms_is_complete() -> None:
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert there == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


def test_every_room_imports_only_what_stands_before_it() -> None:
    graph = entry_graph("peft_mux")
    height = {room: place for place, room in enumerate(ROOMS)}
    upwards = [f"{room} imports {other}" for room in graph for other in graph[room] if height[other] > height[room]]
    assert upwards == []


def test_neither_modules_nor_the_entries_of_a_folder_import_one_another_in_a_circle() -> None:
    assert sum(map(len, module_graph().values())) > len(PATHS), "the imports were not read"
    assert circle({"a": {"b"}, "b": {"a"}}), "a circle would not be found"
    folders = [module for module, path in PATHS.items() if path.name == "__init__.py"]
    circles = [circle(module_graph()), *(circle(entry_graph(folder)) for folder in folders)]
    assert [one for one in circles if one] == []


def test_no_module_of_the_core_imports_a_wing_and_every_wing_is_there() -> None:
    assert core_to_wings(module_graph()) == []
    parts = [f"peft_mux.{part}" for part in " ".join([*WINGS.values(), *VALUES, *ASSEMBLING]).split()]
    assert [part for part in parts if part not in PATHS and part != "peft_mux.__init__"] == []


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("scheduler", "numpy pulp simpy matplotlib peft_mux.scheduler peft_mux.data.packing peft_mux.errors"),
        ("data.packing", "numpy peft_mux.data.packing peft_mux.errors"),
        ("kernels", "torch numpy triton peft_mux.kernels"),
        (
            "serve",
            "numpy torch transformers peft fastapi pydantic uvicorn google zstandard peft_mux.serve peft_mux.calls "
            "peft_mux.errors peft_mux.storage peft_mux.modeling.sampling "
            "peft_mux.generation.requests_and_completions",
        ),
    ],
)
def test_a_folder_imports_only_these_and_the_standard_library(folder: str, allowed: str) -> None:
    modules = [name for name in PATHS if f"{name}.".startswith(f"peft_mux.{folder}.")]
    assert modules, "the folder is no longer there"
    known = tuple(f"{name}." for name in (*sys.stdlib_module_names, *allowed.split()))
    strange = [(one, name) for one in modules for name in imported(one) if not f"{name}.".startswith(known)]
    assert strange == []


def test_a_plan_is_data_that_needs_nothing_but_units() -> None:
    todo, reached = ["peft_mux.scheduler.plan"], set[str]()
    while todo:
        reached.add(module := todo.pop())
        todo += module_graph()[module] - reached
    assert reached == {"peft_mux.scheduler.plan", "peft_mux.scheduler.units"}


def test_the_package_imports_neither_benchmarks_nor_tests() -> None:
    names = {name.split(".")[0] for module in PATHS for name in imported(module)}
    assert names.isdisjoint({"benchmarks", "tests", "tools", "pytest", "hypothesis"})


# ------------------------------------------------------------ fresh processes


@pytest.mark.slow
def test_without_three_wings_the_tests_of_the_core_pass(tmp_path: Path) -> None:
    for folder in ("peft_mux", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in " ".join(DELETED.values()).split():
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    tests = "tests/tasks/test_window.py tests/trainer/test_run.py tests/modeling/test_key_values.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_light_modules_and_names_are_imported_without_torch() -> None:
    modules = "peft_mux", "peft_mux.scheduler.plan_views", "peft_mux.errors", "peft_mux.cli.main"
    heavy = run_code(
        f"import importlib, sys\nfor module in {modules}:\n    importlib.import_module(module)\n"
        "    print([(module, name) for name in ('torch', 'transformers', 'peft') if name in sys.modules])\n"
        "from peft_mux import Plan, ConfigError\nprint('torch' in sys.modules)"
    )
    assert heavy.splitlines() == ["[]"] * 4 + ["False"]


def test_commands_that_look_at_a_run_or_ask_something_of_it_and_help_import_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "data", "task": "a", "run_step": 0}\n')
    names = "init validate plan train status pause resume remove add export doctor profile config-schema demo"
    names = [*names.split(), "keys"]
    run = str(tmp_path)
    lines = [
        ["--version"],
        ["--help"],
        *([name, "--help"] for name in names),
        ["status", run],
        ["status", run, "--json"],
        ["init", str(tmp_path / "first.yaml")],
        ["doctor"],
    ]
    lines += [[name, run, "a", *more] for name in ("pause", "resume", "remove", "add") for more in ([], ["--next"])]
    printed = run_code(
        "import contextlib, io, shutil, sys\nshutil.which = lambda name: None  # no GPU\n"
        f"from peft_mux.cli.main import main\nfor line in {lines}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        main(line)\n"
        "    assert out.getvalue() or line[0] in ('pause', 'resume', 'remove', 'add'), line\n"
        "heavy = 'torch', 'transformers', 'peft', 'accelerate', 'bitsandbytes', 'datasets', 'numpy'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert printed == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "absent"),
    [
        ("peft_mux.kernels.lora.reference", "grouped_lora_slices", "datasets pulp bitsandbytes transformers peft"),
        ("peft_mux", "MultiTaskTrainer", "pulp matplotlib bitsandbytes"),
    ],
)
def test_kernels_and_the_trainer_are_imported_where_libraries_that_they_do_not_need_are_absent(
    module: str, name: str, absent: str
) -> None:
    block = f"import sys\nfor name in {absent.split()}: sys.modules[name] = None\n"
    assert run_code(f"{block}from {module} import {name}\nprint({name}.__name__)") == name
