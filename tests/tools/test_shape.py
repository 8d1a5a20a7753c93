"""What `tools/shape.py` counts, on small packages made for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import shape

SOURCE = '''"""A module."""

# A comment.
LIMIT = 3
"""Documents the constant."""


def used_once(x):
    """A function."""
    return [
        x,
        LIMIT,  # not a comment line
    ]


class Thing:
    """A class."""

    size: int
    """Documents the field."""

    def used_twice(self):
        """A method."""

        def inner():
            return self

        return inner() or used_once(1)

    def bare(self):
        return self.used_twice() or self.used_twice()
'''


def package(root: Path, **sources: str) -> Path:
    for name, text in sources.items():
        path = root / "peft_mux" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_sizes_entries_docstrings_circles_and_functions_with_one_reference_are_counted(tmp_path: Path) -> None:
    package(tmp_path, one=SOURCE, room__a="import peft_mux.room.b\n", room__b="def f():\n    import peft_mux.room.a\n")
    numbers = shape.source_numbers(tmp_path)
    assert numbers["modules"] == "3"
    assert numbers["functions"] == "5"
    assert numbers["public functions and classes without a docstring"] == "2"
    assert set(numbers["circle of imports"].split(" -> ")) == {"peft_mux.room.a", "peft_mux.room.b"}
    modules = shape.read_package(tmp_path)
    assert shape.num_code_lines(modules["peft_mux.one"]) == 1 + 5 + 2 + 4 + 2, "no blanks, comments and docstrings"
    assert "peft_mux/one.py:inner" in shape.with_one_reference(modules)


def test_checkouts_are_columns_and_folders_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = package(tmp_path / "old", one="X = 1\n"), package(tmp_path / "new", room__a="X = 1\nY = 2\n", b="")
    monkeypatch.setattr(sys, "argv", ["shape.py", str(old), str(new), "--folders", "--single"])
    shape.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [str(old), str(new)] in lines
    assert ["modules", "1", "2"] in lines
    assert ["room/a.py", "2", "1", "0"] in lines


@pytest.mark.slow
def test_a_run_of_this_checkout_is_counted() -> None:
    numbers = shape.run_numbers(Path(shape.__file__).parents[1])
    assert int(numbers["files entered by two steps of two tasks"]) > 10
    own, _, whole = numbers["own frames from train() to the backbone"].split()
    assert 0 < int(own) < int(whole)
