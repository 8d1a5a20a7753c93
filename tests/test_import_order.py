"""Who may import whom: the layers of the package, read from its sources and proven in fresh processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "peft_mux"
MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imported(module: str, *, at_import_only: bool = False) -> set[str]:
    """Return the dotted names that a module imports, `a.b` for `from a import b`.

    With `at_import_only`, what functions import when they are called and what only type checkers see is left out.
    """
    names: set[str] = set()
    for node in _nodes(tree(module), at_import_only):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                is_package = MODULES[module].name == "__init__.py"
                parts = module.split(".")
                base = parts[: len(parts) - node.level + is_package]
                home = ".".join([*base, *([home] if home else [])])
            names |= {f"{home}.{alias.name}" for alias in node.names}
    return names


def _nodes(node: ast.AST, at_import_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_import_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_import_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *_nodes(other, at_import_only))
            continue
        yield child
        yield from _nodes(child, at_import_only)


def in_folder(folder: str) -> list[str]:
    found = [name for name in MODULES if name == f"peft_mux.{folder}" or name.startswith(f"peft_mux.{folder}.")]
    assert found, f"there is no folder {folder} any more; this test would prove nothing"
    return found


def offenders(modules: list[str], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module in modules
        for name in sorted(imported(module))
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    ]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


# -------------------------------------------------------------------- sources


def test_the_scheduler_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "peft", "accelerate", "datasets")
    assert offenders(in_folder("scheduler"), heavy) == []


def test_the_scheduler_imports_nothing_of_the_package_that_brings_torch() -> None:
    allowed = ("peft_mux.scheduler", "peft_mux.errors", "peft_mux.compat")
    strangers = [
        f"{module} imports {name}"
        for module in in_folder("scheduler")
        for name in imported(module)
        if name.startswith("peft_mux") and not name.startswith(allowed)
    ]
    assert strangers == []


def test_kernels_import_only_torch_numpy_triton_and_one_another() -> None:
    allowed = sys.stdlib_module_names | {"torch", "numpy", "triton"}
    strangers = [
        f"{module} imports {name}"
        for module in in_folder("kernels")
        for name in sorted(imported(module))
        if name.split(".")[0] not in allowed and not name.startswith("peft_mux.kernels")
    ]
    assert strangers == []


def test_data_imports_nothing_of_the_model_the_engine_or_the_trainer() -> None:
    forbidden = tuple(
        f"peft_mux.{name}"
        for name in "modeling engine trainer trainer_inputs task_run task_setup backbone planning evaluation optim "
        "checkpoint callbacks ui cli demo".split()
    )
    assert offenders(in_folder("data"), forbidden) == []


def test_storage_imports_nothing_of_the_model_the_engine_or_the_trainer() -> None:
    forbidden = ("peft_mux.modeling", "peft_mux.engine", "peft_mux.trainer", "peft_mux.data")
    assert offenders(in_folder("storage"), forbidden) == []


def test_the_package_imports_neither_benchmarks_nor_tests() -> None:
    assert offenders(list(MODULES), ("benchmarks", "tests", "mux_lab", "pytest", "hypothesis")) == []


def test_every_module_of_the_package_that_is_imported_exists() -> None:
    missing = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imported(module)
        if name.split(".")[0] == "peft_mux" and name not in MODULES and name.rpartition(".")[0] not in MODULES
    ]
    assert missing == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {
        module: {name if name in MODULES else name.rpartition(".")[0] for name in imported(module, at_import_only=True)}
        & MODULES.keys() - {module}
        for module in MODULES
    }
    assert sum(map(len, graph.values())) > len(MODULES), "the imports were not read"
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


# ------------------------------------------------------------ fresh processes


@pytest.mark.parametrize("module", ["peft_mux", "peft_mux.scheduler.plan", "peft_mux.errors", "peft_mux.cli.main"])
def test_light_modules_are_imported_without_torch(module: str) -> None:
    heavy = run_python(
        f"import sys, {module}; print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    assert heavy == "[]"


def test_one_public_name_brings_only_what_it_needs() -> None:
    loaded = run_python("import sys; from peft_mux import Plan, ConfigError; print('torch' in sys.modules)")
    assert loaded == "False"


def test_a_kernel_is_imported_where_the_optional_libraries_are_absent() -> None:
    blocked = "datasets", "pulp", "bitsandbytes", "transformers", "peft"
    printed = run_python(
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import peft_mux.kernels.grouped_lora as kernel\nprint(callable(kernel.grouped_lora))"
    )
    assert printed == "True"


def test_the_trainer_is_imported_where_the_solver_the_plots_and_the_quantiser_are_absent() -> None:
    printed = run_python(
        "import sys\nfor name in ('pulp', 'matplotlib', 'bitsandbytes'): sys.modules[name] = None\n"
        "from peft_mux import MultiTaskTrainer\nprint(MultiTaskTrainer.__name__)"
    )
    assert printed == "MultiTaskTrainer"


def test_the_package_runs_as_a_module() -> None:
    assert "usage" in run_python(
        "import runpy, sys; sys.argv = ['peft_mux', '--help']\n"
        "try: runpy.run_module('peft_mux', run_name='__main__')\nexcept SystemExit as end: assert not end.code"
    )
