"""The names that `peft_mux.scheduler` hands on: each resolves when it is used, and none before."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from peft_mux import scheduler
from tests.children import run_code


def test_every_name_resolves_to_something_documented_of_its_home() -> None:
    for name in sorted(set(scheduler.__all__) - {"POLICIES"}):
        found = getattr(scheduler, name)
        assert inspect.isclass(found) or inspect.isfunction(found)
        assert found.__name__ == name
        assert found.__module__.startswith("peft_mux.scheduler.")
        assert len((found.__doc__ or "").split()) >= 4
        assert not (found.__doc__ or "").startswith(f"{name}("), f"{name} has no docstring of its own"
    assert set(scheduler.__all__) <= set(dir(scheduler))
    with pytest.raises(AttributeError, match=r"'peft_mux\.scheduler' has no attribute 'plan_task'"):
        _ = scheduler.plan_task


def test_names_for_type_checkers_are_those_that_are_resolved_when_used() -> None:
    tree = ast.parse(Path(scheduler.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peft_mux")
        for alias in node.names
    }
    assert typed == {name: f"peft_mux.scheduler.{home}" for name, home in scheduler._HOMES.items()}
    assert sorted(scheduler._HOMES) == sorted(scheduler.__all__)


def test_importing_the_folder_imports_nothing_of_it_and_using_every_name_no_torch() -> None:
    loaded = run_code(
        "import sys, peft_mux.scheduler\n"
        "print([name for name in sys.modules if name.startswith('peft_mux.scheduler.')\n"
        "       or name in ('numpy', 'pulp', 'torch', 'matplotlib')])\n"
        "from peft_mux.scheduler import *\n"
        "print(callable(plan_tasks), callable(dispatch), 'torch' in sys.modules)"
    )
    assert loaded == "[]\nTrue True False"
