"""The public names: each resolves, is documented, and is where the list places it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import peft_mux
from tests.paths import ROOT

CLASSES = [name for name in peft_mux.__all__ if not name.startswith("_")]
FUNCTIONS = ("generate", "load_rows", "sweep")


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_is_a_class_or_function_of_the_package_and_documented_with_its_methods(name: str) -> None:
    found = getattr(peft_mux, name)
    assert inspect.isfunction(found) if name in FUNCTIONS else inspect.isclass(found)
    assert found.__name__ == name
    assert found.__module__.startswith("peft_mux.")
    # A dataclass without a docstring gets its signature for one.
    documented = found.__doc__ or ""
    assert len(documented.split()) >= 4
    assert not documented.startswith(f"{name}(")
    public = {key: value for key, value in vars(found).items() if not key.startswith("_")}
    methods = {key: one for key, one in public.items() if inspect.isfunction(one) or isinstance(one, property)}
    assert [key for key, one in methods.items() if not inspect.getdoc(one)] == []


def test_names_for_type_checkers_and_of_a_star_import_are_those_that_are_resolved_when_used() -> None:
    tree = ast.parse(Path(peft_mux.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peft_mux")
        for alias in node.names
    }
    assert typed == {name: f"peft_mux.{home}" for name, home in peft_mux._HOMES.items()}
    assert set(peft_mux._HOMES) == set(CLASSES)
    namespace: dict[str, object] = {}
    exec("from peft_mux import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(peft_mux.__all__) <= set(dir(peft_mux))
    with pytest.raises(AttributeError, match="no attribute 'MultiTaskTrainner'"):
        _ = peft_mux.MultiTaskTrainner
    assert not hasattr(peft_mux, "torch")


def test_the_installed_version_is_that_of_the_sources() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    declared = next(line.split('"')[1] for line in lines if line.startswith("version ="))
    assert peft_mux.__version__ in (declared, "0.0.0")


def test_the_errors_share_a_base_and_keep_built_in_kinds() -> None:
    errors = [getattr(peft_mux, name) for name in CLASSES if name.endswith("Error")]
    assert len(errors) >= 6
    assert all(issubclass(error, peft_mux.PeftMuxError) for error in errors)
    for error in (peft_mux.ConfigError, peft_mux.DataError, peft_mux.UnsupportedModelError):
        assert issubclass(error, ValueError)
    for error in (peft_mux.PlanError, peft_mux.MemoryBudgetError, peft_mux.CheckpointError):
        assert issubclass(error, RuntimeError)
